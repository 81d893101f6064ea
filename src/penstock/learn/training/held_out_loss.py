"""The evaluator `loss`: the loss of held-out documents, each used once."""

import math
from dataclasses import replace
from typing import cast, final

import numpy as np
import torch

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonObject
from penstock.data.shards import Corpus
from penstock.data.shards.format.manifest import TokenizerInfo
from penstock.learn.training.checks import check_ids
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.document_losses import (
    DocumentLosses,
    SlotDocuments,
    row_documents,
)
from penstock.learn.training.figure_names import SOURCE
from penstock.learn.training.loss_groups import LossGroups, LossSums
from penstock.learn.training.losses import RowLoss, loss_of_documents, row_loss
from penstock.learn.training.path_checks import require_token_targets
from penstock.learn.training.step_sums import StepSums
from penstock.learn.training.stop import Stop, never
from penstock.learn.training.worst_documents import WorstDocuments
from penstock.models import LanguageModel
from penstock.models.language_model import most_packed
from penstock.plan.loader import Step
from penstock.plan.loader.loader import Loader
from penstock.plan.loader.mixture import Mixture, Source
from penstock.plan.objectives.objective import Causal
from penstock.tokenizers import Tokenizer

ONE_A_ROW = "one document a row: in rows of several the model lets them see each other"
"""Added to the figures of a model for which `PackingVerdict` allows only one document per row."""


@final
class HeldOutLoss:
    """Loss of held-out documents, each used once, in rows packed as in training, with documents
    isolated.

    If the model would let documents of a row see each other, rows hold one document each, and the
    figure `packing` says so.

    `loss` is nats per weighted target. With several sources it is the mean of their losses weighted
    by their shares, which is the loss of a target of the mixture. `loss.source.NAME` and
    `loss.task.NAME` are the losses of its parts, if there are several; `loss.distance.2` and so on
    are those of further prediction heads. `bits_per_byte` is the sum of all nats, as bits, over the
    bytes of the text that the tokens stand for, so tokenizers can be compared. It is given for a
    single source if every token counts 1, all documents are used unchanged, and the dataset knows
    its bytes. With `worst`, `accuracy` is the share of targets that the model predicts right, and
    `worst.1`, `worst.2`, … name the documents with the highest loss a target.

    Args:
        data: A dataset's folder (or a glob), a source, or several; each document is used once, so
            each source of a mixture has `max_epochs` 1.
        sequence_length: Slots per row.
        tokenizer: Tokenizer of the model, an object with `fingerprint` and `name`; None: skip the
            comparison with the dataset's.
        model: Model to evaluate; its requirements decide what rows hold.
        ranks: The processes that evaluate together.
        rows: Maximum number of rows; None: all.
        worst: How many documents to name.

    Raises:
        ConfigError: A dataset was prepared with another tokenizer, an objective does not fit the
            model, or `worst` is below 0.
    """

    def __init__(
        self,
        data: str | Source | Mixture,
        *,
        sequence_length: int,
        tokenizer: Tokenizer | TokenizerInfo | None,
        model: LanguageModel,
        ranks: Ranks,
        rows: int | None = None,
        worst: int = 0,
    ) -> None:
        if isinstance(data, str):
            data = Source(data, shuffle="none", name="held out")
        if isinstance(data, Source):
            data = Mixture([replace(data, max_epochs=1)])
        opened = Mixture([replace(source, path=source.open()) for source in data.sources])
        sources = opened.weighed([cast(Corpus, source.path) for source in opened.sources]).sources
        for source in sources:
            _check_tokenizer(cast(Corpus, source.path), tokenizer)
        self._sources, self._rows, self._ranks = sources, rows, ranks
        if worst < 0:
            raise ConfigError(f"worst must be 0 or more documents, got {worst!r}")
        self._worst = worst
        self._groups = groups = LossGroups()
        alone = self._alone = most_packed(model, sequence_length) < sequence_length
        # Does not capture `self`: the cycle would keep `ranks` alive, and with it the lock of the
        # run's folder.
        self._loader = lambda: Loader(
            Mixture(sources),
            sequence_length=sequence_length,
            rows_per_step=8 * ranks.place.size,
            packing="none" if alone else "best_fit",
            requirements=model.requirements(),
            data_parallel=ranks.place,
            threads=1,
            companion=groups,
            sum_over_ranks=ranks.sum if ranks.several else None,
        )
        # If the loader refuses something, it raises now rather than at the first evaluation.
        loader = self._loader()
        self.made_from = {
            f"documents of {source.name!r}": cast(Corpus, source.path).fingerprint[:12]
            for source in sources
        }
        """Digests of the data, for comparing ranks."""
        check_ids(model, loader)
        require_token_targets(
            loader, "the held-out loss", "measure preferences with an evaluator of kind preference"
        )

    def __call__(self, model: LanguageModel, stop: Stop = never) -> JsonObject:
        """See the class."""
        nats, weights = torch.zeros(2, dtype=torch.float64, device=model.device)
        taken = tokens = 0
        total = sum(source.count_tokens(cast(Corpus, source.path)) for source in self._sources)
        parts = LossSums(self._groups.names, len(model.prediction_weights), model.device)
        worst = WorstDocuments(self._worst) if self._worst else None
        with torch.no_grad():
            for step in self._loader():
                first = taken + len(step) * self._ranks.place.rank
                for place in range(len(step)):
                    sums, documents = self._row(model, step, place, parts)
                    if self._rows is not None and first + place >= self._rows:
                        # Computed only because all ranks must gather a sharded model's weights
                        # together.
                        continue
                    nats += sums.cross_entropy[0]
                    weights += sums.weights[0]
                    parts.add(sums)
                    if worst is not None and documents is not None:
                        worst.add(documents, step.documents, place)
                taken += len(step) * self._ranks.place.size
                tokens += step.num_tokens
                share = max(tokens / max(total, 1), taken / self._rows if self._rows else 0.0)
                if stop(min(share, 1.0)):
                    return {}
                if self._rows is not None and taken >= self._rows:
                    break
        pending = StepSums(self._ranks)
        pending.add({"nats": nats, "weights": weights, **parts.pending()})
        if worst is not None:
            pending.add(worst.pending(model.device))
        read = pending.take()
        figures = self._figures(read["nats"], read["weights"], parts.means(read))
        if worst is not None:
            figures |= worst.figures(read, self._ranks, self._sources)
        return figures

    def _row(
        self, model: LanguageModel, step: Step, place: int, parts: LossSums
    ) -> tuple[RowLoss, DocumentLosses | None]:
        """The sums of a row, and those of its documents if they are wanted."""
        row, size = step[place], parts.num_groups
        if not self._worst:
            found = row_loss(
                model, row, step.loss_denominators, groups=parts.groups(row), num_groups=size
            )
            return found, None
        here = range(place, place + 1)
        slots = SlotDocuments.of_rows(step.documents, here, row.sequence_length)
        documents = row_documents(model, row, slots)
        lengths = step.documents.lengths[step.documents.rows == place]
        # All slots of a document are of one source and one task.
        groups = parts.groups(row, np.cumsum(lengths) - lengths)
        return loss_of_documents(documents, groups, size), documents

    def _figures(self, nats: float, weights: float, found: dict[str, float]) -> JsonObject:
        # The sum of weights may be far below 1, and the loss is still a mean.
        loss = nats / weights if weights else 0.0
        shares = {f"{SOURCE}{source.name}": float(source.share) for source in self._sources}
        if seen := [name for name in shares if name in found]:
            loss = sum(shares[name] * found[name] for name in seen) / sum(
                shares[name] for name in seen
            )
        figures: JsonObject = {"loss": loss, "targets": weights, **found}
        if self._alone:
            figures["packing"] = ONE_A_ROW
        text_bytes = _text_bytes(self._sources[0])
        if self._rows is None and len(self._sources) == 1 and text_bytes:
            figures["bits_per_byte"] = nats / math.log(2) / text_bytes
        return figures


def _check_tokenizer(corpus: Corpus, tokenizer: Tokenizer | TokenizerInfo | None) -> None:
    theirs = corpus.tokenizer
    if theirs is not None and tokenizer is not None and theirs.fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"{corpus.path}: was prepared with another tokenizer ({theirs.name}) than the "
            f"model's ({tokenizer.name}); prepare it with the model's"
        )


def _text_bytes(source: Source) -> int | None:
    """Bytes of the text that all targets of a source stand for; None if unknown."""
    # The dataset's count covers all documents, each as it was prepared.
    shortened = source.slice != (0.0, 1.0) or source.too_long not in (None, "split", "error")
    corpus = cast(Corpus, source.path)
    if corpus.table.has_spans or shortened or source.objective != Causal():
        return None
    return corpus.text_bytes
