"""Reads YAML within bounds: bytes, depth, and the number of values after expanding aliases.

A file of 700 bytes can expand to 10⁹ values (`*name`, "billion laughs"), and 5,000 brackets to a
nesting that crashes any reader. Both are refused before any value is made. Stricter than YAML, all
keys must be text, unless the file is another program's.
"""

from pathlib import Path
from typing import final

import yaml

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonValue

MOST_BYTES = 1 << 20
"""Maximum size of a file; PyYAML reads about 100 KB per second."""
MOST_VALUES = 50_000
"""Maximum number of keys, list entries and scalars, with aliases expanded."""
DEEPEST = 50
"""Maximum nesting of mappings and lists."""

_TOO_DEEP = f"is nested more than {DEEPEST} levels deep; expected fewer"
_MERGE = "tag:yaml.org,2002:merge"
_TEXT = "tag:yaml.org,2002:str"


def read_yaml(path: str | Path) -> tuple[yaml.Node | None, JsonValue]:
    """Read a file.

    Returns:
        Its root node, which has line numbers, and its value; None and None for an empty file.

    Raises:
        ConfigError: It cannot be read, is not YAML, or is out of bounds; the message has the line.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); expected a YAML file"
        ) from error
    if len(data) > MOST_BYTES:
        raise ConfigError(
            f"{path}: is larger than {MOST_BYTES >> 20} MiB; expected a YAML file that a "
            "person wrote"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8; save the file as UTF-8") from None
    return parse_yaml(text, str(path))


def parse_yaml(
    text: str, where: str, *, lines: bool = True, text_keys: bool = True
) -> tuple[yaml.Node | None, JsonValue]:
    """`read_yaml` for a text; `where` begins its errors, followed by the line if `lines` is set.

    `text_keys` false: keys may also be numbers, truth values and dates, as in files of others.
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        _Bounds(where, lines, text_keys).check(node)
        return node, loader.construct_document(node)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{where}: {_TOO_DEEP}") from None
    except Exception as error:
        # PyYAML makes values with Python's own functions, which may raise anything: `!!int x`,
        # `!!timestamp x`.
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark and lines else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{where}{line}: is not YAML: {problem}; correct it there") from error


def write_yaml(value: object, where: str, *, width: int = 80) -> str:
    """A value as YAML that `parse_yaml` reads back as the same value; keys keep their order.

    Args:
        value: Mappings, lists, texts and numbers.
        where: What is written, for errors.
        width: Columns of a line.

    Raises:
        ConfigError: No YAML text gives the value back, or it is out of bounds.
    """
    # PyYAML writes some line ends (U+0085, U+2028) as they are, and reads them back as blanks.
    for unicode in (True, False):
        text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=unicode, width=width)
        try:
            _, found = parse_yaml(text, where)
        except ConfigError as error:
            problem = str(error)
            continue
        if yaml.safe_dump(found, sort_keys=False, allow_unicode=unicode, width=width) == text:
            return text
        problem = f"{where}: a value is not what it was after it was written and read"
    raise ConfigError(f"{problem}; remove unusual characters from its values")


@final
class _Bounds:
    """Refuses a tree that is too deep, too large after expansion, or contains itself; visits each
    node once.
    """

    def __init__(self, where: str, lines: bool, text_keys: bool) -> None:
        self._where, self._lines, self._text_keys = where, lines, text_keys
        self._known: dict[int, tuple[int, int]] = {}
        self._open: set[int] = set()

    def check(self, node: yaml.Node, level: int = 1) -> tuple[int, int]:
        """(values, levels) of a node, with aliases expanded."""
        if (known := self._known.get(id(node))) is not None:
            return known
        if id(node) in self._open:
            self._refuse(node, "contains itself through an alias (*name); write it out")
        self._open.add(id(node))
        values, levels = 1, 0
        for child in self._children(node):
            more, below = self.check(child, level + 1) if level < DEEPEST else (1, DEEPEST)
            values, levels = values + more, max(levels, below)
        if levels >= DEEPEST:
            self._refuse(node, _TOO_DEEP)
        if values > MOST_VALUES:
            self._refuse(
                node,
                f"has {values:,} values with aliases (*name) expanded; expected at most "
                f"{MOST_VALUES:,}",
            )
        self._open.remove(id(node))
        self._known[id(node)] = values, levels + 1
        return values, levels + 1

    def _children(self, node: yaml.Node) -> list[yaml.Node]:
        if isinstance(node, yaml.SequenceNode):
            return list(node.value)
        if not isinstance(node, yaml.MappingNode):
            return []
        for key, _ in node.value:
            is_allowed = (
                key.tag in (_TEXT, _MERGE) if self._text_keys else isinstance(key, yaml.ScalarNode)
            )
            if not is_allowed:
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                self._refuse(key, f"the key {shown} is not text; put it in quotes")
        return [value for _, value in node.value]

    def _refuse(self, node: yaml.Node, problem: str) -> None:
        line = f":{node.start_mark.line + 1}" if self._lines else ""
        raise ConfigError(f"{self._where}{line}: {problem}")
