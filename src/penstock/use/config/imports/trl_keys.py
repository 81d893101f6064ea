"""TRL keys that have no effect or no equivalent here, with the reason and the alternative.

Names are those of TRL 1.16: SFTConfig, DPOConfig, KTOConfig, GRPOConfig, ModelConfig and the
arguments of its scripts, without those of transformers' TrainingArguments (`trainer_keys`).
"""

from collections.abc import Mapping

from penstock.use.config.imports.trainer_keys import each

NO_EFFECT: Mapping[str, str] = {
    **each(
        "padding_free pad_to_multiple_of pad_token precompute_ref_batch_size "
        "precompute_ref_log_probs ds3_gather_for_generation bnb_4bit_quant_storage "
        "cast_lm_head_to_fp32",
        "it concerns how the same result is computed; padding is never trained or attended to, and "
        "the loss is in float32",
    ),
    **each(
        "dataset_num_proc dataset_streaming streaming shuffle_dataset",
        "data are prepared once by penstock prepare, and shuffled in each epoch",
    ),
    "dtype": "weights are trained in float32; training.precision says what is computed in",
    "lora_task_type": "a language model is trained",
    "ignore_bias_buffers": "it works round an error of DDP",
    "disable_dropout": "dropout is off while learning from answers",
    "bnb_4bit_quant_type": "bases in 4 bits are nf4 here",
    "use_bnb_nested_quant": "bases in 4 bits have double quantisation here",
    **each(
        "use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url "
        "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port "
        "vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size "
        "cache_implementation use_transformers_continuous_batching "
        "transformers_continuous_batching_config use_transformers_paged generation_batch_size "
        "num_generations_eval log_completions log_multimodal num_completions_to_print "
        "log_unique_prompts log_completions_hub_repo",
        "`penstock rollouts` samples with its own engine, or, with --environment, that of --engine",
    ),
}
"""Key → why it does not change the trained model."""

_DPO = "training.preference has kind, beta, label_smoothing, gamma, sft_weight and also"
_FILTER = (
    "it draws tokens with other probabilities than ratios compare: sample without it, or with your "
    "own engine and training.policy.filtered: accept"
)
_POLICY = "training.policy has kind, clips, importance, normalise, scale, kl and truncated"
UNSUPPORTED: Mapping[str, str] = {
    **each(
        "model_init_kwargs",
        "change the model once with transformers, save_pretrained it to a folder, and name that",
    ),
    "model_revision": (
        "download that revision to a folder (hf download NAME --revision …), and name the folder"
    ),
    "router_aux_loss_coef": "the loss of a mixture of experts' router is its model's own here",
    "dataset_kwargs": "see the options of `penstock prepare`",
    "eos_token": "save the tokenizer with this token to a folder, and name it with -t",
    "load_in_8bit": "bases are in full precision or in 4 bits (load_in_4bit)",
    **each(
        "lora_target_parameters use_dora",
        "LoRA has no such setting here; for other adapters keep TRL's trainer (ps.trl.SFTTrainer)",
    ),
    **each(
        "ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau "
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps desirable_weight "
        "undesirable_weight rpo_alpha",
        _DPO,
    ),
    **each("top_p top_k min_p repetition_penalty generation_kwargs", _FILTER),
    "vllm_structured_outputs_regex": _FILTER,
    **each(
        "delta sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg "
        "vespo_lambda_neg top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min "
        "entropy_coef_max entropy_coef_delta entropy_target off_policy_mask_threshold "
        "use_bias_correction_kl multi_objective_aggregation vllm_importance_sampling_correction "
        "vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min vllm_importance_sampling_cap",
        _POLICY,
    ),
    "num_iterations": "training.steps of a round says how often its answers are seen (max_epochs)",
    "steps_per_generation": "training.steps of a round says how often answers are sampled again",
    **each(
        "reward_weights reward_funcs reward_model_name_or_path",
        "write rewards.py with one function reward(record, answer) → a number, which may sum "
        "several; the command names it",
    ),
    "max_tool_calling_iterations": "`penstock rollouts --environment --max-turns` runs tools",
    "chat_template_kwargs": "set chat.chat_template_kwargs",
}
"""Key → what to do instead."""
