"""Train a Llama, a Mixtral or a Qwen3 on text with DeepSpeed and memplug.

Start it with a launcher, for example `torchrun --nproc-per-node 2 examples/llama2/train.py`; README.md says more.
"""

import argparse
import logging
import sys
import time
import warnings
from typing import Any

import checkpoint
import context
import deepspeed
import torch
import torch.distributed as dist
from checks import Inputs, Ranks, agree, describe, make_batches
from data import Batches
from deepspeed.accelerator import get_accelerator
from report import make_report, render, write_log
from settings import parse_args, read
from tiled_loss import tile_loss
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

log = logging.getLogger("llama2")
ATTENTION = {"sdpa": "sdpa", "flash": "flash_attention_2"}  # the command line's names -> Hugging Face's


def init_process_group(local_rank: int) -> torch.device:
    """Join the other ranks, and return this rank's device."""
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
    """Let rank 0 log its progress, and all ranks their warnings."""
    level = logging.INFO if dist.get_rank() == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed calls collectives by names that newer torch deprecates, at every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def build_model(args: argparse.Namespace, inputs: Inputs, device: torch.device) -> PreTrainedModel:
    """Build the model, the same for every ZeRO stage; with ZeRO 3 no device holds all of it.

    The weights are random, or those of --weights. Rank 0 reads these into its host memory and broadcasts them.
    """
    fields = {**inputs.shape, "use_cache": False}
    if fields.get("num_local_experts"):  # adds the loss that balances the experts
        model_class = MixtralForCausalLM
        config = MixtralConfig.from_dict({**fields, "output_router_logits": True})
    elif fields.get("model_type") == "qwen3":
        model_class, config = Qwen3ForCausalLM, Qwen3Config.from_dict(fields)
    else:
        model_class, config = LlamaForCausalLM, LlamaConfig.from_dict(fields)
    config.max_position_embeddings = max(config.max_position_embeddings, args.seq_len)
    dtype = torch.bfloat16 if inputs.config.get("bf16", {}).get("enabled") else torch.float32
    zero3 = inputs.config.get("zero_optimization", {}).get("stage") == 3
    with deepspeed.zero.Init(config_dict_or_path=inputs.config, dtype=dtype, enabled=zero3), device:
        model = model_class._from_config(config, dtype=dtype, attn_implementation=ATTENTION[args.attention])
    # zero.Init rounds the rotary frequencies to the dtype of the weights: make them anew outside of it.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    trained = None
    if args.weights and dist.get_rank() == 0:
        trained = model_class.from_pretrained(args.weights, config=config, dtype=dtype, local_files_only=True)
    # zero.Init also partitions each weight before transformers has initialized it: initialize here, module by module.
    torch.manual_seed(args.seed)
    for name, module in model.named_modules():
        weights = list(module.parameters(recurse=False))
        with torch.no_grad(), deepspeed.zero.GatheredParameters(weights, modifier_rank=0, enabled=zero3):
            if not args.weights:
                model._init_weights(module)
            elif trained is not None:  # DeepSpeed broadcasts to the other ranks
                for own, read_in in zip(weights, trained.get_submodule(name).parameters(recurse=False), strict=True):
                    own.copy_(read_in)
    return tile_loss(model, args.tiled_loss)


def start(args: argparse.Namespace) -> tuple[deepspeed.DeepSpeedEngine, Any, tuple[Batches, Batches]]:
    """Return the engine, memplug's session and this rank's batches.

    With `--memplug none` the session is None.
    """
    device = init_process_group(args.local_rank)
    set_up_logging()
    inputs = read(args, Ranks.of(args))
    agree(inputs, args, log)  # nothing has been built yet
    model = build_model(args, inputs, device)
    if args.memplug != "none":
        import memplug  # only here: with `--memplug none` this is a plain DeepSpeed script
    if args.memplug == "install":
        memplug.install()
    groups = context.share_attention(model, args.context, inputs.config["train_micro_batch_size_per_gpu"])
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=inputs.config, mpu=groups
    )
    # Once installed, memplug has attached to the engine already, and attach returns its session.
    session = memplug.attach(engine) if args.memplug != "none" else None
    batches = make_batches(
        inputs.tokens,
        seq_len=args.seq_len,
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        seed=args.seed,
        **context.readers(args.context),
    )
    return engine, session, batches


def run_batches(engine: deepspeed.DeepSpeedEngine, batches: Batches, indices: range, train: bool) -> float:
    """Run micro-batches through the model, and return their mean loss over all ranks.

    In training, `indices` are the micro-batches of one optimizer step: DeepSpeed accumulates their gradients and lets
    the optimizer step after the last.
    """
    total = torch.zeros((), device=engine.device)
    for index in indices:
        tokens = batches[index].to(engine.device)
        loss = context.loss_of(engine, tokens)
        if train:
            engine.backward(loss)
            engine.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / (len(indices) * batches.world_size)


@torch.no_grad()
def validate(engine: deepspeed.DeepSpeedEngine, batches: Batches, count: int) -> float:
    """Return the mean loss over `count` validation micro-batches per rank."""
    engine.eval()
    loss = run_batches(engine, batches, range(min(count, len(batches))), train=False)
    engine.train()
    return loss


def resume(engine: deepspeed.DeepSpeedEngine, args: argparse.Namespace, data_order: dict[str, int]) -> int:
    """Restore the latest checkpoint if --resume asks for it, and return the number of steps already done."""
    tag = checkpoint.latest(args.save_dir) if args.resume else None
    if tag is None:
        if args.resume:
            log.info("no checkpoint in %s yet: starting from the beginning", args.save_dir)
        return 0
    state = checkpoint.load(engine, args.save_dir)
    if state["data_order"] != data_order:
        log.warning("the data goes on in a new order: %s had %s, this run has %s", tag, state["data_order"], data_order)
    log.info("resumed from %s", tag)
    return state["step"]


def train(
    engine: deepspeed.DeepSpeedEngine, args: argparse.Namespace, train_set: Batches, validation_set: Batches
) -> tuple[list[float], list[float]]:
    """Train until --steps, and return the loss and the seconds of each step of this run."""
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
            write_log(args.loss_log, {"step": step, "loss": losses[-1]})
            if args.save_dir and (step == args.steps or (args.save_every and step % args.save_every == 0)):
                checkpoint.save(engine, args.save_dir, {"step": step, "data_order": data_order})
            if args.eval_every and step % args.eval_every == 0 and step < args.steps:
                log.info("step %d, validation loss %.4f", step, validate(engine, validation_set, args.eval_batches))
    return losses, step_s


def show(bar: tqdm, step: int, loss: float) -> None:
    """Advance the bar, or log a line now and then where there is no terminal."""
    bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
    bar.update()
    if bar.disable and (step % max(1, bar.total // 10) == 0 or step in (1, bar.total)):
        log.info("step %d of %d, loss %.4f", step, bar.total, loss)


def main() -> None:
    """Check the inputs, or train and report."""
    args = parse_args()
    if args.check is not None:
        text, fine = describe(read(args, Ranks.of(args)), args)
        sys.stdout.write(text if args.local_rank == 0 else "")
        raise SystemExit(0 if fine else 1)
    engine, session, (train_set, validation_set) = start(args)
    losses, step_s = train(engine, args, train_set, validation_set)
    if losses:
        report = make_report(engine, losses, step_s, args.seq_len)
        report["validation_loss"] = validate(engine, validation_set, args.eval_batches)
        report["memplug"] = session.report().as_dict() if session else None
        write_log(args.loss_log, {"report": report})
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
