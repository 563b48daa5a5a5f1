"""Trains with the arena on several streams at once, and prints how many accesses were not ordered: of which a test
leaves out one wait of the arena after the other.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import memplug
from tests.cudasim import device
from tests.cudasim.device import Schedule, scheduled
from tests.serving import owned, reserved_bytes

BLOCK = {"enabled": True, "plan_dir": False, "tokenwise": {"enabled": False}}
SIZE, LARGE = 1 << 16, 1 << 19  # elements; large ones have segments that the arena fits into


class Beside(nn.Module):
    """A layer whose second half runs on another stream, and whose input that stream reads last."""

    def __init__(self, side: torch.cuda.Stream | None):
        super().__init__()
        self.weight, self.side = nn.Parameter(torch.ones(SIZE, device="cuda")), side

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main, y = torch.cuda.current_stream(), (x * self.weight).sin()
        if self.side is None:
            return (y * 2).cos() + y
        aside = y * 2
        self.side.wait_stream(main)
        u = y.tanh()
        torch.ones(LARGE, device="cuda").exp()  # its bytes are planned for the other stream, which does not wait for it
        with torch.cuda.stream(self.side):
            torch.ones(LARGE, device="cuda").exp()
            z = (aside.cos() * 2).exp() * 1e-3
            for _ in range(3):
                z = z * 0.5 + 1e-3
        aside.record_stream(self.side)
        del aside  # its bytes are planned for others while the other stream reads
        main.wait_stream(self.side)
        z.record_stream(main)
        return u + z


def train(reserve: torch.cuda.Stream, streams: int) -> int:
    """How many accesses were not ordered.

    Args:
        reserve: whose memory the arena's is, outside of it.
        streams: that the layers run on.
    """
    main, side, third = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    model = nn.Sequential(*(Beside(side if streams > 1 else None) for _ in range(3)))
    x, kept = torch.ones(SIZE, device="cuda"), []
    before = device.violations()
    with memplug.attach(model, BLOCK) as session:
        for step in range(12):
            out = model(x)
            out.mean().backward()
            model.zero_grad()
            with torch.cuda.stream(reserve):
                if step == 0:  # before anything is recorded: what the allocator has cached of this stream is busy yet
                    busy = [torch.zeros(LARGE, device="cuda").add_(1) for _ in range(8)]
                    kept.append(busy[0])
                    del busy
                session.step()
        assert session.report()["arena_served"] > 0
    assert owned(out)
    out = out.detach()
    if streams > 1:
        third.wait_stream(main)
        with torch.cuda.stream(third):
            out.sin().cos()
        out.record_stream(third)
    else:
        out.mul_(2)
    del out  # the last block of the arena: its memory goes back
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
            default = torch.cuda.default_stream()
            found += train(default if sys.argv[1] == "default" else torch.cuda.Stream(), int(sys.argv[2]))
    sys.stdout.write(f"unordered {found}\n")
