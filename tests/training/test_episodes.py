"""Rollouts with an environment: turns, rewards, rounds that are stopped and go on, and a policy
that learns from them.
"""

import json
import threading

import numpy as np
import pytest
from test_preference_runs import data, model_for  # noqa: F401

import penstock as ps
from penstock.core.errors import ConfigError, StateError
from penstock.use.runs.environments import Environment

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
    assert sorted(set(rewards[~np.isnan(rewards)])) == [0.0, 0.25]
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
    given = {"record": {}, "state": {}, "finish_reason": "stop", "last": True}
    assert found.answer([{"role": "assistant", "content": ""}], **given).reward == 1
