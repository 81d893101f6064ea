"""The settings of a plan, apart from the mixture."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.core.errors import ConfigError
from penstock.plan.inputs import Attention
from penstock.plan.inputs.requirements import InputRequirements
from penstock.plan.loader.mixture import Mixture, Source
from penstock.plan.loader.ramp import Ramp
from penstock.plan.packing import PACKINGS, Packing
from penstock.plan.packing.pack import check_documents_per_row


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What decides the plan, apart from the mixture."""

    sequence_length: int
    """Token slots of a row."""
    rows_per_step: int | Mapping[int, int]
    """Rows of one optimiser step over all ranks; changes of shares fall on steps. For a batch ramp,
    first step → rows from it on: `{"0": 32, "1000": 64}`.
    """
    seed: int = 0
    """Seed of all orders and keys."""
    packing: Packing = "best_fit"
    """How documents share rows."""
    window_rows: int = 1024
    """Rows that are open together when packing; `next_fit`, `concat` and `none` give the same rows
    with any number.
    """
    patches_per_row: int | None = None
    """Maximum patches of the images of a row; None: no limit."""
    documents_per_row: int | None = None
    """Maximum documents of a row; one that has as many is full. None: no limit."""
    max_document_tokens: int | None = None
    """Maximum tokens of a document: longer ones are treated by `too_long` as if rows were this
    long; sources may have their own. None: as many as a row holds.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows_per_step", Ramp(self.rows_per_step).value)
        for name in ("sequence_length", "window_rows", "seed"):
            # NumPy's integers are welcome, but a state must fit into JSON.
            object.__setattr__(self, name, int(getattr(self, name)))
        for name, least, most in (
            ("sequence_length", 2, 1 << 31),
            ("window_rows", 1, 1 << 24),
        ):
            if not least <= getattr(self, name) <= most:
                bound = f"at least {least}" if getattr(self, name) < least else f"at most {most:,}"
                raise ConfigError(f"{name} must be {bound}, got {getattr(self, name)}")
        if self.patches_per_row is not None:
            object.__setattr__(self, "patches_per_row", int(self.patches_per_row))
            if not 1 <= self.patches_per_row < 1 << 40 or self.packing != "best_fit":
                raise ConfigError(
                    "patches_per_row must be 1 or more, with packing best_fit; got "
                    f"{self.patches_per_row} with {self.packing}"
                )
        if self.packing not in PACKINGS:
            raise ConfigError(f"packing must be one of {', '.join(PACKINGS)}, got {self.packing!r}")
        check_documents_per_row(self.documents_per_row)
        for name in ("documents_per_row", "max_document_tokens"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, int(getattr(self, name)))
        if self.max_document_tokens is not None:
            self._check_document_tokens(self.max_document_tokens, "")

    def _check_document_tokens(self, most: int, where: str) -> None:
        if not 2 <= most <= self.sequence_length:
            raise ConfigError(
                f"{where}max_document_tokens must be from 2 to the {self.sequence_length} "
                f"slots of a row, got {most}; leave it out for documents as long as rows"
            )

    @property
    def ramp(self) -> Ramp:
        """The rows of each step."""
        return Ramp(self.rows_per_step)

    def constant_rows(self, who: str) -> int:
        """The rows of every step, for what cannot do with more than one number.

        Raises:
            ConfigError: Steps have different numbers of rows.
        """
        if isinstance(self.rows_per_step, int):
            return self.rows_per_step
        raise ConfigError(
            f"{who}: takes as many rows in every step, and rows_per_step changes "
            f"({self.ramp}); give one number, or train with ps.train or a loop of your own"
        )

    @property
    def packing_text(self) -> str:
        """The packing and the limits of rows and documents, for people."""
        limits = {
            "documents a row": self.documents_per_row,
            "patches a row": self.patches_per_row,
            "tokens a document": self.max_document_tokens,
        }
        return ", ".join(
            [self.packing, *(f"at most {most:,} {what}" for what, most in limits.items() if most)]
        )

    def document_tokens(self, source: Source) -> int | None:
        """Maximum tokens of a document of a source: its own, else the loader's; None: as many as a
        row holds.
        """
        return (
            self.max_document_tokens
            if source.max_document_tokens is None
            else source.max_document_tokens
        )

    def within(self, requirements: InputRequirements) -> "PlanSettings":
        """The same settings, with no more documents in a row than the requirements have room
        for.
        """
        allowed = requirements.documents_per_row
        if allowed is None or allowed >= (self.documents_per_row or self.sequence_length):
            return self
        return replace(self, documents_per_row=allowed)

    def require_effect(self, mixture: Mixture) -> None:
        """Refuse what a source says and these settings would ignore.

        Raises:
            ConfigError: `too_long` was given, with packing `concat` and no limit of documents; or a
                source's documents may be longer than a row.
        """
        for source in mixture.sources:
            if source.max_document_tokens is not None:
                self._check_document_tokens(source.max_document_tokens, f"source {source.name!r}: ")
            if (
                self.packing == "concat"
                and source.too_long is not None
                and self.document_tokens(source) is None
            ):
                raise ConfigError(
                    f"source {source.name!r}: too_long={source.too_long!r} has no effect with "
                    "packing 'concat', which cuts every document where its row ends and "
                    "loses no target; leave too_long out, set max_document_tokens, or use "
                    "best_fit"
                )

    def needs_isolation(self, attention: Attention | None) -> bool:
        """Whether rows hold several documents that must not see each other; alone in a row, one has
        nothing to see.
        """
        return self.packing != "none" and self.documents_per_row != 1 and attention != "row"
