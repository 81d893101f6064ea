"""A source of several datasets gives what one dataset of all their documents gives; mixtures as
mappings; tokens.
"""

import json
import pickle
import shutil
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from contracts import assert_exact_resume, assert_ranks_share_steps, assert_same_row
from penstock import open_dataset, write_dataset
from penstock.core.errors import ConfigError, CorruptionError, StateError
from penstock.data.shards import TokenizerInfo, write_megatron

VOCAB, CUTS = 1000, (0, 60, 61, 110, 150)
INFO = TokenizerInfo(name="t", fingerprint="t", vocab_size=VOCAB, bos_id=1, eos_id=2)
NEED = ps.InputRequirements(
    target_distances=2,
    loss_weights=True,
    positions=True,
    document_ids=True,
    cu_seqlens=True,
    prefix=True,
)
DENOISE = ps.Denoise.ul2r(modes={"R": 901, "X": 902, "S": 903}, sentinels=range(700, 900))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with one dataset, with loss weights and without, each also in four parts (`web-0`,
    …; `talk-0`, …).
    """
    folder = tmp_path_factory.mktemp("joined")
    numbers = np.random.default_rng(0)
    lengths = np.clip(np.exp(numbers.normal(3.3, 1, CUTS[-1])), 1, 400).astype(int)
    documents = [[1, *numbers.integers(3, 700, length).tolist(), 2] for length in lengths]
    spans = [
        None if i % 3 == 0 else [(1, max(2, len(d) // 2), 0.5)] for i, d in enumerate(documents)
    ]
    for name, weights in (("web", None), ("talk", spans)):
        write_dataset(
            folder / f"whole-{name}",
            documents,
            spans=weights,
            tokenizer=INFO,
            documents_per_shard=40,
        )
        for part, (begin, end) in enumerate(pairwise(CUTS)):
            some = None if weights is None else weights[begin:end]
            write_dataset(
                folder / f"{name}-{part}", documents[begin:end], spans=some, tokenizer=INFO
            )
    return folder


def build(sources, **options):
    options = {
        "sequence_length": 128,
        "rows_per_step": 6,
        "seed": 3,
        "window_rows": 32,
        "threads": 0,
        **options,
    }
    return ps.Loader(sources, requirements=NEED, **options)


@pytest.mark.parametrize("name", ["web", "talk"])
@pytest.mark.parametrize(
    ("how", "packing"),
    [
        ({}, "best_fit"),
        ({"shuffle": "none", "slice": (0.3, 0.9)}, "concat"),
        ({"too_long": "drop", "slice": (0.25, 0.75)}, "best_fit_decreasing"),
        ({"shuffle": "block", "too_long": "truncate", "objective": DENOISE}, "best_fit"),
        ({"too_long": "keep_end", "max_document_tokens": 30}, "next_fit"),
    ],
)
def test_parts_give_the_batches_of_the_whole(data, name, how, packing):
    """Names and lengths decide the plan, so even the order is the same: across parts, and bit for
    bit.
    """
    paths = (str(data / f"{name}-*"), data / f"whole-{name}")
    joined, whole = (
        list(build(ps.Source(path, name="s", max_epochs=2, **how), packing=packing))
        for path in paths
    )
    assert len(joined) == len(whole) > 4
    for mine, theirs in zip(joined, whole, strict=True):
        assert mine.loss_denominators == theirs.loss_denominators
        for row, other in zip(mine, theirs, strict=True):
            assert_same_row(row, other)


@settings(
    deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(order=st.permutations(range(4)), threads=st.integers(0, 2))
def test_any_order_of_parts_gives_each_document_once_an_epoch(data, order, threads):
    source = ps.Source([data / f"web-{part}" for part in order], max_epochs=1)
    found = [
        row.tokens[begin:end].tolist()
        for step in build(source, packing="none", sequence_length=512, threads=threads)
        for row in step
        for begin, end in zip(row.cu_seqlens, row.cu_seqlens[1:], strict=False)
        if end <= row.num_tokens
    ]
    expected = [document.tokens.tolist() for document in open_dataset(data / "whole-web")]
    assert sorted(found) == sorted(expected)


def test_resume_is_exact_at_every_step(data):
    def mixture():
        changes = [ps.ShareChange(step=3, shares={"talk-*": 0.9})]
        sources = [ps.Source(str(data / f"{name}-*"), max_epochs=1) for name in ("web", "talk")]
        return ps.Mixture(sources, changes)

    assert len(assert_exact_resume(lambda: build(mixture()), 30)) < 30
    assert_ranks_share_steps(lambda rank: build(mixture(), data_parallel=rank), (2, 3), 6)
    loader = build(mixture())
    first = next(iter(loader)).resume_state
    copied = pickle.loads(pickle.dumps(build(mixture()).seek(1)))
    assert copied.state_dict() == first


def test_another_set_of_parts_is_refused_at_a_restore(data, tmp_path):
    for part in range(4):
        shutil.copytree(data / f"web-{part}", tmp_path / f"web-{part}")

    def build_of(*parts):
        return build(ps.Source([tmp_path / f"web-{part}" for part in parts], name="web"))

    state = json.loads(json.dumps(next(iter(build_of(0, 1, 2))).resume_state))
    build_of(0, 1, 2).load_state_dict(state)
    for parts in ((0, 1), (0, 1, 2, 3), (0, 2, 1), (0, 1, 3)):
        with pytest.raises(StateError, match=r"source 0 \('web'\) holds other documents"):
            build_of(*parts).load_state_dict(state)
    shutil.rmtree(tmp_path / "web-2")
    shutil.copytree(data / "web-3", tmp_path / "web-2")
    with pytest.raises(StateError, match=r"source 0 \('web'\) holds other documents"):
        build_of(0, 1, 2).load_state_dict(state)


def test_one_folder_in_a_list_has_the_states_of_the_folder(data):
    states = [
        build(ps.Source(path, name="w")).state_dict() for path in (data / "web-0", [data / "web-0"])
    ]
    assert states[0] == states[1]


def test_explain_says_in_which_part_a_document_lies(data):
    loader = build(ps.Source(str(data / "web-*")))
    corpus = loader.datasets[0]
    shards = set()
    for piece in loader.explain(0):
        part, number = corpus.part_of(piece.document)
        assert piece.shard == str(part.path / "00000.arrow")
        assert piece.origin == part[number].origin
        shards.add(piece.shard)
    assert len(shards) > 2


def test_a_damaged_part_is_named_with_the_documents_number_in_it(data, tmp_path):
    for part in range(2):
        shutil.copytree(data / f"web-{part}", tmp_path / f"web-{part}")
    shard = tmp_path / "web-1" / "00000.arrow"
    content = bytearray(shard.read_bytes())
    content[int(open_dataset(tmp_path / "web-1").table.batches["tokens"][0])] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CorruptionError, match=rf"{tmp_path}/web-1\): document 0"):
        list(build(ps.Source(tmp_path / "web-*", max_epochs=1)))


def test_corpora_in_place_are_one_source(data, tmp_path):
    for part in range(4):
        write_megatron(open_dataset(data / f"web-{part}"), tmp_path / f"foreign-{part}")
    joined, whole = (
        build(ps.Source(path, name="s", max_epochs=1))
        for path in (tmp_path / "foreign-*", data / "whole-web")
    )
    for mine, theirs in zip(joined, whole, strict=True):
        for row, other in zip(mine, theirs, strict=True):
            assert_same_row(row, other)


def test_a_mapping_is_a_mixture(data):
    web, talk = str(data / "web-*"), data / "whole-talk"
    by_mapping = build({web: 0.7, talk: 0.3})
    by_sources = build(ps.Mixture([ps.Source(web, 0.7), ps.Source(talk, 0.3)]))
    assert [step.resume_state for step in islice(by_mapping, 4)] == [
        step.resume_state for step in islice(by_sources, 4)
    ]
    parts = (data / "talk-0", data / "talk-1")
    assert [source.name for source in build({parts: 1, web: 2}).mixture.sources] == [
        "talk-0 and 1 more",
        "web-*",
    ]
    assert [source.name for source in build([web, list(parts)]).mixture.sources] == [
        "web-*",
        "talk-0 and 1 more",
    ]


def test_mappings_that_cannot_be_meant(data):
    web = str(data / "web-0")
    with pytest.raises(ConfigError, match="a mixture needs at least one source"):
        build({})
    with pytest.raises(ConfigError, match=r"source.*'web-0'.*least.*0.*finite.*-1"):
        build({web: -1})
    with pytest.raises(ConfigError, match=rf"{web}.*given.*shares.*source"):
        build({web: 1, f"{web}/": 2})
    with pytest.raises(ConfigError, match=r"'train' \(a/train.*b/train\).*own"):
        build({"a/train": 1, "b/train": 1})
    with pytest.raises(ConfigError, match=r"source.*needs.*least.*dataset"):
        ps.Source([])
    with pytest.raises(ConfigError, match=r"source.*'web-0.*1.*more'.*dataset"):
        ps.Source([web, 5])


def test_shares_by_tokens_are_the_tokens_in_use(data):
    sources = [
        ps.Source(str(data / "web-*"), "tokens"),
        ps.Source(data / "talk-0", "tokens", slice=(0.25, 0.75)),
    ]
    loader = build(ps.Mixture(sources))
    web, talk = loader.datasets
    expected = [web.num_tokens, sum(len(talk[i].tokens) for i in range(15, 45))]
    assert loader.mixture.shares_at(0) == expected
    assert web.num_tokens == open_dataset(data / "whole-web").num_tokens
    numbers = [
        ps.Source(data / "web-*", expected[0]),
        ps.Source(data / "talk-0", expected[1], slice=(0.25, 0.75)),
    ]
    by_numbers = build(ps.Mixture(numbers))
    assert [step.resume_state for step in islice(loader, 5)] == [
        step.resume_state for step in islice(by_numbers, 5)
    ]


def test_sources_by_tokens_end_their_epochs_together(data):
    """One epoch of all is an epoch of each, within a longest document."""
    sources = {str(data / f"web-{part}"): "tokens" for part in (0, 2, 3)}
    loader = build([ps.Source(path, share) for path, share in sources.items()], packing="concat")
    total, longest = (
        sum(corpus.num_tokens for corpus in loader.datasets),
        max(d.longest for d in loader.datasets),
    )
    taken = np.zeros(3)
    for number in range(total // (6 * 128)):
        for piece in loader.explain(number):
            taken[[source.name for source in loader.mixture.sources].index(piece.source)] += (
                piece.num_tokens
            )
    for corpus, tokens in zip(loader.datasets, taken, strict=True):
        assert corpus.num_tokens * taken.sum() / total == pytest.approx(tokens, abs=longest + 1)


def test_tokens_and_numbers_are_not_mixed(data):
    web, talk = (ps.Source(data / f"whole-{name}", "tokens", name=name) for name in ("web", "talk"))
    with pytest.raises(ConfigError, match=r"source.*'web'.*'tokens'.*source.*0\.5"):
        ps.Mixture([web, ps.Source(data / "web-0", 0.5, name="x")])
    with pytest.raises(ConfigError, match=r"step 3.*'talk'.*'tokens'"):
        ps.Mixture([web, talk], [ps.ShareChange(step=3, shares={"web": 1})])
    changes = [
        ps.ShareChange(step=3, shares={"web": 1, "talk": 3}),
        ps.ShareChange(step=5, shares={"web": 2}),
    ]
    changed = ps.Mixture([web, talk], changes)
    assert build(changed).mixture.phases()[1:] == [(3, [1.0, 3.0]), (5, [2.0, 3.0])]
    assert_exact_resume(lambda: build(changed), 6)
    with pytest.raises(ConfigError, match=r"share.*'web'.*number.*'tokens'"):
        ps.ShareChange(step=3, shares={"web": "tokens"})
    with pytest.raises(ConfigError, match=r"shares.*'tokens'.*numbers"):
        changed.phases()
