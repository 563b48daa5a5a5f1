"""Each operator of a recording has its pass, micro-batch and layer, without a hook in backward."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

from memplug.hooks.places import Places
from memplug.profile.recorder import Detail, Recorder
from memplug.profile.trace import Fingerprint, Pass, Phase
from memplug.torch_private import COMPILED_CALL
from tests.support.recording import nothing_left, operator_names, record, recorder
from tests.support.truth import Told, where

__all__ = ["nothing_left", "recorder"]

CHECKPOINTS = {  # which call is checkpointed, and whether its checkpoint is reentrant
    "none": {},
    "around each layer": {"around": False},
    "around each layer, reentrant": {"around": True},
    "inside of each layer": {"inside": False},
    "inside of each layer, reentrant": {"inside": True},
}
checkpoints = pytest.mark.parametrize("network", CHECKPOINTS.values(), ids=CHECKPOINTS)
SCHEDULES = {  # orders of forwards (f) and backwards (b), by micro-batch
    "one after the other": "f0 b0 f1 b1",
    "in order": "f0 f1 b0 b1",
    "the last first": "f0 f1 b1 b0",
    "one forward, one backward": "f0 f1 b0 f2 b1 f3 b2 b3",
}


@checkpoints
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_operators_get_the_micro_batch_and_layer_of_their_forward(
    schedule: str, network: dict[str, bool], recorder: Recorder
) -> None:
    told = Told(recorder, **network)
    for _ in range(2):
        losses = {}
        told.begin()
        for word in schedule.split():
            micro_batch = int(word[1])
            if word[0] == "f":
                losses[micro_batch] = told.forward(micro_batch)
            else:
                told.backward(micro_batch, losses.pop(micro_batch))
        trace = told.end()
        found = told.truth.check(trace)
        passes = itertools.product((Pass.FORWARD, Pass.BACKWARD), range(schedule.count("f")), range(-1, 3))
        assert set(found) == {*passes, (Pass.OTHER, -1, -1)}
        assert trace.replays_exactly() is True


def test_requests_have_the_phase_and_layer_of_their_operators(recorder: Recorder) -> None:
    told = Told(recorder)
    told.begin()
    told.backward(0, told.forward(0))
    trace = told.end()
    told.truth.check(trace)
    for row in trace.requests:
        assert (row["malloc_phase"], row["malloc_layer"]) == tuple(
            trace.operators[["phase", "layer"]][row["malloc_operator"]]
        ), trace.names[trace.operators["name"][row["malloc_operator"]]]


def test_second_backward_of_a_graph_keeps_its_micro_batch(recorder: Recorder) -> None:
    told = Told(recorder)
    told.begin()
    first, second = told.forward(0), told.forward(1)
    told.backward(0, first, retain_graph=True)
    told.backward(1, second)
    told.backward(0, first)
    assert told.truth.check(told.end())[Pass.BACKWARD, 0, 2] > 0


def test_double_backward_has_the_micro_batch_of_its_forward(recorder: Recorder) -> None:
    told = Told(recorder)
    told.begin()
    first = told.forward(0)
    gradients = torch.autograd.grad(first, list(told.model.parameters()), create_graph=True)
    penalty = sum(gradient.square().sum() for gradient in gradients)
    second = told.forward(1)
    begin = told.truth.operators()
    penalty.backward()
    middle = told.truth.operators()
    second.backward()
    trace = told.end()
    places = [where(trace, index) for index in range(len(trace.operators))]
    for micro_batch, ran in enumerate((places[begin:middle], places[middle:])):
        of_backward = {place for place in ran if place[0] is Pass.BACKWARD}
        assert of_backward == {(Pass.BACKWARD, micro_batch, layer) for layer in range(-1, 3)}


@checkpoints
def test_loss_computed_after_another_backward_belongs_to_latest_forward(
    network: dict[str, bool], recorder: Recorder
) -> None:
    told = Told(recorder, **network)
    told.begin()
    first = told.forward(0)
    told.truth.running = (Pass.FORWARD, 1)
    second = told.model(torch.ones(2, 4))
    told.backward(0, first)
    told.truth.at(-1)
    loss = second.exp().sum()
    told.truth.watch_nodes(loss, [second], -1)
    told.truth.at(None)
    told.backward(1, loss)
    assert told.truth.check(told.end())[Pass.BACKWARD, 1, -1] > 0


def test_no_grad_forward_has_layers_but_no_micro_batch(recorder: Recorder) -> None:
    told = Told(recorder)
    told.begin()
    with torch.no_grad():
        told.truth.running = (Pass.NO_GRAD, -1)
        told.model(torch.ones(2, 4))
    told.backward(0, told.forward(0))
    found = told.truth.check(told.end())
    assert found[Pass.NO_GRAD, -1, 1] > 0 and found[Pass.BACKWARD, 0, 1] > 0
    assert told.places.inputs == ["float32[2, 4]"]


def test_operators_that_a_checkpoint_recomputes_belong_to_backward(recorder: Recorder) -> None:
    told = Told(recorder)
    told.begin()
    for micro_batch in range(2):
        told.truth.running = (Pass.FORWARD, micro_batch)
        y = torch.utils.checkpoint.checkpoint(told.model, torch.ones(2, 4), use_reentrant=False)
        told.truth.at(None)
        told.backward(micro_batch, y.sum())
    told.truth.check(told.end())
    assert len(told.places.inputs) == 2


def test_optimizer_phase_ends_with_the_optimizer_step(recorder: Recorder) -> None:
    told = Told(recorder)
    optimizer = torch.optim.AdamW(told.model.parameters())
    told.begin()
    told.backward(0, told.forward(0))
    told.truth._to((Pass.OPTIMIZER, -1, -1))
    optimizer.step()
    told.truth._to((Pass.OTHER, -1, -1))
    torch.ones(2).exp()
    trace = told.end()
    assert told.truth.check(trace)[Pass.OPTIMIZER, -1, -1] > 10
    assert any(trace.phases[phase].kind is Pass.OPTIMIZER for phase in trace.requests["malloc_phase"])


@pytest.mark.parametrize("fails", [False, True], ids=["completes", "fails"])
def test_optimizer_phase_spans_the_engine_step_and_ends_with_it(fails: bool, recorder: Recorder) -> None:
    told = Told(recorder)
    optimizer = torch.optim.AdamW(told.model.parameters())
    told.begin()
    told.backward(0, told.forward(0))
    told.truth._to((Pass.OPTIMIZER, -1, -1))
    with contextlib.suppress(ZeroDivisionError), told.places.in_optimizer():
        torch.ones(2).exp()
        optimizer.step((lambda: 1 / 0) if fails else None)
        torch.ones(2).exp()
    told.truth._to((Pass.OTHER, -1, -1))
    torch.ones(2).exp()
    found = told.truth.check(told.end())
    assert found[Pass.OPTIMIZER, -1, -1] > 1 and found[Pass.OTHER, -1, -1] > 1


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [{}, {"around": False}, {"around": True}], ids=["none", "checkpoint", "reentrant"])
def test_error_out_of_a_forward_ends_its_phase_and_layer(network: dict[str, bool], recorder: Recorder) -> None:
    told = Told(recorder, **network)
    told.begin()
    told.model.layers[1].fails = True
    with pytest.raises(ValueError):
        told.forward(0)
    told.truth._to((Pass.OTHER, -1, -1))
    torch.ones(2).exp()
    told.truth.at(None)
    told.model.layers[1].fails = False
    told.backward(1, told.forward(1))
    assert told.truth.check(told.end())[Pass.OTHER, -1, -1] > 0


@pytest.mark.parametrize("where_it_fails", ["forward", "a pre-hook before memplug's", "a pre-hook after memplug's"])
def test_error_caught_by_the_model_ends_only_the_failed_layer(where_it_fails: str, recorder: Recorder) -> None:
    def fail(*_: object) -> None:
        raise ValueError

    told = Told(recorder)
    told.model.catches = True
    failing = told.model.layers[1]
    if "before" in where_it_fails:
        failing.register_forward_pre_hook(fail)
    told.begin()
    if "after" in where_it_fails:
        failing.register_forward_pre_hook(fail)
    failing.fails = where_it_fails == "forward"
    told.backward(0, told.forward(0))
    found = told.truth.check(told.end())
    assert found[Pass.BACKWARD, 0, 2] > 0 and (Pass.BACKWARD, 0, 1) not in found


def test_interrupted_recording_does_not_affect_the_next_one(recorder: Recorder) -> None:
    told = Told(recorder)
    hook = told.model.layers[1].linear.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    told.begin()
    with pytest.raises(KeyboardInterrupt):
        told.forward(0)
    assert told.end().replays_exactly() is True
    hook.remove()
    told.model.catches = True
    told.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError))
    told.begin()
    told.truth._to((Pass.OTHER, -1, -1))
    torch.ones(2).exp()
    told.backward(0, told.forward(0))
    told.truth.check(told.end())


# -- leftovers ---------------------------------------------------------------------------------------------------------


def hooks(model: nn.Module) -> list[object]:
    """Return all hooks of all modules, and the global ones of optimizers."""
    found = []
    for module in model.modules():
        for name, value in vars(module).items():
            if "hook" in name and isinstance(value, dict):
                found += value.values()
    return found + [*optimizers._global_optimizer_pre_hooks.values(), *optimizers._global_optimizer_post_hooks.values()]


def test_hooks_exist_only_between_install_and_remove(recorder: Recorder) -> None:
    told = Told(recorder)
    assert hooks(told.model) == []
    for _ in range(2):
        told.places.install()
        assert len(hooks(told.model)) > 2 * 3
        told.places.remove()
        told.places.remove()
        assert hooks(told.model) == []
    assert {where(trace, 0)[0] for trace in [record(recorder, lambda: told.model(torch.ones(2, 4)))]} == {Pass.OTHER}


class Narrow(nn.Module):
    """A network that Dynamo compiles as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


@pytest.mark.parametrize("hooked", [False, True])
def test_compiled_model_is_in_its_forward_whenever_it_was_compiled(hooked: bool, recorder: Recorder) -> None:
    torch.compiler.reset()
    model = Narrow()
    model.compile(backend="eager", fullgraph=True)
    compiled = model.__dict__[COMPILED_CALL]
    places = Places(model, [("layer", model.layer)], recorder)
    if not hooked:
        model(torch.ones(2, 4))
    places.install()
    model(torch.ones(2, 4))
    places.install()
    recorder.begin(Detail.REQUESTS)
    model(torch.ones(2, 4)).sum().backward()
    trace = recorder.end(places.fingerprint(), places.layers)
    places.remove()
    assert model.__dict__[COMPILED_CALL] is compiled
    assert trace.fingerprint.inputs == ("float32[2, 4]",)
    found = {(trace.phases[phase], layer) for phase, layer in trace.operators[["phase", "layer"]].tolist()}
    assert {(Phase(Pass.FORWARD, 0), -1), (Phase(Pass.BACKWARD, 0), -1)} <= found
    assert {layer for _, layer in found} == {-1}


def test_recording_without_places_has_no_micro_batch_or_layer(recorder: Recorder) -> None:
    told = Told(recorder)
    told.begin()
    told.forward(0)
    told.end()
    trace = record(recorder, lambda: told.forward(0).backward())
    assert {where(trace, index)[1:] for index in range(len(trace.operators))} == {(-1, -1)}
    assert {phase.kind for phase in trace.phases} == {Pass.OTHER, Pass.BACKWARD}
    assert "aten::relu" in operator_names(trace)


def test_fingerprint_depends_on_layer_names_and_classes(recorder: Recorder) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    one, same = (Places(model, [("0", model[0])], recorder).fingerprint() for _ in range(2))
    assert one == same and (one.model, one.parameters, one.world_size) == ("Sequential", 6, 1)
    assert Places(model, [("0", model[1])], recorder).fingerprint() != one
    assert Places(model, [("1", model[0])], recorder).fingerprint() != one


def test_fingerprint_lists_the_inputs_of_each_forward(recorder: Recorder) -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None, power: int = 1) -> torch.Tensor:
            return x

    model = Two()
    places = Places(model, [], recorder)
    for _ in range(2):
        places.install()
        recorder.begin(Detail.REQUESTS)
        model(torch.ones(2, 3, dtype=torch.int64))
        model(torch.ones(1), power=2, scale=torch.ones((), dtype=torch.bfloat16))
        recorder.end(Fingerprint(), ())
        places.remove()
        assert places.fingerprint().inputs == ("int64[2, 3]", "float32[1], bfloat16[]")
