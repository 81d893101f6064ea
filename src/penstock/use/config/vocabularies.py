"""Fits a model to the tokenizer of its data: entries that the tokenizer gained get rows of their
own, and it is said.

Only a tokenizer that is the model's own plus entries fits; any other gives ids another meaning, and
is refused.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError, PenstockError
from penstock.learn.training.run_folder import RUN_FILE, RunFolder
from penstock.models.lora.settings import NewRows
from penstock.plan.objectives.objective import OwnVocabulary
from penstock.tokenizers.extension import not_extended
from penstock.tokenizers.loading import load_tokenizer
from penstock.use.config.run_file import DataSettings

if TYPE_CHECKING:
    from penstock.models import LanguageModel
    from penstock.tokenizers import Tokenizer


def vocabulary_size(data: DataSettings) -> int:
    """Required vocabulary size: the ids of the datasets, and those that objectives add.

    Raises:
        ConfigError: A source stores no tokenizer.
    """
    sizes: list[int] = []
    for source in data.sources:
        info = source.open().tokenizer
        if info is None:
            raise ConfigError(
                f"source {source.name!r}: stores no tokenizer, which a model needs; make a "
                "dataset with `penstock prepare`"
            )
        sizes.append(info.vocab_size)
        if isinstance(source.objective, OwnVocabulary) and source.objective.tokenizer is not None:
            sizes.append(load_tokenizer(source.objective.tokenizer).vocab_size)
    return max(sizes)


def tokenizer_of(origin: str | Path | None) -> "Tokenizer | None":
    """The tokenizer of the run, folder or hub's model that a model came from; None: unknown."""
    if origin is None:
        return None
    try:
        is_run = (Path(origin) / RUN_FILE).is_file()
        return load_tokenizer(RunFolder.open(origin).tokenizer if is_run else origin)
    except PenstockError:
        return None


def fit_vocabulary(
    model: "LanguageModel",
    data: DataSettings,
    tokenizer: "Tokenizer | None",
    *,
    name: str,
    say: Callable[[str], None],
) -> None:
    """Give a model rows for all ids of its data, in place; the new ones are the mean of the old
    ones.

    Args:
        model: The model, without LoRA.
        data: Its training data, opened.
        tokenizer: That of the model; None: unknown.
        name: The model as its user named it.
        say: Called with each notice.

    Raises:
        ConfigError: A source was prepared with a tokenizer that is not the model's plus entries, or
            the model has too few rows and no tokenizer to compare with.
    """
    needed, rows = vocabulary_size(data), model.vocab_size
    if tokenizer is None:
        if needed > rows:
            raise ConfigError(
                f"{name}: has {rows} ids, but the data and its objectives need {needed}, and "
                "no tokenizer next to the model says which of them are new; build it with "
                f"vocab_size={needed}, prepare the data with the model's tokenizer, or name "
                "the folder that has it"
            )
        if model.origin is not None:
            say(
                f"there is no tokenizer next to {name}, so it cannot be compared with that of "
                "the data: ids mean the same only if it is the same"
            )
        return
    _refuse_others(data, tokenizer, name)
    first = min(tokenizer.vocab_size, rows)
    if needed > rows:
        model.grow_vocabulary(needed)
        say(
            f"the tokenizer of the data has more entries than {name}: embeddings and output "
            f"matrix grow from {rows} to {needed} rows; the new ones begin as the mean of the "
            "old ones"
        )
    elif needed > first:
        say(
            f"the tokenizer of the data has ids {first} to {needed - 1} that {name} was not "
            f"trained with; its matrices have {rows} rows, and those of the new ids keep the "
            "values that they have"
        )
    if needed > first:
        model.new_rows = NewRows(first=first, end=needed, grown=needed > rows)


def _refuse_others(data: DataSettings, tokenizer: "Tokenizer", name: str) -> None:
    for source in data.sources:
        info = source.open().tokenizer
        if info is None or info.fingerprint == tokenizer.fingerprint:
            continue
        stored = source.open().loaded_tokenizer
        reason = (
            "it is not stored with the data" if stored is None else not_extended(tokenizer, stored)
        )
        if reason is not None:
            raise ConfigError(
                f"source {source.name!r}: was prepared with another tokenizer ({info.name}) "
                f"than {name}: {reason}; prepare it with the model's tokenizer, or with that "
                "plus entries (penstock tokenizer add)"
            )


def frozen_rows(model: "LanguageModel") -> str | None:
    """A notice if rows of new entries are not trained; None if they are, or there are none."""
    if model.new_rows is None:
        return None
    tables = {"embedding": model.get_input_embeddings(), "output": model.get_output_embeddings()}
    frozen = [
        which
        for which, table in tables.items()
        if table is not None and not any(weight.requires_grad for weight in table.parameters())
    ]
    if not frozen:
        return None
    return (
        f"the rows of new tokens ({model.new_rows.first} to {model.new_rows.end - 1}) are "
        f"frozen in the {' and the '.join(frozen)} matrix, so these tokens stay what they "
        "are; to train them next to LoRA, set lora.train_embeddings to new"
    )
