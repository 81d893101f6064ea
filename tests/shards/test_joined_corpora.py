"""Several datasets as one corpus hold what one dataset of all their documents holds, and say when
they cannot.
"""

import itertools
import os
import pickle
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shard_data import TOKENIZER, make_documents, make_spans

from penstock import Dataset, open_dataset, write_dataset
from penstock.core.errors import ConfigError, CorruptionError, FormatError
from penstock.data.shards import JoinedCorpus, import_corpus, write_megatron
from penstock.data.shards.opening import dataset_paths
from penstock.data.shards.origins import read_origins

LONGEST = 60


def write_parts(folder, documents, cuts, spans=None, **options):
    """The documents as one dataset `whole`, and as parts that begin at the cuts; paths of the
    parts.
    """
    options = {"tokenizer": TOKENIZER, **options}
    write_dataset(folder / "whole", documents, spans=spans, **options)
    edges = [0, *cuts, len(documents)]
    for number, (begin, end) in enumerate(itertools.pairwise(edges)):
        part_spans = None if spans is None else spans[begin:end]
        write_dataset(
            folder / f"part-{number:02}", documents[begin:end], spans=part_spans, **options
        )
    return [folder / f"part-{number:02}" for number in range(len(edges) - 1)]


def assert_same_documents(joined, whole):
    assert len(joined) == len(whole)
    for mine, theirs in zip(joined, whole, strict=True):
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        assert mine.loss_weights.tolist() == theirs.loss_weights.tolist()


@settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_parts_hold_the_documents_of_the_whole_in_order(tmp_path_factory, data):
    """Any cuts, empty parts, any shards, with loss weights (some parts have fractions, some not)
    and without.
    """
    folder, count = tmp_path_factory.mktemp("cut"), data.draw(st.integers(1, 30))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    documents = make_documents(count, seed=count, longest=LONGEST)
    spans = make_spans(documents) if data.draw(st.booleans()) else None
    per_shard = data.draw(st.sampled_from([3, 1000]))
    parts = write_parts(folder, documents, cuts, spans, documents_per_shard=per_shard)
    joined, whole = open_dataset(parts), Dataset.open(folder / "whole")
    assert_same_documents(joined, whole)
    assert joined.table.read(0, count).values.tolist() == whole.table.read(0, count).values.tolist()
    np.testing.assert_array_equal(joined.table.lengths, whole.table.lengths)
    if whole.table.weight_sums is not None:
        np.testing.assert_array_equal(joined.table.weight_sums, whole.table.weight_sums)
    else:
        assert joined.table.weight_sums is None
    assert (joined.longest, joined.num_tokens, joined.framed) == (
        whole.longest,
        whole.num_tokens,
        whole.framed,
    )
    for number in range(count):
        part, inside = joined.part_of(number)
        assert part[inside].tokens.tolist() == documents[number].tolist()
        shard = joined.table.paths[joined.table.locate(number)[0]]
        assert shard.parent == part.path


def test_what_a_list_a_glob_and_one_path_give(tmp_path):
    documents = make_documents(12, longest=LONGEST)
    parts = write_parts(tmp_path, documents, [4, 8])
    joined = open_dataset(parts)
    assert (
        open_dataset(tmp_path / "part-*") == open_dataset(str(tmp_path / "part-0[0-2]")) == joined
    )
    assert open_dataset([Dataset.open(parts[0]), str(tmp_path / "part-0[12]")]) == joined
    assert open_dataset([open_dataset(parts[:2]), parts[2]]) == joined
    assert (joined.name, open_dataset(tmp_path / "part-*").name) == ("part-00 and 2 more", "part-*")
    # One dataset is that dataset, so that its states stay what they were.
    for one in ([parts[0]], str(tmp_path / "part-00*")):
        assert open_dataset(one) == Dataset.open(parts[0])
    copied = pickle.loads(pickle.dumps(joined))
    assert copied == joined
    assert copied.name == joined.name
    assert (
        repr(joined)
        == f"JoinedCorpus('part-00 and 2 more', 3 parts, 12 documents, {joined.num_tokens} tokens)"
    )


def test_a_folder_that_looks_like_a_glob_is_a_folder(tmp_path):
    write_dataset(tmp_path / "web[1]", [[1, 2]])
    assert dataset_paths(tmp_path / "web[1]") == [tmp_path / "web[1]"]
    assert open_dataset(tmp_path / "web[1]")[0].tokens.tolist() == [1, 2]


def test_the_fingerprint_is_of_the_parts_in_their_order(tmp_path):
    parts = write_parts(tmp_path, make_documents(12, longest=LONGEST), [4, 8])
    prints = [
        open_dataset(some).fingerprint
        for some in (parts, parts[::-1], parts[:2], [parts[0], parts[2]])
    ]
    assert len(set(prints)) == len(prints)
    shutil.copytree(parts[1], tmp_path / "copy")
    assert open_dataset([parts[0], tmp_path / "copy", parts[2]]).fingerprint == prints[0]
    shutil.rmtree(parts[1])
    write_dataset(parts[1], make_documents(4, seed=1, longest=LONGEST), tokenizer=TOKENIZER)
    assert open_dataset(parts).fingerprint not in prints


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (
            {"tokenizer": replace(TOKENIZER, fingerprint="other")},
            r"tokenizer: abc .* and other .*; prepare both with",
        ),
        (
            {"tokenizer": replace(TOKENIZER, vocab_size=70_000)},
            "bytes of a stored token: 2 and 4; store both with the",
        ),
        (
            {"spans": [[(0, 1, 1.0)]]},
            "loss weights: no and yes; prepare both with loss weights, or both without",
        ),
        (
            {"documents": [[5, 0]]},
            "EOS at the end of documents: no and yes; prepare both with the same add_eos",
        ),
    ],
)
def test_parts_that_differ_are_refused_by_name(tmp_path, options, fact):
    write_dataset(tmp_path / "a", [[5, 6], []], tokenizer=TOKENIZER)
    write_dataset(tmp_path / "none", [[]], tokenizer=TOKENIZER)
    write_dataset(tmp_path / "b", **{"documents": [[5, 6]], "tokenizer": TOKENIZER, **options})
    with pytest.raises(ConfigError, match=rf"{tmp_path}/a and {tmp_path}/b .*{fact}"):
        open_dataset([tmp_path / "a", tmp_path / "none", tmp_path / "b"])


def test_a_part_without_tokens_has_no_ends_that_differ(tmp_path):
    for name, documents in (("a", [[5, 0]]), ("b", [[]]), ("c", []), ("d", [[6, 0], []])):
        write_dataset(tmp_path / name, documents, tokenizer=TOKENIZER)
    joined = open_dataset(tmp_path / "?")
    assert (joined.framed, len(joined), joined[1].tokens.tolist()) == ((False, True), 4, [])


def test_lists_and_globs_that_cannot_be_meant(tmp_path):
    write_dataset(tmp_path / "a", [[5, 6]])
    with pytest.raises(ConfigError, match=rf"{tmp_path}/a.*given.*corpus.*leave"):
        open_dataset([tmp_path / "a", tmp_path / "." / "a"])
    with pytest.raises(ConfigError, match=r"needs.*least.*dataset.*empty"):
        open_dataset([])
    with pytest.raises(FormatError, match=r"dataset.*matches.*spelled"):
        open_dataset(tmp_path / "b-*")
    with pytest.raises(ConfigError, match=r"corpus.*dataset.*got.*5"):
        open_dataset([tmp_path / "a", 5])
    # An unfinished or foreign folder is never passed over.
    (tmp_path / "a-2").mkdir()
    with pytest.raises(FormatError, match=r"a-2: not a dataset: no manifest\.json"):
        open_dataset(tmp_path / "a*")


def test_corpora_in_place_are_joined_where_they_lie(tmp_path):
    documents = [document for document in make_documents(40, longest=LONGEST) if len(document)]
    parts = write_parts(tmp_path, documents, [10, 11])
    for part in parts:
        write_megatron(Dataset.open(part), tmp_path / f"foreign-{part.name}")
    joined = open_dataset(tmp_path / "foreign-*")
    assert [part.path.name for part in joined.parts] == [f"foreign-part-0{n}.bin" for n in range(3)]
    assert (joined.kind, joined.tokenizer, joined.text_bytes, joined.chat) == (
        "Megatron",
        None,
        None,
        None,
    )
    assert_same_documents(joined, Dataset.open(tmp_path / "whole"))
    assert joined[10].origin == joined.parts[1][0].origin
    assert_same_documents(
        import_corpus(joined, tmp_path / "imported", TOKENIZER), Dataset.open(tmp_path / "whole")
    )
    write_megatron(joined, tmp_path / "again")
    assert_same_documents(open_dataset(tmp_path / "again"), Dataset.open(tmp_path / "whole"))

    flat = [
        np.append(document[:-1], 0).astype("<u2") for document in documents if 0 not in document
    ]
    for number, some in enumerate((flat[:7], flat[7:])):
        np.concatenate(some).tofile(tmp_path / f"bare-{number}.npy")
    bare = open_dataset(tmp_path / "bare-*.npy", dtype="uint16", eos_id=0)
    assert [document.tokens.tolist() for document in bare] == [
        document.tolist() for document in flat
    ]
    with pytest.raises(ConfigError, match=r"format.*Megatron.*convert"):
        open_dataset([tmp_path / "foreign-part-00", bare.parts[0]])


def test_damage_in_a_part_names_its_shard(tmp_path):
    parts = write_parts(tmp_path, make_documents(20, longest=LONGEST), [10])
    shard = parts[1] / "00000.arrow"
    table = Dataset.open(parts[1]).table
    data = bytearray(shard.read_bytes())
    document = int(np.flatnonzero(table.lengths[:, 0])[0])
    data[int(table.batches[0]["tokens"])] ^= 1
    shard.write_bytes(data)
    joined = open_dataset(parts)
    assert len(joined[:10]) == 10
    with pytest.raises(CorruptionError, match=rf"{shard}: document"):
        joined[10 + document]
    with pytest.raises(CorruptionError, match=rf"{shard}: document"):
        joined.table.read(0, 20)


def test_origins_of_all_parts(tmp_path):
    parts = write_parts(tmp_path, make_documents(12, longest=LONGEST), [5])
    joined = open_dataset(parts)
    files, lines = read_origins(joined)
    assert joined.files == ["memory", "memory"]
    assert files.tolist() == [0] * 5 + [1] * 7
    assert lines.tolist() == [*range(5), *range(7)]


@pytest.mark.slow
def test_1250_folders_open_quickly_and_take_little(tmp_path):
    write_dataset(tmp_path / "first", make_documents(20, longest=LONGEST), tokenizer=TOKENIZER)
    for number in range(1250):
        (tmp_path / f"web-{number:04}").mkdir()
        for file in (tmp_path / "first").iterdir():
            os.link(file, tmp_path / f"web-{number:04}" / file.name)
    began = time.perf_counter()
    joined = open_dataset(tmp_path / "web-*")
    # 2.8 s on a busy machine of two cores; a quadratic step somewhere would take minutes.
    assert time.perf_counter() - began < 30
    assert isinstance(joined, JoinedCorpus)
    assert len(joined) == 25_000
    assert joined[24_999].tokens.tolist() == joined[19].tokens.tolist()
    with open("/proc/self/maps") as maps:
        assert sum(str(tmp_path) in line for line in maps) <= 3 * 1250
