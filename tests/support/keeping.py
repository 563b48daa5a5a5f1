"""A small training whose script keeps tensors of its steps; one function for each choice of tensors."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import memplug
from tests.support.serving import reserved_bytes

Keeper = Callable[["Training"], None]


class Block(nn.Module):
    """A residual block with a few operators."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@dataclass(eq=False)
class Training:
    """One training step, as a script sees it.

    Attributes:
        step: the step's number.
        tokens: the step's input.
        out: the model's output.
        kept: tensors that the script keeps.
        inside: tensors that hooks keep while the step runs; emptied before each step.
    """

    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    step: int = 0
    tokens: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    out: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    kept: Any = field(default_factory=list)
    inside: list[torch.Tensor] = field(default_factory=list)


# -- what scripts keep -------------------------------------------------------------------------------------------------


def features(t: Training) -> None:
    """Keep a copy of a few numbers of every step."""
    t.kept.append(t.out[:, -1].detach().clone())


def gradients(t: Training) -> None:
    """Keep the gradients of one layer of every step."""
    t.kept.append([p.grad for p in t.model[1].parameters()])


def losses(t: Training) -> None:
    """Keep the losses of all steps, as tensors."""
    t.kept.append(t.loss.detach())


def graphs_of_late(t: Training) -> None:
    """Keep the last three losses, with their graphs."""
    t.kept = collections.deque(t.kept, 3)
    t.kept.append(t.loss)


def graphs_at_times(t: Training) -> None:
    """Keep each fortieth loss with its graph, for three steps."""
    if t.step % 40 == 0:
        t.kept.append(t.loss)
    if t.step % 40 == 3:
        t.kept.clear()


def window(t: Training) -> None:
    """Keep a replay buffer of twenty steps' outputs."""
    t.kept = collections.deque(t.kept, 20)
    t.kept.append(t.out.detach())


def every_seventh(t: Training) -> None:
    """Keep a copy of each seventh step's output."""
    if t.step % 7 == 0:
        t.kept.append(t.out.detach().clone())


def activation_at_times(t: Training) -> None:
    """Keep an activation of each fiftieth step itself, not a copy."""
    if t.step % 50 == 20:
        t.kept.append(t.inside[0])


def activation_view(t: Training) -> None:
    """Keep a view of an activation of every step; the view keeps the activation's whole memory."""
    t.kept.append(t.inside[0][0, 0])


def evaluation(t: Training) -> None:
    """Keep predictions and losses of each evaluation, batch by batch."""
    if t.step % 25 == 24:
        with torch.no_grad():
            for _ in range(6):
                out = t.model(t.tokens)
                t.kept += [out, out.square().mean()]


def evaluation_cleared(t: Training) -> None:
    """Keep predictions and losses of an evaluation until the next one."""
    if t.step % 25 == 24:
        t.kept.clear()
        evaluation(t)


def sizes(t: Training) -> None:
    """Keep copies whose sizes keep changing."""
    t.kept.append(t.out.detach().flatten()[: 64 + 37 * (t.step * 7 % 23)].clone())


def freed_at_once(t: Training) -> None:
    """Keep copies of all steps, until every hundredth step frees them."""
    features(t)
    every_seventh(t)
    if t.step % 100 == 99:
        t.kept.clear()


def later(t: Training) -> None:
    """Keep, of every step from the fiftieth on, an activation and a copy of the output."""
    if t.step >= 50:
        t.kept += [t.inside[0], t.out.detach().clone()]


def backward_hooks(t: Training) -> None:
    """Keep tensors that hooks make in backward: in each ninth step all of them, in the other steps one tensor."""
    t.kept += t.inside[1:] if t.step % 9 == 0 else t.inside[1:2]


def averages(t: Training) -> None:
    """Keep the last five averages of the weights; each step makes a new one."""
    t.kept = collections.deque(t.kept, 5)
    former = t.kept[-1] if t.kept else [p.detach() for p in t.model.parameters()]
    with torch.no_grad():
        t.kept.append([0.9 * a + 0.1 * p for a, p in zip(former, t.model.parameters(), strict=True)])


def optimizer_state(t: Training) -> None:
    """Keep a copy of the optimizer's state of each thirtieth step."""
    if t.step % 30 == 11:
        t.kept.append([{name: v.clone() for name, v in state.items()} for state in t.optimizer.state.values()])


KEEPERS: tuple[Keeper, ...] = (
    features,
    gradients,
    losses,
    graphs_of_late,
    graphs_at_times,
    window,
    every_seventh,
    activation_at_times,
    activation_view,
    evaluation,
    evaluation_cleared,
    sizes,
    freed_at_once,
    later,
    backward_hooks,
    averages,
    optimizer_state,
)


# -- training ----------------------------------------------------------------------------------------------------------


@dataclass
class Kept:
    """The results of a training whose script keeps tensors.

    Attributes:
        losses: the losses of all steps.
        served: for each step, the bytes that the arena served, and the bytes that were requested while it served.
        reserved: bytes of all arenas of the process after each step.
        report: the session's report after the last step.
        kept: tensors that the script holds after the last step.
    """

    losses: list[float] = field(default_factory=list)
    served: list[tuple[int, int]] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    kept: Any = None

    def share(self, steps: int) -> float:
        """Return the fraction of the last steps' bytes that the arena served."""
        last = self.served[-steps:]
        return sum(served for served, _ in last) / sum(asked for _, asked in last)


def train_keeping(
    keeper: Keeper, block: dict[str, Any], steps: int, length: Callable[[int], int] = lambda step: 16
) -> Kept:
    """Train on random tokens with a script that keeps tensors; equal arguments give equal results.

    Args:
        keeper: called after backward and before the optimizer.
        block: the session's block.
        steps: number of steps.
        length: returns the length of a step's sequences.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), Block(), Block())
    t = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    tokens, run, before = torch.Generator().manual_seed(1), Kept(), (0, 0)
    with memplug.attach(model, block) as session, _hooks(t):
        for t.step in range(steps):
            t.inside.clear()
            t.tokens = torch.randint(0, 64, (2, length(t.step)), generator=tokens)
            t.out = model(t.tokens)
            t.loss = (t.out.sin() - 0.01 * t.tokens[..., None]).square().mean()
            t.loss.backward()
            keeper(t)
            t.optimizer.step()
            t.optimizer.zero_grad()
            run.losses.append(t.loss.item())
            session.step()
            if block["enabled"]:
                run.report = session.report().as_dict()
                sums = _sums(run.report)
                run.served.append((sums[0] - before[0], sums[1] - before[1]))
                before = sums
            run.reserved.append(reserved_bytes())
    run.kept = t.kept
    t.out = t.loss = t.tokens  # drops the graph, whose hooks hold this training
    t.inside.clear()
    return run


def _sums(report: dict[str, Any]) -> tuple[int, int]:
    served = sum(report[f"arena_{name}_bytes"] for name in ("served", "dynamic", "reusable"))
    return served, served + report["arena_fallback_bytes"]


@contextlib.contextmanager
def _hooks(t: Training) -> Iterator[None]:
    """Append an activation of the first block, and tensors that are made in backward, to `inside`."""

    def forward(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:  # false in an evaluation
            t.inside.append(out.detach())
            out.register_hook(lambda gradient: t.inside.extend([gradient * 2, gradient.sum(-1)]))

    hooks = [t.model[1].up.register_forward_hook(forward)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def values(kept: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors among the kept objects."""
    if isinstance(kept, torch.Tensor):
        yield kept
    elif isinstance(kept, dict):
        yield from itertools.chain.from_iterable(values(each) for each in kept.values())
    else:
        yield from itertools.chain.from_iterable(values(each) for each in kept)
