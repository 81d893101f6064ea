"""No view lets data reach the terminal's own controls: names, texts and records are shown with
escapes.
"""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from makers.datasets import tokenizer_info
from makers.processes import call_penstock, run_code
from penstock.core import terminal
from penstock.core.ragged import Ragged
from penstock.core.terminal import Progress, safe_console, visible
from penstock.data.shards import ShardLayout, ShardWriter, finish_dataset

NASTY = "\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202eabc\x00"


def test_numbers_are_shortened_to_three_digits():
    found = [terminal.short_number(n) for n in (0, 0.04, 99.96, 999, 1000, 999_499, 999_999, 1e12)]
    assert found == ["0 ", "0.0 ", "100.0 ", "999 ", "1 k", "999 k", "1 M", "1 T"]


def test_visible_keeps_what_prints():
    assert visible("plain ü 日本 🙂") == "plain ü 日本 🙂"
    assert visible("a\n\tb\r", lines=True) == "a\n\tb\\r"
    assert visible(NASTY) == "\\x1b[2J\\x1b]0;owned\\x07␍\\x9b31m\\u202eabc\\x00"


@pytest.mark.parametrize("width", [20, 200])
def test_a_console_shows_escapes(width):
    table = Table()
    table.add_column(f"name {escape(NASTY)}")
    table.add_row(Text(NASTY, style="red"))
    for printed in (NASTY, escape(NASTY), Text(NASTY), table):
        console = safe_console(file=io.StringIO(), width=width, force_terminal=False)
        console.print(printed)
        shown = console.file.getvalue()
        assert "x1b" in shown.replace("\n", "")
        assert all(character.isprintable() or character == "\n" for character in shown)


def test_a_console_keeps_its_own_colours():
    console = safe_console(file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(Text(NASTY, style="red"))
    shown = console.file.getvalue()
    assert shown.startswith("\x1b[31m\\x1b[2J")
    assert shown.count("\x1b") == 2


@pytest.fixture
def nasty_dataset(tmp_path: Path) -> Path:
    """A dataset whose origins have nasty names."""
    folder = tmp_path / "d"
    folder.mkdir()
    layout = ShardLayout(vocab_size=9)
    with ShardWriter(folder, "a.arrow", layout) as writer:
        writer.write(Ragged.from_rows([np.arange(5)] * 4, np.uint16), files=0, lines=np.arange(4))
        info = writer.finish()
    tokenizer = tokenizer_info(f"tiny{NASTY}", vocab_size=9)
    finish_dataset(
        folder,
        shards=[info],
        layout=layout,
        tokenizer=tokenizer,
        configuration="",
        files=[f"{NASTY}.txt"],
    )
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["inspect", "--document", "1"],
        ["inspect", "--rows", "1", "--sequence-length", "16"],
    ],
)
def test_views_of_a_dataset(nasty_dataset, arguments):
    done = call_penstock(arguments[0], nasty_dataset, *arguments[1:])
    assert done.exit_code == 0
    assert "\\x1b[2J" in done.stdout
    assert all(character.isprintable() or character in "\n\t" for character in done.stdout)


def test_verify_shows_escapes(nasty_dataset, tmp_path):
    moved = nasty_dataset.rename(tmp_path / "d\x1b[2J")
    (moved / "lengths.u32").write_bytes(b"")
    done = call_penstock("verify", moved)
    assert "d\\x1b[2J" in done.stdout
    assert all(character.isprintable() or character == "\n" for character in done.stdout)


def test_errors_show_escapes():
    code = (
        "import sys; sys.argv = ['penstock', 'verify', 'no\\x1b[2J such']; from penstock.use.cli "
        "import main; main()"
    )
    done = run_code(code)
    assert done.returncode == 1
    assert "no\\x1b[2J such: " in done.stderr
    assert "\x1b" not in done.stderr


def test_json_is_as_it_is(nasty_dataset):
    done = call_penstock("inspect", nasty_dataset, "--json")
    assert json.loads(done.stdout)["tokenizer"] == f"tiny{NASTY}"
    assert "\x1b" not in done.stdout


def test_plain_lines_name_elapsed_and_left(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with Progress("preparing", total=400, unit="B", rates={"tokens": "tok/s"}) as progress:
        now[0] += 20
        progress.advance(100, rejects=292, tokens=2_000_000)
        now[0] += 5
        progress.advance(300)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "preparing:  25% · 5 B/s · 292 rejects · 100 k tok/s · 0:20 elapsed · 1:00 left",
        "preparing: 100% · 16 B/s · 292 rejects · 80 k tok/s · 0:25 elapsed",
    ]


def test_a_bar_names_them_too():
    with Progress("preparing", total=4)._make_bar() as bar:
        bar.add_task("preparing", total=4, completed=1, note="")
        console = safe_console(file=io.StringIO(), width=120)
        console.print(bar.get_renderable())
    assert re.search(r"25%\s+0:00:00 elapsed · \S+ left$", console.file.getvalue().rstrip())
