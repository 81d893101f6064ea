"""The isolation of the branches of a prefix tree."""

import numpy as np
import torch

from penstock.core.arrays import Int64
from penstock.core.errors import IsolationError
from penstock.data.shards.format.tree_building import build_tree
from penstock.models.isolation.calls import (
    Forward,
    TorchModel,
    guarded,
    refuse_uncheckable,
    transformers_forward,
    undisturbed,
    vocabulary_size,
    without_zeros,
)
from penstock.models.isolation.comparison import largest_difference, spread, tolerance
from penstock.models.isolation.lengths import PADDING
from penstock.models.isolation.report import describe
from penstock.plan.inputs import IGNORE
from penstock.plan.inputs.model_input import ModelInput


def try_tree(model: TorchModel, forward: Forward | None = None, *, seed: int = 0) -> None:
    """Compare each path of a prefix tree, between two ordinary documents, with the path alone.

    Raises:
        IsolationError: Branches see each other, or do not see their beginning.
    """
    refuse_uncheckable(model)
    row, paths = _random_tree(vocabulary_size(model), seed)
    with undisturbed(model), without_zeros(model, seed) as variant, torch.no_grad():
        call = guarded(variant, forward or transformers_forward, model)
        together = call(row)
        for number, slots in enumerate(paths):
            alone = call(_path_alone(row, slots))
            gap = largest_difference(
                together[torch.from_numpy(slots).to(together.device)], alone
            ) / spread(alone)
            if not gap <= tolerance(together.dtype):
                raise IsolationError(
                    f"{describe(model)}: the branches of a prefix tree see each other, or "
                    f"miss their beginning: logits of path {number + 1} of {len(paths)} "
                    f"differ from those of the path alone by {gap:.3g} standard deviations. "
                    "Its attention must follow `reach` of a row (query q sees key k if k ≤ q "
                    "< reach[k]), as penstock.models.attention does; or prepare the data "
                    "with answers: separate"
                )


def _random_tree(vocabulary: int, seed: int) -> tuple[ModelInput, list[Int64]]:
    """A row of an ordinary document, a tree of four paths, and padding; and the slots of each
    path.
    """
    tokens = np.random.default_rng(seed).integers(0, vocabulary, 40).tolist()
    first, start, (a, b, c, d) = (
        tokens[:5],
        tokens[5:12],
        (tokens[12:16], tokens[16:21], tokens[21:23], tokens[23:30]),
    )
    built = build_tree([[*start, *a, *b], [*start, *a, *c], [*start, *d], [*d, *a]])
    begins, ends, positions = built.tree.nodes(len(built.tokens))
    at, count, slots = len(first), len(built.tokens), len(first) + len(built.tokens) + PADDING
    borders = np.array([0, *(at + begin for begin in begins), at + count, slots], np.int32)
    row = ModelInput(
        tokens=np.concatenate([first, built.tokens, np.zeros(PADDING, np.int64)]),
        targets=np.full((1, slots), IGNORE),
        loss_weights=np.zeros((1, slots), np.float32),
        positions=np.concatenate([np.arange(at), positions, np.arange(PADDING)]),
        document_ids=np.repeat(np.arange(len(borders) - 1), np.diff(borders)),
        cu_seqlens=borders,
        max_seqlen=int(np.diff(borders).max()),
        num_tokens=at + count,
        source_ids=np.zeros(len(borders) - 2, np.int32),
        reach=np.array([at, *(at + end for end in ends), slots], np.int32),
    )
    return row, [np.arange(at), *(at + built.tree.slots(path) for path in range(4))]


def _path_alone(row: ModelInput, slots: Int64) -> ModelInput:
    """One path of a row, as a separate row."""
    count = len(slots)
    return ModelInput(
        tokens=row.tokens[slots],
        targets=np.full((1, count), IGNORE),
        loss_weights=np.zeros((1, count), np.float32),
        positions=np.arange(count),
        document_ids=np.zeros(count, np.int64),
        cu_seqlens=np.array([0, count], np.int32),
        max_seqlen=count,
        num_tokens=count,
        source_ids=np.zeros(1, np.int32),
    )
