"""Into a store, each shard goes once from where it was made, through kills, faults, duplicates and
changes.
"""

import json
from collections import Counter
from functools import partial

import pytest
from prepare_cases import Killed, contents, dying

from makers.datasets import prepare_here
from makers.texts import write_texts
from penstock import open_dataset
from penstock.core.errors import ConfigError, OutputError, StoreError
from penstock.data.prepare import duplicates, part, stored_shards, upload
from penstock.data.shards import copy_dataset, verify
from penstock.data.stores import store as stores

URL = "s3://bucket/web"
prepare_parts = partial(prepare_here, part_bytes=12_000)


@pytest.fixture
def repeated(corpus):
    """The corpus, with documents that occur again: all of a file, and some of another."""
    lines = (corpus / "2.jsonl").read_text().splitlines()[300:500]
    write_texts(
        corpus / "5.jsonl",
        [f"water {n}" for n in range(90)] + [json.loads(line)["text"] for line in lines],
    )
    (corpus / "4.jsonl").write_bytes((corpus / "0.jsonl").read_bytes())
    return corpus


def bucket(store):
    return contents(store.folder / "bucket" / "web")


def shards_here(folder):
    """Files of a folder that hold tokens."""
    return [path for path in folder.rglob("*") if path.suffix in (".arrow", ".assets")]


def uploads(store):
    """Shard → how often its bytes came, or bytes of it."""
    found = Counter()
    for path, size in store.received:
        if path.endswith(".arrow"):
            found[path.removeprefix("bucket/web/")] += size
    return found


@pytest.mark.parametrize(("processes", "validation"), [(1, 0.0), (2, 0.3)])
def test_each_shard_goes_once_and_is_never_read(
    store, corpus, tokenizer, tmp_path, monkeypatch, processes, validation
):
    options = {"validation": validation, "processes": processes}
    prepare_parts(corpus, tokenizer, tmp_path / "local", **options)
    kept, find = [], stored_shards.StoreOutput.find_lost

    def look(self, output, records):
        kept.extend(shards_here(output))
        return find(self, output, records)

    monkeypatch.setattr(stored_shards.StoreOutput, "find_lost", look)
    report = prepare_parts(corpus, tokenizer, URL, **options)
    assert bucket(store) == contents(tmp_path / "local")
    assert uploads(store) == {
        name: len(data)
        for name, data in contents(tmp_path / "local").items()
        if name.endswith(".arrow")
    }
    assert store.count(".arrow", "GET") == 0
    assert kept == []
    assert {split.path for split in report.splits.values()} == (
        {f"{URL}/train", f"{URL}/validation"} if validation else {URL}
    )
    puts = [path for method, path, _ in store.log if method == "PUT"]
    assert puts[-1] == f"bucket/web/{'train/' if validation else ''}manifest.json"
    for split in report.splits:
        assert verify(f"{URL}/{split}".rstrip("/")).sound


def test_what_stays_here_is_small(store, tmp_path, tokenizer, monkeypatch):
    """Documents of some hundred tokens."""
    texts = [" ".join(f"water {n} pipe {k} steel" for k in range(60)) for n in range(400)]
    sizes, find = {}, stored_shards.StoreOutput.find_lost

    def measure(self, output, records):
        sizes.update(
            {str(path): path.stat().st_size for path in output.rglob("*") if path.is_file()}
        )
        return find(self, output, records)

    monkeypatch.setattr(stored_shards.StoreOutput, "find_lost", measure)
    prepare_here(iter(texts), tokenizer, URL, part_bytes=100_000)
    stored = sum(uploads(store).values())
    assert sum(size for path, size in sizes.items() if path.endswith(".stored")) < 0.06 * stored
    assert sum(sizes.values()) < 0.2 * stored


@pytest.mark.parametrize(("processes", "validation"), [(1, 0.3), (2, 0.0)])
def test_shards_with_duplicates_are_written_again_from_the_store(
    store, repeated, tokenizer, tmp_path, validation, processes
):
    options = {"validation": validation, "processes": processes, "drop_duplicates": True}
    local = prepare_parts(repeated, tokenizer, tmp_path / "local", **options)
    report = prepare_parts(repeated, tokenizer, URL, **options)
    assert local.num_duplicates >= 900
    assert report.as_json(lasting=True) == local.as_json(lasting=True)
    assert bucket(store) == contents(tmp_path / "local")
    times = Counter(
        path.removeprefix("bucket/web/") for path, _ in store.received if path.endswith(".arrow")
    )
    records = json.loads((tmp_path / "local" / "parts.json").read_bytes())
    for number, record in enumerate(records):
        for split in report.splits:
            name = f"{split}/part-{number:06}.arrow".lstrip("/")
            was_there = record["hashed"][split] > 0
            loses, stays = bool(record["dropped_from"].get(split)), split in record["shards"]
            assert times[name] == was_there + (loses and stays), name


@pytest.mark.slow
def test_killed_at_every_step_it_goes_on(store, repeated, tokenizer, tmp_path, monkeypatch):
    options = {"validation": 0.3, "drop_duplicates": True, "part_bytes": 40_000}
    prepare_here(repeated, tokenizer, tmp_path / "local", **options)
    expected = contents(tmp_path / "local")
    steps = [0, -1]
    for module, name in (
        (stored_shards, "upload_shard"),
        (stored_shards, "save_stub"),
        (stored_shards, "save_sides"),
        (part, "save_record"),
        (duplicates, "save_record"),
        (stores.Store, "write"),
    ):
        monkeypatch.setattr(module, name, dying(getattr(module, name), steps))
    count = 0
    for die_at in range(2, 1000, 17):
        steps[:] = [0, die_at]
        try:
            prepare_here(repeated, tokenizer, URL, **options)
        except Killed:
            count += 1
            assert not (store.folder / "bucket/web/train/manifest.json").exists()
            # Each time from where the last one was killed.
            steps[:] = [0, die_at]
            try:
                prepare_here(repeated, tokenizer, URL, **options)
            except Killed:
                steps[:] = [0, -1]
                prepare_here(repeated, tokenizer, URL, **options)
            assert bucket(store) == expected, die_at
            for path in (store.folder / "bucket/web").rglob("manifest.json"):
                path.unlink()
        else:
            break
    assert count > 3
    assert bucket(store) == expected
    assert not list((tmp_path / "cache").rglob("making-*"))


@pytest.mark.parametrize("step", [1, 2])
def test_killed_while_a_shard_loses_documents(
    store, repeated, tokenizer, tmp_path, monkeypatch, step
):
    """The second step is when the new shard is there, and its part's record is not."""
    (repeated / "4.jsonl").unlink()
    options = {"drop_duplicates": True}
    with monkeypatch.context() as patch:
        patch.setattr(duplicates, "save_record", dying(duplicates.save_record, [0, step]))
        with pytest.raises(Killed, match=r"^$"):
            prepare_here(repeated, tokenizer, URL, **options)
    prepare_here(repeated, tokenizer, URL, **options)
    prepare_here(repeated, tokenizer, tmp_path / "local", **options)
    assert bucket(store) == contents(tmp_path / "local")


def killed_before_the_copy(store, *arguments, **options):
    """A preparation of which all parts, and nothing else, are in the store."""
    fault = store.fail("403", 1, "lengths.u32", "PUT")
    with pytest.raises(StoreError, match=r"lengths.u32: the store refuses"):
        prepare_parts(*arguments, **options)
    fault.times = 0
    store.faults.clear()
    store.forget()


@pytest.mark.parametrize("changed", ["removed", "replaced"])
def test_objects_that_are_gone_or_replaced_are_made_again(
    store, corpus, tokenizer, tmp_path, changed
):
    killed_before_the_copy(store, corpus, tokenizer, URL)
    path = store.folder / "bucket/web/part-000001.arrow"
    if changed == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[::-1])
    report = prepare_parts(corpus, tokenizer, URL)
    assert set(uploads(store)) == {"part-000001.arrow"}
    assert report.parts_resumed == report.parts - 1
    prepare_parts(corpus, tokenizer, tmp_path / "local")
    assert bucket(store) == contents(tmp_path / "local")


@pytest.mark.parametrize("drop", [False, True])
def test_an_object_that_is_replaced_meanwhile_is_made_again(
    store, repeated, tokenizer, tmp_path, monkeypatch, drop
):
    """As by a task that Ray runs again, when what it sent before has arrived."""
    find, times = stored_shards.StoreOutput.find_lost, []

    def replaced(self, *arguments):
        if len(times) < most:
            path = store.folder / "bucket/web/part-000002.arrow"
            path.write_bytes(path.read_bytes()[::-1])
            times.append(1)
        return find(self, *arguments)

    monkeypatch.setattr(stored_shards.StoreOutput, "find_lost", replaced)
    most = 100
    with pytest.raises(OutputError, match=r"web/part-000002.arrow.*let"):
        prepare_parts(repeated, tokenizer, URL, drop_duplicates=drop)
    times, most = [], 2
    report = prepare_parts(repeated, tokenizer, URL, drop_duplicates=drop)
    assert report.parts_resumed == report.parts - 1
    prepare_parts(repeated, tokenizer, tmp_path / "local", drop_duplicates=drop)
    assert bucket(store) == contents(tmp_path / "local")


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("change", ["appended", "first", "fewer"])
def test_other_input_after_a_kill(
    store, corpus, tokenizer, tmp_path, monkeypatch, finished, change
):
    """Parts with the same number and files stay where they are; others are made again; what is left
    over goes.
    """
    if finished:
        killed_before_the_copy(store, corpus, tokenizer, URL)
    else:
        monkeypatch.setattr(
            stored_shards, "upload_shard", dying(stored_shards.upload_shard, [0, 7])
        )
        with pytest.raises(Killed, match=r"^$"):
            prepare_parts(corpus, tokenizer, URL)
    if change == "appended":
        write_texts(corpus / "3.jsonl", [f"more {n}" for n in range(300)])
    elif change == "first":
        write_texts(corpus / "+.jsonl", [f"before {n}" for n in range(300)])
    else:
        (corpus / "2.jsonl").unlink()
    store.forget()
    report = prepare_parts(corpus, tokenizer, URL)
    if change != "first":
        assert 0 < report.parts_resumed <= report.parts
        assert len(uploads(store)) == report.parts - report.parts_resumed
    prepare_parts(corpus, tokenizer, tmp_path / "local")
    assert bucket(store) == contents(tmp_path / "local")


def test_a_complete_dataset_is_not_changed_by_other_input(
    store, corpus, tokenizer, tmp_path, monkeypatch
):
    """Killed after the manifest was written, before the folder was removed."""

    def copied(*arguments, **options):
        copy_dataset(*arguments, **options)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(upload, "copy_dataset", copied)
        with pytest.raises(Killed, match=r"^$"):
            prepare_parts(corpus, tokenizer, URL)
    before = bucket(store)
    write_texts(corpus / "3.jsonl", ["more"])
    with pytest.raises(OutputError, match=r"web/manifest.json.*URL"):
        prepare_parts(corpus, tokenizer, URL)
    assert bucket(store) == before
    (corpus / "3.jsonl").unlink()
    store.forget()
    assert prepare_parts(corpus, tokenizer, URL).seconds is None
    assert store.received == []
    assert not any((tmp_path / "cache/prepared").iterdir())


def test_overwrite_replaces_the_old_dataset_once_the_work_begins(
    store, corpus, tokenizer, tmp_path, monkeypatch
):
    prepare_parts(corpus, tokenizer, URL)
    before = bucket(store)
    with pytest.raises(ConfigError, match="validation must be a share"):
        prepare_parts(corpus, tokenizer, URL, overwrite=True, validation=2.0)
    assert bucket(store) == before
    (corpus / "2.jsonl").unlink()
    prepare_parts(corpus, tokenizer, URL, overwrite=True, add_eos="no")
    prepare_parts(corpus, tokenizer, tmp_path / "local", add_eos="no")
    assert bucket(store) == contents(tmp_path / "local")


@pytest.mark.parametrize("kind", ["500", "reset"])
def test_failures_of_a_moment_are_repeated(store, repeated, tokenizer, tmp_path, kind):
    for method in ("PUT", "GET", "HEAD"):
        store.fail(kind, 2, ".arrow", method)
    prepare_parts(repeated, tokenizer, URL, drop_duplicates=True)
    assert [fault.times for fault in store.faults] == [0, 0, 0]
    prepare_parts(repeated, tokenizer, tmp_path / "local", drop_duplicates=True)
    assert bucket(store) == contents(tmp_path / "local")


def test_a_store_that_refuses_ends_the_work(store, corpus, tokenizer):
    store.fail("403", 1, "part-000003.arrow", "PUT")
    with pytest.raises(StoreError, match=r"web/part-000003.arrow.*PermissionError"):
        prepare_parts(corpus, tokenizer, URL, processes=2)


@pytest.mark.parametrize("fault", [None, "500", "reset"])
def test_large_shards_go_in_pieces(store, corpus, tokenizer, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(stores, "UPLOAD_BYTES", 1000)
    if fault:
        store.fail(fault, 3, "part-000001.arrow", "PUT")
        store.fail(fault, 1, "part-000002.arrow", "POST")
    prepare_parts(corpus, tokenizer, URL)
    prepare_parts(corpus, tokenizer, tmp_path / "local")
    assert bucket(store) == contents(tmp_path / "local")
    assert max(size for path, size in store.received if path.endswith(".arrow")) < 2000
    assert store.count("part-000003.arrow", "PUT") > 5
    if not fault:
        assert store.count("part-000003.arrow", "POST") == 2
        assert uploads(store)["part-000003.arrow"] == len(bucket(store)["part-000003.arrow"])
    assert store.uploads == {}


def test_a_copy_is_a_preparation_too(store, repeated, tokenizer, tmp_path):
    """Into a store and back: the same files, and a later preparation there goes on with its
    parts.
    """
    options = {"drop_duplicates": True, "on_error": "skip", "validation": 0.2}
    with open(repeated / "2.jsonl", "a") as file:
        file.write("{broken\n")
    prepare_parts(repeated, tokenizer, tmp_path / "local", **options)
    copy_dataset(tmp_path / "local", URL)
    copy_dataset(URL, tmp_path / "back")
    expected = contents(tmp_path / "local")
    assert {"hashes.bin", "rejected.jsonl", "parts.json", "prepare.json", "report.json"} < set(
        expected
    )
    assert contents(tmp_path / "back") == bucket(store) == expected
    copy_dataset(f"{store.endpoint}/bucket/web", tmp_path / "http")  # which cannot list
    assert contents(tmp_path / "http") == expected
    assert prepare_parts(repeated, tokenizer, tmp_path / "back", **options).seconds is None
    write_texts(repeated / "6.jsonl", ["more", "pipes"])
    report = prepare_parts(repeated, tokenizer, tmp_path / "back", **options)
    assert report.parts_resumed == report.parts - 1
    prepare_parts(repeated, tokenizer, tmp_path / "local", **options)
    assert contents(tmp_path / "back") == contents(tmp_path / "local")


def test_memory_of_this_process_is_no_shared_store(corpus, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    report = prepare_parts(corpus, tokenizer, "memory://web", processes=2)
    assert len(open_dataset("memory://web")) == report.documents


def test_records_from_python(store, tokenizer, tmp_path, monkeypatch):
    texts = [f"water {n} pipe" for n in range(900)]
    monkeypatch.setattr(stored_shards, "upload_shard", dying(stored_shards.upload_shard, [0, 3]))
    with pytest.raises(Killed, match=r"^$"):
        prepare_here(iter(texts), tokenizer, URL, part_bytes=2_000)
    report = prepare_here(iter(texts), tokenizer, URL, part_bytes=2_000)
    assert report.parts_resumed == 2
    prepare_here(iter(texts), tokenizer, tmp_path / "local", part_bytes=2_000)
    assert bucket(store) == contents(tmp_path / "local")
