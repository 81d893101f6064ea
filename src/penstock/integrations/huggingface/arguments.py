"""The Trainer's arguments: what it refuses of them before it begins, because it contradicts the loader, has no meaning
here or belongs elsewhere. Every message says what is used, and the cure.
"""

import difflib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from penstock.errors import ConfigError
from penstock.integrations.huggingface.batches import is_finite
from penstock.loader import Loader

_log = logging.getLogger("penstock.huggingface")

_DEFAULT_BATCH_SIZE = 8
"""What `TrainingArguments` says when nobody has said anything."""
_DEFAULT_EPOCHS = 3.0

_NOT_OURS = {
    "train_dataset": "pass loader=penstock.Loader(folder, …) instead; penstock.prepare makes the folder from texts",
    "data_collator": "the loader packs rows by itself",
    "compute_loss_func": "the loss is weighted and divided by the step's denominator; override compute_loss instead",
}
_ELSEWHERE = {
    "packing": "rows are packed by the loader: Loader(packing=…)",
    "max_length": "the length of rows is the loader's: Loader(sequence_length=…)",
    "max_seq_length": "the length of rows is the loader's: Loader(sequence_length=…)",
    "batch_size": "rows of a forward pass: rows_per_microbatch=…; rows of a step: Loader(rows_per_step=…)",
    "tokenizer": "transformers calls it processing_class; texts are tokenized by penstock.prepare",
    "dataset_text_field": "texts are read by penstock.prepare",
    "formatting_func": "texts are read by penstock.prepare",
    "peft_config": "wrap the model beforehand: peft.get_peft_model(model, config)",
}
"""What other trainers take as arguments, and where it is said here."""
_UNFIT: dict[str, tuple[Any, str]] = {
    "label_smoothing_factor": (0.0, "the loss has no label smoothing"),
    "auto_find_batch_size": (False, "the batch is the loader's; set rows_per_microbatch by hand"),
    "packing": (False, _ELSEWHERE["packing"]),
    "group_by_length": (False, "the loader packs documents of all lengths into full rows"),
    "train_sampling_strategy": ("random", "the order is the mixture's: Source(shuffle=…)"),
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
    """Loaders for evaluation by name."""
    if eval_loader is None:
        return {}
    return eval_loader if isinstance(eval_loader, dict) else {"eval_loader": eval_loader}


def refuse_wrong_kinds(model: Any, args: Any) -> None:
    """Refuse a model or arguments that are something else, such as a path."""
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"Trainer: model must be a torch module, got {model!r}; load it with "
            "transformers.AutoModelForCausalLM.from_pretrained(…)"
        )
    if not isinstance(args, transformers.TrainingArguments):
        raise ConfigError(f"Trainer: args must be transformers.TrainingArguments, got {args!r}")


def require_loaders(loader: Any, eval_loader: Any) -> Loader:
    """The loader, if it and those for evaluation are loaders."""
    for name, each in {"loader": loader, **loaders(eval_loader)}.items():
        if not isinstance(each, Loader):
            found = "is missing" if each is None else f"must be a penstock.Loader, got {each!r}"
            raise ConfigError(
                f"Trainer: {name} {found}; make it with penstock.Loader(folder or mixture, sequence_length=…, "
                "rows_per_step=…)"
            )
    found_loader: Loader = loader
    return found_loader


def refuse_prefixes(every: Mapping[str, Loader]) -> None:
    """Refuse loaders of which an objective makes bidirectional prefixes: the model would read them causally."""
    for name, each in every.items():
        if source := each.bidirectional_source:
            raise ConfigError(
                f"Trainer: {name}: the objective of source {source!r} has prefixes whose tokens see each other, which "
                "a Hugging Face model would read causally; give it bidirectional=False"
            )


def refuse_arguments(args: Any, kwargs: dict[str, Any], has_eval_loader: bool) -> None:
    """Refuse what nobody knows, what the loader does already, and what the loss does not do."""
    for name, cure in _NOT_OURS.items():
        if kwargs.get(name) is not None:
            raise ConfigError(f"Trainer: {name} does not go with a loader: {cure}")
    _refuse_unknown(args, kwargs)
    if has_eval_loader and kwargs.get("compute_metrics") is not None:
        raise ConfigError(
            "Trainer: compute_metrics does not go with eval_loader, which measures the loss; pass eval_dataset"
        )
    if args.eval_strategy != "no" and not has_eval_loader and kwargs.get("eval_dataset") is None:
        raise ConfigError(
            f"Trainer: eval_strategy is {str(args.eval_strategy.value)!r}, but there is nothing to evaluate; pass "
            "eval_loader=, a loader whose sources have max_epochs=1"
        )
    for name, (harmless, cure) in _UNFIT.items():
        if getattr(args, name, harmless) != harmless:
            raise ConfigError(f"Trainer: {name}={getattr(args, name)!r} does not go with a loader: {cure}")
    for name, instead in _WITHOUT_EFFECT.items():
        if getattr(args, name, None) not in (None, False, 0):
            _log.warning("Trainer: %s=%r has no effect with a loader; use %s", name, getattr(args, name), instead)


def _refuse_unknown(args: Any, kwargs: dict[str, Any]) -> None:
    known = list(inspect.signature(transformers.Trainer.__init__).parameters)[1:]
    for name in kwargs:
        if name in known:
            continue
        close = difflib.get_close_matches(name, [*known, "loader", "eval_loader", "rows_per_microbatch"], 1)
        cure = _ELSEWHERE.get(name)
        if cure is None and name in args.__dataclass_fields__:
            cure = f"it belongs into TrainingArguments({name}=…)"
        raise ConfigError(
            f"Trainer: there is no argument {name!r}: "
            + (cure or (f"did you mean {close[0]!r}?" if close else "see help(penstock.huggingface.Trainer)"))
        )


def refuse_endless(args: Any, loader: Loader, eval_loader: Loader | dict[str, Loader] | None) -> None:
    """Refuse a run or an evaluation that would never end, or would end elsewhere than was said."""
    epochs = {source.name: source.max_epochs for source in loader.mixture.sources}
    if args.max_steps <= 0 and not is_finite(loader):
        raise ConfigError(
            "Trainer: the loader never ends (a source has no max_epochs) and max_steps is not given; set "
            "TrainingArguments(max_steps=…), or Source(max_epochs=…) for every source; num_train_epochs is not used"
        )
    if (
        args.max_steps <= 0
        and args.num_train_epochs != _DEFAULT_EPOCHS
        and {args.num_train_epochs} != {*epochs.values()}
    ):
        found = ", ".join(f"{name} {passes:g}" for name, passes in epochs.items())
        raise ConfigError(
            f"Trainer: num_train_epochs is {args.num_train_epochs:g}, but passes over the data are the loader's "
            f"max_epochs ({found}); set Source(max_epochs={args.num_train_epochs:g}), or leave num_train_epochs out"
        )
    for name, each in loaders(eval_loader).items():
        if each is loader:
            raise ConfigError(f"Trainer: {name} is the loader that is trained on; make another of it")
        if not is_finite(each):
            raise ConfigError(f"Trainer: {name} never ends; set max_epochs=1 for every source of it")


def fit_batches(args: Any, loader: Loader, rows_per_microbatch: int, has_eval_loader: bool) -> None:
    """Derive batch size and gradient accumulation from the loader; refuse what says otherwise."""
    begin, end = loader.data_parallel.rows(loader.settings.rows_per_step)
    rows = end - begin
    if rows_per_microbatch not in range(1, rows + 1) or rows % rows_per_microbatch:
        raise ConfigError(
            f"Trainer: rows_per_microbatch={rows_per_microbatch!r} does not divide this rank's {rows} rows of a step"
        )
    asked = args.per_device_train_batch_size
    _fit(args, "per_device_train_batch_size", _DEFAULT_BATCH_SIZE, rows_per_microbatch, "rows_per_microbatch",
         f"or pass rows_per_microbatch={asked}")  # fmt: skip
    micros, asked, ranks = rows // rows_per_microbatch, args.gradient_accumulation_steps, loader.data_parallel.size
    _fit(args, "gradient_accumulation_steps", 1, micros, f"{rows} rows a step / rows_per_microbatch",
         f"or make the loader with rows_per_step={asked * rows_per_microbatch * ranks}")  # fmt: skip
    if has_eval_loader:
        _fit(args, "per_device_eval_batch_size", _DEFAULT_BATCH_SIZE, rows_per_microbatch, "rows_per_microbatch",
             f"or pass rows_per_microbatch={args.per_device_eval_batch_size}")  # fmt: skip


def _fit(args: Any, name: str, default: int, used: int, why: str, cure: str) -> None:
    """Set a number of the arguments to what is used; one that was left at its default contradicts nothing."""
    if getattr(args, name) not in (default, used):
        raise ConfigError(f"Trainer: {name} is {getattr(args, name)}, but {used} is used ({why}); leave it out, {cure}")
    setattr(args, name, used)
