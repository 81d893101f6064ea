"""Documents longer than a row, or than `max_document_tokens`: their ends kept, and limits below the
row.
"""

import numpy as np
import pytest

from contracts import (
    assert_exact_resume,
    assert_no_token_lost,
    assert_other_plans_are_refused,
    assert_ranks_share_steps,
)
from makers.datasets import random_documents, tokenizer_info
from makers.trees import tree_dataset
from penstock import Denoise, Infill, InputRequirements, Loader, Mixture, Source, write_dataset
from penstock.core.errors import ConfigError, RecordError
from penstock.plan.inputs import EVERYTHING
from penstock.plan.objectives import PrefixLM, SpanCorruption
from penstock.plan.packing import PACKINGS
from penstock.use.config import load_data, make_loader

SLOTS = 32
BOS, EOS = 1, 2
POLICIES = ("split", "drop", "truncate", "keep_end")


@pytest.fixture(scope="module")
def documents():
    return [
        *random_documents(30, 3, 20, seed=1),
        *random_documents(12, 33, 130, seed=2),
        *random_documents(3, 32, 33),
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, documents):
    return write_dataset(tmp_path_factory.mktemp("cut") / "plain", documents)


@pytest.fixture(scope="module")
def weighted(tmp_path_factory, documents):
    spans = [[(0, len(one) // 3, 2.0), (len(one) // 2, len(one), 0.5)] for one in documents]
    return write_dataset(tmp_path_factory.mktemp("cut") / "weighted", documents, spans=spans)


def build(source, **options):
    return Loader(
        source,
        **{
            "sequence_length": SLOTS,
            "rows_per_step": 4,
            "seed": 3,
            "window_rows": 16,
            "threads": 0,
            **options,
        },
    )


def pieces_of(loader):
    """(document, first token, tokens) of all pieces, by document."""
    windows = loader.new_plan().windows()
    return sorted(
        piece
        for window in windows
        for piece in window.pieces[["document", "begin", "tokens"]].tolist()
    )


def slow_pieces(documents, policy, limit):
    for number, one in enumerate(documents):
        size = len(one)
        if size <= limit:
            yield number, 0, size
        elif policy == "split":
            yield from (
                (number, begin, min(limit, size - begin)) for begin in range(0, size, limit)
            )
        elif policy != "drop":
            yield number, size - limit if policy == "keep_end" else 0, limit


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("most", [None, 5, 10, SLOTS])
def test_pieces_are_those_of_the_definition(plain, documents, packing, policy, most):
    if packing == "concat" and most is None:
        return
    source = Source(plain, max_epochs=1, too_long=policy)
    found = pieces_of(build(source, packing=packing, max_document_tokens=most, window_rows=16))
    expected = list(slow_pieces(documents, policy, most or SLOTS))
    if packing != "concat":
        assert found == expected
        return
    # Rows cut them again: no piece crosses the border of a part.
    ends = {(document, begin + tokens) for document, begin, tokens in found}
    assert all((document, begin + tokens) in ends for document, begin, tokens in expected)
    assert all(tokens <= most for _, _, tokens in found)
    covered = sum(tokens for *_, tokens in found)
    assert covered == sum(tokens for *_, tokens in expected)


def test_a_limit_of_a_row_is_no_limit(plain):
    free, row = (
        build(Source(plain, max_epochs=1), max_document_tokens=most) for most in (None, SLOTS)
    )
    assert pieces_of(free) == pieces_of(row)


@pytest.mark.parametrize("distances", [1, 3])
def test_the_first_token_that_is_kept_is_no_target(weighted, distances):
    """Weights, targets and denominators are those of the end of the document, as if it stood
    alone.
    """
    need = EVERYTHING.merge(InputRequirements(target_distances=distances))
    loader = build(
        Source(weighted, max_epochs=1, too_long="keep_end"), requirements=need, packing="none"
    )
    for step in loader:
        sums = np.zeros(distances)
        for row, piece in zip(step, loader.explain(step.index), strict=False):
            stored = weighted[piece.document]
            tokens, weights = stored.tokens[-SLOTS:], stored.loss_weights[-SLOTS:]
            assert piece.first_token == max(0, len(stored.tokens) - SLOTS)
            np.testing.assert_array_equal(row.tokens[: len(tokens)], tokens)
            np.testing.assert_array_equal(row.positions[: len(tokens)], np.arange(len(tokens)))
            for d in range(1, distances + 1):
                due = np.zeros(SLOTS)
                due[: max(len(tokens) - d, 0)] = weights[d:]
                np.testing.assert_array_equal(row.loss_weights[d - 1], due)
                trained = row.targets[d - 1] != -100
                np.testing.assert_array_equal(trained, due != 0)
                np.testing.assert_array_equal(
                    row.targets[d - 1][trained], np.roll(row.tokens, -d)[trained]
                )
                sums[d - 1] += due.sum()
        assert step.loss_denominators == tuple(sums.tolist())


@pytest.mark.parametrize("policy", ["truncate", "keep_end"])
def test_what_happens_to_bos_and_eos(tmp_path, policy):
    """The beginning keeps BOS and loses EOS; the end keeps EOS and loses BOS. What is left counts
    all its tokens.
    """
    documents = [[BOS, *range(10, 10 + size), EOS] for size in (3, 80, 5, 60)]
    dataset = write_dataset(
        tmp_path / "d", documents, tokenizer=tokenizer_info(bos_id=BOS, eos_id=EOS)
    )
    assert dataset.framed == (True, True)
    source = Source(dataset, max_epochs=1, too_long=policy, shuffle="none")
    rows = [row for step in build(source, packing="none", rows_per_step=1) for row in step]
    for row, document in zip(rows, documents, strict=True):
        kept = document[:SLOTS] if policy == "truncate" else document[-SLOTS:]
        assert row.tokens[: row.num_tokens].tolist() == kept
    assert {int(row.tokens[0]) == BOS for row in rows} == (
        {True} if policy == "truncate" else {True, False}
    )


OBJECTIVES = {
    "denoise": Denoise([SpanCorruption(0.3, 2), PrefixLM()], sentinels=range(900, 960)),
    "infill": Infill(tokens=(970, 971, 972), rate=1),
}


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("most", [None, 12])
def test_objectives_rewrite_the_end_that_is_kept(plain, documents, kind, most):
    objective = OBJECTIVES[kind]
    source = Source(plain, objective=objective, max_epochs=1, too_long="keep_end")
    loader = build(source, max_document_tokens=most)
    limit = min(objective.document_limit(SLOTS), most or SLOTS)
    assert pieces_of(loader) == list(slow_pieces(documents, "keep_end", limit))
    [rewriting] = loader._plan.rewritings
    planner = build(source, max_document_tokens=most)._planner
    for step in loader:
        plan = planner.next()
        for row, begin, end in zip(step, plan.row_starts, plan.row_starts[1:], strict=False):
            written = [rewriting.write(piece) for piece in plan.pieces[begin:end]]
            np.testing.assert_array_equal(
                row.tokens[: row.num_tokens],
                np.concatenate([one.tokens for one in written]) if written else [],
            )


def test_columns_are_those_of_the_kept_end(tmp_path, documents):
    values = [np.arange(len(one), dtype=np.int32) for one in documents]
    dataset = write_dataset(
        tmp_path / "d", documents, columns={"place": values}, fills={"place": -1}
    )
    source = Source(dataset, max_epochs=1, too_long="keep_end", shuffle="none")
    for step in build(source, packing="none"):
        for row, piece in zip(
            step, build(source, packing="none").explain(step.index), strict=False
        ):
            expected = np.arange(piece.first_token, len(documents[piece.document]))
            np.testing.assert_array_equal(row.columns["place"][: row.num_tokens], expected)


def test_trees_and_images_are_never_cut(tmp_path):
    dataset, _ = tree_dataset(tmp_path / "trees", documents=20)
    need = EVERYTHING.merge(InputRequirements(trees=True))
    with pytest.raises(ConfigError, match="too_long='keep_end'"):
        build(Source(dataset, too_long="keep_end"), requirements=need)
    whole = build(Source(dataset, max_epochs=1), requirements=need, sequence_length=200)
    short = build(
        Source(dataset, max_epochs=1),
        requirements=need,
        sequence_length=200,
        max_document_tokens=20,
    )
    kept = {piece[0] for piece in pieces_of(short)}
    assert kept == {document for document, _, tokens in pieces_of(whole) if tokens <= 20}
    assert 0 < len(kept) < len(dataset)


def test_an_error_names_the_limit(plain):
    with pytest.raises(RecordError, match=r"takes 10.*max_document_tokens"):
        list(build(Source(plain, max_epochs=1, too_long="error"), max_document_tokens=10))


def test_sources_have_limits_of_their_own(plain, documents):
    short = Source(
        plain, max_epochs=1, name="short", too_long="keep_end", max_document_tokens=np.int64(5)
    )
    loader = build(
        Mixture([short, Source(plain, max_epochs=1, name="loader's")]), max_document_tokens=10
    )
    found = [[], []]
    for window in loader.new_plan().windows():
        for *piece, source in window.pieces[["document", "begin", "tokens", "source"]].tolist():
            found[source].append(tuple(piece))
    assert sorted(found[0]) == list(slow_pieces(documents, "keep_end", 5))
    assert sorted(found[1]) == list(slow_pieces(documents, "split", 10))


@pytest.mark.parametrize("most", [0, 1, SLOTS + 1])
def test_limits_out_of_range_are_refused(plain, most):
    with pytest.raises(
        ConfigError,
        match=rf"max_document_tokens .*32.* got {most}",
    ):
        build(plain, max_document_tokens=most)
    with pytest.raises(ConfigError, match=rf"'plain': max_document_tok.*got {most}"):
        build(Source(plain, max_document_tokens=most))
    with pytest.raises(ConfigError, match=r"'plain': max_document_tokens.*'x'"):
        Source(plain, max_document_tokens="x")
    with pytest.raises(ConfigError, match=r"max_document_tokens .*number, got 'x'"):
        build(plain, max_document_tokens="x")


def test_concat_has_documents_that_are_too_long_only_with_a_limit(plain):
    with pytest.raises(ConfigError, match=r"'concat'.*max_document_tokens"):
        build(Source(plain, too_long="keep_end"), packing="concat")
    build(Source(plain, too_long="keep_end", max_document_tokens=9), packing="concat")


# -- promises
# --------------------------------------------------------------------------------------------------


def mixture(plain, weighted, packing):
    policies = ("keep_end", "truncate", "split")
    sources = [
        Source(data, share, name=str(number), max_epochs=2, too_long=policy)
        for number, (data, share, policy) in enumerate(
            zip((plain, weighted, weighted), (0.5, 0.3, 0.2), policies, strict=True)
        )
    ]
    limits = (20, 9, 25) if packing == "concat" else (None, 9, 25)
    return Mixture(
        [
            Source(
                one.path,
                one.share,
                one.name,
                max_epochs=2,
                too_long=one.too_long,
                max_document_tokens=limit,
            )
            for one, limit in zip(sources, limits, strict=True)
        ]
    )


@pytest.mark.parametrize("packing", PACKINGS)
def test_resume_is_exact_and_ranks_share_steps(plain, weighted, packing):
    def loader(rank=(0, 1)):
        return build(mixture(plain, weighted, packing), packing=packing, data_parallel=rank)

    steps = assert_exact_resume(loader, 200)
    assert 10 < len(steps) < 200
    assert_ranks_share_steps(loader, [2, 4], 200)
    assert_no_token_lost(loader())


def test_another_limit_is_refused(plain):
    def loader(most=None, own=None, too_long=None):
        return build(
            Source(plain, too_long=too_long, max_document_tokens=own), max_document_tokens=most
        )

    changed = r"source 0 \('plain'\) has another name, .* order or limit"
    assert_other_plans_are_refused(
        loader,
        {
            "loader": ({"most": 10}, changed),
            "source": ({"own": 12}, changed),
            "keep_end": ({"too_long": "keep_end"}, changed),
        },
    )
    loader(own=10).load_state_dict(loader(most=10).state_dict())


def test_a_run_file_has_the_same_settings(tmp_path, plain):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"data:\n  sources:\n    - {{path: {plain.path}, too_long: keep_end, max_epochs: 1, "
        f"drop_untrained: false}}\n    - {{path: {plain.path}, name: short, "
        "max_document_tokens: 4, max_epochs: 1}\n  loader: {sequence_length: 32, "
        "rows_per_step: 4, seed: 3, documents_per_row: 3, max_document_tokens: 16}\n"
    )
    loader = make_loader(load_data(file))
    assert (loader.settings.documents_per_row, loader.settings.max_document_tokens) == (3, 16)
    assert [loader.settings.document_tokens(one) for one in loader.mixture.sources] == [16, 4]
    assert not loader.mixture.sources[0].drop_untrained
    same = build(
        Mixture(
            [
                Source(plain, too_long="keep_end", max_epochs=1),
                Source(plain, name="short", max_document_tokens=4, max_epochs=1),
            ]
        ),
        documents_per_row=3, max_document_tokens=16, window_rows=1024,
    )  # fmt: skip
    assert pieces_of(loader) == pieces_of(same)
