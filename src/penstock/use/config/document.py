"""A YAML file as plain values, with the line of every key for error messages.

Stricter than YAML: a duplicate key is an error (most parsers silently keep the last one), and keys
must be text.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import yaml

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonObject, JsonValue
from penstock.core.yaml_files import DEEPEST, parse_yaml, read_yaml
from penstock.data.shards.opening import corpus_name

Place = tuple[str | int, ...]
"""Keys and list indices from the top of the file to a value."""


@final
@dataclass(frozen=True, slots=True)
class Document:
    """The contents of a file, with line numbers."""

    name: str
    """The file's name in error messages."""
    values: JsonObject
    """Mappings, lists and scalars."""
    lines: dict[Place, int]
    """Line (from 1) of every key and list entry in the file."""
    assigned: dict[Place, str] = field(default_factory=dict)
    """Place set by `--set` → the assignment as written."""

    def where(self, place: Place) -> str:
        """`run.yaml:12: data.loader.seed`, or `--set data.loader.seed=x` if that set the value.

        The line is that of the nearest enclosing key in the file. Assignments inside the place are
        named too, since they may have caused the error.
        """
        enclosing = [place[:size] for size in range(len(place), 0, -1)]
        assigned = next((self.assigned[part] for part in enclosing if part in self.assigned), None)
        if assigned is not None:
            given = f"--set {shortened(assigned)}"
            return given if place in self.assigned else f"{given}: {dotted(place)}"
        line = next((self.lines[part] for part in enclosing if part in self.lines), None)
        file = self.name if line is None else f"{self.name}:{line}"
        inside = [text for part, text in self.assigned.items() if part[: len(place)] == place]
        among = (
            f" (with {' '.join(f'--set {shortened(text)}' for text in inside)})" if inside else ""
        )
        return f"{file}: {dotted(place)}{among}" if place else f"{file}{among}"


def shortened(text: str, most: int = 80) -> str:
    """The text on one line, cut to at most `most` characters."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def dotted(place: Place) -> str:
    """("data", "sources", 1, "share") → "data.sources.1.share"."""
    return ".".join(str(part) for part in place)


def read_document(path: str | Path) -> Document:
    """Read a YAML file with a mapping at its top level.

    Raises:
        ConfigError: The file is missing, not YAML, beyond the limits of `yaml_files`, or has a
            duplicate key.
    """
    node, values = read_yaml(path)
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{path}: the top level of a run file must be a mapping, such as `data: …`"
        )
    lines: dict[Place, int] = {}
    _walk(node, (), lines, str(path))
    return Document(str(path), values, lines)


def _walk(node: yaml.Node, place: Place, lines: dict[Place, int], file: str) -> None:
    """Record the line of everything below `node`, and refuse duplicate keys."""
    if isinstance(node, yaml.SequenceNode):
        for index, entry in enumerate(node.value):
            lines[*place, index] = entry.start_mark.line + 1
            _walk(entry, (*place, index), lines, file)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            here = (*place, key.value)
            if here in lines:
                raise ConfigError(
                    f"{file}:{line}: {dotted(here)} is given twice, first on line "
                    f"{lines[here]}; keep one"
                )
            lines[here] = line
            _walk(value, here, lines, file)


def override(document: Document, assignments: list[str]) -> Document:
    """A copy of a document with `a.b=1` assignments applied in order.

    Each part of the path is a key, a list index, or the name of a list entry (its `name`, or the
    name derived from its `path`). Values are YAML. Keys missing from the file are added; validation
    later refuses unknown ones.

    Raises:
        ConfigError: An assignment has no `=`, or its path enters something that is neither a
            mapping nor a list.
    """
    values = copied(document.values)
    assigned: dict[Place, str] = {}
    for assignment in assignments:
        path, sign, text = assignment.partition("=")
        if not sign or not path:
            raise ConfigError(
                f"--set {shortened(assignment)}: expected key=value, such as data.loader.seed=7"
            )
        node, value = parse_yaml(text, f"--set {shortened(assignment)}: the value", lines=False)
        holder = values
        *parents, last = path.split(".")
        if len(parents) >= DEEPEST:
            raise ConfigError(
                f"--set {shortened(assignment)}: has {len(parents)} dots; expected fewer than "
                f"{DEEPEST}"
            )
        place: Place = ()
        for part in parents:
            key = _key(holder, part, assignment)
            place = (*place, key)
            if isinstance(holder, dict) and holder.get(key) is None:
                holder[key] = {}
            holder = holder[key]
        key = _key(holder, last, assignment)
        if node is not None:
            _walk(node, (*place, key), {}, f"--set {shortened(assignment)}")
        holder[key] = value
        assigned[*place, key] = assignment
    return Document(document.name, values, document.lines, assigned)


def copied(value: object) -> JsonValue:
    """A deep copy in which aliases (YAML's `*name`) are separate copies, so that setting one does
    not change others.
    """
    if isinstance(value, dict):
        return {key: copied(entry) for key, entry in value.items()}
    return [copied(entry) for entry in value] if isinstance(value, list) else value


def _key(holder: object, part: str, assignment: str) -> str | int:
    """The key or index that `part` means in `holder`."""
    if isinstance(holder, dict):
        return part
    if not isinstance(holder, list):
        raise ConfigError(
            f"--set {assignment}: nothing can be set at {part!r}, since it would be inside "
            f"{shortened(repr(holder))}"
        )
    if part.isdecimal() and int(part) < len(holder):
        return int(part)
    names = [_entry_name(entry) for entry in holder]
    if part in names:
        return names.index(part)
    known = ", ".join(f"{index}{f' ({name})' if name else ''}" for index, name in enumerate(names))
    raise ConfigError(
        f"--set {assignment}: no entry {part!r} in the list; it has {known or 'no entries'}"
    )


def _entry_name(entry: object) -> str:
    if not isinstance(entry, dict):
        return ""
    path = entry.get("path")
    return str(entry.get("name") or (corpus_name(path) if isinstance(path, str | list) else ""))
