"""memplug replaces a script's checkpointing around regions: same numbers, layers run once, detaching restores it."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

import memplug
from memplug.errors import ConflictError
from memplug.hooks.checkpointing import reentrant_checkpoints
from tests.support.blocks import LAYERS, Block, Stack, alphas, assert_same, gradients, twin
from tests.support.hosts import block, fingerprint, tiny_llama, tokens

REPLACED = "replaces the script's checkpointing of regions"


class Counting(Block):
    """A block with dropout that counts its forwards."""

    forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.forwards += 1
        return nn.functional.dropout(super().forward(x), 0.1)


class Checkpointing(Stack):
    """A stack that checkpoints parts of itself, in one of the ways of `WAYS`."""

    way: Callable[..., torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        return type(self).way(self, x).square().mean()

    def __init__(self) -> None:
        super().__init__(4, Counting)
        self.scale = nn.Parameter(torch.ones(16))


def each_layer(model: Stack, x: torch.Tensor, **options: Any) -> torch.Tensor:
    for layer in model.layers:
        x = checkpoint(layer, x, **options)
    return x


def closures(model: Stack, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Checkpoint closures, as scripts for Hugging Face models before version 4.53 do."""

    def custom(layer: nn.Module) -> Callable[..., torch.Tensor]:
        return lambda *inputs: layer(*inputs)

    for layer in model.layers:
        x = checkpoint(custom(layer), x, **options)
    return x


def pairs(model: Stack, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Checkpoint two layers at a time, together with operators around them, which belong to no region."""

    def two(first: nn.Module, second: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return second(first(x.tanh()).sin()).exp().tanh()

    for first, second in zip(model.layers[::2], model.layers[1::2], strict=True):
        x = checkpoint(functools.partial(two, first, second), x, **options)
    return x


def in_order(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def deepspeeds(model: Stack, x: torch.Tensor) -> torch.Tensor:
    """Checkpoint by DeepSpeed's function, as PipelineModule does."""
    from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint as deepspeeds_checkpoint

    for layer in model.layers:
        x = deepspeeds_checkpoint(lambda y, layer=layer: layer(y), x)
    return x


WAYS: dict[str, Callable[..., torch.Tensor]] = {
    f"{way.__name__}, {'reentrant' if reentrant else 'not reentrant'}": functools.partial(way, use_reentrant=reentrant)
    for way in (each_layer, closures, pairs)
    for reentrant in (True, False)
}
WAYS["DeepSpeed"] = deepspeeds


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Stack:
    """Return a stack that checkpoints itself in the way that the test is parametrized with."""
    if request.param == "DeepSpeed":
        pytest.importorskip("deepspeed")
    torch.manual_seed(0)
    way = WAYS[request.param]
    stack = type("Model", (Checkpointing,), {"way": staticmethod(lambda model, x: way(model, x))})()
    Counting.forwards = 0
    return stack


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    before = torch_checkpoint.CheckpointFunction
    yield
    assert torch_checkpoint.CheckpointFunction is before


def trained(model: nn.Module, steps: int = 3, session: Any = None) -> list[dict[str, torch.Tensor]]:
    """Return each step's gradients of a stack or a Llama; equal arguments give equal batches and dropout."""
    torch.manual_seed(1)
    found = []
    for seed in range(steps):
        if isinstance(model, Stack):
            loss = model(torch.randn(2, 6, 16))
        else:
            x = tokens(seed)
            loss = model(input_ids=x, labels=x).loss
        loss.backward()
        found.append({name: gradient.clone() for name, gradient in gradients(model).items()})
        model.zero_grad()
        if session is not None:
            session.step()
    return found


@alphas
@pytest.mark.parametrize("model", WAYS, indirect=True)
def test_checkpointed_regions_keep_the_scripts_gradients(model: Stack, alpha: float) -> None:
    expected = trained(twin(model))
    with memplug.attach(model, block(alpha=alpha, regions=LAYERS)) as session:
        measured = trained(model, session=session)
        assert session.report().tokenwise.forwards > 0
    for ours, theirs in zip(measured, expected, strict=True):
        assert_same(ours, theirs, exact=alpha in (0, 1))


@pytest.mark.parametrize(
    ("model", "again"),
    [("each_layer, reentrant", 4), ("closures, reentrant", 1), ("each_layer, not reentrant", 0), ("DeepSpeed", 1)],
    indirect=["model"],
)
def test_checkpointed_layer_runs_once_a_step(model: Stack, again: int, caplog: pytest.LogCaptureFixture) -> None:
    """Allow each reentrantly checkpointed module or closure one repeated run, before memplug knows it."""
    with caplog.at_level(logging.INFO, "memplug"):
        with memplug.attach(model, block(alpha=1, regions=LAYERS)) as session:
            trained(model, session=session)
            assert Counting.forwards == 4 * 3 + again
    assert caplog.text.count(REPLACED) == (again > 0)
    Counting.forwards = 0
    trained(model)
    assert Counting.forwards == 2 * 4 * 3, "detaching gives the script's checkpointing back"


@pytest.mark.parametrize("impl", CheckpointImpl)
def test_checkpoint_wrapper_around_a_region_calls_it_directly(impl: CheckpointImpl) -> None:
    torch.manual_seed(0)
    model = type("Wrapped", (Checkpointing,), {"way": staticmethod(in_order)})()
    for index in range(4):
        model.layers[index] = checkpoint_wrapper(model.layers[index], impl)
    before = [layer.checkpoint_fn for layer in model.layers]
    expected = trained(twin(model))
    Counting.forwards = 0
    with memplug.attach(model, block(alpha=0, regions=LAYERS)) as session:
        for ours, theirs in zip(trained(model, session=session), expected, strict=True):
            assert_same(ours, theirs, exact=True)
        assert Counting.forwards == 4 * 3
    assert [layer.checkpoint_fn for layer in model.layers] == before


# -- Hugging Face's flag -----------------------------------------------------------------------------------------------


def enable(model: nn.Module, reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()


@alphas
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("when", ["before attaching", "after attaching", "between two steps"])
@pytest.mark.parametrize(
    "regions", ["auto", ["model.layers.*.self_attn", "model.layers.*.mlp"]], ids=["auto", "halves"]
)
def test_hugging_faces_flag_is_replaced_whenever_it_is_set(
    regions: Any, when: str, reentrant: bool, alpha: float
) -> None:
    reference = tiny_llama(attention_dropout=0.1).train()
    enable(reference, reentrant)
    expected = trained(reference, steps=4)
    model = tiny_llama(attention_dropout=0.1).train()
    if when == "before attaching":
        enable(model, reentrant)
    with memplug.attach(model, block(alpha=alpha, regions=regions)) as session:
        if when == "after attaching":
            enable(model, reentrant)
        if when == "between two steps":
            trained(model, session=session, steps=1)
            enable(model, reentrant)
        measured = trained(model, session=session, steps=4)
        assert model.is_gradient_checkpointing, "the script still sees its flag"
        for ours, theirs in zip(measured, expected, strict=True):
            assert_same(ours, theirs, exact=alpha in (0, 1))
    function = model.model.layers[0]._gradient_checkpointing_func
    assert function.func is checkpoint and function.keywords == {"use_reentrant": reentrant}


def test_plain_region_does_not_checkpoint_itself_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama().train()
    enable(model, False)
    calls: list[Any] = []
    for layer in model.model.layers:
        own = layer._gradient_checkpointing_func
        layer._gradient_checkpointing_func = lambda *args, own=own: calls.append(1) or own(*args)
    with caplog.at_level(logging.INFO, "memplug"), memplug.attach(model, block(alpha=0)) as session:
        for region in session._attached.regions:
            assert not session._attached.plain._modules[region.name].leave()
        trained(model, session=session)
    assert not calls and caplog.text.count(REPLACED) == 1
    trained(model, steps=1)
    assert len(calls) == 3


# -- what stays as it is -----------------------------------------------------------------------------------------------


def test_flag_with_frozen_inputs_gives_the_scripts_gradients() -> None:
    """Freeze the embedding, as LoRA does: a reentrant checkpoint then gives the first layer no gradients."""

    def frozen() -> nn.Module:
        model = tiny_llama().train()
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[1].requires_grad_(False)
        model.gradient_checkpointing_enable({"use_reentrant": True})
        if hasattr(model, "_require_grads_hook"):  # newer versions enable this themselves
            model.disable_input_require_grads()
        return model

    expected = trained(frozen())
    model = frozen()
    with memplug.attach(model, block(alpha=0)) as session:
        for ours, theirs in zip(trained(model, session=session), expected, strict=True):
            assert_same(ours, theirs, exact=True)
    assert not any("layers.0" in name for name in expected[0])


def test_reentrant_checkpoint_without_gradients_for_its_inputs_stays() -> None:
    """Expect no gradients of the parameters inside, as from torch's reentrant checkpoint without memplug."""

    class Frozen(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
            return (x * self.scale).sum()

    torch.manual_seed(0)
    model = Frozen(2)
    model.scale = nn.Parameter(torch.ones(16))
    with memplug.attach(model, block(alpha=0, regions=LAYERS)) as session:
        for _ in range(3):
            model(torch.randn(2, 6, 16)).backward()
            session.step()
            assert list(gradients(model)) == ["scale"]


def test_checkpoint_without_regions_stays_reentrant() -> None:
    calls: list[bool] = []

    def head(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return x.exp()

    torch.manual_seed(0)
    model = Stack(2)
    with memplug.attach(model, block(alpha=0, regions=LAYERS)):
        for _ in range(2):
            x = torch.ones(2, 6, 16, requires_grad=True)
            checkpoint(head, checkpoint(model, x, use_reentrant=True), use_reentrant=True).backward()
    assert calls == [False, True] * 2


def test_block_refuses_a_reentrant_checkpoint_around_a_region() -> None:
    torch.manual_seed(0)
    model = Stack(2)
    before = fingerprint(model)
    with memplug.attach(model, block(alpha=0, regions=LAYERS, checkpointing="refuse")):
        x = torch.ones(2, 6, 16, requires_grad=True)
        with pytest.raises(ConflictError, match=r"region layers\.0 runs inside of a reentrant checkpoint") as error:
            checkpoint(model, x, use_reentrant=True)
        assert '"checkpointing": "replace"' in error.value.advice
        model(x).backward()
    assert fingerprint(model) == before


def test_last_of_several_sessions_gives_torchs_class_back() -> None:
    before = torch_checkpoint.CheckpointFunction
    first, second = (memplug.attach(Stack(2), block(regions=LAYERS)) for _ in range(2))
    first.detach()
    assert torch_checkpoint.CheckpointFunction is not before
    assert issubclass(torch_checkpoint.CheckpointFunction, before)
    second.detach()
    assert torch_checkpoint.CheckpointFunction is before
    dropped = memplug.attach(Stack(2), block(regions=LAYERS))
    attached = dropped._attached
    del dropped
    attached.detach()
    assert reentrant_checkpoints()._sessions == 0


def test_copies_of_a_wrapped_model_checkpoint_as_the_script_does() -> None:
    torch.manual_seed(0)
    model = type("Wrapped", (Checkpointing,), {"way": staticmethod(in_order)})()
    for index in range(4):
        model.layers[index] = checkpoint_wrapper(model.layers[index], CheckpointImpl.NO_REENTRANT)
    with memplug.attach(model, block(alpha=0, regions=LAYERS)):
        copies = [copy.deepcopy(model.layers[0]), pickle.loads(pickle.dumps(model.layers[0]))]
    Counting.forwards = 0
    for layer in copies:
        layer(torch.randn(2, 6, 16, requires_grad=True)).sum().backward()
    assert Counting.forwards == 2 * 2


def test_checkpoint_of_a_head_stays_reentrant_beside_those_of_regions() -> None:
    """Distinguish modules whose `__call__` is passed to a checkpoint: these methods share one function."""
    calls: list[bool] = []

    class Head(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            return x.exp()

    torch.manual_seed(0)
    model, head = Stack(2), Head()
    with memplug.attach(model, block(alpha=0, regions=LAYERS)):
        for _ in range(3):
            x = torch.randn(2, 6, 16, requires_grad=True)
            for layer in model.layers:
                x = checkpoint(layer.__call__, x, use_reentrant=True)
            checkpoint(head.__call__, x, use_reentrant=True).sum().backward()
    assert calls == [False, True] * 3


def test_checkpoint_of_unknown_kind_keeps_frozen_inputs_without_gradients() -> None:
    def frozen() -> nn.Module:
        model = tiny_llama().train()
        model.model.embed_tokens.requires_grad_(False)
        model._set_gradient_checkpointing(True, lambda *args: checkpoint(*args, use_reentrant=True))
        return model

    expected = trained(frozen())
    model = frozen()
    with memplug.attach(model, block(alpha=0)) as session:
        for ours, theirs in zip(trained(model, session=session), expected, strict=True):
            assert_same(ours, theirs, exact=True)
        del model.model.layers[0]._gradient_checkpointing_func
        assert not hasattr(model.model.layers[0], "_gradient_checkpointing_func")
    assert not any("layers.0" in name for name in expected[0])


@pytest.mark.parametrize("model", ["each_layer, reentrant", "closures, reentrant"], indirect=True)
def test_reentrant_checkpoint_stays_where_saved_tensor_hooks_are_disabled(model: Stack) -> None:
    expected = trained(twin(model))
    with memplug.attach(model, block(alpha=0, regions=LAYERS)) as session:
        trained(model, session=session)
        Counting.forwards = 0
        with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
            measured = trained(model, session=session)
    assert Counting.forwards == 2 * 4 * 3
    for ours, theirs in zip(measured, expected, strict=True):
        assert_same(ours, theirs, exact=True)


def test_block_refuses_a_checkpoint_wrapper_around_a_region() -> None:
    model = Stack(2)
    model.layers[1] = checkpoint_wrapper(model.layers[1], CheckpointImpl.NO_REENTRANT)
    before = fingerprint(model)
    with pytest.raises(ConflictError, match=r"CheckpointWrapper is around a region"):
        memplug.attach(model, block(alpha=0, regions=LAYERS, checkpointing="refuse"))
    assert fingerprint(model) == before
