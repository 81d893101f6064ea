"""The shapes and dtypes in signatures are true: whole loaders run with every array held against its
annotation.
"""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated

import fsspec
import numpy as np
import pytest
from array_checks import UnfitError, arrays_checked, checked

from makers.image_data import model_folder, prepare, write_records
from makers.trees import tree_dataset
from penstock import (
    BlockDiffusion,
    Causal,
    Denoise,
    Infill,
    InputRequirements,
    Loader,
    MaskedDiffusion,
    Mixture,
    Source,
    inputs,
    objectives,
    packing,
    write_dataset,
)
from penstock.core.arrays import Int64
from penstock.plan.inputs import AttentionRule, RowSlice, prefix_trees
from penstock.plan.inputs.answers import RowAnswers
from penstock.plan.inputs.blank_images import with_blank
from penstock.plan.loader import PlanState
from penstock.plan.objectives import CausalLM, PrefixLM, SpanCorruption, Written
from penstock.plan.sampling import Permutation

ROOMS = ("loader", "sampling", "packing", "inputs", "objectives")
UNUSED = {
    # Needs a GPU; needs a tokenizer.
    "penstock.plan.loader.buffers.pinned", "penstock.plan.objectives.character_splits",
    "penstock.plan.objectives.fragments.Fragments.at_characters",
}  # fmt: skip


@dataclass(frozen=True)
class Reversed:
    """An objective in Python."""

    name: str = "reversed"

    def document_limit(self, sequence_length):
        return sequence_length

    def measure(self, lengths, keys):
        return lengths

    def write(self, tokens, weights, key):
        return Written(
            tokens=tokens[::-1].copy(), weights=None if weights is None else weights[::-1].copy()
        )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    generator = np.random.default_rng(0)
    documents = [generator.integers(3, 300, n) for n in generator.integers(1, 200, 80)]
    spans = [[(0, len(document) // 2 + 1, 1.0)] for document in documents]
    folder = tmp_path_factory.mktemp("shapes")
    return [
        write_dataset(folder / "plain", documents),
        write_dataset(folder / "spans", documents, spans=spans),
    ]


def sources(data):
    plain, weighted = data
    denoise = Denoise([SpanCorruption(0.15, 3), PrefixLM(), CausalLM()], sentinels=range(400, 480))
    return [
        Source(plain, name="plain", max_epochs=2),
        Source(weighted, name="weighted", too_long="drop", shuffle="block"),
        Source(weighted, name="noisy", objective=denoise),
        Source(plain, name="middle", objective=Infill(tokens=(490, 491, 492))),
        Source(plain, name="own", objective=Reversed()),
    ]


class Same:
    """A companion that keeps nothing."""

    def begin(self, sources):
        return lambda row, pieces: (
            sources[int(pieces["source"][0])].tasks(pieces[:1]) if len(pieces) else None
        )


def use_everything(data):
    mixture = Mixture(sources(data))
    for name in ("best_fit", "best_fit_decreasing", "next_fit", "none"):
        need = InputRequirements(
            loss_weights=True,
            positions=True,
            document_ids=True,
            cu_seqlens=True,
            prefix=True,
            target_distances=2,
            dtype="int64" if name == "next_fit" else None,
            cu_seqlens_capacity=99 if name == "none" else None,
        )
        loader = Loader(
            mixture,
            sequence_length=128,
            rows_per_step=4,
            packing=name,
            requirements=need,
            threads=0,
            companion=Same(),
            window_rows=16,
            documents_per_row=9,
            max_document_tokens=100,
        )
        for step in islice(loader, 6):
            state = step.resume_state
            assert step.arrays()["cu_seqlens"][-1] == len(step) * 128
            for row in step:
                AttentionRule.of(row).dense_mask()
                assert RowSlice.of(replace(row, distillation=None), 1, 3).dense_mask().any()
        loader.load_state_dict(state)
        loader.explain(2)
    for row in next(
        iter(
            Loader(data[0], sequence_length=64, rows_per_step=2, packing="concat", attention="row")
        )
    ):
        rule = AttentionRule.of(row)
        assert rule.cu_seqlens[-1] == len(rule.document_ids) == len(rule.prefix) == 64


def use_blocks(data):
    """Targets of an objective's own, and its nodes."""
    need = InputRequirements(
        loss_weights=True, positions=True, cu_seqlens=True, prefix=True, trees=True
    )
    mixture = Mixture(
        [
            Source(data[1], name="blocks", objective=BlockDiffusion(mask_token=490, block=8)),
            Source(data[0], name="masked", objective=MaskedDiffusion(mask_token=490)),
        ]
    )
    loader = Loader(
        mixture, sequence_length=128, rows_per_step=2, requirements=need, threads=0, seed=1
    )
    for row in next(iter(loader)):
        first, last = AttentionRule.of(row).seen_by
        assert (first < last).all()
    [pieces, *_] = [loader._planner.next().pieces]
    for piece in pieces:
        rewriting = loader._plan.rewritings[piece["source"]]
        assert len(rewriting.words(piece)) <= piece["length"]
    blocks, masked = BlockDiffusion(mask_token=490, block=8), MaskedDiffusion(mask_token=490)
    blocks.nodes(40).behind_one()
    for objective in (blocks, masked):
        objective.write(np.arange(20, dtype=np.int32), None, 3)
        objective.levels(20, 3)


def use_places(folder):
    """A source that grows while a window is under way."""
    documents = [[1 + number % 7] * (1 + number % 50) for number in range(120)]
    sources = [
        Source(write_dataset(folder / str(count), documents[:count]), name="a")
        for count in (80, 120)
    ]
    steps = iter(Loader(sources[0], sequence_length=32, rows_per_step=3, threads=0))
    place = [next(steps).place for _ in range(4)][-1]
    list(
        islice(
            Loader(sources[1], sequence_length=32, rows_per_step=3, threads=0, continue_from=place),
            30,
        )
    )


def use_the_rest(data, folder):
    denoise = Denoise([PrefixLM()], sentinels=range(400, 480))
    long = [i for i, tokens in enumerate(data[0].table.lengths[:, 0]) if tokens > 1]
    documents = [data[0][i].tokens for i in long]
    source = Source(
        write_dataset(folder / "long", documents), name="noisy", objective=denoise, max_epochs=1
    )
    step = next(iter(Loader(source, sequence_length=256, rows_per_step=2, threads=0)))
    inputs.encoder_decoder(step[0], encoder_length=257, decoder_length=256, start_id=0, pad_id=0)
    for name in ("best_fit", "best_fit_decreasing", "next_fit", "none"):
        packing.pack(np.arange(1, 60), 64, name, window_rows=4)
    Permutation(size=700, key=3).images(5, 600)
    packed, _ = inputs.pack_documents(
        [np.arange(4, dtype=np.int32), np.arange(3, dtype=np.int32)], [0, 1], multiple=4
    )
    part = RowSlice.of(packed, 0, 2)
    assert part.lengths[1][-1] == len(part.keys)
    common = tuple(range(20))
    row, _ = prefix_trees.pack_trees([(*common, 1), (*common, 2, 3), (50,)])
    assert AttentionRule.of(row).positions.tolist() == [*range(20), 20, 20, 21, 0]
    infill = Infill(tokens=(490, 491, 492), rate=1)
    fragments = Infill(tokens=(490, 491, 492, 493), rate=1, separator=20)
    words = np.arange(40, dtype=np.int32)
    for objective in (denoise, infill, fragments):
        objectives.check_objective(objective)
        written = objective.write(words, None, 7)
        assert objective.restore(written.tokens, 40, 7).tolist() == words.tolist()
    denoise.encoder_decoder(words, 7)
    causal = Causal()
    assert causal.measure(np.arange(3), np.arange(3, dtype=np.uint64)).tolist() == [0, 1, 2]
    causal.write(words, None, 0)


def use_trees(folder):
    dataset, _ = tree_dataset(folder / "trees")
    need = InputRequirements(
        loss_weights=True, positions=True, document_ids=True, cu_seqlens=True, trees=True
    )
    loader = Loader(
        Source(dataset, max_epochs=1),
        sequence_length=96,
        rows_per_step=2,
        requirements=need,
        threads=0,
    )
    for step in loader:
        step.arrays()
        assert len(step.documents) == sum(int(row.paths.documents[-1]) + 1 for row in step)
        for row in step.joined(2):
            assert row.paths is not None
            assert len(row.paths.owners) == len(row.paths.slots) >= len(row.paths[0])
            row.paths.value("rank", "the test")
            answers = RowAnswers.of(row.paths)
            slots, owners = answers.entries(np.arange(len(row.tokens)) % 2 > 0)
            assert len(slots) == len(owners) <= len(answers.slots)
            assert len(answers.value("rank", "the test")) == len(answers)


def use_store(data, folder):
    fsspec.filesystem("memory").put(str(data[1].path), "/shapes", recursive=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.data.shards.writing.finish.LAZY_DOCUMENTS", 0)
        write_dataset(
            folder / "large", [np.arange(number % 70 + 2) for number in range(300)], vocab_size=99
        )
    fsspec.filesystem("memory").put(str(folder / "large"), "/large", recursive=True)
    for source in ("memory://shapes", Source("memory://large", shuffle="block")):
        loader = Loader(
            source, sequence_length=64, rows_per_step=2, threads=0, cache=folder / "cache"
        )
        for step in islice(loader, 5):
            step.arrays()


def use_images(folder):
    loader = Loader(
        Source(folder / "images", max_epochs=1), sequence_length=256, rows_per_step=2, threads=0
    )
    for step in loader:
        [rows] = step.joined(2)
        assert len(rows.media) == sum(len(row.media) for row in step)
        with_blank(step[0])


def test_every_array_is_what_its_signature_says(data, tmp_path):
    prepare(
        write_records(tmp_path / "raw", 8), model_folder(tmp_path, "qwen2_vl"), tmp_path / "images"
    )
    with arrays_checked(*ROOMS) as calls:
        use_images(tmp_path)
        use_everything(data)
        use_blocks(data)
        use_the_rest(data, tmp_path)
        use_trees(tmp_path)
        use_places(tmp_path)
        use_store(data, tmp_path)
    never = {
        name for name, count in calls.items() if not count and not name.startswith(tuple(UNUSED))
    }
    assert not never, "annotated, and never called here"
    assert len(calls) > 50


def test_a_wrong_array_is_found():
    def sums(
        parts: Annotated[Int64, "rows 2"], starts: Annotated[Int64, "rows+1"]
    ) -> Annotated[Int64, "rows"]:
        return parts.sum(axis=1)[: len(starts) - 1]

    found = checked(sums, "sums", Counter())
    pairs = np.ones((3, 2), np.int64)
    assert found(pairs, np.zeros(4, np.int64)).tolist() == [2, 2, 2]
    with pytest.raises(UnfitError, match=r"sums\(starts\): int64\[3\] is not"):
        found(pairs, np.zeros(3, np.int64))
    with pytest.raises(UnfitError, match=r"sums\(parts\): int32\[3, 2\] is not"):
        found(pairs.astype(np.int32), np.zeros(4, np.int64))
    zeros, pairs_of_numbers = np.zeros(2, np.int64), np.zeros((2, 2), np.int64)
    with (
        arrays_checked("loader"),
        pytest.raises(UnfitError, match=r"PlanState.cursors: int64\[2, 2\] is not"),
    ):
        PlanState(row=0, window=0, cursors=pairs_of_numbers, credits=zeros, skipped=zeros)
