"""What the Trainer refuses before it begins: settings that contradict the loader, ranks that do not match, a loss that
would be left out. Every message says what is used, and the cure.
"""

from collections.abc import Mapping
from typing import Any

from penstock.errors import ConfigError, DistributedError
from penstock.integrations.huggingface.batches import is_finite
from penstock.loader import Loader

_DEFAULT_BATCH_SIZE = 8
"""What `TrainingArguments` says when nobody has said anything."""

_NOT_OURS = {
    "train_dataset": "pass loader=",
    "data_collator": "the loader packs rows by itself",
    "compute_loss_func": "the loss is weighted and divided by the step's denominator; override compute_loss instead",
}
_UNFIT = {
    "label_smoothing_factor": "the loss has no label smoothing",
    "auto_find_batch_size": "the batch is the loader's; set rows_per_microbatch by hand",
}


def loaders(eval_loader: Loader | dict[str, Loader] | None) -> Mapping[str, Loader]:
    """Loaders for evaluation by name."""
    if eval_loader is None:
        return {}
    return eval_loader if isinstance(eval_loader, dict) else {"eval_loader": eval_loader}


def refuse_arguments(args: Any, kwargs: dict[str, Any], has_eval_loader: bool) -> None:
    """Refuse what the loader does already, and what the loss does not do."""
    for name, cure in _NOT_OURS.items():
        if kwargs.get(name) is not None:
            raise ConfigError(f"Trainer: {name} does not go with a loader: {cure}")
    if has_eval_loader and kwargs.get("compute_metrics") is not None:
        raise ConfigError(
            "Trainer: compute_metrics does not go with eval_loader, which measures the loss; pass eval_dataset"
        )
    for name, cure in _UNFIT.items():
        if getattr(args, name, None):
            raise ConfigError(f"Trainer: {name}={getattr(args, name)!r} does not go with a loader: {cure}")


def refuse_endless(args: Any, loader: Loader, eval_loader: Loader | dict[str, Loader] | None) -> None:
    """Refuse a run or an evaluation that would never end."""
    if args.max_steps <= 0 and not is_finite(loader):
        raise ConfigError(
            "Trainer: the loader never ends (a source has no max_epochs) and max_steps is not given; set "
            "TrainingArguments(max_steps=…), or Source(max_epochs=…) for every source"
        )
    for name, each in loaders(eval_loader).items():
        if each is loader:
            raise ConfigError(f"Trainer: {name} is the loader that is trained on; make another of it")
        if not is_finite(each):
            raise ConfigError(f"Trainer: {name} never ends; set max_epochs=1 for every source of it")


def fit_batches(args: Any, loader: Loader, rows_per_microbatch: int) -> None:
    """Derive batch size and gradient accumulation from the loader; refuse what says otherwise."""
    begin, end = loader.data_parallel.rows(loader.settings.rows_per_step)
    rows = end - begin
    if rows_per_microbatch < 1 or rows % rows_per_microbatch:
        raise ConfigError(
            f"Trainer: rows_per_microbatch={rows_per_microbatch} does not divide this rank's {rows} rows of a step"
        )
    for name, default, used, why in (
        ("per_device_train_batch_size", _DEFAULT_BATCH_SIZE, rows_per_microbatch, "rows_per_microbatch"),
        ("gradient_accumulation_steps", 1, rows // rows_per_microbatch, f"{rows} rows a step / rows_per_microbatch"),
    ):
        asked = getattr(args, name)
        if asked not in (default, used):
            raise ConfigError(
                f"Trainer: {name} is {asked}, but {used} is used ({why}); leave it out, or make the loader's "
                "rows_per_step and rows_per_microbatch fit"
            )
        setattr(args, name, used)


def check_ranks(trainer: Any, all_loaders: list[Loader]) -> None:
    """Refuse loaders that were made for another place among other processes, and ways to cut rows."""
    args = trainer.args
    if args.n_gpu > 1:
        raise DistributedError(
            f"one process sees {args.n_gpu} GPUs, and the Trainer would split each row among them; start one process "
            "a GPU with torchrun, or show it one with CUDA_VISIBLE_DEVICES"
        )
    for name in ("get_cp_size", "get_sp_size"):
        if getattr(trainer, name, lambda: 1)() > 1:
            raise DistributedError(
                "context and sequence parallelism cut rows, which penstock's Trainer does not support"
            )
    tensor_ranks = getattr(trainer.model, "tp_size", None) or 1
    size, rank = args.world_size // tensor_ranks, args.process_index // tensor_ranks
    for loader in all_loaders:
        found = loader.data_parallel
        if (found.rank, found.size) != (rank, size):
            raise DistributedError(
                f"the loader was made for rank {found.rank} of {found.size}, this process is data-parallel rank {rank} "
                f"of {size}; make it with data_parallel=({rank}, {size}) or, under torchrun, DataParallel.from_env()"
            )


def refuse_model(model: Any) -> None:
    """Refuse a model whose loss has parts that are not computed here."""
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ConfigError(
            "Trainer: the model wants an auxiliary loss for its routers (config.output_router_logits), which the loss "
            "of a step does not include; set it to False"
        )
