"""The gallery: its pictures are there, small, made by the list that makes them, and need nothing
from elsewhere.
"""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from makers import browser

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
GALLERY = next((ROOT / "docs").rglob("gallery.md"))
SHOWN = re.compile(r"!\[[^\]]+\]\(([^)]+)\)\n\n\*(.+?)\*\n\n```bash\npenstock ", re.DOTALL)


@pytest.fixture
def make(monkeypatch):
    """`examples/pictures/make.py` as a module."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location(
        "make", ROOT / "examples" / "pictures" / "make.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_picture_has_a_caption_and_a_command_and_is_made(make):
    shown = [
        (GALLERY.parent / path).resolve()
        for path, _ in SHOWN.findall(GALLERY.read_text(encoding="utf-8"))
    ]
    assert len(shown) == GALLERY.read_text(encoding="utf-8").count("![")
    assert {path.stem for path in shown} == {each.__name__ for each in make.MADE}
    for path in shown:
        assert path.parent == PICTURES
        assert 1000 < path.stat().st_size <= make.shots.MOST_BYTES


def test_every_picture_is_on_a_page():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    names = {path.name.replace(".dark.png", ".png") for path in PICTURES.iterdir()}
    assert {name for name in names if f"pictures/{name}" not in text} == set()


@pytest.mark.parametrize("path", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.name)
def test_drawings_fetch_nothing(path):
    text = path.read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
    assert not re.search(r"url\((?!#)|@import|<script|<image(?![^>]*href=\"data:image/)", text)
    # No shown text names a place on the machine that made it.
    assert not re.search(r">[^<]*(?:^|&#160;|[\s>])/[\w.-]+/[\w.-]", text)


def test_without_a_browser_the_message_says_what_to_do(make, monkeypatch, tmp_path):
    monkeypatch.setattr(browser, "NAMES", ("no-such-browser",))
    monkeypatch.delenv("PENSTOCK_BROWSER", raising=False)
    monkeypatch.setattr(sys, "argv", ["make.py", "--work", str(tmp_path / "work")])
    with pytest.raises(SystemExit, match=r"chromium.*PENSTOCK_BROWSER"):
        make.main()
    assert not (tmp_path / "work").exists()


def test_an_unknown_picture_is_refused(make, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["make.py", "landscape"])
    with pytest.raises(SystemExit, match="2"):
        make.main()
    assert "no picture landscape; there are row, proof" in capsys.readouterr().err


def test_a_session_is_what_the_command_prints(make, tmp_path):
    make.shots.session(tmp_path / "a.svg", "help", ["penstock --version"])
    text = (tmp_path / "a.svg").read_text()
    assert "font-face" not in text
    assert "penstock" in text
    with pytest.raises(ValueError, match="only penstock is run"):
        make.shots.session(tmp_path / "a.svg", "help", ["rm -r x"])
    with pytest.raises(SystemExit, match="No such command"):
        make.shots.session(tmp_path / "a.svg", "help", ["penstock no-verb"])
