"""What the Trainer refuses once it has its model: ranks that do not match, a loss that would be left out, a vocabulary
that is too small; and what it says of documents that see each other. Every message says what is used, and the cure.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError, DistributedError
from penstock.integrations.huggingface.vocabulary import known_ids
from penstock.loader import Loader

_log = logging.getLogger("penstock.huggingface")


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


def refuse_small_vocabulary(model: Any, all_loaders: Sequence[Loader]) -> None:
    """Refuse a dataset whose tokenizer has ids that the model has no embedding for.

    Datasets that do not say what tokenizer made them are checked row by row, as they come.
    """
    known = known_ids(model)
    if known is None:
        return
    for dataset in (dataset for loader in all_loaders for dataset in loader.datasets):
        info = getattr(dataset, "tokenizer", None)
        if info is not None and info.fingerprint and info.vocab_size > known:
            raise ConfigError(
                f"Trainer: dataset {dataset.name!r} was made with tokenizer {info.name!r}, whose vocabulary is "
                f"{info.vocab_size} ids, but {type(model).__name__} has embeddings for {known}; call "
                f"model.resize_token_embeddings({info.vocab_size}), or prepare the data with the model's tokenizer"
            )


def say_that_documents_mix(all_loaders: Mapping[str, Loader]) -> None:
    """Say that documents of a row see each other where that was asked, since nothing else will tell."""
    names = [name for name, loader in all_loaders.items() if loader.requirements.attention == "row"]
    if names:
        _log.warning("Trainer: documents of one row see each other: %s has attention='row'", " and ".join(names))
