"""The name that was meant by one that does not exist: by what other trainers call it, then by how
it is spelt.
"""

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, fields
from functools import wraps
from typing import Any, TypeVar

from penstock.core.errors import ConfigError

OTHER_NAMES = {
    "data.loader.documents_per_row": (
        "max_segments max_segments_per_example max_documents_per_row max_samples_per_row "
        "max_sequences_per_row"
    ),
    "data.loader.max_document_tokens": (
        "maximum_document_length max_document_length max_doc_length max_doc_len "
        "max_tokens_per_document"
    ),
    "data.loader.packing": "sample_packing pack_sequences pack_samples",
    "data.loader.rows_per_step": (
        "batch_size bs bsz train_batch_size global_batch_size total_batch_size grad_accum "
        "grad_accumulation gradient_accumulation gradient_accumulation_steps "
        "accumulate_grad_batches grad_accum_steps accumulation_steps"
    ),
    "data.loader.sequence_length": (
        "seq_len seqlen seq_length max_seq_len max_seq_length max_sequence_length sequence_len "
        "block_size context_length context_len context_size max_length max_len cutoff_len n_ctx "
        "max_position_embeddings"
    ),
    "data.sources": "dataset datasets train_file train_files train_data data_path dataset_path",
    "data.sources.0.max_epochs": "epochs epoch num_epochs num_train_epochs n_epochs",
    "data.sources.0.share": "mixing_weight sampling_weight probability proportion",
    "model": (
        "model_name model_name_or_path model_path base_model pretrained pretrained_model "
        "checkpoint init_from"
    ),
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
    "training.checkpoints.every": (
        "save_steps save_every save_interval checkpoint_every checkpoint_interval ckpt_every"
    ),
    "training.checkpoints.keep": "save_total_limit keep_last keep_checkpoints",
    "training.compile": "torch_compile use_compile",
    "training.context_parallel": (
        "cp cp_size context_parallel_size sequence_parallel sequence_parallel_size cp_degree"
    ),
    "training.evaluators": (
        "eval eval_steps eval_every eval_interval evaluation eval_data eval_dataset validation "
        "val_data eval_strategy evaluation_strategy callbacks"
    ),
    "training.log": (
        "report_to tensorboard tensorboard_dir log_dir wandb use_wandb trackio mlflow tracker "
        "trackers logger loggers log_with use_tensorboard use_mlflow use_trackio"
    ),
    "training.log_name": "run_name wandb_name experiment_name mlflow_run_name",
    "training.log_project": (
        "wandb_project project project_name mlflow_experiment_name trackio_project"
    ),
    "training.log_every": "logging_steps log_interval log_steps logging_interval",
    "training.lora.rank": "lora_r lora_rank peft use_peft use_lora adapter",
    "training.lora.alpha": "lora_alpha",
    "training.lora.targets": "lora_target_modules target_modules lora_target",
    "training.lora.dropout": "lora_dropout",
    "training.lora.rslora": "use_rslora peft_use_rslora",
    "training.lora.rank_pattern": "lora_rank_pattern",
    "training.lora.alpha_pattern": "lora_alpha_pattern",
    "training.lora.modules_to_save": "lora_modules_to_save",
    "training.lora.train_embeddings": "trainable_token_indices resize_embeddings new_tokens",
    "training.micro_sequences": "gradient_checkpointing activation_checkpointing checkpoint_activations recompute",  # noqa: E501
    "training.optimizer.betas": "beta beta1 beta2 adam_beta1 adam_beta2 adam_betas",
    "training.optimizer.clip_norm": (
        "grad_clip clip_grad max_grad_norm gradient_clip gradient_clipping gradient_clip_val "
        "grad_norm_clip clip_grad_norm"
    ),
    "training.optimizer.eps": "adam_eps adam_epsilon epsilon",
    "training.optimizer.kind": "optim optimiser optimizer_type optimizer_name",
    "training.optimizer.learning_rate": "lr max_lr peak_lr base_lr",
    "training.optimizer.weight_decay": "wd decay_rate l2 l2_regularization",
    "training.rows_per_pass": "micro_batch_size per_device_train_batch_size micro_bsz device_batch_size",  # noqa: E501
    "training.schedule.floor": "min_lr min_learning_rate lr_min end_lr final_lr min_lr_ratio",
    "training.schedule.shape": (
        "lr_scheduler lr_scheduler_type scheduler scheduler_type lr_schedule lr_decay_style"
    ),
    "training.schedule.warmup_steps": (
        "warmup warmup_iters num_warmup_steps warmup_ratio warmup_fraction lr_warmup "
        "lr_warmup_steps"
    ),
    "training.shard": "fsdp fsdp2 zero zero_stage deepspeed",
    "training.steps": (
        "max_steps num_steps total_steps train_steps iterations max_iters train_iters "
        "num_iterations num_train_steps n_steps iters"
    ),
    "training.z_loss": "z_loss_weight zloss z_loss_coefficient",
}
"""Key of a run file → what others call it."""

NEAR, FAR = 0.7, 0.5
"""How alike two names are, at most 1: a slip of the keys, and a guess."""


CallT = TypeVar("CallT", bound=Callable[..., Any])


def suggests(call: CallT) -> CallT:
    """Decorates a function or a class without `**`: a keyword that it does not have is refused with
    the one meant.

    ```python
    Loader("data", batch_size=2)  # ConfigError: Loader: unknown argument 'batch_size'; did you mean 'rows_per_step'?
    ```
    """  # noqa: E501
    function = call.__init__ if isinstance(call, type) else call  # type: ignore[misc] # of a class, not an object
    parameters = inspect.signature(call).parameters
    names, known = (
        frozenset(parameters),
        [name for name in parameters if name not in ("cls", "self")],
    )

    @wraps(function)
    def checked(*args: object, **kwargs: object) -> Any:
        if not names.issuperset(kwargs):
            refuse_arguments(call.__name__, kwargs, known)
        return function(*args, **kwargs)

    if not isinstance(call, type):
        return checked  # type: ignore[return-value] # of the same type, which mypy cannot tell
    call.__init__ = checked  # type: ignore[misc]
    return call


def has_settings(settings: type) -> Callable[[CallT], CallT]:
    """Decorates a function that takes the fields of a settings class as `**settings`: its signature
    names each, with type and default, in `help` and in notebooks.
    """
    added = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if one.default is MISSING else one.default,
            annotation=one.type,
        )
        for one in fields(settings)
    ]

    def shown(call: CallT) -> CallT:
        own = inspect.signature(call)
        kept = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
        changed: Any = call
        changed.__signature__ = own.replace(parameters=[*kept, *added])
        return call

    return shown


def refuse_arguments(call: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse the first keyword that a call does not know: "ps.train: unknown argument 'lr'; did you
    mean …?".

    Args:
        call: The call, for the message.
        given: Keywords that it was given.
        known: Those that it has, in the order in which a message lists them.

    Raises:
        ConfigError: There is one.
    """
    for name in given:
        if name not in known:
            raise ConfigError(f"{call}: unknown argument {name!r}; {did_you_mean(name, known)}")


def refuse_unknown(
    given: Iterable[str], known: Collection[str], what: str, otherwise: str | None = None
) -> None:
    """Refuse the first of the names that is not known, and say which one was probably meant.

    Args:
        given: Names that somebody gave, such as the keywords of a call.
        known: Names that exist there, in the order in which a message lists them.
        what: What the names are, with an article, such as "an option of prepare".
        otherwise: See `did_you_mean`.

    Raises:
        ConfigError: A name is not known: "'lr' is not an option of train; did you mean
            'learning_rate'?".
    """
    for name in given:
        if name not in known:
            raise ConfigError(f"{name!r} is not {what}; {did_you_mean(name, known, otherwise)}")


def did_you_mean(name: str, known: Collection[str], otherwise: str | None = None) -> str:
    """The end of a sentence about a name that does not exist: which known name was probably meant.

    Args:
        name: The name that does not exist.
        known: The names that do, in the order in which a message lists them.
        otherwise: The end if no known name resembles it; None: the list of all known names.
    """
    name = name.lower().replace("-", "_")
    if meant := _by_other_name(name, known) or closest(name, known, FAR):
        return f"did you mean {meant!r}?"
    return f"known: {', '.join(known)}" if otherwise is None else otherwise


def closest(name: str, known: Iterable[str], likeness: float) -> str | None:
    """The known name spelt most like a lower-case one; None if none is at least as alike as
    `likeness` (0 to 1).
    """
    spelt = {one.lower(): one for one in known}
    return next((spelt[one] for one in difflib.get_close_matches(name, spelt, 1, likeness)), None)


def listed_under(table: Mapping[str, str], name: str) -> str | None:
    """The key of a table such as `OTHER_NAMES` that lists a name."""
    return next((key for key, names in table.items() if name in names.split()), None)


def _by_other_name(name: str, known: Collection[str]) -> str | None:
    """The known name that other trainers call `name`."""
    key = listed_under(OTHER_NAMES, name) or ""
    # `data.sources.0.share` is `share`; `training.optimizer.kind` is `optimizer` to a function with
    # flat keywords.
    return next((part for part in reversed(key.split(".")) if part in known), None)
