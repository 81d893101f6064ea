"""Chooses the files of a dataset on the Hugging Face Hub: those of one subset and one split.

A repository may hold several subsets (`configs` in the YAML of its README.md) with several splits.
Where the README names no files, their names decide, by the conventions of `datasets`: shards such
as `data/train-00000-of-00002.parquet`, else a split's name in a folder, else one in a file name;
files without any are the split `train`. A choice that is open is an error with what there is to
choose.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from penstock.core.errors import ConfigError, RecordError
from penstock.core.yaml_files import parse_yaml
from penstock.data.stores.hub import CARD

_SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split → words for it in the names of folders and files."""
_BETWEEN = r"[-._ 0-9]"
_NO_DATA = frozenset(
    {CARD, "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
)
_DOCUMENTS = (".md", ".rst")

_CONVERTED = ("@refs/convert/parquet", "@refs%2Fconvert%2Fparquet")
"""Where the Hub keeps a dataset as Parquet files: SUBSET/SPLIT/0000.parquet."""

Splits = dict[str, list[str]]
"""Split → names of its files, in the order in which they are read."""


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """What to read of a dataset on the Hub."""

    subset: str | None = None
    """None: the default one, or the only one."""
    split: str | None = None
    """None: `train`, or the only one."""


def choose_files(
    where: str,
    names: Sequence[str],
    card: str,
    choice: Choice,
    suffixes: Iterable[str] | None,
    notice: Callable[[str], None],
) -> list[str]:
    """The files of the chosen subset and split.

    Args:
        where: The dataset, for messages.
        names: All its files, by their paths in it.
        card: The text of its README.md; empty: it has none.
        choice: Which subset and split.
        suffixes: Endings of names that data may have; None: any.
        notice: Called with a message that says what was chosen among what.

    Raises:
        ConfigError: The choice is open, or there is no such subset or split; names those that are
            there.
        RecordError: The subset has no files.
    """
    subsets = _converted(names) if where.endswith(_CONVERTED) else _subsets(card, where)
    subset = _chosen_subset(where, subsets, choice.subset)
    settings = subsets.get(subset, {}) if subset is not None else {}
    splits = _splits(where, names, settings, suffixes)
    split = _chosen_split(where, splits, choice.split)
    others = [_others("subset", subsets, subset), _others("split", splits, split)]
    if any(others):
        chosen = f"split {split}" if subset is None else f"subset {subset}, split {split}"
        notice(f"{where}: reading {chosen}; not read: {'; '.join(filter(None, others))}")
    return splits[split]


def _others(kind: str, names: Iterable[str], chosen: str | None) -> str:
    """What was not chosen, in words."""
    left = [name for name in names if name != chosen]
    return f"{kind}{'s' if len(left) > 1 else ''} {', '.join(left)}" if left else ""


def card_settings(card: str) -> str | None:
    """The YAML at the top of a card, between two lines of ---; None: it has none."""
    found = re.match(r"---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", card, re.DOTALL)
    return None if found is None else found[1]


def _subsets(card: str, where: str) -> dict[str, dict[str, Any]]:
    """Name → settings of each subset that the card's YAML names."""
    found = card_settings(card)
    if found is None:
        return {}
    # Lines count from ---. Other parts of a card may have any keys, such as numbers of classes.
    _, value = parse_yaml(f"\n{found}", f"{where}/{CARD}", text_keys=False)
    configs = value.get("configs") if isinstance(value, dict) else None
    if not configs:
        return {}
    if not isinstance(configs, list) or not all(
        isinstance(one, dict) and _name(one.get("config_name")) for one in configs
    ):
        raise ConfigError(
            f"{where}/{CARD}: `configs` must be a list of mappings with a config_name; name the "
            f"files instead: {where}/*.parquet"
        )
    return {_name(one["config_name"]): one for one in configs if isinstance(one, dict)}


def _name(value: object) -> str:
    """A name in a card, which YAML may read as a number (2012); empty: it is none."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number or isinstance(value, str) else ""


def _converted(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The same for files that the Hub has converted; of large datasets it converts a part."""
    places = sorted({tuple(name.split("/")[:2]) for name in names if name.count("/") == 2})
    found: dict[str, dict[str, Any]] = {}
    for subset, folder in places:
        one = {"split": folder.removeprefix("partial-"), "path": f"{subset}/{folder}/*"}
        found.setdefault(subset, {"data_files": []})["data_files"].append(one)
    return found


def _chosen_subset(
    where: str, subsets: Mapping[str, Mapping[str, Any]], asked: str | None
) -> str | None:
    if asked is not None and asked not in subsets:
        there = f"it has {', '.join(subsets)}" if subsets else "its README.md names none"
        raise ConfigError(f"{where}: has no subset {asked!r}; {there}")
    if asked is not None or not subsets:
        return asked
    default = [name for name, one in subsets.items() if one.get("default") or name == "default"]
    if len(subsets) == 1 or len(default) == 1:
        return (default or list(subsets))[0]
    raise ConfigError(
        f"{where}: has the subsets {', '.join(subsets)}; choose one with subset (--subset "
        f"{next(iter(subsets))})"
    )


def _chosen_split(where: str, splits: Mapping[str, list[str]], asked: str | None) -> str:
    if not splits:
        raise RecordError(
            f"{where}: no file of this dataset is read as data; name its files: {where}/FOLDER/*"
        )
    if asked is None and ("train" in splits or len(splits) == 1):
        return "train" if "train" in splits else next(iter(splits))
    if asked in splits:
        return str(asked)
    there = f"{where}: has the split{'s' if len(splits) > 1 else ''} {', '.join(splits)}"
    if asked is None:
        raise ConfigError(
            f"{there}, and none is named train; choose one with split (--split "
            f"{next(iter(splits))})"
        )
    cure = "choose one of them"
    if re.search(r"[\[+]", asked):
        cure = f"for parts and sums of splits, pass load_dataset(…, split={asked!r}) in Python"
    raise ConfigError(f"{there}, and no {asked!r}; {cure}")


def _splits(
    where: str, names: Sequence[str], settings: Mapping[str, Any], suffixes: Iterable[str] | None
) -> Splits:
    """The splits of a subset with their files; those without files are left out."""
    folder = str(settings.get("data_dir") or "").strip("/")
    inside = f"{folder}/" if folder else ""
    below = {name.removeprefix(inside): name for name in names if name.startswith(inside)}
    if not settings.get("data_files"):
        found = _by_names(_data(below, suffixes))
    else:
        found = {
            split: [name for pattern in patterns for name in _matching(where, pattern, below)]
            for split, patterns in _patterns(where, settings["data_files"]).items()
        }
    return {
        split: [below[name] for name in dict.fromkeys(files)]
        for split, files in found.items()
        if files
    }


def _patterns(where: str, given: Any) -> dict[str, list[str]]:
    """Split → patterns, of all spellings that `data_files` has in a card."""
    patterns: dict[str, list[str]] = {}
    for one in given if isinstance(given, list) else [given]:
        split, paths = (
            (_name(one.get("split")), one.get("path")) if isinstance(one, dict) else ("train", one)
        )
        listed = paths if isinstance(paths, list) else [paths]
        texts = [path for path in listed if isinstance(path, str)]
        if not split or len(texts) < len(listed):
            raise ConfigError(
                f"{where}/{CARD}: `data_files` must be patterns, or a list of mappings with split "
                f"and path; name the files instead: {where}/*.parquet"
            )
        patterns.setdefault(split, []).extend(texts)
    return patterns


def _matching(where: str, pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern of a card matches, sorted."""
    from fsspec.utils import glob_translate  # as in `file_systems`

    if "://" in pattern:
        raise ConfigError(
            f"{where}/{CARD}: names files elsewhere, {pattern}; give them as the source"
        )
    shape = re.compile(glob_translate(pattern.removeprefix("./")))
    return sorted(name for name in names if shape.match(name) and not _is_private(name, pattern))


def _is_private(name: str, pattern: str) -> bool:
    """Whether a file lies in a folder such as `__pycache__` that its pattern does not name."""

    def private(path: str) -> int:
        return sum(part.startswith("__") for part in path.split("/")[:-1])

    return private(name) != private(pattern)


def _data(names: Iterable[str], suffixes: Iterable[str] | None) -> list[str]:
    """The files that may be data, sorted: of the most frequent ending, where there are several."""
    files = sorted(
        name
        for name in names
        if name.rpartition("/")[2] not in _NO_DATA and not _is_private(name, "")
    )
    if suffixes is None:
        return files
    known = "|".join(re.escape(suffix) for suffix in suffixes if suffix not in _DOCUMENTS)
    shape = re.compile(rf"({known})(\.\w+)?$")
    endings = {name: found[1] for name in files if (found := shape.search(name))}
    most = Counter(endings.values()).most_common(1)
    return [name for name, ending in endings.items() if ending == most[0][0]]


def _by_names(names: Sequence[str]) -> Splits:
    """The splits that the names of files say; the first convention that any file follows holds for
    all.
    """
    sharded: Splits = {}
    for name in names:
        if found := _SHARD.fullmatch(name):
            sharded.setdefault(found[1], []).append(name)
    if sharded:
        return sharded
    for of_folders in (True, False):
        by_word = {
            split: [name for name in names if _has_word(name, words, of_folders)]
            for split, words in _WORDS.items()
        }
        if any(by_word.values()):
            return by_word
    return {"train": list(names)}


def _has_word(name: str, words: Iterable[str], of_folders: bool) -> bool:
    """Whether a folder of a file, or its own name, has one of the words as a word of its own."""
    *folders, own = name.split("/")
    parts, end = (folders, rf"(?:{_BETWEEN}|$)") if of_folders else ([own], _BETWEEN)
    shape = re.compile(rf"(?:^|{_BETWEEN})(?:{'|'.join(words)}){end}")
    return any(shape.search(part) for part in parts)
