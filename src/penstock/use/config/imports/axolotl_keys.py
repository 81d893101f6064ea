"""axolotl keys that have no effect or no equivalent here, with the reason and the alternative.

Names are those of axolotl 0.19. Keys that are translated are not listed; `conversion`, `datasets`
and `training` read them.
"""

from collections.abc import Mapping

_TRACKERS = (
    "TensorBoard, W&B, trackio and MLflow are built in (training.log), and read their own "
    "environment variables; for others send metrics.jsonl of the run there yourself"
)
_QUANTISED = (
    "weights are trained in full precision, or frozen in 4 bits next to LoRA (adapter: qlora); "
    "take that, a smaller model or training.shard if they do not fit"
)
_OPTIMIZER = (
    "only AdamW and Muon are built in; for another optimizer use the loader in your own loop"
)
_PEFT = (
    "LoRA has no such setting here; to use other adapters, train in a Hugging Face Trainer "
    "(ps.huggingface)"
)
_ROLLOUTS = (
    "answers are sampled in rounds: `penstock rollouts`, then training.policy (GRPO, Dr. GRPO, "
    "DAPO, GSPO)"
)
_STOP = (
    "set `patience` of an evaluator (training.evaluators), or look at the curves (`penstock plot`) "
    "and take the checkpoint that you want"
)


def _each(names: str, text: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), text)


NO_EFFECT: Mapping[str, str] = {
    **_each(
        "flash_attention flash_attn_cross_entropy flash_attn_fuse_mlp flash_optimum "
        "flash_attn_d512 flex_attention flex_attn_compile_kwargs sdp_attention sdpa_varlen "
        "sage_attention xformers_attention eager_attention attn_implementation "
        "large_head_attention gemma4_hybrid_attn_impl fused_attn_kernel "
        "experts_implementation use_kernels heads_k_stride ring_attn_func s2_attention "
        "flash_attn_rms_norm",
        "the attention kernel is chosen and tried at the start (training.attention: auto)",
    ),
    **_each(
        "gradient_checkpointing_kwargs selective_checkpointing "
        "activation_offloading layer_offloading tiled_mlp tiled_mlp_num_shards "
        "tiled_mlp_use_original_mlp chunked_cross_entropy chunked_cross_entropy_num_chunks "
        "ple_cpu_offload lora_on_cpu low_cpu_mem_usage max_memory gpu_memory_limit gc_steps "
        "gc_collect_steps torch_empty_cache_steps dataset_keep_in_memory device_map "
        "experimental_skip_move_to_device embeddings_skip_upcast auto_find_batch_size "
        "dpo_padding_free dpo_use_liger_kernel dpo_use_logits_to_keep "
        "precompute_ref_log_probs qlora_sharded_model_loading",
        "it saves memory; see training.activation_checkpointing, rows_per_pass and shard; the "
        "loss is always computed in chunks",
    ),
    **_each(
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel unsloth_lora_mlp "
        "unsloth_lora_qkv unsloth_lora_o unsloth_cross_entropy_loss liger_rope liger_rms_norm "
        "liger_glu_activation liger_swiglu liger_layer_norm liger_fused_linear_cross_entropy "
        "liger_cross_entropy cut_cross_entropy",
        "it is a faster kernel for the same result",
    ),
    **_each(
        "tf32 float32 embeddings_skip_upcast ddp ddp_timeout ddp_bucket_cap_mb "
        "ddp_broadcast_buffers ddp_find_unused_parameters local_rank device "
        "accelerator_config deepcompile torch_compile_backend torch_compile_mode "
        "torch_compile_options dataloader_pin_memory dataloader_num_workers "
        "dataloader_prefetch_factor dataloader_drop_last remove_unused_columns dp_shard_size "
        "dp_replicate_size fsdp_version fsdp_final_state_dict_type fp32_norms "
        "fp32_norm_classes",
        "it concerns how fast the same result is computed",
    ),
    **_each(
        "dataset_prepared_path dataset_processes dataset_num_proc num_dataset_shards_to_save "
        "preprocess_iterable is_preprocess skip_prepare_dataset push_dataset_to_hub "
        "sample_packing_mp_start_method streaming streaming_multipack_buffer_size "
        "pretrain_multipack_buffer_size multipack_real_batches",
        "data are prepared once by penstock prepare, and read from disk",
    ),
    **_each(
        "sample_packing_group_size sample_packing_bin_size sample_packing_eff_est "
        "total_num_tokens total_supervised_tokens pad_to_sequence_len pad_to_multiple_of "
        "batch_flattening group_by_length eval_sample_packing eval_batch_size",
        "rows are packed by best fit in windows; padding is never trained or attended to",
    ),
    **_each(
        "type_of_model model_type tokenizer_type tokenizer_use_fast tokenizer_legacy "
        "tokenizer_save_jinja_files is_falcon_derived_model is_llama_derived_model "
        "is_mistral_derived_model is_qwen_derived_model cls_model_config axolotl_config_path "
        "strict",
        "the model and its tokenizer say it themselves",
    ),
    **_each(
        "hub_model_id hub_strategy hub_revision save_safetensors save_only_model "
        "hf_use_auth_token merge_lora merge_method",
        "publish what `penstock export RUN -o FOLDER` writes",
    ),
    **_each(
        "wandb_run_id wandb_mode wandb_entity wandb_watch wandb_log_model "
        "wandb_run_group wandb_offline logging_steps save_first_step "
        "include_tokens_per_second include_tkps profiler_steps profiler_steps_start "
        "eval_table_size eval_max_new_tokens",
        "it is about logs; set W&B's own environment variables (WANDB_NAME, WANDB_ENTITY, "
        "WANDB_MODE)",
    ),
    **_each(
        "resume_from_checkpoint auto_resume_from_checkpoints dynamic_checkpoint",
        "`penstock train … --resume` goes on exactly; a run is also saved at SIGTERM",
    ),
    **_each(
        "gradio_title gradio_share gradio_server_name gradio_server_port "
        "gradio_max_new_tokens gradio_temperature",
        "use `penstock serve RUN`, which has a chat page",
    ),
    **_each(
        "use_ray ray_run_name ray_num_workers resources_per_worker",
        "start with torchrun, or through Ray Train",
    ),
    **_each(
        "use_otel_metrics otel_metrics_host otel_metrics_port",
        "metrics are in metrics.jsonl of the run",
    ),
}
"""Key → why it does not change the trained model."""


UNSUPPORTED: Mapping[str, str] = {
    **_each(
        "load_in_8bit gptq bnb_config_kwargs quantize_moe_experts "
        "model_quantization_config model_quantization_config_kwargs use_onebitllms qat "
        "quantization fp8 fp8_config fp8_enable_fsdp_float8_all_gather",
        _QUANTISED,
    ),
    **_each("fp16 float16", "float16 is not trained here; weights are float32"),
    **_each(
        "lora_model_dir",
        "merge the adapter into its base with peft, and give the merged folder as base_model",
    ),
    **_each(
        "lora_fan_in_fan_out lora_target_parameters peft_layers_to_transform "
        "peft_layers_pattern peft peft_use_dora peft_layer_replication peft_init_lora_weights "
        "peft_trainable_token_indices peft_ensure_weight_tying peft_autocast_adapter_dtype "
        "relora relora_prune_ratio relora_prune_method relora_cpu_offload "
        "loraplus_lr_embedding jagged_restart_steps jagged_restart_warmup_steps "
        "jagged_restart_anneal_steps",
        _PEFT,
    ),
    **_each(
        "optim_args optim_target_modules torchdistx_path adam_epsilon2 adam_beta3 dion_lr "
        "dion_momentum dion_rank_fraction dion_rank_multiple_of qgalore_rank "
        "qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant "
        "qgalore_proj_bits qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj "
        "qgalore_queue_size lisa_n_layers lisa_step_interval lisa_layers_attribute",
        _OPTIMIZER,
    ),
    **_each(
        "lr_quadratic_warmup cosine_constant_lr_ratio lr_div_factor",
        "the schedule has shapes constant, linear, cosine and wsd with a linear warm-up: "
        "choose the nearest",
    ),
    **_each(
        "trl vllm ebft",
        _ROLLOUTS,
    ),
    **_each(
        "reward_model process_reward_model center_rewards_coefficient num_labels",
        "reward models have no head here; train them in TRL on prepared data (Dataset.to_datasets)",
    ),
    **_each(
        "dpo_use_weighting dpo_norm_loss dpo_generate_during_eval rpo_alpha kto_desirable_weight "
        "kto_undesirable_weight max_prompt_len",
        "training.preference has kind, beta, label_smoothing, gamma, sft_weight and also",
    ),
    **_each(
        "neftune_noise_alpha noisy_embedding_alpha use_eaft eaft_alpha eaft_k scaling_softmax "
        "scaling_softmax_factor scaling_softmax_bias use_pose pose_split_on_token_ids "
        "pose_max_context_len pose_num_chunks",
        "give your own loss (training.loss) or model (model: module:function)",
    ),
    **_each(
        "load_best_model_at_end metric_for_best_model greater_is_better "
        "loss_watchdog_threshold loss_watchdog_patience",
        _STOP,
    ),
    **_each(
        "do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset bench_split",
        "add an evaluator of kind task (mmlu, gsm8k, lm-eval:NAME, …) to training.evaluators",
    ),
    **_each(
        "generate_samples num_generation_samples generation_max_new_tokens "
        "generation_temperature generation_top_p generation_top_k generation_prompt_ratio "
        "generation_do_sample",
        "add an evaluator of kind samples with your prompts to training.evaluators",
    ),
    **_each(
        "mlflow_tracking_uri "
        "hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace comet_project_name "
        "comet_experiment_key comet_mode comet_online comet_experiment_config "
        "trackio_space_id",
        _TRACKERS,
    ),
    **_each(
        "overrides_of_model_config model_config overrides_of_model_kwargs model_kwargs "
        "base_model_config rope_scaling llama4_linearized_experts "
        "resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings "
        "reinit_weights fix_untrained_tokens",
        "change the model once with transformers, save_pretrained it to a folder, and give "
        "that folder as base_model",
    ),
    **_each(
        "revision_of_model model_revision",
        "download that revision to a folder (hf download NAME --revision …), and give the "
        "folder as base_model",
    ),
    "trust_remote_code": "code from a repository is never run; only models that transformers itself has",  # noqa: E501
    **_each(
        "trainer_cls plugins",
        "a trainer or plugin of axolotl has no counterpart; see training.loss, "
        "training.on_step and model: module:function",
    ),
    **_each(
        "special_tokens added_tokens_overrides tokenizer_use_mistral_common",
        "save a tokenizer with these tokens to a folder, and give that folder as tokenizer_config",
    ),
    "default_system_message": (
        "write it into the records, or into a copy of the chat template (chat.template: FILE)"
    ),
    "unfrozen_parameters": "list what is frozen instead: training.frozen, patterns of weights' names with *",  # noqa: E501
    **_each(
        "image_size image_resize_algorithm processor_kwargs",
        "set chat.shrink_pixels, or the processor's own files",
    ),
    "tensor_parallel_size": "penstock train has none; Megatron-Core and torchtitan do, with our loader",  # noqa: E501
    **_each(
        "dataset_shard_num dataset_shard_idx",
        "give part of the files, or a slice of a source (slice: [0, 0.5])",
    ),
    "min_sample_len": "documents with nothing to train are dropped; leave out shorter ones before",
    "max_packed_sequence_len": "axolotl removed it; use sequence_len with sample_packing",
    "eval_sequence_len": "held-out rows have the length of the training rows",
}
"""Key → what to do instead."""
