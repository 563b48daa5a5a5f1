"""Names in other packages on which memplug relies: packages that are not installed, or that have several versions.

`tests.support.check_symbols` compares them with those packages' sources. A symbol is "module:name". The name may have
members ("module:Class.method"), and in brackets the parameters that memplug passes by name ("module:function(a, b)"; a
class's are its constructor's). Attributes of objects are members of their class. Of alternatives, the newest is first.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Text:
    """A symbol that only text shows: a key of a dictionary, an operator's registered name, a decorator.

    Attributes:
        text: the text to look for; white space does not count.
        file: the file's path from the folder that contains the package's folder; "" for any file of the package.
    """

    text: str
    file: str = ""


Symbol = str | Text
Use = Symbol | tuple[Symbol, ...]


@dataclass(frozen=True)
class Package:
    """A package, and its symbols.

    Attributes:
        folder: the folder of its modules.
        uses: symbols by the file of memplug that relies on them.
        imitated: further symbols that the stand-ins in tests/support/stand_ins imitate and memplug does not use.
        distribution: the package's name on the package index; "" if it is not there.
    """

    folder: str
    uses: dict[str, tuple[Use, ...]]
    imitated: tuple[Use, ...] = field(default=())
    distribution: str = ""


def members(owner: str, *names: str) -> tuple[str, ...]:
    """Return symbols of one module ("module:") or class ("module:Class.")."""
    return tuple(f"{owner}{name}" for name in names)


_TE = "transformer_engine.pytorch"
_MANAGER = f"{_TE}.quantization:FP8GlobalStateManager", f"{_TE}.fp8:FP8GlobalStateManager"  # before 2.9
_RECOMPUTE = f"{_TE}.distributed:activation_recompute_forward"
_BASE = f"{_TE}.module.base:TransformerEngineBaseModule."
_POSITION = "global_fp8_buffer_pos_fwd_recompute"

TRANSFORMER_ENGINE = Package(
    "transformer_engine",
    distribution="transformer-engine",
    uses={
        "memplug/hooks/transformer_engine.py": (
            *members(f"{_TE}:", "Linear", "LayerNormLinear", "LayerNormMLP", "LayerNorm", "RMSNorm", "GroupedLinear"),
            f"{_TE}:DotProductAttention.cp_group",
            *members(_BASE, "fp8_meta", "tp_group", "tp_size"),
            (f"{_MANAGER[0]}.is_fp8_enabled", f"{_MANAGER[1]}.is_fp8_enabled"),
            (f"{_MANAGER[0]}.get_autocast_state", f"{_MANAGER[1]}.get_fp8_autocast_state"),
            (f"{_MANAGER[0]}.set_autocast_state", f"{_MANAGER[1]}.set_fp8_autocast_state"),
            # before 2.15 the manager itself had the fields that follow
            (f"{_MANAGER[0]}.quantization_state", *(f"{each}.fp8_tensors_recompute_buffer" for each in _MANAGER)),
            (
                f"{_TE}.quantization:FP8GlobalState.fp8_tensors_recompute_buffer",
                *(f"{each}.fp8_tensors_recompute_buffer" for each in _MANAGER),
            ),
            (
                f"{_TE}.quantization:FP8GlobalState.autocast_depth",
                f"{_MANAGER[0]}.AUTOCAST_DEPTH",
                f"{_MANAGER[1]}.FP8_AUTOCAST_DEPTH",
            ),
            (
                Text(f'"{_POSITION}"', "transformer_engine/pytorch/quantization.py"),
                Text(f'"{_POSITION}"', "transformer_engine/pytorch/fp8.py"),
            ),
            f"{_RECOMPUTE}(activation_recompute, recompute_phase)",
            f"{_RECOMPUTE}._is_first_fp8_module",
            *members(f"{_TE}:", "checkpoint", "get_cpu_offload_context(enabled)"),
            f"{_TE}.distributed:checkpoint",
            f"{_TE}.cpu_offload:get_cpu_offload_context(enabled)",
        ),
    },
    imitated=(
        f"{_TE}.module.linear:_Linear",
        f"{_TE}.module.layernorm:LayerNorm",
        f"{_TE}.module.rmsnorm:RMSNorm",
        f"{_TE}.module.layernorm_linear:_LayerNormLinear",
        f"{_TE}.module.layernorm_mlp:_LayerNormMLP",
        f"{_TE}.module.grouped_linear:_GroupedLinear",
        # custom operators in place of Functions, from 2.15
        *(
            (
                Text(f'"te_moe::{operator}"', "transformer_engine/pytorch/permutation.py"),
                f"{_TE}.permutation:{function}",
            )
            for operator, function in (
                ("permute_mask_map_fwd", "_moe_permute_mask_map"),
                ("unpermute_mask_map_fwd", "_moe_unpermute_mask_map"),
                ("chunk_sort_fwd", "_moe_chunk_sort"),
            )
        ),
        f"{_TE}.attention.rope:FusedRoPEFunc",
        f"{_TE}.attention.dot_product_attention.backends:FusedAttnFunc",
        *members(
            f"{_TE}.attention.dot_product_attention.context_parallel:AttnFuncWithCPAnd",
            *("KVP2P", "KVAllGather", "QKVOA2A"),
        ),
        f"{_TE}.distributed:_CheckpointFunction",
        f"{_TE}.tensor:prepare_for_saving",
        f"{_TE}.tensor:restore_from_saved",
        f"{_TE}.utils:clear_tensor_data",
        *members(_BASE, "quantizers", "_fp8_workspaces", "prepare_forward", "backward_dw"),
        f"{_TE}.module.linear:Linear(fuse_wgrad_accumulation, delay_wgrad_compute, save_original_input)",
        Text(".tensor_objects", "transformer_engine/pytorch/module/linear.py"),
        Text("._do_not_clear = True"),
        f"{_TE}.quantization:autocast(enabled, recipe)",
        f"{_TE}.distributed:in_fp8_activation_recompute_phase",
        f"{_TE}.distributed:is_fp8_activation_recompute_enabled",
    ),
)

_FA2 = "flash_attn/flash_attn_interface.py"

FLASH_ATTN = Package(
    "flash_attn",
    distribution="flash-attn",
    uses={
        "memplug/tokenwise/engine/operators.py": (
            Text('"flash_attn::_flash_attn_forward", mutates_args=()', _FA2),
            Text('"flash_attn::_flash_attn_varlen_forward", mutates_args=()', _FA2),
            Text('"flash_attn::_flash_attn_backward"', _FA2),
            Text('"flash_attn::_flash_attn_varlen_backward"', _FA2),
        ),
    },
    imitated=(
        *members("flash_attn.flash_attn_interface:", "FlashAttnFunc", "FlashAttnVarlenFunc"),
        "flash_attn:flash_attn_func(dropout_p, softmax_scale, causal, window_size, deterministic, return_attn_probs)",
        "flash_attn:flash_attn_varlen_func(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)",
        *members("flash_attn.bert_padding:", "IndexFirstAxis", "IndexPutFirstAxis", "pad_input", "unpad_input"),
        "flash_attn:flash_attn_qkvpacked_func",
        "flash_attn.layers.rotary:ApplyRotaryEmb",
    ),
)

_FA3 = "hopper/flash_api.cpp"

FLASH_ATTN_3 = Package(
    "hopper",
    uses={
        "memplug/tokenwise/engine/operators.py": (
            Text("TORCH_LIBRARY(flash_attn_3,", _FA3),
            Text('m.def("fwd(', _FA3),
            Text('m.def("bwd(', _FA3),
            # memplug captures no operator that writes; the C++ operator declares a write to `out`, the Python one none
            Text('"flash_attn_3::_flash_attn_forward", mutates_args=()', "hopper/flash_attn_interface.py"),
            Text('"flash_attn_3::_flash_attn_backward"', "hopper/flash_attn_interface.py"),
        ),
    },
)

_MC = "megatron.core"
_CONFIG = f"{_MC}.transformer.transformer_config:TransformerConfig"
_LAYER = f"{_MC}.transformer.transformer_layer:TransformerLayer"
_STATE = f"{_MC}.parallel_state:"
_TRACKER = f"{_MC}.tensor_parallel.random:CudaRNGStatesTracker."
_DISPATCHER = f"{_MC}.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
_SPECS = f"{_MC}.models.gpt.gpt_layer_specs:get_gpt_layer_local_"
_OF_LAYER = "(num_experts, moe_grouped_gemm, normalization)"
_SCHEDULE = "(forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, forward_only)"

MEGATRON = Package(
    "megatron",
    distribution="megatron-core",
    uses={
        "memplug/hooks/megatron.py": (
            f"{_MC}:__version__",
            f"{_LAYER}.forward",
            f"{_LAYER}._forward_attention(inference_context, inference_params)",
            f"{_LAYER}.cudagraph_manager",
            *members(f"{_CONFIG}.", "num_layers", "hidden_size", "pipeline_model_parallel_size"),
            *members(f"{_CONFIG}.", "recompute_granularity", "cpu_offloading", "fine_grained_activation_offloading"),
            *((f"{_CONFIG}.cuda_graph_impl", f"{_CONFIG}.{name}_cuda_graph") for name in ("enable", "external")),
            *members(f"{_CONFIG}.", "cuda_graph_impl", "overlap_moe_expert_parallel_comm", "hybrid_context_parallel"),
            *members(f"{_CONFIG}.", "multi_latent_attention", "apply_rope_fusion", "moe_flex_dispatcher_backend"),
            (f"{_CONFIG}.moe_paged_stash", f"{_CONFIG}.cpu_offloading"),  # from 0.18 on
            f"{_MC}.transformer.moe.experts:SequentialMLP",
            (f"{_MC}.transformer.moe.experts:TEGroupedMLP", f"{_MC}.transformer.moe.experts:GroupedMLP"),
            *members(_STATE, "model_parallel_is_initialized", "get_context_parallel_world_size"),
            *members(_STATE, "get_expert_model_parallel_world_size", "get_tensor_model_parallel_world_size"),
            *members(_STATE, "get_pipeline_model_parallel_world_size", "get_pipeline_model_parallel_rank"),
            *members(_STATE, "_GLOBAL_MEMORY_BUFFER", "get_global_memory_buffer", "GlobalMemoryBuffer.get_tensor"),
            f"{_STATE}GlobalMemoryBuffer.buffer",
            *members(f"{_MC}.pipeline_parallel.schedules:", "forward_step", "backward_step"),
            (
                f"{_MC}.transformer.moe.moe_logging:MoEMetricsTracker.record",
                f"{_MC}.transformer.moe.router:save_to_aux_losses_tracker",  # up to 0.17
            ),
            *members(
                f"{_MC}.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.",
                *("start_param_sync", "finish_param_sync"),
            ),
            f"{_MC}.tensor_parallel.random:get_cuda_rng_tracker",
            *members(_TRACKER, "get_states", "set_states"),
        ),
        "memplug/tokenwise/engine/hidden.py": members(
            f"{_MC}.transformer.moe.fused_a2a:",
            *("FusedDispatch", "FusedCombine", "HybridEPDispatch", "HybridEPCombine"),
        ),
        "memplug/predict/virtual/experts.py": (
            f"{_DISPATCHER}.preprocess(routing_map)",
            *members(f"{_DISPATCHER}.", "drop_and_pad", "config", "num_experts", "local_expert_indices", "ep_size"),
            *members(f"{_DISPATCHER}.", "tp_size", "tp_rank", "input_splits", "output_splits", "output_splits_tp"),
            *members(f"{_DISPATCHER}.", "num_local_experts", "num_global_tokens_per_local_expert"),
            f"{_CONFIG}.moe_router_topk",
        ),
        "memplug/predict/estimator/megatron.py": (
            f"{_MC}.transformer.moe.moe_utils",
            f"{_MC}.optimizer.optimizer:MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan",
            f"{_STATE}initialize_model_parallel"
            "(context_parallel_size, expert_model_parallel_size, expert_tensor_parallel_size)",
            *members(_STATE, "is_pipeline_first_stage", "is_pipeline_last_stage", "destroy_model_parallel"),
            f"{_MC}.tensor_parallel:model_parallel_cuda_manual_seed",
            f"{_MC}.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.forward",
            Text("@lru_cache", "megatron/core/models/common/embeddings/rotary_pos_embedding.py"),
            f"{_MC}.transformer.moe.moe_layer:MoELayer.token_dispatcher",
            *members(
                f"{_MC}.distributed:DistributedDataParallel.",
                *("no_sync", "start_grad_sync", "zero_grad_buffer"),
            ),
            f"{_MC}.distributed:DistributedDataParallelConfig"
            "(use_distributed_optimizer, overlap_grad_reduce, overlap_param_gather, grad_reduce_in_fp32)",
            f"{_MC}.distributed:finalize_model_grads",
            *members(f"{_CONFIG}.", "finalize_model_grads_func", "no_sync_func", "grad_sync_func"),
            f"{_MC}.optimizer:get_megatron_optimizer",
            f"{_MC}.optimizer:OptimizerConfig"
            "(optimizer, lr, bf16, fp16, params_dtype, use_distributed_optimizer, overlap_param_gather)",
            *members(f"{_MC}.optimizer.optimizer:MegatronOptimizer.", "param_groups", "zero_grad", "step"),
            f"{_MC}.pipeline_parallel:get_forward_backward_func",
            f"{_MC}.pipeline_parallel.schedules:forward_backward_no_pipelining{_SCHEDULE}",
            f"{_MC}.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving{_SCHEDULE}",
        ),
        "memplug/predict/estimator/gpt.py": (
            f"{_STATE}get_context_parallel_group",
            f"{_CONFIG}(num_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_query_groups, kv_channels)",
            f"{_CONFIG}(layernorm_epsilon, normalization, gated_linear_unit, activation_func, add_bias_linear)",
            f"{_CONFIG}(hidden_dropout, attention_dropout, tensor_model_parallel_size, sequence_parallel)",
            f"{_CONFIG}(pipeline_model_parallel_size, expert_model_parallel_size, context_parallel_size)",
            f"{_CONFIG}(expert_tensor_parallel_size, params_dtype, pipeline_dtype, bf16, fp16, perform_initialization)",
            f"{_CONFIG}(deallocate_pipeline_outputs, apply_rope_fusion, bias_activation_fusion, bias_dropout_fusion)",
            f"{_CONFIG}(masked_softmax_fusion, gradient_accumulation_fusion, num_moe_experts, moe_router_topk)",
            f"{_CONFIG}(moe_router_load_balancing_type, moe_aux_loss_coeff, moe_token_dispatcher_type)",
            f"{_MC}.models.gpt.gpt_model:GPTModel"
            "(vocab_size, max_sequence_length, pre_process, post_process, position_embedding_type, rotary_base, "
            "share_embeddings_and_output_weights)",
            f"{_MC}.models.gpt.gpt_model:GPTModel.forward(input_ids, position_ids, attention_mask, labels)",
            f"{_MC}.transformer.module:Float16Module",
            f"{_SPECS}spec",
            # from 0.17 the second function calls the first
            (f"{_SPECS}submodules{_OF_LAYER}", f"{_SPECS}spec{_OF_LAYER}"),
            f"{_MC}.transformer.spec_utils:ModuleSpec.submodules",
            *members(
                f"{_MC}.transformer.transformer_layer:TransformerLayerSubmodules.",
                *("input_layernorm", "pre_mlp_layernorm", "self_attention"),
            ),
            f"{_MC}.transformer.attention:SelfAttentionSubmodules.core_attention",
            f"{_MC}.transformer.transformer_block:TransformerBlockSubmodules(layer_specs, layer_norm)",
            f"{_MC}.transformer.transformer_block:get_num_layers_to_build",
        ),
    },
)

MEGATRON_LM = Package(
    "megatron/training",
    distribution="megatron-core",  # from 0.17 on this package has Megatron-LM's training loop too
    uses={
        "memplug/hooks/megatron_training.py": members(
            "megatron.training.training:", "setup_model_and_optimizer", "train_step"
        )
    },
)

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine."
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload."
_ZERO = "deepspeed.runtime.zero."

DEEPSPEED = Package(
    "deepspeed",
    distribution="deepspeed",
    uses={
        "memplug/hooks/deep_compile.py": (
            f"{_ENGINE}compile",
            (f"{_ENGINE}is_deepcompile_active", f"{_ENGINE}is_deepcompile_enabled"),
        ),
        "memplug/hooks/deepspeed.py": (
            "deepspeed:initialize(model, config)",
            *members(_ENGINE, "step", "backward", "destroy", "allreduce_gradients"),
            *members(_ENGINE, "zero_optimization_stage", "gradient_accumulation_steps"),
            *members(_ENGINE, "global_steps", "global_samples", "monitor", "device", "optimizer"),
            Text("self.__dict__['module'] =", "deepspeed/runtime/engine.py"),
            *members(_ENGINE, "basic_optimizer", "config"),
            "deepspeed.runtime.config:DeepSpeedConfig._param_dict",
            "deepspeed.runtime.pipe.engine:PipelineEngine.train_batch",
            *members("deepspeed.monitor.monitor:MonitorMaster.", "enabled", "write_events"),
            "deepspeed.runtime.activation_checkpointing.checkpointing:is_configured",
            "deepspeed.moe.experts:Experts",
            "deepspeed.runtime.utils:DummyOptim",
            *members(
                _OFFLOAD,
                *(f"{at}_sub_module_{of}_function" for at in ("pre", "post") for of in ("forward", "backward")),
            ),
            f"{_ZERO}stage3:DeepSpeedZeroOptimizer_Stage3.parameter_offload",
            f"{_ZERO}parameter_offload:FWD_MODULE_STACK",
            *members(f"{_ZERO}partition_parameters:Init.", "_all_gather", "_partition"),
            Text("module.ds_id =", "deepspeed/runtime/zero/parameter_offload.py"),
            Text("._z3_leaf =", "deepspeed/utils/z3_leaf_module.py"),
        ),
        "memplug/hooks/checkpointing.py": tuple(
            members(
                "deepspeed.runtime.activation_checkpointing.checkpointing:",
                *("CheckpointFunction", "non_reentrant_checkpoint", "get_cuda_rng_tracker"),
            )
        ),
        "memplug/hooks/job.py": (Text("param.ds_numel =", "deepspeed/runtime/zero/partition_parameters.py"),),
        "memplug/predict/tune/deepspeed.py": (f"{_ZERO}offload_config:DeepSpeedZeroOffloadOptimizerConfig.ratio",),
        "memplug/predict/estimator/engine.py": ("deepspeed:zero.Init(config_dict_or_path)",),
        "memplug/predict/virtual/accelerator.py": (
            *members("deepspeed.accelerator.real_accelerator:", "ds_accelerator", "set_accelerator"),
            "deepspeed:init_distributed",
            "deepspeed.comm.comm:cdb",
            f"{_ZERO}stage_1_and_2:DeepSpeedZeroOptimizer.has_overflow",
            f"{_ZERO}stage_1_and_2:is_invalid_grad_norm",
            f"{_ZERO}stage3:DeepSpeedZeroOptimizer_Stage3.has_overflow",
            f"{_ZERO}stage3:is_invalid_grad_norm",
            "deepspeed.runtime.utils:CheckOverflow.has_overflow",
            *members(f"{_ZERO}utils:", "get_lst_from_rank0", "assert_lst_len_same_as_other_ranks"),
            "deepspeed.accelerator.cpu_accelerator:CPU_Accelerator._name",
            "deepspeed.accelerator.cpu_accelerator:CPU_Accelerator._communication_backend_name",
        ),
    },
)

_STUB, _FUNCTORCH = "torch/_C/__init__.pyi", "torch/_C/_functorch.pyi"
_COMPILER = "torch._dynamo.eval_frame:"

TORCH = Package(
    "torch",
    distribution="torch",
    uses={
        "memplug/torch_private.py": (
            # stubs declare the members of extensions
            *(
                Text(f"def {name}(", _STUB)
                for name in (
                    *("_current_graph_task_id", "_is_tracing", "_get_dispatch_mode", "_len_torch_dispatch_stack"),
                    *("_vmapmode_increment_nesting", "_vmapmode_decrement_nesting"),
                    *("_host_emptyCache", "_get_privateuse1_backend_name"),
                )
            ),
            Text("class _TorchDispatchModeKey", _STUB),
            Text("def peek_interpreter_stack(", _FUNCTORCH),
            Text("def is_functorch_wrapped_tensor(", _FUNCTORCH),
            Text("def get_eval_frame_callback(", "torch/_C/_dynamo/eval_frame.pyi"),
            Text("PrivateUse1", "torch/_C/_autograd.pyi"),
            Text("def _fused_sdp_choice(", "torch/_C/_VariableFunctions.pyi"),
            Text("._saved_tensors_hooks_is_enabled()"),
            Text("class FakeProcessGroup(", "torch/_C/_distributed_c10d.pyi"),
            Text("class PythonCallbackWork(", "torch/_C/_distributed_c10d.pyi"),
            "torch:_register_device_module",
            "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack",
            "torch._ops:OpOverload",
            *members("torch.autograd:", "_unsafe_preserve_version_counter", "forward_ad._current_level"),
            "torch.cuda.memory:_dump_snapshot",
            *members("torch.distributed.distributed_c10d:", "_get_default_store", "_new_process_group_helper"),
            (
                "torch.fx._symbolic_trace:_get_is_fx_tracing",
                "torch.fx._symbolic_trace:_is_fx_tracing_flag",  # up to 2.13
            ),
            *members("torch.overrides:", "_get_current_function_mode_stack", "_push_mode", "_pop_mode"),
            "torch.utils._device:DeviceContext",
            "torch.utils._python_dispatch:TorchDispatchMode",
            *members("torch.utils._pytree:", "tree_flatten", "tree_unflatten", "tree_leaves", "tree_map"),
            Text("._push_saved_tensors_default_hooks("),
            Text("._pop_saved_tensors_default_hooks("),
            "torch._dynamo.decorators:skip_code",
            *members(_COMPILER, "_stance", "DynamoStance", "_callback_from_stance", "innermost_backend"),
            *members(_COMPILER, "_create_wrapped_callback", "_debug_get_cache_entry_list"),
            Text("def compile_wrapper(", "torch/_dynamo/eval_frame.py"),
            "torch._inductor.config",
            "torch.utils.checkpoint:CheckpointFunction",
            "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:CheckpointWrapper",
        ),
    },
)

PACKAGES = {
    "transformer-engine": TRANSFORMER_ENGINE,
    "flash-attn": FLASH_ATTN,
    "flash-attn-3": FLASH_ATTN_3,
    "megatron-core": MEGATRON,
    "megatron-lm": MEGATRON_LM,
    "deepspeed": DEEPSPEED,
    "torch": TORCH,
}
"""The packages by the name that `tests.support.check_symbols` takes."""
