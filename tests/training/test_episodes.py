"""Rollouts with an environment: turns, rewards, rounds that are stopped and go on, and a policy
that learns from them.
"""

import json
import shutil
import threading
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from test_preference_runs import data, model_for  # noqa: F401

import penstock as ps
from penstock.core.errors import ConfigError, RecordError, StateError
from penstock.use.runs import journal
from penstock.use.runs.daemon_threads import DaemonThreads
from penstock.use.runs.environments import Environment, finite_number
from penstock.use.runs.journal import Journal
from penstock.use.runs.opening import Opened

OPTIONS = {"max_tokens": 6, "threads": 1, "progress": False, "samples": 2}
PROMPTS = ["say water", "say pipe", "say more"]


def twice(messages, reply):
    """Asks again once, then judges."""
    if sum(one["role"] == "assistant" for one in messages) < 2:
        return [{"role": "user", "content": "again"}]
    return float(len(reply["content"]) % 3)


@pytest.fixture
def run(data):  # noqa: F811
    return ps.open_run(data / "base")


def lines(output):
    text = output.with_name(f"{output.name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_trajectories_of_two_turns_become_groups(run, tmp_path):
    found = run.rollouts(PROMPTS, output=tmp_path / "data", environment=twice, **OPTIONS)
    records = lines(tmp_path / "data")[1:]
    assert len(records) == 6
    assert all(len(one["steps"]) == 2 for one in records)
    assert len(found.dataset) == found.prompts == 3
    assert found.mean_reward == pytest.approx(np.mean([one["reward"] for one in records]))
    sampled = sum(len(step["response_ids"]) for one in records for step in one["steps"])
    assert found.answer_tokens == pytest.approx(sampled / 6)
    assert sum(float(one.loss_weights.sum()) for one in found.dataset) == sampled
    # The second prompt begins with all that was sent and sampled.
    for one in records:
        first, second = one["steps"]
        begin = [*first["prompt_ids"], *first["response_ids"]]
        assert second["prompt_ids"][: len(begin)] == begin


def test_a_conversation_may_be_called_prompt_in_episodes(run, tmp_path):
    asked = [{"role": "user", "content": "say water"}]
    for name, prompt in {"text": "say water", "messages": {"prompt": asked}}.items():
        run.rollouts([prompt], output=tmp_path / name, environment=twice, **OPTIONS)
    first, second = (
        [one["steps"] for one in lines(tmp_path / name)[1:]] for name in ("text", "messages")
    )
    assert first == second


@pytest.mark.parametrize("own", [False, True])
def test_tools_that_the_template_does_not_write_are_refused(run, tmp_path, own):
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds."}}]
    prompts = [{"prompt": "say water", "tools": tools}] if own else PROMPTS
    more = {} if own else {"tools": tools}
    with pytest.raises(ConfigError, match="tools: the chat template writes none of them"):
        run.rollouts(prompts, output=tmp_path / "d", environment=twice, **more, **OPTIONS)
    assert not list(tmp_path.iterdir())


def test_every_prompt_is_looked_at_before_anything_is_sampled(run, tmp_path):
    """The template may write the tools of the first prompt; here it writes none, and the first has
    none.
    """
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds."}}]
    long = [{"role": "user", "content": "water " * 300}]
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for asked, kind, said in (
        ({"prompt": "a", "tools": tools}, ConfigError, "tools: the chat template writes none"),
        ({"prompt": "a", "tools": json.dumps(tools)}, ConfigError, "template writes none of them"),
        ({"prompt": "a", "tools": "{"}, RecordError, "prompt 1: tools: .*not JSON"),
        ({"messages": long}, RecordError, r"prompt 1: the prompt has \d+ tokens, but the context"),
        ({"messages": answered}, RecordError, "prompt 1: its last message is the assistant's"),
        ({"messages": [{"from": "human", "value": "a"}]}, RecordError, "message 0 has no role"),
        ([answered[0]], RecordError, "prompt 1: found .*expected texts and records"),
    ):
        with pytest.raises(kind, match=said):
            run.rollouts(["say water", asked], output=tmp_path / "d", environment=twice, **OPTIONS)
    with pytest.raises(RecordError, match="prompts: found"):
        run.rollouts({"prompt": "say"}, output=tmp_path / "d", environment=twice, **OPTIONS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("turns", [1, 2])
def test_the_reward_at_the_end_is_that_of_the_last_turn(run, tmp_path, turns):
    """Also of trajectories of one turn, where others have rewards of turns."""

    def environment(messages, reply, state):
        state["turn"] = turn = state.get("turn", 0) + 1
        ends = turn == 2 or (turns == 1 and len(reply["content"]) % 2)
        if ends:
            return 3.0 + turn
        return [{"role": "user", "content": "more"}], 0.125

    given = {**OPTIONS, "samples": 6}
    found = run.rollouts(PROMPTS, output=tmp_path / "a", environment=environment, **given)
    again = ps.prepare_trajectories(
        tmp_path / "a.jsonl",
        tokenizer=found.dataset.path / "tokenizer",
        output=tmp_path / "b",
        progress=False,
    )
    lengths = {len(one["steps"]) for one in lines(tmp_path / "a")[1:]}
    assert lengths == ({1, 2} if turns == 1 else {2})
    for document in [*found.dataset, *again]:
        rewards = document.columns["turn_rewards"]
        wanted = {0.125, 5.0} if turns == 2 else {0.125, 4.0, 5.0}
        assert set(rewards[~np.isnan(rewards)]) <= wanted
        assert max(rewards[~np.isnan(rewards)]) > 3


def test_rounds_prepared_together_keep_their_prompts_apart(run, tmp_path):
    for number, prompt in enumerate(PROMPTS[:2]):
        run.rollouts(
            [prompt], output=tmp_path / f"r{number}", environment=lambda m, r: 1.0, **OPTIONS
        )
    both = ps.prepare_trajectories(
        [tmp_path / "r0.jsonl", tmp_path / "r1.jsonl"],
        tokenizer=tmp_path / "r0" / "tokenizer",
        output=tmp_path / "both",
        progress=False,
    )
    assert len(both) == 2


@pytest.mark.parametrize("content", ['{"prompt": "say water"}', '{"prompt": "a"}\n{"b": 1}', "x"])
def test_a_file_of_another_kind_is_not_touched(run, tmp_path, content):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(StateError, match=r"p\.jsonl: its first line is damaged, or it is no file"):
        run.rollouts(PROMPTS, output=tmp_path / "p", environment=twice, **OPTIONS)
    assert path.read_text() == content


@pytest.mark.parametrize("cut", [1, 20, 60, -1])
def test_a_first_line_that_a_kill_cut(run, tmp_path, cut):
    run.rollouts(PROMPTS, output=tmp_path / "a", environment=twice, **OPTIONS)
    first = (tmp_path / "a.jsonl").read_bytes().split(b"\n")[0]
    (tmp_path / "b.jsonl").write_bytes(first[:cut])
    run.rollouts(PROMPTS, output=tmp_path / "b", environment=twice, **OPTIONS)
    assert lines(tmp_path / "a")[0] == lines(tmp_path / "b")[0]


def test_an_answer_of_a_tool_that_fills_the_context_ends_its_trajectory_alone(run, tmp_path):
    asked = []

    def environment(messages, reply, record, last, room):
        asked.append((record["prompt"], last, room))
        if last or record["prompt"] != "say pipe":
            return 0.5
        return [{"role": "user", "content": "water " * 300}], 0.25

    found = run.rollouts(PROMPTS, output=tmp_path / "a", environment=environment, **OPTIONS)
    assert found.prompts == 3
    assert found.mean_reward == 0.5
    assert [one[1] for one in asked if one[0] == "say pipe"].count(True) == 2
    assert all(0 < room < 128 for _, last, room in asked if not last)
    for one in lines(tmp_path / "a")[1:]:
        assert len(one["steps"]) == 1
        assert one["steps"][0].get("reward", 0.5) == 0.5


def test_what_an_environment_does_to_a_reply_changes_no_prompt(run, tmp_path):
    def takes(messages, reply, last):
        reply.clear()
        messages[0]["content"] = "nothing"
        return 0.0 if last else [{"role": "user", "content": "more"}]

    def leaves(messages, reply, last):
        return 0.0 if last else [{"role": "user", "content": "more"}]

    for history in ("sampled", "template"):
        given = {"max_turns": 2, "history": history, **OPTIONS}
        first = run.rollouts(PROMPTS, output=tmp_path / f"a{history}", environment=takes, **given)
        other = run.rollouts(PROMPTS, output=tmp_path / f"b{history}", environment=leaves, **given)
        for mine, theirs in zip(first.dataset, other.dataset, strict=True):
            np.testing.assert_array_equal(mine.tokens, theirs.tokens)


def test_filters_are_kept_with_the_file(run, tmp_path):
    run.rollouts(PROMPTS, output=tmp_path / "a", environment=twice, top_k=5, **OPTIONS)
    run.rollouts(PROMPTS, output=tmp_path / "b", environment=twice, **OPTIONS)
    given = {"tokenizer": tmp_path / "a" / "tokenizer", "progress": False}
    made = ps.prepare_trajectories(tmp_path / "a.jsonl", output=tmp_path / "c", **given)
    assert made.sampling == {"top_k": 5}
    with pytest.raises(ConfigError, match=r"sampled with .*top_k.* and with"):
        ps.prepare_trajectories(
            [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], output=tmp_path / "d", **given
        )


def test_a_round_that_goes_on_says_so(run, tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", logger="penstock.runs")
    run.rollouts(PROMPTS, output=tmp_path / "a", environment=twice, **OPTIONS)
    assert not caplog.messages
    shutil.rmtree(tmp_path / "a")
    run.rollouts(PROMPTS, output=tmp_path / "a", environment=twice, **OPTIONS)
    [said] = caplog.messages
    assert "6 of 6 trajectories are over" in said
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "other.py").write_text("def judge(messages, reply):\n    return 1.0\n")
    environment = f"{tmp_path / 'other.py'}:judge"
    run.rollouts(PROMPTS, output=tmp_path / "a", environment=environment, **OPTIONS)
    assert "the environment's code has changed" in caplog.messages[1]


def test_numbers_that_are_rewards(run, tmp_path):
    for number, given in enumerate((True, np.bool_(True), np.float32(1), torch.tensor(1))):
        for name in ("environment", "reward"):
            more = {name: lambda a, b, given=given: given}
            found = run.rollouts(PROMPTS, output=tmp_path / f"{name}{number}", **more, **OPTIONS)
            assert found.mean_reward == 1
    for given in (None, "1", np.zeros(2), torch.tensor(float("nan"))):
        assert finite_number(given) is None


def test_their_file_can_be_prepared_again(run, tmp_path):
    found = run.rollouts(PROMPTS, output=tmp_path / "data", environment=twice, **OPTIONS)
    again = ps.prepare_trajectories(
        tmp_path / "data.jsonl",
        tokenizer=found.dataset.path / "tokenizer",
        output=tmp_path / "again",
        progress=False,
    )
    # Trajectories come in the order in which they ended.
    ours, theirs = (
        sorted(sorted(one.tokens.tolist()) for one in given) for given in (found.dataset, again)
    )
    assert ours == theirs
    assert again.num_tokens == found.dataset.num_tokens


def test_log_probabilities_are_those_that_training_computes(run, data, tmp_path):  # noqa: F811
    found = run.rollouts(PROMPTS, output=tmp_path / "data", environment=twice, **OPTIONS)
    scored = run.reference(found.dataset, tmp_path / "scored", progress=False)
    for document in scored:
        trained = document.loss_weights > 0
        apart = (
            document.columns["log_probabilities"] - document.columns["reference_log_probabilities"]
        )
        assert np.abs(apart[trained]).max() < 1e-4


def test_a_policy_learns_from_them(run, data, tmp_path):  # noqa: F811
    found = run.rollouts(PROMPTS, output=tmp_path / "data", environment=twice, **OPTIONS)
    loader = ps.Loader(ps.Source(found.dataset.path), sequence_length=256, rows_per_step=1)
    done = ps.train(
        model_for(data), loader, output=tmp_path / "run", steps=2, threads=1, progress=False,
        policy={},
    )  # fmt: skip
    assert len(done.metrics) == 2


def test_a_round_that_was_stopped_goes_on(run, tmp_path):
    whole = run.rollouts(PROMPTS, output=tmp_path / "whole", environment=twice, **OPTIONS)

    class StopError(Exception):
        pass

    calls = []

    def stops(messages, reply):
        calls.append(1)
        if len(calls) > 7:
            raise StopError("the tool is gone")
        return twice(messages, reply)

    with pytest.raises(StopError, match="the tool is gone"):
        run.rollouts(PROMPTS, output=tmp_path / "data", environment=stops, **OPTIONS)
    kept = len(lines(tmp_path / "data")) - 1
    assert 0 < kept < 6
    # As if killed in the middle of a line.
    with open(tmp_path / "data.jsonl", "a", encoding="utf-8") as file:
        file.write('{"prompt": 0, "sam')
    done = []

    def counts(messages, reply):
        done.append(1)
        return twice(messages, reply)

    found = run.rollouts(PROMPTS, output=tmp_path / "data", environment=counts, **OPTIONS)
    assert len(done) == 2 * (6 - kept)
    for mine, theirs in zip(found.dataset, whole.dataset, strict=True):
        np.testing.assert_array_equal(mine.tokens, theirs.tokens)
        np.testing.assert_array_equal(mine.tree.values, theirs.tree.values)
    (tmp_path / "data2.jsonl").write_text((tmp_path / "data.jsonl").read_text())
    with pytest.raises(StateError, match=r"data2\.jsonl: is of other prompts"):
        run.rollouts(PROMPTS[:1], output=tmp_path / "data2", environment=twice, **OPTIONS)


def test_what_an_environment_may_ask_for(run, tmp_path):
    seen = []

    def asks(messages, reply, record, state, finish_reason, last):
        state["turns"] = state.get("turns", 0) + 1
        seen.append((record["answer"], state["turns"], finish_reason, last))
        return 0.5 if last else ([{"role": "user", "content": "more"}], 0.25)

    prompts = [{"prompt": "say water", "answer": 7}]
    found = run.rollouts(
        prompts, output=tmp_path / "data", environment=asks, max_turns=3, version=4, **OPTIONS
    )
    assert {one[0] for one in seen} == {7}
    assert sorted(one[1] for one in seen) == [1, 1, 2, 2, 3, 3]
    assert {one[2] for one in seen} <= {"stop", "length"}
    assert {one[3] for one in seen if one[1] == 3} == {True}
    [document] = found.dataset
    rewards = document.columns["turn_rewards"]
    assert sorted(set(rewards[~np.isnan(rewards)])) == [0.25, 0.5]
    assert set(document.columns["policy_version"]) == {4}


def test_environments_do_not_wait_for_each_other(run, tmp_path):
    """Each waits until all are there."""
    together = threading.Barrier(4, timeout=60)

    def waits(messages, reply):
        together.wait()
        return 1.0

    found = run.rollouts(PROMPTS[:2], output=tmp_path / "data", environment=waits, **OPTIONS)
    assert found.mean_reward == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda messages, reply: "done", "gave 'done'; expected a list of messages"),
        (lambda messages, reply: [], "gave no message"),
        (lambda messages, reply: ["x"], "gave the message 'x'"),
        (lambda messages, reply: float("nan"), "gave nan"),
        (lambda messages, reply: ([{"role": "user"}], None), "gave the reward None"),
        (lambda messages, reply: [{"role": "user", "content": "x"}], "no room for another turn"),
        (lambda: 1.0, "environment"),
        ("nowhere:nothing", "nowhere"),
    ],
)
def test_wrong_environments(given, said, run, tmp_path):
    with pytest.raises(ConfigError, match=said):
        run.rollouts(PROMPTS, output=tmp_path / "data", environment=given, max_turns=2, **OPTIONS)


def test_wrong_calls(run, tmp_path):
    for given, said in (
        ({"output": tmp_path / "a"}, "give a reward.*or an environment"),
        ({"output": tmp_path / "a", "reward": len, "max_turns": 3}, "need an environment"),
        ({"output": tmp_path / "a", "environment": twice, "max_turns": 0}, "max_turns must be"),
        ({"output": tmp_path / "a", "environment": twice, "history": "x"}, "history must be"),
        ({"output": tmp_path / "a", "environment": twice, "version": -1}, "version must be"),
    ):
        with pytest.raises(ConfigError, match=said):
            run.rollouts(PROMPTS, **{"threads": 1, "progress": False, **given})


def test_an_environment_that_takes_anything():
    found = Environment(lambda messages, reply, **more: float(more["last"]))
    given = {"record": {}, "state": {}, "finish_reason": "stop", "last": True, "room": 0}
    assert found.answer([{"role": "assistant", "content": ""}], **given).reward == 1


def test_a_model_without_trees_gets_paths_apart(run, data, tmp_path, monkeypatch):  # noqa: F811
    together = run.rollouts(PROMPTS, output=tmp_path / "a", environment=twice, **OPTIONS)
    monkeypatch.setattr(Opened, "reads_trees", False)
    apart = run.rollouts(PROMPTS, output=tmp_path / "b", environment=twice, **OPTIONS)
    assert together.dataset.num_tokens < apart.dataset.num_tokens
    for one, other in zip(together.dataset, apart.dataset, strict=True):
        np.testing.assert_array_equal(one.tree.values, other.tree.values)


def test_an_error_names_its_trajectory_and_waits_for_nobody(run, tmp_path):
    """Others are finished, or wait for a tool that never answers."""
    blocked, never = threading.Event(), threading.Event()

    def environment(messages, reply, record):
        if record["prompt"] == "say pipe":
            blocked.set()
            never.wait()
        if record["prompt"] == "say more":
            if sum(one["role"] == "assistant" for one in messages) < 2:
                return [{"role": "user", "content": "again"}]
            assert blocked.wait(60)
            raise OSError("the tool is gone")
        return 1.0

    try:
        with pytest.raises(OSError, match="the tool is gone") as found:
            run.rollouts(PROMPTS, output=tmp_path / "data", environment=environment, **OPTIONS)
    finally:
        never.set()
    [note] = found.value.__notes__
    assert note.startswith("in the trajectory of prompt 2, sample ")
    assert note.endswith(", turn 1")
    assert {one["prompt"] for one in lines(tmp_path / "data")[1:]} == {0}


def test_what_is_over_when_another_fails_is_kept(run, tmp_path):
    """All answers are there when the first is looked at, and that one is an error."""
    last = threading.Barrier(6, timeout=60)

    def environment(messages, reply, record):
        number = last.wait()
        if number == 5:
            raise ValueError("no")
        return 1.0

    slow = threading.Event()
    looked = Future.result

    def waits(future, *given):
        if not slow.is_set():
            # Until the others are done, too.
            slow.wait(1)
            slow.set()
        return looked(future, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Future, "result", waits)
        with pytest.raises(ValueError, match="no"):
            run.rollouts(PROMPTS, output=tmp_path / "data", environment=environment, **OPTIONS)
    assert len(lines(tmp_path / "data")) == 1 + 5


def test_errors_of_ours_say_where(run, tmp_path):
    def leaves(messages, reply):
        raise SystemExit(3)

    with pytest.raises(ConfigError, match=r"prompt 0, sample 0, turn 0: .*SystemExit 3"):
        run.rollouts(
            PROMPTS[:1], output=tmp_path / "a", environment=leaves, **{**OPTIONS, "samples": 1}
        )

    def replies(messages, reply):
        return [{"role": "assistant", "content": "I answer myself"}]

    with pytest.raises(RecordError, match=r"prompt 0, sample 0, turn 1: .*is a reply"):
        run.rollouts(
            PROMPTS[:1], output=tmp_path / "b", environment=replies, **{**OPTIONS, "samples": 1}
        )


def test_a_journal_with_damage(run, tmp_path, caplog):
    """As after a machine has died: lines that are cut, zeros, or no JSON."""
    whole = run.rollouts(PROMPTS, output=tmp_path / "whole", environment=twice, **OPTIONS)
    text = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    damaged = [*text[:2], b"\0" * 30 + b"\n", *text[3:5], b'{"prompt": 1}\n', text[6], b"\0" * 99]
    (tmp_path / "data.jsonl").write_bytes(b"".join(damaged))
    done = []

    def counts(messages, reply):
        done.append(1)
        return twice(messages, reply)

    found = run.rollouts(PROMPTS, output=tmp_path / "data", environment=counts, **OPTIONS)
    assert len(done) == 2 * 2
    assert [one for one in caplog.messages if "2 lines are damaged" in one]
    for mine, theirs in zip(found.dataset, whole.dataset, strict=True):
        np.testing.assert_array_equal(mine.tokens, theirs.tokens)
    (tmp_path / "more.jsonl").write_bytes(b"\0\0\n" + b"".join(text[1:]))
    with pytest.raises(StateError, match=r"more\.jsonl: its first line is damaged"):
        run.rollouts(PROMPTS, output=tmp_path / "more", environment=counts, **OPTIONS)


def test_a_journal_is_on_the_disk_within_a_second_and_at_its_end(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(journal.os, "fsync", lambda number: synced.append(clock[0]))
    clock = [100.0]
    monkeypatch.setattr(journal.time, "monotonic", lambda: clock[0])
    with Journal(tmp_path / "a.jsonl", "x") as kept:
        for number in range(30):
            kept.add(number, 0, {"steps": [1], "text": "half \ud800 of a pair"})
            clock[0] += 0.1
    assert 3 <= len(synced) <= 5
    assert synced[-1] == clock[0]
    assert len(Journal(tmp_path / "a.jsonl", "x").finished) == 30
    with pytest.raises(StateError, match="is of other prompts"):
        Journal(tmp_path / "a.jsonl", "y")


def test_daemon_threads():
    threads, together = DaemonThreads(3, "test"), threading.Barrier(3, timeout=60)
    found = [threads.submit(together.wait) for _ in range(3)]
    assert sorted(one.result() for one in found) == [0, 1, 2]
    # Threads are used again.
    names = {threads.submit(threading.current_thread).result() for _ in range(20)}
    assert len(names) <= 3
    assert all(one.daemon for one in names)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        threads.submit(lambda: 1 / 0).result()
    threads.close()
    for one in names:
        one.join(60)
        assert not one.is_alive()
