"""The isolation of the documents of a row: equal logits, and no gradient between them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.errors import IsolationError
from penstock.models.isolation.calls import (
    Forward,
    TorchModel,
    embedding,
    guarded,
    refuse_nan,
    refuse_uncheckable,
    transformers_forward,
    undisturbed,
    vocabulary_size,
    without_zeros,
)
from penstock.models.isolation.comparison import largest_difference, spread, tolerance
from penstock.models.isolation.lengths import DOCUMENT_LENGTHS, PADDING
from penstock.models.isolation.report import CURE, IsolationReport, describe
from penstock.plan.inputs import IGNORE
from penstock.plan.inputs.model_input import ModelInput


def try_isolation(
    model: TorchModel,
    forward: Forward | None = None,
    *,
    lengths: Sequence[int] = DOCUMENT_LENGTHS,
    seed: int = 0,
    gradients: bool = True,
) -> IsolationReport:
    """The check on one row, with the arguments and errors of `check_isolation`.

    Args:
        gradients: Whether to test gradients too; the backward passes need memory for the logits of
            the whole row.
    """
    refuse_uncheckable(model)
    row = _random_row(lengths, PADDING, vocabulary_size(model), seed)
    borders = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    with undisturbed(model), without_zeros(model, seed) as variant:
        run = forward or transformers_forward
        call = guarded(variant, run, model)
        with torch.no_grad():
            together = call(row)
            alone = [call(_cut(row, begin, end)) for begin, end in pairwise(borders)]
        refuse_nan(model, alone)
        dtype = str(together.dtype).removeprefix("torch.")
        scale = spread(torch.cat(alone))
        gaps = [
            largest_difference(together[begin : begin + len(logits)], logits) / scale
            for begin, logits in zip(borders, alone, strict=False)
        ]
        worst = int(np.argmax(np.nan_to_num(gaps, nan=np.inf)))
        allowed = tolerance(together.dtype)
        if not gaps[worst] <= allowed:
            raise IsolationError(
                f"{describe(model)}: documents of one row see each other: logits of document "
                f"{worst + 1} of {len(lengths)} differ from those of the document alone by "
                f"{gaps[worst]:.3g} standard deviations (rounding in {dtype} would be below "
                f"{allowed:.0e}). {CURE}"
            )
        checked = gradients and _check_dependence(
            model, lambda row: run(variant, row), row, borders
        )
    return IsolationReport(
        model=describe(model), difference=gaps[worst], tolerance=allowed, dependence_checked=checked
    )


def changing_rotary(model: object, sequence_length: int, limit: int, kind: str) -> str:
    """The message about rows that are longer than `rotary_limit`."""
    return (
        f"{describe(model)}: documents of one row see each other: its rotary embedding "
        f"({kind}) changes for all of them when one has more than {limit} tokens, and rows "
        f"have {sequence_length}. Take a sequence_length of {limit} or less. {CURE}"
    )


def _check_dependence(
    model: TorchModel, call: Callable[[ModelInput], Tensor], row: ModelInput, borders: list[int]
) -> bool:
    """Require that gradients between documents are exactly zero; returns False if gradients are not
    available.
    """
    try:
        with torch.enable_grad(), _embeddings(model) as embeddings:
            logits = call(row)
            weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(
                logits
            )
            scores = (logits * weights).float().sum(-1)
            for number, (begin, end) in enumerate(pairwise(borders), 1):
                _refuse_dependence(
                    model, _reach(scores[begin:end].sum(), embeddings[0]), number, borders
                )
            # The test must be able to fail: a document's last token depends on an earlier one.
            begin, end = borders[-2:]
            context = _reach(scores[end - 1], embeddings[0])[begin : end - 1]
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, IsolationError):
            raise
        return False
    if not float(context.max()) > 0:
        raise IsolationError(
            f"{describe(model)}: the check is meaningless: the last token of a document of "
            f"{end - begin} does not depend on any token before it, so the model uses no "
            "context at all, as if it had no attention"
        )
    return True


@contextmanager
def _embeddings(model: TorchModel) -> Iterator[list[Tensor]]:
    """Collects the output of the token embeddings in later forward passes, as leaves for
    gradients.
    """
    found: list[Tensor] = []

    def remember(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        found.append(output.detach().requires_grad_(True))
        return found[-1]

    handle = embedding(model).register_forward_hook(remember)
    try:
        yield found
    finally:
        handle.remove()


def _reach(score: Tensor, embeddings: Tensor) -> Tensor:
    """[T]: how much each token's embedding moves a score; exactly 0 where no path connects them."""
    gradient = torch.autograd.grad(score, embeddings, retain_graph=True)[0].float()
    return gradient.reshape(-1, gradient.shape[-1]).abs().amax(-1)


def _refuse_dependence(model: TorchModel, reach: Tensor, number: int, borders: list[int]) -> None:
    begin, end = borders[number - 1 : number + 1]
    outside = reach.clone()
    outside[begin:end] = 0
    if float(outside.max()) == 0:
        return
    slot = int(outside.argmax())
    other = next(
        (f"document {i}" for i, border in enumerate(borders[1:], 1) if slot < border), "the padding"
    )
    raise IsolationError(
        f"{describe(model)}: documents of one row see each other: logits of document {number} "
        f"depend on {other} (gradient {float(outside.max()):.3g}, within the document "
        f"{float(reach[begin:end].max()):.3g}). {CURE}"
    )


def _random_row(lengths: Sequence[int], padding: int, vocabulary: int, seed: int) -> ModelInput:
    """A row of documents of random tokens, with padding at the end."""
    pieces = [*lengths, padding]
    slots = sum(pieces)
    return ModelInput(
        tokens=np.random.default_rng(seed).integers(0, vocabulary, slots),
        targets=np.full((1, slots), IGNORE),
        loss_weights=np.zeros((1, slots), np.float32),
        positions=np.concatenate([np.arange(length) for length in pieces]),
        document_ids=np.repeat(np.arange(len(pieces)), pieces),
        cu_seqlens=np.concatenate([[0], np.cumsum(pieces)]).astype(np.int32),
        max_seqlen=max(pieces),
        num_tokens=slots - padding,
        source_ids=np.zeros(len(lengths), np.int32),
    )


def _cut(row: ModelInput, begin: int, end: int) -> ModelInput:
    """One document of a row, as a separate row."""
    assert row.positions is not None
    return ModelInput(
        tokens=row.tokens[begin:end],
        targets=row.targets[:, begin:end],
        loss_weights=np.zeros((1, end - begin), np.float32),
        positions=row.positions[begin:end],
        document_ids=np.zeros(end - begin, np.int64),
        cu_seqlens=np.array([0, end - begin], np.int32),
        max_seqlen=end - begin,
        num_tokens=end - begin,
        source_ids=np.zeros(1, np.int32),
    )
