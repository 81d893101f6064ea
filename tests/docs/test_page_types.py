"""All Python of the pages and of the README passes pyright, whose engine is that of VS Code."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from makers.pages import given, read_blocks
from makers.processes import child_environment, run_python

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ABSENT = {
    *(
        "IPython.display",
        "flash_attn",
        "lightning",
        "megatron.core",
        "msgspec",
        "my_data",
        "orbax.checkpoint",
    ),
    *("prime_rl.transport", "trl", "verl"),
}
"""What pages import and the tests' environment may lack: packages of others, a reader's module."""
THEIRS = {
    "docs/how-to/trainers/loops.md": ["is not exported from module"],
    "docs/tutorials/real-model.md": ['Cannot access attribute "generate"'],
}
"""Page → messages about the types of torch and transformers, which pages cannot mend."""
SETTINGS = {
    "typeCheckingMode": "standard",
    "pythonVersion": "3.11",
    "reportMissingImports": "error",
}
OPENING = "from given import *; import penstock as ps\n"


def write_page(page: Path, folder: Path) -> Path:
    """The page's Python as a module, each line under its number on the page, in a new folder.

    All blocks are one session, as they are for a reader; blocks with a title are files beside it.
    """
    folder.mkdir(parents=True)
    height = len(page.read_text(encoding="utf-8").splitlines()) + 1
    files: dict[str, list[str]] = {"page.py": [OPENING, *["\n"] * height]}
    for block in read_blocks(page):
        if block.language == "python":
            lines = files.setdefault(block.title or "page.py", ["\n"] * height)
            code = block.code.splitlines(keepends=True)
            lines[block.line - 1 : block.line - 1 + len(code)] = code
    for name, lines in files.items():
        (folder / name).write_text("".join(lines), encoding="utf-8")
    head = ["from collections.abc import Callable", "from typing import Any", "import torch"]
    names = [*head, "import penstock as ps", *given(page)]
    (folder / "given.pyi").write_text("\n".join([*names, ""]), encoding="utf-8")
    return folder


def complaints(pages: dict[str, Path], folder: Path) -> Iterator[tuple[str, str]]:
    """`page:line` and message of each error in pages by name."""
    places = {
        write_page(page, folder / str(n)): name for n, (name, page) in enumerate(pages.items())
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    words = ["-m", "basedpyright", "--project", folder, "--pythonpath", sys.executable]
    found = run_python(*words, "--outputjson", "--threads", "1", env=child_environment())
    report = json.loads(found.stdout)
    assert report["summary"]["filesAnalyzed"] >= len(pages)
    for one in report["generalDiagnostics"]:
        file = Path(one["file"])
        if one["severity"] == "error":
            yield f"{places[file.parent]}:{one['range']['start']['line'] + 1}", one["message"]


def is_absent(message: str) -> bool:
    return any(message == f'Import "{name}" could not be resolved' for name in ABSENT)


@pytest.mark.slow
def test_every_block_passes(tmp_path: Path) -> None:
    pytest.importorskip("basedpyright")
    pages = {page.relative_to(ROOT).as_posix(): page for page in PAGES}
    found = [
        f"{place}: {message}"
        for place, message in complaints(pages, tmp_path / "pages")
        if not is_absent(message)
        and not any(known in message for known in THEIRS.get(place.rsplit(":")[0], []))
    ]
    assert found == [], "\n".join(found)


@pytest.mark.slow
def test_a_wrong_keyword_is_found_on_its_line(tmp_path: Path) -> None:
    pytest.importorskip("basedpyright")
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n<!-- given: data: str -->\n```python\nloader = ps.Loader(data, "
        "sequence_length=8, rows_per_step=1)\n```\n\n```python\n\nps.build_model(layer=2, "
        "vocab_size=9)\nnext(iter(loader)).tork()\n```\n",
        encoding="utf-8",
    )
    found = list(complaints({"page.md": page}, tmp_path / "pages"))
    assert [place for place, _ in found] == ["page.md:10", "page.md:11"], found
    assert '"layer"' in found[0][1]
