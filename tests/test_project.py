"""What the project promises as a whole: a small quick package, the import contract, clean exports,
one command.
"""

import ast
import re
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parents[1]
HEAVY = (
    "torch",
    "transformers",
    "datasets",
    "pyarrow",
    "tokenizers",
    "gigatoken",
    "pydantic",
    "rich",
    "typer",
)
TORCH_ROOMS = tuple(
    f"penstock.{room}"
    for room in (
        *("integrations", "models", "learn", "use.serving"),
        *(
            f"use.config.{module}"
            for module in (
                *("initial_models", "summary", "teacher_cache", "teachers", "training"),
                "vocabularies",
            )
        ),
        *(
            f"use.runs.{module}"
            for module in (
                *("dry_runs", "episodes", "evaluating", "exporting", "generating", "opening"),
                *("reference", "remote_sampler", "rollouts", "run", "samplers", "serving"),
                *("starting", "training"),
            )
        ),
    )
)
"""Rooms and modules that may need torch or transformers; all others, and the verbs that use only
these, do without.
"""


def _python(code: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=check)


def _room_modules() -> list[str]:
    package = ROOT / "src" / "penstock"
    names = [
        ".".join(path.relative_to(package.parent).with_suffix("").parts)
        for path in package.rglob("*.py")
    ]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    mine = [name for name in names if not name.startswith(TORCH_ROOMS)]
    # Imported on use, by who has torch.
    return sorted(set(mine) - {"penstock.plan.inputs.torch_tensors"})


def test_import_loads_nothing_heavy():
    loaded = _python("import penstock, sys; print(*sys.modules)").stdout.split()
    assert [name for name in HEAVY if name in loaded] == []


def test_import_is_quick():
    """The limit is 0.3 s of its own work above a bare interpreter; not by the clock, so that others
    do not decide.
    """
    timed = "import time; t = time.process_time(); import penstock; print(time.process_time() - t)"
    assert statistics.median(float(_python(timed).stdout) for _ in range(5)) < 0.3


def test_rooms_of_the_data_path_do_not_import_torch():
    modules = _room_modules()
    assert "penstock.use.cli.doctor" in modules
    code = (
        "import importlib, sys\nsys.modules.update({name: None for name in ('torch', "
        f"'transformers', 'accelerate', 'datasets')}})\nfor name in {modules}: "
        "importlib.import_module(name)"
    )
    found = _python(code, check=False)
    assert found.returncode == 0, found.stderr[-2000:]


@pytest.mark.slow
def test_training_and_serving_do_not_import_the_compiler_of_torch():
    """It takes seconds; torch itself brings it when an optimiser is made, which no refusal and no
    server waits for.
    """
    rooms = (
        "models.ours.micro_sequences learn.training.trainer learn.distillation.losses "
        "learn.generation.engine learn.evaluation.subject use.serving.app"
    )
    code = (
        f"import importlib, sys\nfor name in {rooms.split()}: "
        "importlib.import_module(f'penstock.{name}')\n"
    )
    loaded = _python(code + "print(*sys.modules)").stdout.split()
    assert "torch" in loaded
    assert [
        name for name in ("torch._dynamo", "torch._inductor", "transformers") if name in loaded
    ] == []


def test_every_module_says_what_it_does():
    without = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "src").rglob("*.py")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert without == []


def test_import_contract():
    found = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-2000:]


def test_module_runs_as_the_command():
    found = subprocess.run(
        [sys.executable, "-m", "penstock", "--version"], capture_output=True, text=True, check=True
    )
    assert found.stdout == f"penstock {penstock.__version__}\n"


def test_nothing_in_the_project_names_a_machine():
    """Paths of one machine and hosts of package registries have no place in what is shipped."""
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    banned = ("/wo" + "rk/", "pypi." + "org", "files.python" + "hosted")
    text_files = [
        ROOT / name
        for name in files
        if (ROOT / name).suffix in {".py", ".toml", ".md", ".yaml", ".yml", ""}
    ]
    named = [
        f"{path}: {word}"
        for path in text_files
        if path.is_file()
        for word in banned
        if word in path.read_text()
    ]
    assert named == []


def test_the_core_imports_nothing_that_its_dependencies_do_not_bring():
    """Another package of the environment, such as torch, may bring what a bare installation
    lacks.
    """
    names = {"pyyaml": "yaml"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        names.get(name, name)
        for name in (re.split(r"[^\w-]", one)[0] for one in project["dependencies"])
    }
    brought = {"llvmlite"}  # By Numba, which is made of it.
    found = set()
    for module in _room_modules():
        path = ROOT / "src" / Path(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import):
                found |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    assert found - declared - brought - set(sys.stdlib_module_names) - {"penstock"} == set()


@pytest.mark.parametrize(
    "name", ["models.Transformer", "loss", "evaluation.Subject", "generation.Engine"]
)
def test_names_that_need_torch_tell_the_pip_command(name):
    code = f"import sys; sys.modules['torch'] = None; import penstock as ps\ntry: ps.{name}\n"
    told = _python(code + "except ps.errors.MissingExtraError as error: print(error)").stdout
    assert (
        told == "torch is not installed; it comes with the extra: pip install 'penstock[train]'\n"
    )


@pytest.mark.parametrize(
    "page",
    sorted({*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "log.md"}),
    ids=lambda page: page.stem,
)
def test_files_that_a_page_names_exist(page):
    """Paths of the package in backticks, such as `loader/plan.py`; the log keeps those of its
    day.
    """
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", text)
    missing = [
        path
        for path in named
        if not any((ROOT / folder / path).exists() for folder in ("src/penstock", "."))
    ]
    assert missing == []


def _texts(path: Path):
    """The strings of a file except docstrings, with their lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bodies = (node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list))
    said = {id(one.value) for body in bodies for one in body if isinstance(one, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.lineno, node.value


OTHER_OPTIONS = (
    "bubblewrap.py", "curves.py", "document.py", "validation.py", "control_tokens.py", "denoise.py",
    "packages.py",
)  # fmt: skip
"""Files with options of other programs, CSS, `--set` of an assignment that the user typed, or whole
commands.
"""


def test_messages_name_settings_as_python_does():
    """`on_error`, not `--on-error`, for users of both; an option with another name follows in
    brackets: (--plain).

    The converter of axolotl's configurations writes whole commands.
    """
    package = ROOT / "src" / "penstock"
    paths = [
        p
        for p in package.rglob("*.py")
        if p.parent.name not in ("cli", "imports") and p.name not in OTHER_OPTIONS
    ]
    option = re.compile(r"(?<![\w(-])--[a-z]")
    commands = re.compile(r"`penstock [^`]*")
    found = [
        f"{path.name}:{line}: {text}"
        for path in paths
        for line, text in _texts(path)
        if option.search(commands.sub("", text))
    ]
    assert found == []
