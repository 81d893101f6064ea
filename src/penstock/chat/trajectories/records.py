"""Records of trajectories, in our own layout and in those of engines and other trainers.

    {"group": "q17", "reward": 1.0, "tools": [...], "steps": [
      {"messages": [new ones], "prompt_ids": [...], "response_ids": [...], "log_probabilities": [...],
       "message": {...}, "finish_reason": "stop", "mask": [1, ...], "reward": null, "advantage": null}]}

A step with `prompt_ids` is taken as it is: nothing is rendered. Without them, `messages` are the new
ones, and the prompt is rendered as `Trajectory` does. A record without `steps` is one step itself.

With a processor, messages may have images or sounds. Where ids are given too, they must have the
processor's tokens for them: for those of the path that the step extends and the new ones; where it
extends none, for its own or for all so far. Images may also stand next to the messages (`images`),
next to all steps, or in `multi_modal_data` (vLLM, verl).

The same things have other names elsewhere; each is read as it is:

| here | elsewhere |
|---|---|
| `steps` | `trajectory` (verifiers) |
| `prompt_ids` | `prompt_token_ids` (vLLM), `prompts` (verl) |
| `response_ids` | `token_ids` (vLLM), `completion_ids` (TRL, verifiers, prime-rl), `responses` (verl) |
| `log_probabilities` | `logprobs` (vLLM, TRL), `completion_logprobs`, `rollout_log_probs`, `response_logprobs` |
| `mask` | `completion_mask`, `env_mask`, `response_mask`, `loss_mask` |
| `reward` | `reward_score`, `score` |
| `group` | `uid` (verl), `example_id` (verifiers, prime-rl), `group_id` |

An answer of an OpenAI-compatible server (`choices` with `token_ids`) is a step, too; so are the
`tokens` of a step of verifiers. Of slime, `tokens` with `response_length` are one step. Batches,
padding, and traces of verifiers 0.3 or newer: `layouts.py`.
"""  # noqa: E501

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from penstock.chat.records.layout_settings import LayoutSettings
from penstock.chat.records.messages import read_messages
from penstock.chat.render.template import Template
from penstock.chat.trajectories.finished import FinishedTrajectory, GivenSteps
from penstock.chat.trajectories.layouts import (
    PROMPT,
    RESPONSE,
    TOKEN_SCORES,
    first_of,
    plain,
    unpacked,
    with_steps,
)
from penstock.chat.trajectories.paths import TokenPath
from penstock.chat.trajectories.prompt_images import TrajectoryImages, has_images
from penstock.chat.trajectories.replies import CUT, check_reply
from penstock.chat.trajectories.trajectory import History, Trajectory
from penstock.core.errors import ConfigError, ConversationError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.media.finding import folder_of
from penstock.media.images import ImageSettings
from penstock.media.placement import images_of
from penstock.media.processor import Processor
from penstock.media.records import media_fields, refuse_media
from penstock.tokenizers import Tokenizer

STEPS = ("steps", "trajectory")
LOGS = (
    "log_probabilities",
    "logprobs",
    "completion_logprobs",
    "response_logprobs",
    "rollout_log_probs",
    "log_probs",
    "old_log_probs",
)
MASK = ("mask", "completion_mask", "env_mask", "response_mask", "loss_mask")
REWARD = ("reward", "reward_score", "score")
ADVANTAGE = ("advantage", "advantages")
GROUP = ("group", "group_id", "uid", "example_id")
VERSION = ("policy_version",)
TOOLS = ("tools",)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One prompt and what was sampled after it."""

    messages: Sequence[JsonMapping] = ()
    """New messages, where nothing else says what was sent."""
    attachments: JsonMapping = field(default_factory=dict)
    """Images next to the messages, by the names of their fields."""
    prompt: Sequence[int] | None = None
    """Ids that were sent; None: rendered from messages."""
    ids: Sequence[int]
    logs: Sequence[float] | None = None
    mask: Sequence[float] | None = None
    message: JsonMapping | None = None
    finish_reason: str | None = None
    reward: float | None = None
    advantage: float | tuple[float, ...] | None = None
    """Of all its tokens; or of each."""
    temperature: float | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryReader:
    """Reads records.

    Args:
        tokenizer: Of the engine.
        template: For steps without ids; None: there are none.
        history: How their prompts go on after a reply; see `Trajectory`.
        stop_ids: As for `Trajectory`.
        variables: Variables of the template.
        processor: Of the engine's model; None: images are refused.
        image_settings: Which images are accepted.
    """

    tokenizer: Tokenizer
    template: Template | None = None
    history: History = "sampled"
    stop_ids: Sequence[int] = ()
    variables: JsonMapping
    processor: Processor | None = None
    image_settings: ImageSettings = field(default_factory=ImageSettings)

    def read(
        self, record: JsonMapping, where: str = "record", *, file: str = ""
    ) -> FinishedTrajectory:
        """One trajectory.

        Args:
            record: The record.
            where: Where it is, for errors.
            file: The file that it is in, at whose folder relative paths of images begin.

        Raises:
            ConversationError: The record holds none, or numbers that do not fit each other; names
                `where` and the step.
        """
        try:
            folder = folder_of(file, self.image_settings)
            return self._read(record, replace(self.image_settings, image_folder=folder))
        except (ConfigError, ConversationError) as error:
            raise ConversationError(f"{where}: {error}") from error

    def read_all(
        self, record: JsonMapping, where: str = "record", *, file: str = ""
    ) -> Iterator[FinishedTrajectory | ConversationError]:
        """The trajectories in a record that may hold several, such as a batch or an episode; for
        one that cannot be read, why. Arguments as for `read`.
        """
        try:
            parts = [*unpacked(record)]
        except ConversationError as error:
            yield ConversationError(f"{where}: {error}")
            return
        for number, part in enumerate(parts):
            try:
                place = where if len(parts) == 1 else f"{where}, answer {number}"
                yield self.read(part, place, file=file)
            except ConversationError as error:
                yield error

    def _read(self, record: JsonMapping, settings: ImageSettings) -> FinishedTrajectory:
        record = with_steps(record)
        steps = [*steps_of(record)]
        given = [step.prompt is not None for step in steps]
        if any(given) and not all(given):
            raise ConversationError(
                f"step {given.index(False)} has no prompt_ids, and others have; give them in all "
                "steps, or in none"
            )
        if all(given):
            paths = self._as_given(steps, settings)
        else:
            paths = self._rendered(record, steps, settings)
        # One step is the record itself, or says what it earned in its place.
        one = steps[0] if len(steps) == 1 else None
        reward = one.reward if one and one.reward is not None else _reward(record)
        mine = one.advantage if one else None
        advantage = _advantage(record) if mine is None else mine
        if isinstance(advantage, tuple) and mine is None:
            raise ConversationError("advantages of tokens belong to a step, not to the record")
        of_tokens = (advantage,) if isinstance(advantage, tuple) else ()
        return FinishedTrajectory(
            paths=paths,
            reward=reward,
            advantage=None if isinstance(advantage, tuple) else advantage,
            group=_group(record),
            truncated=steps[-1].finish_reason == CUT,
            temperature=_temperature(record, steps),
            version=_version(record),
            has_log_probabilities=all(step.logs is not None for step in steps),
            step_rewards=_of_steps(steps, "reward") if len(steps) > 1 else (),
            step_advantages=of_tokens or _advantages(steps),
        )

    def _as_given(
        self, steps: Sequence[RecordedStep], settings: ImageSettings
    ) -> tuple[TokenPath, ...]:
        seen = None
        if self.processor is not None:
            seen = TrajectoryImages(self.processor, settings, self.tokenizer)
        made, size = GivenSteps(seen), self.tokenizer.vocab_size
        for number, step in enumerate(steps):
            assert step.prompt is not None
            name = f"step {number}"
            prompt, _, _ = check_reply(f"{name}, its prompt", step.prompt, None, None, size)
            if not prompt:
                raise ConversationError(f"{name}: its prompt has no token")
            ids, logs, weights = check_reply(name, step.ids, step.logs, step.mask, size)
            images = images_of(_messages_of(step, name, seen))
            made.add(prompt, ids, logs, weights, images=images)
        return made.paths()

    def _rendered(
        self, record: JsonMapping, steps: Sequence[RecordedStep], settings: ImageSettings
    ) -> tuple[TokenPath, ...]:
        if self.template is None:
            raise ConversationError(
                "its steps have no prompt_ids, so prompts must be rendered: give a template"
            )
        trajectory = Trajectory(
            self.tokenizer,
            self.template,
            tools=first_of(record, TOOLS),
            history=self.history,
            stop_ids=self.stop_ids,
            processor=self.processor,
            image_settings=None if self.processor is None else settings,
            **{**self.variables, **(record.get("chat_template_kwargs") or {})},
        )
        seen = trajectory.pictures
        for number, step in enumerate(steps):
            try:
                new = _messages_of(step, "its messages", seen) or step.messages
                trajectory.prompt(new)
                trajectory.reply(
                    step.ids,
                    step.logs,
                    step.message,
                    finish_reason=step.finish_reason,
                    weights=step.mask,
                )
            except (ConfigError, ConversationError) as error:
                raise ConversationError(f"step {number}: {error}") from error
        return trajectory.paths()


def _messages_of(
    step: RecordedStep, name: str, seen: TrajectoryImages | None
) -> Sequence[JsonMapping]:
    """The new messages of a step, with its images as parts; none if it has no images.

    Raises:
        ConversationError: There are images, and no processor; or one cannot be read.
    """
    if not step.attachments and not has_images(step.messages):
        return ()
    messages: Sequence[JsonMapping] = step.messages or [{"role": "user", "content": ""}]
    if seen is None:
        refuse_media(messages, step.attachments, name)
        return ()
    read, _ = read_messages([*messages], "messages", LayoutSettings(), name)
    return seen.read(read, name, step.attachments)


def steps_of(record: JsonMapping) -> Iterator[RecordedStep]:
    """The steps of a record, by whatever names.

    Raises:
        ConversationError: It has none, or one without sampled ids.
    """
    listed = first_of(record, STEPS)
    steps = [record] if listed is None else listed
    if not isinstance(steps, list | tuple) or not steps:
        raise ConversationError("has no steps; expected a list of at least one")
    for number, step in enumerate(steps):
        if not isinstance(step, Mapping):
            raise ConversationError(f"step {number} is {step!r:.40}; expected an object")
        # Images next to the steps belong to the first prompt.
        own = {} if number or step is record else _attachments(record)
        yield _step({**own, **step} if own else step, number)


def _step(given: JsonMapping, number: int) -> RecordedStep:
    name = f"step {number}"
    found: dict[str, Any] = dict(plain(given, name))
    if isinstance(given.get("response"), Mapping):
        # verifiers keeps the server's answer next to its tokens.
        found = {**given["response"], **found}
    if isinstance(given.get("tokens"), Mapping):
        found |= given["tokens"]
    if isinstance(found.get("choices"), list | tuple) and found["choices"]:
        if len(found["choices"]) > 1:
            raise ConversationError(
                f"{name} has {len(found['choices'])} choices; expected the one that was taken"
            )
        found = {**found, **found["choices"][0]}
    prompt, ids = first_of(found, PROMPT), first_of(found, RESPONSE)
    if ids is None and isinstance(given.get("tokens"), list | tuple):
        length = found.get("response_length")
        if not isinstance(length, int) or not 0 < length < len(given["tokens"]):
            raise ConversationError(
                f"step {number} has tokens and response_length {length!r}; expected how many of "
                f"its {len(given['tokens'])} tokens were sampled"
            )
        cut = len(given["tokens"]) - length
        prompt, ids = given["tokens"][:cut], given["tokens"][cut:]
    if ids is None:
        raise ConversationError(
            f"step {number} has no sampled ids (it has: {', '.join(given) or 'nothing'}); expected "
            "response_ids. Text is not enough: encoded again, it has other ids"
        )
    message, mask = found.get("message"), first_of(found, MASK)
    return RecordedStep(
        messages=found.get("messages") or (),
        attachments=_attachments(given),
        prompt=_ids(prompt, f"step {number}: prompt_ids"),
        ids=_ids(ids, f"step {number}: response_ids") or (),
        logs=_logs(first_of(found, LOGS), mask, number),
        mask=_mask(mask, number),
        message=message if isinstance(message, Mapping) and message.get("role") else None,
        finish_reason=_finish_reason(found),
        reward=_reward(found),
        advantage=_advantage(found, len(ids)),
        temperature=_number(found, ("temperature",)),
    )


def _attachments(given: JsonMapping) -> JsonObject:
    """Images in the fields of a record or step, also where vLLM and verl have them."""
    found = given.get("multi_modal_data")
    return media_fields({**given, **found} if isinstance(found, Mapping) else given)


def _ids(value: object, name: str) -> Sequence[int] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(type(one) is int for one in value):
        raise ConversationError(f"{name} is {value!r:.60}; expected a list of whole numbers")
    return value


def _mask(value: Any, number: int) -> Sequence[float] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(
        isinstance(one, int | float) for one in value
    ):
        raise ConversationError(
            f"step {number}: mask is {value!r:.60}; expected a number for each token"
        )
    return value


def _logs(value: Any, mask: Any, number: int) -> Sequence[float] | None:
    """Log-probabilities: numbers, or as a server reports them, with those of other tokens. Of a
    token that is not trained, it may be null.
    """
    if isinstance(value, Mapping):
        value = value.get("content") or value.get("token_logprobs")
    if value is None:
        return None
    found = [_log(one) for one in value] if isinstance(value, list | tuple) else [value]
    for place, one in enumerate(found):
        unread = isinstance(mask, list | tuple) and place < len(mask) and not mask[place]
        if one is None and unread:
            found[place] = 0.0
        elif not isinstance(one, int | float):
            raise ConversationError(
                f"step {number}: the log-probability of token {place} is {one!r:.40}; expected a "
                "number for each token. Engines write null for NaN: leave the record out, or all "
                "its log-probabilities"
            )
    return found


def _log(one: Any) -> Any:
    """Of one token: a number, or the only one of a list, or one with its token."""
    if isinstance(one, list | tuple) and len(one) == 1:
        one = one[0]
    return one.get("logprob") if isinstance(one, Mapping) else one


def _finish_reason(found: JsonMapping) -> str | None:
    """Why a reply ended; verifiers has it in the message, and as a flag."""
    if found.get("is_truncated") is True:
        return CUT
    inside = found["message"].get("finish_reason") if _has_message(found) else None
    return found.get("finish_reason") or inside


def _has_message(found: JsonMapping) -> bool:
    return isinstance(found.get("message"), Mapping)


def _temperature(record: JsonMapping, steps: Sequence[RecordedStep]) -> float | None:
    given = _number(record, ("temperature",))
    if given is not None:
        return given
    found = {step.temperature for step in steps}
    return found.pop() if len(found) == 1 else None


def _reward(record: JsonMapping) -> float | None:
    """Its reward; that of verl is the sum of those of tokens."""
    scores = first_of(record, TOKEN_SCORES)
    if first_of(record, REWARD) is None and isinstance(scores, list | tuple):
        if not all(isinstance(one, int | float) for one in scores):
            raise ConversationError(f"a score of tokens is {scores!r:.60}; expected numbers")
        return float(sum(scores))
    return _number(record, REWARD)


def _advantage(record: JsonMapping, tokens: int | None = None) -> float | tuple[float, ...] | None:
    """Of all tokens of an answer, or a tuple with that of each."""
    value = first_of(record, ADVANTAGE)
    if not isinstance(value, list | tuple):
        return _number(record, ADVANTAGE)
    if not all(isinstance(one, int | float) for one in value):
        raise ConversationError(
            f"advantages are {value!r:.60}; expected a number, or one for each sampled token"
        )
    if tokens is not None and len(value) != tokens:
        raise ConversationError(f"{len(value)} advantages for {tokens} tokens")
    return tuple(float(one) for one in value)


def _advantages(steps: Sequence[RecordedStep]) -> tuple[float | tuple[float, ...], ...]:
    """Of each step, where there are several; empty where none has one."""
    if len(steps) < 2 or all(step.advantage is None for step in steps):
        return ()
    return tuple(0.0 if step.advantage is None else step.advantage for step in steps)


def _of_steps(steps: Sequence[RecordedStep], name: str) -> tuple[float, ...]:
    """A number of each step; empty where none has it; 0 for a step that has none."""
    values = [getattr(step, name) for step in steps]
    return tuple(value or 0.0 for value in values) if any(v is not None for v in values) else ()


def _group(record: JsonMapping) -> str | None:
    value = first_of(record, GROUP)
    return None if value is None else str(value)


def _version(record: JsonMapping) -> int | None:
    value = first_of(record, VERSION)
    if value is not None and (type(value) is not int or value < 0):
        raise ConversationError(f"{VERSION[0]} is {value!r:.40}; expected a whole number from 0")
    return value


def _number(record: JsonMapping, names: Sequence[str]) -> float | None:
    value = first_of(record, names)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConversationError(f"{names[0]} is {value!r:.40}; expected a number")
    return float(value)
