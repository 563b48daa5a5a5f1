"""Checkpoints that a kill cannot break: written aside, renamed when whole, and only then pointed to.

    save_dir/latest         the name of the checkpoint to resume from, replaced atomically
    save_dir/step-00000060  a whole checkpoint: DeepSpeed's files and the random state of every rank
    save_dir/saving         a checkpoint that is being written, or was being written when the run died

`latest` has the name and format that DeepSpeed's own tools read, so `zero_to_fp32.py` works in the folder.
"""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

KEEP = 2
_SAVING = "saving"
_POINTER = "latest"


def latest(save_dir: Path) -> str | None:
    """Return the name of the checkpoint to resume from, or None where there is none yet."""
    pointer = save_dir / _POINTER
    return pointer.read_text().strip() if pointer.is_file() else None


def ranks_of(save_dir: Path, tag: str) -> int:
    """Return how many ranks saved a checkpoint."""
    return len(list((save_dir / tag).glob("random_state_rank*.pt")))


def save(engine: Any, save_dir: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint that `load` continues from; all ranks call it.

    Whenever the processes are killed, `latest` names a whole checkpoint: this one, or the one before it.

    Args:
        engine: the DeepSpeed engine.
        save_dir: a folder that all ranks share.
        state: values that `load` returns to the script, the same on every rank; "step", the number of optimizer steps
            done so far, gives the checkpoint its name.
    """
    aside = save_dir / _SAVING
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    torch.save(_random_state(), _random_file(aside))
    engine.save_checkpoint(str(save_dir), tag=_SAVING, client_state=state, save_latest=False)
    dist.barrier()
    if dist.get_rank() == 0:
        _publish(save_dir, f"step-{state['step']:08d}")
    dist.barrier()


def load(engine: Any, save_dir: Path) -> dict[str, Any]:
    """Restore model, optimizer, scheduler and random state from the latest checkpoint; all ranks call it.

    Returns:
        The `state` that was given to `save`.

    Raises:
        FileNotFoundError: there is no checkpoint, or it was written by fewer ranks.
    """
    tag = latest(save_dir)
    if tag is None:
        raise FileNotFoundError(f"no checkpoint in {save_dir}: nothing to resume from")
    random_file = _random_file(save_dir / tag)
    if not random_file.is_file():
        raise FileNotFoundError(f"{random_file} is missing: resume with the number of ranks that saved {tag}")
    path, state = engine.load_checkpoint(str(save_dir), tag=tag)
    if path is None:
        raise FileNotFoundError(f"DeepSpeed found no checkpoint in {save_dir / tag}")
    _set_random_state(torch.load(random_file, weights_only=True))
    return state


def _publish(save_dir: Path, tag: str) -> None:
    # An older folder of that name is no valid checkpoint: its run died before it moved the pointer.
    shutil.rmtree(save_dir / tag, ignore_errors=True)
    os.rename(save_dir / _SAVING, save_dir / tag)
    pointer = save_dir / f"{_POINTER}.new"
    with open(pointer, "w") as file:
        file.write(tag)
        file.flush()
        os.fsync(file.fileno())
    os.replace(pointer, save_dir / _POINTER)
    names = sorted(folder.name for folder in save_dir.glob("step-*"))
    kept = [name for name in names if name <= tag][-KEEP:]
    for name in set(names) - set(kept):
        shutil.rmtree(save_dir / name)


def _random_file(folder: Path) -> Path:
    return folder / f"random_state_rank{dist.get_rank():05d}.pt"


def _random_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "device": get_accelerator().get_rng_state(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    get_accelerator().set_rng_state(state["device"])
