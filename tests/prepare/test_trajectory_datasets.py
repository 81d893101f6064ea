"""Datasets of trajectories: groups as trees, rounds next to each other, records of files."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

import penstock as ps
from makers.processes import call_penstock
from makers.tokenizers import CHAT_CONTROLS, CHATML, tiny_tokenizer
from penstock.chat import FinishedTrajectory, Trajectory
from penstock.core.errors import ConfigError, OutputError, RecordError
from penstock.data.prepare.trajectories import trees_of

QUESTION = [{"role": "user", "content": "What is 6 times 7?"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trajectories") / "tokenizer"
    return tiny_tokenizer(folder, ["What is 6 times 7? It is 42."] * 20, 330, CHAT_CONTROLS)


def ids(tokenizer, text):
    return tokenizer.encode(text, allow_control=True).tolist()


def finished(tokenizer, *replies, history="sampled", **more) -> FinishedTrajectory:
    """A trajectory with these replies, each answered by the same question."""
    trajectory = Trajectory(tokenizer, CHATML, history=history)
    for text in replies:
        trajectory.prompt(QUESTION)
        sampled = ids(tokenizer, text)
        trajectory.reply(sampled, [-0.5] * len(sampled))
    return trajectory.finish(**more)


@pytest.fixture
def answers(tokenizer):
    return [
        finished(tokenizer, "It is 42.<|im_end|>", reward=1.0, group="a"),
        finished(tokenizer, "It is 41.<|im_end|>", reward=0.0, group="b"),
        finished(tokenizer, "It is 4.<|im_end|>", "Oh 42.<|im_end|>", reward=0.5, group="a"),
    ]


def test_a_group_is_one_document_with_its_beginning_once(answers, tokenizer, tmp_path):
    data = ps.write_trajectories(tmp_path / "data", answers, tokenizer=tokenizer)
    assert len(data) == 2
    first = data[0]
    assert first.tree.names == ("answer", "reward", "truncated")
    assert first.tree.value("reward").tolist() == [1.0, 0.5]
    assert first.tree.value("answer").tolist() == [0.0, 1.0]
    longest = [answers[0].paths[0], answers[2].paths[0]]
    for number, path in enumerate(longest):
        slots = first.tree.slots(number)
        np.testing.assert_array_equal(first.tokens[slots][: len(path.ids)], path.ids)
    assert len(first.tokens) < sum(len(path.ids) for path in longest)
    sampled = sum(one.sampled for one in answers)
    assert sum(float(one.loss_weights.sum()) for one in data) == sampled
    total = sum(float(one.columns["log_probabilities"] @ one.loss_weights) for one in data)
    assert total == pytest.approx(-0.5 * sampled)
    assert ps.open_dataset(tmp_path / "data").tokenizer.vocab_size == tokenizer.vocab_size


def test_paths_of_one_trajectory_are_one_answer(tokenizer):
    rewriting = CHATML.replace("m.content", "(m.content if loop.last else m.content[:3])")
    trajectory = Trajectory(tokenizer, rewriting, history="template")
    for _ in range(2):
        trajectory.prompt(QUESTION)
        trajectory.reply(ids(tokenizer, "It is 42.<|im_end|>"), step_logs(tokenizer))
    one = trajectory.finish(reward=1.0)
    assert len(one.paths) == 2
    [document] = trees_of([[one, finished(tokenizer, "It.<|im_end|>", reward=0.0)]])
    assert document.tree.value("answer").tolist() == [0, 0, 1]
    assert document.tree.value("reward").tolist() == [1, 1, 0]


def step_logs(tokenizer):
    return [-0.5] * len(ids(tokenizer, "It is 42.<|im_end|>"))


def test_numbers_of_turns_are_columns(tokenizer):
    numbers = {"reward": 1.0, "step_advantages": (-1, 2), "step_rewards": (0.25, 0.5)}
    one = finished(tokenizer, "It is 4.<|im_end|>", "Oh 42.<|im_end|>", version=3, **numbers)
    [document] = trees_of([[one]])
    trained = document.loss_weights > 0
    column, second = document.columns["advantages"], one.paths[0].begins[1]
    assert set(column[:second][trained[:second]]) == {-1.0}
    assert set(column[second:]) == {2.0}
    assert np.isnan(column[~trained]).all()
    rewards = document.columns["turn_rewards"]
    places = np.flatnonzero(~np.isnan(rewards))
    assert places.tolist() == [np.flatnonzero(trained[:second])[-1], len(rewards) - 1]
    assert rewards[places].tolist() == [0.25, 0.5]
    assert set(document.columns["policy_version"]) == {3}
    # Columns with NaN keep no beginning apart.
    [both] = trees_of([[one, one]])
    assert len(both.tokens) == len(document.tokens)


def test_rounds_are_one_source(answers, tokenizer, tmp_path):
    for number in range(3):
        data = ps.write_trajectories(tmp_path / "rounds", answers, tokenizer=tokenizer, append=True)
        assert data.path.name == f"{number:05}"
    # A round that was killed is written again.
    (data.path / "manifest.json").unlink()
    data = ps.write_trajectories(tmp_path / "rounds", answers, tokenizer=tokenizer, append=True)
    assert data.path.name == "00002"
    assert len(ps.open_dataset(str(tmp_path / "rounds" / "*"))) == 6
    with pytest.raises(OutputError, match="is a dataset itself"):
        ps.write_trajectories(data.path, answers, tokenizer=tokenizer, append=True)
    with pytest.raises(OutputError, match="not empty"):
        ps.write_trajectories(data.path, answers, tokenizer=tokenizer)


def test_numbers_that_only_some_have_are_refused(answers, tokenizer, tmp_path):
    wrong = [answers[0], finished(tokenizer, "It.<|im_end|>")]
    with pytest.raises(ConfigError, match="trajectory 1 has no reward, and others have"):
        ps.write_trajectories(tmp_path / "data", wrong, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="no trajectories"):
        ps.write_trajectories(tmp_path / "data", [], tokenizer=tokenizer)
    assert not (tmp_path / "data").exists()


def test_files_of_records(tokenizer, tmp_path, capsys):
    sampled = ids(tokenizer, "It is 42.<|im_end|>")
    given = {"prompt_ids": [5, 6], "completion_ids": sampled, "logprobs": [-1.0] * len(sampled)}
    rendered = {
        "messages": QUESTION,
        "response_ids": sampled,
        "log_probabilities": [-1.0] * len(sampled),
    }
    records = [
        {**given, "reward": 1.0, "group": "q"},
        {"steps": [rendered], "reward": 0.0, "group": "q"},
        {"reward": 1.0},
    ]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    how = {"tokenizer": tokenizer, "template": CHATML}
    with pytest.raises(RecordError, match=r"records\.jsonl:3: step 0 has no sampled ids"):
        ps.prepare_trajectories(path, output=tmp_path / "data", **how)
    assert not (tmp_path / "data").exists()
    data = ps.prepare_trajectories(path, output=tmp_path / "data", on_error="skip", **how)
    assert len(data) == 1
    assert data[0].tree.value("reward").tolist() == [1.0, 0.0]
    said = capsys.readouterr().err
    assert "2 trajectories in 1 groups, 2 paths" in said
    assert "1 records skipped, the first:" in said
    with pytest.raises(ConfigError, match="history must be one of"):
        ps.prepare_trajectories(path, output=tmp_path / "more", history="all", **how)


def test_a_truncated_file_is_said(tokenizer, tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"prompt_ids": [5], "completion_ids": [6], "rew')
    with pytest.raises(RecordError, match=r"records\.jsonl:1"):
        ps.prepare_trajectories(path, tokenizer=tokenizer, output=tmp_path / "data")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            '{"prompt_ids": [5], "response_ids": [6], "logprobs": [-1, -1]}',
            "2 log-prob",
        ),
        ('{"prompt_ids": [5], "response_ids": [99999]}', "give the engine's tokenizer"),
        ('{"prompt_ids": [99999], "response_ids": [6]}', "its prompt: id 99999"),
        ('{"prompt_ids": [5], "response_ids": [6], "logprobs": [NaN]}', "expected"),
        ('{"prompt_ids": [5], "response_ids": [6], "reward": NaN}', "expected"),
        ('{"group": "nowhere", "reward": 1.0}', "no sampled ids.*expected response_ids"),
        ('{"prompt_ids": [5], "response_ids": [6]', "not JSON.*it may have been cut"),
        ("[5]", "object"),
    ],
)
def test_bad_records_have_file_line_and_cure(line, said, tokenizer, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt_ids": [5], "response_ids": [6]}\n' + line + "\n")
    with pytest.raises(RecordError, match=rf"bad\.jsonl:2.*({said})"):
        ps.prepare_trajectories(path, tokenizer=tokenizer, output=tmp_path / "data", progress=False)
    assert not (tmp_path / "data").exists()


def test_a_truncated_parquet_file_is_said(answers, tokenizer, tmp_path):
    path = tmp_path / "cut.parquet"
    parquet.write_table(pa.table({"prompt_ids": [[5]], "response_ids": [[6]]}), path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(RecordError, match=r"cut\.parquet"):
        ps.prepare_trajectories(path, tokenizer=tokenizer, output=tmp_path / "data", progress=False)


def test_a_policy_learns_from_them(answers, tokenizer, tmp_path):
    more = [finished(tokenizer, "It is 4.<|im_end|>", reward=1.0, group="b"), *answers]
    ps.write_trajectories(tmp_path / "rounds", more, tokenizer=tokenizer, append=True)
    model = ps.build_model(layers=1, width=16, heads=2, vocab_size=tokenizer.vocab_size)
    source = ps.Source(str(tmp_path / "rounds" / "*"))
    loader = ps.Loader(source, sequence_length=128, rows_per_step=1)
    run = ps.train(
        model, loader, output=tmp_path / "run", steps=2, threads=1, progress=False, policy={}
    )
    assert [one["step"] for one in run.metrics] == [1, 2]
    assert all(np.isfinite(one["loss"]) for one in run.metrics)


def test_paths_are_stored_apart_if_asked_for(answers, tokenizer, tmp_path):
    records = [
        {
            "prompt_ids": [5, 6, 7, 8],
            "completion_ids": ids(tokenizer, "It."),
            "reward": n,
            "group": "q",
        }
        for n in (0, 1)
    ]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    sizes = [
        ps.prepare_trajectories(
            path, tokenizer=tokenizer, output=tmp_path / str(share), share=share, progress=False
        ).num_tokens
        for share in (True, False)
    ]
    assert sizes[1] == 2 * (4 + len(ids(tokenizer, "It.")))
    assert sizes[0] < sizes[1]
    tokenizer.save(tmp_path / "tokenizer")
    given = ["prepare", str(path), "-t", str(tmp_path / "tokenizer"), "--no-share"]
    found = call_penstock(*given, "--trajectories", "-o", str(tmp_path / "apart"))
    assert found.exit_code == 0, found.output
    assert ps.open_dataset(tmp_path / "apart").num_tokens == sizes[1]
    with pytest.raises(ConfigError, match="--no-share are for --trajectories"):
        call_penstock(*given, "-o", str(tmp_path / "no"))
