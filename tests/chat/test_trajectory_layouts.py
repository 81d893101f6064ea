"""Records as other programs wrote them: small literals, with the version of each in a comment."""

import copy
import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from chat_makers import make_tokenizer

import penstock as ps
from penstock.chat import TrajectoryReader
from penstock.core.errors import ConversationError, RecordError
from penstock.data.prepare.trajectories import read_trajectories

# verl 0.9.1: rows of a DataProto, as `item.batch[name].tolist()`; prompts are padded on the left.
VERL = [
    {
        "prompts": [0, 5, 6, 7],
        "responses": [8, 9, 0],
        "response_mask": [1, 1, 0],
        "attention_mask": [0, 1, 1, 1, 1, 1, 0],
        "rollout_log_probs": [-0.5, -0.25, 0.0],
        "rm_scores": [0.0, 1.0, 0.0],
        "advantages": [0.5, 0.25, 0.0],
        "uid": "a",
    },
    {
        "prompts": [0, 0, 5, 6],
        "responses": [8, 10, 11],
        "response_mask": [1, 0, 1],
        "attention_mask": [0, 0, 1, 1, 1, 1, 1],
        "rollout_log_probs": [-0.5, 0.0, -0.75],
        "rm_scores": [0.0, 0.0, 0.25],
        "advantages": [-0.5, 0.0, -0.25],
        "uid": "a",
    },
]
# TRL 1.16.0: what rollout_func gives, with the group and the reward that its caller added.
TRL = {
    "prompt_ids": [[3, 4, 5], [3, 4, 5]],
    "completion_ids": [[5, 6, 7, 1], [6, 6]],
    "logprobs": [[-0.5, -0.25, 0.0, -0.125], [-0.5, -0.25]],
    "env_mask": [[1, 1, 0, 1], [1, 1]],
    "env_reward": [0.0, 1.0],
    "group": ["a b c", "a b c"],
    "reward": [0.0, 1.0],
}
# prime-rl: a TrainingSample as msgspec.structs.asdict gives it; context and answers in one list.
SAMPLE = {
    "token_ids": [5, 6, 7, 8, 9, 10, 12],
    "mask": [False, False, False, True, True, False, True],
    "logprobs": [0.0, 0.0, 0.0, -0.5, -0.25, 0.0, -0.75],
    "temperatures": [0.0, 0.0, 0.0, 0.7, 0.7, 0.0, 0.7],
    "env_name": "env",
    "reward": 1.0,
    "advantages": [0.0, 0.0, 0.0, 0.5, 0.25, 0.0, 0.125],
}


def node(parent, ids, mask, logprobs=()):
    return {
        "parent": parent,
        "semantic_parents": [],
        "message": {"role": "assistant" if any(mask) else "user", "content": "x"},
        "sampled": any(mask),
        "token_ids": ids,
        "mask": mask,
        "is_content": [],
        "logprobs": list(logprobs),
    }


# verifiers 0.4.0: a line of traces.jsonl, without fields that are not read. The second prompt goes
# on, the third rewrote the first reply.
TRACE = {
    "version": 1,
    "verifiers": {"version": "0.4.0"},
    "task": {"type": "Task", "data": {"prompt": "6 x 7?"}, "key": "q1"},
    "agent": {"config": {"model": None}, "name": "agent", "trainable": True},
    "nodes": [
        node(None, [5, 6], [False, False]),
        node(0, [7, 8, 9], [False, True, True], [-0.5123, -0.25]),
        node(1, [10], [False]),
        node(2, [11, 12], [False, True], [-0.5123]),
        node(0, [8], [False]),
        node(4, [10], [False]),
        node(5, [11, 13, 14], [False, True, True], [-0.5123, -0.25]),
    ],
    "calls": [
        {"node": 1, "sampling": {"temperature": 0.7}, "finish_reason": "stop"},
        {"node": 3, "sampling": {"temperature": 0.7}, "finish_reason": "stop"},
        {"node": 6, "sampling": {"temperature": 0.7}, "finish_reason": "length"},
    ],
    "rewards": {
        "right": {"score": 1.0, "weight": 0.5},
        "short": {"score": 0.5, "weight": 1.0},
        "unscored": None,
    },
    "ok": True,
    "errors": [],
}
EPISODE = {
    "id": "5a",
    "group": {"id": "g7"},
    "run": {"type": "train", "work": {"step": 3, "policy": {"start": 2, "end": 3}}},
    "ok": True,
    "errors": [],
    "traces": [TRACE],
}
TOKENS = {
    "prompt_ids": [5, 6, 7],
    "prompt_mask": [0, 0, 0],
    "completion_ids": [8, 9],
    "completion_mask": [1, 1],
    "completion_logprobs": [-0.5, -0.25],
    "is_truncated": True,
    "routed_experts": None,
}
# verifiers 0.1.14: a line of results.jsonl that `--state-columns trajectory` wrote.
RESULT = {
    "example_id": 4,
    "prompt": [{"role": "user", "content": "q"}],
    "completion": [{"role": "assistant", "content": "42"}],
    "reward": 1.0,
    "error": None,
    "is_truncated": True,
    "trajectory": [
        {
            "prompt": [{"role": "user", "content": "q"}],
            "response": {
                "id": "r",
                "message": {
                    "role": "assistant",
                    "content": "42",
                    "finish_reason": "length",
                    "tokens": TOKENS,
                },
            },
            "tokens": TOKENS,
            "reward": None,
            "advantage": None,
            "is_truncated": True,
        }
    ],
}
# vLLM 0.33 (its schema): /v1/chat/completions with n=2, logprobs and return_token_ids.
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "prompt_token_ids": [5, 6, 7],
    "choices": [
        {
            "index": place,
            "message": {"role": "assistant", "content": "x"},
            "logprobs": {"content": [{"token": "x", "logprob": -0.5, "top_logprobs": []}]},
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": [8 + place],
        }
        for place in range(2)
    ],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("layouts"), ["<s>", "</s>"], eos="</s>")


@pytest.fixture
def reader(tokenizer):
    return TrajectoryReader(tokenizer=tokenizer, variables={})


def spelled(found):
    """Ids, weights and log-probabilities of each path."""
    return [
        (
            path.ids.tolist(),
            path.weights.tolist(),
            [round(float(one), 4) for one in path.log_probabilities],
        )
        for path in found.paths
    ]


def test_padding_of_verl_is_no_token(reader):
    first, second = (reader.read(one) for one in VERL)
    assert spelled(first) == [([5, 6, 7, 8, 9], [0, 0, 0, 1, 1], [0, 0, 0, -0.5, -0.25])]
    assert spelled(second) == [([5, 6, 8, 10, 11], [0, 0, 1, 0, 1], [0, 0, -0.5, 0, -0.75])]
    assert (first.reward, second.reward, first.group) == (1.0, 0.25, "a")
    assert first.step_advantages == ((0.5, 0.25),)


def test_numbers_of_tokens_are_a_column(tokenizer, tmp_path):
    path = tmp_path / "verl.parquet"
    parquet.write_table(pa.Table.from_pylist(VERL), path)
    data = ps.prepare_trajectories(
        path, tokenizer=tokenizer, output=tmp_path / "data", progress=False
    )
    [document] = data
    assert sorted(document.columns["advantages"][document.loss_weights > 0].tolist()) == [
        -0.5, -0.25, 0.25, 0.5,
    ]  # fmt: skip
    assert document.tree.value("reward").tolist() == [1.0, 0.25]


@pytest.mark.parametrize("name", ["verl", "trl", "sample", "episode", "trace", "result", "answer"])
def test_parquet_gives_what_json_lines_give(name, reader, tmp_path):
    """Arrow gives each record all fields, with nulls where it has none."""
    records = {
        "verl": VERL,
        "trl": [TRL],
        "sample": [SAMPLE, {**SAMPLE, "reward": None}],
        "episode": [EPISODE, {**EPISODE, "group": None}],
        "trace": [TRACE, changed(1, logprobs=[-1.0, -2.0])],
        "result": [RESULT],
        "answer": [ANSWER],
    }[name]
    path = tmp_path / "records"
    parquet.write_table(pa.Table.from_pylist(records), path.with_suffix(".parquet"))
    path.with_suffix(".jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    found, expected = (
        [*read_trajectories(path.with_suffix(suffix), reader)] for suffix in (".parquet", ".jsonl")
    )
    assert [str(one) for one in found] == [str(one) for one in expected]
    assert not [one for one in found if isinstance(one, RecordError)]


def test_log_probabilities_of_the_trainer_stand_in_for_those_of_the_engine(reader):
    record = {**VERL[0], "old_log_probs": [-0.75, -0.5, 0.0]}
    assert spelled(reader.read(record))[0][2][3:] == [-0.5, -0.25]
    del record["rollout_log_probs"]
    assert spelled(reader.read(record))[0][2][3:] == [-0.75, -0.5]


def test_a_batch_of_trl(reader):
    first, second = reader.read_all(TRL)
    assert spelled(first) == [
        ([3, 4, 5, 5, 6, 7, 1], [0, 0, 0, 1, 1, 0, 1], [0, 0, 0, -0.5, -0.25, 0, -0.125])
    ]
    assert (first.reward, second.reward, second.group) == (0.0, 1.0, "a b c")


def test_context_and_answers_in_one_list(reader):
    found = reader.read(SAMPLE)
    assert spelled(found) == [
        ([5, 6, 7, 8, 9, 10, 12], [0, 0, 0, 1, 1, 0, 1], [0, 0, 0, -0.5, -0.25, 0, -0.75])
    ]
    assert found.step_advantages == ((0.5, 0.25, 0.0, 0.125),)
    assert (found.reward, found.temperature) == (1.0, 0.7)


def test_nodes_of_a_trace_are_steps(reader):
    [found] = reader.read_all(EPISODE)
    logs = [-0.5123, -0.25]
    assert spelled(found) == [
        ([5, 6, 7, 8, 9, 10, 11, 12], [0, 0, 0, 1, 1, 0, 0, 1], [0, 0, 0, *logs, 0, 0, -0.5123]),
        ([5, 6, 8, 10, 11, 13, 14], [0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, *logs]),
    ]
    assert (found.reward, found.group, found.version) == (1.0, "g7", 2)
    assert (found.truncated, found.temperature) == (True, 0.7)
    # prime-rl writes traces alone, too: the question is then that of the task.
    [alone] = reader.read_all({**TRACE, "ok": True})
    assert spelled(alone) == spelled(found)
    assert (alone.group, alone.version) == ("q1", None)


def test_only_agents_that_are_trained_are_read(reader):
    judge = {**TRACE, "agent": {"name": "judge", "trainable": False}}
    assert len([*reader.read_all({**EPISODE, "traces": [TRACE, judge, TRACE]})]) == 2
    [wrong] = reader.read_all({**EPISODE, "traces": [judge]})
    assert "holds no trace of an agent that is trained" in str(wrong)


def test_a_summary_from_which_the_agent_did_not_go_on_is_not_trained(reader):
    trace = copy.deepcopy(TRACE)
    trace["nodes"][6]["semantic_parents"] = [{"node": 3, "type": "compaction_attempt"}]
    [found] = reader.read_all(trace)
    assert len(found.paths) == 1
    trace["nodes"].append(node(None, [5, 14], [False, True], [-0.5]))
    trace["nodes"][7]["semantic_parents"] = [{"node": 6, "type": "compaction"}]
    [found] = reader.read_all(trace)
    assert len(found.paths) == 3


def test_advantages_of_nodes(reader):
    trace = copy.deepcopy(TRACE)
    for place, given in ((1, [1.0, 2.0]), (3, [3.0]), (6, [4.0, 5.0])):
        trace["nodes"][place]["advantages"] = given
    [found] = reader.read_all(trace)
    assert found.step_advantages == ((1.0, 2.0), (3.0,), (4.0, 5.0))


def test_results_of_older_verifiers(reader):
    found = reader.read(RESULT)
    assert spelled(found) == [([5, 6, 7, 8, 9], [0, 0, 0, 1, 1], [0, 0, 0, -0.5, -0.25])]
    assert (found.reward, found.group, found.truncated) == (1.0, "4", True)
    [step] = RESULT["trajectory"]
    unflagged = {name: value for name, value in step.items() if name != "is_truncated"}
    tokens = {**TOKENS, "is_truncated": False}
    found = reader.read({**RESULT, "trajectory": [{**unflagged, "tokens": tokens}]})
    assert found.truncated


def test_choices_of_a_server_are_records(reader):
    answer = copy.deepcopy(ANSWER)
    for place, choice in enumerate(answer["choices"]):
        choice["reward"] = float(place)
    found = [*reader.read_all({**answer, "group": "q"})]
    assert [spelled(one)[0][0] for one in found] == [[5, 6, 7, 8], [5, 6, 7, 9]]
    assert [one.reward for one in found] == [0.0, 1.0]
    # /v1/completions has the ids of the prompt in each choice, and other log-probabilities.
    choice = {
        "text": "x",
        "logprobs": {"token_logprobs": [-0.5], "tokens": ["x"]},
        "token_ids": [8],
        "prompt_token_ids": [5, 6, 7],
    }
    [found] = reader.read_all({"object": "text_completion", "choices": [choice]})
    assert spelled(found) == [([5, 6, 7, 8], [0, 0, 0, 1], [0, 0, 0, -0.5])]


def test_a_reward_of_the_only_step_is_that_of_the_trajectory(reader):
    step = {"prompt_ids": [1], "response_ids": [2], "reward": 0.5, "advantage": 2.0}
    found = reader.read({"steps": [step]})
    assert (found.reward, found.advantage) == (0.5, 2.0)


def test_log_probabilities_in_lists_and_null(reader):
    record = {"prompt_ids": [1], "completion_ids": [2, 3], "env_mask": [1, 0]}
    found = reader.read({**record, "logprobs": [[-0.5], None]})
    assert spelled(found) == [([1, 2, 3], [0, 1, 0], [0, -0.5, 0])]
    with pytest.raises(ConversationError, match=r"of token 0 is None.*Engines write null for NaN"):
        reader.read({**record, "logprobs": [None, 0.0]})


def changed(place, **fields):
    trace = copy.deepcopy(TRACE)
    trace["nodes"][place] |= fields
    return trace


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({**VERL[0], "attention_mask": [1, 1]}, "has 2 entries for 4 . 3 tokens of prompts"),
        ({**SAMPLE, "mask": [False] * 7}, "has 7 entries, 0 of them set, for 7 token_ids"),
        ({**SAMPLE, "mask": [False, True]}, "has 2 entries, 1 of them set, for 7 token_ids"),
        (
            {**RESULT, "error": {"error_chain_str": "no box"}},
            "failed .no box.; set on_error to skip",
        ),
        (
            {**TRACE, "ok": False, "errors": [{"type": "SandboxError", "message": "gone"}]},
            "the rollout failed .SandboxError: gone.; set on_error to skip",
        ),
        (changed(3, token_ids=[], mask=[]), "node 3 was sampled and has 0 token_ids.*type train"),
        (changed(3, logprobs=[-1, -1]), "node 3 has 2 numbers for 1 sampled tokens"),
        (changed(3, parent=5), "node 3 has the parent 5; expected an earlier node"),
        (changed(3, parent="x"), "node 3 has the parent 'x'; expected an earlier node"),
        ({**TRACE, "nodes": TRACE["nodes"][:1]}, "hold no sampled message"),
        ({"steps": [ANSWER]}, "step 0 has 2 choices; expected the one that was taken"),
        ({**ANSWER, "reward": 1.0}, "2 choices has one reward or advantage; give each choice"),
        # verl's rollout_data_dir and TRL's log_completions: text alone.
        ({"input": "q", "output": "a", "score": 1.0}, "has no sampled ids.*Text is not enough"),
        ({"prompt_ids": [1], "response_ids": [2], "rm_scores": ["x"]}, "a score of tokens is"),
    ],
)
def test_what_does_not_fit_is_named(record, said, reader):
    [wrong] = reader.read_all(record, "a.jsonl:3")
    assert isinstance(wrong, ConversationError)
    assert str(wrong).startswith("a.jsonl:3: ")
    with pytest.raises(ConversationError, match=said):
        raise wrong


def test_each_answer_of_a_batch_is_named(tokenizer, tmp_path):
    path = tmp_path / "batch.jsonl"
    wrong = {**TRL, "logprobs": [TRL["logprobs"][0], [-0.5]]}
    path.write_text(json.dumps(TRL) + "\n" + json.dumps(wrong) + "\n")
    how = {"tokenizer": tokenizer, "progress": False}
    with pytest.raises(RecordError, match=r"batch\.jsonl:2, answer 1: step 0: 1 log-prob"):
        ps.prepare_trajectories(path, output=tmp_path / "data", **how)
    data = ps.prepare_trajectories(path, output=tmp_path / "data", on_error="skip", **how)
    assert data[0].tree.value("reward").tolist() == [0.0, 1.0, 0.0]
