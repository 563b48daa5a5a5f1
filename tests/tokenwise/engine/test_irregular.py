"""Tensors without plain strides in and around regions: sparse, nested, quantized, oneDNN's."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memplug.errors import InPlaceError
from tests.support.blocks import Layer, Stack, assert_clean, assert_same, gradients, tokenwise, twin

pytestmark = pytest.mark.filterwarnings("ignore:.*(beta|prototype).*:UserWarning")
EXACT = pytest.mark.parametrize("alpha", [0.0, 1.0])


class Graph(Layer):
    """A layer over a graph's nodes, with the graph's adjacency matrix."""

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.sparse.mm(adjacency, self.inner(x)).relu())


class Net(Stack):
    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        for layer in self.layers:
            x = layer(x, given)
        return x.square().mean()


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "COO": torch.Tensor.to_sparse,
    "uncoalesced": lambda dense: torch.sparse_coo_tensor([[0, 0, 1], [1, 1, 2]], [1.0, 2.0, 3.0], dense.shape),
    "CSR": torch.Tensor.to_sparse_csr,
    "CSC": torch.Tensor.to_sparse_csc,
}


def adjacency_in(layout: str) -> torch.Tensor:
    torch.manual_seed(1)
    return LAYOUTS[layout]((torch.rand(6, 6) > 0.5).float())


def train_with(model: nn.Module, given: Callable[[], torch.Tensor], alpha: float, opaque: str = "") -> object:
    """Train three steps with and without regions, and compare to the bit."""
    reference = twin(model)
    executor = tokenwise(model, alpha)
    for region in model.regions:
        region.opaque = opaque
    for x in torch.randn(3, 6, 16):
        for network in (model, reference):
            network(x, given()).backward()
        assert_same(gradients(model), gradients(reference))
    assert_clean(executor)
    return executor


@EXACT
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("opaque", ["", "for this test"])
def test_region_with_a_sparse_argument_trains_exactly_and_is_not_opaque(layout: str, alpha: float, opaque: str) -> None:
    adjacency = adjacency_in(layout)
    torch.manual_seed(0)
    executor = train_with(Net(2, Graph), lambda: adjacency, alpha, opaque)
    assert opaque or executor.opaque_regions == 0
    assert opaque or executor.transfer.offloaded_total_bytes > 0


class Ignores(Layer):
    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.inner(x).relu()) * given.shape[0]


@EXACT
@pytest.mark.parametrize("block_layout", [torch.Tensor.to_sparse_bsr, torch.Tensor.to_sparse_bsc])
def test_gradients_hold_with_an_argument_in_blocked_layout(
    block_layout: Callable[..., torch.Tensor], alpha: float
) -> None:
    """Pass the argument unused: torch's backward cannot multiply tensors in blocked layouts."""
    train_with(Net(2, Ignores), lambda: block_layout(torch.eye(6), (2, 2)), alpha)


@EXACT
def test_sparse_argument_gets_its_gradient(alpha: float) -> None:
    torch.manual_seed(0)
    model = Net(2, Graph)
    reference = twin(model)
    tokenwise(model, alpha)
    found = []
    x, indices = torch.randn(6, 16), torch.tensor([[0, 1, 2, 5], [1, 2, 2, 0]])
    for network in (model, reference):
        weights = torch.ones(4, requires_grad=True)
        network(x, torch.sparse_coo_tensor(indices, weights * 2.0, (6, 6))).backward()
        found.append(weights.grad)
    assert torch.equal(*found)
    assert_same(gradients(model), gradients(reference))


def test_writing_to_a_sparse_argument_raises() -> None:
    class Writes(Layer):
        def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
            return x + self.out(torch.sparse.mm(adjacency.mul_(2.0), self.inner(x)).relu())

    model = Net(1, Writes)
    tokenwise(model, 1.0)
    with pytest.raises(InPlaceError, match=r"sparse, nested or quantized(.|\n)*Modify a clone"):
        model(torch.randn(6, 16), adjacency_in("COO"))


class MakesSparse(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sparse.mm(torch.eye(6).to_sparse(), self.out(self.inner(x).tanh()))


class PassesThroughSparse(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.inner(x).relu().to_sparse().to_dense())


class Nested(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.as_nested_tensor([x[:2], x[2:]])
        return x + torch.cat(list(self.out(self.inner(nested).relu()).unbind()))


class Quantized(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quantized = torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)
        return x + self.out(self.inner(quantized.dequantize() * x).tanh())


class OneDnn(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.inner(x).tanh() * self.inner(x).detach().to_mkldnn().to_dense())


@EXACT
@pytest.mark.parametrize("block", [MakesSparse, PassesThroughSparse, Nested, Quantized, OneDnn])
def test_region_that_makes_an_irregular_tensor_is_opaque(
    block: type[Layer], alpha: float, caplog: pytest.LogCaptureFixture
) -> None:
    if block is OneDnn and not torch.backends.mkldnn.is_available():
        pytest.skip("without oneDNN")
    torch.manual_seed(0)
    model = Stack(2, block)
    reference = twin(model)
    with caplog.at_level(logging.WARNING, "memplug"):
        executor = tokenwise(model, alpha)
        for x in torch.randn(3, 6, 16):
            for network in (model, reference):
                network(x).backward()
            assert_same(gradients(model), gradients(reference))
    assert list(executor.opaque) == ["an operator that made a sparse, nested or quantized tensor"]
    assert_clean(executor)


class Jagged(Layer):
    """Attention over sequences of different lengths."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return x + self.out(F.scaled_dot_product_attention(y, y, y).transpose(1, 2).flatten(-2))


class Strided(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.inner(x).relu())


@EXACT
@pytest.mark.parametrize(("block", "layout"), [(Jagged, torch.jagged), (Strided, torch.strided)])
def test_gradients_hold_for_nested_tensors_passed_between_regions(
    block: type[Layer], layout: torch.layout, alpha: float
) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([block(), block()])
    model = nn.Module()
    model.layers = layers
    reference = twin(model)
    executor = tokenwise(model, alpha)
    for step in range(3):
        parts = [torch.randn(length, 16, generator=torch.Generator().manual_seed(step)) for length in (3, 5)]
        for network in (model, reference):
            x = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True) * 1.0
            for layer in network.layers:
                x = layer(x)
            sum(part.square().mean() for part in x.unbind()).backward()
        assert_same(gradients(model), gradients(reference))
    reason = next(iter(executor.opaque))
    assert ("subclass" if layout is torch.jagged else "sparse, nested or quantized") in reason
    assert "no operator was seen to fill" not in reason
    assert_clean(executor)
