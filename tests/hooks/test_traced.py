"""Programs traced or compiled from an attached model equal those of the plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

import memplug
from memplug.errors import ConflictError
from tests.support.hosts import block, tiny_llama, tokens

pytestmark = pytest.mark.usefixtures("keeps_nothing")

Trace = Callable[[nn.Module], Callable[..., Any]]


def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 32).view(4, 8)


def layers(count: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(count)))


def exported(strict: bool) -> Trace:
    return lambda model: torch.export.export(model, (x(),), strict=strict).module()


def made(mode: str) -> Trace:
    return lambda model: make_fx(model, tracing_mode=mode, _allow_non_fake_inputs=True)(x())


TRACES: dict[str, Trace] = {
    "exported strictly": exported(True),
    "exported": exported(False),
    "jit": lambda model: torch.jit.trace(model, (x(),)),
    "fx": torch.fx.symbolic_trace,
    **{f"make_fx {mode}": made(mode) for mode in ("real", "fake", "symbolic")},
}


def compiled(backend: str) -> Trace:
    return lambda model: torch.compile(model, backend=backend)


COMPILED: dict[str, Trace] = {backend: compiled(backend) for backend in ("eager", "aot_eager")}


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def step(call: Callable[..., Any], model: nn.Module) -> list[torch.Tensor | None]:
    """Return a step's output and gradients; a gradient is None if the traced program copied the parameter."""
    out = call(x())
    out.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [out.detach(), *gradients]


def same(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(one is other if one is None or other is None else torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("trained", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("way", [*TRACES, *COMPILED])
def test_tracing_an_attached_model_changes_neither_results_nor_training(way: str, trained: bool) -> None:
    trace = (TRACES | COMPILED)[way]
    plain, model = layers(), layers()
    expected, alone = step(trace(plain), plain), step(plain, plain)
    with memplug.attach(model, block(regions=["[0-1]"])) as session:
        for _ in range(3 if trained else 0):
            assert same(step(model, model), alone)
            session.step()
        assert same(step(trace(model), model), expected)
        session.step()
        assert same(step(model, model), alone)
        assert session._attached.executor.opaque_regions == 0


@pytest.mark.parametrize("way", TRACES)
def test_tracing_does_not_count_as_a_forward(way: str) -> None:
    model = layers()
    with memplug.attach(model, block(regions=["[0-1]"])) as session:
        TRACES[way](model)
        assert session._attached.forwards == 0 == session.report().tokenwise.offloaded_bytes
        step(model, model)
        before = session._attached.forwards
        TRACES[way](model)
        assert session._attached.forwards == before == 2


def test_traced_graph_has_the_operators_of_the_plain_model() -> None:
    def trace(model: nn.Module) -> Any:
        call = lambda x: model(input_ids=x, use_cache=False).logits  # noqa: E731
        return make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(tokens())

    expected, model = trace(tiny_llama()), tiny_llama()
    with memplug.attach(model, block()):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        found = trace(model)
        assert [str(node.target) for node in found.graph.nodes if node.op == "call_function"] == [
            str(node.target) for node in expected.graph.nodes if node.op == "call_function"
        ]
        assert torch.equal(found(tokens(1)), expected(tokens(1)))


def test_torch_compile_compiles_no_python_frames_of_memplug() -> None:
    model = layers(12)
    with memplug.attach(model, block(regions=["*"])) as session:
        call = torch.compile(model, backend="eager")
        for _ in range(4):
            step(call, model)
            session.step()
    assert 0 < counters["frames"]["total"] < 8  # torch recompiles one frame at most this often


@pytest.mark.parametrize("tokenwise", [{"regions": ["[0-1]"]}, {"enabled": False}], ids=["regions", "arena"])
def test_fullgraph_compile_raises_with_advice(tokenwise: dict[str, Any]) -> None:
    model = layers()
    with memplug.attach(model, {"enabled": True, "plan_dir": False, "tokenwise": tokenwise}):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="memplug needs to see .* leave out `fullgraph=True`"):
            torch.compile(model, backend="eager", fullgraph=True)(x())


def test_torch_jit_script_of_attached_model_is_refused() -> None:
    model = layers()
    with memplug.attach(model, block(regions=["[0-1]"])):
        with pytest.raises(ConflictError, match="torch.jit.script"):
            torch.jit.script(model)
    assert torch.equal(torch.jit.script(model)(x()), model(x()))
