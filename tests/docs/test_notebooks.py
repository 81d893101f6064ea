"""The notebooks are those of the pages, and their outputs are what the pages say."""

import json
from pathlib import Path

import pytest

import notebooks
from makers.pages import Output, PageError, read_blocks
from notebooks import LARGEST, NOTEBOOKS, cells_of, check_outputs, notebook, notebook_path, page_of

PAGE = """# Title

Words, and a [link](other.md).

<!-- not run: reason -->
```bash
pip install penstock
```

```yaml title="a.yaml"
key: 1
```

```python
1 + 1
```

```text
2
```

More, [there](../guide.md).

<!-- fails -->
```bash
false
```
"""


def _cells(path: Path) -> list[dict[str, object]]:
    return list(json.loads(path.read_text(encoding="utf-8"))["cells"])


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_the_cells_of_its_page(name: str) -> None:
    cells = _cells(notebook_path(name))
    expected = [source for source, _ in cells_of(page_of(name))]
    again = f"run `python tests/notebooks.py {name}`"
    assert [cell["source"] for cell in cells] == expected, f"the page has changed; {again}"
    assert notebook_path(name).stat().st_size < LARGEST
    check_outputs(page_of(name), cells)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_shows_rich_values_and_no_path_of_a_machine(name: str) -> None:
    text = notebook_path(name).read_text(encoding="utf-8")
    assert '"text/html"' in text
    assert "/tmp/" not in text
    assert "/home/" not in text


def test_cells_follow_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    made = notebook(page, {}, tmp_path)
    head, file, code, words, shell = made["cells"]
    assert head["source"].endswith("```bash\npip install penstock\n```")
    assert "[link](../tutorials/other.md)" in head["source"]
    assert "not run" not in head["source"]
    assert (file["source"], file["outputs"][0]["text"]) == (
        "%%writefile a.yaml\nkey: 1",
        "Writing a.yaml\n",
    )
    assert (code["source"], code["outputs"]) == ("1 + 1", [])
    assert words["source"] == "More, [there](../guide.md)."
    assert (shell["source"], shell["metadata"]) == ("%%bash\nfalse", {"tags": ["raises-exception"]})


def test_words_are_written_without_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tutorials").mkdir()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setattr(notebooks, "DOCS", tmp_path)
    page = page_of("page")
    page.write_text(PAGE, encoding="utf-8")
    made = notebook(page, {}, tmp_path)
    made["cells"][2]["outputs"] = kept = [
        {"output_type": "stream", "name": "stdout", "text": "2\n"}
    ]
    notebook_path("page").write_text(json.dumps(made), encoding="utf-8")
    page.write_text(PAGE.replace("Words", "Other words"), encoding="utf-8")
    notebooks.write_words("page")
    cells = _cells(notebook_path("page"))
    assert str(cells[0]["source"]).startswith("# Title\n\nOther words")
    assert cells[2]["outputs"] == kept
    page.write_text(PAGE.replace("1 + 1", "1 + 2"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"page\.md.*changed.*notebook"):
        notebooks.write_words("page")


def test_outputs_are_compared_with_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    line = next(block.line for block in read_blocks(page) if block.language == "python")
    shown = {"text/plain": "3", "text/html": "<b>3</b>"}
    with pytest.raises(PageError, match=r"page\.md:15: printed\n3\nexpected\n2"):
        check_outputs(page, notebook(page, {line: Output(shown=shown)}, tmp_path)["cells"])
    check_outputs(
        page, notebook(page, {line: Output(shown=shown | {"text/plain": "2"})}, tmp_path)["cells"]
    )
    with pytest.raises(PageError, match=r"page\.md:15: printed\ntwo\nexpected\n2"):
        check_outputs(page, notebook(page, {line: Output(printed="two\n")}, tmp_path)["cells"])
