"""What objects show of themselves in notebooks."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from makers.tokenizers import tiny_tokenizer
from penstock.core.notebook import bars, card, curve, marked_text, row_strip


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
        == "<a><b><c>1: 12: 0<d>: 3"
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
