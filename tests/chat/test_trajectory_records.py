"""Records of trajectories in every layout, and what is made of them; wrong ones name their step."""

import numpy as np
import pytest
from chat_makers import make_tokenizer

from makers.tokenizers import CHATML
from penstock.chat import Trajectory, TrajectoryReader, load_template
from penstock.chat.trajectories.layouts import unpacked
from penstock.core.errors import ConfigError, ConversationError

PROMPT, ANSWER, LOGS = [5, 6, 7], [8, 9], [-0.5, -0.25]
SAID = {"role": "assistant", "content": "x"}
LAYOUTS = {
    "ours": {
        "group": "q1",
        "reward": 1.0,
        "steps": [{"prompt_ids": PROMPT, "response_ids": ANSWER, "log_probabilities": LOGS}],
    },
    "flat": {"prompt_ids": PROMPT, "response_ids": ANSWER, "log_probabilities": LOGS, "reward": 1},
    "vllm": {
        "reward": 1,
        "steps": [
            {
                "prompt_token_ids": PROMPT,
                "choices": [
                    {
                        "token_ids": ANSWER,
                        "logprobs": {"content": [{"logprob": one} for one in LOGS]},
                        "message": SAID,
                        "finish_reason": "length",
                    }
                ],
            }
        ],
    },
    "verl": {
        "prompts": PROMPT,
        "responses": ANSWER,
        "response_mask": [1, 1],
        "rollout_log_probs": LOGS,
        "reward_score": 1.0,
        "uid": "q1",
    },
    "trl": {
        "prompt_ids": PROMPT,
        "completion_ids": ANSWER,
        "logprobs": LOGS,
        "env_mask": [1, 1],
        "reward": 1.0,
    },
    "prime-rl": {
        "prompt_ids": PROMPT,
        "prompt_mask": [0, 0, 0],
        "completion_ids": ANSWER,
        "completion_mask": [True, True],
        "completion_logprobs": LOGS,
        "reward": 1.0,
        "example_id": 4,
    },
    "verifiers": {
        "reward": 1.0,
        "example_id": 4,
        "trajectory": [
            {
                "prompt": [{"role": "user", "content": "q"}],
                "completion": [SAID],
                "response": {"choices": [{"message": SAID, "finish_reason": "stop"}]},
                "tokens": {
                    "prompt_ids": PROMPT,
                    "prompt_mask": [0, 0, 0],
                    "completion_ids": ANSWER,
                    "completion_mask": [1, 1],
                    "completion_logprobs": LOGS,
                },
            }
        ],
    },
    "slime": {
        "tokens": [*PROMPT, *ANSWER],
        "response_length": 2,
        "loss_mask": [1, 1],
        "rollout_log_probs": LOGS,
        "reward": 1.0,
    },
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    controls = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    return make_tokenizer(tmp_path_factory.mktemp("records"), controls, eos="<|im_end|>")


@pytest.fixture
def reader(tokenizer):
    return TrajectoryReader(tokenizer=tokenizer, variables={})


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_gives_the_same(name, reader):
    found = reader.read(LAYOUTS[name])
    [path] = found.paths
    assert path.ids.tolist() == [*PROMPT, *ANSWER]
    assert path.weights.tolist() == [0, 0, 0, 1, 1]
    assert path.log_probabilities.tolist() == [0, 0, 0, *LOGS]
    assert found.reward == 1.0
    assert found.has_log_probabilities
    assert found.truncated == (name == "vllm")
    groups = {"ours": "q1", "verl": "q1", "prime-rl": "4", "verifiers": "4"}
    assert found.group == groups.get(name)


def test_a_batch_is_as_many_records():
    batch = {
        "prompt_ids": [[1], [2]],
        "completion_ids": [[3], [4, 5]],
        "logprobs": [[-1.0], [-1.0, -2.0]],
        "reward": [0.0, 1.0],
        "group": "q",
    }
    assert list(unpacked(batch)) == [
        {"prompt_ids": [1], "completion_ids": [3], "logprobs": [-1.0], "reward": 0.0, "group": "q"},
        {
            "prompt_ids": [2],
            "completion_ids": [4, 5],
            "logprobs": [-1.0, -2.0],
            "reward": 1.0,
            "group": "q",
        },
    ]
    assert list(unpacked(LAYOUTS["trl"])) == [LAYOUTS["trl"]]


def test_tokens_of_the_environment_are_read_and_not_trained(reader):
    record = {**LAYOUTS["trl"], "env_mask": [1, 0]}
    [path] = reader.read(record).paths
    assert path.weights.tolist() == [0, 0, 0, 1, 0]


def step(prompt, ids, **more):
    return {"prompt_ids": prompt, "response_ids": ids, **more}


def test_a_step_extends_the_longest_path_that_its_prompt_begins_with(reader):
    steps = [
        step([1, 2], [3]),  # path 0: 1 2 3
        step([1, 2, 3, 4], [5]),  # goes on: 1 2 3 4 5
        step([1, 9], [8]),  # a sub-agent: path 1
        step([1, 2, 3, 4, 5, 6], [7]),  # path 0 again
        step([1, 9, 8, 1], [2]),  # path 1 again
        step([1, 2, 3, 7], [6]),  # path 0 is further on: a branch
    ]
    found = reader.read({"steps": steps}).paths
    assert [path.ids.tolist() for path in found] == [
        [1, 2, 3, 4, 5, 6, 7],
        [1, 9, 8, 1, 2],
        [1, 2, 3, 7, 6],
    ]
    assert [path.replies for path in found] == [(0, 1, 3), (2, 4), (5,)]
    # Each reply is trained where it was sampled.
    assert found[2].weights.tolist() == [0, 0, 0, 0, 1]
    assert sum(path.weights.sum() for path in found) == 6


def test_the_longest_is_chosen_and_not_the_first(reader):
    steps = [step([1], [2]), step([1, 2, 3], [4]), step([1], [2]), step([1, 2, 3, 4, 5], [6])]
    found = reader.read({"steps": steps}).paths
    assert [path.replies for path in found] == [(0, 1, 3), (2,)]


def test_messages_are_rendered_where_no_ids_are_given(tokenizer):
    template = load_template(CHATML, tokenizer=tokenizer)
    reader = TrajectoryReader(tokenizer=tokenizer, template=template, variables={})
    ids = tokenizer.encode("It is 42.<|im_end|>", allow_control=True).tolist()
    asked = [{"role": "user", "content": "What is 6 times 7?"}]
    steps = [
        {"messages": asked, "response_ids": ids, "finish_reason": "stop"},
        {"messages": asked, "response_ids": ids, "log_probabilities": None},
    ]
    found = reader.read({"steps": steps})
    trajectory = Trajectory(tokenizer, template)
    for _ in range(2):
        trajectory.prompt(asked)
        trajectory.reply(ids)
    assert found.paths[0].ids.tolist() == trajectory.paths()[0].ids.tolist()
    assert not found.has_log_probabilities


def test_numbers_of_steps(reader):
    steps = [step([1], [2], reward=0.5, advantage=-1.0), step([1, 2, 3], [4], advantage=2.0)]
    found = reader.read({"steps": steps, "reward": 3, "temperature": 0.7})
    assert found.step_rewards == (0.5, 0.0)
    assert found.step_advantages == (-1.0, 2.0)
    assert (found.reward, found.temperature, found.advantage) == (3.0, 0.7, None)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({}, r"here: step 0 has no sampled ids \(it has: nothing\)"),
        ({"steps": []}, "has no steps"),
        ({"steps": [3]}, "step 0 is 3; expected an object"),
        ({"steps": [step([1], [2]), {"response_ids": [3]}]}, "step 1 has no prompt_ids"),
        ({"steps": [{"messages": [], "response_ids": [3]}]}, "give a template"),
        (step([1], [2], log_probabilities=[-1, -2]), "step 0: 2 log-probabilities for 1 tokens"),
        (step([1], [2], log_probabilities=[float("nan")]), "token 0 is nan"),
        (step([1], [2], mask=[1, 1]), "2 weights for 1 tokens"),
        (step([1], [10**7]), "id 10000000 is not in the vocabulary"),
        (step([10**7], [1]), "step 0, its prompt: id 10000000"),
        (step([1], ["a"]), "response_ids is .*; expected a list of whole numbers"),
        (step([], [1]), "its prompt has no token"),
        (step([1], [2], reward="high"), "reward is 'high'; expected a number"),
        (step([1], [2], reward=float("inf")), "the reward of a trajectory is inf"),
        ({"tokens": [1, 2], "response_length": 2}, "expected how many of its 2 tokens"),
        (step([1], [2], logprobs=[{"x": 1}]), "expected a number for each token"),
        (step([1], [2], mask=3), "step 0: mask is 3; expected a number for each token"),
        (step([1], [2], advantages=[1, 2]), "2 advantages for 1 tokens"),
        (step([1], [2], advantages=["x"]), "expected a number, or one for each sampled token"),
        ({"steps": [step([1], [2])] * 2, "advantages": [1]}, "belong to a step"),
    ],
)
def test_wrong_records_name_what_is_wrong(record, said, reader):
    with pytest.raises(ConversationError, match=said):
        reader.read(record, "here")


def test_a_trajectory_that_is_over(tokenizer):
    trajectory = Trajectory(tokenizer, CHATML)
    with pytest.raises(ConfigError, match="without a reply"):
        trajectory.finish(reward=1.0)
    trajectory.prompt([{"role": "user", "content": "q"}])
    trajectory.reply([5, 6], LOGS, finish_reason="length")
    found = trajectory.finish(reward=1.0, group="q1", step_advantages=[2.0])
    assert found.truncated
    assert found.sampled == 2
    assert np.allclose(found.paths[0].log_probabilities[-2:], LOGS)
    with pytest.raises(ConfigError, match="step_rewards: 2 numbers for 1 replies"):
        trajectory.finish(step_rewards=[1, 2])
