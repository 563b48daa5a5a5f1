"""The report of a run: its log, throughput, model FLOPs utilization and peak memory."""

import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Dense bf16 rates from NVIDIA's data sheets, by a part of the device's name; the first match counts.
PEAK_BF16_FLOP_PER_S = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
}


def model_flop_per_token(config: Any, parameters: int, seq_len: int) -> int:
    """Return the FLOPs of training on one token, forward and backward (MEMO, section 5.1).

    They are 6 for each parameter, plus 6 · layers · width of all heads · seq_len for attention under the causal mask.
    The width of all heads is the hidden size, except in Qwen3. Of a mixture's experts, only those that a token is
    routed to count. Recomputation does not count: a run that recomputes does more FLOPs than this.
    """
    if idle := getattr(config, "num_local_experts", 0) - getattr(config, "num_experts_per_tok", 0):
        parameters -= idle * config.num_hidden_layers * 3 * config.hidden_size * config.intermediate_size
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 6 * parameters + 6 * config.num_hidden_layers * config.num_attention_heads * head_size * seq_len


def peak_flop_per_s(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the peak rate of one rank's device, and the source of this number: a data sheet, or else a matmul."""
    if device.type == "cuda" and dtype is torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, rate in PEAK_BF16_FLOP_PER_S.items():
            if part in name:
                return rate, f"data sheet of {part}"
    # a small matmul for bfloat16, since a CPU without bfloat16 instructions is a hundred times slower than in float32
    side = 8192 if device.type == "cuda" else 1024 if dtype is torch.float32 else 256
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return 2 * side**3 / min(seconds), f"measured by a {side} × {side} matmul"


def peak_memory_gib(device: torch.device) -> dict[str, float]:
    """Return peak memory by kind, of the rank that used most; all ranks call it."""
    if device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        peaks_bytes = {"allocated": allocated, "reserved": reserved}
    else:
        peaks_bytes = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    worst = torch.tensor(list(peaks_bytes.values()), dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {kind: peak / 2**30 for kind, peak in zip(peaks_bytes, worst.tolist(), strict=True)}


def make_report(engine: Any, losses: list[float], step_s: list[float], seq_len: int) -> dict[str, Any]:
    """Return the numbers of a run, ready for JSON; all ranks call it.

    Args:
        engine: the DeepSpeed engine that trained.
        losses: training loss of each step.
        step_s: seconds of each step. Their median counts: slow first steps do not change it.
        seq_len: tokens of a sequence.
    """
    memory_gib = peak_memory_gib(engine.device)  # before the matmul, which is not part of training
    config = engine.module.config
    parameters = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in engine.module.parameters())
    flop_per_token = model_flop_per_token(config, parameters, seq_len)
    peak, source = peak_flop_per_s(engine.device, config.dtype)
    tokens_per_s = engine.train_batch_size() * seq_len / statistics.median(step_s)
    return {
        "parameters": parameters,
        "ranks": dist.get_world_size(),
        "device": engine.device.type,
        "dtype": str(config.dtype).removeprefix("torch."),
        "split": _split(engine),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "step_s": statistics.median(step_s),
        "tokens_per_s": tokens_per_s,
        "mfu": tokens_per_s * flop_per_token / dist.get_world_size() / peak,
        "flop_per_token": flop_per_token,
        "peak_flop_per_s": peak,
        "peak_source": source,
        "memory_gib": memory_gib,
    }


def _split(engine: Any) -> str:
    shared = engine.sequence_parallel_size
    return f"ZeRO stage {engine.zero_optimization_stage()}" + (f", context {shared}" if shared > 1 else "")


def write_log(path: Path | None, entry: dict[str, Any]) -> None:
    """Add a line to --loss-log, on rank 0; floats keep all their digits."""
    if path and dist.get_rank() == 0:
        with open(path, "a") as file:
            file.write(json.dumps(entry) + "\n")


def render(report: dict[str, Any]) -> str:
    """Return the report as lines for a person to read."""
    peak_tflop_per_s = report["peak_flop_per_s"] / 1e12
    memory = ", ".join(f"{kind} {peak:.2f} GiB" for kind, peak in report["memory_gib"].items())
    rows = {
        "model": f"{report['parameters']:,} parameters, {report['dtype']}",
        "on": f"{report['ranks']} × {report['device']}, {report['split']}",
        "training loss": f"{report['first_loss']:.4f} → {report['last_loss']:.4f}",
        "validation loss": f"{report['validation_loss']:.4f}",
        "throughput": f"{report['tokens_per_s']:,.0f} tokens/s, {report['step_s']:.3f} s a step (median)",
        "MFU": f"{report['mfu']:.1%} of {peak_tflop_per_s:,.3g} TFLOP/s a rank, {report['peak_source']}",
        "peak memory": f"{memory} (of the rank with most)",
    }
    of_memplug = report.get("memplug") or {}
    for name, value in of_memplug.items():
        if value is not None:
            rows[f"memplug {_in_words(name, of_memplug)}"] = _readable(name, value)
    width = max(map(len, rows))
    return "".join(f"{name:<{width}}  {value}\n" for name, value in rows.items())


def _in_words(name: str, others: dict[str, Any]) -> str:
    """Return a field's name without its unit, unless the unit distinguishes it from another field."""
    plain = name.removesuffix("_bytes").removesuffix("_s")
    return (name if plain in others else plain).replace("_", " ")


def _readable(name: str, value: object) -> str:
    if name.endswith("_bytes"):
        return f"{value / 2**30:,.3f} GiB"
    if name.endswith("_s"):
        return f"{value:.3f} s"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
