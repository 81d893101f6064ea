"""Reads a configuration of any library that is known, as a file of YAML or JSON or as a command
line, and translates it.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast, get_args

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonObject
from penstock.use.config.document import read_document
from penstock.use.config.imports.conversion import Imported, import_axolotl
from penstock.use.config.imports.llama_factory import import_llama_factory
from penstock.use.config.imports.trl import Method, import_trl

Library = Literal["axolotl", "trl", "trl-sft", "trl-dpo", "trl-kto", "trl-grpo", "llama-factory"]
_METHOD = re.compile(r"(?:^|/)(sft|dpo|kto|grpo)(?:_\w+)?(?:\.py)?$")
"""The word of a command line that says what is trained: `trl sft`, `python scripts/dpo.py`."""
_SHELL = re.compile(
    r"""(?P<quoted>'[^']*'|"(?:[^"\\]|\\.)*"|\\.)"""
    r"""|(?P<redirect>(?:(?<=\s)\d)?(?:&>>?|>>?&?|<)\s*[^\s|;&<>]+)"""
    r"""|(?P<end>\|\||&&|[|;&])""",
    re.DOTALL,
)
"""What a shell reads as more than a word: text in quotes, a redirection, the end of a command."""
_OVERRIDDEN = re.compile(
    r"\b(?:llamafactory-cli|lmf)\s+train\s+(\S+\.(?:ya?ml|json))((?:\s+[\w.]+=\S+)*)"
)
"""LLaMA-Factory's own way: a file, and words `key=value` that replace some of its keys."""
_MODEL = re.compile(r"--(model_name_or_path|config)\b")
_OF_LLAMA_FACTORY = {"stage", "finetuning_type", "cutoff_len", "dataset_dir", "dataset"}


def import_config(
    path: str | Path,
    *,
    library: str | None = None,
    run_file: str = "run.yaml",
    ranks: int = 1,
    steps: int | None = None,
) -> Imported:
    """Translate a configuration of axolotl, TRL or LLaMA-Factory.

    Args:
        path: A file of YAML or JSON, or (TRL, LLaMA-Factory) a shell script with one command line.
        library: Whose it is, one of `Library`; None: its keys say so.
        run_file: Where the result will be written, for the commands.
        ranks: Number of processes that train, which decides how many rows a step has.
        steps: Optimizer steps of the whole run, if known: with them, shares of a run and of an
            epoch become steps.

    Raises:
        ConfigError: The file cannot be read, no library is recognised, or a value has the wrong
            kind.
    """
    if library is not None and library not in get_args(Library):
        listed = ", ".join(get_args(Library))
        raise ConfigError(f"library (--from) is {library!r}; expected one of {listed}")
    values, method = _read(path)
    known = library or _library_of(values)
    if known == "axolotl":
        return import_axolotl(path, run_file=run_file, ranks=ranks, steps=steps)
    if known == "llama-factory":
        return import_llama_factory(values, str(path), run_file, ranks, steps)
    if known is None:
        raise ConfigError(
            f"{path}: expected a configuration of axolotl (base_model, datasets), TRL "
            "(model_name_or_path) or LLaMA-Factory (stage, dataset); say whose it is with "
            "library (--from)"
        )
    named = known.removeprefix("trl").removeprefix("-") or method  # trl-dpo → dpo
    return import_trl(values, str(path), cast("Method | None", named), run_file, ranks, steps)


def _library_of(values: Mapping[str, Any]) -> str | None:
    """The library whose keys these are."""
    if "base_model" in values:
        return "axolotl"
    if _OF_LLAMA_FACTORY & set(values):
        return "llama-factory"
    return "trl" if "model_name_or_path" in values else None


def _read(path: str | Path) -> tuple[JsonObject, str | None]:
    """The keys, and the method that a command line names.

    Raises:
        ConfigError: It is a program, or cannot be read.
    """
    if Path(path).suffix in (".py", ".ipynb"):
        raise ConfigError(
            f"{path}: is a program, and its settings are known only once it runs; add to it, "
            "behind its SFTConfig, DPOConfig or GRPOConfig: import json; "
            "open('trl.json', 'w').write("
            "json.dumps({**args.to_dict(), 'model_name_or_path': MODEL, 'dataset_name': DATA})), "
            "and import trl.json"
        )
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        text = ""  # reading it as YAML says what is wrong
    lines = text.replace("\\\n", " ").splitlines()
    if named := _OVERRIDDEN.search("\n".join(line for line in lines if line.lstrip()[:1] != "#")):
        values = dict(read_document(_beside(named[1], Path(path))).values)
        pairs = (word.partition("=") for word in named[2].split())
        return {**values, **{key: _scalar(value) for key, _, value in pairs}}, None
    commands = [line for line in lines if re.match(r"[^#:]*\s--\w", f" {line}")]
    if not commands:
        return read_document(path).values, None
    commands = [one for line in commands for one in _commands(line) if _MODEL.search(one)]
    if len(commands) != 1:
        raise ConfigError(
            f"{path}: {len(commands)} command lines with model_name_or_path or config; keep one"
        )
    return read_command(commands[0], Path(path))


def _commands(line: str) -> list[str]:
    """The commands of a line of a shell, without what they redirect."""
    found, at = [""], 0
    for word in _SHELL.finditer(line):
        found[-1] += line[at : word.start()] + (word["quoted"] or "")
        if word["end"]:
            found.append("")
        at = word.end()
    found[-1] += line[at:]
    return found


def _beside(named: str, path: Path) -> Path:
    """The file that a command names, from here or from where the command is."""
    return Path(named) if Path(named).exists() else path.parent / named


def read_command(line: str, path: Path) -> tuple[JsonObject, str | None]:
    """The keys of a command line, on top of those of the file that its `--config` names, and the
    method.

    Raises:
        ConfigError: It cannot be split, or has a variable of the shell.
    """
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise ConfigError(f"{path}: the command line cannot be split: {error}") from error
    if variable := next((word for word in words if re.search(r"\$[\w{(@]", word)), None):
        raise ConfigError(f"{path}: {variable}: write the value of this variable of the shell")
    named = [
        (at, match[1])
        for at, (before, word) in enumerate(pairwise(["", *words]))
        if (match := _METHOD.search(word)) and (before == "trl" or word.endswith(".py"))
    ]
    # What precedes the method is for a launcher.
    start, method = named[0] if named else (-1, None)
    found: dict[str, list[str]] = {}
    name = ""
    for word in words[start + 1 :]:
        if re.match(r"--[A-Za-z]", word):
            name, sign, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if sign else []
            if name.startswith("no_") and not sign and name != "no_cuda":
                # The opposite of a switch.
                found[name.removeprefix("no_")] = ["false"]
                del found[name]
                name = ""
        elif name:
            found[name].append(word)
    values: JsonObject = {}
    if config := found.pop("config", None):
        values = dict(read_document(_beside(config[0], path)).values)
    for key, given_words in found.items():
        values[key] = _value(given_words)
    return values, method


def _value(words: Sequence[str]) -> Any:
    """A value of the command line: none is true, several are a list."""
    read = [_scalar(word) for word in words]
    return True if not read else read[0] if len(read) == 1 else read


def _scalar(word: str) -> Any:
    """A number, true, false, or what is written as JSON; other words as they are."""
    try:
        return json.loads(word.lower() if word in ("True", "False") else word)
    except (ValueError, RecursionError):
        return word
