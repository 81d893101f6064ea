"""The pictures of tutorials are what their script draws today."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DRAWN = ("branches", "chunks", "diffusion", "slots")


def _without_pixels(picture: Path) -> str:
    """Its text; how well images are compressed depends on the machine's zlib."""
    return re.sub(r"base64,[^\"]+", "", picture.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_pictures_are_drawn_again_as_they_are(tmp_path: Path) -> None:
    script = ROOT / "examples" / "pictures" / "tutorials.py"
    found = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert sorted(path.stem for path in tmp_path.iterdir()) == list(DRAWN)
    for name in DRAWN:
        kept = ROOT / "docs" / "pictures" / f"{name}.svg"
        assert _without_pixels(tmp_path / f"{name}.svg") == _without_pixels(kept), (
            f"draw again: {script}"
        )
