"""What the Trainer refuses; every message says what is used, and the cure.

Before it begins: arguments that contradict the loader, have no meaning here or belong elsewhere.
Once it has its model: ranks that do not match, a model with an additional loss, and a vocabulary
that is too small.
"""

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

from penstock.core.errors import ConfigError, DistributedError
from penstock.core.suggestions import did_you_mean
from penstock.integrations.huggingface.batches import is_finite
from penstock.integrations.huggingface.losses import known_ids
from penstock.models.isolation.lengths import asks_for_router_loss
from penstock.plan.loader import agreement
from penstock.plan.loader.loader import Loader

_log = logging.getLogger("penstock.huggingface")

_DEFAULT_BATCH_SIZE = 8
"""Default of `TrainingArguments`."""
_DEFAULT_EPOCHS = 3.0

_NOT_OURS = {
    "train_dataset": (
        "pass loader=penstock.Loader(folder, …) instead; penstock.prepare makes the folder from "
        "texts"
    ),
    "data_collator": "the loader packs rows by itself",
    "compute_loss_func": (
        "the loss is weighted and divided by the step's denominator; override compute_loss instead"
    ),
}
_ELSEWHERE = {
    "packing": "rows are packed by the loader: Loader(packing=…)",
    "max_length": "the loader sets the length of rows: Loader(sequence_length=…)",
    "max_seq_length": "the loader sets the length of rows: Loader(sequence_length=…)",
    "batch_size": (
        "rows of a forward pass: rows_per_microbatch=…; rows of a step: Loader(rows_per_step=…)"
    ),
    "tokenizer": "transformers calls it processing_class; texts are tokenized by penstock.prepare",
    "dataset_text_field": "texts are read by penstock.prepare",
    "formatting_func": "texts are read by penstock.prepare",
    "peft_config": "wrap the model beforehand: peft.get_peft_model(model, config)",
}
"""Arguments of other trainers, and what takes their place here."""
_UNFIT: dict[str, tuple[Any, str]] = {
    "label_smoothing_factor": (0.0, "the loss has no label smoothing"),
    "auto_find_batch_size": (False, "the loader sets the batch; set rows_per_microbatch by hand"),
    "packing": (False, _ELSEWHERE["packing"]),
    "group_by_length": (False, "the loader packs documents of all lengths into full rows"),
    "train_sampling_strategy": ("random", "the mixture sets the order: Source(shuffle=…)"),
}
"""Settings of `TrainingArguments` (or of a subclass) → what they must be, and why."""
_WITHOUT_EFFECT = {
    "dataloader_num_workers": "Loader(threads=…)",
    "dataloader_prefetch_factor": "Loader(prefetch=…)",
    "dataloader_drop_last": "nothing: a last, short step is trained too",
    "data_seed": "Loader(seed=…)",
}
"""Settings that are harmless, and what takes their place."""


def loaders(eval_loader: Loader | dict[str, Loader] | None) -> Mapping[str, Loader]:
    """Evaluation loaders by name."""
    if eval_loader is None:
        return {}
    return eval_loader if isinstance(eval_loader, dict) else {"eval_loader": eval_loader}


def refuse_wrong_kinds(model: object, args: object) -> None:
    """Refuse a model or arguments of another type, such as a path."""
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"Trainer: model must be a torch module, got {model!r}; load it with "
            "transformers.AutoModelForCausalLM.from_pretrained(…)"
        )
    if not isinstance(args, transformers.TrainingArguments):
        raise ConfigError(f"Trainer: args must be transformers.TrainingArguments, got {args!r}")


def require_loaders(loader: Any, eval_loader: Any) -> Loader:
    """The loader, once it and the evaluation loaders are known to be loaders."""
    for name, each in {"loader": loader, **loaders(eval_loader)}.items():
        if not isinstance(each, Loader):
            found = "is missing" if each is None else f"must be a penstock.Loader, got {each!r}"
            raise ConfigError(
                f"Trainer: {name} {found}; make it with penstock.Loader(folder or mixture, "
                "sequence_length=…, rows_per_step=…)"
            )
    found_loader: Loader = loader
    return found_loader


def refuse_prefixes(every: Mapping[str, Loader]) -> None:
    """Refuse loaders with bidirectional prefixes, which the model would read causally."""
    for name, each in every.items():
        if source := each.bidirectional_source:
            raise ConfigError(
                f"Trainer: {name}: the objective of source {source!r} has bidirectional "
                "prefixes, which a Hugging Face model would read causally; set "
                "bidirectional=False"
            )


def refuse_arguments(
    args: Any, kwargs: dict[str, Any], has_eval_loader: bool, trainer: type = transformers.Trainer
) -> None:
    """Refuse arguments unknown to `trainer`, what the loader already does, and what the loss does
    not support.
    """
    for name, cure in _NOT_OURS.items():
        if kwargs.get(name) is not None:
            raise ConfigError(f"Trainer: {name} does not go with a loader: {cure}")
    _refuse_unknown(args, kwargs, trainer)
    if has_eval_loader and kwargs.get("compute_metrics") is not None:
        raise ConfigError(
            "Trainer: compute_metrics does not go with eval_loader, which measures the loss; "
            "pass eval_dataset"
        )
    if args.eval_strategy != "no" and not has_eval_loader and kwargs.get("eval_dataset") is None:
        raise ConfigError(
            f"Trainer: eval_strategy is {str(args.eval_strategy.value)!r}, but there is "
            "nothing to evaluate; pass eval_loader=, a loader with max_epochs=1 for every "
            "source"
        )
    for name, (harmless, cure) in _UNFIT.items():
        if getattr(args, name, harmless) != harmless:
            raise ConfigError(
                f"Trainer: {name}={getattr(args, name)!r} does not go with a loader: {cure}"
            )
    _refuse_deepspeed_data(args)
    for name, instead in _WITHOUT_EFFECT.items():
        if getattr(args, name, None) not in (None, False, 0):
            _log.warning(
                "Trainer: %s=%r has no effect with a loader; use %s",
                name,
                getattr(args, name),
                instead,
            )


def _refuse_deepspeed_data(args: object) -> None:
    """Refuse what lets DeepSpeed shorten rows or choose their order."""
    config = getattr(getattr(args, "hf_deepspeed_config", None), "config", {})
    for name in ("curriculum_learning", "data_efficiency"):
        if (config.get(name) or {}).get("enabled"):
            raise ConfigError(
                f"Trainer: the DeepSpeed configuration enables {name}, which would change the "
                "rows of the loader; leave it out: Source(…) and ShareChange set what is "
                "trained when"
            )


def _refuse_unknown(args: Any, kwargs: dict[str, object], trainer: type) -> None:
    known = [
        name
        for name in inspect.signature(trainer).parameters
        if name not in _ELSEWHERE or name == "peft_config"
    ]
    for name in kwargs:
        if name in known:
            continue
        cure = _ELSEWHERE.get(name)
        if cure is None and name in args.__dataclass_fields__:
            cure = f"it belongs in TrainingArguments({name}=…)"
        if cure is None:
            ours = ("loader", "eval_loader", "rows_per_microbatch")
            cure = did_you_mean(name, [*known, *ours], "see help(penstock.huggingface.Trainer)")
        raise ConfigError(f"Trainer: there is no argument {name!r}: {cure}")


def refuse_endless(
    args: Any, loader: Loader, eval_loader: Loader | dict[str, Loader] | None
) -> None:
    """Refuse a run or an evaluation that would never end, or would end elsewhere than its settings
    say.
    """
    epochs = {source.name: source.max_epochs for source in loader.mixture.sources}
    if args.max_steps <= 0 and not is_finite(loader):
        raise ConfigError(
            "Trainer: the loader never ends (a source has no max_epochs) and max_steps is not "
            "given; set TrainingArguments(max_steps=…), or Source(max_epochs=…) for every "
            "source; num_train_epochs is not used"
        )
    if (
        args.max_steps <= 0
        and args.num_train_epochs != _DEFAULT_EPOCHS
        and {args.num_train_epochs} != {*epochs.values()}
    ):
        found = ", ".join(f"{name} {passes:g}" for name, passes in epochs.items())
        raise ConfigError(
            f"Trainer: num_train_epochs is {args.num_train_epochs:g}, but the loader's "
            f"max_epochs set the passes over the data ({found}); set "
            f"Source(max_epochs={args.num_train_epochs:g}), or leave num_train_epochs out"
        )
    for name, each in loaders(eval_loader).items():
        if each is loader:
            raise ConfigError(f"Trainer: {name} is also the training loader; make a separate one")
        if not is_finite(each):
            raise ConfigError(
                f"Trainer: {name} never ends; set max_epochs=1 for each of its sources"
            )


def fit_batches(
    args: transformers.TrainingArguments,
    loader: Loader,
    rows_per_microbatch: int,
    has_eval_loader: bool,
) -> None:
    """Derive batch size and gradient accumulation from the loader; refuse arguments that contradict
    them.
    """
    begin, end = loader.data_parallel.rows(loader.settings.constant_rows("Trainer"))
    rows = end - begin
    if rows_per_microbatch not in range(1, rows + 1) or rows % rows_per_microbatch:
        raise ConfigError(
            f"Trainer: rows_per_microbatch={rows_per_microbatch!r} does not divide this "
            f"rank's {rows} rows of a step"
        )
    asked = args.per_device_train_batch_size
    _fit(
        args,
        "per_device_train_batch_size",
        _DEFAULT_BATCH_SIZE,
        rows_per_microbatch,
        "rows_per_microbatch",
        f"or pass rows_per_microbatch={asked}",
    )
    micros, asked, ranks = (
        rows // rows_per_microbatch,
        args.gradient_accumulation_steps,
        loader.data_parallel.size,
    )
    _fit(
        args,
        "gradient_accumulation_steps",
        1,
        micros,
        f"{rows} rows a step / rows_per_microbatch",
        f"or make the loader with rows_per_step={asked * rows_per_microbatch * ranks}",
    )
    if has_eval_loader:
        _fit(
            args,
            "per_device_eval_batch_size",
            _DEFAULT_BATCH_SIZE,
            rows_per_microbatch,
            "rows_per_microbatch",
            f"or pass rows_per_microbatch={args.per_device_eval_batch_size}",
        )


def _fit(args: object, name: str, default: int, used: int, why: str, cure: str) -> None:
    """Set an argument to the value in use; refuse any other value than its default."""
    if getattr(args, name) not in (default, used):
        raise ConfigError(
            f"Trainer: {name} is {getattr(args, name)}, but {used} is used ({why}); leave it "
            f"out, {cure}"
        )
    setattr(args, name, used)


def check_ranks(trainer: transformers.Trainer, all_loaders: list[Loader]) -> None:
    """Refuse loaders made for another rank or number of ranks, and parallelism that cuts rows."""
    args = trainer.args
    if args.n_gpu > 1:
        raise DistributedError(
            f"one process sees {args.n_gpu} GPUs, and the Trainer would split each row among "
            "them; start one process per GPU with torchrun, or select one GPU with "
            "CUDA_VISIBLE_DEVICES"
        )
    for name in ("get_cp_size", "get_sp_size"):
        if getattr(trainer, name, lambda: 1)() > 1:
            raise DistributedError(
                "context and sequence parallelism cut rows, which penstock's Trainer does not "
                "support"
            )
    tensor_ranks = getattr(trainer.model, "tp_size", None) or 1
    size, rank = args.world_size // tensor_ranks, args.process_index // tensor_ranks
    for loader in all_loaders:
        found = loader.data_parallel
        if (found.rank, found.size) != (rank, size):
            raise DistributedError(
                f"the loader was made for rank {found.rank} of {found.size}, this process is "
                f"data-parallel rank {rank} of {size}; make it with data_parallel=({rank}, "
                f"{size}) or, under torchrun, DataParallel.from_env()"
            )
        agreement.check_ranks(loader)


def refuse_model(model: object) -> None:
    """Refuse a model with a loss term that is not computed here."""
    if asks_for_router_loss(model):
        raise ConfigError(
            "Trainer: the model asks for an auxiliary router loss "
            "(config.output_router_logits), which the loss of a step does not include; set it "
            "to False"
        )


def refuse_small_vocabulary(model: object, all_loaders: Sequence[Loader]) -> None:
    """Refuse a dataset prepared with a tokenizer that has more ids than the model has embeddings.

    Datasets without a record of their tokenizer are checked row by row during training.
    """
    known = known_ids(model)
    if known is None:
        return
    for dataset in (dataset for loader in all_loaders for dataset in loader.datasets):
        info = getattr(dataset, "tokenizer", None)
        if info is not None and info.fingerprint and info.vocab_size > known:
            raise ConfigError(
                f"Trainer: dataset {dataset.name!r} was prepared with tokenizer {info.name!r} "
                f"of {info.vocab_size} ids, but {type(model).__name__} has embeddings for "
                f"{known}; call model.resize_token_embeddings({info.vocab_size}), or prepare "
                "the data with the model's tokenizer"
            )


def warn_if_documents_mix(all_loaders: Mapping[str, Loader]) -> None:
    """Log loaders with attention="row": documents of a row see each other, and nothing else reports
    it.
    """
    names = [name for name, loader in all_loaders.items() if loader.requirements.attention == "row"]
    if names:
        _log.warning(
            "Trainer: documents of one row see each other: %s has attention='row'",
            " and ".join(names),
        )
