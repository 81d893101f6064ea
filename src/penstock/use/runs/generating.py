"""Generates with a run's model: texts, replies of a chat, answers for a policy."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError
from penstock.learn.generation.session import first_id, fit_chat, room_for
from penstock.learn.generation.settings import Sampling, sampling_defaults
from penstock.learn.training.run_folder import RunFolder
from penstock.use.runs.keywords import (
    GenerateKeywords,
    OpeningKeywords,
)
from penstock.use.runs.opening import Opened, writer_of
from penstock.use.runs.rollouts import write_rollouts
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


def ask(prompts: Sequence[str], num: int, sampling: Sampling) -> Asked:
    """Each prompt `num` times, with seeds counting up from that of `sampling`."""
    return [
        (text, replace(sampling, seed=sampling.seed + number))
        for text in prompts
        for number in range(num)
    ]


def prompt_ids(writer: "Writer", asked: Asked) -> list[list[int]]:
    """The tokens of each prompt, after BOS if the model was trained with it; an empty one needs
    some token.
    """
    first = first_id(writer.tokenizer, writer.begin_ids)
    ids = [[*writer.begin_ids, *writer.tokenizer.encode(text).tolist()] for text, _ in asked]
    return [one or ([] if first is None else [first]) for one in ids]


def write_texts(
    open_model: Callable[[OpeningKeywords], Opened],
    prompts: Sequence[str],
    settings: dict[str, Any],
) -> list[str]:
    """The text of each prompt; see `Run.generate`."""
    check_names("Run.generate", settings, GenerateKeywords)
    opening = take_opening(settings)
    # Refused before the model is read.
    _sampling(settings, {})
    if not prompts:
        return []
    opened = open_model(opening)
    asked = ask(prompts, 1, _sampling(settings, own_sampling(opened.run)))
    writer = writer_of(opened, min(len(asked), MOST_AT_ONCE))
    written = writer.engine.generate_all(prompt_ids(writer, asked), [how for _, how in asked])
    return [one.text for one in written]


def sample_rollouts(
    open_model: Callable[[OpeningKeywords], Opened],
    prompts: Sequence[Any],
    reward: Any,
    output: str | Path,
    samples: int,
    progress: bool,
    settings: dict[str, Any],
) -> "Rollouts":
    """Answers to prompts, judged, as a dataset; see `Run.rollouts`."""
    check_names("Run.rollouts", settings, GenerateKeywords, "samples", "progress")
    opening = take_opening(settings)
    # A policy learns from what was drawn, so the base's own filters do not count.
    sampling = _sampling({"temperature": 1.0, **settings}, {})
    records = [{"prompt": one} if isinstance(one, str) else one for one in prompts]
    return write_rollouts(
        open_model(opening),
        records,
        reward,
        output,
        samples=samples,
        sampling=sampling,
        progress=progress,
    )


def write_reply(
    open_model: Callable[[OpeningKeywords], Opened],
    messages: Sequence[Any],
    settings: dict[str, Any],
) -> str:
    """The reply to a conversation; see `Run.chat`."""
    check_names("Run.chat", settings, GenerateKeywords)
    opening = take_opening(settings)
    _sampling(settings, {})
    opened = open_model(opening)
    if opened.template is None:
        raise ConfigError(
            f"{opened.run.path}: it has no chat template; it was not trained on chats; use "
            "Run.generate"
        )
    sampling = _sampling({"min_tokens": 1, **settings}, own_sampling(opened.run))
    writer = writer_of(opened, 1)
    engine, images = writer.engine, None if writer.images is None else writer.images.within("")
    prompt = fit_chat(
        messages, opened.template, opened.tokenizer, room=room_for(engine, sampling), images=images
    )
    [written] = engine.generate_all([prompt.ids], [sampling], images=[prompt.images])
    text: str = written.text
    return text


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
