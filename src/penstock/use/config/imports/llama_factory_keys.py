"""LLaMA-Factory keys that have no effect or no equivalent here, with the reason and the
alternative.

Names are those of LLaMA-Factory 0.9.5, without those of transformers' TrainingArguments
(`trainer_keys`).
"""

from collections.abc import Mapping

from penstock.use.config.imports.trainer_keys import each

NO_EFFECT: Mapping[str, str] = {
    **each(
        "streaming buffer_size overwrite_cache preprocessing_batch_size preprocessing_num_workers "
        "tokenized_path data_shared_file_system cache_dir hf_hub_token ms_hub_token om_hub_token",
        "data are prepared once by penstock prepare, and read from disk",
    ),
    **each(
        "flash_attn use_unsloth use_unsloth_gc enable_liger_kernel disable_gradient_checkpointing "
        "use_reentrant_gc low_cpu_mem_usage offload_folder use_kv_cache use_v1_kernels "
        "device_map quantization_device_map compute_dtype upcast_layernorm upcast_lmhead_output "
        "block_diag_attn model_max_length use_fast_tokenizer quantization_type double_quantization "
        "quantization_method ignore_pad_token_for_loss use_mca use_hyper_parallel "
        "hyper_parallel_args use_kt kt_weight_path kt_expert_checkpoint_path kt_use_lora_experts "
        "kt_lora_expert_num kt_lora_expert_intermediate_size",
        "it concerns how fast the same result is computed, or memory; see training.attention, "
        "activation_checkpointing and precision",
    ),
    **each(
        "infer_backend infer_dtype vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank "
        "vllm_config sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config "
        "sglang_lora_backend do_sample temperature top_p top_k num_beams max_length "
        "max_new_tokens repetition_penalty length_penalty skip_special_tokens eval_num_beams",
        "it is for generation: `penstock generate`, `penstock serve`",
    ),
    **each(
        "export_dir export_size export_device export_quantization_bit export_quantization_dataset "
        "export_quantization_nsamples export_quantization_maxlen export_legacy_format "
        "export_hub_model_id",
        "publish what `penstock export RUN -o FOLDER` writes",
    ),
    **each(
        "plot_loss print_param_status include_effective_tokens_per_second compute_accuracy "
        "enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps "
        "profiler_active_steps profiler_repeat profiler_record_shapes profiler_profile_memory "
        "profiler_with_stack profile_modules eval_on_each_dataset",
        "metrics are in metrics.jsonl of the run: `penstock plot`",
    ),
    **each(
        "ray_num_workers ray_init_kwargs master_addr master_port",
        "start with torchrun, or through Ray Train",
    ),
    **each(
        "task task_dir batch_size lang n_shot save_dir download_mode",
        "add an evaluator of kind task to training.evaluators, or use `penstock eval`",
    ),
    **each(
        "ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards reward_model "
        "reward_model_adapters reward_model_quantization_bit reward_model_type",
        "it is for stage: ppo",
    ),
    **each(
        "swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key "
        "swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret",
        "it goes with use_swanlab",
    ),
    **each(
        "pissa_iter pissa_convert oft_rank oft_block_size oft_target module_dropout "
        "create_new_adapter loraplus_lr_embedding adapter_folder",
        "it goes with an adapter that is not trained here",
    ),
    **each(
        "galore_target galore_rank galore_update_interval galore_scale galore_proj_type "
        "galore_layerwise apollo_target apollo_rank apollo_update_interval apollo_scale "
        "apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front "
        "badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio "
        "badam_mask_mode badam_verbose asft_alpha eaft_alpha fp8_backend "
        "fp8_enable_fsdp_float8_all_gather interleave_probs freeze_trainable_layers "
        "freeze_trainable_modules",
        "it goes with a setting that is off, or that says itself what to do",
    ),
    "init_special_tokens": "new rows begin as the mean of the others",
    "resize_vocab": "the model gets rows for new tokens by itself",
    "split_special_tokens": "text of messages never becomes a control token",
    "tool_format": "the tokenizer's template writes tools",
    **each(
        "freeze_vision_tower freeze_multi_modal_projector freeze_language_model",
        "for a model with images, list what is frozen in training.frozen",
    ),
}
"""Key → why it does not change the trained model."""

_OPTIMIZER = (
    "only AdamW and Muon are built in; for another optimizer use the loader in your own loop"
)
UNSUPPORTED: Mapping[str, str] = {
    **each("use_galore use_apollo use_badam use_adam_mini", _OPTIMIZER),
    "use_swanlab": (
        "TensorBoard, W&B, trackio and MLflow are built in (training.log); for others send "
        "metrics.jsonl of the run there yourself"
    ),
    **each(
        "use_dft_loss use_asft_loss use_eaft_loss",
        "give your own loss (training.loss)",
    ),
    **each(
        "use_llama_pro freeze_extra_modules mixture_of_depths shift_attn rope_scaling "
        "train_from_scratch moe_aux_loss_coef",
        "change the model once with transformers, save_pretrained it to a folder, and name that "
        "(or write a section `model` for a new one)",
    ),
    **each(
        "use_dora pissa_init",
        "LoRA has no such setting here",
    ),
    "adapter_name_or_path": (
        "merge the adapter into its base (llamafactory-cli export), and name the merged folder"
    ),
    "quantization_bit": "bases are in full precision, or in 4 bits next to LoRA",
    "fp8": "weights are trained in float32; training.precision is auto, float32 or bfloat16",
    "model_revision": (
        "download that revision to a folder (hf download NAME --revision …), and name the folder"
    ),
    "max_samples": "take part of the files, or `slice: [0, 0.5]` of a source",
    "media_dir": "paths of images are taken relative to the file of records",
    "default_system": (
        "write it into the records, or into a copy of the chat template (chat.template: FILE)"
    ),
    **each(
        "enable_thinking preserve_thinking",
        "set chat.chat_template_kwargs: {enable_thinking: false}",
    ),
    "new_special_tokens_config": "name the tokens in `penstock tokenizer add`",
    "disable_shuffling": "set `shuffle: none` of the sources",
    **each(
        "pref_bco_weight kto_chosen_weight kto_rejected_weight ld_alpha",
        "training.preference has kind, beta, label_smoothing, gamma, sft_weight and also",
    ),
    **each(
        "ref_model ref_model_adapters ref_model_quantization_bit",
        "set training.preference.reference to the folder of the reference model",
    ),
    **each(
        "image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels "
        "video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate",
        "set chat.shrink_pixels, or the processor's own files",
    ),
}
"""Key → what to do instead."""
