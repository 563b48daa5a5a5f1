"""Trains a Llama-2 or a Mixtral on text with DeepSpeed and memplug.

Start it with a launcher, for example `torchrun --nproc-per-node 2 examples/llama2/train.py`; README.md says more.
"""

import argparse
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import checkpoint
import deepspeed
import torch
import torch.distributed as dist
import yaml
from data import Batches, ByteTokenizer, load_tokens, split
from deepspeed.accelerator import get_accelerator
from report import make_report, render
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

log = logging.getLogger("llama2")
ROOT = Path(__file__).resolve().parents[2]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        default=ROOT / "configs/models/tiny.yaml",
        help="fields of LlamaConfig or MixtralConfig, as YAML",
    )
    add("--deepspeed_config", type=Path, default=ROOT / "configs/ds_tiny.json", help="DeepSpeed's JSON")
    add("--steps", type=int, default=60, help="optimizer steps, counted from the first run's start")
    add("--seq-len", type=int, default=256, help="tokens of a sequence")
    add("--data", type=Path, help="file or folder of text; if not given, Python's own standard library")
    add("--save-dir", type=Path, help="folder of the checkpoints, shared by all ranks; one is saved at the end")
    add("--save-every", type=int, default=0, help="steps between checkpoints; 0: at the end only")
    add("--resume", action="store_true", help="go on from the latest checkpoint in --save-dir, if there is one")
    add("--eval-every", type=int, default=0, help="steps between validations; 0: at the end only")
    add("--eval-batches", type=int, default=4, help="micro-batches of a rank in one validation")
    add("--seed", type=int, default=0, help="of the weights and of the order of the data")
    add("--memplug", choices=("install", "attach", "none"), default="install", help="how memplug gets in")
    add("--loss-log", type=Path, help="file to add a JSON line per step to, and the report")
    add("--zero-stage", type=int, choices=(0, 1, 2, 3), help="instead of the JSON's")
    add("--alpha", help="instead of the JSON's memplug.tokenwise.alpha: from 0 to 1, or auto")
    add("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)), help="set by the launcher")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start me with torchrun, with deepspeed, or with a script in launch/")
    if args.save_dir is None and (args.resume or args.save_every):
        parser.error("--resume and --save-every need --save-dir")
    return args


def load_deepspeed_config(args: argparse.Namespace) -> dict[str, Any]:
    """Reads DeepSpeed's JSON, which holds the memplug block, and applies what the command line overrides."""
    config = json.loads(args.deepspeed_config.read_text())
    if args.zero_stage is not None:
        config.setdefault("zero_optimization", {})["stage"] = args.zero_stage
    if args.alpha is not None:
        alpha = args.alpha if args.alpha == "auto" else float(args.alpha)
        config.setdefault("memplug", {}).setdefault("tokenwise", {})["alpha"] = alpha
    return config


def init_process_group(local_rank: int) -> torch.device:
    """Joins the other ranks and returns this rank's device."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # DeepSpeed would first compile a shared-memory all-reduce, which takes longer than training the tiny model.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo")
        return torch.device("cpu")
    accelerator.set_device(local_rank)
    deepspeed.init_distributed(accelerator.communication_backend_name())
    return torch.device(accelerator.device_name(local_rank))


def set_up_logging() -> None:
    level = logging.INFO if dist.get_rank() == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed calls collectives by names that newer torch deprecates, at every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def build_model(args: argparse.Namespace, ds_config: dict[str, Any], device: torch.device) -> PreTrainedModel:
    """Builds the model with random weights, the same for every ZeRO stage; with ZeRO-3, no rank holds all of them."""
    fields = yaml.safe_load(args.model.read_text())
    if "num_local_experts" in fields:  # the loss that balances the experts counts
        model_class, config = MixtralForCausalLM, MixtralConfig(**fields, use_cache=False, output_router_logits=True)
    else:
        model_class, config = LlamaForCausalLM, LlamaConfig(**fields, use_cache=False)
    if config.vocab_size < ByteTokenizer.vocab_size:
        raise ValueError(f"{args.model}: vocab_size is {config.vocab_size}, bytes need {ByteTokenizer.vocab_size}")
    config.max_position_embeddings = max(config.max_position_embeddings, args.seq_len)
    dtype = torch.bfloat16 if ds_config.get("bf16", {}).get("enabled") else torch.float32
    zero3 = ds_config.get("zero_optimization", {}).get("stage") == 3
    with deepspeed.zero.Init(config_dict_or_path=ds_config, dtype=dtype, enabled=zero3), device:
        model = model_class._from_config(config, dtype=dtype)
    # zero.Init rounds the rotary frequencies to the dtype of the weights: make them anew outside of it.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    # It also cuts each weight up before transformers has initialized it: initialize here, module by module.
    torch.manual_seed(args.seed)
    for module in model.modules():
        weights = list(module.parameters(recurse=False))
        with torch.no_grad(), deepspeed.zero.GatheredParameters(weights, modifier_rank=0, enabled=zero3):
            model._init_weights(module)
    return model


def start(args: argparse.Namespace) -> tuple[deepspeed.DeepSpeedEngine, Any]:
    """Returns the DeepSpeed engine and memplug's session, which is None with `--memplug none`."""
    device = init_process_group(args.local_rank)
    set_up_logging()
    ds_config = load_deepspeed_config(args)
    model = build_model(args, ds_config, device)
    if args.memplug != "none":
        import memplug  # not above: with `--memplug none` this is a plain DeepSpeed script
    if args.memplug == "install":
        memplug.install()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    # Once installed, memplug is at work in the engine already, and attach returns the session that it has.
    session = memplug.attach(engine) if args.memplug != "none" else None
    return engine, session


def load_data(engine: deepspeed.DeepSpeedEngine, args: argparse.Namespace) -> tuple[Batches, Batches]:
    """Returns this rank's batches to train on and to validate with."""
    train_tokens, validation_tokens = split(load_tokens(args.data))
    where = {
        "seq_len": args.seq_len,
        "micro_batch": engine.train_micro_batch_size_per_gpu(),
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "seed": args.seed,
    }
    return Batches(tokens=train_tokens, **where), Batches(tokens=validation_tokens, **where)


def run_batches(engine: deepspeed.DeepSpeedEngine, batches: Batches, indices: range, train: bool) -> float:
    """Runs micro-batches through the model and returns their mean loss over all ranks.

    To train, `indices` are the micro-batches of one optimizer step: DeepSpeed accumulates their gradients and lets
    the optimizer step after the last.
    """
    total = torch.zeros((), device=engine.device)
    for index in indices:
        tokens = batches[index].to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        if train:
            engine.backward(loss)
            engine.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / (len(indices) * batches.world_size)


@torch.no_grad()
def validate(engine: deepspeed.DeepSpeedEngine, batches: Batches, count: int) -> float:
    engine.eval()
    loss = run_batches(engine, batches, range(min(count, len(batches))), train=False)
    engine.train()
    return loss


def resume(engine: deepspeed.DeepSpeedEngine, args: argparse.Namespace, data_order: dict[str, int]) -> int:
    """Restores the latest checkpoint, if --resume asks for it and there is one; returns the steps done before."""
    tag = checkpoint.latest(args.save_dir) if args.save_dir else None
    if tag is None:
        if args.resume:
            log.info("no checkpoint in %s yet: starting from the beginning", args.save_dir)
        return 0
    if not args.resume:
        raise FileExistsError(f"{args.save_dir} holds the checkpoint {tag}: add --resume, or choose another --save-dir")
    state = checkpoint.load(engine, args.save_dir)
    if state["data_order"] != data_order:
        log.warning("the data goes on in a new order: %s had %s, this run has %s", tag, state["data_order"], data_order)
    log.info("resumed from %s", tag)
    return state["step"]


def train(
    engine: deepspeed.DeepSpeedEngine, args: argparse.Namespace, train_set: Batches, validation_set: Batches
) -> tuple[list[float], list[float]]:
    """Trains until --steps; returns the loss and the seconds of each step that this run made."""
    accumulation = engine.gradient_accumulation_steps()
    data_order = {**train_set.order(), "gradient_accumulation_steps": accumulation}
    done = resume(engine, args, data_order)
    losses, step_s = [], []
    watched = dist.get_rank() == 0 and sys.stderr.isatty()
    with logging_redirect_tqdm(), tqdm(total=args.steps, initial=done, unit="step", disable=not watched) as bar:
        for step in range(done + 1, args.steps + 1):
            started = time.perf_counter()
            indices = range((step - 1) * accumulation, step * accumulation)
            losses.append(run_batches(engine, train_set, indices, train=True))
            step_s.append(time.perf_counter() - started)
            show(bar, step, losses[-1])
            write_log(args, {"step": step, "loss": losses[-1]})
            if args.save_dir and (step == args.steps or (args.save_every and step % args.save_every == 0)):
                checkpoint.save(engine, args.save_dir, {"step": step, "data_order": data_order})
            if args.eval_every and step % args.eval_every == 0 and step < args.steps:
                log.info("step %d, validation loss %.4f", step, validate(engine, validation_set, args.eval_batches))
    return losses, step_s


def show(bar: tqdm, step: int, loss: float) -> None:
    """Moves the bar on, or now and then logs a line where no one watches it."""
    bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
    bar.update()
    if bar.disable and (step % max(1, bar.total // 10) == 0 or step in (1, bar.total)):
        log.info("step %d of %d, loss %.4f", step, bar.total, loss)


def write_log(args: argparse.Namespace, entry: dict[str, Any]) -> None:
    """Adds a line to --loss-log; floats keep all their digits."""
    if args.loss_log and dist.get_rank() == 0:
        with open(args.loss_log, "a") as file:
            file.write(json.dumps(entry) + "\n")


def main() -> None:
    args = parse_args()
    engine, session = start(args)
    train_set, validation_set = load_data(engine, args)
    losses, step_s = train(engine, args, train_set, validation_set)
    if losses:
        report = make_report(engine, losses, step_s, args.seq_len)
        report["validation_loss"] = validate(engine, validation_set, args.eval_batches)
        report["memplug"] = session.report() if session else None
        write_log(args, {"report": report})
        if dist.get_rank() == 0:
            sys.stdout.write(render(report))
    else:
        log.info("nothing left to do: the checkpoint has all %d steps", args.steps)
    if session:
        session.detach()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
