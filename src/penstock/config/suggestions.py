"""The key that was meant by one that a file does not have: by what other trainers call it, then by how it is spelt."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from penstock.config.document import Place

OTHER_NAMES = {
    "data.loader.packing": "sample_packing pack_sequences pack_samples",
    "data.loader.rows_per_step": "batch_size bs bsz train_batch_size global_batch_size micro_batch_size "
    "per_device_train_batch_size micro_bsz total_batch_size device_batch_size "
    "grad_accum grad_accumulation gradient_accumulation gradient_accumulation_steps accumulate_grad_batches "
    "grad_accum_steps accumulation_steps",
    "data.loader.sequence_length": "seq_len seqlen seq_length max_seq_len max_seq_length max_sequence_length "
    "sequence_len block_size context_length context_len context_size max_length max_len cutoff_len n_ctx "
    "max_position_embeddings",
    "data.sources": "dataset datasets train_file train_files train_data data_path dataset_path",
    "data.sources.0.max_epochs": "epochs epoch num_epochs num_train_epochs n_epochs",
    "data.sources.0.share": "mixing_weight sampling_weight probability proportion",
    "model": "model_name model_name_or_path model_path base_model pretrained pretrained_model checkpoint init_from",
    "model.dtype": "bf16 fp16 precision mixed_precision amp torch_dtype use_amp",
    "model.heads": "n_head n_heads num_heads num_attention_heads",
    "model.kv_heads": "n_kv_heads num_kv_heads num_key_value_heads n_kv_head",
    "model.layers": "n_layer n_layers num_layers num_hidden_layers depth",
    "model.mlp_width": "intermediate_size d_ff ffn_dim ffn_hidden_size hidden_dim n_inner",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layernorm_epsilon",
    "model.prediction_heads": "mtp multi_token_prediction num_nextn_predict_layers n_predict",
    "model.rope_theta": "rope_base rotary_base",
    "model.tied": "tie_word_embeddings tie_embeddings tied_embeddings weight_tying",
    "model.width": "n_embd d_model hidden_size embed_dim embedding_size n_embed model_dim",
    "training.checkpoints.every": "save_steps save_every save_interval checkpoint_every checkpoint_interval ckpt_every",
    "training.checkpoints.keep": "save_total_limit keep_last keep_checkpoints",
    "training.compile": "torch_compile use_compile",
    "training.evaluators": "eval eval_steps eval_every eval_interval evaluation eval_data eval_dataset validation "
    "val_data eval_strategy evaluation_strategy callbacks",
    "training.log_every": "logging_steps log_interval log_steps logging_interval",
    "training.lora.rank": "lora_r lora_rank peft use_peft use_lora adapter",
    "training.lora.alpha": "lora_alpha",
    "training.lora.targets": "lora_target_modules target_modules lora_target",
    "training.micro_sequences": "gradient_checkpointing activation_checkpointing checkpoint_activations recompute",
    "training.optimizer.betas": "beta beta1 beta2 adam_beta1 adam_beta2 adam_betas",
    "training.optimizer.clip_norm": "grad_clip clip_grad max_grad_norm gradient_clip gradient_clipping "
    "gradient_clip_val grad_norm_clip clip_grad_norm",
    "training.optimizer.eps": "adam_eps adam_epsilon epsilon",
    "training.optimizer.kind": "optim optimiser optimizer_type optimizer_name",
    "training.optimizer.learning_rate": "lr max_lr peak_lr base_lr",
    "training.optimizer.weight_decay": "wd decay_rate l2 l2_regularization",
    "training.schedule.floor": "min_lr min_learning_rate lr_min end_lr final_lr min_lr_ratio",
    "training.schedule.shape": "lr_scheduler lr_scheduler_type scheduler scheduler_type lr_schedule lr_decay_style",
    "training.schedule.warmup_steps": "warmup warmup_iters num_warmup_steps warmup_ratio warmup_fraction lr_warmup "
    "lr_warmup_steps",
    "training.shard": "fsdp fsdp2 zero zero_stage deepspeed",
    "training.steps": "max_steps num_steps total_steps train_steps iterations max_iters train_iters num_iterations "
    "num_train_steps n_steps iters",
    "training.tensorboard": "tensorboard_dir log_dir",
    "training.wandb": "wandb_project use_wandb report_to",
    "training.z_loss": "z_loss_weight zloss z_loss_coefficient",
}
"""Key of a run file → what others call it."""

_OPTIONS = {
    "--output RUN": "output output_dir out_dir save_dir run_dir checkpoint_dir run_name",
    "--resume": "resume resume_from_checkpoint auto_resume resume_from",
}
"""Option of `penstock train` → what others call it in a file."""

NEAR, FAR = 0.7, 0.5
"""How alike names are, of 1: a slip, and a guess."""


def suggestion(root: type[BaseModel], here: type[BaseModel], place: Place) -> str:
    """The end of a sentence about a key that does not exist.

    Args:
        root: The model of the whole file.
        here: The model of the mapping that has the key.
        place: The key.
    """
    name = str(place[-1]).lower().replace("-", "_")
    siblings, known = list(here.model_fields), dict(_keys(root))
    if (option := _named(_OPTIONS, name)) and "training" in known:
        return f"it is an option of the command line: {option}"
    if (other := _named(OTHER_NAMES, name)) and other in known:
        return _meant(other)
    if close := difflib.get_close_matches(name, siblings, 1, NEAR):
        return f"did you mean {close[0]!r}?"
    if elsewhere := _elsewhere(name, place, known):
        return _meant(elsewhere)
    close = difflib.get_close_matches(name, siblings, 1, FAR)
    return f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(siblings)}"


def _meant(key: str) -> str:
    note = " (rows are computed one by one, so there is no other batch size)" if key.endswith("rows_per_step") else ""
    return f"did you mean {key}?{note}"


def _named(table: Mapping[str, str], name: str) -> str | None:
    return next((key for key, names in table.items() if name in names.split()), None)


def _elsewhere(name: str, place: Place, known: Mapping[str, str]) -> str | None:
    """The full key whose last part has this name or nearly so, the nearest one to where it was given."""
    last = set(known.values())
    close = [name] if name in last else difflib.get_close_matches(name, sorted(last), 1, 0.8)
    keys = [key for key, end in known.items() if end in close]
    return min(keys, key=lambda key: _distance(key.split("."), place), default=None)


def _distance(key: Sequence[str], place: Place) -> tuple[int, int]:
    shared = 0
    for mine, theirs in zip(key, map(str, place), strict=False):
        if mine != theirs:
            break
        shared += 1
    return -shared, len(key)


def _keys(model: type[BaseModel], before: str = "", inside: tuple[type, ...] = ()) -> Iterator[tuple[str, str]]:
    """(full key, its last part) of a file; entry 0 stands for all of a list, NAME for a name of the user's own."""
    for name, field in model.model_fields.items():
        yield f"{before}{name}", name
        for kind, part in _models(field.annotation):
            if kind not in inside:
                yield from _keys(kind, f"{before}{name}.{part}", (*inside, kind))


def _models(hint: Any, part: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """The models inside a type, each with what stands between its field and its own keys."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint, part
        return
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Mapping:
        yield from _models(arguments[1], f"{part}NAME.")
        return
    for argument in arguments:
        yield from _models(argument, f"{part}0." if origin in (list, tuple) else part)
