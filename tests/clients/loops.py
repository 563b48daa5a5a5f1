"""Cases of other training loops: Accelerate, Lightning, two models that both train, DDP and FSDP2 on two processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.clients.parts import STEPS, Block, Case, Outcome, batches, block, llama, run_lines, write_ds


def watched(model: nn.Module) -> tuple[nn.Module, list[float]]:
    """Return a model, and the list to which each forward appends its loss from now on."""
    losses: list[float] = []
    model.register_forward_hook(lambda module, args, output: losses.append(output.loss.item()))
    return model, losses


def accelerate(memplug: Block | None, stage: int | None) -> Outcome:
    """Train with Accelerate, and with DeepSpeed if there is a ZeRO stage."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    write_ds(memplug, stage, optimizer=False)
    model, losses = watched(llama())
    left = run_lines(
        "Accelerate" if stage is None else "Accelerate, with DeepSpeed",
        memplug,
        Accelerator=functools.partial(Accelerator, cpu=True) if stage is None else Accelerator,
        DeepSpeedPlugin=DeepSpeedPlugin,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        loader=torch.utils.data.DataLoader(batches(STEPS), batch_size=None),
    )
    model = left["accelerator"].unwrap_model(left["model"])
    return {"losses": losses, "model": model, "steps": STEPS}


def lightning(memplug: Block | None, several: bool = False, accumulation: int = 1, regions: bool = True) -> Outcome:
    """Train with Lightning; `several` trains two models in turn, each with an optimizer of its own."""
    import lightning.pytorch as pl

    write_ds(memplug if regions or memplug is None else {**memplug, "tokenwise": {"enabled": False}})
    module = (_pair if several else _single)(pl)()
    left = run_lines(
        "Lightning",
        memplug,
        Trainer=functools.partial(pl.Trainer, **_QUIET),
        module=module,
        loader=torch.utils.data.DataLoader(batches(STEPS), batch_size=None),
        settings={"max_epochs": 1, **({"accumulate_grad_batches": accumulation} if accumulation > 1 else {})},
    )
    assert left["trainer"].global_step == STEPS // accumulation * (2 if several else 1)
    return {"losses": module.losses, "model": module, "steps": STEPS // accumulation}


def broken_off(memplug: Block | None) -> Outcome:
    """Train with Lightning; the fourth step fails."""
    import lightning.pytorch as pl

    from memplug.integrations.lightning import MemplugCallback

    module = _single(pl)(fails_at=3)
    callback = MemplugCallback(memplug)
    trainer = pl.Trainer(callbacks=[callback] if memplug is not None else [], **_QUIET)
    try:
        trainer.fit(module, torch.utils.data.DataLoader(batches(STEPS), batch_size=None))
    except ArithmeticError:
        stage = callback.session.stage.value if memplug is not None else None
        return {"losses": module.losses, "model": module, "steps": 3, "stage": stage}
    raise AssertionError("the step did not fail")


_QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def _single(pl: Any) -> type:
    class Single(pl.LightningModule):
        def __init__(self, fails_at: int | None = None) -> None:
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
        def __init__(self) -> None:
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


def two_models(memplug: Block | None) -> Outcome:
    """Train two models, each attached by itself; the second model's loss weights the first model's loss."""
    import memplug as package

    models = [llama(), llama(seed=1)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    sessions = [package.attach(model, memplug) for model in models] if memplug is not None else []
    return _in_turn(models, _plain_steps(optimizers), sessions)


def two_engines(memplug: Block | None, stage: int) -> Outcome:
    """Train two DeepSpeed engines, made as an unchanged script makes engines."""
    import json
    from pathlib import Path

    import deepspeed

    import memplug as package

    write_ds(memplug, stage)
    if memplug is not None:
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
        with torch.no_grad():  # as reinforcement learning asks a critic before the actor learns
            weight = models[1](**batch).loss
        for i, (model, end) in enumerate(zip(models, ends, strict=True)):
            loss = model(**batch).loss * (weight if i == 0 else 1)
            end(loss)
            losses.append(loss.item())
            for session in sessions[i : i + 1]:
                session.step()
    both = nn.ModuleList(getattr(model, "module", model) for model in models)
    return {"losses": losses, "model": both, "steps": STEPS}


def wrapped(memplug: Block | None, title: str) -> Outcome:
    """Run the lines of the README's section on a wrapper; each rank has its own batches."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    write_ds(memplug)
    model, losses = watched(llama())
    left = run_lines(
        title,
        memplug,
        DistributedDataParallel=nn.parallel.DistributedDataParallel,
        fully_shard=fully_shard,
        AdamW=functools.partial(torch.optim.AdamW, lr=1e-3),
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        loader=batches(STEPS, seed=1 + dist.get_rank()),
    )
    return {"losses": losses, "model": left["model"], "steps": STEPS}


def cases() -> Iterator[tuple[str, Case]]:
    """Yield the cases with their names; cases without a ZeRO stage do not use DeepSpeed."""
    for stage in (None, 2, 3):
        run = functools.partial(accelerate, stage=stage)
        name = "Accelerate" if stage is None else f"Accelerate, ZeRO {stage}"
        yield name, Case((run,), ("accelerate",), planned=block())
    yield "Lightning", Case((lightning,), ("lightning",), planned=block())
    yield "Lightning, accumulation", Case((functools.partial(lightning, accumulation=2),), ("lightning",))
    yield "Lightning, two optimizers", Case((functools.partial(lightning, several=True),), ("lightning",))
    without_regions = functools.partial(lightning, regions=False)
    yield "Lightning, arena alone", Case((without_regions,), ("lightning",))
    yield "Lightning, broken off", Case((broken_off,), ("lightning",))
    yield "two models", Case((two_models,))
    for stage in (0, 3):
        yield f"two engines, ZeRO {stage}", Case((functools.partial(two_engines, stage=stage),))
    for title in ("DDP", "FSDP2"):
        yield title, Case((functools.partial(wrapped, title=title),), ranks=2, planned=block())
