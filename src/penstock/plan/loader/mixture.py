"""What flows into a loader: sources with their shares.

Numbers that users pass, checked where they come in, so that a wrong one is named and not found
later.
"""

import math
import operator
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

import numpy as np

from penstock.core.errors import ConfigError
from penstock.core.notebook import card, table
from penstock.core.suggestions import suggests
from penstock.core.urls import shown_url
from penstock.data.shards import Corpus, TokenizerInfo
from penstock.data.shards.opening import corpus_name, open_dataset
from penstock.data.shards.tables.corpus import is_corpus
from penstock.plan.objectives import Objective
from penstock.plan.objectives.objective import Causal, missing_members
from penstock.plan.sampling import Shuffle, integer_shares
from penstock.plan.sampling._kernels import WINDOW_BLOCKS
from penstock.plan.sampling.order import MOST_RUNS, SHUFFLE_CODES

TooLong = Literal["split", "drop", "truncate", "error", "keep_end"]
"""A document longer than a row. `split`: in parts, each a document of its own, and no target is
lost. `drop`: left out. `truncate`: only its first tokens are kept; `keep_end`: only its last. All
three are counted. `error`: refused, naming its origin.
"""
TOO_LONG: tuple[str, ...] = ("split", "drop", "truncate", "error", "keep_end")
CUTTING = ("split", "truncate", "keep_end")
"""Those of `TOO_LONG` that cut documents."""
TOKENS: Literal["tokens"] = "tokens"
"""The share of a source that counts as much as it has tokens."""
Place: TypeAlias = str | os.PathLike[str]
"""A path."""


def whole(name: str, value: Any) -> int:
    """A whole number of any kind (NumPy's and torch's too) as an int.

    Raises:
        ConfigError: It is something else; floats are, even without a fraction.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be a whole number, got {value!r}") from None


def real(name: str, value: Any) -> float:
    """A number of any kind as a float; inf and nan are floats too.

    Raises:
        ConfigError: It is not a number; text that spells one is none.
    """
    if not isinstance(value, (str, bytes)):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    raise ConfigError(f"{name} must be a number, got {value!r}")


@suggests
@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShareChange:
    """From step `step` on, sources have these shares."""

    step: int
    """First step with the new shares, at least 1."""
    shares: dict[str, float]
    """Share by source name; sources that are not named keep theirs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", whole("a change of shares: step", self.step))
        what = f"the change at step {self.step}: share of"
        shares = {name: real(f"{what} {name!r}", share) for name, share in self.shares.items()}
        object.__setattr__(self, "shares", shares)


@suggests
@final
@dataclass(frozen=True, slots=True)
class Source:
    """One corpus in a mixture: a dataset, or several whose documents are shuffled together."""

    path: str | os.PathLike[str] | Corpus | Sequence[str | os.PathLike[str] | Corpus]
    """A dataset folder or its URL in a store, a Megatron prefix, or an opened dataset; or a list of
    these or a glob, as one corpus.
    """
    share: float | Literal["tokens"] = 1.0
    """Share of the tokens, relative to the other sources'. tokens: the tokens of the documents in
    use; then of all sources.
    """
    name: str = ""
    """Unique in the mixture; shuffle and keys depend on it. By default the last part of the path,
    or of the glob; of a list that of its first entry, and how many more there are.
    """
    objective: Objective = field(default_factory=Causal)
    """What is trained on these documents."""
    max_epochs: float | None = None
    """Passes over the documents, at most; then the other sources go on in their proportions. None =
    no limit.
    """
    slice: tuple[float, float] = (0.0, 1.0)
    """The part of the documents in use, as fractions of their number, in the order on disk."""
    shuffle: Shuffle = "full"
    """Order in each epoch: `full`, `block` (for remote storage) or `none`."""
    too_long: TooLong | None = None
    """What happens to documents longer than a row, or than `max_document_tokens`; None is `split`.
    Not with packing `concat`, which cuts at rows, unless there are `max_document_tokens`.
    """
    sides: Sequence[str | Path] = ()
    """Side datasets of this dataset: more columns for the same documents
    (`penstock.shards.write_side`).
    """
    shuffle_runs: int = WINDOW_BLOCKS
    """Runs of 256 documents that shuffle `block` mixes, at most: fewer need less room for a remote
    dataset.
    """
    max_document_tokens: int | None = None
    """Maximum tokens of a document, at most a row: longer ones are treated as `too_long` says.
    None: the loader's.
    """
    drop_untrained: bool = True
    """Whether documents that were cut, and parts of them, are left out where loss weights leave no
    target in them. They are counted. Not with packing `concat`.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", _as_path(self.path))
        if not self.name:
            object.__setattr__(self, "name", corpus_name(self.path))
        where = f"source {self.name!r}"
        self._accept_path(where)
        if isinstance(self.share, str) and self.share != TOKENS:
            raise ConfigError(f"{where}: share must be a number or 'tokens', got {self.share!r}")
        if not isinstance(self.share, str):
            share = real(f"{where}: share", self.share)
            if not (share >= 0 and math.isfinite(share)):
                raise ConfigError(f"{where}: share must be at least 0 and finite, got {share:g}")
            object.__setattr__(self, "share", share)
        if self.max_epochs is not None:
            object.__setattr__(self, "max_epochs", real(f"{where}: max_epochs", self.max_epochs))
        if self.max_epochs is not None and not (
            self.max_epochs > 0 and math.isfinite(self.max_epochs)
        ):
            raise ConfigError(
                f"{where}: max_epochs must be above 0, got {self.max_epochs:g}; leave it out "
                "for no limit"
            )
        try:
            edges = tuple(self.slice)
        except TypeError:
            edges = ()
        if len(edges) != 2:
            raise ConfigError(
                f"{where}: slice must be two fractions (begin, end), got {self.slice!r}"
            )
        begin, end = (real(f"{where}: slice", edge) for edge in edges)
        object.__setattr__(self, "slice", (begin, end))
        if not 0 <= begin < end <= 1:
            raise ConfigError(
                f"{where}: slice must be fractions 0 ≤ begin < end ≤ 1, got {self.slice}"
            )
        if isinstance(self.sides, (str, Path)):
            raise ConfigError(f"{where}: sides must be a list of side datasets, got {self.sides!r}")
        object.__setattr__(self, "sides", tuple(self.sides))
        self._check_objective(where)
        if self.shuffle not in tuple(SHUFFLE_CODES):
            raise ConfigError(
                f"{where}: shuffle must be one of {', '.join(SHUFFLE_CODES)}, got {self.shuffle!r}"
            )
        object.__setattr__(self, "shuffle_runs", whole(f"{where}: shuffle_runs", self.shuffle_runs))
        if not 1 <= self.shuffle_runs <= MOST_RUNS:
            raise ConfigError(
                f"{where}: shuffle_runs must be 1 to {MOST_RUNS:,}, got {self.shuffle_runs}"
            )
        if self.shuffle != "block" and self.shuffle_runs != WINDOW_BLOCKS:
            raise ConfigError(
                f"{where}: shuffle_runs has an effect only with shuffle 'block', not "
                f"{self.shuffle!r}; leave it out"
            )
        if self.too_long is not None and self.too_long not in TOO_LONG:
            raise ConfigError(
                f"{where}: too_long must be one of {', '.join(TOO_LONG)}, got {self.too_long!r}"
            )
        if self.max_document_tokens is not None:
            most = whole(f"{where}: max_document_tokens", self.max_document_tokens)
            object.__setattr__(self, "max_document_tokens", most)
        if not isinstance(self.drop_untrained, bool):
            raise ConfigError(
                f"{where}: drop_untrained must be True or False, got {self.drop_untrained!r}"
            )

    def __repr__(self) -> str:
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        if isinstance(self.path, (str, Path)):
            given["path"] = shown_url(self.path)
        elif isinstance(self.path, tuple):
            given["path"] = tuple(
                shown_url(one) if isinstance(one, (str, Path)) else one for one in self.path
            )
        return f"Source({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def _repr_html_(self) -> str:
        """What a notebook shows: the settings that are not as by default."""
        return card(
            f"Source {self.name}",
            [("path", _shown_path(self.path)), *_shown_settings(self, "name", "path")],
        )

    def _check_objective(self, where: str) -> None:
        """Refuse what is no objective: a class, a name, or an object without all members."""
        missing = missing_members(self.objective)
        if not missing and not isinstance(self.objective, type):
            return
        given = f"{where}: objective must be one such as penstock.Causal(), got {self.objective!r}"
        if isinstance(self.objective, str):
            cure = "; here it is an object"
        elif isinstance(self.objective, type):
            cure = "; make an object of the class"
        else:
            cure = f", which has no {', '.join(missing)}"
        raise ConfigError(given + cure)

    def _accept_path(self, where: str) -> None:
        """Check what can be checked before anything is opened."""
        given: Any = self.path
        listed = isinstance(given, tuple)
        if given == ():
            raise ConfigError("a source needs at least one dataset, got an empty list")
        for path in given if listed else [given]:
            if not isinstance(path, (str, Path)) and not is_corpus(path):
                what = f"{where}: each part" if listed else "a source"
                raise ConfigError(f"{what} must be a path or an opened dataset, got {path!r}")

    def open(self, cache: str | Path | None = None) -> Corpus:
        """The dataset at the path, or those at the paths joined; an opened one as it is.

        Args:
            cache: Where copies of remote datasets are kept, as for `penstock.open_dataset`.

        Raises:
            FormatError: There is no dataset, or nothing matches a glob.
            CorruptionError: One is damaged.
            ConfigError: One needs more to be opened than a path, or two cannot be one corpus.
        """
        given: Any = self.path
        return given if is_corpus(given) else open_dataset(given, cache=cache)

    def count_tokens(self, corpus: Corpus) -> int:
        """Tokens of the documents in use, those that `slice` leaves."""
        if self.slice == (0.0, 1.0):
            return corpus.num_tokens
        first, size = self.documents_in_use(len(corpus))
        return int(corpus.table.lengths[first : first + size, 0].sum(dtype=np.int64))

    def documents_in_use(self, documents: int) -> tuple[int, int]:
        """(first, number) of the documents that `slice` leaves of a dataset of this size."""
        first, last = (round(edge * documents) for edge in self.slice)
        return first, last - first


def _as_path(given: object) -> object:
    """A `Path` in place of anything else that names a folder; lists become tuples."""
    if isinstance(given, (list, tuple)):
        return tuple(map(_as_path, given))
    return Path(given) if isinstance(given, os.PathLike) else given


def _shown_settings(source: Source, *without: str) -> list[tuple[str, str]]:
    """(name, value) of the settings that are not as by default, apart from some."""
    found = []
    for one in fields(source):
        value = getattr(source, one.name)
        usual = one.default_factory() if one.default_factory is not MISSING else one.default
        if value != usual and one.name not in without:
            found.append((one.name, f"{value:g}" if isinstance(value, float) else str(value)))
    return found


def _shown_path(path: object) -> str:
    """A path, URL without secrets or opened dataset as text; of a list, one after another."""
    if isinstance(path, tuple):
        return ", ".join(map(_shown_path, path))
    return shown_url(path) if isinstance(path, (str, Path)) else repr(path)


Sources: TypeAlias = (
    Source
    | Place
    | Corpus
    | Sequence[Source | Place | Corpus]
    | Mapping[str, float]
    | Mapping[Place | Corpus, float]
)
"""What a mixture is made of: one source or several, or a mapping of path or dataset → share."""


@suggests
@final
@dataclass(frozen=True, slots=True)
class Mixture:
    """Sources blended by share, token-exact; shares may change at given steps.

    ```python
    Mixture([Source("data/web", 0.7), Source("data/code", 0.3, max_epochs=4)])
    Mixture({"data/web-*": 0.7, "data/code": 0.3})
    ```
    """

    sources: Sequence[Source]
    """At least one; names are unique. Also a single one, a path, or a mapping of path → share."""
    changes: Sequence[ShareChange] = ()
    """Changes of shares, by rising step."""

    if TYPE_CHECKING:  # a dataclass takes what its fields hold, and this takes more

        def __init__(self, sources: Sources, changes: Sequence[ShareChange] = ()) -> None: ...

    def __post_init__(self) -> None:
        given: Any = self.sources
        if isinstance(given, Mapping):
            given = [Source(path, share) for path, share in given.items()]
        elif (
            isinstance(given, (Source, str, os.PathLike))
            or is_corpus(given)
            or not isinstance(given, Iterable)
        ):
            given = [given]
        sources = tuple(
            source if isinstance(source, Source) else Source(source) for source in given
        )
        object.__setattr__(self, "sources", sources)
        names = [source.name for source in self.sources]
        if not names:
            raise ConfigError("a mixture needs at least one source")
        if twice := next((name for name, times in Counter(names).items() if times > 1), None):
            self._refuse_twice(twice)
        self._check_shares_by_tokens(names)
        steps = [change.step for change in self.changes]
        if steps != sorted(set(steps)) or (steps and steps[0] < 1):
            raise ConfigError(f"changes of shares must be at rising steps from 1 on, got {steps}")
        for change in self.changes:
            unknown = sorted(set(change.shares) - set(names))
            if unknown:
                raise ConfigError(
                    f"the change at step {change.step} names {unknown[0]!r}; sources are "
                    f"{', '.join(names)}"
                )

        numbers = [
            1.0 if source.share == TOKENS else float(source.share) for source in self.sources
        ]
        for step, shares in self._phases(numbers):
            try:
                integer_shares(shares)
            except ConfigError as error:
                raise ConfigError(f"from step {step} on: {error}") from None

    def _repr_html_(self) -> str:
        """What a notebook shows: the sources, and the changes of their shares."""
        rows = []
        for source in self.sources:
            others = [
                f"{name} {text}" for name, text in _shown_settings(source, "name", "path", "share")
            ]
            share = source.share if isinstance(source.share, str) else f"{source.share:g}"
            rows.append((source.name, share, _shown_path(source.path), ", ".join(others)))
        changes = [
            (
                f"from step {change.step:,}",
                ", ".join(f"{name} {share:g}" for name, share in change.shares.items()),
            )
            for change in self.changes
        ]
        return card("Mixture", changes, table(("source", "share", "path", "settings"), rows))

    def _refuse_twice(self, name: str) -> None:
        first, second, *_ = (source.path for source in self.sources if source.name == name)
        if isinstance(first, (str, Path)) and isinstance(second, (str, Path)):
            if Path(first).resolve() == Path(second).resolve():
                raise ConfigError(
                    f"{first} is given twice; add its shares up, or give each source its own "
                    "name, objective or slice"
                )
            name = f"{name!r} ({first} and {second})"
        else:
            name = repr(name)
        raise ConfigError(
            f"two sources are called {name}; give each its own name, as order and keys depend "
            "on it: Source(path, share, name=…)"
        )

    @property
    def by_tokens(self) -> bool:
        """Whether sources have the share `tokens`, which `weighed` makes numbers of."""
        return any(source.share == TOKENS for source in self.sources)

    def _check_shares_by_tokens(self, names: Sequence[str]) -> None:
        """All sources have the share `tokens` or none; a change from it to numbers gives one to
        each source.
        """
        other = next((source for source in self.sources if source.share != TOKENS), None)
        if not self.by_tokens:
            return
        if other is not None:
            first = next(source for source in self.sources if source.share == TOKENS)
            raise ConfigError(
                f"source {first.name!r} has share 'tokens' and source {other.name!r} has "
                f"share {other.share:g}, which is no number of tokens; give all sources "
                "'tokens', or all of them numbers"
            )
        if self.changes and (
            left := [name for name in names if name not in self.changes[0].shares]
        ):
            raise ConfigError(
                f"the change at step {self.changes[0].step} gives no share to {left[0]!r}, "
                "whose share is 'tokens' so far: the first change must name every source"
            )

    def weighed(self, corpora: Sequence[Corpus]) -> "Mixture":
        """The same with numbers of tokens in place of the share `tokens`; `corpora` are the opened
        sources.
        """
        if not self.by_tokens:
            return self
        pairs = zip(self.sources, corpora, strict=True)
        sources = [
            replace(source, share=float(source.count_tokens(corpus))) for source, corpus in pairs
        ]
        return Mixture(sources, self.changes)

    def phases(self) -> list[tuple[int, list[float]]]:
        """(first step, shares in the order of the sources) of each stretch with the same shares,
        from step 0.

        Raises:
            ConfigError: Shares are `tokens`, and the mixture was not `weighed`.
        """
        if self.by_tokens:
            raise ConfigError(
                "the shares are 'tokens': numbers of them are known once the sources are open "
                "(weighed)"
            )
        return self._phases([float(source.share) for source in self.sources])

    def _phases(self, first: Sequence[float]) -> list[tuple[int, list[float]]]:
        shares = dict(zip((source.name for source in self.sources), first, strict=True))
        phases = [(0, list(shares.values()))]
        for change in self.changes:
            shares.update(change.shares)
            phases.append((change.step, [float(share) for share in shares.values()]))
        return phases

    def shares_at(self, step: int) -> list[float]:
        """The shares in force at a step, in the order of the sources."""
        return next(shares for first, shares in reversed(self.phases()) if first <= step)


def require_one_tokenizer(mixture: Mixture, datasets: Sequence[Corpus]) -> None:
    """Ids of two tokenizers mean different things; sources that store no tokenizer (Megatron)
    pass.
    """
    first: tuple[str, TokenizerInfo] | None = None
    for source, dataset in zip(mixture.sources, datasets, strict=True):
        info = dataset.tokenizer
        if info is None or not info.fingerprint:
            continue
        if first is None:
            first = source.name, info
        elif info.fingerprint != first[1].fingerprint:
            raise ConfigError(
                f"source {source.name!r} was prepared with tokenizer {info.name!r} "
                f"({info.fingerprint[:8]}), source {first[0]!r} with {first[1].name!r} "
                f"({first[1].fingerprint[:8]}): their ids mean different tokens; prepare both "
                "with one tokenizer"
            )
