"""Generates with a run's model: texts, replies of a chat, answers for a policy."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from penstock.chat import Template, load_template
from penstock.core.errors import ConfigError, ConversationError, RecordError
from penstock.learn.generation.images import ImageReader
from penstock.learn.generation.session import ChatSession, Prompt, first_id, fit_chat, room_for
from penstock.learn.generation.settings import Sampling, sampling_defaults
from penstock.learn.generation.unmask_settings import Unmasking
from penstock.learn.generation.unmasking import Unmasker
from penstock.learn.training.run_folder import RunFolder
from penstock.use.runs.episodes import EpisodeSettings, write_episodes
from penstock.use.runs.keywords import GenerateKeywords, OpeningKeywords
from penstock.use.runs.opening import Opened, open_without_weights, writer_of
from penstock.use.runs.remote_sampler import RemoteEngine
from penstock.use.runs.rollouts import read_records, write_rollouts
from penstock.use.runs.run_document import check_names

if TYPE_CHECKING:
    from penstock.use.runs.opening import Writer
    from penstock.use.runs.rollouts import Rollouts

MOST_AT_ONCE = 32
"""Maximum number of texts generated at the same time."""
TEMPERATURE = 0.8
"""Default temperature of a model whose base has none."""
Asked = list[tuple[str, Sampling]]
"""Prompts, each with its sampling settings."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SampledText:
    """A text that a model wrote."""

    prompt: str
    text: str
    """Without its prompt."""
    finish_reason: str
    """stop, or length."""
    seed: int
    tokens: tuple[int, ...]
    """All chosen tokens, including a stop id."""


def ask(prompts: Sequence[str], num: int, sampling: Sampling) -> Asked:
    """Each prompt `num` times, with seeds counting up from that of `sampling`."""
    return [
        (text, replace(sampling, seed=sampling.seed + number))
        for text in prompts
        for number in range(num)
    ]


def prompt_ids(writer: "Writer | Opened", asked: Asked) -> list[list[int]]:
    """The tokens of each prompt, after BOS if the model was trained with it; an empty one needs
    some token.
    """
    first = first_id(writer.tokenizer, writer.begin_ids)
    ids = [[*writer.begin_ids, *writer.tokenizer.encode(text).tolist()] for text, _ in asked]
    return [one or ([] if first is None else [first]) for one in ids]


def sample_texts(
    call: str,
    open_model: Callable[[OpeningKeywords], Opened],
    prompts: Sequence[str],
    samples: int,
    settings: dict[str, Any],
) -> list[SampledText]:
    """Texts of each prompt; see `Run.sample`."""
    unmasking = _take_unmasking(settings)
    opening = _checked(call, settings, "samples")
    given: object = prompts
    if not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
        raise ConfigError(
            f"{call}: found {given!r:.80}, expected a prompt or a list of prompts, which are "
            "texts; for messages use Run.chat"
        )
    if not prompts:
        return []
    opened = open_model(opening)
    asked = ask(prompts, samples, _sampling(settings, own_sampling(opened.run)))
    hows = [how for _, how in asked]
    if (unmasker := _unmasker_of(opened, unmasking)) is not None:
        written = _unmask_all(unmasker, prompt_ids(opened, asked), hows, unmasking)
    else:
        writer = writer_of(opened, min(len(asked), MOST_AT_ONCE))
        written = writer.engine.generate_all(prompt_ids(writer, asked), hows)
    return [
        SampledText(
            prompt=prompt,
            text=one.text,
            finish_reason=one.finish_reason,
            seed=how.seed,
            tokens=one.tokens,
        )
        for (prompt, how), one in zip(asked, written, strict=True)
    ]


def stream_text(
    open_model: Callable[[OpeningKeywords], Opened], prompt: str, settings: dict[str, Any]
) -> Iterator[str]:
    """The text of a prompt, piece by piece; see `Run.stream`."""
    unmasking = _take_unmasking(settings)
    opened = open_model(_checked("Run.stream", settings))
    asked = ask([prompt], 1, _sampling(settings, own_sampling(opened.run)))
    if (unmasker := _unmasker_of(opened, unmasking)) is not None:
        [ids] = prompt_ids(opened, asked)
        return unmasker.blocks(ids, asked[0][1], unmasking)
    writer = writer_of(opened, 1)
    events = writer.engine.generate(prompt_ids(writer, asked), [how for _, how in asked])
    return (event.text for event in events)


def open_session(
    open_model: Callable[[OpeningKeywords], Opened],
    system: str | None,
    template: str | Path | Template | None,
    settings: dict[str, Any],
) -> ChatSession:
    """A conversation with a model; see `Run.session`."""
    opened = open_model(_checked("Run.session", settings, "system", "template"))
    chosen = opened.template if template is None else template
    if isinstance(chosen, str | Path):
        chosen = load_template(chosen, tokenizer=opened.tokenizer)
    if chosen is None:
        raise ConfigError(
            f"{opened.run.path}: has no chat template; set template to one, or generate text"
        )
    # A reply may be as long as the context has room for it.
    own = {"max_tokens": None, **own_sampling(opened.run)}
    writer = writer_of(opened, 1)
    return ChatSession(
        writer.engine,
        chosen,
        sampling=_sampling({"min_tokens": 1, **settings}, own),
        system=system,
        images=None if writer.images is None else writer.images.within(""),
    )


def _checked(call: str, settings: dict[str, Any], *more: str) -> OpeningKeywords:
    """Refuse wrong settings before the model is read; takes those for opening it out of them."""
    check_names(call, settings, GenerateKeywords, *more)
    opening = take_opening(settings)
    _sampling(settings, {})
    return opening


def sample_rollouts(
    open_model: Callable[[OpeningKeywords], Opened],
    prompts: str | Path | Sequence[str | Mapping[str, Any]],
    reward: Any,
    output: str | Path,
    samples: int,
    version: int | None,
    progress: bool,
    settings: dict[str, Any],
) -> "Rollouts":
    """Answers to prompts, judged, as a dataset; see `Run.rollouts`."""
    opening = _checked("Run.rollouts", settings, "samples", "version", "progress")
    # A policy learns from what was drawn, so the base's own filters do not count.
    sampling = _sampling({"temperature": 1.0, **settings}, {})
    return write_rollouts(
        open_model(opening),
        _records(prompts),
        reward,
        output,
        samples=samples,
        sampling=sampling,
        version=version,
        progress=progress,
    )


def sample_episodes(
    run: RunFolder,
    open_model: Callable[[OpeningKeywords], Opened],
    prompts: str | Path | Sequence[str | Mapping[str, Any]],
    environment: Any,
    output: str | Path,
    episodes: EpisodeSettings,
    engine: RemoteEngine | None,
    progress: bool,
    settings: dict[str, Any],
) -> "Rollouts":
    """Trajectories with an environment, as a dataset; see `Run.rollouts`."""
    opening = _checked("Run.rollouts", settings, "samples", "version", "progress", "environment")
    sampling = _sampling({"temperature": 1.0, **settings}, {})
    if engine is None:
        opened = open_model(opening)
    elif given := {"device", "threads"} & {*opening}:
        raise ConfigError(
            f"Run.rollouts: {min(given)} is for a model that computes here; leave it out with an "
            "engine"
        )
    else:
        opened = open_without_weights(run, opening.get("context_length"))
    return write_episodes(
        opened,
        _records(prompts),
        environment,
        output,
        settings=episodes,
        sampling=sampling,
        progress=progress,
        engine=engine,
    )


def _records(
    prompts: str | Path | Sequence[str | Mapping[str, Any]],
) -> list[Mapping[str, Any]]:
    """Records of a file, or as they are given."""
    if isinstance(prompts, str | Path):
        if isinstance(prompts, str) and not os.path.exists(prompts) and " " in prompts.strip():
            raise RecordError(
                f"{prompts!r:.80}: no such file of prompts; if it is a prompt, give a list: "
                "[prompt]"
            )
        return list(read_records(prompts))
    expected = "expected texts and records with `prompt` or `messages`, in a list"
    if isinstance(prompts, Mapping):
        raise RecordError(f"prompts: found {prompts!r:.80}, {expected}")
    found: list[Mapping[str, Any]] = []
    for number, one in enumerate(prompts):
        if not isinstance(one, str | Mapping):
            raise RecordError(f"prompt {number}: found {one!r:.80}, {expected}")
        found.append({"prompt": one} if isinstance(one, str) else one)
    return found


def write_replies(
    open_model: Callable[[OpeningKeywords], Opened],
    messages: str | Sequence[Any],
    settings: dict[str, Any],
) -> str | list[str]:
    """The reply to a message or a conversation, or to each of several; see `Run.chat`."""
    conversations, several = _conversations_of(messages)
    unmasking = _take_unmasking(settings)
    opened = open_model(_checked("Run.chat", settings))
    if (template := opened.template) is None:
        raise ConfigError(
            f"{opened.run.path}: it has no chat template; it was not trained on chats; use "
            "Run.generate"
        )

    def fitted(room: int, images: ImageReader | None = None) -> list[Prompt]:
        given, prompts = (template, opened.tokenizer), []
        for number, one in enumerate(conversations):
            try:
                prompts.append(fit_chat(one, *given, room=room, images=images))
            except RecordError as error:
                if not several:
                    raise
                raise type(error)(f"Run.chat: conversation {number}: {error}") from error
        return prompts

    if (unmasker := _unmasker_of(opened, unmasking)) is not None:
        how = _sampling(settings, own_sampling(opened.run))
        ids = [prompt.ids for prompt in fitted(room_for(unmasker, how))]
        written = _unmask_all(unmasker, ids, [how] * len(ids), unmasking)
    else:
        how = _sampling({"min_tokens": 1, **settings}, own_sampling(opened.run))
        writer = writer_of(opened, min(len(conversations), MOST_AT_ONCE))
        images = None if writer.images is None else writer.images.within("")
        prompts = fitted(room_for(writer.engine, how), images)
        written = writer.engine.generate_all(
            [prompt.ids for prompt in prompts],
            [how] * len(prompts),
            images=[prompt.images for prompt in prompts],
        )
    replies = [reply.text for reply in written]
    return replies if several else replies[0]


def _conversations_of(messages: Any) -> tuple[list[Any], bool]:
    """Conversations of what `Run.chat` is given, and whether it was given several."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not messages or any(isinstance(one, Mapping) for one in messages):
        return [_conversation_of(messages, "Run.chat", ", or a list of those")], False
    each = enumerate(messages)
    return [_conversation_of(one, f"Run.chat: conversation {n}") for n, one in each], True


def _conversation_of(given: Any, where: str, or_else: str = "") -> Any:
    """The messages of one conversation; a text is a message of the user."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if isinstance(given, Mapping) or not isinstance(given, Sequence):
        raise ConfigError(
            f"{where}: found {given!r:.80}, expected a text or a list of messages{or_else}"
        )
    for number, message in enumerate(given):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(
                f"{where}: message {number} is {message!r:.80}, expected a mapping with role and "
                "content"
            )
    if given and given[-1]["role"] == "assistant":
        raise ConversationError(
            f"{where}: the last message is the assistant's, so there is nothing to answer; leave "
            "it out, or add a message of the user"
        )
    return given


def _unmask_all(
    unmasker: Unmasker,
    ids: Sequence[Sequence[int]],
    hows: Sequence[Sampling],
    unmasking: Unmasking | None,
) -> list[Any]:
    """What a diffusion model writes after each prompt, a part of them at the same time."""
    return [
        one
        for at in range(0, len(ids), MOST_AT_ONCE)
        for one in unmasker.generate_all(
            ids[at : at + MOST_AT_ONCE], hows[at : at + MOST_AT_ONCE], unmasking
        )
    ]


def _take_unmasking(settings: dict[str, Any]) -> Unmasking | None:
    """Remove the keywords of `Unmasking` from `settings`; None: none is given."""
    names = [one.name for one in fields(Unmasking) if one.name in settings]
    return Unmasking(**{name: settings.pop(name) for name in names}) if names else None


def _unmasker_of(opened: Opened, unmasking: Unmasking | None) -> Unmasker | None:
    """What writes with a model that was trained by diffusion; None: it writes token by token.

    Raises:
        ConfigError: It writes so, and settings of unmasking are given.
    """
    if opened.model.facts.diffusion is None and unmasking is None:
        return None
    return Unmasker(
        opened.model,
        opened.tokenizer,
        context_length=opened.context_length,
        stop_ids=opened.run.stop_ids,
    )


def own_sampling(run: RunFolder) -> dict[str, Any]:
    """The defaults of sampling that a model's base gives.

    Raises:
        ConfigError: One is out of range.
    """
    return sampling_defaults(run.facts.generation)


def sampling_of(given: dict[str, Any], own: dict[str, Any]) -> Sampling:
    """The sampling that arguments give, else the model's own defaults, else ours."""
    return Sampling(**{"temperature": TEMPERATURE, **own, **given})


def _sampling(settings: dict[str, Any], own: dict[str, Any]) -> Sampling:
    """Keyword arguments as settings; `stop` may be one string or several."""
    if "stop" in settings:
        settings["stop"] = (
            (settings["stop"],) if isinstance(settings["stop"], str) else tuple(settings["stop"])
        )
    return sampling_of(settings, own)


def take_opening(settings: dict[str, Any]) -> OpeningKeywords:
    """Remove the keywords for opening a model from `settings`, and return them."""
    found: Any = {
        name: settings.pop(name) for name in OpeningKeywords.__annotations__ if name in settings
    }
    opening: OpeningKeywords = found
    return opening
