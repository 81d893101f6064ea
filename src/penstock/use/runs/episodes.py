"""Rollouts with an environment: trajectories of several turns, several at the same time, as a
dataset that a policy learns from.

Each prompt gives a group of trajectories. A trajectory that is over is one line of a file next to
the output (`OUTPUT.jsonl`, see `journal`), written at once; a round that was stopped goes on with
those that are missing. Draws depend on prompt, sample and turn alone, so our engine gives the same
ones. At the end, the file becomes the dataset.

Environments run in threads, so that a slow tool stops neither the engine nor the others. An error,
or Ctrl-C, waits for none of them: what is over is written, and the error names prompt, sample and
turn.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from penstock.chat import FinishedTrajectory, Template, Trajectory, TrajectoryReader
from penstock.chat.trajectories.trajectory import HISTORIES, History
from penstock.core.errors import ConfigError, ConversationError, RecordError
from penstock.core.folders import local_path
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.core.randomness import key_for
from penstock.core.terminal import Progress
from penstock.data.prepare.trajectories import in_groups, write_trajectories
from penstock.learn.generation.settings import Generated, Sampling
from penstock.models.own_code import code_digest
from penstock.use.runs.daemon_threads import DaemonThreads
from penstock.use.runs.environments import Answered, Environment
from penstock.use.runs.journal import Journal
from penstock.use.runs.opening import Opened, chat_of, writer_of
from penstock.use.runs.remote_sampler import RemoteEngine, RemoteSampler
from penstock.use.runs.rollouts import (
    Rollouts,
    messages_of,
    shown,
    stored_filters,
    unknown_tools,
)
from penstock.use.runs.samplers import EngineSampler, Sampler

_log = logging.getLogger("penstock.runs")

LOOK_SECONDS = 0.5
"""Longest time without a look at signals."""
AT_ONCE = 32
"""Trajectories at the same time, by default."""


@final
@dataclass(slots=True)
class _Episode:
    """A trajectory that goes on."""

    prompt: int
    sample: int
    trajectory: Trajectory
    record: JsonMapping
    new: list[JsonObject]
    """Messages that come next."""
    said: Sequence[JsonMapping] = ()
    """All messages up to the last reply."""
    finish_reason: str = ""
    """Of the last reply."""
    state: dict[str, Any] = field(default_factory=dict)
    turn: int = 0
    rewards: list[float | None] = field(default_factory=list)
    """Of its turns."""
    is_full: bool = False
    """Whether what came next left no room for a reply, so that the environment judges again."""

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors in the block say which trajectory and turn they are of."""
        where = f"prompt {self.prompt}, sample {self.sample}, turn {self.turn}"
        try:
            yield
        except (ConfigError, RecordError) as error:
            raise type(error)(f"{where}: {error}") from error
        except Exception as error:
            # One of the user's own stays what it is.
            error.add_note(f"in the trajectory of {where}")
            raise


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """How trajectories are made.

    Raises:
        ConfigError: A number is out of range.
    """

    samples: int = 8
    """Trajectories of each prompt."""
    max_turns: int = 16
    """Replies of a trajectory, at most."""
    tools: Sequence[JsonMapping] | None = None
    """JSON schemas of functions, for the template; a record's own `tools` take precedence."""
    history: History = "sampled"
    """How prompts go on after a reply; see `Trajectory`."""
    version: int | None = None
    """Version of the policy that samples, stored with each token; None: not stored."""
    at_once: int = AT_ONCE
    """Trajectories at the same time, at most."""

    def __post_init__(self) -> None:
        for name in ("samples", "max_turns", "at_once"):
            given = getattr(self, name)
            if not isinstance(given, int) or given < 1:
                raise ConfigError(f"{name} must be at least 1, got {given!r}")
        if self.history not in HISTORIES:
            raise ConfigError(
                f"history must be one of {', '.join(HISTORIES)}, got {self.history!r}"
            )
        if self.version is not None and self.version < 0:
            raise ConfigError(f"version must be 0 or more, got {self.version}")


def write_episodes(
    opened: Opened,
    records: Sequence[JsonMapping],
    environment: Callable[..., Any] | str,
    output: str | Path,
    *,
    settings: EpisodeSettings,
    sampling: Sampling,
    progress: bool = True,
    engine: RemoteEngine | None = None,
) -> Rollouts:
    """Make trajectories, and write a dataset.

    Args:
        opened: The model, with its tokenizer and template.
        records: Each with `messages`, or a text in `prompt`, which a user says; `tools` if it has
            its own.
        environment: See `environments`.
        output: A new folder. Next to it, `OUTPUT.jsonl` has the trajectories as records.
        settings: How they are made.
        sampling: How tokens are chosen.
        progress: Show a bar.
        engine: A server that samples; None: the opened model.

    Raises:
        ConfigError: The model has no template, a setting is out of range, the environment gives
            something else than messages or rewards, or the server does not give what is needed.
        RecordError: A record has no prompt.
        StateError: `OUTPUT.jsonl` is of other prompts or settings.
    """
    world = Environment(environment)
    if engine is not None:
        engine.check(sampling)
    if opened.template is None:
        raise ConfigError(
            f"{opened.run.path}: has no chat template, which conversations need; give a model that "
            "was trained on chats"
        )
    folder = local_path(output, "the output of rollouts")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: is not empty; choose another folder")
    if not records:
        raise RecordError("there are no prompts")
    if sampling.temperature == 0:
        raise ConfigError(
            "temperature is 0, so all trajectories of a prompt would be the same; give one above 0"
        )
    asked = [_messages_of(record, number) for number, record in enumerate(records)]
    base = replace(sampling, logprobs=0, tempered_logprobs=True)
    count = len(records) * settings.samples
    sampler = _sampler(opened, engine, min(settings.at_once, count))
    try:
        _check_prompts(opened, records, asked, settings, sampler.context_length)
        journal = Journal(
            folder.with_name(folder.name + ".jsonl"),
            _digest(records, settings, base, opened, engine, sampler),
            sampling=stored_filters(base),
            environment=code_digest(environment),
        )
        if journal.finished:
            _log.info(
                "%s: %d of %d trajectories are over, with the rewards that they were given then",
                journal.path,
                len(journal.finished),
                count,
            )
        with Progress("trajectories", total=count, unit="", enabled=progress) as bar, journal:
            bar.advance(len(journal.finished))
            work = _Work(opened, sampler, world, settings, base)
            begin = (
                work.episode(prompt, sample, records[prompt], asked[prompt])
                for prompt in range(len(records))
                for sample in range(settings.samples)
                if (prompt, sample) not in journal.finished
            )
            for episode, reward in work.run(begin):
                with episode.named():
                    record = _record_of(episode, reward, base, settings, journal.digest)
                    journal.add(episode.prompt, episode.sample, record)
                bar.advance(1)
    finally:
        sampler.close()
    return _written(opened, journal, folder, base, records)


@final
class _Work:
    """Trajectories that go on at the same time."""

    def __init__(
        self,
        opened: Opened,
        sampler: Sampler,
        environment: Environment,
        settings: EpisodeSettings,
        base: Sampling,
    ) -> None:
        self._opened, self._sampler, self._environment = opened, sampler, environment
        self._settings, self._base = settings, base
        self._sampled: dict[int, _Episode] = {}
        self._answered: dict[Future[Answered], _Episode] = {}
        self._threads = DaemonThreads(settings.at_once, "penstock-environment")
        self._waiting = True
        """Whether there may be trajectories that have not begun."""

    def episode(
        self, prompt: int, sample: int, record: JsonMapping, messages: list[JsonObject]
    ) -> _Episode:
        """A new trajectory."""
        tools = record.get("tools") or self._settings.tools
        trajectory = _trajectory(self._opened, tools, self._settings)
        return _Episode(prompt, sample, trajectory, record, messages)

    def run(self, begin: Iterator[_Episode]) -> Iterator[tuple[_Episode, float]]:
        """All trajectories to their ends, with their rewards, as they come."""
        self._waiting = True
        try:
            while self._waiting or self._sampled or self._answered:
                self._start(begin)
                self._take()
                self._wait()
                yield from self._go_on()
        except (Exception, KeyboardInterrupt):
            yield from self._over()
            raise
        finally:
            self._threads.close()

    def _start(self, begin: Iterator[_Episode]) -> None:
        while self._waiting and len(self._sampled) + len(self._answered) < self._settings.at_once:
            one = next(begin, None)
            self._waiting = one is not None
            if one is not None:
                self._ask(one)

    def _ask(self, episode: _Episode) -> None:
        with episode.named():
            ids = episode.trajectory.prompt(episode.new)
            if len(ids) >= self._sampler.context_length:
                # What has no reply is no part of a trajectory.
                episode.is_full = True
                self._judge(episode, last=True)
                return
            key = key_for(self._base.seed, "episode", episode.prompt, episode.sample, episode.turn)
            number = self._sampler.submit(ids, replace(self._base, seed=key >> 1))
        self._sampled[number] = episode

    def _take(self) -> None:
        """Give finished replies to the environment, and raise what kept one from being one."""
        failed: tuple[_Episode, BaseException] | None = None
        for number, found in self._sampler.done():
            episode = self._sampled.pop(number)
            if isinstance(found, BaseException):
                failed = failed or (episode, found)
            else:
                with episode.named():
                    self._answer(episode, found)
        if failed is not None:
            with failed[0].named():
                raise failed[1]

    def _answer(self, episode: _Episode, written: Generated) -> None:
        logs = [step.token for step in written.logprobs]
        episode.trajectory.reply(written.tokens, logs, finish_reason=written.finish_reason)
        episode.said, episode.finish_reason = episode.trajectory.messages, written.finish_reason
        # A reply needs a token at least, and messages some.
        full = len(episode.trajectory.ids) + 1 >= self._sampler.context_length
        self._judge(episode, last=full or episode.turn + 1 >= self._settings.max_turns)

    def _judge(self, episode: _Episode, *, last: bool) -> None:
        """Give the last reply to the environment."""
        future = self._threads.submit(
            self._environment.answer,
            episode.said,
            record=episode.record,
            state=episode.state,
            finish_reason=episode.finish_reason,
            last=last,
            room=0 if last else self._sampler.context_length - len(episode.trajectory.ids),
        )
        self._answered[future] = episode

    def _wait(self) -> None:
        """Until something has happened elsewhere; not at all while our engine has work."""
        elsewhere = self._sampler.pending()
        if self._sampled and not elsewhere:
            return
        if futures := [*self._answered, *elsewhere]:
            # Not for ever: a signal that comes just before Python waits is seen only behind it.
            wait(futures, LOOK_SECONDS, FIRST_COMPLETED)

    def _go_on(self) -> Iterator[tuple[_Episode, float]]:
        """Ask for the next replies of trajectories that the environment has answered; yields those
        that are over.
        """
        for future in [one for one in self._answered if one.done()]:
            episode = self._answered.pop(future)
            with episode.named():
                answered = _result(future)
            if not episode.is_full:
                episode.turn += 1
                episode.rewards.append(answered.reward if answered.messages else None)
            if answered.messages:
                episode.new = list(answered.messages)
                self._ask(episode)
            else:
                assert answered.reward is not None
                yield episode, answered.reward

    def _over(self) -> Iterator[tuple[_Episode, float]]:
        """After an error, what is over already."""
        for future, episode in self._answered.items():
            if future.done() and future.exception() is None:
                answered = future.result()
                if not answered.messages and answered.reward is not None:
                    if not episode.is_full:
                        episode.rewards.append(None)
                    yield episode, answered.reward


def _check_prompts(
    opened: Opened,
    records: Sequence[JsonMapping],
    asked: Sequence[list[JsonObject]],
    settings: EpisodeSettings,
    context_length: int,
) -> None:
    """Refuse prompts without room for a reply, and tools of which the model would not know, before
    anything is sampled.

    Raises:
        RecordError: A prompt fills the context, or its messages or tools cannot be read.
        ConfigError: The template writes none of them.
    """
    for number, (record, messages) in enumerate(zip(records, asked, strict=True)):
        tools = record.get("tools") or settings.tools
        try:
            ids = _trajectory(opened, tools, settings).prompt(messages)
            without = _trajectory(opened, None, settings).prompt(messages) if tools else ids
        except ConversationError as error:
            raise type(error)(f"prompt {number}: {error}") from error
        if len(ids) >= context_length:
            raise RecordError(
                f"prompt {number}: the prompt has {len(ids)} tokens, but the context of "
                f"{context_length} must hold it and at least one more token; shorten it"
            )
        if tools and ids == without:
            raise unknown_tools()


def _trajectory(
    opened: Opened, tools: Sequence[JsonMapping] | None, settings: EpisodeSettings
) -> Trajectory:
    template: Template | None = opened.template
    assert template is not None
    return Trajectory(
        opened.tokenizer,
        template,
        tools=tools,
        history=settings.history,
        stop_ids=opened.run.stop_ids,
    )


def _result(future: Future[Answered]) -> Answered:
    try:
        return future.result()
    except SystemExit as error:
        # It would end this process without a word.
        raise ConfigError(
            f"environment: asked to end the process (SystemExit {error.code!r}); let it raise an "
            "error, or give a reward"
        ) from error


def _sampler(opened: Opened, engine: RemoteEngine | None, at_once: int) -> Sampler:
    if engine is None:
        return EngineSampler(writer_of(opened, at_once).engine)
    return RemoteSampler(
        engine,
        opened.tokenizer,
        stop_ids=opened.run.stop_ids,
        context_length=opened.context_length,
        at_once=at_once,
    )


def _messages_of(record: JsonMapping, number: int) -> list[JsonObject]:
    if isinstance(record.get("prompt"), str):
        return [{"role": "user", "content": record["prompt"]}]
    return messages_of(record, number)


def _record_of(
    episode: _Episode, reward: float, base: Sampling, settings: EpisodeSettings, digest: str
) -> JsonObject:
    record = episode.trajectory.record()
    if any(own is not None for own in episode.rewards):
        # Where turns have rewards, they are what is learned from: the last one has that of the end.
        for step, own in zip(record["steps"], [*episode.rewards[:-1], reward], strict=True):
            if own is not None:
                step["reward"] = own
    version = {} if settings.version is None else {"policy_version": settings.version}
    return {
        # Files of several rounds may be prepared together.
        "group": f"{digest[:12]}/{episode.prompt}",
        "reward": reward,
        "temperature": base.temperature,
        **version,
        **record,
    }


def _digest(
    records: Sequence[JsonMapping],
    settings: EpisodeSettings,
    base: Sampling,
    opened: Opened,
    engine: RemoteEngine | None,
    sampler: Sampler,
) -> str:
    """Of what determines the trajectories, but for the environment's code and the server's
    address.
    """
    assert opened.template is not None
    described = [
        list(map(dict, records)),
        [getattr(settings, name) for name in EpisodeSettings.__slots__ if name != "at_once"],
        repr(base),
        opened.template.fingerprint,
        opened.tokenizer.fingerprint,
        [str(opened.run.path), opened.run.step],
    ]
    if engine is not None and isinstance(sampler, RemoteSampler):
        described.append([sampler.model, engine.engine_logprobs])
    text = json.dumps(described, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _written(
    opened: Opened, journal: Journal, folder: Path, base: Sampling, records: Sequence[JsonMapping]
) -> Rollouts:
    reader = TrajectoryReader(tokenizer=opened.tokenizer, variables={})
    found: list[FinishedTrajectory] = []
    stopped = tokens = 0
    for key in sorted(journal.finished):
        one = journal.finished[key]
        found.append(reader.read(one, f"{journal.path}: prompt {key[0]}, sample {key[1]}"))
        tokens += sum(len(step["response_ids"]) for step in one["steps"])
        stopped += one["steps"][-1]["finish_reason"] != "length"
    dataset = write_trajectories(
        folder,
        found,
        tokenizer=opened.tokenizer,
        chat=chat_of(opened),
        sampling=stored_filters(base),
        share=opened.reads_trees,
    )
    rewards = [[one.reward or 0.0 for one in group] for group in in_groups(found)]
    every = [one for group in rewards for one in group]
    first = [journal.finished[number, 0] for number in range(min(3, len(records)))]
    return Rollouts(
        dataset=dataset,
        prompts=len(records),
        mean_reward=sum(every) / len(every),
        spread=sum(len(set(group)) > 1 for group in rewards),
        answer_tokens=tokens / len(found),
        stopped=stopped / len(found),
        examples=tuple(
            (shown(records[number]), str(one["steps"][-1]["message"].get("content")), one["reward"])
            for number, one in enumerate(first)
        ),
    )
