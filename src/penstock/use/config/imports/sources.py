"""What `penstock prepare` reads of a dataset that another library's configuration names: files, a
folder, a URL, or a dataset on the Hub with its subset and split.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from penstock.core.errors import ConfigError, RecordError
from penstock.core.urls import has_secrets, shown_url
from penstock.data.sources.formats import EXTENSIONS
from penstock.data.sources.hub_datasets import Choice, choose_files
from penstock.data.stores.hub import CARD
from penstock.use.config.imports.notes import Keys

FILE = re.compile(r"\.(jsonl?|ndjson|parquet|arrow|txt|csv|md)(\.(gz|zst|xz|bz2|lz4))?$")
"""End of a file's name; a name without it may be one on the Hub."""
FORMATS = {
    "json": "jsonl",
    "jsonl": "jsonl",
    "parquet": "parquet",
    "arrow": "arrow",
    "text": "text",
    "csv": "csv",
}
"""A loader of `datasets` → the format of `penstock prepare`."""


def read_sources(keys: Keys, path: str, options: list[str]) -> list[str]:
    """Files, folders and URLs; a Hub name becomes hf://datasets/NAME.

    Args:
        keys: The entry of the dataset.
        path: Its path.
        options: Words for the command, to which those of a subset, a split and a format are added.
    """
    files = _files(keys)
    if files and path in FORMATS and not Path(path).exists():
        # load_dataset("json", data_files=…)
        options += ["--format", FORMATS[path]]
        _take_split(keys, is_local=True)
        return [_shown(keys, one) for one in files]
    local = (
        "://" in path
        or path.startswith((".", "/", "~"))
        or Path(path).exists()
        or bool(FILE.search(path))
    )
    if local and not files and Path(path).is_dir() and keys.library != "LLaMA-Factory":
        return _of_folder(keys, path)
    for name in ("name", "split") if not local and not files and "/" in path else ():
        chosen = keys.get(name)
        if chosen is not None and not re.search(r"[\[+]", str(chosen)):
            flag = "--subset" if name == "name" else "--split"
            options += [flag, str(chosen)]
            keys.mapped(name, flag)
    _take_split(keys, is_local=local)
    base = path if local else f"hf://datasets/{path}"
    revision = keys.get("revision")
    if revision is not None and not local:
        owner, _, rest = path.partition("/")
        name, slash, folder = rest.partition("/")
        base = f"hf://datasets/{owner}/{name}@{revision}{slash}{folder}"
        keys.mapped("revision", base)
    if not files:
        return [_shown(keys, base)]
    beside = not (local and FILE.search(path))
    return [_shown(keys, f"{base}/{one}" if beside and "://" not in one else one) for one in files]


def _files(keys: Keys) -> list[str]:
    """The files that `data_files` names, of the split that is asked for."""
    given = keys.get("data_files")
    if isinstance(given, Mapping):
        split = str(keys.get("split", "train"))
        if split not in given:
            raise ConfigError(
                f"{keys.file}: {keys.called('data_files')} has {', '.join(map(str, given))}, and "
                f"no {split!r}; set split to one of them"
            )
        keys.mapped("split", f"data_files.{split}")
        given = given[split]
    return [str(one) for one in ([given] if isinstance(given, str) else given or ())]


def _take_split(keys: Keys, *, is_local: bool) -> None:
    """What becomes of a split that no option chooses."""
    split = keys.get("split")
    if split is None or "split" in keys.noted:
        return
    if str(split) != "train":
        text = "name the files of this split in the penstock prepare command"
        keys.note("split", "decide", text, shown=True)
    else:
        text = "all files of the dataset are read; name those of the split, if it has others"
        keys.note("split", "mapped" if is_local else "decide", text)


def files_of_split(path: str, subset: str | None, split: str | None) -> list[str]:
    """The files of a split in a local folder, as `datasets` finds them; the folder, if it has no
    others.

    Raises:
        ConfigError: There is no such subset or split, or several and none is asked for.
        RecordError: The folder holds no data.
    """
    folder, said = Path(path), list[str]()
    names = sorted(one.relative_to(folder).as_posix() for one in folder.rglob("*") if one.is_file())
    card = folder / CARD
    about = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    found = choose_files(path, names, about, Choice(subset, split), EXTENSIONS, said.append)
    return [f"{path.rstrip('/')}/{name}" for name in found] if said else [path]


def _of_folder(keys: Keys, path: str) -> list[str]:
    subset, split = keys.get("name"), keys.get("split")
    try:
        found = files_of_split(path, subset and str(subset), split and str(split))
    except (ConfigError, RecordError) as error:
        keys.note("path", "decide", f"{error}; the whole folder is read", shown=True)
        _take_split(keys, is_local=True)
        return [path]
    keys.mapped("name", "the files in the penstock prepare command")
    keys.mapped("split", "the files in the penstock prepare command")
    return found


def _shown(keys: Keys, url: str) -> str:
    """A path or URL for a command that is written down."""
    if not has_secrets(url):
        return url
    cure = (
        "add the user info or the signature of its URL to the penstock prepare command: secrets "
        "are not written down"
    )
    keys.note("path", "decide", cure)
    return shown_url(url)


def take_format(keys: Keys, options: list[str]) -> None:
    """`ds_type` as an option of the command."""
    kind = keys.get("ds_type")
    if kind is None:
        return
    if str(kind) in FORMATS:
        options += ["--format", FORMATS[str(kind)]]
        keys.mapped("ds_type", "--format")
    else:
        keys.note(
            "ds_type", "unsupported", "convert the files to JSON lines or Parquet", shown=True
        )
