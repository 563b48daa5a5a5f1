"""Cases of transformers' Trainer and of what is built on it: PEFT's LoRA, TRL's SFT, DPO and GRPO."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.clients.parts import LENGTH, block, llama, run_lines, samples, sentences, tokenizer, write_ds

STEPS = 8
Outcome = dict[str, Any]


def settings(steps: int = STEPS, **fields: Any) -> dict[str, Any]:
    """Arguments of every trainer."""
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
    """The list that gets the loss of every micro-batch of any Trainer from now on."""
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


def trainer(
    memplug: bool,
    stage: int | None,
    accumulation: int = 1,
    steps: int = STEPS,
    evaluated: bool = False,
    resume: bool = False,
    alpha: Any = 1,
    **fields: Any,
) -> Outcome:
    """Trainer; without a ZeRO stage, with the callback."""
    from transformers import Trainer, TrainingArguments

    write_ds(block(alpha) if memplug else None, stage, accumulation)
    if evaluated:
        fields = {"eval_strategy": "steps", "eval_steps": 5, **fields}
    losses = record_losses()
    left = run_lines(
        "Trainer" if stage is None else "Trainer, with DeepSpeed",
        memplug,
        Trainer=Trainer,
        TrainingArguments=TrainingArguments,
        model=llama(),
        data=samples(2 * STEPS * accumulation),
        validation=samples(8, seed=2),
        resume=resume,
        settings=settings(steps, gradient_accumulation_steps=accumulation, **fields),
    )
    evaluations = [entry["eval_loss"] for entry in left["trainer"].state.log_history if "eval_loss" in entry]
    return {"losses": losses, "model": left["trainer"].model, "evaluations": evaluations}


def lora(memplug: bool, stage: int | None) -> Outcome:
    """PEFT's adapters on two kinds of layers; without a ZeRO stage, with the callback."""
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    write_ds(block() if memplug else None, stage)
    losses, data = record_losses(), samples(2 * STEPS)
    names = {"Trainer": Trainer, "TrainingArguments": TrainingArguments, "settings": settings(), "data": data}
    if stage is None:
        model = get_peft_model(llama(), LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"]))
        left = run_lines("Trainer", memplug, model=model, validation=None, **names)
    else:
        lines = {"LoraConfig": LoraConfig, "get_peft_model": get_peft_model}
        left = run_lines("PEFT", memplug, model=llama(), **lines, **names)
    return {"losses": losses, "model": left["trainer"].model}


def sft(memplug: bool, stage: int, **fields: Any) -> Outcome:
    """TRL's SFT with packing."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    write_ds(block() if memplug else None, stage)
    losses = record_losses()
    left = run_lines(
        "TRL",
        memplug,
        SFTConfig=SFTConfig,
        SFTTrainer=SFTTrainer,
        model=llama(),
        data=Dataset.from_dict({"text": sentences(64, 24)}),
        tokenizer=tokenizer(),
        settings=settings(max_length=2 * LENGTH, **fields),
    )
    return {"losses": losses, "model": left["trainer"].model}


def dpo(memplug: bool, stage: int) -> Outcome:
    """TRL's DPO, whose reference model is an engine without an optimizer."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    write_ds(block() if memplug else None, stage)
    losses = record_losses()
    count = 2 * STEPS
    columns = {"prompt": 6, "chosen": 16, "rejected": 12}
    data = {name: sentences(count, words, seed) for seed, (name, words) in enumerate(columns.items())}
    if memplug:
        install()
    trainer = DPOTrainer(
        llama(),
        ref_model=llama(seed=1),
        args=DPOConfig("out", deepspeed="ds.json", gradient_checkpointing=False, **settings()),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(),
    )
    trainer.train()
    return {"losses": losses, "model": trainer.model}


def grpo(memplug: bool, stage: int | None) -> Outcome:
    """TRL's GRPO, which generates between steps; without a ZeRO stage, with the callback."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    write_ds(block() if memplug else None, stage)
    losses = record_losses()
    if memplug and stage is not None:
        install()
    fields = {} if stage is None else {"deepspeed": "ds.json"}
    trainer = GRPOTrainer(
        llama(),
        reward_funcs=lambda completions, **others: [float(len(set(text.split()))) for text in completions],
        args=GRPOConfig(
            "out", num_generations=2, max_completion_length=12, gradient_checkpointing=False, beta=0.04, **fields, **settings()
        ),
        train_dataset=Dataset.from_dict({"prompt": sentences(2 * STEPS, 6)}),
        processing_class=tokenizer(),
    )
    if memplug and stage is None:
        add_callback(trainer)
    trainer.train()
    return {"losses": losses, "model": trainer.model}


def checkpointed(memplug: bool) -> Outcome:
    """TRL with its default of gradient checkpointing."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from memplug.errors import ConflictError

    write_ds(block())
    trainer = SFTTrainer(
        llama(),
        args=SFTConfig("out", **settings()),
        train_dataset=Dataset.from_dict({"text": sentences(64, 24)}),
        processing_class=tokenizer(),
    )
    add_callback(trainer)
    try:
        trainer.train()
    except ConflictError as error:
        return {"refused": str(error), "losses": [], "model": trainer.model}
    return {"refused": None, "losses": [], "model": trainer.model}


def install() -> None:
    """As the README's lines do."""
    import memplug

    memplug.install()


def add_callback(trainer: Any) -> None:
    """As the README's lines do."""
    from memplug.integrations.transformers import MemplugCallback

    trainer.add_callback(MemplugCallback("ds.json"))


def cases() -> Iterator[tuple[str, Callable[..., Outcome] | list[Callable[..., Outcome]]]]:
    """By name; a list has one process after the other in the same folder."""
    for stage in (1, 2, 3):
        yield f"Trainer, ZeRO {stage}", functools.partial(trainer, stage=stage)
        yield (
            f"Trainer, ZeRO {stage}, accumulation, validation",
            functools.partial(trainer, stage=stage, accumulation=2, evaluated=True),
        )
    yield "Trainer", functools.partial(trainer, stage=None)
    yield "Trainer, accumulation, validation", functools.partial(trainer, stage=None, accumulation=2, evaluated=True)
    for stage in (None, 2):
        saved = functools.partial(trainer, stage=stage, save_strategy="steps", save_steps=4, alpha=1)
        yield (
            "Trainer, resumed" + ("" if stage is None else f", ZeRO {stage}"),
            [functools.partial(saved, steps=4), functools.partial(saved, resume=True)],
        )
    for stage in (None, 2, 3):
        yield "LoRA" + ("" if stage is None else f", ZeRO {stage}"), functools.partial(lora, stage=stage)
    yield "SFT, ZeRO 2", functools.partial(sft, stage=2)
    for stage in (0, 2, 3):
        yield f"DPO, ZeRO {stage}", functools.partial(dpo, stage=stage)
    for stage in (None, 2):
        yield "GRPO" + ("" if stage is None else f", ZeRO {stage}"), functools.partial(grpo, stage=stage)
    yield "SFT, checkpointed", checkpointed
