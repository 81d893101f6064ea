"""Writes the modules of keyword arguments that editors and type checkers complete, from the
settings classes that declare them: `make keywords`. A test compares what is checked in.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.core.declarations import PACKAGE, Declaration, declared, members_of, module_of

WIDTH = 100
WORDS = ("kind", "shape")
"""Fields of settings that can be given alone, as one word, in place of all."""
VALUES = ("penstock.use.runs.given", "Values")


@dataclass(frozen=True, kw_only=True)
class Keywords:
    """A TypedDict."""

    name: str
    says: str
    of: Sequence[str]
    """Classes or functions that declare the settings, relative to penstock; of a function only
    `names`.
    """
    bases: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, str] = field(default_factory=dict)
    """Name → its type, where it differs from what is declared."""
    required: bool = False
    """Settings without a default must be given."""


@dataclass(frozen=True, kw_only=True)
class Module:
    """A module of these."""

    says: str
    imports: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Module → names, of the types that are written here."""
    holds: Sequence[Keywords]


_OPENING = "use.runs.opening.load_opened"
MODULES = {
    "chat/masks/mask_keywords.py": Module(
        says="Keyword arguments of functions that decide what is trained.",
        holds=[
            Keywords(
                name="MaskKeywords",
                says="Settings of the mask; see `MaskSettings`.",
                of=["chat.masks.mask_settings.MaskSettings"],
            )
        ],
    ),
    "plan/loader/loader_keywords.py": Module(
        says="Keyword arguments of `Loader`.",
        holds=[
            Keywords(
                name="LoaderKeywords",
                says="Settings of a loader; see `LoaderSettings`.",
                of=["plan.loader.loader_settings.LoaderSettings"],
                required=True,
            )
        ],
    ),
    "data/prepare/prepare_keywords.py": Module(
        says="Keyword arguments of `prepare`, and `ChatOptions`.",
        imports={
            "collections.abc": ("Mapping",),
            "pathlib": ("Path",),
            "penstock.chat": ("Template",),
            "penstock.chat.masks.mask_keywords": ("MaskKeywords",),
            "penstock.data.prepare.chat_settings": ("ChatSettings",),
            "penstock.data.sources": ("Fields",),
        },
        holds=[
            Keywords(
                name="ChatKeywords",
                says="Settings of chats that are also keywords of `prepare`; see `ChatOptions`.",
                bases=("MaskKeywords",),
                of=[
                    "data.prepare.chat_settings.ChatSettings",
                    "chat.records.layout_settings.LayoutSettings",
                    "chat.records.cleaning.CleaningSettings",
                    "media.images.ImageSettings",
                ],
                without=("template", "layout", "mask_settings", "cleaning", "images", "fields"),
                more={"layout": "str"},
            ),
            Keywords(
                name="ChatOptions",
                says=(
                    "Settings that make records conversations, side by side: `prepare(…, "
                    "chat=ps.ChatOptions(mask_history=True))`.\n\nA plain dict of keywords, so "
                    '`chat={"mask_history": True}` is the same. `penstock prepare --help` says '
                    "what each means."
                ),
                bases=("ChatKeywords",),
                of=["data.prepare.chat_settings.ChatSettings"],
                names=("template",),
                more={"fields": "Mapping[str, str]"},
            ),
            Keywords(
                name="PrepareOptions",
                says=(
                    "Keywords of `prepare`: fields of `PrepareSettings`, of `Fields`, and settings "
                    "of chats."
                ),
                bases=("ChatKeywords",),
                of=["data.sources.records.Fields", "data.prepare.settings.PrepareSettings"],
                without=("whole",),
                renamed={"text": "text_field", "weights": "weights_field"},
                more={
                    "fields": "Fields | Mapping[str, str]",
                    "chat": "ChatOptions | ChatSettings | None",
                },
            ),
        ],
    ),
    "use/runs/keywords.py": Module(
        says=(
            "Keyword arguments of `ps.train`, `ps.distill`, `ps.build_model` and the methods of "
            "`Run`.\n\nThey are the settings of a run file by the same names. Settings of the "
            "sections `optimizer` and `schedule` may be given directly: `learning_rate=1e-3` is "
            '`optimizer={"learning_rate": 1e-3}`.'
        ),
        imports={
            "collections.abc": ("Mapping",),
            "penstock.models.settings": ("BlockSettings",),
            "penstock.use.runs.given": ("Evaluation", "Values"),
        },
        holds=[
            Keywords(
                name="OptimizerKeywords",
                says="Settings of `optimizer`; see `OptimizerSettings`.",
                of=["learn.training.optimizer_settings.OptimizerSettings"],
                without=("kind",),
            ),
            Keywords(
                name="ScheduleKeywords",
                says="Settings of `schedule`; see `ScheduleSettings`.",
                of=["learn.training.optimizer_settings.ScheduleSettings"],
                without=("shape",),
            ),
            Keywords(
                name="Common",
                says="Settings of `training` with and without a teacher.",
                bases=("OptimizerKeywords", "ScheduleKeywords"),
                of=["learn.training.settings.TrainSettings"],
                without=("loss",),
                more={"evaluators": "Mapping[str, Evaluation]"},
            ),
            Keywords(
                name="TrainKeywords",
                says="Settings of `training`; see `TrainSettings`.",
                bases=("Common",),
                of=["learn.training.settings.TrainSettings"],
                names=("loss",),
            ),
            Keywords(
                name="DistillKeywords",
                says=(
                    "Settings of `training` and of `teacher`; see `TrainSettings` and "
                    "`DistillationSettings`."
                ),
                bases=("Common",),
                of=["learn.distillation.settings.DistillationSettings"],
                without=("teachers",),
            ),
            Keywords(
                name="ModelKeywords",
                says="Settings of a transformer; see `ModelSettings`.",
                of=["models.settings.ModelSettings"],
                without=("vocab_size",),
                more={"blocks": "Mapping[str, BlockSettings | Values]"},
            ),
            Keywords(
                name="OpeningKeywords",
                says="How a model is opened for use.",
                of=[_OPENING],
                names=("context_length", "device", "threads"),
            ),
            Keywords(
                name="GenerateKeywords",
                says="How texts are generated; see `Sampling`.",
                bases=("OpeningKeywords",),
                of=["learn.generation.settings.Sampling"],
            ),
            Keywords(
                name="WriteKeywords",
                says="How texts are generated; see `Sampling`, and `Unmasking` for diffusion.",
                bases=("GenerateKeywords",),
                of=["learn.generation.unmask_settings.Unmasking"],
            ),
            Keywords(
                name="EvaluateKeywords",
                says="How tasks are run; see `TaskSettings`.",
                bases=("OpeningKeywords",),
                of=["learn.evaluation.tasks.TaskSettings"],
                without=("name",),
            ),
            Keywords(
                name="ServeKeywords",
                says="Address and limits of a server; see `ServeSettings`.",
                bases=("OpeningKeywords",),
                of=["use.serving.settings.ServeSettings"],
            ),
        ],
    ),
}


class Writer:
    """Writes one module; collects what it imports."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._imports: dict[str, set[str]] = {}
        if any(not one.bases for one in module.holds):
            self._imports["typing"] = {"TypedDict"}
        for name, names in module.imports.items():
            self._imports.setdefault(name, set()).update(names)

    def text(self) -> str:
        """The module."""
        classes = "\n\n\n".join("\n".join(self._class(one)) for one in self._module.holds)
        says = [*docstring(self._module.says, "")]
        made = ["", "# Written by `make keywords` from the classes that declare these settings."]
        return "\n".join([*says, *made, "", *self._import_lines(), "", "", classes, ""])

    def _import_lines(self) -> Iterator[str]:
        own = sorted(name for name in self._imports if name.startswith("penstock"))
        rest = sorted(name for name in self._imports if not name.startswith("penstock"))
        for number, names in enumerate((rest, own)):
            if number and names:
                yield ""
            for name in names:
                listed = sorted(self._imports[name], key=_import_order)
                line = f"from {name} import {', '.join(listed)}"
                if len(line) <= WIDTH:
                    yield line
                else:
                    yield f"from {name} import ("
                    yield from (f"    {one}," for one in listed)
                    yield ")"

    def _class(self, asked: Keywords) -> Iterator[str]:
        bases = asked.bases or ("TypedDict",)
        yield f"class {asked.name}({', '.join(bases)}, total=False):"
        yield from docstring(asked.says, "    ")
        yield ""
        seen = set()
        for address in asked.of:
            for name, one in declared(f"penstock.{address}").items():
                if name.startswith("_") or name in asked.without:
                    continue
                if asked.names and name not in asked.names:
                    continue
                seen.add(name)
                hint = asked.more.get(name) or self._hint(one)
                if asked.required and one.default is None:
                    self._imports["typing"].add("Required")
                    hint = f"Required[{hint}]"
                yield f"    {asked.renamed.get(name, name)}: {hint}"
        for name, hint in asked.more.items():
            if name not in seen:
                yield f"    {name}: {hint}"

    def _hint(self, one: Declaration) -> str:
        """A declared type; of settings also a mapping of their values, or their main word."""
        text = _written(one.hint)
        self._import_names(one.module, one.hint)
        more: list[str] = []
        for part in members_of(one.hint):
            origin = module_of(one.module, ast.unparse(part))
            if origin is None or not ast.unparse(part).endswith("Settings"):
                continue
            module, name = VALUES
            self._imports.setdefault(module, set()).add(name)
            more.append(name)
            for word, inner in declared(f"{origin}.{ast.unparse(part)}").items():
                if word in WORDS and inner.shape().choices:
                    self._import_names(inner.module, inner.hint)
                    more.append(_written(inner.hint))
        if not more:
            return text
        parts = [_written(part) for part in members_of(one.hint)]
        added = [name for name in more if name not in parts]
        none = [name for name in parts if name == "None"]
        return " | ".join([*(name for name in parts if name != "None"), *added, *none])

    def _import_names(self, module: str, hint: ast.expr) -> None:
        for node in ast.walk(hint):
            if isinstance(node, ast.Name) and (origin := module_of(module, node.id)):
                self._imports.setdefault(origin, set()).add(node.id)


def _written(hint: ast.expr) -> str:
    """A type as users give it: a list, too, where settings hold a tuple."""
    text = ast.unparse(hint).replace("'", '"')
    return re.sub(r"tuple\[([\w.]+), \.\.\.\]", r"list[\1] | tuple[\1, ...]", text)


def _import_order(name: str) -> tuple[int, str]:
    """Constants, classes, then functions, as the linter sorts them."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name.lower()


def docstring(text: str, indent: str) -> Iterator[str]:
    """Lines of a docstring within the width."""
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        line = f'{indent}"""' if not lines else indent
        for word in paragraph.split(" "):
            if len(line) + 1 + len(word) > WIDTH:
                lines.append(line)
                line = indent
            line += word if line.endswith(('"""', indent)) and not line.strip(' "') else f" {word}"
        lines += [line, ""]
    del lines[-1]
    if len(lines) == 1 and len(lines[0]) + 3 <= WIDTH:
        yield f'{lines[0]}"""'
    else:
        yield from (line.rstrip() for line in lines)
        yield f'{indent}"""'


def texts() -> dict[Path, str]:
    """Path → what it must hold."""
    return {PACKAGE / name: Writer(module).text() for name, module in MODULES.items()}


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(PACKAGE.parents[1]), file=sys.stderr)
