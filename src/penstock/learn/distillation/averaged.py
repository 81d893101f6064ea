"""Several teachers as one: the weighted mean of their distributions, with which the student is
compared once.

    p(token) = Σ weight × p_teacher(token) ÷ Σ weight

The mean is that of probabilities, not of logits. It is the distribution that one gets by asking a
teacher chosen at random by weight, whatever the scale of each teacher's logits; what any of them
finds likely stays likely. A mean of logits is, up to its sum, a geometric mean of the
distributions: one teacher that rules a token out rules it out for all.

With KL(teacher ‖ student) alone, the mean has the gradient of the weighted sum of losses: Σ w KL(pᵢ
‖ q) = KL(p ‖ q) + Σ w KL(pᵢ ‖ p) if Σ w = 1, and the last sum does not depend on the student. The
weighted sum of KL(student ‖ teacher) is lowest at the geometric mean instead. So this module
matters where the reverse direction has a share, with a top-k, and for `h_kl`, `alm` and `uld`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.learn.distillation.outputs import TeacherOutputs
from penstock.learn.distillation.teacher_rows import TeacherRow
from penstock.plan.inputs.torch_tensors import on_device


def averaged(outputs: Sequence[TeacherOutputs], row: TeacherRow, weights: Tensor) -> TeacherOutputs:
    """What the mean of teachers predicts for a row that all of them read.

    Args:
        outputs: Of each teacher, over the whole vocabulary or, as `alm` needs, only of the text's
            tokens.
        row: The row.
        weights: float64 [teachers, documents], ≥ 0, not all 0 for a document.

    Returns:
        Like theirs; `entropy`, which no loss reads, is the mean of theirs.

    Raises:
        ConfigError: They have vocabularies of different sizes, or only the most likely tokens.
    """
    first = outputs[0]
    _check(outputs)
    device = first.token_log_probs.device
    # Padding is one more document, of which nothing is read.
    documents = on_device(row.slot_documents, device)
    shares = torch.nn.functional.pad(weights.to(device), (0, 1), value=1.0)
    shares = (shares / shares.sum(0))[:, documents].to(first.token_log_probs.dtype)
    others = [one.to(device) for one in outputs]

    def mean(name: str) -> Tensor | None:
        """Logarithm of the mean of probabilities, given by their logarithms."""
        if getattr(first, name) is None:
            return None
        found: Tensor | None = None
        for one, share in zip(others, shares.log(), strict=True):
            logs = getattr(one, name)
            part = logs + (share[:, None] if logs.ndim > 1 else share)
            found = part if found is None else torch.logaddexp(found, part)
        return found

    tokens = mean("token_log_probs")
    assert tokens is not None
    return TeacherOutputs(
        log_probs=mean("log_probs"),
        # Those of alm, which reads only the tokens of the text.
        top_ids=first.top_ids,
        top_log_probs=first.top_log_probs,
        token_log_probs=tokens,
        boundary_log_probs=mean("boundary_log_probs"),
        entropy=(torch.stack([one.entropy for one in others]) * shares).sum(0),
        temperature=first.temperature,
    )


def _check(outputs: Sequence[TeacherOutputs]) -> None:
    sizes = [None if one.log_probs is None else one.log_probs.shape[-1] for one in outputs]
    listed = [None if one.top_ids is None else one.top_ids.shape[-1] for one in outputs]
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"teachers with vocabularies of {sizes} ids cannot be averaged; combine their losses "
            "(combine: losses), each in its own vocabulary"
        )
    # The one token that alm asks for is not read.
    if sizes[0] is None and any((one or 0) > 1 for one in listed):
        raise ConfigError(
            "teachers that give only their most likely tokens cannot be averaged, as those of the "
            "mean are others; ask each with Wanted(top_k=None)"
        )


def require_one_reading(rows: Sequence[TeacherRow]) -> None:
    """Refuse rows of teachers that read other tokens, whose distributions cannot be averaged.

    Raises:
        ConfigError: They differ.
    """
    for number, row in enumerate(rows[1:], 1):
        same = (
            np.array_equal(row.input.tokens, rows[0].input.tokens)
            and np.array_equal(row.teacher_bounds, rows[0].teacher_bounds)
            and np.array_equal(row.student_bounds, rows[0].student_bounds)
        )
        if not same:
            raise ConfigError(
                f"teacher.combine average: teachers 0 and {number} read other tokens of the same "
                "text; give both the same bos, documents, control_tokens, max_tokens and multiple"
            )
