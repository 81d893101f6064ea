"""drop_duplicates keeps the first of equal documents, whatever the processes, kills and changes of
the input.
"""

import json
import os
import random
import shutil
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_cases import Killed, contents, dying

from makers.datasets import prepare_here
from makers.processes import call_penstock
from makers.texts import write_json_lines
from makers.tokenizers import CHATML
from penstock import Dataset, Loader, prepare
from penstock.core.errors import OutputError
from penstock.data.prepare import duplicates, preparation, work
from penstock.data.prepare import part as part_module
from penstock.data.prepare.duplicates import find_duplicates
from penstock.data.prepare.hashes import HASH
from penstock.data.shards import verify

OPTIONS = {"part_bytes": 4_000, "drop_duplicates": True}
prepare_unique = partial(prepare_here, **OPTIONS)


@pytest.fixture
def repeated(tmp_path):
    """Five files of texts of which many are equal, within files and across them."""
    for number in range(5):
        noise = random.Random(number)
        write(
            tmp_path / f"raw/{number}.jsonl",
            [f"text {noise.randrange(400)} of some length" for _ in range(200)],
        )
    return tmp_path / "raw"


def write(path, texts):
    path.parent.mkdir(exist_ok=True)
    write_json_lines(path, [{"text": text} for text in texts])


def texts_of(folder):
    """[(file, text)] of each record."""
    paths = sorted(folder.iterdir())
    return [
        (path.name, json.loads(line)["text"])
        for path in paths
        for line in path.read_text().splitlines()
    ]


def firsts(folder):
    """What the slow twin keeps, and how many records of each file it drops."""
    seen, kept, dropped = set(), [], {}
    for file, text in texts_of(folder):
        if text in seen:
            dropped[file] = dropped.get(file, 0) + 1
        else:
            seen.add(text)
            kept.append(text)
    return kept, dropped


def decoded(folder):
    dataset = Dataset.open(folder)
    return [dataset.loaded_tokenizer.decode(one.tokens[1:-1]) for one in dataset[0 : len(dataset)]]


def by_name(counts):
    return {os.path.basename(file): count for file, count in counts.items()}


@pytest.mark.parametrize("keep_text", [False, True])
def test_the_first_of_equal_texts_stays(repeated, tokenizer, tmp_path, keep_text):
    report = prepare_unique(repeated, tokenizer, tmp_path / "out", keep_text=keep_text)
    kept, dropped = firsts(repeated)
    assert decoded(tmp_path / "out") == kept
    assert (
        by_name(report.duplicates)
        == dropped
        == by_name(Dataset.open(tmp_path / "out").manifest.duplicates)
    )
    assert (report.records, report.documents, report.num_duplicates) == (
        1000,
        len(kept),
        1000 - len(kept),
    )
    assert report.text_bytes == sum(len(text.encode()) for text in kept)
    assert f"{1000 - len(kept)} duplicates dropped: {max(dropped.values())} of " in report.as_text()
    verify(tmp_path / "out")
    # The same tokens in the same order as if the input had no duplicates.
    write(tmp_path / "unique/0.jsonl", kept)
    prepare_here(
        tmp_path / "unique", tokenizer, tmp_path / "plain", keep_text=keep_text, part_bytes=4_000
    )
    assert Dataset.open(tmp_path / "plain") == Dataset.open(tmp_path / "out")
    step = next(iter(Loader(tmp_path / "out", sequence_length=64, rows_per_step=4)))
    assert step.num_tokens > 0


def test_a_part_without_any_left_and_no_duplicates_at_all(tokenizer, tmp_path):
    for number in range(3):
        write(tmp_path / f"raw/{number}.jsonl", ["water", "wheel"])
    report = prepare_unique(tmp_path / "raw", tokenizer, tmp_path / "out")
    assert (report.documents, by_name(report.duplicates)) == (2, {"1.jsonl": 2, "2.jsonl": 2})
    assert sorted(path.name for path in (tmp_path / "out").glob("*.arrow")) == ["part-000000.arrow"]
    verify(tmp_path / "out")
    assert prepare_unique(tmp_path / "raw", tokenizer, tmp_path / "out").seconds is None
    write(tmp_path / "other/0.jsonl", ["water", "wheel"])
    report = prepare_unique(tmp_path / "other", tokenizer, tmp_path / "unique")
    assert (report.duplicates, report.as_text().count("0 duplicates dropped\n")) == ({}, 1)
    assert "duplicates" not in json.loads((tmp_path / "unique/manifest.json").read_bytes())
    assert prepare_here(tmp_path / "other", tokenizer, tmp_path / "any").duplicates is None


def test_any_number_of_processes_gives_the_same_bytes(repeated, tokenizer, tmp_path):
    options = {**OPTIONS, "validation": 0.3, "progress": False}
    prepare(repeated, tokenizer=tokenizer, output=tmp_path / "one", processes=1, **options)
    two = prepare(repeated, tokenizer=tokenizer, output=tmp_path / "two", processes=2, **options)
    report = two.report
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    both = decoded(tmp_path / "one/train") + decoded(tmp_path / "one/validation")
    assert len(both) == len(set(both)) == len(firsts(repeated)[0])
    counts = [
        Dataset.open(tmp_path / "one" / split).manifest.duplicates
        for split in ("train", "validation")
    ]
    assert sum(sum(one.values()) for one in counts) == report.num_duplicates


def test_weights_columns_and_origins_move_with_their_documents(tokenizer, tmp_path):
    records = [
        {
            "text": f"water {n % 7} pipe",
            "w": [{"begin": 0, "end": 3, "weight": 0.5}] if n % 2 else None,
            "c": n / 4,
        }
        for n in range(40)
    ] + [{"text": f"steel {n}", "c": 1.5} for n in range(20)]
    write_json_lines(tmp_path / "raw.jsonl", records)
    options = {
        "weights_field": "w",
        "columns": {"c": "float64"},
        "token_columns": ["c"],
        "part_bytes": 400,
    }
    prepare_here(tmp_path / "raw.jsonl", tokenizer, tmp_path / "all", **options)
    prepare_here(
        tmp_path / "raw.jsonl", tokenizer, tmp_path / "some", drop_duplicates=True, **options
    )
    verify(tmp_path / "some")
    whole, some = Dataset.open(tmp_path / "all"), Dataset.open(tmp_path / "some")
    rows = [*range(7), *range(40, 60)]
    assert len(some) == len(rows)
    for found, row in zip(some[0 : len(some)], rows, strict=True):
        expected = whole[row]
        assert (found.tokens.tolist(), found.origin) == (expected.tokens.tolist(), expected.origin)
        np.testing.assert_array_equal(found.loss_weights, expected.loss_weights)
        np.testing.assert_array_equal(found.columns["c"], expected.columns["c"])


def test_conversations_are_equal_if_their_tokens_trees_and_values_are(chat_tokenizer, tmp_path):
    def pair(chosen, rejected):
        return {"prompt": "How deep?", "chosen": chosen, "rejected": rejected}

    pairs = [
        pair("two", "no"),
        pair("two", "no"),
        pair("no", "two"),
        pair("two", "one"),
        pair("no", "two"),
    ]
    write_json_lines(tmp_path / "raw.jsonl", pairs)
    options = {"template": CHATML, "answers": "tree", "part_bytes": 1}
    prepare_here(tmp_path / "raw.jsonl", chat_tokenizer, tmp_path / "all", **options)
    report = prepare_here(
        tmp_path / "raw.jsonl", chat_tokenizer, tmp_path / "some", drop_duplicates=True, **options
    )
    verify(tmp_path / "some")
    whole, some = Dataset.open(tmp_path / "all"), Dataset.open(tmp_path / "some")
    assert (len(some), report.num_duplicates) == (3, 2)
    for found, row in zip(some[0:3], (0, 2, 3), strict=True):
        assert found.tree.words().tolist() == whole[row].tree.words().tolist()
        assert found.tokens.tolist() == whole[row].tokens.tolist()


def test_killed_at_every_rename_and_sync(repeated, tokenizer, tmp_path, monkeypatch):
    for number in range(2, 5):
        (repeated / f"{number}.jsonl").unlink()
    prepare_unique(repeated, tokenizer, tmp_path / "whole", validation=0.2)
    whole = contents(tmp_path / "whole")
    steps = [0, -1]
    for name in ("replace", "fsync", "unlink"):
        monkeypatch.setattr(os, name, dying(getattr(os, name), steps))
    for die_at in range(1, 2000, 23):
        folder = tmp_path / f"killed {die_at}"
        steps[0], steps[1] = 0, die_at
        try:
            prepare_unique(repeated, tokenizer, folder, validation=0.2)
            break
        except Killed:
            steps[1] = -1
            prepare_unique(repeated, tokenizer, folder, validation=0.2)
        finally:
            steps[1] = -1
            assert contents(folder) == whole
            shutil.rmtree(folder)
    assert die_at > 200


@pytest.mark.slow
def test_a_task_that_is_run_again(repeated, tokenizer, tmp_path, monkeypatch):
    """Ray runs the task of a lost node again: the same bytes."""
    prepare_unique(repeated, tokenizer, tmp_path / "whole", validation=0.2)
    whole, drop, steps, left = contents(tmp_path / "whole"), duplicates._drop, [0, -1], [0]

    def drop_twice(*arguments):
        """Dies once, at the `left`-th rename or sync of all tasks, and runs again."""
        before, steps[0], steps[1] = steps[0], 0, left[0]
        try:
            return drop(*arguments)
        except Killed:
            left[0] = -1
            return drop(*arguments)
        finally:
            left[0] -= steps[0]
            steps[0], steps[1] = before, -1

    monkeypatch.setattr(duplicates, "_drop", drop_twice)
    for name in ("replace", "fsync"):
        monkeypatch.setattr(os, name, dying(getattr(os, name), steps))
    for die_at in range(1, 40, 3):
        left[0] = die_at
        folder = tmp_path / f"again {die_at}"
        prepare_unique(repeated, tokenizer, folder, validation=0.2)
        assert contents(folder) == whole
    assert left[0] < 0
    # Records from Python cannot be read again.
    texts = ["water", "wheel", "pipe", "steel"] * 2
    left[0] = 5
    with pytest.raises(OutputError, match=r"shard.*written.*again"):
        prepare_unique(iter(texts), tokenizer, tmp_path / "python", part_bytes=30)
    assert prepare_unique(iter(texts), tokenizer, tmp_path / "python", part_bytes=30).documents == 4


@pytest.fixture
def redone(monkeypatch):
    """Names of the parts that are prepared."""
    names = []
    prepare_part = part_module.prepare_part

    def watched(shop, task, report):
        names.append(os.path.basename(task.part.name).split(" ")[0])
        return prepare_part(shop, task, report)

    monkeypatch.setattr(work, "prepare_part", watched)
    return names


@pytest.mark.slow
def test_changed_input_ends_with_the_bytes_of_a_fresh_run(repeated, tokenizer, tmp_path, redone):
    def again(change):
        prepare_unique(repeated, tokenizer, tmp_path / "out")
        change()
        redone.clear()
        prepare_unique(repeated, tokenizer, tmp_path / "out")
        found = set(redone)
        prepare_unique(repeated, tokenizer, tmp_path / "fresh", overwrite=True)
        assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
        return found

    # Documents of a new last file are compared with those that are there: nothing else is prepared.
    new = [f"text {n} of some length" for n in range(0, 500, 3)]
    assert again(lambda: write(repeated / "9.jsonl", new)) == {"9.jsonl"}
    # Without the first file, its texts stay in later ones.
    found = again((repeated / "0.jsonl").unlink)
    assert "1.jsonl" in found
    # Files in another order: numbers of files change.
    again(lambda: (repeated / "1.jsonl").rename(repeated / "8.jsonl"))
    # Only another time: the parts are found by their bytes.
    assert again(lambda: os.utime(repeated / "3.jsonl", (1, 1))) == set()


def test_damaged_hashes_are_made_again(repeated, tokenizer, tmp_path, redone):
    prepare_unique(repeated, tokenizer, tmp_path / "out")
    with open(tmp_path / "out/hashes.bin", "r+b") as file:
        file.write(b"\0" * 100)
    write(repeated / "9.jsonl", ["late"])
    redone.clear()
    prepare_unique(repeated, tokenizer, tmp_path / "out")
    assert set(redone) == {"0.jsonl", "9.jsonl"}
    prepare_unique(repeated, tokenizer, tmp_path / "fresh")
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    with pytest.raises(OutputError, match="drop_duplicates was True, is None"):
        prepare_here(repeated, tokenizer, tmp_path / "out", part_bytes=4_000)


def test_records_from_python_that_change_on_resume(tokenizer, tmp_path, monkeypatch):
    """A killed run had dropped documents that must stay now."""
    texts = ["water", "wheel", "pipe", "wheel", "water", "steel"]

    def stop(*arguments, **options):
        raise Killed

    monkeypatch.setattr(preparation, "_settle", stop)
    with pytest.raises(Killed, match=r"^$"):
        prepare_unique(iter(texts), tokenizer, tmp_path / "out", part_bytes=4)
    monkeypatch.undo()
    report = prepare_unique(iter(["sluice", *texts[1:]]), tokenizer, tmp_path / "out", part_bytes=4)
    assert (report.documents, report.num_duplicates, report.parts_resumed) == (5, 1, 3)
    assert decoded(tmp_path / "out") == ["sluice", "wheel", "pipe", "water", "steel"]


def test_the_command(repeated, tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer")
    words = [
        "prepare",
        repeated,
        "-t",
        tmp_path / "tokenizer",
        "-o",
        tmp_path / "out",
        "--drop-duplicates",
    ]
    found = call_penstock(*words, "--json", "--quiet")
    report = json.loads(found.stdout)
    assert report["documents"] == len(firsts(repeated)[0])
    assert by_name(report["duplicates"]) == firsts(repeated)[1]


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=30), max_size=6),
    st.sampled_from([1, 4, 1000]),
)
def test_the_search_against_a_set(hashes, bucket):
    spread = np.array([0, 2**62 + 5, 2**64 - 1], np.uint64)
    parts = []
    for some in hashes:
        rows = np.zeros(len(some), HASH)
        for row, (high, low) in enumerate(some):
            rows[row] = spread[high], low, row, 1
        parts.append(rows[np.lexsort((rows["low"], rows["high"]))])
    seen = set()
    expected = [
        [row for row, one in enumerate(some) if one in seen or seen.add(one)] for some in hashes
    ]
    before, duplicates.BUCKET = duplicates.BUCKET, bucket
    try:
        found = find_duplicates(parts)
    finally:
        duplicates.BUCKET = before
    assert [one.tolist() for one in found] == expected
