"""The runner of pages finds what is wrong with a page, and says on which line."""

from pathlib import Path

import pytest

from makers.pages import (
    PageError,
    continues,
    matches,
    models,
    needs,
    read_blocks,
    renew,
    rewrite_page,
    run_page,
)
from patience import wait_for


def _page(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def _run(folder: Path, text: str) -> list[str]:
    inside = folder / "inside"
    inside.mkdir(exist_ok=True)
    return [output.text for _, output in run_page(_page(folder, text), inside)]


def test_python_and_bash_take_turns_in_one_folder_and_keep_what_they_have(tmp_path: Path) -> None:
    text = """# Title
```python
count = 2
open("made.txt", "w").write("seen")
```
```bash
cat made.txt; echo; NAME=kept; mkdir inner; cd inner
```
```python
count + 1
```
```bash
echo $NAME; basename $PWD
```
"""
    assert _run(tmp_path, text) == ["4", "seen", "3", "kept\ninner"]


def test_a_block_with_a_title_is_a_file(tmp_path: Path) -> None:
    text = (
        '```python title="package/mine.py"\nVALUE = 5\n```\n```python\nfrom package.mine import '
        "VALUE\nVALUE\n```\n"
    )
    assert _run(tmp_path, text) == ["", "5"]


def test_an_error_names_page_and_line(tmp_path: Path) -> None:
    with pytest.raises(PageError, match=r"(?s)md:4: the.*line 5.*ZeroDivisionError"):
        _run(tmp_path, "# Title\n\n```python\nvalue = 0\n1 / value\n```\n")
    with pytest.raises(PageError, match=r"(?s)page\.md:2: .*\nbefore\n.*failed"):
        _run(tmp_path, "```bash\necho before\nfalse\necho after\n```\n")
    with pytest.raises(PageError, match=r"page\.md:2: the block failed"):
        _run(tmp_path, "```python\nimport os\nos._exit(3)\n```\n")
    with pytest.raises(PageError, match=r"page\.md:2: the block failed"):
        _run(tmp_path, "```bash\nfalse | cat\n```\n")


def test_a_block_that_should_fail_fails_and_its_error_is_printed(tmp_path: Path) -> None:
    page = (
        "<!-- fails -->\n```python\nprint('so')\n[][1]\n```\n```text\nso\nIndexError: list index "
        "…\n```\n"
    )
    page += (
        "<!-- fails -->\n```bash\nls nowhere\n```\n```text\n…nowhere…\n```\n```bash\necho on\n```\n"
    )
    assert _run(tmp_path, page)[-1] == "on"
    with pytest.raises(PageError, match=r"page\.md:3: the block did not fail"):
        _run(tmp_path, "<!-- fails -->\n```bash\ntrue\n```\n")


def test_what_is_printed_is_compared(tmp_path: Path) -> None:
    page = (
        "```python\nprint('loss  2.5 after 10 steps')\n```\n\n```text\nloss 2.25 after 12 "
        "steps\n```\n"
    )
    _run(tmp_path, page)
    with pytest.raises(PageError, match=r"(?s)md:2: .*2\.5 .*expected\nloss 2\.25"):
        _run(tmp_path, page.replace("```text", "<!-- exact -->\n```text"))
    with pytest.raises(PageError, match=r"page\.md:2: printed"):
        _run(tmp_path, page.replace("after 12", "before 12"))
    _run(
        tmp_path,
        page.replace(
            "\n\n```text", "\nWords between: what follows is no output.\n\n```text\nother"
        ),
    )


def test_texts_match_with_numbers_and_gaps() -> None:
    assert matches("a 1,000.5 b\n…\nz", "a 7 b\nc\nd\nz\n")
    assert matches("…\nz", "z")
    assert matches("at … there", "at once and there")
    assert not matches("a\nz", "a\nb\nz")
    assert not matches("a", "a\nb")
    assert matches("−1.5e-3", "2")
    assert matches("x", "penstock: compiling kernels (5 to 30 s); later\n\x1b[1mx\x1b[0m")
    assert matches(
        "x\ny",
        "x\npreparing: 100% · 20.5 MB/s · 5.35 M tok/s · 0:00\nlearning:  5% · 0:02 · 0:40 left\ny",
    )
    assert not matches("1", "2", exact=True)


def test_a_block_that_is_not_run_needs_a_reason(tmp_path: Path) -> None:
    assert _run(tmp_path, "<!-- not run: needs a GPU -->\n```python\nexit(1)\n```\n") == [""]
    with pytest.raises(PageError, match=r"page\.md:3: no reason"):
        _run(tmp_path, "<!-- not run -->\n```python\nexit(1)\n```\n")
    with pytest.raises(PageError, match=r"page\.md:2.*text.*comment.*'fails'"):
        _run(tmp_path, "<!-- fails -->\nWords.\n```python\nexit(1)\n```\n")
    with pytest.raises(PageError, match=r"page\.md:1: a block that is never closed"):
        _run(tmp_path, "```python\nexit(1)\n")


def test_blocks_in_lists_and_tabs_are_found(tmp_path: Path) -> None:
    page = _page(
        tmp_path,
        '=== "Python"\n\n    ```python\n    if True:\n        print(1)\n    ```\n<!-- needs: '
        "av, x -->\n",
    )
    (block,) = read_blocks(page)
    assert (block.code, block.line) == ("if True:\n    print(1)\n", 4)
    assert needs(page) == ["av", "x"]


def test_jobs_in_the_background_end_with_the_page(tmp_path: Path) -> None:
    _run(tmp_path, "```bash\nsleep 600 &\necho $! > pid\n```\n")
    pid = int((tmp_path / "inside" / "pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    wait_for(lambda: not state.exists() or state.read_text().split()[2] == "Z")


def test_processes_of_a_page_start(tmp_path: Path) -> None:
    page = """```python
import math
import multiprocessing
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(math.factorial, [3, 4]))
```
"""
    assert _run(tmp_path, page) == ["[6, 24]"]


@pytest.mark.parametrize(
    ("expected", "printed", "renewed"),
    [
        ("loss 1.5\n", "loss 2.25", "loss 2.25\n"),
        ("a  12 b\n", "a   7 b\n", "a   7 b\n"),
        ("first 1\n…\nlast 9 · …\n", "first 2\nx\ny\nlast 10 · 3 s\n", "first 2\n…\nlast 10 · …\n"),
        ('{"id":"…","n":1}\n', '{"id":"x7","n":22}\n', '{"id":"…","n":22}\n'),
        ("other words 1\n", "words 2\n", "other words 1\n"),
    ],
)
def test_numbers_are_renewed(expected: str, printed: str, renewed: str) -> None:
    assert renew(expected, printed) == renewed


def test_a_page_is_written_with_new_numbers(tmp_path: Path) -> None:
    """Where its blocks stay what they are; a page that prints something else stays as it is."""
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    folder.mkdir()
    text = "# T\n\n```python\nprint('a', 6 * 7)\n```\n\n```text\na 41\n```\n\nWords 41.\n\n"
    text += "```bash\necho 3\necho x\n```\n\n```text\n4\n…\n```\n"
    page.write_text(text)
    rewrite_page(page, folder)
    assert page.read_text() == text.replace("a 41", "a 42").replace("4\n…", "3\n…")
    page.write_text(text.replace("a 41", "b 41"))
    (tmp_path / "again").mkdir()
    with pytest.raises(PageError, match=r"page\.md:4.*\na 42\nexpected\nb 41"):
        rewrite_page(page, tmp_path / "again")
    assert "b 41" in page.read_text()


def test_a_page_names_its_models(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# T\n\n<!-- models: one, two -->\n")
    assert models(page) == ["one", "two"]
    assert continues(page) is None


def test_a_page_goes_on_in_the_folder_of_another(tmp_path: Path) -> None:
    first, page = tmp_path / "first.md", tmp_path / "page.md"
    first.write_text("```python\nopen('made', 'w').write('1')\n```\n")
    page.write_text(
        "<!-- continues: first.md -->\n\n```python\nprint(open('made').read())\n```\n\n"
        "```text\n1\n```\n"
    )
    assert continues(page) == first
    folder = tmp_path / "page"
    folder.mkdir()
    for one in (first, page):
        run_page(one, folder)
