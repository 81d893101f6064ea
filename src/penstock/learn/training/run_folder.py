"""A run's folder: what `penstock train` writes, and what generating, chatting, serving and
exporting read.

    RUN/run.yaml               the run file with all overrides, as it was trained
    RUN/tokenizer/             the tokenizer of the datasets, with its chat template if there is one
    RUN/facts.json             what the base says, and how texts of the data begin: `penstock.models.facts`
    RUN/continued.json         what was taken from another run, if any was
    RUN/chat.json              template, stop ids and settings of the datasets' chats, if there are any
    RUN/processor/             the processor of the datasets' images, and their settings, if there are any
    RUN/checkpoints/step-…/    complete ones only; each has the model in `model/`
    RUN/base/                  of a run that trains LoRA: the model it was added to; its checkpoints hold the LoRA alone
    RUN/metrics.jsonl          one record per line
    RUN/trackers.json          the run's id in each tracker, if there are any: `penstock.learn.training.trackers`
    RUN/sent.jsonl             which steps each tracker took
    RUN/lock                   locks the folder against a second training

A folder in the Hugging Face layout is accepted wherever a run is.
"""  # noqa: E501

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from penstock.core.errors import ConfigError, CorruptionError, FormatError, OutputError
from penstock.core.folders import hub_copy, may_be_of_hub
from penstock.core.json_files import parse_json
from penstock.core.json_values import JsonObject, JsonValue
from penstock.core.yaml_files import parse_yaml, read_yaml
from penstock.data.shards import ChatInfo
from penstock.data.shards.format.images import MEDIA, PROCESSOR_FOLDER, MediaInfo
from penstock.data.shards.format.manifest import CHAT, CHAT_TEMPLATE, TOKENIZER_FOLDER
from penstock.data.shards.tables.corpus import Corpus
from penstock.learn.training.checkpoints import digest, newest_complete, read_manifest
from penstock.learn.training.continued import CONTINUED, Continued
from penstock.learn.training.metrics import METRICS
from penstock.learn.training.trackers import KNOWN_RUNS, SENT, TENSORBOARD, WANDB
from penstock.models.facts import FACTS, ModelFacts
from penstock.tokenizers.chat_templates import template_beside
from penstock.tokenizers.loading import load_tokenizer

RUN_FILE, CHECKPOINTS = "run.yaml", "checkpoints"
MODEL = "model"
"""Folder of the model in a checkpoint."""
BASE = "base"
"""Folder of the model that LoRA was added to."""
LOCK = "lock"
TENSORS = "tensors"
"""Folder of `penstock.learn.training.tensor_logs`."""
_BEGUN = {
    TOKENIZER_FOLDER,
    PROCESSOR_FOLDER,
    CHAT,
    CHAT_TEMPLATE,
    FACTS,
    CONTINUED,
    LOCK,
    RUN_FILE,
    KNOWN_RUNS,
    SENT,
    TENSORBOARD,
    WANDB,
    TENSORS,
}
"""Files of a run that has not trained yet."""
_GIVE = "give the folder of a run (`penstock train`) or of a model of transformers"
_PROCESSORS = ("processor_config.json", "preprocessor_config.json", "patch_processor.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """A trained model with everything needed to use it; `penstock.Run` adds the methods."""

    path: Path
    """The run's folder, or a folder in the Hugging Face layout."""
    model: Path
    """Folder for `penstock.load_model`."""
    tokenizer: Path
    """Folder for `penstock.load_tokenizer`."""
    template: str | None
    """Text of the chat template; None if the model has none."""
    stop_ids: tuple[int, ...]
    """Ids that end a generation."""
    step: int | None
    """Steps that the model was trained for; None if unknown."""
    trained_length: int | None
    """Slots per row in training; of a model in the Hugging Face layout, the tokens that it
    reads.
    """
    facts: ModelFacts = field(default_factory=ModelFacts)
    """What its base says, and what its data have."""
    processor: Path | None = None
    """Folder for `penstock.media.load_processor`; None: the model reads no images."""

    @property
    def name(self) -> str:
        """The folder's name; of a copy in the hub's cache
        (`models--owner--name/snapshots/revision`), the model's.
        """
        path = self.path.resolve()
        if path.parent.name == "snapshots":
            return path.parent.parent.name.split("--", 2)[-1]
        return path.name

    @property
    def context_length(self) -> int | None:
        """Maximum tokens that the model reads: as its base says, else as it was trained; None:
        unknown.
        """
        return self.facts.context_length or self.trained_length

    @property
    def image_settings(self) -> JsonObject:
        """How images became RGB in training (`penstock.media.ImageSettings`); empty: unknown."""
        if self.processor is None or self.processor == self.path:
            return {}
        return MediaInfo.load(self.processor).settings

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Find the newest complete checkpoint of a run, or a model in the Hugging Face layout.

        Args:
            path: A folder, or the name of a model on the Hugging Face hub.

        Raises:
            FormatError: It is neither, or has no complete checkpoint yet; or the hub has nothing by
                that name.
            CorruptionError: Its run file is damaged.
            MissingExtraError: It is a name on the hub, and huggingface_hub is not installed.
        """
        if not Path(path).exists() and may_be_of_hub(str(path)):
            return cls._of_huggingface(_of_hub(str(path)))
        if not Path(path).exists():
            raise FormatError(f"{path}: no such folder; {_GIVE}")
        path = Path(path)
        if (path / "config.json").is_file():
            return cls._of_huggingface(path)
        if path.parent.name == CHECKPOINTS and (path / MODEL).is_dir():
            raise FormatError(
                f"{path}: is a checkpoint; give its run, {path.parent.parent}, which takes "
                "the newest one"
            )
        if not (path / RUN_FILE).is_file():
            raise FormatError(
                f"{path}: no run ({RUN_FILE} is missing) and no model in the Hugging Face layout "
                f"(config.json is missing); {_GIVE}"
            )
        checkpoint = newest_complete(path / CHECKPOINTS)
        if checkpoint is None:
            raise FormatError(
                f"{path}: no complete checkpoint yet; train on, or wait for the first"
            )
        # Prefer the checkpoint's copy, because its checksums were just verified.
        kept, chat = checkpoint.folder / TOKENIZER_FOLDER, ChatInfo.load(path)
        tokenizer = kept if kept.is_dir() else path / TOKENIZER_FOLDER
        facts = ModelFacts.load(checkpoint.folder) or ModelFacts.load(path)
        if facts is None:
            facts = _facts_of_old(path, checkpoint.part(MODEL), tokenizer)
        return cls(
            path=path,
            model=checkpoint.part(MODEL),
            tokenizer=tokenizer,
            template=None if chat is None else chat.template,
            stop_ids=_stop_ids(
                tokenizer, (*facts.stop_ids, *(() if chat is None else chat.stop_ids))
            ),
            step=checkpoint.step,
            trained_length=_trained_length(path),
            facts=facts,
            processor=next(
                (
                    folder / PROCESSOR_FOLDER
                    for folder in (checkpoint.folder, path)
                    if (folder / PROCESSOR_FOLDER / MEDIA).is_file()
                ),
                None,
            ),
        )

    def fingerprint(self) -> str:
        """Fingerprint of the model's weights and settings, byte for byte.

        A run's files were read and checked when it was opened; a model in the Hugging Face layout
        is read here, at about 1 GB/s.
        """
        manifest = None if self.step is None else read_manifest(self.model.parent)
        if manifest is not None:
            found = {
                name: entry["sha256"]
                for name, entry in manifest["files"].items()
                if name.startswith(f"{MODEL}/")
            }
        else:
            found = {
                path.name: digest(path)
                for path in self.model.iterdir()
                if path.suffix in (".safetensors", ".bin") or path.name == "config.json"
            }
        return blake2b(json.dumps(found, sort_keys=True).encode(), digest_size=16).hexdigest()

    @classmethod
    def _of_huggingface(cls, path: Path) -> Self:
        template = template_beside(path, _json(path / "tokenizer_config.json"))
        facts = ModelFacts.of_folder(path)
        return cls(
            path=path,
            model=path,
            tokenizer=path,
            template=template,
            stop_ids=_stop_ids(path, facts.stop_ids),
            step=None,
            trained_length=facts.context_length,
            facts=facts,
            processor=path if any((path / name).is_file() for name in _PROCESSORS) else None,
        )


def _of_hub(name: str) -> Path:
    """The copy of a model of the hub, with its tokenizer and processor; weights as safetensors
    where it has them.
    """
    small = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
    try:
        folder = hub_copy(name, [*small, "*.safetensors"])
    except FormatError as error:
        raise FormatError(f"{error}; {_GIVE}") from error.__cause__
    if not (folder / "config.json").is_file():
        raise FormatError(
            f"{name}: no folder here, and on the hub it is not a model: config.json is missing"
        )
    if not any(folder.glob("*.safetensors")):
        folder = hub_copy(name, [*small, "*.bin"])
    return folder


def begin_run(
    path: Path,
    run_file: str,
    datasets: Sequence[Corpus],
    *,
    facts: ModelFacts | None = None,
    continued: Continued | None = None,
    resume: bool,
    hold: Callable[[Path], None],
) -> None:
    """Create a run's folder with the run file and the datasets' tokenizer and chat facts; a resumed
    one is kept as is.

    Args:
        path: The folder.
        run_file: Text of the run file.
        datasets: The training data.
        facts: What the base says, and what the data have; None: nothing is known of them.
        continued: What is taken from another run.
        resume: Whether the folder may already hold a run.
        hold: Creates and locks the folder; called once everything else is checked.

    Raises:
        OutputError: The folder holds a run and `resume` is false, or it cannot be written.
        ConfigError: The datasets store no tokenizer, or chats of different templates.
    """
    shipped = _shipped(datasets) if may_begin(path, resume=resume) else None
    hold(path)
    # The process that held the lock before may have begun a run.
    if shipped is not None and may_begin(path, resume=resume):
        _write_run(path, run_file, facts or ModelFacts(), continued, *shipped)


def check_run(path: Path | None, datasets: Sequence[Corpus], *, resume: bool) -> None:
    """Refuse what `begin_run` would refuse, and a folder that cannot be written; writes nothing.

    Args:
        path: The folder; None: check only the datasets.
        datasets: The training data.
        resume: Whether the folder may already hold a run.

    Raises:
        OutputError: The folder holds something else, or cannot be written.
        ConfigError: The datasets store no tokenizer, or chats of different templates.
    """
    if path is None or may_begin(path, resume=resume):
        _shipped(datasets)
    if path is None:
        return
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise OutputError(
            f"{path}: cannot be written: {there} is no folder that you may write to; name "
            "another folder"
        )


def may_begin(path: Path, *, resume: bool) -> bool:
    """Whether a new run starts in this folder, rather than resuming one.

    A run that was killed or failed before its first record starts again.

    Raises:
        OutputError: The folder holds something else, or a run and `resume` is false.
    """
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path}: is a file; name a folder")
    found = list(path.iterdir()) if path.exists() else []
    names = {one.name for one in found if one.name != METRICS or one.stat().st_size}
    if {name.removesuffix(".partial") for name in names} <= _BEGUN:
        return not (resume and RUN_FILE in names)
    if RUN_FILE not in names:
        raise OutputError(f"{path}: the folder is not empty and holds no run; choose another")
    if not resume:
        raise OutputError(
            f"{path}: a run is there already; resume it (--resume, or resume=True), or choose "
            "another folder"
        )
    return False


def change_run(path: Path, now: str, say: Callable[[str], None]) -> None:
    """Report each changed key in the run file of a resumed run, and save the new file.

    The old file is kept as `run.yaml.old`.
    """
    kept = path / RUN_FILE
    before, after = (
        _flat(found or {}) for found in (_read_run_file(path), parse_yaml(now, "run file")[1])
    )
    changed = sorted(
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
    )
    for key in changed:
        say(
            f"resumed with {key}: {after.get(key, 'the default')}; it was "
            f"{before.get(key, 'the default')}"
        )
    if changed:
        try:
            shutil.copyfile(kept, kept.with_name(f"{RUN_FILE}.old"))
            _write_whole(kept, now)
        except OSError as error:
            raise OutputError(
                f"{kept}: cannot be written: {error.strerror}; make room, then resume"
            ) from error


def _read_run_file(path: Path) -> JsonValue:
    """The parsed run file of a run.

    Raises:
        CorruptionError: It is not YAML.
    """
    try:
        return read_yaml(path / RUN_FILE)[1]
    except ConfigError as error:
        raise CorruptionError(f"{error}; copy it back from a checkpoint of the run") from error


def _flat(value: object, place: str = "") -> JsonObject:
    """The leaves of nested mappings and lists by dotted key."""
    if not isinstance(value, dict | list):
        return {place: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        k: v
        for key, inner in items
        for k, v in _flat(inner, f"{place}.{key}" if place else str(key)).items()
    }


def _shipped(datasets: Sequence[Corpus]) -> tuple[Path, ChatInfo | None, Any]:
    """The folder of the datasets' tokenizer, the facts of their chats, and a dataset with images if
    there is one.
    """
    folder = next((d.path / TOKENIZER_FOLDER for d in datasets if d.loaded_tokenizer), None)
    if folder is None:
        raise ConfigError(
            "no source stores its tokenizer, which the trained model needs; use datasets of "
            "penstock prepare"
        )
    chats = [dataset.chat for dataset in datasets if dataset.chat is not None]
    prints = {chat.template_fingerprint for chat in chats}
    if len(prints) > 1:
        names = sorted({chat.template_name for chat in chats})
        raise ConfigError(
            f"the sources' chats were rendered by different templates ({', '.join(names)}); a "
            "model has one: prepare them with the same"
        )
    return folder, chats[0] if chats else None, next((d for d in datasets if d.media), None)


def _write_run(
    path: Path,
    run_file: str,
    facts: ModelFacts,
    continued: Continued | None,
    tokenizer: Path,
    chat: ChatInfo | None,
    pictured: Any,
) -> None:
    try:
        shutil.copytree(tokenizer, path / TOKENIZER_FOLDER, dirs_exist_ok=True)
        if pictured is not None:
            pictured.processor.save(path / PROCESSOR_FOLDER)
            pictured.media.save(path / PROCESSOR_FOLDER)
        if chat is not None:
            chat.save(path)
        facts.save(path)
        if continued is None:
            (path / CONTINUED).unlink(missing_ok=True)
        else:
            continued.save(path)
        _write_whole(path / RUN_FILE, run_file)
    except OSError as error:
        # shutil's error for a whole folder lists all files and has no strerror.
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error


def _write_whole(path: Path, text: str) -> None:
    """Replace a file atomically: a kill leaves the whole new file or the old one."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _stop_ids(tokenizer: Path, given: Sequence[int]) -> tuple[int, ...]:
    """Ids that end a generation: those given, and the tokenizer's EOS."""
    from penstock.learn.generation.session import end_ids

    return end_ids(load_tokenizer(tokenizer), given)


def _facts_of_old(path: Path, model: Path, tokenizer: Path) -> ModelFacts:
    """What can be found out about a run that was begun before facts were kept: from its base, if it
    is still there.

    Texts of its data begin with BOS if the tokenizer has one that is not its EOS, as preparing did
    by default.
    """
    values = _read_run_file(path)
    named = values.get("model") if isinstance(values, dict) else None
    base = (
        Path(named.partition(":")[2])
        if isinstance(named, str) and named.startswith(("hf:", "from:"))
        else None
    )
    places = [model, path / BASE / MODEL, path / BASE, *([] if base is None else [base])]
    folder = next((place for place in places if (place / "config.json").is_file()), None)
    found = ModelFacts() if folder is None else ModelFacts.of_folder(folder)
    known = load_tokenizer(tokenizer)
    bos = None if known.bos_id == known.eos_id else known.bos_id
    return replace(found, begin_ids=() if bos is None else (bos,))


def _trained_length(path: Path) -> int | None:
    value = _read_run_file(path)
    for name in ("data", "loader", "sequence_length"):
        value = value.get(name) if isinstance(value, dict) else None
    return _length(value)


def _length(value: object) -> int | None:
    return value if isinstance(value, int) and value > 1 else None


def _json(path: Path) -> JsonObject:
    value = parse_json(path.read_bytes(), path) if path.is_file() else {}
    return value if isinstance(value, dict) else {}
