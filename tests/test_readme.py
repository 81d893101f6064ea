"""The README's code runs as it stands, and does what its comments say."""

import re
from pathlib import Path

import pytest

from makers.pages import Session, compare, read_blocks

README = Path(__file__).parents[1] / "README.md"


def _print_of_first_block(folder: Path) -> str:
    block = next(block for block in read_blocks(README) if block.language == "python")
    assert "import penstock as ps" in block.code
    with Session(README, folder) as session:
        output = session.run(block)
    compare(README, block, output)
    return output.printed


@pytest.mark.slow
def test_sixty_seconds_of_code_train_a_model_that_answers(tmp_path: Path) -> None:
    folder = tmp_path / "quick"
    folder.mkdir()
    assert _print_of_first_block(folder).splitlines()[-1] == "Tokyo."
    assert _print_of_first_block(folder).splitlines()[-1] == "Tokyo.", (
        "run again, the answer is the same"
    )


def test_pictures_and_pages_that_are_linked_exist() -> None:
    text = README.read_text(encoding="utf-8")
    links = [
        *re.findall(r"\]\(([^)#]+)\)", text),
        *re.findall(r'(?:src|srcset)="([^"]+)"', text),
    ]
    assert {"docs/pictures/packed-row.png", "docs/pictures/packed-row.dark.png"} <= {*links}
    assert [
        link for link in links if "://" not in link and not (README.parent / link).exists()
    ] == []


def test_the_real_model_says_what_the_lesson_shows():
    """The lesson is run by `make test-real`, which writes what it printed."""
    text = README.read_text(encoding="utf-8")
    lesson = (README.parent / "docs/tutorials/real-model.md").read_text(encoding="utf-8")
    section = text.partition("## On a real model")[2].partition("\n## ")[0].replace("\\|", "¦")
    rows = [line.split("|")[1:4] for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 2
    for message, before, after in rows:
        plain = after.strip(" `").replace("¦", "|")
        assert re.search(rf"^message: +{re.escape(message.strip())}$", lesson, re.MULTILINE)
        for answer in (before.strip(), plain):
            assert re.search(rf"^model: +{re.escape(answer)}$", lesson, re.MULTILINE), answer
    assert re.search(r"^\d+ of \d+ are right to the letter", section, re.MULTILINE)[0] in lesson
    code = next(block for block in read_blocks(README) if "lora" in block.code).code
    settings = [line.strip() for line in code.splitlines() if "=" in line and "output" not in line]
    assert [line for line in settings if line not in lesson] == []
    smaller = (README.parent / "docs/tutorials/real-distillation.md").read_text(encoding="utf-8")
    small, large, right, asked = re.search(
        r"of (\d+) instead of (\d+) million parameters\].*, (\d+) of (\d+) right", section
    ).groups()
    assert f"{large} → {small} million parameters" in smaller
    assert f"taught  {right} of {asked} right" in smaller
