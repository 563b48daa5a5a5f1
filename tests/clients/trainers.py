"""Cases of transformers' Trainer and of its derivatives: PEFT's LoRA, TRL's SFT, DPO and GRPO."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from tests.clients.parts import (
    LENGTH,
    STEPS,
    Block,
    Case,
    Outcome,
    block,
    llama,
    run_lines,
    samples,
    sentences,
    tokenizer,
    write_ds,
)


def settings(steps: int = STEPS, **fields: Any) -> dict[str, Any]:
    """Return the arguments of every trainer."""
    return {
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **fields,
    }


def record_losses() -> list[float]:
    """Return a list to which any Trainer appends the loss of every micro-batch from now on."""
    from transformers import Trainer

    losses: list[float] = []
    original = Trainer.training_step

    @functools.wraps(original)
    def training_step(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = original(*args, **kwargs)
        losses.append(loss.item())
        return loss

    Trainer.training_step = training_step
    return losses


def outcome(trainer: Any, losses: list[float], accumulation: int = 1) -> Outcome:
    """Return the losses, the model and the number of steps of any trainer."""
    return {"losses": losses, "model": trainer.model, "steps": len(losses) // accumulation}


def trainer(
    memplug: Block | None,
    stage: int | None,
    accumulation: int = 1,
    steps: int = STEPS,
    evaluated: bool = False,
    resume: bool = False,
    **fields: Any,
) -> Outcome:
    """Train with Trainer; without a ZeRO stage, with memplug's callback."""
    from transformers import Trainer, TrainingArguments

    write_ds(memplug, stage, accumulation)
    if evaluated:
        fields = {"eval_strategy": "steps", "eval_steps": 5, **fields}
    losses = record_losses()
    left = run_lines(
        "Trainer" if stage is None else "Trainer, with DeepSpeed",
        memplug,
        Trainer=Trainer,
        TrainingArguments=TrainingArguments,
        model=llama(),
        data=samples(4 * STEPS),
        validation=samples(8, seed=2),
        resume=resume,
        settings=settings(steps, gradient_accumulation_steps=accumulation, **fields),
    )
    evaluations = [entry["eval_loss"] for entry in left["trainer"].state.log_history if "eval_loss" in entry]
    return {**outcome(left["trainer"], losses, accumulation), "evaluations": evaluations}


def lora(memplug: Block | None, stage: int | None) -> Outcome:
    """Train PEFT's adapters on attention and MLP layers; without a ZeRO stage, with memplug's callback."""
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    write_ds(memplug, stage)
    losses, data = record_losses(), samples(2 * STEPS)
    names = {"Trainer": Trainer, "TrainingArguments": TrainingArguments, "settings": settings(), "data": data}
    if stage is None:
        model = get_peft_model(llama(), LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"]))
        left = run_lines("Trainer", memplug, model=model, validation=None, resume=False, **names)
    else:
        lines = {"LoraConfig": LoraConfig, "get_peft_model": get_peft_model}
        left = run_lines("PEFT", memplug, model=llama(), **lines, **names)
    return outcome(left["trainer"], losses)


def sft(memplug: Block | None, stage: int, **fields: Any) -> Outcome:
    """Train with TRL's SFT and packing."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    write_ds(memplug, stage)
    losses = record_losses()
    left = run_lines(
        "TRL",
        memplug,
        SFTConfig=SFTConfig,
        SFTTrainer=SFTTrainer,
        model=llama(),
        data=Dataset.from_dict({"text": sentences(64, 15)}),
        tokenizer=tokenizer(),
        settings=settings(max_length=2 * LENGTH, **fields),
    )
    return outcome(left["trainer"], losses)


def dpo(memplug: Block | None, stage: int) -> Outcome:
    """Train with TRL's DPO, whose reference model is an engine without an optimizer."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    write_ds(memplug, stage)
    losses = record_losses()
    count = 2 * STEPS
    columns = {"prompt": 6, "chosen": 16, "rejected": 16}
    data = {name: sentences(count, words, seed) for seed, (name, words) in enumerate(columns.items())}
    if memplug is not None:
        install()
    trainer = DPOTrainer(
        llama(),
        ref_model=llama(seed=1),
        args=DPOConfig("out", deepspeed="ds.json", **settings()),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(),
    )
    trainer.train()
    return outcome(trainer, losses)


def grpo(memplug: Block | None, stage: int | None) -> Outcome:
    """Train with TRL's GRPO, which generates between steps; without a ZeRO stage, with memplug's callback."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    write_ds(memplug, stage)
    losses = record_losses()
    if memplug is not None and stage is not None:
        install()
    llama().save_pretrained("start")  # TRL loads the reference model by the name of the trained model
    fields = {} if stage is None else {"deepspeed": "ds.json"}
    trainer = GRPOTrainer(
        "start",
        reward_funcs=lambda completions, **others: [float(len(set(text.split()))) for text in completions],
        args=GRPOConfig(
            "out",
            num_generations=2,
            max_completion_length=12,
            beta=0.04,
            **fields,
            **settings(),
        ),
        train_dataset=Dataset.from_dict({"prompt": sentences(2 * STEPS, 6)}),
        processing_class=tokenizer(),
    )
    if memplug is not None and stage is None:
        add_callback(trainer)
    trainer.train()
    return outcome(trainer, losses)


def refused(memplug: Block | None) -> Outcome:
    """Train with TRL's default of gradient checkpointing, which the block refuses."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from memplug.errors import ConflictError

    write_ds(block(alpha=1, checkpointing="refuse"))
    trainer = SFTTrainer(
        llama(),
        args=SFTConfig("out", **settings()),
        train_dataset=Dataset.from_dict({"text": sentences(64, 15)}),
        processing_class=tokenizer(),
    )
    add_callback(trainer)
    try:
        trainer.train()
    except ConflictError as error:
        return {"refused": str(error), "losses": [], "model": trainer.model}
    return {"refused": None, "losses": [], "model": trainer.model}


def install() -> None:
    """Install memplug as the lines of the README do."""
    import memplug

    memplug.install()


def add_callback(trainer: Any) -> None:
    """Add the callback as the lines of the README do."""
    from memplug.integrations.transformers import MemplugCallback

    trainer.add_callback(MemplugCallback("ds.json"))


def cases() -> Iterator[tuple[str, Case]]:
    """Yield the cases with their names; cases without a ZeRO stage do not use DeepSpeed."""

    def at(name: str, stage: int | None) -> str:
        return name if stage is None else f"{name}, ZeRO {stage}"

    for stage in (None, 1, 2, 3):
        yield at("Trainer", stage), Case((functools.partial(trainer, stage=stage, accumulation=2),))
        # a plan needs more steps in a row than there are between two validations
        validated = functools.partial(trainer, stage=stage, steps=15, evaluated=True)
        yield at("Trainer, validation", stage), Case((validated,), planned=block(warmup_steps=2, policy_steps=2))
    for stage in (None, 2, 3):
        saved = functools.partial(trainer, stage=stage, save_strategy="steps", save_steps=STEPS)
        parts = (functools.partial(saved, steps=STEPS), functools.partial(saved, steps=2 * STEPS, resume=True))
        yield at("Trainer, resumed", stage), Case(parts)
    yield "Trainer, DDP", Case((functools.partial(trainer, stage=None, accumulation=2),), ranks=2)
    for stage in (None, 2, 3):
        ranks = 2 if stage == 3 else 1  # ZeRO 3 gathers weights from another rank
        run = functools.partial(lora, stage=stage)
        yield at("LoRA", stage), Case((run,), ("peft",), ranks=ranks, planned=block())
    yield at("SFT", 2), Case((functools.partial(sft, stage=2),), ("trl",), planned=block())
    yield "SFT, refused", Case((refused,), ("trl",))
    for stage in (0, 2, 3):
        yield at("DPO", stage), Case((functools.partial(dpo, stage=stage),), ("trl",))
    for stage in (None, 2):
        yield at("GRPO", stage), Case((functools.partial(grpo, stage=stage),), ("trl",))
