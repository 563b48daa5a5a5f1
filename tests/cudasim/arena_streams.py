"""Trains with the arena on several streams, and prints the number of unordered accesses.

Each argument is a set of ways to train (see `train`). A test runs the program with one wait of the arena left out at a
time.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import memplug
from tests.cudasim import device
from tests.cudasim.device import Schedule, scheduled
from tests.support.serving import owned, reserved_bytes

BLOCK = {"enabled": True, "plan_dir": False, "tokenwise": {"enabled": False}}
STEPS = 12
SIZE, LARGE = 1 << 16, 1 << 19  # elements; the arena fits into the segments of `LARGE` tensors


def scratch(stream: torch.cuda.Stream) -> torch.Tensor:
    """Return a tensor that only this stream uses, and for which no other stream waits."""
    with torch.cuda.stream(stream):
        return torch.ones(LARGE, device="cuda").exp()


class Beside(nn.Module):
    """A layer whose second half runs on another stream, which is the last to read that half's input."""

    def __init__(self, side: torch.cuda.Stream | None):
        super().__init__()
        self.weight, self.side = nn.Parameter(torch.ones(SIZE, device="cuda")), side

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main, y = torch.cuda.current_stream(), (x * self.weight).sin()
        if self.side is None:
            return (y * 2).cos() + y
        aside = y * 2
        self.side.wait_stream(main)
        for _ in range(3):  # most bytes are then the main stream's, and the plan puts the other stream's beside them
            scratch(main)
        with torch.cuda.stream(self.side):
            scratch(self.side)
            z = (aside.cos() * 2).exp() * 1e-3
            for _ in range(3):
                z = z * 0.5 + 1e-3
        aside.record_stream(self.side)
        del aside  # the plan puts later tensors at these bytes, which the other stream still reads
        u = y.tanh()
        main.wait_stream(self.side)
        z.record_stream(main)
        return u + z


def step_of(model: nn.Module, beside: torch.cuda.Stream) -> torch.Tensor:
    """Run forward and backward; before and after them run work on another stream, for which no stream waits.

    Returns:
        The model's output.
    """
    scratch(beside)
    out = model(torch.ones(SIZE, device="cuda"))
    out.mean().backward()
    model.zero_grad()
    scratch(beside)
    return out


def train(ways: set[str]) -> int:
    """Train, and return how many accesses were unordered.

    Args:
        ways: "side": layers run on a second stream too; "aside": the arena's memory is reserved on a stream of its own;
            "checked": the arena's checks are on.
    """
    main, side, third = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    reserve = torch.cuda.Stream() if "aside" in ways else main
    model = nn.Sequential(*(Beside(side if "side" in ways else None) for _ in range(3)))
    before, kept = device.violations(), []
    block = BLOCK | {"arena": {"checks": "checked" in ways}}
    with memplug.attach(model, block) as session:
        for step in range(STEPS):
            out = step_of(model, side if "side" in ways else main)
            # requests that the plan lacks: they get reusable space among the other stream's planned bytes
            if "side" in ways and step == STEPS - 2:
                lent = [scratch(main) for _ in range(8)]
                assert any(owned(each) for each in lent)
                del lent
            with torch.cuda.stream(reserve):
                if step == 0:  # before the first recording: queued work still uses memory in this stream's cache
                    busy = [torch.zeros(LARGE, device="cuda").add_(1) for _ in range(8)]
                    kept.append(busy[0])
                    del busy
                session.step()
        assert session.report().arena.served > 0
    assert owned(out)
    out = out.detach()
    if "side" in ways:
        third.wait_stream(main)
        with torch.cuda.stream(third):
            out.sin().cos()
        out.record_stream(third)
    else:
        out.mul_(2)
    del out  # the arena's last block is free, so the arena releases its memory
    assert reserved_bytes() == 0
    with torch.cuda.stream(reserve):
        after = [torch.zeros(size, device="cuda") for size in (SIZE, LARGE) for _ in range(40)]
    torch.cuda.synchronize()
    del after, kept
    return device.violations() - before


if __name__ == "__main__":
    found = 0
    for schedule in (Schedule("eager"), Schedule("computefirst")):
        with scheduled(schedule):
            found += sum(train(set(ways.split())) for ways in sys.argv[1:])
    sys.stdout.write(f"unordered {found}\n")
