"""The page of the run file, made from its JSON Schema (`penstock schema`): every key with type,
default and meaning.

A class of settings becomes a section of the page, at the first key that takes it; later keys link
there.
"""

from collections.abc import Iterator
from typing import Any

from api_pages import all_names
from markdown_links import anchor
from markdown_text import cell

PAGE = "reference/run-file.md"
NO_DEFAULT = object()


def run_file_pages() -> dict[str, str]:
    """Place below `docs` → Markdown."""
    from penstock.use.config import run_schema

    schema = run_schema()
    return {PAGE: "\n".join(_Page(schema).lines())}


class _Page:
    """One page; remembers where each class of settings is described."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._sections: dict[str, str] = {}

    def lines(self) -> Iterator[str]:
        yield "# Run file"
        yield INTRODUCTION
        yield from self._table(self._schema, "")
        pending = [(key, self._classes(value)) for key, value in self._schema["properties"].items()]
        for key, classes in pending:
            self._sections.update(dict.fromkeys(classes, anchor(key)))
        for key, classes in pending:
            yield f"\n## {key}\n"
            for name in classes:
                yield from self._section(name, key, shown=len(classes) > 1)

    def _section(self, name: str, place: str, *, shown: bool) -> Iterator[str]:
        """The keys of a class of settings, then the classes that these take, each described
        once.
        """
        settings = self._schema["$defs"][name]
        if shown:
            yield f"\n**{name}**\n"
        yield f"{settings.get('description') or _summary(name)}\n"
        below = []
        for key, value in settings["properties"].items():
            inside = f"{place}.{key}{_index(value)}"
            for inner in self._classes(value):
                if inner not in self._sections:
                    heading = (
                        inside
                        if len(self._classes(value)) == 1
                        else f"{inside}: {_kind(self._schema, inner)}"
                    )
                    self._sections[inner] = anchor(heading)
                    below.append((inner, heading, inside))
        yield from self._table(settings, place)
        for inner, heading, inside in below:
            yield f"\n### {heading}\n"
            yield from self._section(inner, inside, shown=False)

    def _table(self, settings: dict[str, Any], place: str) -> Iterator[str]:
        required = settings.get("required", ())
        yield "\n| key | type | default | meaning |"
        yield "|---|---|---|---|"
        for key, value in settings["properties"].items():
            default = "**required**" if key in required else _shown(value.get("default"))
            link = f"[`{key}`](#{anchor(key)})" if not place else f"`{key}`"
            yield (
                f"| {link} | {self._type(value)} | {default} | "
                f"{cell(value.get('description', ''))} |"
            )

    def _type(self, value: dict[str, Any]) -> str:
        """The type of a value in words."""
        if "$ref" in value:
            name = value["$ref"].rsplit("/", 1)[1]
            return f"[mapping](#{self._sections[name]})" if name in self._sections else "mapping"
        members = value.get("anyOf") or value.get("oneOf")
        if members:
            return " or ".join(dict.fromkeys(self._type(member) for member in members))
        if "enum" in value or "const" in value:
            return ", ".join(f"`{choice}`" for choice in value.get("enum", [value.get("const")]))
        if "prefixItems" in value:
            return f"list of {len(value['prefixItems'])}: " + ", ".join(
                map(self._type, value["prefixItems"])
            )
        kind = value.get("type")
        if kind == "array":
            return f"list of: {self._type(value.get('items', {}))}"
        if kind == "object" and isinstance(inner := value.get("additionalProperties"), dict):
            return f"name → {self._type(inner)}"
        return NAMES.get(str(kind), "any value")

    def _classes(self, value: Any) -> list[str]:
        """The classes of settings inside a value."""
        if isinstance(value, dict):
            if "$ref" in value:
                return [value["$ref"].rsplit("/", 1)[1]]
            return list(
                dict.fromkeys(name for part in value.values() for name in self._classes(part))
            )
        if isinstance(value, list):
            return list(dict.fromkeys(name for part in value for name in self._classes(part)))
        return []


NAMES = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
    "object": "mapping",
}


def _shown(value: Any) -> str:
    """A default as a YAML file writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if value not in ("", [], {}) else "empty"


def _summary(name: str) -> str:
    """What a public class of this name says about itself; schemas of several kinds do not repeat
    it.
    """
    return next((one.summary for one in all_names() if one.name == name), "")


def _index(value: dict[str, Any]) -> str:
    """What follows a key whose values are entries of a list or of a mapping with names of the
    user's choice.
    """
    members = [value, *value.get("anyOf", [])]
    if any(member.get("type") == "array" for member in members):
        return "[]"
    return (
        ".NAME"
        if any(isinstance(member.get("additionalProperties"), dict) for member in members)
        else ""
    )


def _kind(schema: dict[str, Any], name: str) -> str:
    kind = schema["$defs"][name]["properties"].get("kind", {})
    return str(kind.get("const", name))


INTRODUCTION = """
A run file is YAML: the data, the model and the training of a run. It is validated as a whole before anything starts,
and an unknown key is an error that suggests the likely one. `--set data.loader.seed=7` overrides a key, from any
command that reads a run file. `penstock schema --output penstock.schema.json` writes the JSON Schema from which this
page is made; with `# yaml-language-server: $schema=penstock.schema.json` as its first line, editors complete and check
a run file. `None` in a meaning is YAML's `null`; `[]` in a heading stands for each entry of a list, `NAME` for a name
that you choose.

```yaml
data:
  sources:
    - {path: data/web, share: 0.7}
    - {path: data/code, share: 0.3, max_epochs: 4}
  loader: {sequence_length: 1024, rows_per_step: 32, seed: 7}
model: {layers: 8, width: 512, heads: 8}
training:
  steps: 2000
  optimizer: {kind: adamw, learning_rate: 0.001}
```
"""  # noqa: E501
