"""Datasets of trajectories: each group, the answers to one question, is a document, a prefix tree
of all paths of its trajectories; for models that read no trees, one path behind the other.

Made from files of records (`prepare_trajectories`), or from Python while a run goes on
(`write_trajectories`). A run that samples and trains in turn writes a dataset a round, next to each
other, which a source takes as one by a glob: `path: rollouts/*`. A round that was killed has no
manifest, and is written again.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from penstock.chat import Template, load_template
from penstock.chat.trajectories.finished import FinishedTrajectory
from penstock.chat.trajectories.paths import TokenPath
from penstock.chat.trajectories.prompt_images import template_of
from penstock.chat.trajectories.records import TrajectoryReader
from penstock.chat.trajectories.trajectory import HISTORIES, History
from penstock.core.errors import ConfigError, OutputError, RecordError
from penstock.core.folders import local_path
from penstock.core.json_values import JsonMapping
from penstock.core.suggestions import suggests
from penstock.core.terminal import Progress
from penstock.data.prepare.probe import say
from penstock.data.shards.dataset import Dataset
from penstock.data.shards.format.images import stored_image
from penstock.data.shards.format.manifest import MANIFEST, ChatInfo
from penstock.data.shards.format.tree_building import TreeDocument, build_tree
from penstock.data.shards.format.trees import (
    ADVANTAGE,
    ANSWER,
    LOG_PROBABILITIES,
    POLICY_VERSION,
    REWARD,
    TEMPERATURE,
    TOKEN_ADVANTAGES,
    TRUNCATED,
    TURN_REWARDS,
)
from penstock.data.shards.memory import weight_spans, write_dataset
from penstock.data.sources.opening import open_sources
from penstock.data.sources.records import Fields, stop_at_damage
from penstock.media.images import ImageSettings
from penstock.media.loading import LoadedImage
from penstock.media.processor import Processor, load_processor
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.loading import load_tokenizer

SHARD_DOCUMENTS = 100_000
"""Groups after which a new shard begins."""
DIGEST, SAMPLING, ENVIRONMENT = "digest", "sampling", "environment"
HEADER = {DIGEST, SAMPLING, ENVIRONMENT}
"""Fields of the first line of a round of rollouts: what it is of, with which filters it was
sampled, and the code that judged.
"""


@suggests
def write_trajectories(
    output: str | Path,
    trajectories: Iterable[FinishedTrajectory],
    *,
    tokenizer: Tokenizer,
    chat: ChatInfo | None = None,
    sampling: Mapping[str, object] = MappingProxyType({}),
    append: bool = False,
    share: bool = True,
    processor: Processor | None = None,
    image_settings: ImageSettings | None = None,
) -> Dataset:
    """Write trajectories as a dataset that a policy learns from.

    Args:
        output: A new folder. With `append`, the folder of all rounds: the next one gets a folder of
            its own in it, `00000`, `00001`, …
        trajectories: What `Trajectory.finish` gives, or a `TrajectoryReader`. Those of a group
            become one document, wherever they are.
        tokenizer: Of their ids; saved with the dataset.
        chat: Template and stop ids, which a run keeps.
        sampling: Settings of the sampler that filter, such as top_k; a policy refuses them.
        append: Write the next round.
        share: False: each path is stored apart, for models that read no trees; the loss is the
            same. True: what paths of a group begin with in common is stored and computed once.
        processor: Of the model, where prompts may have images or sounds; saved with the dataset.
        image_settings: Those with which the trajectories were made; None: the defaults.

    Raises:
        ConfigError: There is no trajectory, some have a reward and others have not, or images come
            without a processor.
        OutputError: The folder is not empty, or cannot be written.
    """
    folder = local_path(output, "a dataset of trajectories")
    groups = in_groups(trajectories)
    if not groups:
        raise ConfigError("there are no trajectories to write")
    if image_settings is not None and processor is None:
        raise ConfigError("image_settings are for a processor; give it, or leave them out")
    settings = image_settings or ImageSettings()
    _check_processor(groups, processor)
    documents = trees_of(groups, share=share, image_storage=settings.image_storage)
    if append:
        folder = _next_round(folder)
    return write_dataset(
        folder,
        [one.tokens for one in documents],
        spans=[weight_spans(one.loss_weights) for one in documents],
        tokenizer=tokenizer,
        columns={name: [one.columns[name] for one in documents] for name in documents[0].columns},
        trees=[one.tree for one in documents],
        chat=chat,
        sampling=dict(sampling),
        documents_per_shard=SHARD_DOCUMENTS,
        images=None if processor is None else [one.images for one in documents],
        processor=processor,
        image_settings=settings,
    )


def _check_processor(
    groups: Sequence[Sequence[FinishedTrajectory]], processor: Processor | None
) -> None:
    """Refuse images of another processor, or without any."""
    for number, one in enumerate(one for group in groups for one in group):
        for path in one.paths:
            if path.images and processor is None:
                raise ConfigError(
                    f"trajectory {number} has images; give the processor that made its prompts"
                )
            for image, place in path.images:
                slot = -1 if processor is None else processor.slot_id
                slots = int((path.ids[place.begin : place.end] == slot).sum())
                if slots != place.layout.slots:
                    raise ConfigError(
                        f"trajectory {number}: an image of {image.size[1]}x{image.size[0]} has "
                        f"{slots} slots by this processor, expected {place.layout.slots}; give the "
                        "processor that made its prompts"
                    )


def in_groups(
    trajectories: Iterable[FinishedTrajectory],
) -> list[list[FinishedTrajectory]]:
    """Trajectories of each group, in the order in which groups come first."""
    groups: dict[object, list[FinishedTrajectory]] = {}
    for number, one in enumerate(trajectories):
        groups.setdefault(number if one.group is None else one.group, []).append(one)
    return list(groups.values())


def trees_of(
    groups: Sequence[Sequence[FinishedTrajectory]],
    *,
    share: bool = True,
    image_storage: str = "copy",
) -> list[TreeDocument]:
    """One document for each group, all with the same values and columns.

    Args:
        groups: The trajectories of each.
        share: As for `write_trajectories`.
        image_storage: copy or reference, as in `ImageSettings`.

    Raises:
        ConfigError: Some have a number, such as a reward, that others lack.
    """
    every = [one for group in groups for one in group]
    if any(one.step_rewards for one in every):
        groups = [[_with_turn_rewards(one) for one in group] for group in groups]
        every = [one for group in groups for one in group]
    numbers = {
        REWARD: [one.reward for one in every],
        ADVANTAGE: [one.advantage for one in every],
        TEMPERATURE: [one.temperature for one in every],
    }
    names = [name for name, values in numbers.items() if _all_or_none(name, values)]
    has_logs = _all_or_none(
        "log-probabilities", [one.has_log_probabilities or None for one in every]
    )
    columns = [
        *([LOG_PROBABILITIES] if has_logs else []),
        *([TOKEN_ADVANTAGES] if any(one.step_advantages for one in every) else []),
        *([TURN_REWARDS] if any(one.step_rewards for one in every) else []),
        *([POLICY_VERSION] if _all_or_none("version", [one.version for one in every]) else []),
    ]
    return [_tree_of(group, names, columns, share, image_storage) for group in groups]


def _with_turn_rewards(one: FinishedTrajectory) -> FinishedTrajectory:
    """Where others have rewards of turns, the reward of one without them is that of its last."""
    if one.step_rewards or one.reward is None:
        return one
    turns = 1 + max(number for path in one.paths for number in path.replies)
    return replace(one, step_rewards=(*[0.0] * (turns - 1), one.reward))


def _all_or_none(name: str, values: Sequence[object]) -> bool:
    """Whether all have a number.

    Raises:
        ConfigError: Some have.
    """
    missing = [place for place, value in enumerate(values) if value is None]
    if missing and len(missing) < len(values):
        raise ConfigError(
            f"trajectory {missing[0]} has no {name}, and others have; give it to all, or to none"
        )
    return not missing


def _tree_of(
    group: Sequence[FinishedTrajectory],
    names: Sequence[str],
    columns: Sequence[str],
    share: bool,
    image_storage: str,
) -> TreeDocument:
    paths = [(answer, one, path) for answer, one in enumerate(group) for path in one.paths]
    return build_tree(
        [path.ids for _, _, path in paths],
        [path.weights for _, _, path in paths],
        values={
            ANSWER: [float(answer) for answer, _, _ in paths],
            **{name: [getattr(one, name) for _, one, _ in paths] for name in names},
            TRUNCATED: [float(one.truncated) for _, one, _ in paths],
        },
        columns={name: [_column(name, one, path) for _, one, path in paths] for name in columns},
        share=share,
        images=[
            [stored_image(image, place, image_storage) for image, place in path.images]
            for _, _, path in paths
        ],
    )


def _column(name: str, one: FinishedTrajectory, path: TokenPath) -> Any:
    """[tokens] of a path."""
    if name == LOG_PROBABILITIES:
        return path.log_probabilities
    if name == POLICY_VERSION:
        return np.full(len(path.ids), one.version, np.int32)
    given = one.step_advantages if name == TOKEN_ADVANTAGES else one.step_rewards
    # NaN: a token without an advantage is not trained; a turn has its reward at its last token.
    found = np.full(len(path.ids), np.nan, np.float32)
    ends = [*path.begins[1:], len(path.ids)]
    for number, begin, end in zip(path.replies, path.begins, ends, strict=True):
        trained = begin + np.flatnonzero(path.weights[begin:end] > 0)
        if not given or not len(trained):
            continue
        value = np.array(given[number], np.float32)
        if value.ndim:
            # Of each token of the reply; those that are not trained have none.
            value = value[trained - begin]
        found[trained if name == TOKEN_ADVANTAGES else trained[-1:]] = value
    return found


def _next_round(folder: Path) -> Path:
    """The folder of the next round; one that was not finished is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).exists():
        raise OutputError(
            f"{folder}: is a dataset itself; rounds are appended in a folder of their own"
        )
    rounds = sorted(one for one in folder.iterdir() if one.is_dir() and one.name.isdigit())
    while rounds and not (rounds[-1] / MANIFEST).exists():
        shutil.rmtree(rounds.pop())
    return folder / f"{int(rounds[-1].name) + 1 if rounds else 0:05}"


def read_trajectories(
    source: str | Path | Sequence[str | Path],
    reader: TrajectoryReader,
    headers: list[JsonMapping] | None = None,
) -> Iterator[FinishedTrajectory | RecordError]:
    """The trajectories of files, in order; for a record that is none, why.

    Args:
        source: As for `prepare_trajectories`.
        reader: Reads records.
        headers: Gets the lines in which rounds of rollouts say what they are of.

    Raises:
        RecordError: A file cannot be read to its end.
    """
    paths = [str(source)] if isinstance(source, str | Path) else [str(one) for one in source]
    for part in open_sources(paths, fields=Fields(whole=True)):
        for block in part.objects(stop_at_damage):
            yield from (RecordError(str(reject)) for reject in block.rejects)
            places = zip(block.files.tolist(), block.lines.tolist(), strict=True)
            for (file, line), record in zip(places, block.objects, strict=True):
                if DIGEST in record and set(record) <= HEADER:
                    if headers is not None:
                        headers.append(record)
                    continue
                yield from reader.read_all(
                    record, f"{part.files[file]}:{line}", file=part.addresses[file]
                )


@suggests
def prepare_trajectories(
    source: str | Path | Sequence[str | Path],
    *,
    tokenizer: Tokenizer | str | Path,
    output: str | Path,
    template: Template | str | Path | None = None,
    history: History = "sampled",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    append: bool = False,
    share: bool = True,
    processor: Processor | str | Path | None = None,
    image_settings: ImageSettings | None = None,
    progress: bool = True,
) -> Dataset:
    """Make a dataset of trajectories from files of records.

    Args:
        source: JSON lines, Parquet or Arrow; paths, folders, globs. The layout of records is in
            `penstock.chat.trajectories.records`: ours, and those of vLLM, verl, TRL, verifiers,
            prime-rl and slime.
        tokenizer: Of the engine that sampled, or where to load it from.
        output: A new folder; with `append`, that of all rounds.
        template: For steps without prompt ids, which are rendered; None: the processor's or the
            tokenizer's own, if any step needs it.
        history: How such prompts go on after a reply: sampled, template, tool_cycle.
        chat_template_kwargs: Variables for the template.
        on_error: What to do about a record that cannot be read: stop, or skip it and say so.
        append: Write the next round.
        share: False: each path is stored apart, for models that read no trees.
        processor: Of the model, or where to load it from: messages of steps may then have images or
            sounds, also where prompt ids are given. None: they are refused.
        image_settings: Which images are accepted, and how they are stored; relative paths begin at
            the folder of their file.
        progress: Say what was read.

    Raises:
        RecordError: A record cannot be read, with file and line, and `on_error` is stop; or there
            is none.
        ConfigError: A setting is out of range.
        OutputError: The folder is not empty, or cannot be written.
    """
    if history not in HISTORIES:
        raise ConfigError(f"history must be one of {', '.join(HISTORIES)}, got {history!r}")
    if on_error not in ("stop", "skip"):
        raise ConfigError(f"on_error must be stop or skip, got {on_error!r}")
    loaded = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
    if image_settings is not None and (processor is None or image_settings.verify_all):
        raise ConfigError(
            "image_settings need a processor, and cannot have verify_all: what was sampled is not "
            "encoded again"
        )
    if isinstance(processor, str | Path):
        processor = load_processor(processor)
    reader = TrajectoryReader(
        tokenizer=loaded,
        template=_template(template, loaded, processor),
        history=history,
        variables=chat_template_kwargs or {},
        processor=processor,
        image_settings=image_settings or ImageSettings(),
    )
    found: list[FinishedTrajectory] = []
    known: dict[bytes, LoadedImage] = {}
    skipped: list[RecordError] = []
    headers: list[JsonMapping] = []
    with Progress("trajectories", total=None, unit="", enabled=progress) as bar:
        for one in read_trajectories(source, reader, headers):
            if isinstance(one, RecordError):
                if on_error == "stop":
                    raise one
                skipped.append(one)
            else:
                found.append(_with_known(one, known))
                bar.advance(1)
    if not found:
        raise RecordError(f"{source}: holds no trajectory")
    dataset = write_trajectories(
        output,
        found,
        tokenizer=loaded,
        sampling=_sampling_of(headers),
        append=append,
        share=share,
        processor=processor,
        image_settings=image_settings,
    )
    if progress:
        say(summary(found, dataset, skipped))
    return dataset


def _sampling_of(headers: Sequence[JsonMapping]) -> JsonMapping:
    """The filters with which rounds were sampled, which a policy refuses.

    Raises:
        ConfigError: They differ.
    """
    given = [one.get(SAMPLING, {}) for one in headers]
    if different := [one for one in given if one != given[0]]:
        shown = " and with ".join(str(one or "no filters") for one in (given[0], different[0]))
        raise ConfigError(f"rounds were sampled with {shown}; prepare them apart")
    return dict(given[0]) if given else {}


def _with_known(one: FinishedTrajectory, known: dict[bytes, LoadedImage]) -> FinishedTrajectory:
    """A trajectory in which an image that was in others is the same object, so that its bytes are
    kept once.
    """
    if not any(path.images for path in one.paths):
        return one
    paths = []
    for path in one.paths:
        images = [(known.setdefault(image.digest, image), place) for image, place in path.images]
        paths.append(path._replace(images=tuple(images)))
    return replace(one, paths=tuple(paths))


def _template(
    template: Template | str | Path | None, tokenizer: Tokenizer, processor: Processor | None
) -> Template | None:
    if isinstance(template, Template):
        return template
    if template is not None and template != "auto":
        return load_template(template, tokenizer=tokenizer)
    try:
        return template_of(tokenizer, processor)
    except ConfigError:
        # Steps with prompt ids need none; those without say so.
        return None


def summary(
    found: Sequence[FinishedTrajectory], dataset: Dataset, skipped: Sequence[RecordError]
) -> str:
    """What was written, in a line or two."""
    paths = sum(len(one.paths) for one in found)
    tokens = sum(len(path.ids) for one in found for path in one.paths)
    stored = int(dataset.num_tokens)
    text = (
        f"{len(found):,} trajectories in {len(dataset):,} groups, {paths:,} paths: "
        f"{sum(one.sampled for one in found):,} sampled tokens; {stored:,} stored of {tokens:,} "
        f"({tokens / max(stored, 1):.1f} × shared)"
    )
    if skipped:
        text += f"; {len(skipped):,} records skipped, the first: {skipped[0]}"
    return text
