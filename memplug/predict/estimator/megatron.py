"""One rank of a Megatron-Core training on the virtual device: Megatron-Core's own wrapper, optimizer and schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memplug.errors import EstimateError
from memplug.predict.estimator import gpt
from memplug.predict.estimator.layout import RankLayout
from memplug.predict.estimator.training import VirtualTraining, unable
from memplug.predict.estimator.workload import DTYPES, Workload
from memplug.predict.virtual import VirtualDevice
from memplug.predict.virtual.as_cuda import as_cuda
from memplug.predict.virtual.experts import routed
from memplug.predict.virtual.ranks import joined
from memplug.predict.virtual.replacing import replaced
from memplug.predict.virtual.routing import Routing
from memplug.session.ranks import Ranks

MEGATRON = "megatron-core 0.16"


@contextlib.contextmanager
def rank_of(layout: RankLayout, stage: int, workload: Workload, micro_batches: int) -> Iterator[None]:
    """Make this process the first rank of a pipeline stage for Megatron-Core inside the context.

    The virtual device must exist. Tokens are spread over the experts of a mixture by the workload's routing.

    Args:
        layout: How the model is split over the ranks.
        stage: The pipeline stage.
        workload: The whole model and its batch.
        micro_batches: Micro-batches of a step on each data-parallel rank.

    Raises:
        EstimateError: Megatron-Core is not installed.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # the virtual device has no compiler
        stack.enter_context(as_cuda())
        stack.enter_context(joined(layout.rank(stage), layout.gpus))
        # The fake process group makes all ranks look like this one. Of ranks with the same regions only rank 0 plans,
        # so this rank must be rank 0 to memplug.
        stack.enter_context(replaced(Ranks, "rank", property(lambda self: 0), "this version"))
        _import()
        stack.enter_context(_without_reading())
        if workload.shape.is_mixture:
            fields = workload.shape.fields
            sizes = fields["num_experts_per_tok"], fields["num_local_experts"]
            stack.enter_context(routed(workload.routing or Routing(), *sizes, micro_batches))
        yield


def _import() -> None:
    try:
        from megatron.core.transformer.moe import moe_utils
    except ImportError as error:
        raise EstimateError(
            f"Megatron-Core cannot be imported: {error}", "Run `pip install 'memplug[megatron]'`."
        ) from None
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # Megatron-Core 0.16 defines it only with Transformer Engine


@contextlib.contextmanager
def _without_reading() -> Iterator[None]:
    """Make Megatron-Core's check for infinite fp16 gradients pass inside the context.

    The virtual device has no values for the check to read.
    """
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    name = "_unscale_main_grads_and_check_for_nan"
    check = getattr(MixedPrecisionOptimizer, name)
    with replaced(MixedPrecisionOptimizer, name, lambda self: bool(check(self)) and False, MEGATRON):
        yield


class MegatronTraining(VirtualTraining):
    """Training of this rank's part of a model by Megatron-Core's schedule; make and run it inside `rank_of`.

    As in Megatron-LM, gradients are reduced in float32 and clipped, Adam's states are float32, and parameters in bf16
    or fp16 have float32 copies. The optimizer's states are sharded over data-parallel and context-parallel ranks (the
    distributed optimizer). The collectives of gradients and parameters overlap with computation.

    Args:
        workload: The whole model, with its head, and the batch.
        layout: How the model is split over the ranks.
        micro_batches: Micro-batches of a step on each data-parallel rank.
    """

    def __init__(self, workload: Workload, layout: RankLayout, micro_batches: int):
        from megatron.core import parallel_state, tensor_parallel

        self._workload, self._layout, self._micro_batches = workload, layout, micro_batches
        self._dtype, self._shares = DTYPES[workload.dtype], layout.data * layout.context > 1
        self._schedule: tuple[torch.Event, torch.Event] | None = None
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=1 if layout.expert > 1 else None,  # each expert is on one rank
        )
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        self._ends = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        super().__init__(self._make_model, self._inputs)
        try:
            self._adam = self._make_adam() if workload.optimizer else None
        except RuntimeError as error:
            raise unable("Megatron-Core's optimizer", error) from error

    @property
    def schedule_s(self) -> float:
        """Return how long forward and backward of all micro-batches took in the last step, in seconds.

        Synchronize the device first.
        """
        assert self._schedule is not None, "there was a step"
        return VirtualDevice.current().seconds_between(*self._schedule)

    def close(self) -> None:
        """Release the state of Megatron-Core that would keep the model's memory alive.

        This state is the process groups, Megatron-Core's global memory buffer, the cache of rotary angles, and the
        experts' token dispatchers, which hold the last autograd graph.
        """
        from megatron.core import parallel_state
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

        RotaryEmbedding.forward.cache_clear()
        for module in self.model.modules():
            if hasattr(module, "token_dispatcher"):
                module.token_dispatcher = None
        parallel_state.destroy_model_parallel()

    def _make_model(self) -> nn.Module:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        workload, shares = self._workload, self._shares
        config = gpt.config_of(workload.shape, workload.layers, self._layout, self._dtype)
        first, last = self._ends
        part = gpt.make_model(config, workload.shape, workload.seq_len, first=first, last=last)
        reducing = DistributedDataParallelConfig(
            use_distributed_optimizer=shares,
            overlap_grad_reduce=shares,
            overlap_param_gather=shares,
            grad_reduce_in_fp32=True,
        )
        model = DistributedDataParallel(config, reducing, part)
        config.finalize_model_grads_func = finalize_model_grads
        if shares:
            config.no_sync_func, config.grad_sync_func = model.no_sync, model.start_grad_sync
        return model

    def _inputs(self) -> dict[str, torch.Tensor]:
        size = self._workload.micro_batch, self._workload.seq_len // self._layout.context
        ids = torch.zeros(size, dtype=torch.long)
        return {"input_ids": ids, "position_ids": torch.zeros_like(ids), "labels": ids}

    def _make_adam(self) -> Any:
        """Make an Adam with fused kernels that update parameters in place, as Apex's and Transformer Engine's do."""
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            bf16=self._dtype is torch.bfloat16,
            fp16=self._dtype is torch.float16,
            params_dtype=self._dtype,
            use_distributed_optimizer=self._shares,
            overlap_param_gather=self._shares,
        )
        optimizer = get_megatron_optimizer(config, [self.model])
        for group in optimizer.param_groups:
            group["fused"] = True
        return optimizer

    def _train(self) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        if self._adam is not None:
            self._adam.zero_grad()
        device = VirtualDevice.current()
        begin = device.stamp()
        get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=None,
            model=self.model,
            num_microbatches=self._micro_batches,
            seq_length=self._workload.seq_len,
            micro_batch_size=self._workload.micro_batch,
            forward_only=False,
        )
        self._schedule = begin, device.stamp()
        if self._adam is not None:
            self._adam.step()

    def _forward_step(self, batches: Any, model: nn.Module) -> Any:
        """Run one micro-batch's forward for Megatron-Core's schedule; return the output and the loss function."""
        return model(attention_mask=None, **self._kwargs), lambda output: (output.float().mean(), {})
