"""All teachers of a run: the distillation loss of each row and step, for the trainer.

    denominators:  Σ chunk weights of each teacher, over the step and all ranks (one all-reduce)
    a row:         factor × Σ over teachers and chunks of share(teacher, document) × weight × divergence ÷ denominator
    averaged:      factor × Σ over chunks of weight × divergence from the teachers' mean, by their shares ÷ denominator

Guarantees: a row's loss depends only on the row and the denominators, so microbatches, ranks and
worker threads change nothing but the order of additions. The choice of teacher depends only on the
document. A rank without chunks returns exactly zero and takes part in every collective.
"""  # noqa: E501

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from hashlib import blake2b
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.errors import StateError
from penstock.core.json_values import JsonObject
from penstock.data.shards.opening import open_dataset
from penstock.learn.distillation.averaged import averaged, require_one_reading
from penstock.learn.distillation.blocks import Pairing
from penstock.learn.distillation.losses import distillation_loss
from penstock.learn.distillation.outputs import TeacherOutputs, Wanted
from penstock.learn.distillation.projection import Projection
from penstock.learn.distillation.settings import DistillationSettings, LossSettings, TeacherSettings
from penstock.learn.distillation.teacher_rows import TeacherRow
from penstock.learn.distillation.teachers import Teacher, document_scores
from penstock.learn.distillation.token_losses import Projector
from penstock.models.head import Head, Logits
from penstock.plan.inputs.torch_tensors import on_device

Sum = Callable[[Sequence[float]], list[float]]
"""Sums each value over all ranks."""


def wanted_of(loss: LossSettings, *, averaged: bool = False) -> Wanted:
    """What a loss needs from its teacher: the full distribution, the top-k tokens, or only the
    tokens of the text. The most likely tokens of a mean are known only from whole distributions.
    """
    whole = averaged or loss.kind in ("h_kl", "uld")
    top_k = 1 if loss.kind == "alm" else None if whole else loss.top_k
    return Wanted(
        temperature=loss.temperature, top_k=top_k, boundary=loss.kind == "alm" and loss.debias
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenTeacher:
    """A teacher that is ready, and what its loss needs besides its outputs."""

    settings: TeacherSettings
    teacher: Teacher
    projection: Projection | None = None
    """Losses p_kl and h_kl, even if the tokenizers are the same."""
    boundary: Tensor | None = None
    """Loss alm: bool [student's vocabulary], see `starts_boundary`."""
    weights: str = ""
    """Fingerprint of the teacher's model; empty if unknown."""


@final
class Distiller(nn.Module):
    """The teachers of a run. Its parameters are those of learnable projections.

    Args:
        settings: Section `teacher` of the run file.
        teachers: In the order of the settings.
        vocab_size: Number of ids of the student's tokenizer.
        device: The student's device.
    """

    def __init__(
        self,
        settings: DistillationSettings,
        teachers: Sequence[OpenTeacher],
        *,
        vocab_size: int,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.settings, self.teachers = settings, list(teachers)
        self._vocab_size, self._device = vocab_size, torch.device(device)
        self._ratio = 1.0
        self._denominators: list[float] = []
        self._sums: list[Tensor] = []
        self._pairs: list[Tensor | None] = []
        projectors: list[nn.Module] = []
        self._averaged = settings.combine == "average"
        for number, one in enumerate(self.teachers):
            loss, projection = one.settings.loss, one.projection
            used = number == 0 or not self._averaged
            if projection is not None and loss.kind == "p_kl" and used:
                projectors.append(Projector(projection, learnable=one.settings.learn_projection))
            else:
                projectors.append(nn.Identity())
            threshold = 1.0 if loss.strict else loss.threshold
            pairs = (
                projection.pairs(threshold)
                if projection is not None and loss.kind == "h_kl"
                else None
            )
            self._pairs.append(None if pairs is None else torch.from_numpy(pairs).to(self._device))
        self.projectors = nn.ModuleList(projectors).to(self._device)

    def begin(self, rows: Sequence[tuple[TeacherRow, ...]], total: Sum) -> None:
        """Begin a step: teachers may start to work ahead, and the denominators are summed over all
        ranks.
        """
        count = 1 if self._averaged else len(self.teachers)
        self._denominators = total(
            [sum(float(row[t].weights.sum()) for row in rows) for t in range(count)]
        )
        self._sums = [
            torch.zeros((), dtype=torch.float64, device=self._device) for _ in range(count)
        ]
        for number, one in enumerate(self.teachers):
            one.teacher.ask([row[number] for row in rows])

    def row_loss(
        self,
        logits_of: Logits,
        hidden: Tensor,
        targets: Tensor,
        rows: tuple[TeacherRow, ...],
    ) -> Tensor:
        """A row's share of the step's distillation loss, with gradient.

        Args:
            logits_of: The student's head; see `distillation_loss`.
            hidden: Float [T, width], the student's final hidden states at distance 1.
            targets: int64 [T], at distance 1.
            rows: Each teacher's side of the row.
        """
        outputs = [one.teacher.outputs(row) for one, row in zip(self.teachers, rows, strict=True)]
        head, parts, shares = Head.of(logits_of), [], self._shares(outputs, rows)
        if self._averaged:
            require_one_reading(rows)
            outputs = [averaged(outputs, rows[0], shares)]
            shares = torch.ones_like(shares[:1])
        for number, share in enumerate(shares):
            one, row = self.teachers[number], rows[number]
            documents = on_device(row.documents.astype(np.int64), self._device)
            weights = on_device(row.weights, self._device) * share[documents].to(torch.float32)
            scale = (
                self.settings.distillation * self._ratio / max(self._denominators[number], 1e-12)
            )
            projector = self.projectors[number]
            part, divergence = distillation_loss(
                head,
                hidden,
                outputs[number],
                Pairing.of(row, self._device, weights),
                one.settings.loss,
                projector=projector if isinstance(projector, Projector) else None,
                pairs=self._pairs[number],
                boundary=one.boundary,
                targets=targets,
                vocab_size=self._vocab_size,
                scale=scale,
            )
            parts.append(part)
            self._sums[number] += divergence.detach().to(self._device)
        return reduce(torch.add, parts)

    def _shares(self, outputs: Sequence[TeacherOutputs], rows: tuple[TeacherRow, ...]) -> Tensor:
        """Weight of each teacher on each document, float64 [teachers, documents]."""
        settings = self.settings
        weights = on_device(
            np.array([one.settings.weight for one in self.teachers], np.float64), self._device
        )[:, None]
        count = len(rows[0].text_bytes)
        if settings.choose == "all" or len(self.teachers) == 1:
            return weights.expand(-1, count)
        scores = torch.stack(
            [
                on_device(document_scores(found, row, settings.score).double(), self._device)
                for found, row in zip(outputs, rows, strict=True)
            ]
        )
        if settings.choose == "best":
            best = torch.nn.functional.one_hot(scores.argmax(0), len(self.teachers)).T
            return best.double()
        # −∞, of a teacher that predicts nothing of a document, leaves it to the others, at any
        # sharpness; of a document that none predicts, all are equal.
        nothing = scores == -torch.inf
        scaled = (settings.sharpness * scores).masked_fill(nothing, -torch.inf)
        scaled = scaled.masked_fill(nothing.all(0), 0.0)
        shares: Tensor = torch.softmax(scaled, 0) * weights
        return shares

    def pending(self) -> dict[str, Tensor]:
        """Sums of the step's divergences as they are on the device, for `StepSums`."""
        return {f"distillation {number}": one for number, one in enumerate(self._sums)}

    def end(self, sums: Mapping[str, float], cross_entropy: float) -> dict[str, float]:
        """End a step: return its figures, from which the next step is balanced.

        Args:
            sums: What `pending` gave, summed over ranks.
            cross_entropy: The step's cross entropy, nats a target.

        Returns:
            `distillation`: divergence from all teachers, times their shares and weights, before the
            factors `distillation` and `balance`; `distillation_NUMBER`:
            from each, if there are several; `chunks`: the sum of the chunks' weights in this step.
        """
        parts = [
            sums[f"distillation {number}"] / max(weights, 1e-12)
            for number, weights in enumerate(self._denominators)
        ]
        figures = {"distillation": sum(parts), "chunks": sum(self._denominators)}
        if len(parts) > 1:
            figures |= {f"distillation_{number}": part for number, part in enumerate(parts)}
        if self.settings.balance == "balanced" and sum(parts) > 0:
            self._ratio = cross_entropy / sum(parts)
        return figures

    def made_from(self) -> list[dict[str, str]]:
        """Of each teacher, digests by name of what it was made from, for comparing ranks."""
        found = []
        for one in self.teachers:
            made = {"weights": one.weights}
            if one.projection is not None:
                cells = blake2b(one.projection.indices.tobytes(), digest_size=6)
                cells.update(one.projection.weights.tobytes())
                made["projection"] = cells.hexdigest()
            for source, path in one.settings.documents.items():
                made[f"documents of {source!r}"] = open_dataset(path).fingerprint[:12]
            found.append(made)
        return found

    def state(self) -> JsonObject:
        """What a run needs besides the parameters to resume."""
        return {
            "ratio": self._ratio,
            "projections": self._learnt_cells(),
            "teachers": [one.weights for one in self.teachers],
        }

    def others(self, state: JsonObject) -> list[int]:
        """Numbers of the teachers with another model than in a state."""
        then = state.get("teachers", [])
        return [
            number
            for number, (one, weights) in enumerate(zip(self.teachers, then, strict=False))
            if one.weights and weights and one.weights != weights
        ]

    def load_state(self, state: JsonObject) -> None:
        """Restore what `state` returned.

        Raises:
            StateError: The state's projection weights belong to other cells than those of the
                current projection.
        """
        for number, (now, then) in enumerate(
            zip(self._learnt_cells(), state["projections"], strict=False)
        ):
            if now != then:
                raise StateError(
                    f"teacher.teachers.{number}: the checkpoint has learnt weights of another "
                    "projection; resume with the same teacher, projection, control_tokens "
                    "and learn_projection, or begin another run with model: from:RUN"
                )
        self._ratio = float(state["ratio"])

    def _learnt_cells(self) -> list[str | None]:
        """For each learnable projection, a checksum of the cells that its weights belong to."""
        return [
            blake2b(one.projection.indices.tobytes(), digest_size=8).hexdigest()
            if one.projection is not None and one.settings.learn_projection
            else None
            for one in self.teachers
        ]

    def close(self) -> None:
        """Close the teachers, so that their processes end."""
        for one in self.teachers:
            one.teacher.close()
