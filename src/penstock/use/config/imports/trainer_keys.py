"""Keys of transformers' TrainingArguments that have no effect or no equivalent here, with the
reason and the alternative.

Names are those of transformers 5.24, and of the last 4. Keys that are translated are not listed.
"""

from collections.abc import Mapping

_STOP = (
    "set `patience` of an evaluator (training.evaluators), or look at the curves (`penstock plot`) "
    "and take the checkpoint that you want"
)


def each(names: str, text: str) -> dict[str, str]:
    """The same text for many keys."""
    return dict.fromkeys(names.split(), text)


NO_EFFECT: Mapping[str, str] = {
    **each(
        "activation_checkpointing_kwargs "
        "gradient_checkpointing_kwargs torch_empty_cache_steps auto_find_batch_size "
        "activation_offloading skip_memory_metrics",
        "it saves memory; see training.activation_checkpointing, rows_per_pass and shard",
    ),
    **each(
        "use_liger_kernel liger_kernel_config tf32 torch_compile_backend torch_compile_mode "
        "use_cache full_determinism use_cpu no_cuda use_mps_device jit_mode_eval "
        "accelerator_config dataloader_num_workers dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order dataloader_drop_last "
        "remove_unused_columns ddp_find_unused_parameters "
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout "
        "average_tokens_across_devices local_rank length_column_name group_by_length "
        "label_names bf16_full_eval half_precision_backend attn_implementation",
        "it concerns how fast the same result is computed; the loss is always divided by the "
        "trained tokens of all rows and processes",
    ),
    **each(
        "logging_dir logging_strategy logging_steps logging_first_step log_on_each_node "
        "logging_nan_inf_filter include_num_input_tokens_seen include_tokens_per_second log_level "
        "log_level_replica disable_tqdm debug trackio_space_id trackio_bucket_id "
        "trackio_static_space_id run_name project",
        "every step is in metrics.jsonl of the run; the terminal shows a line (training.log_every)",
    ),
    **each(
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
        "hub_revision save_only_model save_on_each_node save_safetensors enable_jit_checkpoint",
        "publish what `penstock export RUN -o FOLDER` writes; a run is saved at SIGTERM anyway",
    ),
    **each(
        "resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint "
        "overwrite_output_dir",
        "`penstock train … --resume` goes on exactly",
    ),
    **each(
        "do_train do_eval do_predict per_device_eval_batch_size prediction_loss_only eval_delay "
        "eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
        "include_for_metrics batch_eval_metrics eval_packing",
        "held-out rows are evaluated by training.evaluators",
    ),
    **each(
        "sortish_sampler predict_with_generate generation_max_length generation_num_beams "
        "generation_config",
        "they are for evaluation of encoder-decoders; add an evaluator of kind samples or task",
    ),
    "data_seed": "data.loader.seed is the seed of the data; draws differ anyway",
    "env": "set these variables in your shell",
}
"""Key → why it does not change the trained model."""

UNSUPPORTED: Mapping[str, str] = {
    "fp16": "float16 is not trained here: training.precision is auto, float32 or bfloat16",
    "fp16_full_eval": "float16 is not used here: training.precision is auto, float32 or bfloat16",
    "optim_args": "only AdamW and Muon are built in, with the keys of training.optimizer",
    "optim_target_modules": "only AdamW and Muon are built in",
    "label_smoothing_factor": "give your own loss (training.loss)",
    "neftune_noise_alpha": "give your own loss (training.loss) or model (model: module:function)",
    "parallelism_config": (
        "training.shard and training.context_parallel say how processes share the work"
    ),
    "report_to": (
        "TensorBoard, W&B, trackio and MLflow are built in (training.log); for others send "
        "metrics.jsonl of the run there yourself"
    ),
    "train_sampling_strategy": "documents are shuffled in each epoch; `shuffle: none` of a source keeps their order",  # noqa: E501
    **each("load_best_model_at_end metric_for_best_model greater_is_better", _STOP),
    "trust_remote_code": "code from a repository is never run; only models that transformers itself has",  # noqa: E501
}
"""Key → what to do instead."""
