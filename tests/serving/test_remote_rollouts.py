"""Rollouts whose replies a server samples: `penstock serve` itself, and one behind a proxy that
changes, delays or loses its answers.
"""

import http.client
import json
import math
import shutil
import signal
import socket
import struct
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import pytest
from serving_makers import Running, running

import penstock as ps
from makers.processes import call_penstock
from patience import PATIENCE_SECONDS, wait_for
from penstock.core.errors import ConfigError, RecordError, StateError
from penstock.use.runs import engine_client, opening
from penstock.use.runs.opening import load_opened, writer_of
from penstock.use.serving import ServedModel

PROMPTS = ["say water", "say pipe", "say more"]
OPTIONS = {"max_tokens": 5, "progress": False, "samples": 2}


def twice(messages, reply):
    """Asks again once, then judges."""
    if sum(one["role"] == "assistant" for one in messages) < 2:
        return [{"role": "user", "content": "again"}]
    return float(len(reply["content"]) % 3)


def served(folder, **more):
    """The model of a folder with its engine, as `penstock serve` makes it."""
    writer = writer_of(load_opened(folder, threads=1), 4)
    return ServedModel(
        **{
            "name": "little",
            "engine": writer.engine,
            "tokenizer": writer.tokenizer,
            "template": writer.template,
            "context_length": writer.engine.context_length,
            # A client that leaves anything out gets other replies.
            "sampling": {"top_k": 2, "temperature": 0.4, "repetition_penalty": 1.5},
            **more,
        }
    )


@pytest.fixture(scope="module")
def little(folder):
    with running(served(folder)) as server:
        yield server


@pytest.fixture
def run(folder):
    return ps.open_run(folder)


@contextmanager
def proxy(url, change, forwards=True):
    """A server before another: `change(path, answer)` gives what it answers: a status with an
    object, or None to close the connection. Without `forwards` the other writes nothing.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(httpx.get(url + self.path))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            sent.append(body)
            if forwards:
                self.answer(httpx.post(url + self.path, json=body, timeout=PATIENCE_SECONDS))
            else:
                self.answer(httpx.Response(200, json={}))

        def answer(self, found):
            status, answer = found.status_code, found.json()
            if status == 200:
                changed = change(self.path, answer)
                if changed is None:
                    self.close_connection = True
                    return
                status, answer = changed
            content = json.dumps(answer).encode()
            with suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    sent = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def lines(output):
    text = output.with_name(f"{output.name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def assert_same(one, other):
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine.tokens, theirs.tokens)
        np.testing.assert_array_equal(mine.tree.values, theirs.tree.values)
        np.testing.assert_array_equal(mine.loss_weights, theirs.loss_weights)
        logs = [one.columns["log_probabilities"] for one in (mine, theirs)]
        np.testing.assert_allclose(*logs, atol=1e-5)


def test_a_server_gives_what_our_engine_gives(little, run, tmp_path):
    here = run.rollouts(PROMPTS, output=tmp_path / "a", environment=twice, threads=1, **OPTIONS)
    there = run.rollouts(
        PROMPTS, output=tmp_path / "b", environment=twice, engine=f"{little.url}/v1", **OPTIONS
    )
    assert_same(there.dataset, here.dataset)
    assert there.mean_reward == here.mean_reward
    assert there.stopped == here.stopped
    trained = [one.columns["log_probabilities"][one.loss_weights > 0] for one in there.dataset]
    assert all((logs < 0).all() for logs in trained)
    # The address decides nothing; the model does.
    assert lines(tmp_path / "a")[0] != lines(tmp_path / "b")[0]


def test_no_weights_are_read(little, run, folder, tmp_path, monkeypatch):
    def refused(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(opening, "load_folder", refused)
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    found = ps.open_run(bare).rollouts(
        PROMPTS, output=tmp_path / "a", environment=twice, engine=little.url, **OPTIONS
    )
    # Beginnings are shared, as this model reads trees.
    slots = [[len(one.tree.slots(n)) for n in range(len(one.tree.paths))] for one in found.dataset]
    assert all(len(one.tokens) < sum(own) for one, own in zip(found.dataset, slots, strict=True))


def test_a_round_that_was_stopped_goes_on_at_another_address(little, run, tmp_path):
    given = {"environment": twice, **OPTIONS}
    whole = run.rollouts(PROMPTS, output=tmp_path / "whole", engine=little.url, **given)
    calls = []

    def stops(messages, reply):
        calls.append(1)
        if len(calls) > 7:
            raise RuntimeError("the tool is gone")
        return twice(messages, reply)

    with pytest.raises(RuntimeError, match="the tool is gone"):
        run.rollouts(
            PROMPTS, output=tmp_path / "data", engine=little.url, **{**given, "environment": stops}
        )
    kept = len(lines(tmp_path / "data")) - 1
    assert 0 < kept < 6
    with proxy(little.url, lambda _, answer: (200, answer)) as (url, sent):
        found = run.rollouts(PROMPTS, output=tmp_path / "data", engine=url, **given)
    assert len(sent) == 2 * (6 - kept)
    assert_same(found.dataset, whole.dataset)
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(StateError, match=r"data\.jsonl: is of other prompts, settings or another"):
        run.rollouts(PROMPTS, output=tmp_path / "data", threads=1, **given)


def test_a_server_that_goes_and_comes_back(folder, run, little, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(engine_client, "PAUSE", 0.02)
    options = {**OPTIONS, "samples": 6}
    expected = run.rollouts(
        PROMPTS, output=tmp_path / "whole", environment=twice, engine=little.url, **options
    )
    first = Running(served(folder), grace_seconds=0.05)
    port = int(first.url.rpartition(":")[2])
    second = []
    calls = []

    def changes_servers(messages, reply):
        calls.append(1)
        if len(calls) == 3:
            first.stop()
            wait_for(lambda: any(one.endswith("trying again") for one in caplog.messages))
            second.append(Running(served(folder), port=port))
        return twice(messages, reply)

    try:
        found = run.rollouts(
            PROMPTS, output=tmp_path / "data", environment=changes_servers, engine=first.url,
            at_once=3, **options,
        )  # fmt: skip
    finally:
        for server in second:
            server.stop()
    assert len(second) == 1
    assert_same(found.dataset, expected.dataset)


def test_refusals_for_now_are_tried_again(little, run, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_client, "PAUSE", 0.01)
    monkeypatch.setattr(engine_client, "LONGEST_PAUSE", 0.05)
    count = []

    def busy(path, answer):
        count.append(path)
        if path.endswith("models") or len(count) % 3 == 0:
            return 200, answer
        if len(count) % 3 == 1:
            return None
        return (503, {"error": {"message": "busy"}}) if len(count) % 2 else (429, {})

    with proxy(little.url, busy) as (url, _):
        found = run.rollouts(
            PROMPTS, output=tmp_path / "a", environment=twice, engine=url, **OPTIONS
        )
    assert len(found.dataset) == 3

    def away(path, answer):
        return (200, answer) if path.endswith("models") else (503, {"message": "no weights yet"})

    with (
        proxy(little.url, away, forwards=False) as (url, _),
        pytest.raises(
            ConfigError, match=r"turn 0: engine .*refuses with 503: no weights yet, for 3 s; see"
        ),
    ):
        run.rollouts(
            PROMPTS, output=tmp_path / "b", environment=twice, engine=url, engine_seconds=3,
            **OPTIONS,
        )  # fmt: skip


def test_a_reply_that_was_given_up_is_asked_for_again(little, run, tmp_path):
    given_up = []

    def aborts(path, answer):
        if "choices" in answer and len(given_up) < 3:
            given_up.append(1)
            answer["choices"][0]["finish_reason"] = "abort"
        return 200, answer

    with proxy(little.url, aborts) as (url, sent):
        run.rollouts(PROMPTS, output=tmp_path / "a", environment=twice, engine=url, **OPTIONS)
    assert len(sent) == 12 + 3


def wrong(name):
    """Ways in which a server's answer may be wrong."""

    def change(path, answer):
        if "choices" not in answer:
            return 200, answer
        [choice] = answer["choices"]
        ids, logs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if name == "no ids":
            del choice["token_ids"], choice["prompt_token_ids"]
        elif name == "strange ids":
            ids[0] = 99_999
        elif name == "texts":
            choice["token_ids"] = ["a"]
        elif name == "none":
            choice["token_ids"] = []
        elif name == "no logs":
            choice["logprobs"] = None
        elif name == "short logs":
            logs.pop()
        elif name == "nan":
            logs[0] = math.nan
        elif name == "positive":
            logs[0] = 0.5
        elif name == "other prompt":
            choice["prompt_token_ids"][2] += 1
        elif name == "longer prompt":
            del choice["prompt_token_ids"]
            answer["usage"]["prompt_tokens"] += 1
        elif name == "no end":
            choice["finish_reason"] = "stop"
            ids[-1] = 100
        elif name == "reason":
            choice["finish_reason"] = "content_filter"
        elif name == "two":
            answer["choices"] *= 2
        elif name == "list":
            return 200, [answer]
        elif name == "refused":
            return 400, {"error": {"message": "no\nsuch  model"}}
        elif name == "moved":
            return 307, {}
        elif name == "missing":
            return 404, {}
        return 200, answer

    return change


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no ids", r"gave no ids of tokens .*it does not know return_token_ids"),
        ("strange ids", r"gave id 99999, which is not in the vocabulary of 2\d\d"),
        ("texts", r"gave the ids \['a'\]"),
        ("none", r"gave the ids \[\]"),
        ("no logs", r"gave no log-probabilities .* for \d tokens"),
        ("short logs", r"gave \d log-probabilities .* for \d tokens; expected one for each"),
        ("nan", "gave the log-probability nan for token 0"),
        ("positive", "gave the log-probability 0.5 for token 0"),
        ("other prompt", r"read another prompt than the \d+ tokens .*, from token 2 on"),
        ("longer prompt", r"read a prompt of \d+ tokens, and was sent \d+"),
        ("no end", "its last id 100 ends none"),
        ("reason", "finish_reason 'content_filter'; expected stop or length"),
        ("two", "gave no single choice"),
        ("list", "gave no JSON object"),
        ("refused", "refuses with 400: no such model$"),
        ("moved", r"to another address \(307\)"),
        ("missing", r"has nothing at /v1/completions \(404\)"),
    ],
)
def test_wrong_answers_are_refused_at_the_first(name, said, little, run, tmp_path):
    with (
        proxy(little.url, wrong(name)) as (url, sent),
        pytest.raises(ConfigError, match=rf"prompt \d, sample \d, turn 0: engine {url}.*{said}"),
    ):
        run.rollouts(PROMPTS, output=tmp_path / "a", environment=twice, engine=url, **OPTIONS)
    assert len(sent) <= 6
    assert len(lines(tmp_path / "a")) == 1


def test_what_is_asked_for(little, run, tmp_path):
    with proxy(little.url, lambda _, answer: (200, answer)) as (url, sent):
        run.rollouts(
            PROMPTS[:1], output=tmp_path / "a", environment=lambda messages, reply: 1.0,
            engine=f"{url}/v1/", engine_logprobs="processed", temperature=0.5, top_k=7, stop="zz",
            logit_bias={5: -1.0}, **{**OPTIONS, "max_tokens": None, "samples": 1},
        )  # fmt: skip
    [body] = sent
    assert (body["temperature"], body["top_k"], body["stop"]) == (0.5, 7, ["zz"])
    assert body["logit_bias"] == {"5": -1.0}
    assert body["max_tokens"] == 128 - len(body["prompt"])
    assert body["return_token_ids"] is True
    assert body["top_p"] == body["repetition_penalty"] == 1
    assert body["min_p"] == body["presence_penalty"] == body["frequency_penalty"] == 0
    assert set(body["stop_token_ids"]) == set(run.stop_ids)
    # What changed the sampling is stored, and a policy refuses it unless it is told otherwise.
    stored = ps.open_dataset(tmp_path / "a")
    assert stored[0].tree.value("temperature").tolist() == [0.5]


AGENT = """
def once(messages, reply):
    return float(len(reply["content"]))
"""


def test_the_command(little, folder, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in PROMPTS))
    given = [
        "rollouts", folder, prompts, "--environment", f"{tmp_path / 'agent.py'}:once", "--samples",
        "2", "--max-tokens", "4", "--engine", little.url, "--engine-model", "little", "--at-once",
        "3", "--engine-seconds", "900",
    ]  # fmt: skip
    found = call_penstock(*given, "-o", tmp_path / "data")
    assert found.exit_code == 0, found.output
    assert "3 prompts: mean reward" in found.output
    assert len(ps.open_dataset(tmp_path / "data")) == 3
    with pytest.raises(ConfigError, match="set engine_logprobs to processed"):
        call_penstock(*given, "--temperature", "0.5", "-o", tmp_path / "more")


def test_requests_go_on_at_the_same_time(little, run, tmp_path):
    together = threading.Barrier(4, timeout=60)

    def waits(path, answer):
        if "choices" in answer:
            together.wait()
        return 200, answer

    with proxy(little.url, waits) as (url, _):
        found = run.rollouts(
            PROMPTS[:2], output=tmp_path / "a", environment=twice, engine=url, at_once=4, **OPTIONS
        )
    assert len(found.dataset) == 2


def test_ctrl_c_waits_for_nobody(little, run, tmp_path):
    """Neither for the server nor for a tool."""
    begun, released = threading.Event(), threading.Event()

    def silent(path, answer):
        if "choices" in answer and begun.is_set():
            released.wait()
        return 200, answer

    def slow(messages, reply):
        if not begun.is_set():
            begun.set()
            return 1.0
        released.wait()
        return 0.0

    def interrupt():
        assert begun.wait(PATIENCE_SECONDS)
        wait_for(lambda: len(lines(tmp_path / "a")) == 2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with proxy(little.url, silent) as (url, _):
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt, match=r"^$"):
                run.rollouts(
                    PROMPTS, output=tmp_path / "a", environment=slow, engine=url, at_once=2,
                    **OPTIONS,
                )  # fmt: skip
            assert time.monotonic() - started < PATIENCE_SECONDS / 2
    finally:
        released.set()
        thread.join()
    assert len(lines(tmp_path / "a")) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": 0.7}, r"temperature would change what is sampled.*set engine_logprobs to"),
        ({"top_p": 0.9, "min_tokens": 2}, r"top_p, min_tokens would change|min_tokens, top_p"),
        ({"json_schema": "{}"}, "json_schema is not sent to an engine"),
        ({"device": "cpu"}, "device is for a model that computes here"),
        ({"threads": 1}, "threads is for a model that computes here"),
        ({"engine": "localhost:8000"}, "expected the address of a server"),
        ({"engine": "http://localhost:port/v1"}, "correct the port"),
        ({"engine": "http://me:hidden@localhost/v1"}, "give the address alone"),
        ({"engine": "http://localhost/v1?key=hidden"}, "give the address alone"),
        ({"engine": "http://127.0.0.1:1/v1"}, r"cannot be reached.*start the server, or correct"),
        ({"engine_logprobs": "cooked"}, "engine_logprobs must be raw or processed"),
        ({"engine_seconds": 0}, "engine_seconds must be above 0"),
        ({"engine_model": "other"}, r"has nothing at /v1/completions \(404\)"),
        ({"engine": None, "engine_model": "x"}, "set engine to its address, or leave them out"),
        ({"environment": None, "reward": len}, "engine need an environment"),
        ({"at_once": 0}, "at_once must be at least 1"),
        ({"context_length": 4}, r"the prompt has \d+ tokens, but the context of 4"),
    ],
)
def test_what_is_refused(given, said, little, run, tmp_path):
    settings = {"environment": twice, "engine": little.url, **OPTIONS, **given}
    with pytest.raises((ConfigError, RecordError), match=said) as found:
        run.rollouts(PROMPTS, output=tmp_path / "a", **settings)
    assert "hidden" not in str(found.value)


def test_one_of_several_models_is_named(little, run, tmp_path):
    def several(path, answer):
        if "data" in answer:
            answer["data"].append({"id": "other", "max_model_len": 20})
        return 200, answer

    given = {"environment": lambda messages, reply: 1.0, **OPTIONS, "max_tokens": None}
    with proxy(little.url, several) as (url, sent):
        with pytest.raises(ConfigError, match="serves little, other; set engine_model to the one"):
            run.rollouts(PROMPTS, output=tmp_path / "a", engine=url, **given)
        run.rollouts(PROMPTS, output=tmp_path / "b", engine=url, engine_model="little", **given)
        assert {one["model"] for one in sent} == {"little"}
        # The context is the server's, where that is less.
        with pytest.raises(ConfigError, match="has nothing at"):
            run.rollouts(PROMPTS, output=tmp_path / "c", engine=url, engine_model="other", **given)
        assert all(
            one["max_tokens"] == 20 - len(one["prompt"]) for one in sent if one["model"] == "other"
        )


def test_the_key_comes_from_the_environment(folder, run, tmp_path, monkeypatch):
    given = {"environment": twice, **OPTIONS}
    with running(served(folder), api_keys=("very-secret",)) as server:
        with pytest.raises(ConfigError, match=r"refuses with 401.*set PENSTOCK_API_KEY to its key"):
            run.rollouts(PROMPTS, output=tmp_path / "a", engine=server.url, **given)
        monkeypatch.setenv("PENSTOCK_API_KEY", "very-secret")
        run.rollouts(PROMPTS, output=tmp_path / "a", engine=server.url, **given)
        kept = (tmp_path / "a.jsonl").read_text()
        assert "very-secret" not in kept
        assert server.url not in kept


def test_our_server_takes_the_stop_ids_of_its_model(little, run):
    fine = little.http.post(
        "/v1/completions",
        json={"model": "little", "prompt": [5, 6], "stop_token_ids": list(run.stop_ids)},
    )
    assert fine.status_code == 200
    other = little.http.post(
        "/v1/completions", json={"model": "little", "prompt": [5, 6], "stop_token_ids": [100]}
    )
    assert other.status_code == 400
    assert "stop_token_ids has 100, which ends no reply" in other.json()["error"]["message"]


def test_an_answer_that_breaks_off_leaves_no_socket_open(monkeypatch):
    """Its error lives as long as the round's, and would hold the socket."""
    made, connect = [], http.client.HTTPConnection.connect

    def noted(connection):
        connect(connection)
        made.append(connection.sock)

    monkeypatch.setattr(http.client.HTTPConnection, "connect", noted)

    def break_off(listening):
        to, _ = listening.accept()
        to.recv(1000)
        to.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 500\r\n\r\n{")
        time.sleep(0.2)
        to.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        to.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=break_off, args=(listening,), daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ConfigError, match="no answer") as found:
            engine_client.EngineClient(url, seconds=PATIENCE_SECONDS).get("/models")
    assert [one.fileno() for one in made] == [-1], found.value
