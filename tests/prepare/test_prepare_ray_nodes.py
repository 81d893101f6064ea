"""On two nodes, of which one is lost meanwhile, prepare gives the bytes of one process."""

import json
from pathlib import Path

import pytest
from prepare_cases import contents

from makers.processes import child_environment, run_python
from makers.texts import write_texts
from penstock import load_tokenizer, open_dataset, prepare
from penstock.data.prepare.upload import folder_of
from penstock.data.shards import verify

pytest.importorskip("ray", reason="needs Ray")

SCRIPT = Path(__file__).with_name("ray_nodes_run.py")


def unchanged(record):
    return record


@pytest.mark.slow
def test_the_bytes_of_one_process(tmp_path, corpus, tokenizer):
    lines = (corpus / "2.jsonl").read_text().splitlines()[300:500]
    write_texts(corpus / "5.jsonl", [json.loads(line)["text"] for line in lines])
    tokenizer.save(tmp_path / "tokenizer")
    environment = child_environment(
        WORKERS=str(tmp_path / "workers"),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_memory_monitor_refresh_ms="0",
    )
    done = run_python(
        SCRIPT,
        corpus,
        tmp_path / "tokenizer",
        tmp_path / "there",
        env=environment,
        check=True,
    )
    # Ray may write lines of its own behind it.
    documents, duplicates, nodes = json.loads(
        next(one for one in done.stdout.splitlines() if one.startswith("["))
    )
    report = prepare(
        corpus,
        tokenizer=load_tokenizer(tmp_path / "tokenizer"),
        output=tmp_path / "here",
        processes=1,
        transform=unchanged,
        part_bytes=12_000,
        validation=0.2,
        drop_duplicates=True,
        progress=False,
    ).report
    assert (documents, duplicates, nodes) == (report.documents, report.num_duplicates, 2)
    assert duplicates >= 200
    names = ("prepare.json", "report.json")  # which name the transform
    here, there = (
        {k: v for k, v in contents(tmp_path / one).items() if k not in names}
        for one in ("here", "there")
    )
    assert [name for name in here if "manifest" not in name and here[name] != there[name]] == []
    for split in ("train", "validation"):
        one, two = (
            json.loads((tmp_path / place / split / "manifest.json").read_bytes())
            for place in ("here", "there")
        )
        assert one["fingerprint"] == two["fingerprint"]
        verify(tmp_path / "there" / split)


@pytest.mark.slow
def test_a_node_is_lost_that_sends_its_shards_to_a_store(tmp_path, corpus, tokenizer, store):
    (corpus / "4.jsonl").write_bytes((corpus / "0.jsonl").read_bytes())
    tokenizer.save(tmp_path / "tokenizer")
    environment = child_environment(
        WORKERS=str(tmp_path / "workers"),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_memory_monitor_refresh_ms="0",
    )
    words = (
        corpus,
        tmp_path / "tokenizer",
        "s3://bucket/web",
        folder_of("s3://bucket/web"),
    )
    done = run_python(SCRIPT, *words, env=environment, check=True)
    documents, duplicates, nodes = json.loads(
        next(one for one in done.stdout.splitlines() if one.startswith("["))
    )
    report = prepare(
        corpus,
        tokenizer=load_tokenizer(tmp_path / "tokenizer"),
        output=tmp_path / "here",
        processes=1,
        transform=unchanged,
        part_bytes=12_000,
        validation=0.2,
        drop_duplicates=True,
        progress=False,
    ).report
    assert (documents, duplicates, nodes) == (report.documents, report.num_duplicates, 2)
    assert duplicates >= 700
    names = (
        "prepare.json",
        "report.json",
        "train/manifest.json",
        "validation/manifest.json",
    )  # name the transform
    here, there = (
        {k: v for k, v in contents(place).items() if k not in names}
        for place in (tmp_path / "here", store.folder / "bucket/web")
    )
    assert here == there
    for split in ("train", "validation"):
        assert (
            open_dataset(f"s3://bucket/web/{split}").fingerprint
            == open_dataset(tmp_path / "here" / split).fingerprint
        )
