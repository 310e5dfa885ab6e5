"""The options of torchtitan 0.2.2, which are the keys of its TOML, and their names in older files."""

from __future__ import annotations

__all__ = ["CHOICES", "GONE", "OPTIONS", "name_today"]

# Those of torchtitan 0.2.2's ``JobConfig``, except for those that a command line cannot express.
OPTIONS = frozenset(
    f"{section}.{key}"
    for section, keys in {
        "job": "dump_folder description print_config save_config_file custom_config_module",
        "profiling": "enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup "
        "enable_memory_snapshot save_memory_snapshot_folder",
        "metrics": "log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb",
        "model": "name flavor hf_assets_path tokenizer_path converters print_after_conversion",
        "optimizer": "name lr beta1 beta2 eps weight_decay implementation early_step_in_backward",
        "lr_scheduler": "warmup_steps total_steps decay_ratio decay_type min_lr_factor",
        "training": "dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload "
        "dtype mixed_precision_param mixed_precision_reduce gc_freq gc_debug",
        "training.dataloader": "num_workers persistent_workers pin_memory prefetch_factor",
        "parallelism": "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward "
        "tensor_parallel_degree disable_loss_parallel enable_async_tensor_parallel pipeline_parallel_degree "
        "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
        "pipeline_parallel_layers_per_stage pipeline_parallel_schedule pipeline_parallel_schedule_csv "
        "pipeline_parallel_microbatch_size pipeline_parallel_expert_parallel_overlap context_parallel_degree "
        "context_parallel_load_balancer context_parallel_rotate_method expert_parallel_degree "
        "expert_tensor_parallel_degree expert_parallel_comm_backend",
        "checkpoint": "enable enable_ft_dataloader_checkpoints folder interval initial_load_path "
        "initial_load_model_only initial_load_in_hf initial_load_in_hf_quantized last_save_model_only last_save_in_hf "
        "export_dtype async_mode keep_latest_k load_step exclude_from_loading enable_first_step_checkpoint "
        "create_seed_checkpoint load_only",
        "activation_checkpoint": "mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop "
        "memory_budget visualize_memory_budget_pareto preserve_rng_state determinism_check debug",
        "compile": "enable components backend",
        "quantize.linear.float8": "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp recipe_name "
        "filter_fqns emulate",
        "quantize.linear.mx": "mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns",
        "quantize.grouped_mm.float8": "fqns",
        "quantize.grouped_mm.mx": "recipe_name fqns",
        "comm": "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder save_traces_file_prefix "
        "mode",
        "memory_estimation": "enable disable_fake_mode",
        "fault_tolerance": "enable process_group process_group_timeout_ms replica_id group_size min_replica_size "
        "semi_sync_method",
        "experimental": "custom_import custom_args_module",
        "validation": "enable dataset dataset_path local_batch_size seq_len freq steps",
        "validation.dataloader": "num_workers persistent_workers pin_memory prefetch_factor",
        "debug": "seed deterministic deterministic_warn_only moe_force_load_balance",
    }.items()
    for key in keys.split()
)
CHOICES = {  # of the options with fixed values
    name: tuple(values.split())
    for name, values in {
        "optimizer.implementation": "for-loop foreach fused",
        "lr_scheduler.decay_type": "linear sqrt cosine",
        "training.dtype": "bfloat16 float32",
        "training.mixed_precision_param": "bfloat16 float32",
        "training.mixed_precision_reduce": "float32",
        "parallelism.fsdp_reshard_after_forward": "default always never",
        "parallelism.context_parallel_rotate_method": "allgather alltoall",
        "parallelism.expert_parallel_comm_backend": "standard deepep",
        "checkpoint.export_dtype": "float16 bfloat16 float32",
        "checkpoint.async_mode": "disabled async async_with_pinned_mem",
        "activation_checkpoint.mode": "selective full memory_budget none",
        "quantize.linear.float8.recipe_name": "tensorwise rowwise rowwise_with_gw_hp",
        "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": "triton cuda torch",
        "quantize.grouped_mm.mx.recipe_name": "mxfp8",
        "comm.mode": "default fake_backend local_tensor",
    }.items()
}
_RENAMED = {
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "float8.moe_fqns_prototype": "quantize.grouped_mm.float8.fqns",
    "job.print_args": "job.print_config",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "memory_estimation.enabled": "memory_estimation.enable",
    "mx.moe_fqns_prototype": "quantize.grouped_mm.mx.fqns",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.deterministic": "debug.deterministic",
    "training.seed": "debug.seed",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "validation.enabled": "validation.enable",
    **{
        f"{section}.{key}": f"parallelism.{key}"
        for section, keys in {
            "training": "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward "
            "tensor_parallel_degree",
            "experimental": "context_parallel_degree context_parallel_rotate_method enable_async_tensor_parallel "
            "pipeline_parallel_degree pipeline_parallel_microbatch_size pipeline_parallel_schedule "
            "pipeline_parallel_schedule_csv",
        }.items()
        for key in keys.split()
    },
}
_SECTIONS = {"float8.": "quantize.linear.float8.", "mx.": "quantize.linear.mx."}
# Keys without an option in 0.2.2, and why.
GONE = {
    "checkpoint.interval_type": "checkpoints are counted in steps",
    "job.use_for_integration_test": "is for torchtitan's own tests",
    "model.norm_type": "the model defines its own",
    "training.enable_fp8_linear": "for float8 give --model.converters=quantize.linear.float8 in source.arguments",
}


def name_today(name: str) -> str:
    """Return the name in 0.2.2 of a key, which may be from an older file."""
    if name in _RENAMED:
        return _RENAMED[name]
    section = next((before for before in _SECTIONS if name.startswith(before)), "")
    return _SECTIONS[section] + name.removeprefix(section) if section else name
