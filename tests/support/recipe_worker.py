"""Run the DeepSpeed recipe on this rank, once for every case in one process, and write the results.

Started by a launcher: `torchrun --nproc-per-node 2 -m tests.support.recipe_worker FOLDER CASES`. `CASES` is a JSON
object: name -> arguments of examples/llama2/train.py.

`FOLDER/RANK.json` gets name -> {"losses": of each step, "problems": messages about the arguments, "dtype": the tokens',
"offloads": whether DeepSpeed offloads the optimizer, "swapped": bytes that memplug swapped}.
"""

from __future__ import annotations

from typing import Any

import deepspeed

from tests.support.cases_worker import run_all


def run(argv: list[str], rank: int) -> dict[str, Any]:
    """Train with the recipe's own functions, and return the results."""
    import memplug
    from tests.support.recipes import checks, load_train, settings

    train = load_train()
    args = settings.parse_args(argv)
    inputs = settings.read(args, checks.Ranks(count=2))
    if inputs.problems:
        return {"problems": inputs.problems}
    model = train.build_model(args, inputs, train.torch.device("cpu"))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=inputs.config)
    session = memplug.attach(engine) if args.memplug == "attach" else None
    micro_batch, accumulation = settings.batch_sizes(inputs, 2)
    where = {"micro_batch": micro_batch, "rank": rank, "world_size": 2, "seed": args.seed}
    batches, _ = checks.make_batches(inputs.tokens, seq_len=args.seq_len, **where)
    losses = []
    for step in range(args.steps):
        indices = range(step * accumulation, (step + 1) * accumulation)
        losses.append(train.run_batches(engine, batches, indices, train=True))
    optimizer = engine.optimizer
    result = {
        "losses": losses,
        "problems": [],
        "dtype": str(inputs.tokens.dtype),
        "offloads": bool(getattr(optimizer, "cpu_offload", getattr(optimizer, "offload_optimizer", False))),
        "swapped": session.report().tokenwise.offloaded_bytes if session else 0,
    }
    if session:
        session.detach()
    engine.destroy()
    return result


def main() -> None:
    """Join the other rank and run all cases."""
    run_all(run)


if __name__ == "__main__":
    main()
