"""Checks and patches of Megatron-Core, and the patches' removal: in one process, with layers defined here."""

from __future__ import annotations

import sys
import types
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import memplug
from memplug.errors import ConfigError, ConflictError, PatchError, RegionError, UnsupportedVersionError
from memplug.hooks import megatron as hooks
from memplug.hooks import random_states
from tests.support.blocks import assert_same, gradients, twin
from tests.support.hosts import ds_config, make_engine, process_group

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import router
from megatron.core.transformer.transformer_layer import TransformerLayer

BLOCK = {"enabled": True, "tokenwise": {"alpha": 1.0, "min_offload_bytes": 1}, "arena": {"enabled": False}}
REFUSES = {**BLOCK, "tokenwise": {**BLOCK["tokenwise"], "checkpointing": "refuse"}}
if hasattr(router, "save_to_aux_losses_tracker"):
    LOSSES = (router, "save_to_aux_losses_tracker")
else:  # from 0.18 on
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

    LOSSES = (MoEMetricsTracker, "record")


def config(**fields: Any) -> types.SimpleNamespace:
    """Return the fields of a TransformerConfig that the hook reads."""
    common = {"num_layers": 2, "hidden_size": 16, "pipeline_model_parallel_size": 1, "context_parallel_size": 1}
    return types.SimpleNamespace(**{**common, **fields})


class Decoder(TransformerLayer):
    """A layer of torch's modules that takes and returns what Megatron-Core's layer does."""

    def __init__(self, settings: types.SimpleNamespace):
        nn.Module.__init__(self)
        self.config = settings
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module.__call__(self, *args, **kwargs)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, context: Any = None, **others: Any
    ) -> Any:
        if attention_mask is not None:
            hidden_states = hidden_states * attention_mask
        return hidden_states + self.down(self.up(self.norm(hidden_states)).tanh()), context


class Model(nn.Module):
    """A model that calls its layers with keywords only, as TransformerBlock does."""

    def __init__(self, settings: types.SimpleNamespace | None = None, layer: type[nn.Module] = Decoder):
        super().__init__()
        self.layers = nn.ModuleList([layer(settings or config()) for _ in range(2)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        context = None
        x = x * 1.0
        for layer in self.layers:
            x, context = layer(hidden_states=x, attention_mask=mask, context=context, inference_context=None)
        return x.square().sum()


@pytest.mark.parametrize("chunks", [1, 2])
def test_layers_with_keyword_calls_and_tuple_outputs_train_unchanged(chunks):
    torch.manual_seed(0)
    models = [Model() for _ in range(chunks)]
    references = [twin(model) for model in models]
    with memplug.attach(models, BLOCK) as session:
        assert len(session._attached.regions) == 2 * chunks
        for _ in range(3):
            for model, reference in zip(models, references, strict=True):
                x, mask = torch.randn(3, 2, 16), torch.rand(3, 2, 1)
                model(x, mask).backward()
                reference(x, mask).backward()
                assert_same(gradients(model), gradients(reference))
            session.step()
        assert session.report().tokenwise.offloaded_bytes > 0
        assert memplug.attach(models, BLOCK) is session


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"recompute_granularity": "full"}, "--recompute-granularity"),
        ({"recompute_granularity": "selective"}, "--recompute-granularity"),
        ({"cpu_offloading": True}, "--cpu-offloading-num-layers"),
        ({"fine_grained_activation_offloading": True}, "--fine-grained-activation-offloading"),
        ({"cuda_graph_impl": "local"}, "give --cuda-graph-impl none"),
        ({"enable_cuda_graph": True}, "--enable-cuda-graph"),
        ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
        ({"hybrid_context_parallel": True}, "--hybrid-context-parallel"),
    ],
)
def test_conflicting_megatron_option_is_refused_by_name(fields, advice):
    model = Model(config(**fields))
    with pytest.raises(ConflictError, match=next(iter(fields))) as caught:
        memplug.attach(model, REFUSES)
    assert advice in str(caught.value)
    assert all(type(layer) is Decoder for layer in model.layers)


def test_error_names_all_conflicting_options_at_once():
    with pytest.raises(ConflictError, match=r"recompute_granularity='full'.*cpu_offloading=True"):
        memplug.attach(Model(config(recompute_granularity="full", cpu_offloading=True)), REFUSES)


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputation_of_megatron_is_replaced_until_detach(granularity, caplog):
    settings = config(recompute_granularity=granularity)
    model = Model(settings)
    flags = {"recompute_mlp": True, "recompute_input_layernorm": False, "recompute_count": 1}
    vars(model.layers[0]).update(flags, checkpoint_core_attention=True)
    with caplog.at_level("INFO", "memplug"), memplug.attach(model, BLOCK):
        assert settings.recompute_granularity is None
        assert not (model.layers[0].recompute_mlp or model.layers[0].checkpoint_core_attention)
        assert model.layers[0].recompute_count == 1
    assert settings.recompute_granularity == granularity and model.layers[0].checkpoint_core_attention is True
    assert {name: vars(model.layers[0])[name] for name in flags} == flags
    assert caplog.text.count(f"(--recompute-granularity {granularity})") == 1


def test_recomputation_is_replaced_if_layers_have_configurations_of_their_own():
    model, own = Model(config(recompute_granularity="full")), config(recompute_granularity="full")
    model.config = own  # the block's, which decides; layers of a heterogeneous model have copies
    with memplug.attach(model, BLOCK):
        assert own.recompute_granularity is None is model.layers[0].config.recompute_granularity
    assert own.recompute_granularity == "full"


def test_layers_that_keep_their_activations_instead_of_recomputing_are_named(caplog):
    model = Model(config(recompute_granularity="full"))
    model.layers.append(nn.Linear(16, 16))
    with caplog.at_level("INFO", "memplug"), memplug.attach(model, BLOCK):
        assert "layers that are no regions (1 Linear) keep all" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"multi_latent_attention": True, "apply_rope_fusion": True}, "in place"),
        ({"moe_flex_dispatcher_backend": "ncclep"}, "exchange tokens"),
        ({"moe_paged_stash": True}, "moe_paged_stash=True"),
        ({"hybrid_context_parallel": True}, "hybrid_context_parallel=True"),
    ],
)
def test_options_with_unobserved_kernels_are_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ConflictError, match=message):
        memplug.attach(Model(config(**fields)), BLOCK)


def test_megatron_may_recompute_if_only_the_arena_is_enabled():
    model = Model(config(recompute_granularity="full"))
    block = {"enabled": True, "tokenwise": {"enabled": False}, "arena": {"enabled": True}}
    with memplug.attach(model, block) as session:
        assert session._attached.regions == []


def test_layer_whose_forward_is_not_a_method_is_refused():
    class Other:
        def __call__(self, hidden_states: torch.Tensor) -> Any:
            return hidden_states, None

    class Replaced(Decoder):
        forward = Other()

    class Captured(Decoder):
        def __init__(self, settings: types.SimpleNamespace):
            super().__init__(settings)
            self.cudagraph_manager = object()

    for layer in (Replaced, Captured):
        with pytest.raises(RegionError, match=layer.__name__):
            memplug.attach(Model(layer=layer), BLOCK)


def test_list_other_than_the_chunks_of_one_model_is_refused():
    one, other = Model(), Model(config(num_layers=4))
    with pytest.raises(RegionError, match="twice"):
        memplug.attach([one, one], BLOCK)
    with pytest.raises(RegionError, match="several models"):
        memplug.attach([one, other], BLOCK)
    with pytest.raises(RegionError, match="no Megatron-Core transformer layers"):
        memplug.attach([one, nn.Linear(2, 2)], BLOCK)
    with pytest.raises(RegionError, match="list of Megatron-Core model chunks"):
        memplug.attach([], BLOCK)


def test_ranks_with_different_blocks_are_refused():
    def gather(ranks: Any, own: dict[str, Any], patient: bool) -> list[dict[str, Any]]:
        return [own, {**own, "tokenwise": {**own["tokenwise"], "alpha": 0.5}}]

    with (
        mock.patch("memplug.session.ranks.Ranks.gather", gather),
        mock.patch("memplug.session.ranks.Ranks.members", [0, 1]),
        pytest.raises(ConfigError, match="tokenwise") as caught,
    ):
        memplug.attach(Model(), BLOCK)
    assert "rank 1" in str(caught.value)


@pytest.mark.parametrize("version", ["0.15.3", "0.9.0"])
def test_error_for_an_old_version_names_the_supported_versions(version):
    with (
        mock.patch.object(sys.modules["megatron.core"], "__version__", version),
        pytest.raises(UnsupportedVersionError, match=r"0\.16 to 0\.20"),
    ):
        memplug.attach(Model(), BLOCK)


def test_attach_warns_if_megatron_is_newer_than_any_known_version(caplog):
    with mock.patch.object(sys.modules["megatron.core"], "__version__", "0.31.0"):
        memplug.attach(Model(), BLOCK).detach()
    assert "0.31.0 is newer" in caplog.text


@pytest.mark.parametrize("name", ["forward_step", "backward_step"])
def test_error_names_the_missing_symbol_and_nothing_stays_patched(name):
    model = Model()
    with mock.patch.object(schedules, name, None), pytest.raises(PatchError, match=name) as caught:
        memplug.attach(model, BLOCK)
    assert caught.value.expected == hooks.VERSIONS
    assert all(type(layer) is Decoder for layer in model.layers)
    assert not hasattr(schedules.forward_step, "__memplug_original__")


def test_forward_with_gradients_refuses_an_inference_context():
    model = Model()
    with memplug.attach(model, BLOCK), pytest.raises(ConflictError, match="inference context"):
        model.layers[0](hidden_states=torch.randn(3, 2, 16), inference_context=object())


def test_deepspeed_engine_marks_the_steps_of_megatron_layers(tmp_path):
    with process_group(tmp_path):
        engines = [make_engine(ds_config(memplug=BLOCK), Model()) for _ in range(2)]
        engines[1].module.load_state_dict(engines[0].module.state_dict())
        session = memplug.attach(engines[0])
        assert schedules.forward_step.__memplug_original__ and len(session._attached.regions) == 2
        for step in range(3):
            x = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(step))
            losses = []
            for engine in engines:
                loss = engine(x)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            assert losses[0] == losses[1]
        assert session.steps == 3 and session.report().tokenwise.offloaded_bytes > 0
        session.detach()


def test_detach_restores_every_patched_function():
    before = {
        (module, name): getattr(module, name)
        for module, name in [
            (schedules, "forward_step"),
            (schedules, "backward_step"),
            LOSSES,
        ]
    }
    session = memplug.attach(Model(), BLOCK)
    assert all(getattr(module, name) is not original for (module, name), original in before.items())
    session.detach()
    assert all(getattr(module, name) is original for (module, name), original in before.items())
    hooks = session._attached.executor.hooks
    assert hooks.surroundings == hooks.around == hooks.gathered == hooks.scratch == []


def test_auxiliary_loss_is_recorded_once_despite_recomputation():
    recorded, (owner, name) = [], LOSSES

    class Routes(Decoder):
        def forward(self, hidden_states: torch.Tensor, **others: Any) -> Any:
            getattr(owner, name)(owner, hidden_states.detach().mean(), 0, 2)
            return super().forward(hidden_states, **others)

    def save(_: Any, loss: torch.Tensor, *others: Any) -> None:
        recorded.append(torch.zeros(3).add_(loss))  # allocates, as Megatron-Core does in its first step

    with mock.patch.object(owner, name, save):
        model = Model(layer=Routes)
        with memplug.attach(model, {**BLOCK, "tokenwise": {"alpha": 0.0, "min_offload_bytes": 1}}) as session:
            for _ in range(2):
                model(torch.randn(3, 2, 16)).backward()
                session.step()
            assert len(recorded) == 4 and session.report().tokenwise.recomputed_in_full == 0


def test_generators_resume_their_states_after_a_recompute_pass():
    # with `--te-rng-tracker`, `get_states` returns the generators themselves
    generator = torch.Generator().manual_seed(1)

    class Tracker:
        states = {"model-parallel-rng": generator, "other": torch.zeros(1)}

        def get_states(self) -> dict[str, Any]:
            return dict(self.states)

        def set_states(self, states: dict[str, Any]) -> None:
            self.states = states

    tracker = Tracker()
    again, first = random_states.kept(tracker), torch.rand(3, generator=generator)
    second = torch.rand(3, generator=torch.Generator().manual_seed(1).set_state(generator.get_state()))
    with again():
        assert torch.equal(torch.rand(3, generator=tracker.states["model-parallel-rng"]), first)
    assert tracker.states["model-parallel-rng"] is generator
    assert torch.equal(torch.rand(3, generator=generator), second)


def test_recompute_pass_uses_the_random_states_of_the_forward():
    class Drops(Decoder):
        def forward(self, hidden_states: torch.Tensor, **others: Any) -> Any:
            with random.get_cuda_rng_tracker().fork():
                hidden_states = nn.functional.dropout(hidden_states, 0.5)
            return super().forward(hidden_states, **others)

    states = {
        "_get_cuda_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "_set_cuda_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
    }
    with mock.patch.multiple(random, **states):
        random.initialize_rng_tracker(force_reset=True)
        tracker = random.get_cuda_rng_tracker()
        model = Model(layer=Drops)
        reference = twin(model)
        found = []
        for network in (model, reference):
            torch.manual_seed(1)
            tracker.reset()
            tracker.states_ = {"model-parallel-rng": torch.get_rng_state()}
            session = memplug.attach(network, BLOCK) if network is model else None
            for step in range(3):
                torch.manual_seed(step)
                network(torch.ones(3, 2, 16)).backward()
            found.append((gradients(network), tracker.states_["model-parallel-rng"]))
            if session is not None:
                session.detach()
        random.initialize_rng_tracker(force_reset=True)
    assert_same(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1]), "the recompute pass must not advance the generator"
