"""Killed at any moment and started again, prepare ends with the same bytes; and it says what went
wrong.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from prepare_cases import Killed, contents, dying, slowly

from makers.datasets import prepare_here
from makers.processes import child_environment
from patience import PATIENCE_SECONDS, wait_for
from penstock import Dataset, load_tokenizer, prepare
from penstock.core import folders as locks
from penstock.core.errors import OutputError, PenstockError
from penstock.data.prepare import work

OPTIONS = {"part_bytes": 12_000, "validation": 0.2, "on_error": "skip", "weights_field": "w"}


prepare_parts = partial(prepare_here, **OPTIONS)


@pytest.fixture
def mixed(corpus):
    """The corpus, some records with weights, one broken."""
    path = corpus / "1.jsonl"
    path.write_text('{"text": "pipe", "w": [{"begin": 1, "end": 3, "weight": 0.5}]}\n{broken\n')
    (corpus / "2.jsonl").write_text("\n".join((corpus / "2.jsonl").read_text().split("\n")[:300]))
    (corpus / "0.jsonl").write_text("\n".join((corpus / "0.jsonl").read_text().split("\n")[:200]))
    return corpus


def test_killed_at_every_rename_and_sync(tmp_path, mixed, tokenizer, monkeypatch):
    prepare_parts(mixed, tokenizer, tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    steps = [0, -1]
    for name in ("replace", "fsync"):
        monkeypatch.setattr(os, name, dying(getattr(os, name), steps))
    for attempt in range(1000):
        steps[0], steps[1] = 0, 2 + 3 * (attempt % 9)
        try:
            prepare_parts(mixed, tokenizer, tmp_path / "killed")
            break
        except Killed:
            continue
    assert attempt > 3
    assert contents(tmp_path / "killed") == whole
    for die_at in range(1, 400, 13):
        steps[0], steps[1] = 0, die_at
        try:
            prepare_parts(mixed, tokenizer, tmp_path / f"killed {die_at}")
        except Killed:
            steps[1] = -1
            prepare_parts(mixed, tokenizer, tmp_path / f"killed {die_at}")
        else:
            break
        finally:
            assert contents(tmp_path / f"killed {die_at}") == whole
    assert die_at > 30


def start(corpus, folder, output, processes=2, *, parts=4):
    """A run that finishes `parts` parts or a few more, and then waits to be killed."""
    code = (
        "import sys; from penstock import prepare; from prepare_cases import "
        "slowly\nprepare(sys.argv[1], tokenizer=sys.argv[2], output=sys.argv[3], "
        "processes=int(sys.argv[4]), progress=False, transform=slowly, part_bytes=12000)"
    )
    environment = child_environment(STOP_AT=f"{output}:{parts}")
    arguments = [sys.executable, "-c", code, str(corpus), str(folder), str(output), str(processes)]
    return subprocess.Popen(
        arguments, env=environment, stderr=subprocess.PIPE, start_new_session=True
    )


@pytest.mark.slow
def test_kill_9_at_random_moments(tmp_path, corpus, tokenizer):
    tokenizer.save(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")  # the manifest has its name
    options = {"part_bytes": 12_000, "transform": slowly, "processes": 1, "progress": False}
    prepare(corpus, tokenizer=tokenizer, output=tmp_path / "whole", **options)
    noise, parts = random.Random(5), [0]

    def finished():
        return len(list((tmp_path / "killed").glob("*.arrow")))

    for _ in range(4):
        due = parts[-1] + noise.randint(0, 4)
        child = start(corpus, tmp_path / "tokenizer", tmp_path / "killed", 2, parts=due + 2)
        wait_for(lambda due=due: finished() >= due, child)
        time.sleep(noise.uniform(0, 0.1))
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        parts.append(finished())
    assert not (tmp_path / "killed/manifest.json").exists()
    prepare(corpus, tokenizer=tokenizer, output=tmp_path / "killed", **options)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert parts == sorted(parts)


@pytest.mark.slow
def test_ctrl_c_keeps_finished_parts_and_ends_the_workers(tmp_path, corpus, tokenizer):
    tokenizer.save(tmp_path / "tokenizer")
    child = start(corpus, tmp_path / "tokenizer", tmp_path / "out", 2)
    wait_for(lambda: len(list((tmp_path / "out/.prepare").glob("part-*.json"))) >= 2)
    os.killpg(child.pid, signal.SIGINT)
    error = child.communicate(timeout=PATIENCE_SECONDS)[1].decode()
    assert "KeyboardInterrupt" in error
    assert error.count("Traceback") == 1
    report = prepare_here(corpus, tokenizer, tmp_path / "out", part_bytes=12_000, transform=slowly)
    assert report.parts_resumed >= 2
    assert len(Dataset.open(tmp_path / "out")) == 2203


@pytest.mark.slow
def test_a_worker_that_dies_is_an_error_that_names_the_part(tmp_path, corpus, tokenizer):
    tokenizer.save(tmp_path / "tokenizer")
    child = start(corpus, tmp_path / "tokenizer", tmp_path / "out", 2)
    wait_for(lambda: len(list((tmp_path / "out/.prepare").glob("part-*.json"))) >= 1)
    os.kill(children_of(child.pid)[0], signal.SIGKILL)
    error = child.communicate(timeout=PATIENCE_SECONDS)[1].decode()
    assert ".jsonl [bytes" in error
    assert "killed by signal 9, often for lack of memory" in error


@pytest.mark.slow
def test_two_at_once_are_refused(tmp_path, corpus, tokenizer, monkeypatch):
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.2)
    tokenizer.save(tmp_path / "tokenizer")
    child = start(corpus, tmp_path / "tokenizer", tmp_path / "out", 2)
    try:
        wait_for(lambda: list((tmp_path / "out/.prepare").glob("part-*.json")))
        with pytest.raises(OutputError, match=f"process {child.pid} is preparing into it"):
            prepare_here(corpus, tokenizer, tmp_path / "out")
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_full_disk_is_an_error_and_leaves_nothing_wrong(tmp_path, corpus, tokenizer, monkeypatch):
    whole = prepare_parts(corpus, tokenizer, tmp_path / "whole").as_json(lasting=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, before[1]))
    try:
        with pytest.raises(
            OutputError,
            match=r"part-\d+.arrow: .*finished.*kept",
        ):
            prepare_parts(corpus, tokenizer, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not (tmp_path / "out/train/manifest.json").exists()
    assert prepare_parts(corpus, tokenizer, tmp_path / "out").as_json(lasting=True) == whole
    monkeypatch.setattr(work, "FREE_SHARE", 1e9)
    with pytest.raises(OutputError, match=r"MB.*least.*MB.*needed"):
        prepare_parts(corpus, tokenizer, tmp_path / "none")


def test_input_that_changes_meanwhile_is_noticed(tmp_path, corpus, tokenizer):
    def change(record):
        (corpus / "9.jsonl").write_text('{"text": "late"}\n')
        return record

    with pytest.raises(PenstockError, match="input changed while it was prepared"):
        prepare_parts(corpus, tokenizer, tmp_path / "out", transform=change)


def test_records_that_change_or_end_early_on_resume(tmp_path, tokenizer):
    def dying(texts):
        yield from texts
        raise Killed

    texts = ["water", "wheel", "pipe", "steel"]
    options = {"weights_field": None, "part_bytes": 4}
    with pytest.raises(Killed, match=r"^$"):
        prepare_parts(dying(texts[:3]), tokenizer, tmp_path / "out", **options)
    report = prepare_parts(iter(["water", "wheels"]), tokenizer, tmp_path / "out", **options)
    assert (report.documents, report.parts, report.parts_resumed) == (2, 2, 1)
    prepare_parts(iter(["water", "wheels"]), tokenizer, tmp_path / "whole", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert prepare_parts(iter(texts), tokenizer, tmp_path / "out", **options).parts_resumed == 1


def test_a_damaged_plan_is_named(tmp_path, corpus, tokenizer):
    prepare_parts(corpus, tokenizer, tmp_path / "out")
    (tmp_path / "out/prepare.json").write_text(json.dumps({})[:1])
    with pytest.raises(OutputError, match=r"prepare.json.*set"):
        prepare_parts(corpus, tokenizer, tmp_path / "out")
    assert prepare_parts(corpus, tokenizer, tmp_path / "out", overwrite=True).documents == 2203
