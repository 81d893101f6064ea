"""What a model's base says of itself, and what its training data have: kept in a run's folder, used
wherever it is.

A base is a model that training began with: its folder says how many tokens it can read, how its
texts are sampled and which ids end them. Its tokenizer says what begins a text; the data may differ
from that (`add_bos`). All of it is written to `facts.json` when a run begins, and copied into its
checkpoints, so neither the base nor the data are needed later. Reads only small JSON files; imports
no torch.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol, Self, TypeVar, final

from penstock.core.errors import ConfigError, CorruptionError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.data.shards.tables.corpus import Corpus
from penstock.models.isolation.lengths import MOST_POSITIONS
from penstock.tokenizers import Tokenizer

FACTS = "facts.json"
GENERATION = "generation_config.json"
_UNLIMITED = 10**9
"""A `model_max_length` of more tokens than this means that the tokenizer knows no limit."""
_DROPOUT = re.compile("dropout|pdrop|layerdrop")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionFacts:
    """How a model writes that learned to restore masked tokens."""

    mask_id: int
    """The id of the mask."""
    block: int = 0
    """Tokens of a block, which see each other and the blocks before them; 0: all of a text see each
    other.
    """
    after_bos: bool = False
    """Whether blocks are counted from behind a BOS."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """See the module; what nobody said is empty."""

    begin_ids: tuple[int, ...] | None = None
    """Ids before each text; None: those that the tokenizer's own encoding puts there
    (`Tokenizer.begin_ids`).
    """
    context_length: int | None = None
    """Maximum tokens that the base says it reads; None: there is no base, or it does not say."""
    stop_ids: tuple[int, ...] = ()
    """The base's ids that end a text."""
    generation: JsonMapping = field(default_factory=dict)
    """The base's `generation_config.json`."""
    dropout: Mapping[str, float] = field(default_factory=dict)
    """Dropout rates of the base's `config.json`, by the names there."""
    diffusion: DiffusionFacts | None = None
    """None: the model writes token by token."""

    @classmethod
    def of_folder(cls, folder: str | Path) -> Self:
        """The facts of a model in the Hugging Face layout."""
        folder = Path(folder)
        return cls.of_config(_json(folder / "config.json"), _json(folder / GENERATION))

    @classmethod
    def of_config(cls, config: JsonMapping, generation: JsonMapping) -> Self:
        """The facts of a model of transformers.

        Args:
            config: As in `config.json`. Of a model that reads images, the settings of its text
                count.
            generation: As in `generation_config.json`.
        """
        config = {**(config.get("text_config") or {}), **config}
        limits = [config.get(name) for name in MOST_POSITIONS]
        ends = generation.get("eos_token_id", config.get("eos_token_id"))
        listed = ends if isinstance(ends, list) else [ends]
        rates = {
            name: value
            for name, value in config.items()
            if _DROPOUT.search(name) and _is_rate(value)
        }
        return cls(
            context_length=next((one for one in limits if is_length(one)), None),
            stop_ids=tuple(one for one in listed if isinstance(one, int)),
            generation={
                name: value for name, value in generation.items() if name != "_from_model_config"
            },
            dropout=rates,
        )

    def with_data(
        self, datasets: Iterable[Corpus], say: Callable[[str], None] = lambda _: None
    ) -> Self:
        """The facts of a model that these datasets train: their texts begin as they do there.

        Args:
            datasets: Of texts and of chats. Chats begin as their template says, which does not tell
                how texts do.
            say: Called if texts of one dataset begin with BOS, and those of another do not.
        """
        found = {begin for one in datasets if (begin := _begin_of(one)) is not None}
        if len(found) > 1:
            own = "the base's" if self.begin_ids is not None else "the tokenizer's"
            say(
                "some sources have BOS before each document and others have none (add_bos); "
                f"in use, texts begin by {own} own rule"
            )
        return replace(self, begin_ids=found.pop()) if len(found) == 1 else self

    def begin(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The ids before a text."""
        own: tuple[int, ...] = tokenizer.begin_ids
        return own if self.begin_ids is None else self.begin_ids

    def save(self, folder: Path) -> None:
        """Write `facts.json`."""
        (folder / FACTS).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Read `facts.json`; None: there is none.

        Raises:
            CorruptionError: It is damaged.
        """
        path = folder / FACTS
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_bytes())
            begin = found["begin_ids"]
            stops = tuple(int(one) for one in found["stop_ids"])
            diffusion = found.get("diffusion")
            return cls(
                **{
                    **found,
                    "begin_ids": None if begin is None else tuple(map(int, begin)),
                    "stop_ids": stops,
                    "diffusion": None if diffusion is None else DiffusionFacts(**diffusion),
                }
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptionError(
                f"{path}: {error!r}; copy it back from a checkpoint of the run"
            ) from None


class KnowsFacts(Protocol):
    """A model that says what its folder said."""

    facts: ModelFacts


Model = TypeVar("Model", bound=KnowsFacts)


def with_facts(model: Model, facts: ModelFacts) -> Model:
    """The model, which knows these facts from now on."""
    model.facts = facts
    return model


class SaysFacts(Protocol):
    """A model, or the folder of one."""

    @property
    def facts(self) -> ModelFacts:
        """What its folder says."""


def require_token_by_token(model: SaysFacts, what: str) -> None:
    """Refuse a model that restores masked tokens where text is read or written in its order.

    Args:
        model: The model.
        what: What is asked of it, for the error.

    Raises:
        ConfigError: It was trained by diffusion.
    """
    if model.facts.diffusion is not None:
        raise ConfigError(
            f"{what}: the model was trained by diffusion, so it restores masked tokens and knows "
            "no probability of the next one; write texts with Run.generate, Run.sample or "
            "`penstock generate`, and measure it by a loss evaluator"
        )


def all_ends(generation: Mapping[str, object], stop_ids: Sequence[int]) -> list[int]:
    """Ids that end a text: those of the base, in its order, then others."""
    ends = generation.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return [*listed, *(one for one in stop_ids if one not in listed)]


def _begin_of(dataset: Corpus) -> tuple[int, ...] | None:
    """The ids before each document of texts; None: unknown, or chats."""
    info = dataset.tokenizer
    if info is None or dataset.chat is not None or not len(dataset):
        return None
    begins, _ = dataset.framed
    return (info.bos_id,) if begins and info.bos_id is not None else ()


def is_length(value: object) -> bool:
    """Whether a setting is a limit of tokens, and not left out or so large that it means none."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 < value < _UNLIMITED


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _json(path: Path) -> JsonObject:
    value = json.loads(path.read_bytes()) if path.is_file() else {}
    return value if isinstance(value, dict) else {}
