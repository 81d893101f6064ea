"""Rollouts: answers sampled from a model, judged by a function of yours, as a dataset that a policy
learns from.

Each prompt becomes one document: a prefix tree of its answers, with their rewards, with what a
policy must know of the sampler (temperature, whether an answer was cut, filters), and with the
log-probability that the model gave each token at that temperature (the column `log_probabilities`).
"""

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.chat.records.tools import read_tools
from penstock.core.errors import ConfigError, RecordError
from penstock.core.folders import local_path
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.core.randomness import key_for
from penstock.core.terminal import Progress
from penstock.data.shards import TreeDocument, build_tree
from penstock.data.shards.dataset import Dataset
from penstock.data.shards.format.trees import POLICY_VERSION, REWARD, TEMPERATURE, TRUNCATED
from penstock.data.shards.memory import weight_spans, write_dataset
from penstock.data.sources.opening import open_sources
from penstock.data.sources.records import stop_at_damage
from penstock.learn.generation.session import fit_chat
from penstock.learn.generation.settings import Generated, Sampling
from penstock.learn.training.path_settings import OLD_COLUMN
from penstock.models.own_code import check_signature, load_own_code
from penstock.use.runs.environments import finite_number
from penstock.use.runs.opening import Opened, chat_of, writer_of

Reward = Callable[..., float]
"""(record with the prompt, text of the answer) → its reward. A function with a parameter
`finish_reason` is told by it why the answer ended: stop or length.
"""
FINISH_REASON = "finish_reason"
AT_ONCE = 32
"""Answers that are written at the same time."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """What was written."""

    dataset: Dataset
    prompts: int
    mean_reward: float
    spread: int
    """Prompts whose answers have different rewards: only these teach anything."""
    answer_tokens: float
    """Mean tokens of an answer."""
    stopped: float
    """Share of answers that ended by themselves."""
    examples: tuple[tuple[str, str, float], ...]
    """(prompt, answer, reward) of the first answer to a few prompts."""

    def __str__(self) -> str:
        return (
            f"{self.prompts:,} prompts: mean reward {self.mean_reward:.3f}, {self.spread:,} "
            f"with different rewards, {self.answer_tokens:.1f} tokens an answer, "
            f"{100 * self.stopped:.0f} % ended by themselves"
        )


def write_rollouts(
    opened: Opened,
    records: Iterable[JsonMapping],
    reward: Reward | str,
    output: str | Path,
    *,
    samples: int = 8,
    sampling: Sampling | None = None,
    version: int | None = None,
    progress: bool = True,
) -> Rollouts:
    """Sample answers, judge them, and write a dataset.

    Args:
        opened: The model.
        records: Each with `prompt`, a text, or with a conversation that the model's chat template
            renders, as `prompt` or `messages`.
        reward: The function, or its name (`module:function`, `path/to/file.py:function`); see
            `Reward`.
        output: A new folder.
        samples: Answers to each prompt, with different draws.
        sampling: How tokens are chosen; by default at temperature 1, of all tokens, as importance
            ratios assume. A policy uses the temperature; filters are stored, and refused by
            default.
        version: Of the policy that samples, stored with each token; None: not stored.
        progress: Show a bar.

    Raises:
        ConfigError: A setting is out of range, or the reward is no finite number.
        RecordError: A record has no prompt, or one that fills the context.
        OutputError: The folder is not empty, or cannot be written.
    """
    given_samples: object = samples
    if not isinstance(given_samples, int) or samples < 2:
        raise ConfigError(
            f"samples must be at least 2, as answers to a prompt are compared; got {samples!r}"
        )
    if version is not None and version < 0:
        raise ConfigError(f"version must be 0 or more, got {version}")
    judge = load_own_code(reward, "reward")
    told = _is_told(judge)
    if sampling is not None and sampling.temperature == 0:
        raise ConfigError(
            "temperature is 0, so all answers to a prompt would be the same; give one above 0"
        )
    base = replace(sampling or Sampling(), logprobs=0, tempered_logprobs=True)
    output = local_path(output, "the output of rollouts")
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output}: is not empty; choose another folder")
    given = list(records)
    prompts = [_prompt_ids(opened, record, number) for number, record in enumerate(given)]
    if not prompts:
        raise RecordError("there are no prompts")
    engine = writer_of(opened, min(AT_ONCE, samples * len(prompts))).engine
    # A model that cannot read trees learns from its answers, too: they are stored one after the
    # other.
    share = opened.reads_trees
    made: list[TreeDocument] = []
    tokens = stopped = spread = 0
    total = 0.0
    examples: list[tuple[str, str, float]] = []
    together = max(1, 4 * AT_ONCE // samples)
    with Progress(
        "sampling", total=len(prompts) * samples, unit=" answers", enabled=progress
    ) as bar:
        for begin in range(0, len(prompts), together):
            part = range(begin, min(begin + together, len(prompts)))
            asked = [prompts[number] for number in part for _ in range(samples)]
            how = [
                replace(base, seed=key_for(base.seed, "rollout", number, sample) >> 1)
                for number in part
                for sample in range(samples)
            ]
            written = engine.generate_all(asked, how)
            for place, number in enumerate(part):
                group = written[place * samples : (place + 1) * samples]
                rewards = [_judge(judge, given[number], one, told) for one in group]
                made.append(
                    _tree_of(
                        prompts[number], group, rewards, base.temperature, version, share=share
                    )
                )
                total += sum(rewards)
                spread += len(set(rewards)) > 1
                tokens += sum(len(one.tokens) for one in group)
                stopped += sum(one.finish_reason != "length" for one in group)
                if len(examples) < 3:
                    examples.append((shown(given[number]), group[0].text, rewards[0]))
            bar.advance(len(part) * samples)
    answers = samples * len(prompts)
    return Rollouts(
        dataset=_write(opened, made, output, base),
        prompts=len(prompts),
        mean_reward=total / answers,
        spread=spread,
        answer_tokens=tokens / answers,
        stopped=stopped / answers,
        examples=tuple(examples),
    )


def read_records(path: str | Path) -> Iterator[JsonMapping]:
    """The records of a file of any format, in order.

    Raises:
        RecordError: One cannot be read; names its place.
    """
    for part in open_sources([str(path)]):
        for block in part.objects(stop_at_damage):
            if block.rejects:
                raise RecordError(str(block.rejects[0]))
            yield from block.objects


def messages_of(record: JsonMapping, number: int) -> list[JsonObject]:
    """The conversation of a prompt: `prompt` (as TRL names it) or `messages`.

    Raises:
        RecordError: It has none.
    """
    for name in ("prompt", "messages"):
        given = record.get(name)
        if isinstance(given, list | tuple) and given:
            if all(isinstance(one, Mapping) for one in given):
                return _open_conversation([dict(one) for one in given], number)
            break
    raise RecordError(
        f"prompt {number}: expected a text or messages in 'prompt', or 'messages'; it has "
        f"{', '.join(record)}"
    )


def _open_conversation(messages: list[JsonObject], number: int) -> list[JsonObject]:
    """Messages that a reply may follow."""
    for place, one in enumerate(messages):
        if not isinstance(one.get("role"), str):
            raise RecordError(
                f"prompt {number}: message {place} has no role (it has {', '.join(one)}); expected "
                "role and content"
            )
    if messages[-1]["role"] == "assistant":
        raise RecordError(
            f"prompt {number}: its last message is the assistant's, so there is nothing to answer; "
            "leave it out of the prompt"
        )
    return messages


def unknown_tools(where: str = "tools") -> ConfigError:
    """The error of tools that a template does not write."""
    return ConfigError(
        f"{where}: the chat template writes none of them, so the model would not know of them; "
        "take a model whose template does, or leave tools out and describe them in a system message"
    )


def _prompt_ids(opened: Opened, record: JsonMapping, number: int) -> list[int]:
    if isinstance(record.get("prompt"), str):
        ids = [*opened.begin_ids, *opened.tokenizer.encode(record["prompt"]).tolist()]
    else:
        messages = messages_of(record, number)
        if opened.template is None:
            raise RecordError(
                f"prompt {number}: has messages, but {opened.run.path} has no chat template; "
                "give texts"
            )
        whole = partial(fit_chat, messages, opened.template, opened.tokenizer, room=sys.maxsize)
        tools = read_tools(record.get("tools"), f"prompt {number}: tools")
        ids = list(whole(tools=tools).ids)
        if tools and ids == list(whole().ids):
            raise unknown_tools(f"prompt {number}: tools")
    if not 0 < len(ids) < opened.context_length:
        raise RecordError(
            f"prompt {number}: has {len(ids)} tokens; expected 1 to {opened.context_length - 1}"
        )
    return ids


def _is_told(judge: Any) -> bool:
    """Whether a reward function asks why answers ended.

    Raises:
        ConfigError: It takes other arguments than those of `Reward`.
    """
    try:
        told = FINISH_REASON in inspect.signature(judge).parameters
    except (TypeError, ValueError):
        # Some built-in functions do not say what they take.
        told = False
    asked = partial(judge, **{FINISH_REASON: "stop"}) if told else judge
    check_signature(asked, "reward", ("record", "answer"))
    return told


def _judge(judge: Any, record: JsonMapping, answer: Generated, told: bool) -> float:
    text = answer.text
    found = judge(record, text, **({FINISH_REASON: answer.finish_reason} if told else {}))
    if (number := finite_number(found)) is None:
        raise ConfigError(
            f"reward: gave {found!r:.60} for the answer {text!r:.60}; expected a finite number"
        )
    return number


def _tree_of(
    prompt: list[int],
    group: Sequence[Generated],
    rewards: list[float],
    temperature: float,
    version: int | None,
    *,
    share: bool,
) -> TreeDocument:
    zeros = [0.0] * len(prompt)
    columns: dict[str, list[Any]] = {
        OLD_COLUMN: [
            np.array([*zeros, *(step.token for step in one.logprobs)], np.float32) for one in group
        ]
    }
    if version is not None:
        columns[POLICY_VERSION] = [
            np.full(len(prompt) + len(one.tokens), version, np.int32) for one in group
        ]
    return build_tree(
        [[*prompt, *one.tokens] for one in group],
        [[*zeros, *[1.0] * len(one.tokens)] for one in group],
        values={
            REWARD: rewards,
            TEMPERATURE: [temperature] * len(group),
            TRUNCATED: [float(one.finish_reason == "length") for one in group],
        },
        columns=columns,
        share=share,
    )


def _write(
    opened: Opened, made: Sequence[TreeDocument], output: Path, sampling: Sampling
) -> Dataset:
    return write_dataset(
        output,
        [one.tokens for one in made],
        spans=[weight_spans(one.loss_weights) for one in made],
        tokenizer=opened.tokenizer,
        columns={name: [one.columns[name] for one in made] for name in made[0].columns},
        trees=[one.tree for one in made],
        # So that a run on these data keeps the template.
        chat=chat_of(opened),
        sampling=stored_filters(sampling),
    )


def stored_filters(sampling: Sampling) -> JsonObject:
    """The filters of a sampling as JSON holds them: ids of biases become texts."""
    found: JsonObject = json.loads(json.dumps(sampling.filters()))
    return found


def shown(record: JsonMapping) -> str:
    """What a record asks, for people."""
    if isinstance(record.get("prompt"), str):
        return str(record["prompt"])
    return str(messages_of(record, 0)[-1].get("content"))
