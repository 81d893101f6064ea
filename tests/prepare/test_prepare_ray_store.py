"""Ray nodes that share no disk prepare into a store: shards go there from their nodes, the rest
through the driver.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest
from prepare_cases import blind, contents, slowly

from makers.object_store import s3_store
from makers.processes import child_environment
from makers.ray_clusters import begin_cluster
from makers.texts import write_texts
from patience import PATIENCE_SECONDS, wait_for
from penstock import load_tokenizer, prepare
from penstock.core.errors import StoreError
from penstock.data.prepare import ray_tasks
from penstock.data.prepare.upload import folder_of
from penstock.data.shards import verify

pytest.importorskip("ray", reason="needs Ray")
pytest.importorskip("s3fs", reason="needs stores as outputs")

URL = "s3://bucket/web"
OPTIONS = {"part_bytes": 12_000, "validation": 0.2, "progress": False}


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory):
    """A store, and a cluster of two nodes that know it, to which this process is connected."""
    import ray

    folder = tmp_path_factory.mktemp("store")
    (folder / "bucket").mkdir()
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv(
        "RAY_memory_monitor_refresh_ms", "0"
    )  # no worker is killed for the memory of other programs
    patch.setenv("FATAL", str(folder / "fatal"))
    patch.setenv("STOP_NOTE", str(folder / "stop"))
    with s3_store(folder, patch) as store:
        cluster, _ = begin_cluster()
        try:
            yield store, cluster.address
        finally:
            ray.shutdown()
            cluster.shutdown()
            patch.undo()


@pytest.fixture
def store(shared_store, tmp_path, monkeypatch):
    """The store, empty."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    found, _ = shared_store
    for path in (found.folder / "bucket").rglob("*"):
        if path.is_file():
            path.unlink()
    found.faults.clear()
    found.forget()
    return found


@pytest.fixture
def sent(monkeypatch):
    """File → bytes of it that the driver received."""
    counts = Counter()

    class Watched(ray_tasks.Incoming):
        def add(self, name, data, is_last):
            counts[name] += len(data)
            super().add(name, data, is_last)

    monkeypatch.setattr(ray_tasks, "Incoming", Watched)
    return counts


def bucket(store):
    return contents(store.folder / "bucket" / "web")


def times(store):
    """Shard → how often it was uploaded."""
    return Counter(
        path.removeprefix("bucket/web/") for path, _ in store.received if path.endswith(".arrow")
    )


@pytest.mark.slow
def test_shards_do_not_pass_through_the_driver(
    store, tmp_path, corpus, tokenizer, monkeypatch, sent
):
    """Each goes to the store once, by blind nodes and by those that see the folder; faults of a
    moment are repeated.
    """
    blind(monkeypatch, lambda number: number % 3 == 0)
    for method in ("PUT", "HEAD"):
        store.fail("500", 2, ".arrow", method)
    report = prepare(corpus, tokenizer=tokenizer, output=URL, executor="ray", **OPTIONS).report
    prepare(corpus, tokenizer=tokenizer, output=tmp_path / "here", processes=1, **OPTIONS)
    assert bucket(store) == contents(tmp_path / "here")
    shards = {name for name in bucket(store) if name.endswith(".arrow")}
    assert times(store) == dict.fromkeys(shards, 1)
    assert store.count(".arrow", "GET") == 0
    assert not [name for name in sent if name.endswith((".arrow", ".assets"))]
    records = [
        name for name in sent if name.startswith(".prepare/part-") and name.endswith(".json")
    ]
    assert 0 < len(records) < report.parts


@pytest.mark.slow
@pytest.mark.parametrize("sees", [False, True])
def test_duplicates_are_dropped_on_the_nodes(
    store, tmp_path, corpus, tokenizer, monkeypatch, sent, sees
):
    blind(monkeypatch, lambda number: sees)
    lines = (corpus / "2.jsonl").read_text().splitlines()[300:500]
    write_texts(
        corpus / "5.jsonl",
        [f"water {n}" for n in range(90)] + [json.loads(line)["text"] for line in lines],
    )
    (corpus / "4.jsonl").write_bytes((corpus / "0.jsonl").read_bytes())
    options = {**OPTIONS, "drop_duplicates": True}
    report = prepare(corpus, tokenizer=tokenizer, output=URL, executor="ray", **options).report
    prepare(corpus, tokenizer=tokenizer, output=tmp_path / "here", processes=1, **options)
    assert report.num_duplicates >= 900
    assert bucket(store) == contents(tmp_path / "here")
    assert not [name for name in sent if name.endswith(".arrow")]
    assert bool(sent) != sees


@pytest.mark.slow
def test_a_worker_is_killed_in_the_middle(store, tmp_path, corpus, tokenizer, monkeypatch):
    blind(monkeypatch)
    options = {**OPTIONS, "drop_duplicates": True, "transform": "prepare_cases:fatal_once"}
    write_texts(corpus / "7.jsonl", ["never stops 400"])
    prepare(corpus, tokenizer=tokenizer, output=URL, executor="ray", **options)
    assert (store.folder / "fatal").exists()
    prepare(corpus, tokenizer=tokenizer, output=tmp_path / "here", processes=1, **options)
    assert bucket(store) == contents(tmp_path / "here")
    for split in ("train", "validation"):
        assert verify(f"{URL}/{split}").sound


@pytest.mark.slow
def test_a_node_that_the_store_refuses_is_named(store, corpus, tokenizer):
    store.fail("403", 1, "part-000001.arrow", "PUT")
    due = (
        r"s3://bucket/web/train/part-000001.arrow: the store refuses: .* rights .*\(on node \S+ "
        r"\(process \d+\)\)$"
    )
    with pytest.raises(StoreError, match=due):
        prepare(corpus, tokenizer=tokenizer, output=URL, executor="ray", **OPTIONS)


@pytest.mark.slow
def test_the_driver_is_killed_and_goes_on(store, shared_store, tmp_path, corpus, tokenizer):
    tokenizer.save(tmp_path / "tokenizer")
    options = {**OPTIONS, "tokenizer": load_tokenizer(tmp_path / "tokenizer"), "transform": slowly}
    words = [
        "prepare",
        corpus,
        "-t",
        tmp_path / "tokenizer",
        "-o",
        URL,
        "--executor",
        "ray",
        "--part-bytes",
        "12000",
    ]
    words += ["--validation", "0.2", "--transform", "prepare_cases:slowly", "--quiet"]
    prepared = tmp_path / "cache/prepared"
    url_folder = folder_of(URL)
    (store.folder / "stop").write_text(f"{url_folder}:2")
    child = subprocess.Popen(
        [sys.executable, "-m", "penstock", *map(str, words)],
        env=child_environment(RAY_ADDRESS=shared_store[1]),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: len(list(url_folder.glob(".prepare/part-*.json"))) >= 2, child)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate(timeout=PATIENCE_SECONDS)
    (store.folder / "stop").unlink()
    assert not [path for path in prepared.rglob("*") if path.suffix == ".arrow"]
    report = prepare(corpus, output=URL, executor="ray", **options).report
    assert 2 <= report.parts_resumed < report.parts
    prepare(corpus, output=tmp_path / "here", processes=1, **options)
    assert bucket(store) == contents(tmp_path / "here")
    assert not any(prepared.iterdir())
