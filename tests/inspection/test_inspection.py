"""The views: figures against plain counting, rows against the arrays they show, and what is read
without colours.
"""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from makers.processes import run_penstock
from makers.tokenizers import tiny_tokenizer
from makers.views import console_of, printed
from penstock import InputRequirements, Loader, Mixture, ShareChange, Source, write_dataset
from penstock.core.terminal import visible
from penstock.data.shards import TokenizerInfo
from penstock.plan.inputs import EVERYTHING
from penstock.tokenizers import Tokenizer
from penstock.use.inspection import (
    Style,
    dataset_view,
    document_view,
    dry_run,
    plan_view,
    row_view,
    slots_view,
    summarise,
    token_texts,
    tokenizer_of,
    view_document,
    view_rows,
)
from penstock.use.inspection.datasets import length_histogram

TEXTS = [
    f"def gate_{i}(water):\n\treturn water * {i}  # ёлка 水\n" * (1 + i % 4) for i in range(24)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEXTS, 300)


@pytest.fixture(scope="module")
def code(tmp_path_factory, tokenizer) -> Path:
    path = tmp_path_factory.mktemp("data") / "code"
    documents = [tokenizer.encode(text) for text in TEXTS]
    write_dataset(path, documents, texts=TEXTS, tokenizer=TokenizerInfo.of(tokenizer))
    tokenizer.save(path / "tokenizer")
    return path


@pytest.fixture(scope="module")
def chat(tmp_path_factory, tokenizer) -> Path:
    path = tmp_path_factory.mktemp("data") / "chat"
    documents = [tokenizer.encode(text)[:20] for text in TEXTS]
    spans = [None if i % 2 else [(4, 9, 1.0), (9, 12, 0.5)] for i in range(len(documents))]
    write_dataset(path, documents, spans=spans, tokenizer=TokenizerInfo.of(tokenizer))
    tokenizer.save(path / "tokenizer")
    return path


def make_loader(*sources, changes=(), **settings) -> Loader:
    distances = InputRequirements(asked_by="the test", target_distances=2)
    settings = {"sequence_length": 96, "rows_per_step": 4, "threads": 0, **settings}
    return Loader(
        Mixture(list(sources), changes), requirements=EVERYTHING.merge(distances), **settings
    )


def style(**terminal) -> Style:
    return Style(console_of(**terminal))


# -- text
# --------------------------------------------------------------------------------------------------


@given(st.text())
def test_what_is_shown_prints_and_moves_no_cursor(text):
    assert visible(text).isprintable()


def test_marks_stand_for_what_does_not_print():
    assert visible("a\n\tb\x1b[31m\u202e") == r"a⏎→b\x1b[31m\u202e"


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_token_texts_lose_nothing(tokenizer, text):
    """Whatever characters tokens cut through: joined, the texts are the text, but for bytes that
    are shown twice.
    """
    texts = token_texts(tokenizer, tokenizer.encode(text))
    whole = "".join(t for t in texts if not (t.startswith("<") and t.endswith(">") and len(t) >= 4))
    plain = visible(text)
    if "<" not in text:
        assert whole == plain


def test_a_character_over_two_tokens_is_shown_where_it_is_complete(tokenizer):
    spelled = {tokenizer.byte_table[token]: token for token in range(tokenizer.vocab_size)}
    ids = [spelled[bytes([byte])] for byte in "é".encode()]
    assert token_texts(tokenizer, ids) == ["<c3>", "é"]
    assert token_texts(tokenizer, [ids[0], *tokenizer.encode("a")]) == ["<c3>", "<61>"]
    assert token_texts(tokenizer, [tokenizer.eos_id]) == ["<|eos|>"]
    assert token_texts(None, [5, 6]) == ["5 ", "6 "]


# -- datasets
# --------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1 << 40), max_size=30))
def test_histogram_counts_every_length_once(lengths):
    bins = length_histogram(np.array(lengths, np.int64))
    assert sum(part.documents for part in bins) == len(lengths)
    for part in bins:
        inside = [n for n in lengths if part.low <= n <= part.high]
        assert (part.documents, part.tokens) == (len(inside), sum(inside))


def test_summary_counts_what_is_there(chat, tokenizer):
    from penstock import open_dataset

    dataset = open_dataset(chat)
    summary = summarise(dataset)
    lengths = [len(dataset[i].tokens) for i in range(len(dataset))]
    assert (summary.documents, summary.tokens, summary.shards) == (24, sum(lengths), 1)
    assert summary.trained_tokens == sum(
        np.count_nonzero(dataset[i].loss_weights[1:]) for i in range(len(dataset))
    )
    assert summary.length_quantiles["0"] == min(lengths)
    assert summary.length_quantiles["1"] == max(lengths)
    assert summary.has_spans
    shown = printed(dataset_view(summary))
    assert "24 in 1 shard" in shown
    assert "some spans are not" in shown


def test_a_document_shows_what_is_trained_without_colours(chat, tokenizer):
    from penstock import open_dataset

    view = view_document(open_dataset(chat), 0, tokenizer)
    shown = printed(document_view(view, style(), 100)).replace("\n", "")
    texts = view.texts
    assert (
        f"⟦{''.join(texts[:4])}⟧{''.join(texts[4:9])}⟨0.5: {''.join(texts[9:12])}⟩⟦"
        in shown.replace("  ⟦", "⟦", 1)
    )


def test_long_documents_say_how_much_is_left_out(code, tokenizer):
    from penstock import open_dataset

    view = view_document(open_dataset(code), 3, tokenizer)
    assert f"…{len(view.tokens) - 10:,} tokens…" in printed(document_view(view, style(), 10))


# -- rows
# --------------------------------------------------------------------------------------------------


def test_row_view_agrees_with_the_arrays(code, chat):
    loader = make_loader(Source(code, share=0.5), Source(chat, share=0.5, name="chat"))
    inputs = next(
        iter(make_loader(Source(code, share=0.5), Source(chat, share=0.5, name="chat")).seek(2))
    )
    views = view_rows(loader, 2, [0, 3, 99], tokenizer_of)
    assert [view.row for view in views] == [0, 3]
    for view in views:
        row = inputs[view.row]
        np.testing.assert_array_equal(view.tokens, row.tokens)
        assert view.num_targets(1) == np.count_nonzero(row.loss_weights[0])
        assert view.num_targets(2) == np.count_nonzero(row.loss_weights[1])
        assert [d.begin for d in view.documents] == row.cu_seqlens[: len(view.documents)].tolist()
        assert view.documents[-1].end == row.num_tokens
        np.testing.assert_array_equal(view.learned_weights[1:] > 0, row.loss_weights[0][:-1] > 0)
        assert view.texts[row.num_tokens :] == ("",) * (96 - row.num_tokens)
        json.dumps(view.as_json())


def test_a_split_document_teaches_nothing_of_the_document_after_it(code):
    """Its last slot has a target, which is in another row; the slot after it begins another
    document, and is read.
    """
    view = view_rows(make_loader(Source(code)), 0, [0], tokenizer_of)[0]
    border = view.documents[1].begin
    view.targets[0, border - 1], view.loss_weights[0, border - 1] = 7, 1.0
    assert view.learned_weights[border - 1 : border + 2].tolist() == [1, 0, 1]
    assert view.learned_weights[0] == 0


def test_rows_are_readable_without_colour(code, chat):
    view = view_rows(make_loader(Source(code), Source(chat, name="chat")), 0, [0], tokenizer_of)[0]
    shown = printed(row_view(view, style(), 1000), width=200)
    assert "\x1b" not in shown
    padding = 96 - view.num_tokens
    assert f"96 slots, {len(view.documents)} documents, {padding} padding" in shown
    strip = shown.splitlines()[1].rstrip()
    assert strip[0] == "A"
    assert len(strip) == 96
    assert strip.count("·") == padding
    for letter, document in zip("ABCDEFG", view.documents, strict=False):
        assert strip.count(letter) == document.end - document.begin
        assert (
            f"{letter} {document.source}  {document.origin} (document {document.document}" in shown
        )
    first = view.texts[0]
    assert f"⟦{first}" in shown


def test_rows_use_colour_where_there_is_some(code):
    view = view_rows(make_loader(Source(code)), 0, [0], tokenizer_of)[0]
    coloured = printed(row_view(view, style(force_terminal=True), 50), force_terminal=True)
    assert "\x1b[36m" in coloured
    assert "⟦" not in coloured
    plain = printed(
        row_view(view, style(force_terminal=True, no_color=True), 50),
        force_terminal=True,
        no_color=True,
    )
    assert "\x1b[36m" not in plain
    assert "⟦" in plain


def test_slots_show_targets_at_each_distance(code):
    view = view_rows(make_loader(Source(code)), 0, [0], tokenizer_of)[0]
    border = view.documents[0].end
    lines = printed(slots_view(view, border - 2, border + 1)).splitlines()
    assert "target +1" in lines[0]
    assert "target +2" in lines[0]
    last = lines[2].split()
    assert last[:3] == [str(border - 1), "A", str(border - 1)]
    assert last[-4:] == ["–", "0", "–", "0"]
    before = lines[1].split()
    assert before[-2:] == ["–", "0"]
    assert before[-3] == "1"


# -- plans
# --------------------------------------------------------------------------------------------------


def test_dry_run_counts_what_the_loader_gives(code, chat):
    sources = (Source(code, share=0.8), Source(chat, share=0.2, name="chat"))
    changes = [ShareChange(step=3, shares={"chat": 0.4})]
    report = dry_run(make_loader(*sources, changes=changes, data_parallel=(0, 4)), 6)
    tokens, by_source, padding = 0, [0, 0], 0
    for step in make_loader(*sources, changes=changes):
        if step.index == 6:
            break
        for row in step:
            tokens += row.num_tokens
            padding += 96 - row.num_tokens
            for source, length in zip(row.source_ids, np.diff(row.cu_seqlens), strict=False):
                by_source[source] += int(length)
    assert (report.steps, report.rows, report.ended) == (6, 24, False)
    assert (report.tokens, report.padding) == (tokens, padding)
    assert [source.tokens for source in report.sources] == by_source
    assert [round(source.share, 9) for source in report.sources] == [0.8, 0.2]
    assert [round(source.share_at_end, 6) for source in report.sources] == [0.666667, 0.333333]
    assert abs(sum(source.share_given for source in report.sources) - 1) < 1e-9
    assert "80.00% → 66.67%" in printed(plan_view(report))


def test_dry_run_says_when_the_sources_end_and_what_was_dropped(code):
    report = dry_run(
        make_loader(
            Source(code, max_epochs=1, too_long="drop"), sequence_length=48, data_parallel=(0, 4)
        ),
        1000,
    )
    lengths = [len(tokens) for tokens in _documents(code)]
    assert report.ended
    (source,) = report.sources
    assert source.epochs == 1
    assert source.dropped_documents == sum(length > 48 for length in lengths) > 0
    assert source.dropped_tokens == sum(length for length in lengths if length > 48)
    assert source.tokens == sum(length for length in lengths if length <= 48)
    assert "where the sources end" in printed(plan_view(report))


def _documents(path):
    from penstock import open_dataset

    dataset = open_dataset(path)
    return [dataset[i].tokens for i in range(len(dataset))]


# -- verbs
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def run_file(tmp_path, code, chat) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"data:\n  sources:\n    - {{path: {code}, share: 0.7}}\n    - {{path: {chat}, share: "
        "0.3, name: chat}\n  loader: {sequence_length: 96, rows_per_step: 4, seed: 3}\n  "
        "target_distances: 2\n"
    )
    return path


command = partial(run_penstock, check=True)


def test_inspect_shows_a_dataset(code):
    shown = command("inspect", code).stdout
    assert "24 in 1 shard" in shown
    assert "document 0" in shown
    assert "def gate_0" in shown.replace("⟦", "").replace("⟧", "")
    found = json.loads(command("inspect", code, "--json", "--document", 5).stdout)
    assert found["documents"] == 24
    assert "".join(found["shown"][0]["texts"]).replace("⏎", "\n").replace("→", "\t") == TEXTS[5]


def test_inspect_refuses_what_is_not_there(code, run_file, tmp_path):
    refused = command("inspect", code, "--document", 24, check=False)
    assert refused.returncode == 1
    assert "no document 24; it has 24, from 0" in refused.stderr
    refused = command("inspect", tmp_path / "nothing", check=False)
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr
    refused = command("inspect", run_file, "--row", 70, check=False)
    assert "row 70: the step has" in refused.stderr


def test_inspect_shows_rows_of_a_run_and_of_a_dataset(run_file, code):
    shown = command("inspect", run_file, "--step", 1, "--row", 2, "--slots", "0:3").stdout
    assert "step 1 row 2" in shown
    assert "at distance 2" in shown
    assert "read, not trained" in shown
    assert "target +2" in shown
    assert (
        "step 0 row 0  64 slots"
        in command("inspect", code, "--rows", 1, "--sequence-length", 64).stdout
    )
    (row,) = json.loads(
        command("inspect", run_file, "--json", "--set", "data.loader.sequence_length=40").stdout
    )
    assert len(row["tokens"]) == 40


def test_plan_prints_and_gives_json(run_file):
    shown = command("plan", run_file, "--steps", 5).stdout
    assert "5 steps of 4 rows" in shown
    found = json.loads(command("plan", run_file, "--steps", 5, "--json").stdout)
    assert found["rows"] == 20
    assert [source["name"] for source in found["sources"]] == ["code", "chat"]
