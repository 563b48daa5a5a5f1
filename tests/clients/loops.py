"""Cases of other loops in one process: Accelerate, Lightning, two models that both train."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.clients.parts import batches, block, llama, run_lines, write_ds

STEPS = 8
Outcome = dict[str, Any]


def watched(model: nn.Module) -> tuple[nn.Module, list[float]]:
    """A model, and the list that gets the loss of each of its forwards from now on."""
    losses: list[float] = []
    model.register_forward_hook(lambda module, args, output: losses.append(output.loss.item()))
    return model, losses


def accelerate(memplug: bool, stage: int | None) -> Outcome:
    """Accelerate, with DeepSpeed where there is a ZeRO stage."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DummyOptim

    write_ds(block() if memplug else None, stage)
    model, losses = watched(llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if stage is None else DummyOptim(model.parameters())
    left = run_lines(
        "Accelerate" if stage is None else "Accelerate, with DeepSpeed",
        memplug,
        Accelerator=functools.partial(Accelerator, cpu=True),
        DeepSpeedPlugin=DeepSpeedPlugin,
        model=model,
        optimizer=optimizer,
        loader=torch.utils.data.DataLoader(batches(STEPS), batch_size=None),
    )
    return {"losses": losses, "model": left["accelerator"].unwrap_model(left["model"])}


def lightning(memplug: bool, several: bool = False, fails_at: int | None = None, **fields: Any) -> Outcome:
    """Lightning; `several` makes two models, each with an optimizer, that are stepped in turn."""
    import lightning.pytorch as pl

    write_ds(block() if memplug else None)
    module = (_pair if several else _single)(pl)(fails_at)
    names: dict[str, Any] = {}
    left = run_lines(
        "Lightning",
        memplug,
        Trainer=functools.partial(pl.Trainer, **_QUIET),
        module=module,
        loader=torch.utils.data.DataLoader(batches(STEPS), batch_size=None),
        settings={"max_epochs": 1, **fields},
        **names,
    )
    return {"losses": module.losses, "model": module, "global_step": left["trainer"].global_step}


_QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def _single(pl: Any) -> type:
    class Single(pl.LightningModule):
        def __init__(self, fails_at: int | None) -> None:
            super().__init__()
            self.model, self.losses, self.fails_at = llama(), [], fails_at

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if index == self.fails_at:
                raise ArithmeticError("a failing step")
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.model(**batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Single


def _pair(pl: Any) -> type:
    class Pair(pl.LightningModule):
        def __init__(self, fails_at: int | None) -> None:
            super().__init__()
            self.first, self.second, self.losses = llama(), llama(seed=1), []
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            for model, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
                loss = model(**batch).loss
                self.losses.append(loss.item())
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (self.first, self.second)]

    return Pair


def two_models(memplug: bool) -> Outcome:
    """Two models that both train, each attached by itself, the one on what the other gives out."""
    import memplug as package

    models = [llama(), llama(seed=1)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    sessions = [package.attach(model, block()) for model in models] if memplug else []
    return _in_turn(models, _plain_steps(optimizers), sessions)


def two_engines(memplug: bool, stage: int) -> Outcome:
    """Two DeepSpeed engines that both train, as an unchanged script makes them."""
    import json
    from pathlib import Path

    import deepspeed

    import memplug as package

    write_ds(block() if memplug else None, stage)
    if memplug:
        package.install()
    config = json.loads(Path("ds.json").read_text())
    models = [llama(), llama(seed=1)]
    engines = [
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0] for model in models
    ]

    def end(engine: Any, loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return _in_turn(engines, [functools.partial(end, engine) for engine in engines], [])


def _plain_steps(optimizers: list[torch.optim.Optimizer]) -> list[Callable[[torch.Tensor], None]]:
    def end(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return [functools.partial(end, optimizer) for optimizer in optimizers]


def _in_turn(models: list[Any], ends: list[Callable[[torch.Tensor], None]], sessions: list[Any]) -> Outcome:
    losses = []
    for batch in batches(STEPS):
        for i, (model, end) in enumerate(zip(models, ends, strict=True)):
            loss = model(**batch).loss
            if i == 1:
                with torch.no_grad():  # as a critic judges what the actor has learned
                    loss = loss * models[0](**batch).loss
            end(loss)
            losses.append(loss.item())
            for session in sessions[i : i + 1]:
                session.step()
    return {"losses": losses, "model": nn.ModuleList(getattr(model, "module", model) for model in models)}


def cases() -> Iterator[tuple[str, Callable[..., Outcome]]]:
    """By name."""
    for stage in (None, 2, 3):
        yield "Accelerate" + ("" if stage is None else f", ZeRO {stage}"), functools.partial(accelerate, stage=stage)
    yield "Lightning", lightning
    yield "Lightning, accumulation", functools.partial(lightning, accumulate_grad_batches=2)
    yield "Lightning, two optimizers", functools.partial(lightning, several=True)
    yield "two models", two_models
    for stage in (0, 3):
        yield f"two engines, ZeRO {stage}", functools.partial(two_engines, stage=stage)
