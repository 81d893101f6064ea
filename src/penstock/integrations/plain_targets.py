"""Targets for trainers that know labels and nothing else: what these cannot express is refused by
name.

A label says which token is predicted, or −100. So there are no weights but 0 and 1, one target for
each slot, and no attention but causal attention within documents. Everything that can be seen when
a loader is made is refused then, the rest when a row has it. Cost: a pass or two of NumPy over the
row.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, final

import numpy as np

from penstock.core.arrays import Int64
from penstock.core.errors import ConfigError
from penstock.plan.inputs import IGNORE
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.loader.loader import Loader

_FRACTIONAL = (
    "loss weights other than 0 and 1, which labels cannot express; train with ps.train or "
    "penstock.huggingface.Trainer, which weigh every target, or prepare with weights of 0 and 1"
)


@final
class PlainTargets:
    """The targets of rows for one trainer.

    Args:
        who: Name of the trainer, for errors.
        fractional: Whether it weighs targets by any number.
        cuts: Whether it keeps a target that lies in another row than its slot, where a document was
            cut.
    """

    def __init__(self, who: str, *, fractional: bool = False, cuts: bool = True) -> None:
        self._who, self._fractional, self._cuts = who, fractional, cuts

    def check(self, loader: Loader) -> None:
        """Refuse a loader whose rows cannot be expressed.

        Raises:
            ConfigError: They cannot; says what is in the way, and the cure.
        """
        who, wanted = self._who, loader.requirements
        if source := loader.bidirectional_source:
            raise ConfigError(
                f"{who}: the objective of source {source!r} has bidirectional prefixes, which "
                "it would read causally; set bidirectional=False"
            )
        if source := loader.own_targets_source:
            raise ConfigError(
                f"{who}: the objective of source {source!r} writes targets of its own, and labels "
                "are the tokens behind slots; train with ps.train or ps.loss"
            )
        if (wanted.target_distances or 1) > 1:
            raise ConfigError(
                f"{who} trains one target for each slot, but the loader gives "
                f"{wanted.target_distances}; leave out target_distances"
            )
        if loader.blank_image is not None:
            raise ConfigError(
                f"{who}: documents of the loader have images, which these batches do not "
                "have; train them with ps.train or penstock.huggingface.Trainer, or prepare "
                "without images (media: drop)"
            )
        self._check_sources(loader)

    def _check_sources(self, loader: Loader) -> None:
        who, slots = self._who, loader.settings.sequence_length
        values = loader.path_values
        for source, corpus in zip(loader.mixture.sources, loader.datasets, strict=True):
            if values[source.name] is not None and (
                loader.requirements.trees or loader.has_compared(source.name)
            ):
                raise ConfigError(
                    f"{who}: documents of source {source.name!r} are trees, or answers that are "
                    "better or worse, which token by token would all be trained; train them with "
                    'ps.train(preference={"kind": "dpo"}), or '
                    "with penstock.trl.DPOTrainer"
                )
            if not self._fractional and corpus.table.weight_sums is not None:
                raise ConfigError(f"{who}: source {source.name!r} has {_FRACTIONAL}")
            longest = loader.settings.document_tokens(source) or slots
            cut = source.too_long in (None, "split") and corpus.longest > longest
            if not self._cuts and (cut or loader.settings.packing == "concat"):
                why = (
                    "packing='concat' cuts"
                    if loader.settings.packing == "concat"
                    else "too_long='split' would cut"
                )
                raise ConfigError(
                    f"{who} drops the target at the end of each part of a document that is "
                    f"cut, and {why} documents of source {source.name!r} (the longest has "
                    f"{corpus.longest:,} tokens, a row {longest:,}); take another packing and "
                    "Source(too_long='drop'), 'truncate' or 'keep_end', or longer rows"
                )

    def of(self, row: ModelInput) -> tuple[Annotated[Int64, "slots"], Any]:
        """Targets of a row at distance 1, already shifted, and their weights.

        Returns:
            int64 [T], −100 where the weight is 0; and float32 [T].

        Raises:
            ConfigError: The row has what labels do not express.
        """
        if row.reach is not None or (
            row.prefix_lengths is not None and (row.prefix_lengths > 1).any()
        ):
            raise ConfigError(
                f"{self._who}: the row has trees or bidirectional prefixes, which it would "
                "read causally"
            )
        targets = row.targets[0].astype(np.int64)
        if row.loss_weights is None:
            return targets, (targets != IGNORE).astype(np.float32)
        weights = row.loss_weights[0]
        if not self._fractional and not np.isin(weights, (0, 1)).all():
            raise ConfigError(f"{self._who}: the row has {_FRACTIONAL}")
        targets[weights == 0] = IGNORE
        return targets, weights


def empty_row(row: ModelInput) -> ModelInput:
    """A row of padding, which is one document, with the same fields as a row without trees and
    images.
    """
    slots = row.sequence_length
    borders = row.cu_seqlens
    if borders is not None:
        borders = np.full_like(borders, slots)
        borders[0] = 0
    return replace(
        row,
        tokens=np.zeros_like(row.tokens),
        targets=np.full_like(row.targets, IGNORE),
        loss_weights=None if row.loss_weights is None else np.zeros_like(row.loss_weights),
        positions=None if row.positions is None else np.arange(slots, dtype=row.positions.dtype),
        document_ids=None if row.document_ids is None else np.zeros_like(row.document_ids),
        cu_seqlens=borders,
        max_seqlen=None if row.max_seqlen is None else slots,
        num_tokens=0,
        source_ids=row.source_ids[:0],
        columns={},
    )


def require_fields(who: str, loaders: Mapping[str, Loader], *names: str) -> None:
    """Refuse loaders whose rows lack fields.

    Raises:
        ConfigError: One does; says how to make it.
    """
    for label, loader in loaders.items():
        if missing := [name for name in names if not getattr(loader.requirements, name)]:
            raise ConfigError(
                f"{who}: rows of {label} have no {' and no '.join(missing)}; make the loader "
                "without requirements, or with "
                f"InputRequirements({', '.join(f'{name}=True' for name in names)})"
            )
