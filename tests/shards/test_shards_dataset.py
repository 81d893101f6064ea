"""Datasets: what is written comes back, however it is cut; nothing else is accepted."""

import itertools
import json
import os
import pickle
import resource

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from shard_data import TOKENIZER, VOCAB, make_dataset, make_documents, make_spans, slow_weights

from makers.datasets import tokenizer_info
from makers.processes import child_environment, run_code
from penstock import Dataset, open_dataset, write_dataset
from penstock.core.errors import ConfigError, CorruptionError, FormatError, OutputError
from penstock.core.ragged import Ragged
from penstock.data.shards import ShardLayout, ShardWriter, SpanBlock, finish_dataset
from penstock.data.shards.format.layout import SPAN
from penstock.data.shards.format.manifest import MANIFEST
from penstock.data.shards.writing.finish import load_shard
from penstock.data.stores.files import release_pages, write_file


def is_in_memory(path):
    """Whether the system could read the middle of a file without its disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        return bool(os.preadv(handle, [bytearray(1)], path.stat().st_size // 2, os.RWF_NOWAIT))
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system of memory alone does not take the question
    finally:
        os.close(handle)


def test_a_finished_shard_takes_no_memory(tmp_path):
    plain = tmp_path / "plain"
    write_file(plain, bytes(1 << 20))
    release_pages(plain)
    if is_in_memory(plain):
        pytest.skip("this file system keeps its files in memory")
    rows = Ragged.from_rows(make_documents(2000), np.uint32)
    for attempt in range(20):
        with ShardWriter(tmp_path, f"{attempt}.arrow", ShardLayout(vocab_size=VOCAB)) as writer:
            writer.write(rows, files=0, lines=np.arange(2000))
            writer.finish()
        # The system may keep pages that another processor has just touched.
        if not is_in_memory(tmp_path / f"{attempt}.arrow"):
            return
    pytest.fail("twenty finished shards are still in memory")


def test_a_system_without_the_hint_finishes_shards(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    make_dataset(tmp_path / "refused")
    monkeypatch.delattr(os, "posix_fadvise")
    make_dataset(tmp_path / "missing")


@pytest.mark.parametrize("spans", [False, True])
@pytest.mark.parametrize("vocab_size", [VOCAB, 2**20])
def test_documents_come_back(tmp_path, spans, vocab_size):
    documents = make_documents(2500, longest=40)
    given_spans = make_spans(documents) if spans else None
    texts = [f"text {i} ü" for i in range(len(documents))]
    tokenizer = tokenizer_info(vocab_size=vocab_size, eos_id=3)
    dataset = write_dataset(
        tmp_path / "d",
        documents,
        spans=given_spans,
        texts=texts,
        tokenizer=tokenizer,
        documents_per_shard=1100,
    )
    assert len(dataset) == len(documents)
    assert dataset.tokenizer == tokenizer
    assert dataset.manifest.token_bytes == (2 if vocab_size <= 2**16 else 4)
    assert [shard.documents for shard in dataset.manifest.shards] == [1100, 1100, 300]
    assert dataset.manifest.tokens == sum(map(len, documents))
    assert sum(dataset.manifest.histogram) == len(documents)
    assert dataset.manifest.longest == max(map(len, documents))
    for i in [*range(0, 2500, 37), 1023, 1024, 1099, 1100, 2499]:
        document, due = (
            dataset[i],
            slow_weights(len(documents[i]), given_spans[i] if given_spans else None),
        )
        assert document.tokens.tolist() == documents[i].tolist()
        assert document.loss_weights.tolist() == due.tolist()
        assert (document.origin.file, document.origin.line, document.text) == (
            "memory",
            i,
            texts[i],
        )
        assert dataset.table.lengths[i].tolist() == [len(due), np.count_nonzero(due[1:])]
        if spans:
            assert dataset.table.weight_sums[i] == due[1:].sum()
    assert dataset[-1].tokens.tolist() == documents[-1].tolist()
    with pytest.raises(IndexError, match="document 2500 of 2500"):
        dataset[2500]


def test_opens_by_path_and_pickles(tmp_path):
    dataset = make_dataset(tmp_path / "d")
    again = pickle.loads(pickle.dumps(open_dataset(str(tmp_path / "d"))))
    assert isinstance(again, Dataset)
    assert again.fingerprint == dataset.fingerprint
    assert again[7].tokens.tolist() == dataset[7].tokens.tolist()
    assert again.name == "d"


def test_pyarrow_alone_reads_a_shard(tmp_path):
    documents = make_documents(10)
    write_dataset(tmp_path / "d", documents, spans=make_spans(documents), tokenizer=TOKENIZER)
    with pa.OSFile(str(tmp_path / "d" / "00000.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
    table.validate(full=True)
    assert table["tokens"].to_pylist() == [document.tolist() for document in documents]
    assert table["spans"].to_pylist()[:2] == [None, []]
    assert table["origin"].to_pylist()[3] == {"file": 0, "line": 3}


@settings(deadline=None, max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(st.lists(st.integers(1, 1500), min_size=1, max_size=5), st.booleans())
def test_blocks_and_shards_leave_no_trace(tmp_path_factory, cuts, spans):
    """Same documents in other blocks: the same bytes; in other shards: the same fingerprint."""
    folder = tmp_path_factory.mktemp("cuts")
    documents = make_documents(3000, longest=20)
    given_spans = make_spans(documents) if spans else None
    rows = Ragged.from_rows(documents, np.uint16)
    whole = write_dataset(folder / "whole", rows, spans=given_spans, tokenizer=TOKENIZER)
    (folder / "blocks").mkdir()
    layout = ShardLayout(vocab_size=VOCAB, has_spans=spans)
    edges = [*np.unique(np.minimum(np.cumsum([0, *cuts]), 3000)).tolist(), 3000]
    with ShardWriter(folder / "blocks", "00000.arrow", layout) as writer:
        for begin, end in itertools.pairwise(edges):
            block = Ragged.from_rows(documents[begin:end], np.uint32)
            kept = None if given_spans is None else span_block(given_spans[begin:end])
            writer.write(block, files=0, lines=np.arange(begin, end), spans=kept)
        writer.finish()
    assert (folder / "blocks" / "00000.arrow").read_bytes() == (
        folder / "whole" / "00000.arrow"
    ).read_bytes()
    parts = write_dataset(
        folder / "parts",
        rows,
        spans=given_spans,
        tokenizer=TOKENIZER,
        documents_per_shard=max(500, *cuts),
    )
    assert parts.fingerprint == whole.fingerprint


def span_block(spans):
    rows = Ragged.from_rows([np.array(row or [], SPAN) for row in spans], SPAN)
    return SpanBlock(spans=rows, valid=np.array([row is not None for row in spans], bool))


def test_fingerprint_is_of_tokens_and_weights(tmp_path):
    documents, kinds = make_documents(30), {}
    kinds["plain"] = write_dataset(tmp_path / "a", documents, tokenizer=TOKENIZER)
    kinds["spans"] = write_dataset(
        tmp_path / "b", documents, spans=[None] * 30, tokenizer=TOKENIZER
    )
    kinds["weights"] = write_dataset(
        tmp_path / "c", documents, spans=[[]] * 30, tokenizer=TOKENIZER
    )
    kinds["order"] = write_dataset(tmp_path / "d", documents[::-1], tokenizer=TOKENIZER)
    joined = [np.concatenate(documents[:2]), np.empty(0), *documents[2:]]
    kinds["borders"] = write_dataset(tmp_path / "e", joined, tokenizer=TOKENIZER)
    assert len({dataset.fingerprint for dataset in kinds.values()}) == len(kinds)
    texts = write_dataset(tmp_path / "f", documents, texts=["t"] * 30, tokenizer=TOKENIZER)
    assert texts.fingerprint == kinds["plain"].fingerprint


def test_fingerprint_is_golden(tmp_path):
    documents = [np.arange(300) % VOCAB, np.arange(5)]
    spans = [[(1, 4, 0.5)], None]
    dataset = write_dataset(tmp_path / "d", documents, spans=spans, tokenizer=TOKENIZER)
    assert dataset.fingerprint == "203dda105e873519ff14581d67616ed2"


@pytest.mark.parametrize("documents", [[], [[]], [[], [1], []]])
def test_empty_documents_and_datasets(tmp_path, documents):
    dataset = write_dataset(tmp_path / "d", documents, tokenizer=TOKENIZER)
    assert [dataset[i].tokens.tolist() for i in range(len(dataset))] == documents
    assert dataset.table.lengths.shape == (len(documents), 2)


def test_what_is_not_a_dataset(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match=r"manifest.json.*finish.*run.*`penstock"):
        open_dataset(tmp_path / "empty")
    with pytest.raises(FormatError, match="nothing there; give a folder"):
        open_dataset(tmp_path / "absent")
    with pytest.raises(FormatError, match="no such folder"):
        Dataset.open(tmp_path / "absent")
    (tmp_path / "empty" / MANIFEST).write_text('{"format": "other"}')
    with pytest.raises(FormatError, match="not a dataset"):
        open_dataset(tmp_path / "empty")


def test_newer_version_is_refused(tmp_path):
    make_dataset(tmp_path / "d")
    manifest = json.loads((tmp_path / "d" / MANIFEST).read_text())
    (tmp_path / "d" / MANIFEST).write_text(json.dumps({**manifest, "version": 2}))
    with pytest.raises(FormatError, match=r"version 2.*version 1.*penstock"):
        open_dataset(tmp_path / "d")


def test_changed_manifest_is_refused(tmp_path):
    make_dataset(tmp_path / "d")
    manifest = json.loads((tmp_path / "d" / MANIFEST).read_text())
    (tmp_path / "d" / MANIFEST).write_text(json.dumps({**manifest, "longest": 3}))
    with pytest.raises(CorruptionError, match="changed after it was written"):
        open_dataset(tmp_path / "d")


@pytest.mark.parametrize("name", ["00000.arrow", "lengths.u32", "batches.u64", "weight_sums.f64"])
def test_truncated_and_missing_files_are_found_at_opening(tmp_path, name):
    make_dataset(tmp_path / "d")
    path = tmp_path / "d" / name
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(
        CorruptionError,
        match=rf"{name}: {len(data) - 1} .*{len(data)};",
    ):
        open_dataset(tmp_path / "d")
    path.unlink()
    with pytest.raises(CorruptionError, match=rf"{name}: the file is missing"):
        open_dataset(tmp_path / "d")


def test_damaged_batch_table_is_found_at_opening(tmp_path):
    make_dataset(tmp_path / "d")
    path = tmp_path / "d" / "batches.u64"
    data = bytearray(path.read_bytes())
    data[9] ^= 16
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"batches.u64: differs from its checksum"):
        open_dataset(tmp_path / "d")


def test_any_flipped_bit_of_tokens_and_spans_is_found_on_reading(tmp_path):
    dataset = make_dataset(tmp_path / "d", 12, longest=300)
    path, places = tmp_path / "d" / "00000.arrow", dataset.table.batches[0].tolist()
    offsets = np.frombuffer(path.read_bytes(), np.int64, 13, places[0])
    spans = int(np.frombuffer(path.read_bytes(), np.int64, 13, places[5])[-1])
    regions = [
        (places[1], 2 * int(offsets[-1])),
        *((places[column], 4 * spans) for column in (6, 7, 8)),
    ]
    data = np.memmap(path, np.uint8, "r+")
    for begin, size in regions:
        for at in range(begin, begin + size):
            bit = np.uint8(1 << at % 8)
            data[at] ^= bit
            with pytest.raises(CorruptionError, match=r"00000.arrow: document \d+: .*differ from"):
                dataset.table.read(0, 12)
            data[at] ^= bit
    dataset.table.read(0, 12)


def test_error_names_shard_and_document(tmp_path):
    dataset = make_dataset(tmp_path / "d", 40, spans=False, documents_per_shard=15)
    line = dataset.table.batches[1]
    data = np.memmap(tmp_path / "d" / "00001.arrow", np.uint8, "r+")
    starts = data[int(line[0]) :][: 8 * 16].view(np.int64)
    row = next(row for row in range(15) if starts[row + 1] > starts[row])
    data[int(line[1]) + 2 * int(starts[row])] ^= 1
    with pytest.raises(CorruptionError, match=rf"00001.arrow: document {15 + row}"):
        dataset[15 + row]
    assert len(dataset[15 + row + 1].tokens) == dataset.table.lengths[15 + row + 1, 0]


def test_wrong_length_is_found_on_reading(tmp_path):
    dataset = make_dataset(tmp_path / "d")
    lengths = np.memmap(tmp_path / "d" / "lengths.u32", np.uint32, "r+").reshape(-1, 2)
    lengths[5, 0] += 1
    assert len(dataset[5].tokens) == dataset.table.lengths[5, 0], "short files are read at opening"
    with pytest.raises(CorruptionError, match=r"document.*5.*length.*lengths"):
        open_dataset(tmp_path / "d")[5]


def test_unfinished_shard_leaves_nothing(tmp_path):
    layout = ShardLayout(vocab_size=VOCAB)
    rows = Ragged.from_rows(make_documents(2000, longest=9), np.uint32)
    with ShardWriter(tmp_path, "a.arrow", layout) as writer:
        writer.write(rows, files=0, lines=np.arange(2000))
        assert writer.size_bytes > 0
    assert list(tmp_path.iterdir()) == []
    assert load_shard(tmp_path, "a.arrow") is None


def test_finished_shards_are_found_again(tmp_path):
    layout = ShardLayout(vocab_size=VOCAB)
    rows = Ragged.from_rows(make_documents(20), np.uint32)
    for name in ("a.arrow", "b.arrow"):
        with ShardWriter(tmp_path, name, layout) as writer:
            writer.write(rows, files=0, lines=np.arange(20))
            info = writer.finish()
        assert load_shard(tmp_path, name) == info
    with pytest.raises(FormatError, match=r"no manifest.json"):
        open_dataset(tmp_path)
    with open(tmp_path / "b.arrow", "ab") as file:
        file.write(b"x")
    assert load_shard(tmp_path, "b.arrow") is None


def write_parts(folder, names):
    layout = ShardLayout(vocab_size=VOCAB, has_spans=True)
    for number, name in enumerate(names):
        documents = make_documents(50, seed=number)
        with ShardWriter(folder, name, layout) as writer:
            rows = Ragged.from_rows(documents, np.uint32)
            writer.write(
                rows, files=0, lines=np.arange(50), spans=span_block(make_spans(documents))
            )
            writer.finish()
    return layout


def test_finish_is_atomic(tmp_path, monkeypatch):
    """Stopped before any rename, what is there is no dataset; called again, it ends the same."""
    names = ["a.arrow", "b.arrow"]
    folders = [tmp_path / "whole", tmp_path / "stopped"]
    manifests, replace = [], os.replace
    for folder in folders:
        folder.mkdir()
        layout = write_parts(folder, names)
        shards = [load_shard(folder, name) for name in names]
        arguments = {
            "shards": shards,
            "layout": layout,
            "tokenizer": TOKENIZER,
            "configuration": "c",
            "files": ["x"],
        }
        for allowed in range(5) if folder == folders[1] else ():
            count = iter(range(10))

            def stop(source, target, allowed=allowed, count=count):
                if next(count) == allowed:
                    raise KeyboardInterrupt("renaming")
                replace(source, target)

            monkeypatch.setattr(os, "replace", stop)
            with pytest.raises(KeyboardInterrupt, match="renaming"):
                finish_dataset(folder, **arguments)
            monkeypatch.undo()
            with pytest.raises(FormatError, match=r"no manifest.json"):
                open_dataset(folder)
        manifests.append(finish_dataset(folder, **arguments))
    assert manifests[0] == manifests[1]
    files = [
        {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".partial"}
        for folder in folders
    ]
    assert files[0] == files[1]
    assert "unfinished" not in files[1]


def test_missing_shard_at_the_end(tmp_path):
    layout = write_parts(tmp_path, ["a.arrow"])
    info = load_shard(tmp_path, "a.arrow")
    (tmp_path / "a.arrow").unlink()
    with pytest.raises(OutputError, match=r"a.arrow.*missing.*finished.*prepare"):
        finish_dataset(
            tmp_path,
            shards=[info],
            layout=layout,
            tokenizer=TOKENIZER,
            configuration="",
            files=["x"],
        )
    assert not (tmp_path / MANIFEST).exists()


def test_finish_for_another_vocabulary(tmp_path):
    other = ShardLayout(vocab_size=5)
    with pytest.raises(ConfigError, match=r"vocabulary.*5.*tokenizer.*1000"):
        finish_dataset(
            tmp_path, shards=[], layout=other, tokenizer=TOKENIZER, configuration="", files=[]
        )


def spans_of(spans, offsets, valid):
    return SpanBlock(
        spans=Ragged(np.array(spans, SPAN), np.array(offsets)), valid=np.full(2, valid)
    )


def write_one(writer, arguments):
    with writer:
        writer.write(**arguments)
        writer.finish()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"tokens": Ragged(np.array([5, VOCAB]), np.array([0, 1, 2]))},
            "token ids from 5 to 1000, but the vocabulary",
        ),
        ({"tokens": Ragged(np.array([-1, 3]), np.array([0, 1, 2]))}, "token ids from -1 to 3"),
        (
            {"tokens": Ragged(np.array([1, 3]), np.array([1, 1, 2]))},
            "offsets of tokens must increase from 0 to 2",
        ),
        (
            {"tokens": Ragged(np.array([1, 3]), np.array([0, 3, 2]))},
            "offsets of tokens must increase",
        ),
        ({"lines": np.arange(3)}, "different numbers of documents.*'lines': 3"),
        ({"files": np.zeros(1, np.int32)}, "different numbers of documents.*'files': 1"),
        (
            {"texts": pa.array(["a", "b"])},
            "spans or texts are given or missing, contrary to the layout",
        ),
        ({"spans": spans_of([], [0, 0], True)}, "'spans': 1"),
        ({"spans": spans_of([(0, 1, 1)], [0, 1, 1], False)}, "marked as having no spans"),
        (
            {"spans": spans_of([(0, 9, 1)], [0, 0, 1], True)},
            r"document 1 \(file 0, line 8\) has 1 tokens and spans .*\[\(0, 9, 1.0\)\]",
        ),
    ],
)
def test_writer_refuses(tmp_path, change, match):
    arguments = {
        "tokens": Ragged(np.array([1, 2]), np.array([0, 1, 2])),
        "files": 0,
        "lines": np.array([7, 8]),
    }
    writer = ShardWriter(tmp_path, "a.arrow", ShardLayout(vocab_size=VOCAB, has_spans=True))
    with pytest.raises(ConfigError, match=match):
        write_one(writer, {**arguments, **change})
    assert list(tmp_path.iterdir()) == []


def test_bad_names_and_folders(tmp_path):
    layout = ShardLayout(vocab_size=5)
    with pytest.raises(ConfigError, match=r"ending in .arrow, got 'a/b.arrow'"):
        ShardWriter(tmp_path, "a/b.arrow", layout)
    with pytest.raises(OutputError, match=r"absent/a.arrow.*run"):
        ShardWriter(tmp_path / "absent", "a.arrow", layout)
    with pytest.raises(ConfigError, match="vocab_size must be between 1"):
        ShardLayout(vocab_size=0)
    (tmp_path / "x").write_text("")
    with pytest.raises(OutputError, match="is not empty"):
        write_dataset(tmp_path, [[1]])
    with pytest.raises(ConfigError, match=r"1.*documents.*number"):
        write_dataset(tmp_path / "new", [[1]], texts=["a", "b"])
    with pytest.raises(ConfigError, match="the vocabulary has 0 to 4"):
        write_dataset(tmp_path / "new", [[1], [5]], vocab_size=5, documents_per_shard=1)
    assert list((tmp_path / "new").iterdir()) == []
    assert len(write_dataset(tmp_path / "new", [[1], [4]], vocab_size=5)) == 2


def test_full_disk_is_said(tmp_path):
    """Writing past the allowed size of a file fails as a full disk does."""
    code = (
        "import resource, signal, sys, numpy as np\n"
        "from penstock.core.ragged import Ragged\n"
        "from penstock.data.shards import ShardLayout, ShardWriter\n"
        "from penstock.core.errors import OutputError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "rows = Ragged(np.zeros(2**20, np.uint16), np.arange(0, 2**20 + 1, 2**10))\n"
        "try:\n"
        "    with ShardWriter(sys.argv[1], 'a.arrow', ShardLayout(vocab_size=9)) as writer:\n"
        "        writer.write(rows, files=0, lines=np.arange(1024))\n"
        "        writer.finish()\n"
        "except OutputError as error:\n"
        "    print(error)\n"
    )
    done = run_code(code, tmp_path, check=True, env=child_environment(NUMBA_DISABLE_JIT="0"))
    assert "a.arrow: cannot write:" in done.stdout
    assert "run it again" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_thousands_of_shards_need_no_file_handles(tmp_path):
    """One shard under many names, opened with fewer handles than shards."""
    make_dataset(tmp_path / "d", 3)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, hard))
    try:
        opened = [open_dataset(tmp_path / "d") for _ in range(40)]
        assert all(len(dataset[1].tokens) == dataset.table.lengths[1, 0] for dataset in opened)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_dataset_knows_whether_all_documents_are_framed(tmp_path):
    tokenizer = tokenizer_info(vocab_size=100, bos_id=1, eos_id=2)
    framed = write_dataset(tmp_path / "a", [[1, 5, 2], [], [1, 9, 9, 2]], tokenizer=tokenizer)
    assert framed.framed == (True, True)
    assert write_dataset(tmp_path / "b", [[1, 5, 2], [1, 9, 9]], tokenizer=tokenizer).framed == (
        True,
        False,
    )
    assert write_dataset(tmp_path / "c", [[5, 2], [5, 9, 2]], tokenizer=tokenizer).framed == (
        False,
        True,
    )


@pytest.mark.parametrize(
    "document",
    [[1, 2.5], [1.0], ["7"], [[1, 2], [3, 4]], [1, None], 3, "abc", [2**70], [True], [[1], [2, 3]]],
)
def test_what_is_no_list_of_ids_is_refused(tmp_path, document):
    with pytest.raises(ConfigError, match=r"document.*1.*flat.*token"):
        write_dataset(tmp_path / "d", [[1], document])
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    "wrong", [{"vocab_size": 0}, {"documents_per_shard": 0}, {"spans": [[(0, 1, -1.0)]]}]
)
def test_settings_out_of_range_are_refused(tmp_path, wrong):
    with pytest.raises(ConfigError, match="must be"):
        write_dataset(tmp_path / "d", [[1, 2]], **wrong)
