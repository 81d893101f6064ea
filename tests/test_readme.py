"""The README's code runs as it stands, and does what its comments say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def _first_block() -> str:
    found = re.search(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.slow
def test_sixty_seconds_of_code_train_a_model_that_answers(tmp_path: Path) -> None:
    code = _first_block()
    assert "import penstock as ps" in code
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.splitlines()[-1] == "Tokyo."
    again = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert again.returncode == 0, again.stderr[-2000:]
    assert again.stdout.splitlines()[-1] == "Tokyo.", "run again, nothing is left to do and the answer is the same"


def test_pictures_and_pages_that_are_linked_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8"))
    assert "docs/pictures/packed-row.png" in links
    assert [link for link in links if "://" not in link and not (README.parent / link).exists()] == []
