"""On a Ray cluster prepare gives the same bytes as in processes, goes on where it was killed, and
names what failed.
"""

import fcntl
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from prepare_cases import blind, contents, slowly

from makers.processes import child_environment
from patience import PATIENCE_SECONDS, wait_for
from penstock import load_tokenizer, prepare
from penstock.core.arrow import from_texts
from penstock.core.errors import (
    ConfigError,
    MissingExtraError,
    OutputError,
    PenstockError,
    RecordError,
)
from penstock.data.prepare import ray_tasks
from penstock.data.prepare import ray_tasks as ray_node
from penstock.data.prepare.executors import choose_executor
from penstock.data.prepare.pool import Pool
from penstock.data.prepare.ray_tasks import MARKER, RayTasks, end_earlier_runs
from penstock.tokenizers import Tokenizer

OPTIONS = {
    "part_bytes": 12_000,
    "validation": 0.2,
    "on_error": "skip",
    "weights_field": "w",
    "progress": False,
}


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two cores on this machine: what RAY_ADDRESS would be."""
    ray = pytest.importorskip("ray")
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=100 << 20,
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
    patch.undo()


@pytest.fixture
def saved(tmp_path, tokenizer):
    """The tokenizer as a folder, and as loaded from there, because a manifest has its name."""
    tokenizer.save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.mark.slow
def test_the_same_bytes_as_processes_and_relative_paths(
    tmp_path, corpus, tokenizer, cluster, monkeypatch, capsys
):
    import ray

    monkeypatch.chdir(tmp_path)
    (corpus / "1.jsonl").write_text(
        '{"text": "pipe", "w": [{"begin": 1, "end": 3, "weight": 0.5}]}\n{broken\n'
    )
    options = {**OPTIONS, "transform": slowly, "progress": True}
    prepare("raw", tokenizer=tokenizer, output="here", processes=1, **options)
    report = prepare("raw", tokenizer=tokenizer, output="there", executor="ray", **options).report
    assert contents(tmp_path / "here") == contents(tmp_path / "there")
    assert report.rejects == 1
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if "100%" in line and "tok/s" in line]) == 2
    assert ray.is_initialized(), "a cluster that was joined by the user is left to the user"


def test_tasks_take_the_encoder_that_the_look_at_the_input_chose(
    tmp_path, saved, cluster, monkeypatch
):
    encode = Tokenizer._encode_slowly
    monkeypatch.setattr(
        Tokenizer,
        "_encode_slowly",
        lambda self, texts, own=None: encode(self, from_texts(["a"] * len(texts)), own),
    )
    options = {"tokenizer": load_tokenizer(saved), "executor": "ray", "progress": False}
    report = prepare(iter(["steel", "pipes"]), output=tmp_path / "out", **options).report
    records = json.loads((tmp_path / "out/parts.json").read_bytes())
    assert [report.encoder, *(record["encoder"] for record in records)] == [
        "tokenizers",
        "tokenizers",
    ]


def test_a_bad_record_is_named_with_its_line(tmp_path, corpus, tokenizer, cluster):
    (corpus / "1.jsonl").write_text('{"text": "pipe"}\n{broken\n')
    with pytest.raises(RecordError, match=r"raw/1.jsonl:2.*JSON: .*set on_error"):
        prepare(
            corpus,
            tokenizer=tokenizer,
            output=tmp_path / "out",
            executor="ray",
            transform=lambda record: record,
            progress=False,
        )
    assert not list((tmp_path / "out/.prepare").glob(f"{MARKER}*"))


@pytest.mark.slow
def test_nodes_that_do_not_see_the_output_send_their_parts(
    tmp_path, corpus, tokenizer, cluster, monkeypatch
):
    """Every other task: the same bytes as processes."""
    (corpus / "1.jsonl").write_text(
        '{"text": "pipe", "w": [{"begin": 1, "end": 3, "weight": 0.5}]}\n{broken\n'
    )
    shutil.copy(corpus / "0.jsonl", corpus / "3.jsonl")
    options = {**OPTIONS, "drop_duplicates": True}
    prepare(corpus, tokenizer=tokenizer, output=tmp_path / "here", processes=1, **options)
    sent = []
    blind(monkeypatch, lambda number: number % 2 == 0)

    class Watched(ray_node.Incoming):
        def add(self, name, data, is_last):
            sent.append(name)
            super().add(name, data, is_last)

    monkeypatch.setattr(ray_node, "Incoming", Watched)
    report = prepare(
        corpus, tokenizer=tokenizer, output=tmp_path / "there", executor="ray", **options
    ).report
    assert contents(tmp_path / "here") == contents(tmp_path / "there")
    assert report.num_duplicates > 600
    records = [
        name for name in sent if name.startswith(".prepare/part-") and name.endswith(".json")
    ]
    assert len(records) == report.parts // 2


def test_files_arrive_in_pieces_and_marks_last(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_node, "CHUNK_BYTES", 3)
    files = {
        "train/part-0.arrow": b"12345678",
        "train/unfinished/part-0.arrow.json": b"{}",
        "train/unfinished/part-0.arrow.lengths": b"123",
        ".prepare/part-0.hashes": b"1",
        ".prepare/part-0.json": b"",
    }
    for name, data in files.items():
        (tmp_path / "from" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "from" / name).write_bytes(data)
    messages = []
    for path in sorted(filter(Path.is_file, (tmp_path / "from").rglob("*")), key=ray_node._late):
        ray_node._send_file(path, str(path.relative_to(tmp_path / "from")), messages.append)
    incoming = ray_node.Incoming(tmp_path / "to")
    for kind, (name, data, is_last) in messages:
        assert kind == "file"
        assert len(data) <= 3
        incoming.add(name, data, is_last)
        assert (tmp_path / "to" / name).exists() == is_last
    assert contents(tmp_path / "to") == contents(tmp_path / "from")
    assert [name for _, (name, _, last) in messages if last][-2:] == [
        "train/unfinished/part-0.arrow.json", ".prepare/part-0.json",
    ]  # fmt: skip


def test_an_output_that_a_node_cannot_write_is_named(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    place = ray_node.Place(
        marker=tmp_path / "a/b",
        folder=str(tmp_path),
        paths=(),
        version=ray_node.version("penstock"),
    )
    monkeypatch.setattr(ray_node.os, "open", refuse)
    due = r"node .*: cannot write to .* \(Permission denied\); let the user that Ray"
    with pytest.raises(OutputError, match=due), ray_node._hold(place):
        pass


def stop_all(state, argument, report):
    sys.exit("enough")


def die_once(state, argument, report):
    flag = Path(argument)
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    report(3, 2, 1)
    return str(state)


def is_held(state, argument, report):
    (marker,) = argument.glob(f"{MARKER}*")
    with open(marker) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_what_goes_wrong_on_a_node_names_it(tmp_path, cluster):
    crew = RayTasks("state", tmp_path, 2)
    with Pool("state", crew) as pool:
        with pytest.raises(PenstockError, match=r"^a: failed on node \S+ .*Exit: enough"):
            list(pool.run(stop_all, [("a", 1)], print))
        assert list(pool.run(is_held, [("a", tmp_path)], print)) == [True]
        reports = []
        assert list(
            pool.run(die_once, [("a", tmp_path / "flag")], lambda *told: reports.append(told))
        ) == ["state"]
        assert reports == [(3, 2, 1)]
        (marker,) = tmp_path.glob(f"{MARKER}*")
        marker.rename(tmp_path / "elsewhere")
        due = r"^node \S+ \(process \d+\): does not see .* of this run; .*all nodes share"
        with pytest.raises(OutputError, match=due):
            list(pool.run(die_once, [("a", tmp_path / "flag")], print))
        marker.touch()


def test_tasks_of_an_earlier_run_are_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_node, "CLOSING_SECONDS", 0.1)
    marker = tmp_path / f"{MARKER}1"
    with open(marker, "w") as task:
        fcntl.flock(task, fcntl.LOCK_SH)
        with pytest.raises(OutputError, match=r"tasks.*earlier.*still.*write"):
            end_earlier_runs(tmp_path)
        assert marker.exists()
    end_earlier_runs(tmp_path)
    assert not marker.exists()


def test_a_node_with_another_penstock_is_named(tmp_path):
    place = ray_node.Place(marker=tmp_path / MARKER, folder=str(tmp_path), paths=(), version="0.0")
    ((kind, error),) = ray_node.serve(place, ["state"], b"")
    assert kind == "failed"
    with pytest.raises(PenstockError, match=r"node \S+ .*penstock \S+, expected: 0.0"):
        raise error


def name_folder(state, argument, report):
    report(os.getcwd())
    return argument


def test_a_task_has_left_everything_when_its_last_message_comes(tmp_path, monkeypatch):
    """Ray begins the next one in the same process then, with a working folder of its own."""
    monkeypatch.setattr(ray_node, "_fetched", {"key": "state"})
    (tmp_path / "folder").mkdir()
    marker, version = tmp_path / MARKER, ray_node.version("penstock")
    marker.touch()
    place = ray_node.Place(
        marker=marker, folder=str(tmp_path / "folder"), paths=(), version=version
    )
    before = os.getcwd()
    for _ in range(50):
        messages = ray_node.serve(place, ["key"], pickle.dumps(("a", name_folder, 3)))
        assert next(messages) == ("report", (str(tmp_path / "folder"),))
        assert next(messages) == ("done", 3)
        assert os.getcwd() == before
        with open(marker) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_an_interrupt_in_a_destructor_comes_behind_it():
    class Stream:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    streams, done = [Stream()], []
    try:
        with ray_node._interrupts_later():
            streams.clear()
            done.append(True)
    except KeyboardInterrupt:
        done.append("interrupted")
    assert done == [True, True, "interrupted"]


def start(corpus, saved, output, cluster):
    """The command, as a job of its own on the cluster."""
    arguments = [
        "prepare",
        corpus,
        "-t",
        saved,
        "-o",
        output,
        "--executor",
        "ray",
        "--json",
        "--part-bytes",
        "12000",
    ]
    command = [
        sys.executable,
        "-m",
        "penstock",
        *map(str, arguments),
        "--transform",
        "prepare_cases:slowly",
    ]
    environment, pipe = child_environment(RAY_ADDRESS=cluster), subprocess.PIPE
    return subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_killed_or_interrupted_it_goes_on(tmp_path, corpus, saved, cluster, sign):
    options = {
        "tokenizer": load_tokenizer(saved),
        "part_bytes": 12_000,
        "transform": slowly,
        "progress": False,
    }
    child = start(corpus, saved, tmp_path / "out", cluster)
    wait_for(lambda: len(list((tmp_path / "out/.prepare").glob("part-*.json"))) >= 2, child)
    child.send_signal(sign)
    error = child.communicate(timeout=PATIENCE_SECONDS)[1]
    assert error.count("Traceback") == 0
    finished = contents(tmp_path / "out/.prepare")
    report = prepare(
        corpus,
        output=tmp_path / "out",
        executor="ray" if sign == signal.SIGKILL else "processes",
        **options,
    ).report
    assert 2 <= report.parts_resumed < report.parts
    assert (
        report.parts_resumed
        >= sum(name.endswith("json") for name in finished if name.startswith("part-")) - 2
    )
    prepare(corpus, output=tmp_path / "whole", processes=1, **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    if sign == signal.SIGINT:
        again = start(corpus, saved, tmp_path / "out", cluster)
        assert json.loads(again.communicate(timeout=PATIENCE_SECONDS)[0])["documents"] == 2203


def test_mistakes_are_refused_first(tmp_path, corpus, tokenizer, monkeypatch):
    def run(executor):
        return prepare(
            corpus, tokenizer=tokenizer, output=tmp_path / "out", executor=executor, progress=False
        ).report

    with pytest.raises(ConfigError, match=r"executor.*processes.*'spark'"):
        run("spark")
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"ray.*installed.*pip.*'penstock\[ray\]'"):
        run("ray")
    assert not (tmp_path / "out").exists()
    with pytest.raises(PenstockError, match="RAY_ADDRESS=auto"):
        ray_tasks._connect(None, 2)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(PenstockError, match=r"'127.0.0.1:1'.*refused.*RAY_ADDRESS"):
        ray_tasks._connect(None, 2)
    assert choose_executor("processes", processes=1, parts=[], transform=None) is not None
