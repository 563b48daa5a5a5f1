"""Trains layers that exchange tensors with another process, most of them in place, with and without memplug."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.blocks import Layer, Stack, assert_clean, gradients, tokenwise, twin
from tests.support.collective_layers import Exchanges
from tests.support.reducing import WHOLE, ReducesMemoryThatWasThere, broadcast_in_place, reducing


def receiving(broadcast: Callable[[torch.Tensor], Any]) -> type[Layer]:
    """Return a class of layers in which the first rank broadcasts its tokens into empty tensors of the others."""

    class Receives(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.empty_like(x) if dist.get_rank() else self.norm(x).detach()
            broadcast(y)
            return x + self.out(self.inner(x).sigmoid()) * y

    return Receives


LAYERS = {
    "whole": reducing(WHOLE),
    "read before": reducing(WHOLE, reads_before=True),
    "a part": reducing(slice(1)),
    "parts": reducing(slice(1), slice(1, None)),
    "inside of an operator": Exchanges,
    "there before": ReducesMemoryThatWasThere,
    "received": receiving(lambda y: dist.broadcast(y, 0)),
    "received, functional": receiving(broadcast_in_place),
}


def main() -> None:
    """Write into the folder on the command line the cases in which this rank's gradients differ."""
    dist.init_process_group("gloo")
    differ = []
    for name, layer in LAYERS.items():
        for alpha in (0.0, 1.0):
            torch.manual_seed(0)
            model = Stack(3, layer)
            reference = twin(model)
            executor = tokenwise(model, alpha)
            torch.manual_seed(dist.get_rank())
            for step, x in enumerate(torch.randn(3, 2, 6, 16)):
                model(x).backward()
                reference(x).backward()
                ours, theirs = gradients(model), gradients(reference)
                if ours.keys() != theirs.keys() or not all(torch.equal(ours[each], theirs[each]) for each in ours):
                    differ.append((name, alpha, step))
            assert not executor.opaque
            assert_clean(executor)
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(differ))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
