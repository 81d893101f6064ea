"""What objects show of themselves in notebooks."""

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from rich.text import Text

import penstock as ps
from makers.tokenizers import tiny_tokenizer
from penstock.core.live_line import LiveLine, in_notebook
from penstock.core.notebook import bars, card, curve, marked_text, row_strip
from penstock.core.terminal import IN_NOTEBOOKS, Progress, safe_console
from penstock.learn.training.progress_line import ProgressLine


class _Balance(HTMLParser):
    """Fails on tags that are not closed in order, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        return

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _text(html: str) -> str:
    parser = _Balance()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert "<script" not in html
    assert "http" not in html
    return parser.text


@pytest.fixture
def loader(tmp_path: Path) -> ps.Loader:
    dataset = ps.write_dataset(
        tmp_path / "<b>data", [list(range(1, 6)), list(range(1, 4))] * 20, vocab_size=10
    )
    return ps.Loader(
        ps.Mixture([ps.Source(dataset)]), sequence_length=16, rows_per_step=10, threads=0
    )


def test_dataset_loader_step_and_row_show_their_figures(loader: ps.Loader) -> None:
    dataset = loader.mixture.sources[0].path
    text = _text(dataset._repr_html_())
    assert "<b>data" in text
    assert "40" in text
    assert "160" in text
    assert "16 tokens" in _text(loader._repr_html_())
    step = next(iter(loader))
    html = step._repr_html_()
    assert html.count("<svg") == 8
    assert "and 2 rows more" in _text(html)
    assert f"{step[0].num_tokens} of 16 slots" in _text(step[0]._repr_html_())


def test_a_row_without_document_ids_shows_the_same_strip(loader: ps.Loader) -> None:
    row = next(iter(loader))[0]
    requirements = ps.InputRequirements(document_ids=False, cu_seqlens=True, positions=False)
    other = ps.Loader(
        loader.mixture, sequence_length=16, rows_per_step=10, threads=0, requirements=requirements
    )
    plain = next(iter(other))[0]
    assert plain.document_ids is None
    assert plain.strip_html() == row.strip_html()


def test_a_strip_has_a_box_for_each_stretch_and_none_for_padding() -> None:
    documents = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    trained = np.array([1, 1, 0, 1, 0, 0, 0, 0], bool)
    box = r'x="(\d+)" y="0" width="(\d+)" height="1" fill="(#\w+)" fill-opacity="([\d.]+)"'
    boxes = re.findall(box, row_strip(documents, trained, 6))
    assert [(int(x), int(width), float(opacity)) for x, width, _, opacity in boxes] == [
        (0, 2, 1.0), (2, 1, 0.25), (3, 1, 1.0), (4, 1, 0.25), (5, 1, 0.25)
    ]  # fmt: skip
    assert boxes[0][2] == boxes[1][2] == boxes[4][2] != boxes[2][2]


def test_a_long_row_takes_a_bounded_number_of_boxes() -> None:
    trained = np.arange(1 << 20) % 2 == 0
    assert row_strip(np.arange(1 << 20), trained, 1 << 20).count("<rect") <= 600


def test_text_is_escaped_marked_where_trained_and_cut() -> None:
    html = marked_text([("<script>alert(1)</script>", 0.0), ("yes & no", 1.0)])
    assert "yes &amp; no</span>" in html
    assert _text(html) == "<script>alert(1)</script>yes & no"
    assert len(marked_text([("x" * 10_000, 1.0), ("y", 0.0)])) < 5000
    assert (
        _text(card("<a>", [("<b>", "<c>")], bars([1, 0, 3], ["1", "2", "<d>"])))
        == "<a><b><c>1: 12: 0<d>: 31<d>"
    )


def test_a_chat_marks_exactly_its_trained_characters(tmp_path: Path) -> None:
    tokenizer = ps.train_tokenizer(
        ["hello there"],
        output=tmp_path / "tokenizer",
        vocab_size=300,
        progress=False,
        special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    messages = [{"role": "user", "content": "a <b>?"}, {"role": "assistant", "content": "fine"}]
    chat = ps.chat.encode(messages, tokenizer=tokenizer, template="chatml")
    marked = re.findall(
        r'<span style="[^"]*" title="1">(.*?)</span>', chat._repr_html_(), re.DOTALL
    )
    assert "".join(marked) == "".join(text for _, text in chat.trained_text).replace(
        "<", "&lt;"
    ).replace(">", "&gt;")
    assert chat.text in _text(chat._repr_html_())


def test_a_curve_is_a_bounded_line_that_skips_what_is_no_number() -> None:
    html = curve([3.0, float("nan"), 1.0, 2.0], "loss")
    assert 'points="0,0.0000 1,1.0000 2,0.5000"' in html
    assert "loss: 1 to 3" in html
    assert curve([1.0] * 100_000, "flat").count(",") <= 1200
    assert "polyline" in curve([], "none")
    assert 'points="0,1.0000 1,0.0000"' in curve([1.0, float("inf"), 2.0], "loss")


@pytest.mark.parametrize("count", [1, 2, 599, 600, 601, 1199, 1202])
def test_a_curve_begins_with_the_first_value_and_ends_with_the_last(count: int) -> None:
    html = curve([float(value) for value in range(count)], "loss")
    assert re.findall("<span>(.*?)</span>", html) == ["0", "loss", f"{count - 1:.4g}"]
    assert html.count(",") == min(count, 600)


def test_a_report_prints_as_text_and_its_repr_is_a_line(tmp_path: Path) -> None:
    tokenizer = ps.train_tokenizer(
        ["some text"], vocab_size=259, output=tmp_path / "tokenizer", progress=False
    )
    texts = [{"text": "one"}, {"text": "a second"}]
    data = ps.prepare(texts, tokenizer=tokenizer, output=tmp_path / "<b>data", progress=False)
    report = data.report
    assert (
        repr(report)
        == f"PrepareReport({str(tmp_path / '<b>data')!r}: 2 documents, 15 tokens, 0 rejected)"
    )
    assert str(report) == report.as_text()
    assert report.as_text() in _text(report._repr_html_())


def test_a_document_a_source_and_a_mixture_show_theirs(loader: ps.Loader, tmp_path: Path) -> None:
    dataset = loader.mixture.sources[0].path
    document = replace(dataset[1], text="<i>3 words</i>")
    html = document._repr_html_()
    assert html.count("<svg") == 1
    assert "tokens3" in _text(html)
    assert "<i>3 words</i>" in _text(html)
    assert "nothing" not in _text(dataset[0]._repr_html_())
    source = ps.Source("s3://key:SECRET@host/web", 0.25, name="<web>", max_epochs=2)
    text = _text(source._repr_html_())
    assert "Source <web>" in text
    assert "max_epochs2" in text
    assert "SECRET" not in text
    assert "shuffle" not in text
    mixture = ps.Mixture(
        [source, ps.Source("data/code", 0.75)], [ps.ShareChange(step=2000, shares={"<web>": 0.5})]
    )
    text = _text(mixture._repr_html_())
    assert "from step 2,000<web> 0.5" in text
    assert "<web>0.25" in text
    assert "code0.75data/code" in text
    assert "SECRET" not in text


def test_a_tokenizer_shows_its_ids(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer", ["a b"] * 9, 280)
    text = _text(tokenizer._repr_html_())
    assert f"ids{tokenizer.vocab_size}" in text
    assert f"EOS{tokenizer.eos_id}" in text
    assert "chat templateno" in text


def test_pictures_name_what_they_show() -> None:
    assert _text(bars([0, 3, 1, 0], ["a", "b", "c", "d"])).endswith("bc")
    assert _text(bars([0, 3], ["a", "b"])).endswith("b")
    assert _text(curve([5.25, 2.0, 1.5], "loss of each step")).endswith("5.25loss of each step1.5")


def test_a_report_and_a_chat_keep_their_columns(tmp_path: Path) -> None:
    """A plain <pre> has the font of running text in a notebook, which breaks columns."""
    tokenizer = tiny_tokenizer(tmp_path / "t", ["abc"], 300)
    data = ps.prepare([{"text": "abc"}], tokenizer=tokenizer, output=tmp_path / "d", progress=False)
    assert data.report is not None
    assert "monospace" in data.report._repr_html_()
    assert "monospace" in marked_text([("a", 1.0)])


def test_tokens_are_shown_in_colours(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, ["a b"], 300)
    text = "a\n<b> 😀"
    shown = tokenizer.show(text)
    assert shown.ids.tolist() == tokenizer.encode(text).tolist()
    assert len(shown) == len(shown.texts)
    assert "⟨f0" in "".join(shown.texts)
    assert str(shown).splitlines()[0].split() == [str(shown.ids[0]), repr(shown.texts[0])]
    html = shown._repr_html_()
    assert "<b>" in _text(html)
    assert html.count("background") == len(shown)
    control = next(iter(tokenizer.special_tokens))
    assert tokenizer.show(control, allow_control=True).texts == (control,)
    assert tokenizer.show("").texts == ()
    assert "0 tokens" in _text(tokenizer.show("")._repr_html_())


class _Shell:
    """The part of ipykernel's shell that tells it from a terminal's."""

    kernel = object()


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What a kernel would show: (what happened, text)."""
    seen: list[tuple[str, str]] = []

    class Handle:
        def update(self, content: dict[str, str], raw: bool) -> None:
            assert raw
            seen.append(("update", content["text/plain"]))

    def display(content: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        _text(content["text/html"])
        seen.append(("display", content["text/plain"]))
        return Handle()

    ipython = ModuleType("IPython")
    inner = ModuleType("IPython.display")
    vars(ipython).update(get_ipython=_Shell, display=inner)
    vars(inner).update(display=display)
    for name, module in (
        ("IPython", ipython),
        ("IPython.display", inner),
        ("ipykernel", ModuleType("ipykernel")),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    return seen


def test_only_a_kernel_is_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    ipython = ModuleType("IPython")
    vars(ipython)["get_ipython"] = object
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    assert not in_notebook()


def test_progress_in_a_notebook_is_one_line_that_changes(
    shown: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_notebook()
    with Progress("preparing <b>", total=2, unit="B") as progress:
        progress._shown -= 1
        progress.advance(1)
        progress.advance(1)
    assert [kind for kind, _ in shown] == ["display", "update"]
    assert "50%" in shown[0][1]
    assert "100%" in shown[1][1]
    line = ProgressLine(4, 0)
    line.start()
    record = {"percent": 25.0, "seconds": 1.0, "wait_seconds": 0.0, "seconds_left": 3.0, "loss": 2}
    line.show({**record, "step": 1})
    line.show({**record, "step": 2})  # too early
    line.show({**record, "step": 4, "held/loss": 1.5})
    assert [kind for kind, _ in shown[2:]] == ["display", "update"]
    assert shown[-1][1].startswith("step 4/4")
    assert capsys.readouterr().err == "step 4: held loss 1.5000\n"
    LiveLine().show("without a share")


def test_colours_in_a_notebook_suit_light_and_dark_pages() -> None:
    """rich's own navy and maroon cannot be read on a dark page."""
    console = safe_console(force_jupyter=True)
    segments = [*console.render(Text("a", style="blue"), console.options)]
    assert segments[0].style is not None
    assert segments[0].style.color is not None
    assert segments[0].style.color.name == IN_NOTEBOOKS["blue"]
    plain = safe_console(force_terminal=True)
    (first, *_) = plain.render(Text("a", style="blue"), plain.options)
    assert first.style is not None
    assert first.style.color is not None
    assert first.style.color.name == "blue"
