"""Rollouts with an environment: trajectories of several turns, several at the same time, as a
dataset that a policy learns from.

Each prompt gives a group of trajectories. A trajectory that is over is one line of a file next to
the output (`OUTPUT.jsonl`), written at once; a round that was stopped goes on with those that are
missing. Draws depend on prompt, sample and turn alone, so it gives the same ones. At the end, the
file becomes the dataset.

Environments run in threads, so that a slow tool stops neither the engine nor the others.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, final

from penstock.chat import FinishedTrajectory, Template, Trajectory, TrajectoryReader
from penstock.chat.trajectories.trajectory import HISTORIES, History
from penstock.core.errors import ConfigError, RecordError, StateError
from penstock.core.folders import local_path
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.core.randomness import key_for
from penstock.core.terminal import Progress
from penstock.data.prepare.trajectories import in_groups, write_trajectories
from penstock.data.shards import ChatInfo
from penstock.learn.generation import Engine
from penstock.learn.generation.engine import collect
from penstock.learn.generation.settings import Event, Generated, Sampling
from penstock.use.runs.environments import Answered, Environment
from penstock.use.runs.opening import Opened, writer_of
from penstock.use.runs.rollouts import Rollouts, shown

AT_ONCE = 32
"""Trajectories at the same time."""


class Sampler(Protocol):
    """Samples replies to prompts of ids; several at the same time."""

    context_length: int
    """Maximum tokens of a prompt and its reply."""

    def submit(self, ids: Sequence[int], sampling: Sampling) -> int:
        """Ask for a reply; returns its number."""

    def done(self, *, idle: bool) -> list[tuple[int, Generated]]:
        """Replies that are finished; `idle`: nothing else goes on, so wait for one."""


@final
class EngineSampler:
    """Our own engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.context_length = engine, engine.context_length
        self._events: dict[int, list[Event]] = {}

    def submit(self, ids: Sequence[int], sampling: Sampling) -> int:
        """See `Sampler`."""
        number = self._engine.submit(ids, sampling)
        self._events[number] = []
        return number

    def done(self, *, idle: bool) -> list[tuple[int, Generated]]:
        """See `Sampler`: one step of the engine."""
        finished = []
        if self._events:
            for event in self._engine.step():
                if event.error is not None:
                    raise event.error
                self._events[event.sequence].append(event)
                if event.finish_reason is not None:
                    finished.append((event.sequence, collect(self._events.pop(event.sequence))))
        return finished


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
    state: dict[str, Any] = field(default_factory=dict)
    turn: int = 0
    rewards: list[float | None] = field(default_factory=list)
    """Of its turns."""


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

    def __post_init__(self) -> None:
        for name in ("samples", "max_turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
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
    sampler: Sampler | None = None,
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
        sampler: What samples; None: the opened model.

    Raises:
        ConfigError: The model has no template, a setting is out of range, or the environment gives
            something else than messages or rewards.
        RecordError: A record has no prompt.
        StateError: `OUTPUT.jsonl` is of other prompts or settings.
    """
    world = Environment(environment)
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
    asked = [_messages_of(record, number) for number, record in enumerate(records)]
    base = replace(sampling, logprobs=0, tempered_logprobs=True)
    journal = Journal(
        folder.with_name(folder.name + ".jsonl"), _digest(records, settings, base, opened)
    )
    count = len(records) * settings.samples
    at_once = min(AT_ONCE, count)
    with Progress("trajectories", total=count, unit="", enabled=progress) as bar, journal:
        bar.advance(len(journal.finished))
        missing = [
            (prompt, sample)
            for prompt in range(len(records))
            for sample in range(settings.samples)
            if (prompt, sample) not in journal.finished
        ]
        if missing:
            work = _Work(
                opened,
                sampler or EngineSampler(writer_of(opened, at_once).engine),
                world,
                settings,
                base,
            )
            begin = (
                work.episode(prompt, sample, records[prompt], asked[prompt])
                for prompt, sample in missing
            )
            for episode, reward in work.run(begin, at_once):
                journal.add(episode, _record_of(episode, reward, base, settings))
                bar.advance(1)
    return _written(opened, journal, folder, base, records)


@final
class Journal:
    """The trajectories that are over, a line each; the first line says of what.

    Args:
        path: The file.
        digest: Of prompts and settings.

    Raises:
        StateError: The file is of others.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self.path, self._digest = path, digest
        self.finished: dict[tuple[int, int], JsonObject] = {}
        self._file: Any = None
        self._read()

    def _read(self) -> None:
        if not self.path.is_file():
            return
        kept = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file):
                # A line that was cut by a kill is written again.
                if not line.endswith(b"\n"):
                    break
                found = json.loads(line)
                if number == 0 and found.get("digest") != self._digest:
                    raise StateError(
                        f"{self.path}: is of other prompts, settings or another model; remove it, "
                        "or choose another output"
                    )
                if number:
                    self.finished[found["prompt"], found["sample"]] = found
                kept += len(line)
        with self.path.open("r+b") as file:
            file.truncate(kept)

    def __enter__(self) -> "Journal":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        begins = not self.path.is_file() or not self.path.stat().st_size
        self._file = self.path.open("a", encoding="utf-8")
        if begins:
            self._write({"digest": self._digest})
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, episode: _Episode, record: JsonObject) -> None:
        """Write one that is over."""
        numbered = {"prompt": episode.prompt, "sample": episode.sample, **record}
        self._write(numbered)
        self.finished[episode.prompt, episode.sample] = numbered

    def _write(self, value: JsonMapping) -> None:
        self._file.write(json.dumps(value, ensure_ascii=False) + "\n")
        self._file.flush()


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

    def episode(
        self, prompt: int, sample: int, record: JsonMapping, messages: list[JsonObject]
    ) -> _Episode:
        """A new trajectory."""
        template: Template | None = self._opened.template
        assert template is not None
        trajectory = Trajectory(
            self._opened.tokenizer,
            template,
            tools=record.get("tools") or self._settings.tools,
            history=self._settings.history,
            stop_ids=self._opened.run.stop_ids,
        )
        return _Episode(prompt, sample, trajectory, record, messages)

    def run(self, begin: Iterator[_Episode], at_once: int) -> Iterator[tuple[_Episode, float]]:
        """All trajectories to their ends, with their rewards, as they come."""
        with ThreadPoolExecutor(at_once, thread_name_prefix="penstock-environment") as pool:
            waiting = True
            while waiting or self._sampled or self._answered:
                while waiting and len(self._sampled) + len(self._answered) < at_once:
                    one = next(begin, None)
                    waiting = one is not None
                    if one is not None:
                        self._ask(one)
                for number, written in self._sampler.done(idle=not self._answered):
                    self._take(self._sampled.pop(number), written, pool)
                if self._answered:
                    # Without anything to sample, there is time for the environments.
                    patience = None if not self._sampled else 0
                    for future in wait(self._answered, patience, FIRST_COMPLETED).done:
                        episode = self._answered.pop(future)
                        answered = future.result()
                        episode.rewards.append(answered.reward if answered.messages else None)
                        if answered.messages:
                            episode.new = list(answered.messages)
                            self._ask(episode)
                        else:
                            assert answered.reward is not None
                            yield episode, answered.reward

    def _ask(self, episode: _Episode) -> None:
        ids = episode.trajectory.prompt(episode.new)
        key = key_for(self._base.seed, "episode", episode.prompt, episode.sample, episode.turn)
        number = self._sampler.submit(ids, replace(self._base, seed=key >> 1))
        self._sampled[number] = episode

    def _take(self, episode: _Episode, written: Generated, pool: ThreadPoolExecutor) -> None:
        trajectory = episode.trajectory
        logs = [step.token for step in written.logprobs]
        trajectory.reply(written.tokens, logs, finish_reason=written.finish_reason)
        episode.turn += 1
        # A reply needs a token at least, and messages some.
        full = len(trajectory.ids) + 1 >= self._sampler.context_length
        future = pool.submit(
            self._environment.answer,
            trajectory.messages,
            record=episode.record,
            state=episode.state,
            finish_reason=written.finish_reason,
            last=full or episode.turn >= self._settings.max_turns,
        )
        self._answered[future] = episode


def _messages_of(record: JsonMapping, number: int) -> list[JsonObject]:
    if isinstance(record.get("prompt"), str):
        return [{"role": "user", "content": record["prompt"]}]
    given = record.get("messages")
    if isinstance(given, Sequence) and given and all(isinstance(one, Mapping) for one in given):
        return [dict(one) for one in given]
    raise RecordError(
        f"prompt {number}: expected a text in 'prompt', or 'messages'; it has {', '.join(record)}"
    )


def _record_of(
    episode: _Episode, reward: float, base: Sampling, settings: EpisodeSettings
) -> JsonObject:
    record = episode.trajectory.record()
    for step, own in zip(record["steps"], episode.rewards, strict=True):
        if own is not None:
            step["reward"] = own
    version = {} if settings.version is None else {"policy_version": settings.version}
    return {
        "group": str(episode.prompt),
        "reward": reward,
        "temperature": base.temperature,
        **version,
        **record,
    }


def _digest(
    records: Sequence[JsonMapping], settings: EpisodeSettings, base: Sampling, opened: Opened
) -> str:
    """Of what determines the trajectories, but for the environment's code."""
    assert opened.template is not None
    described = [
        list(map(dict, records)),
        [getattr(settings, name) for name in EpisodeSettings.__slots__],
        repr(base),
        opened.template.fingerprint,
        opened.tokenizer.fingerprint,
        [str(opened.run.path), opened.run.step],
    ]
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
        chat=ChatInfo.load(opened.run.path),
        sampling=json.loads(json.dumps(base.filters())),
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
