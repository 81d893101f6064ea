"""Megatron and bare `.npy` corpora, read in place, converted, and compared with megatron-core's own
reader.
"""

import pickle
import struct
import warnings

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from shard_data import TOKENIZER, make_dataset, make_documents

import penstock as ps
from makers.processes import call_penstock
from penstock import Dataset, open_dataset, write_dataset
from penstock.core.errors import ConfigError, CorruptionError, FormatError, OutputError
from penstock.data.shards import import_corpus, open_megatron, open_npy, verify, write_megatron


def slow_index(code, size, lengths, borders):
    """An index by the letter of the format."""
    starts = [sum(lengths[:i]) * size for i in range(len(lengths))]
    return b"".join(
        [
            b"MMIDIDX\0\0",
            struct.pack("<Q", 1),
            struct.pack("<B", code),
            struct.pack("<QQ", len(lengths), len(borders)),
            struct.pack(f"<{len(lengths)}i", *lengths),
            struct.pack(f"<{len(starts)}q", *starts),
            struct.pack(f"<{len(borders)}q", *borders),
        ]
    )


def write_corpus(prefix, documents, dtype="uint16", code=8, pieces=1):
    """A corpus whose documents are made of `pieces` sequences each."""
    parts = [part for document in documents for part in np.array_split(document, pieces)]
    size = np.dtype(dtype).itemsize
    prefix.with_name(prefix.name + ".bin").write_bytes(
        b"".join(part.astype(dtype).tobytes() for part in parts)
    )
    borders = range(0, len(parts) + 1, pieces)
    prefix.with_name(prefix.name + ".idx").write_bytes(
        slow_index(code, size, list(map(len, parts)), list(borders))
    )


@settings(deadline=None, max_examples=20, phases=[Phase.explicit, Phase.generate])
@given(
    st.lists(st.integers(0, 50), max_size=12),
    st.sampled_from([("uint16", 8), ("int32", 4), ("int16", 3)]),
    st.integers(1, 3),
)
def test_megatron_documents(tmp_path_factory, lengths, kind, pieces):
    prefix = tmp_path_factory.mktemp("m") / "corpus"
    documents = [np.arange(i, i + length) for i, length in enumerate(lengths)]
    write_corpus(prefix, documents, *kind, pieces)
    corpus = open_megatron(prefix)
    assert len(corpus) == len(documents)
    for i, document in enumerate(documents):
        assert corpus[i].tokens.tolist() == document.tolist()
        assert (corpus[i].loss_weights == 1).all()
        assert corpus[i].origin.line == i
    assert corpus.table.lengths.shape == (len(documents), 1)
    assert not corpus.table.has_checksums
    assert verify(prefix).sound
    assert pickle.loads(pickle.dumps(corpus)).fingerprint == corpus.fingerprint


@pytest.mark.parametrize(
    ("vocab_size", "code", "dtype"), [(1000, 8, "uint16"), (2**17, 4, "int32")]
)
def test_written_megatron_has_the_bytes_of_the_format(tmp_path, vocab_size, code, dtype):
    documents = make_documents(30)
    dataset = write_dataset(tmp_path / "d", documents, vocab_size=vocab_size)
    write_megatron(dataset, tmp_path / "out" / "corpus")
    due = slow_index(code, np.dtype(dtype).itemsize, list(map(len, documents)), list(range(31)))
    assert (tmp_path / "out" / "corpus.idx").read_bytes() == due
    tokens = np.concatenate(documents).astype(dtype).tobytes()
    assert (tmp_path / "out" / "corpus.bin").read_bytes() == tokens


def test_megatron_core_reads_and_writes_the_same(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        indexed_dataset = pytest.importorskip(
            "megatron.core.datasets.indexed_dataset", reason="no megatron-core"
        )
    documents = [document for document in make_documents(50) if len(document)]
    dataset = write_dataset(tmp_path / "d", documents, vocab_size=1000)
    write_megatron(dataset, tmp_path / "ours")
    theirs = indexed_dataset.IndexedDataset(str(tmp_path / "ours"))
    assert len(theirs) == len(documents)
    assert all((theirs[i] == document).all() for i, document in enumerate(documents))
    assert theirs.document_indices.tolist() == list(range(len(documents) + 1))
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for document in documents:
        builder.add_document(document.astype(np.int64), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"ours{ending}").read_bytes() == (
            tmp_path / f"theirs{ending}"
        ).read_bytes()
    corpus = open_megatron(tmp_path / "theirs")
    assert all((corpus[i].tokens == document).all() for i, document in enumerate(documents))


def damaged(prefix, change):
    path = prefix.with_name(prefix.name + ".idx")
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        (lambda idx: b"X" + idx[1:], FormatError, "not a Megatron index"),
        (
            lambda idx: idx[:9] + b"\2" + idx[10:],
            FormatError,
            "version 2 of the Megatron index; known: 1",
        ),
        (
            lambda idx: idx[:17] + b"\1" + idx[18:],
            FormatError,
            "tokens are uint8; readable: uint16, int16, int32",
        ),
        (lambda idx: idx[:17] + b"\x63" + idx[18:], FormatError, "tokens are of code 99"),
        (lambda idx: idx + bytes(5), FormatError, "multimodal"),
        (
            lambda idx: idx[:-1],
            CorruptionError,
            r"\d+ bytes, expected \d+ for 5 sequences and 6 borders",
        ),
        (
            lambda idx: idx[:34] + b"\xff\xff" + idx[36:],
            CorruptionError,
            "sequence 0 of 65535 tokens at byte 0",
        ),
        (
            lambda idx: idx[:-8] + b"\4" + idx[-7:],
            CorruptionError,
            "border 5 of documents is 4; borders must increase",
        ),
        (
            lambda idx: idx[:-16] + b"\7" + idx[-15:],
            CorruptionError,
            "border 4 of documents is 7; borders must",
        ),
    ],
)
def test_damaged_megatron_is_refused(tmp_path, change, kind, match):
    write_corpus(tmp_path / "c", [np.arange(9)] * 5)
    damaged(tmp_path / "c", change)
    with pytest.raises(kind, match=match):
        open_megatron(tmp_path / "c")


def test_cut_or_missing_tokens_are_refused(tmp_path):
    write_corpus(tmp_path / "c", [np.arange(9)] * 5)
    path = tmp_path / "c.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match=r"sequence.*4.*leaves.*89.*bytes"):
        open_dataset(tmp_path / "c.bin")
    path.unlink()
    with pytest.raises(FormatError, match=r"c.bin.*cannot.*Megatron.*corpus"):
        open_dataset(tmp_path / "c")


def test_ids_outside_the_vocabulary_are_named(tmp_path):
    write_corpus(tmp_path / "c", [np.arange(9)] * 5)
    (fault,) = verify(tmp_path / "c", vocab_size=8).faults
    assert fault.reason == "token 8 of the file is 8, but the vocabulary has 8 ids"
    assert "every token id against the vocabulary" in verify(tmp_path / "c").unchecked
    write_corpus(tmp_path / "n", [np.array([1, -1])], "int32", 4)
    with pytest.raises(ConfigError, match="token ids from 1 to 4294967295"):
        import_corpus(open_megatron(tmp_path / "n"), tmp_path / "out")


@settings(deadline=None, max_examples=20, phases=[Phase.explicit, Phase.generate])
@given(
    st.lists(st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=6), min_size=1, max_size=3),
    st.sampled_from(["uint16", "uint32"]),
    st.booleans(),
    st.booleans(),
)
def test_npy_documents(tmp_path_factory, files, dtype, header, tail):
    """Files of documents ending with 0, and perhaps a last one without its end."""
    folder, paths, due = tmp_path_factory.mktemp("n"), [], []
    for number, file in enumerate(files):
        documents = [[*document, 0] for document in file] + ([[7, 7]] if tail else [])
        due += [(number, i, document) for i, document in enumerate(documents)]
        tokens = np.array([token for document in documents for token in document], dtype)
        paths.append(folder / f"{number}.npy")
        if header:
            np.save(paths[-1], tokens)
        else:
            tokens.tofile(paths[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for _ in ("scanned", "from the cache"):
            corpus = open_npy(paths, dtype, 0)
            found = [corpus[i] for i in range(len(corpus))]
            assert [document.tokens.tolist() for document in found] == [
                document for *_, document in due
            ]
            assert [document.origin.line for document in found] == [line for _, line, _ in due]
            assert [document.origin.file for document in found] == [
                str(paths[number]) for number, *_ in due
            ]
        dataset = import_corpus(corpus, folder / "out", TOKENIZER)
    assert [dataset[i].tokens.tolist() for i in range(len(dataset))] == [
        document for *_, document in due
    ]
    assert [dataset[i].origin for i in range(len(dataset))] == [
        document.origin for document in found
    ]


def test_changed_npy_is_scanned_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "a.npy"
    np.array([1, 0, 2, 0], np.uint16).tofile(path)
    before = open_npy(path, "uint16", 0)
    np.array([1, 2, 3, 0, 5, 0], np.uint16).tofile(path)
    after = open_npy(path, "uint16", 0)
    assert (len(before), len(after)) == (2, 2)
    assert after[0].tokens.tolist() == [1, 2, 3, 0]
    assert before.fingerprint != after.fingerprint


def test_npy_without_a_cache_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    np.array([1, 0, 2, 0], np.uint16).tofile(tmp_path / "a.npy")
    assert open_npy(tmp_path / "a.npy", "uint16", 0)[1].tokens.tolist() == [2, 0]


def test_npy_refusals(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.npy").write_bytes(b"abc")
    with pytest.raises(FormatError, match=r"3.*tokens.*1\.5.*uint16.*number.*tokens"):
        open_npy(tmp_path / "a.npy", "uint16", 0)
    with pytest.raises(ConfigError, match=r"uint16, uint32.*'int8'"):
        open_npy(tmp_path / "a.npy", "int8", 0)
    with pytest.raises(ConfigError, match="eos_id 70000 is not a uint16"):
        open_npy(tmp_path / "a.npy", "uint16", 70_000)
    with pytest.raises(ConfigError, match=r"set dtype .* and eos_id"):
        open_dataset(tmp_path / "a.npy")
    with pytest.raises(FormatError, match=r"b.npy: cannot read"):
        open_npy(tmp_path / "b.npy", "uint16", 0)
    np.save(tmp_path / "c.npy", np.zeros(3, np.int64))
    with pytest.raises(FormatError, match=r"int64.*\[3\].*uint16.*\[tokens\]"):
        open_npy(tmp_path / "c.npy", "uint16", 0)


def test_conversion_keeps_weights_or_says_so(tmp_path):
    dataset = make_dataset(tmp_path / "d")
    with pytest.raises(ConfigError, match=r"loss-weight.*Megatron"):
        write_megatron(dataset, tmp_path / "out")
    write_megatron(dataset, tmp_path / "out", drop_spans=True)
    corpus = open_megatron(tmp_path / "out")
    assert all(corpus[i].tokens.tolist() == dataset[i].tokens.tolist() for i in range(40))
    with pytest.raises(OutputError, match=r"out.bin.*already.*exists.*prefix"):
        write_megatron(dataset, tmp_path / "out", drop_spans=True)


def test_damaged_documents_are_not_converted(tmp_path):
    dataset = make_dataset(tmp_path / "d", spans=False)
    data = np.memmap(tmp_path / "d" / "00000.arrow", np.uint8, "r+")
    data[int(dataset.table.batches["tokens"][0])] ^= 1
    with pytest.raises(CorruptionError, match=r"arrow: document \d+: its tokens differ"):
        write_megatron(dataset, tmp_path / "out")
    assert not (tmp_path / "out.idx").exists()


def test_command(tmp_path):
    dataset = make_dataset(tmp_path / "d", spans=False)
    assert (
        call_penstock(
            "convert", tmp_path / "d", "--to", "megatron", "--output", tmp_path / "m"
        ).exit_code
        == 0
    )
    done = call_penstock(
        "convert", tmp_path / "m", "--from", "megatron", "--output", tmp_path / "again"
    )
    assert done.stdout.startswith("40 documents, ")
    again = open_dataset(tmp_path / "again")
    assert [again[i].tokens.tolist() for i in range(40)] == [
        dataset[i].tokens.tolist() for i in range(40)
    ]
    with pytest.raises(ConfigError, match="is megatron, not npy; omit --from"):
        call_penstock("convert", tmp_path / "m", "--from", "npy", "--output", tmp_path / "x")
    with pytest.raises(ConfigError, match=r"already.*penstock.*--to"):
        call_penstock("convert", tmp_path / "d", "--output", tmp_path / "x")


def test_formats_that_cannot_be_written_are_not_offered(tmp_path):
    make_dataset(tmp_path / "d", spans=False)
    with pytest.raises(ConfigError, match=r"--to.*unknown.*penstock.*megatron"):
        call_penstock("convert", tmp_path / "d", "--to", "npy", "--output", tmp_path / "x")
    with pytest.raises(ConfigError, match=r"--from.*unknown.*penstock.*megatron"):
        call_penstock("convert", tmp_path / "d", "--from", "arrow", "--output", tmp_path / "x")


def test_a_foreign_corpus_that_is_opened_as_a_dataset_is_told_apart(tmp_path):
    write_corpus(tmp_path / "c", make_documents(3))
    for name in ("c", "c.bin"):
        with pytest.raises(FormatError, match=r"`penstock prepare`.*open_dataset"):
            Dataset.open(tmp_path / name)
    with pytest.raises(FormatError, match="no such folder"):
        Dataset.open(tmp_path / "absent")


def test_a_megatron_corpus_may_be_told_what_ends_its_documents(tmp_path):
    write_corpus(tmp_path / "corpus", [np.array([5, 6, 1]), np.array([7, 1])])
    assert open_megatron(tmp_path / "corpus").framed == (False, False)
    told = open_dataset(tmp_path / "corpus", eos_id=1)
    assert told.framed == (False, True)
    assert pickle.loads(pickle.dumps(told)).framed == (False, True)
    with pytest.raises(FormatError, match=r"document 0.*token 1.*eos_id 2"):
        open_megatron(tmp_path / "corpus", eos_id=2)


def test_an_index_that_is_changed_after_opening(tmp_path):
    """It is mapped, so its positions are looked at again whenever they are followed."""
    documents = [np.arange(i, i + 9) for i in range(20)]
    write_corpus(tmp_path / "c", documents)
    corpus = open_megatron(tmp_path / "c")
    index = np.memmap(tmp_path / "c.idx", np.uint8, "r+")
    place = 34 + 4 * 20 + 8 * 7
    for position in (-18, -1, 2**40, 2**63 - 1, -(2**63), 20 * 18 - 16):
        index[place : place + 8] = np.frombuffer(struct.pack("<q", position), np.uint8)
        with pytest.raises(CorruptionError, match=r"document.*7.*length.*lengths"):
            corpus.table.read(0, 20)
        loader = ps.Loader(
            ps.Source(corpus, name="c", max_epochs=1),
            sequence_length=32,
            rows_per_step=2,
            threads=0,
        )
        with pytest.raises(CorruptionError, match="document 7: its length"):
            list(loader)
    assert corpus[6].tokens.tolist() == documents[6].tolist()


def test_a_forged_index(tmp_path):
    """Any word of it: an error, or documents that lie in the file."""
    write_corpus(tmp_path / "c", [np.arange(i, i + 5) for i in range(6)], pieces=2)
    whole = (tmp_path / "c.idx").read_bytes()
    opened = 0
    for place in range(9, len(whole) - 3):
        for value in (0, 1, 5, 255, 2**31 - 1, 2**31, 2**32 - 1):
            forged = bytearray(whole)
            forged[place : place + 4] = struct.pack("<I", value)
            (tmp_path / "c.idx").write_bytes(forged)
            try:
                corpus = open_megatron(tmp_path / "c")
            except FormatError:
                continue
            opened += 1
            assert sum(len(corpus[i].tokens) for i in range(len(corpus))) <= 60
    assert opened > 20


def test_kept_borders_that_are_wrong(tmp_path, monkeypatch):
    """The user's cache may be damaged: no document reaches out of the file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    np.array([1, 2, 0] * 50, np.uint16).tofile(tmp_path / "x.npy")
    open_npy(tmp_path / "x.npy", "uint16", 0)
    (kept,) = (tmp_path / "cache" / "penstock").iterdir()
    borders = np.fromfile(kept, np.int64)
    borders[5:9] = [2**40, -8, 2**62, -(2**62)]
    borders.tofile(kept)
    with pytest.raises(
        (CorruptionError, FormatError), match=r"document [4-8]: its length|a document of"
    ):
        open_npy(tmp_path / "x.npy", "uint16", 0).table.read(0, 40)


@pytest.mark.parametrize(
    ("head", "match"),
    [
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "its NumPy header cannot be read"),
        (b"\x93NUMPY\x01\x00\x10\x00" + b"{" * 16, "its NumPy header cannot be read"),
        (b"\x93NUMPY\x09\x00", "its NumPy header cannot be read"),
    ],
)
def test_a_forged_numpy_header(tmp_path, head, match):
    (tmp_path / "x.npy").write_bytes(head + bytes(64))
    with pytest.raises(FormatError, match=match):
        open_npy(tmp_path / "x.npy", "uint16", 0)


def test_a_numpy_file_that_was_cut(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(50, np.uint16))
    whole = (tmp_path / "x.npy").read_bytes()
    assert len(open_npy(tmp_path / "x.npy", "uint16", 0)) == 50
    (tmp_path / "x.npy").write_bytes(whole[:-10])
    with pytest.raises(FormatError, match=r"90.*45.*uint16, expected 50.*file"):
        open_npy(tmp_path / "x.npy", "uint16", 0)
