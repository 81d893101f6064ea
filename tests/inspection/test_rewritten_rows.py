"""Rewritten documents as they are shown: stretches against the document and its spans, text with
and without colour.
"""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from makers.datasets import tokenizer_info
from makers.objectives import PlainObjective
from makers.tokenizers import tiny_tokenizer
from makers.views import console_of, printed
from penstock import Denoise, Infill, write_dataset
from penstock.core.errors import TokenizerError
from penstock.data.shards import TokenizerInfo
from penstock.plan.objectives import CausalLM, PrefixLM, SpanCorruption, Written
from penstock.use.inspection import (
    Style,
    dry_run,
    plan_view,
    row_view,
    slots_view,
    token_texts,
    tokenizer_of,
    view_rows,
)
from penstock.use.inspection.page import payload
from penstock.use.inspection.page_model import PageData
from penstock.use.inspection.rows import in_order
from penstock.use.inspection.terminal_style import COLOURS
from penstock.use.inspection.text import part_texts

SENTINELS = tuple(range(700, 900))
BOS, EOS, MODE, INPUT_END, PREFIX, MIDDLE, SUFFIX = 1, 2, 901, 905, 910, 911, 912
FIM = (PREFIX, MIDDLE, SUFFIX)


def make_data(folder, *, framed=True, lowest=3, highest=700, weighted=False, seed=0, count=40):
    draws = np.random.default_rng(seed)
    documents = [
        draws.integers(lowest, highest, size).tolist() for size in draws.integers(1, 90, count)
    ]
    documents = [[BOS, *words, EOS] for words in documents] if framed else documents
    spans = (
        [[(1, len(each), 0.5)] if len(each) > 1 else None for each in documents]
        if weighted
        else None
    )
    info = tokenizer_info(bos_id=BOS, eos_id=EOS)
    return write_dataset(folder, documents, tokenizer=info, spans=spans)


def make_loader(*sources, **options):
    return ps.Loader(
        ps.Mixture(list(sources)),
        **{"sequence_length": 256, "rows_per_step": 4, "threads": 0, **options},
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("rewritten") / "data")


def stored(loader, view, document):
    """The ids of a document of a row, as they lie in its dataset."""
    names = [source.name for source in loader.mixture.sources]
    return loader.datasets[names.index(document.source)][document.document].tokens


# -- what is told
# --------------------------------------------------------------------------------------------------

TASKS = [
    SpanCorruption(0.15, 3, mode=MODE, name="R"),
    SpanCorruption("0.5", 3, name="X"),
    PrefixLM(mode=MODE + 1),
    PrefixLM(sentinel=False, name="plain S"),
    CausalLM(mode=MODE + 2),
]


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 1 << 30), st.booleans(), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from(["both", "causal", "trained inputs"]),
)  # fmt: skip
def test_stretches_tell_every_slot_of_a_denoised_document(
    tmp_path_factory, seed, framed, any_ids, roll, more, attention
):
    """Whatever the words are, sentinels among them: words are told from what was added, spans are
    those taken out.
    """
    low, high = (0, 1000) if any_ids else (3, 700)
    folder = tmp_path_factory.mktemp("data") / "data"
    data = make_data(folder, framed=framed, lowest=low, highest=high, seed=seed, count=12)
    objective = Denoise(
        TASKS,
        sentinels=SENTINELS,
        roll=roll,
        final_sentinel=more,
        input_end=INPUT_END if more else None,
        bidirectional=attention == "both",
        train_on_inputs=attention == "trained inputs",
    )
    loader = make_loader(ps.Source(data, objective=objective), seed=seed)
    for view in view_rows(loader, 0, [0, 1, 2, 3], tokenizer_of):
        learned = view.learned_weights
        for document in view.documents:
            assert_told(loader, view, document)
            tasks = [task for task in objective.tasks if task.name == document.task]
            inputs = [each for each in document.stretches if each.part == "inputs"]
            if inputs:
                bar = inputs[-1].end
                assert document.prefix == (bar - document.begin if attention == "both" else 0)
                assert learned[bar : document.end].all()
                assert bool(learned[document.begin + 1 + framed : bar].any()) == (
                    attention == "trained inputs" and bar - document.begin > 1 + framed
                )
                roles = [each.role for each in document.stretches]
                assert ("mode" in roles) == (tasks[0].mode is not None)
                assert ("final sentinel" in roles, "input end" in roles) == (more, more)


def assert_told(loader, view, document):
    """Stretches lie side by side, hold the document's words in order, and sentinels stand for their
    spans.
    """
    stretches = document.stretches
    assert [each.begin for each in stretches] == [
        document.begin,
        *(each.end for each in stretches[:-1]),
    ]
    assert stretches[-1].end == document.end
    whole = stored(loader, view, document).tolist()
    framed = stretches[0].role == "BOS"
    words = [
        view.tokens[slot] for each in in_order(stretches) for slot in range(each.begin, each.end)
    ]
    assert words == (whole[1:-1] if framed else whole)
    sentinels = [each for each in stretches if each.role == "sentinel"]
    assert [view.tokens[each.begin] for each in sentinels] == [
        SENTINELS[each.span] for each in sentinels
    ]
    for part in ("inputs", "targets"):
        told = [each.span for each in sentinels if each.part == part]
        assert told in ([], list(range(document.num_spans)))
    holes = [each for each in sentinels if each.part == "inputs"]
    for hole in holes:
        # What was taken out goes between the words around the hole.
        before = [each for each in stretches if each.end <= hole.begin and each.word >= 0]
        span = next(each for each in stretches if each.role == "target" and each.span == hole.span)
        assert span.word == (before[-1].word + before[-1].end - before[-1].begin if before else 0)


@pytest.mark.parametrize("context", [True, False])
def test_stretches_tell_the_sections_of_an_infilled_document(data, context):
    objective = Infill(rate=0.9, tokens=FIM, train_on_context=context)
    loader = make_loader(ps.Source(data, objective=objective))
    tasks = set()
    for view in view_rows(loader, 0, [0, 1, 2, 3], tokenizer_of):
        for document in view.documents:
            tasks.add(document.task)
            if document.task == "causal":
                assert document.stretches == ()
                continue
            assert_told(loader, view, document)
            roles = {each.role: each for each in document.stretches}
            for role, token in (
                ("prefix token", PREFIX),
                ("middle token", MIDDLE),
                ("suffix token", SUFFIX),
            ):
                assert view.tokens[roles[role].begin] == token
            if document.task == "PSM" and not context and "middle" in roles:
                trained = view.learned_weights[document.begin : document.end] != 0
                middle = roles["middle"]
                assert trained[: middle.begin - document.begin].sum() == 0
                assert trained[middle.begin - document.begin :].all()
    assert tasks == {"PSM", "SPM", "causal"}


def test_stretches_tell_the_fragments_of_a_repository(tmp_path):
    """Each infilled one has its sections; separators and the others are text."""
    data = make_data(tmp_path / "data", highest=12)
    objective = Infill(
        rate=0.8,
        tokens=(*FIM, 999),
        separator=7,
        fragment_rate=0.6,
        fragment_tokens=10,
        ignore_prefix=5,
    )
    seen = set()
    loader = make_loader(ps.Source(data, objective=objective))
    for view in view_rows(loader, 0, [0, 1, 2, 3], tokenizer_of):
        for document in view.documents:
            seen.add(document.task)
            if document.task == "causal":
                assert document.stretches == ()
                continue
            assert_told(loader, view, document)
            words = [each for each in in_order(document.stretches) if each.word >= 0]
            places = [each.word for each in words]
            assert places == [0, *np.cumsum([each.end - each.begin for each in words])[:-1]]
            seen |= {each.role for each in document.stretches}
            spans = [each.span for each in document.stretches if each.role == "middle"]
            assert spans == sorted(set(spans))
            for each in document.stretches:
                if each.role == "filling":
                    assert (view.tokens[each.begin : each.end] == 999).all()
    assert seen >= {
        "infilled", "causal", "text", "prefix", "suffix", "middle", "prefix and middle", "filling",
    }  # fmt: skip


def test_an_objective_of_ones_own_tells_its_prefix(data):
    loader = make_loader(ps.Source(data, objective=HalfRead()))
    (view,) = view_rows(loader, 0, [0], tokenizer_of)
    for document in view.documents:
        half = (document.end - document.begin - 2) // 2
        assert [(each.part, each.role) for each in document.stretches] == [
            *([("prefix", "BOS"), ("prefix", "prefix")] if half else []),
            *([("rest", "text"), ("rest", "EOS")] if half else []),
        ]
        assert document.prefix == (1 + half if half else 0)
        assert document.restored == ()


class HalfRead(PlainObjective):
    """Reads the first half of a document in both directions."""

    name, bidirectional = "half", True

    def write(self, tokens, weights, key):
        half = len(tokens) // 2
        read = np.arange(len(tokens)) >= half
        return Written(tokens=tokens, weights=read.astype(np.float32), prefix=half)


def test_tasks_are_counted(data):
    loader = make_loader(
        ps.Source(data, objective=Denoise(TASKS[:2], sentinels=SENTINELS)),
        ps.Source(data, name="b"),
    )
    (view,) = view_rows(loader, 0, [0], tokenizer_of)
    assert view.tasks == {
        name: sum(each.task == name for each in view.documents)
        for name in ("R", "X")
        if name in view.tasks
    }
    assert sum(view.tasks.values()) == sum(each.source == "data" for each in view.documents)
    report = dry_run(make_loader(*loader.mixture.sources, data_parallel=(0, 4)), 20)
    told, plain = (source.tasks for source in report.sources)
    assert set(told) == {"R", "X"}
    assert sum(told.values()) == pytest.approx(1)
    assert 0.3 < told["R"] < 0.7
    assert plain == {}
    assert f"R {told['R']:.1%}" in printed(plan_view(report))


# -- how it is shown
# --------------------------------------------------------------------------------------------------


COLOUR = {"force_terminal": True, "color_system": "standard", "_environ": {"TERM": "xterm"}}


def style(**terminal) -> Style:
    return Style(console_of(**terminal))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A dataset of real words with a tokenizer that has sentinels, a mode, and tokens for
    infilling.
    """
    folder = tmp_path_factory.mktemp("words") / "words"
    texts = [
        f"The gate {n} of the penstock is shut, and the water — ёлка, 水 — stands at level {n}."
        for n in range(30)
    ]
    names = [
        "[R]",
        "<fim_prefix>",
        "<fim_middle>",
        "<fim_suffix>",
        *(f"<extra_id_{n}>" for n in range(40)),
    ]
    tokenizer = tiny_tokenizer(folder.parent / "tokenizer", texts, 420, tuple(names))
    documents = [tokenizer.encode(text) for text in texts]
    data = write_dataset(folder, documents, texts=texts, tokenizer=TokenizerInfo.of(tokenizer))
    tokenizer.save(folder / "tokenizer")
    return folder, texts, data


R = SpanCorruption(0.3, 3, mode="[R]", name="R")


def test_holes_and_spans_have_one_number(words):
    folder, texts, _ = words
    (view,) = view_rows(
        make_loader(ps.Source(folder, objective=Denoise([R]))), 0, [0], tokenizer_of
    )
    shown = printed(row_view(view, style(), 1000), width=4000)
    assert f"; tasks: R {len(view.documents)}" in shown.splitlines()[0]
    document = view.documents[0]
    assert f"A words  R, {document.num_spans} spans  " in shown
    inputs, targets, before = (
        shown.split(f"▌{name}", 1)[1].splitlines()[1].strip()
        for name in ("inputs", "targets", "as it was")
    )
    assert inputs.startswith("⟦⟪[R]⟫")
    assert inputs.endswith("⟧")
    spans = {span: text for text, span in document.restored if span >= 0}
    for span, text in spans.items():
        assert f"⟪{span}⟫" in inputs
        assert f"⟪{span}: {text}⟫" in before
        if text.isascii():
            assert f"⟪{span}⟫{text}" in targets
    assert "".join(text for text, _ in document.restored) == texts[document.document]
    assert "see each other" in shown


def test_holes_and_spans_have_one_colour(words):
    folder, *_ = words
    (view,) = view_rows(
        make_loader(ps.Source(folder, objective=Denoise([R]))), 0, [0], tokenizer_of
    )
    shown = printed(row_view(view, style(**COLOUR), 1000), width=4000, **COLOUR)
    assert "⟪" not in shown
    assert "⟦" not in shown
    first = shown.split("▌targets")[0]
    assert COLOURS[:2] == ("cyan", "yellow")
    for number, code in ((0, 36), (1, 33)):
        # Dim where it is read, in the inputs; the same colour where it is trained.
        assert f"\x1b[2;7;{code}m {number} " in first
        assert f"\x1b[7;{code}m {number} " in shown


@pytest.mark.parametrize("width", [80, 120])
def test_long_parts_are_cut_and_counted(words, width):
    folder, *_ = words
    loader = make_loader(ps.Source(folder, objective=Denoise([PrefixLM(rate=0.5)])))
    (view,) = view_rows(loader, 0, [0], tokenizer_of)
    shown = printed(row_view(view, style(), 10), width=width)
    first = view.documents[0].stretches
    assert f" …{first[0].end - first[0].begin - 10:,} tokens… " in " ".join(shown.split("\n"))
    assert "characters… " in shown
    assert max(map(len, shown.splitlines())) <= width


def test_slots_tell_their_roles(words):
    folder, *_ = words
    (view,) = view_rows(
        make_loader(ps.Source(folder, objective=Denoise([R]))), 0, [0], tokenizer_of
    )
    lines = printed(slots_view(view, 0, view.documents[0].end), width=200).splitlines()
    assert lines[0].split()[-1] == "role"
    assert lines[1].rstrip().endswith("mode")
    assert sum("sentinel 0" in line for line in lines) == 2


def test_characters_are_infilled_with_their_text_told(words):
    folder, texts, _ = words
    loader = make_loader(ps.Source(folder, objective=Infill(rate=1, split="character")))
    seen = set()
    for view in view_rows(loader, 0, [0, 1, 2, 3], tokenizer_of, lines=True):
        for document in view.documents:
            assert "".join(text for text, _ in document.restored) == texts[document.document]
            assert document.stretches[-1].end == document.end
            seen |= {each.role for each in document.stretches}
    assert {"prefix", "middle", "suffix", "prefix and middle", "filling"} <= seen


def test_an_end_of_document_before_the_filling_is_told_as_such(words, tmp_path):
    _, texts, data = words
    tokenizer = tokenizer_of(data)
    documents = [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    data = write_dataset(tmp_path / "ended", documents, tokenizer=TokenizerInfo.of(tokenizer))
    tokenizer.save(tmp_path / "ended" / "tokenizer")
    loader = make_loader(ps.Source(data.path, objective=Infill(rate=1, split="character")))
    filled = 0
    for view in view_rows(loader, 0, [0, 1, 2, 3], tokenizer_of, lines=True):
        for document in view.documents:
            assert "".join(text for text, _ in document.restored) == texts[document.document]
            places = [each.begin for each in document.stretches] + [document.end]
            assert places == [document.begin, *(each.end for each in document.stretches)]
            (eos,) = (each for each in document.stretches if each.role == "EOS")
            assert view.tokens[eos.begin : eos.end].tolist() == [tokenizer.eos_id]
            assert eos.part in ("middle", "prefix and middle")
            filled += document.stretches[-1].role == "filling"
    assert filled


class Spaced:
    """A tokenizer without exact bytes, whose decoding leaves out the space that begins a text, as
    T5's does.
    """

    pieces = (" the", " gate", "s", " are", " shut")

    def __init__(self):
        self.special_tokens = {}

    @property
    def byte_table(self):
        raise TokenizerError("no exact bytes")

    def decode(self, ids):
        return "".join(self.pieces[token] for token in ids).removeprefix(" ")


def test_words_keep_their_spaces_where_bytes_are_not_exact():
    assert token_texts(Spaced(), [0, 1, 2, 3, 4]) == ["the", " gate", "s", " are", " shut"]
    assert part_texts(Spaced(), [[0, 1], [2], [3, 4]]) == ["the gate", "s", " are shut"]


def test_json_and_pages_tell_stretches(words):
    folder, *_ = words
    (view,) = view_rows(
        make_loader(ps.Source(folder, objective=Denoise([R]))), 0, [0], tokenizer_of
    )
    told = json.loads(json.dumps(view.as_json()))
    document = told["documents"][0]
    assert (told["tasks"], document["task"]) == ({"R": len(view.documents)}, "R")
    assert document["prefix"] == view.documents[0].prefix > 0
    assert document["stretches"][0] == {
        "begin": 0,
        "end": 1,
        "part": "inputs",
        "role": "mode",
        "span": -1,
        "word": -1,
        "block": -1,
        "level": None,
    }
    found = payload(PageData(title="t", rows=[view]))
    row = found["rows"][0]
    assert sum(size for size, *_ in row["documents"][0]["stretches"]) == view.documents[0].end
    assert row["tasks"] == [("R", len(view.documents))]
    controls = {found["vocabulary"]["texts"][number] for number in found["vocabulary"]["control"]}
    assert {"[R]", "<extra_id_0>"} <= controls


def test_rows_that_nothing_rewrote_say_nothing_more(words):
    folder, *_ = words
    (view,) = view_rows(make_loader(ps.Source(folder)), 0, [0], tokenizer_of)
    assert {(each.task, each.prefix, each.stretches, each.restored) for each in view.documents} == {
        ("", 0, (), ())
    }
    assert "tasks" not in printed(row_view(view, style(), 100), width=4000)
    assert "stretches" not in payload(PageData(title="t", rows=[view]))["rows"][0]["documents"][0]


def test_tokens_of_an_extended_tokenizer_have_names(words, tmp_path):
    from penstock import load_tokenizer
    from penstock.tokenizers.extension import add_tokens

    folder, *_ = words
    add_tokens(load_tokenizer(str(folder / "tokenizer")), ["[NEW]"]).save(tmp_path / "more")
    objective = Denoise([SpanCorruption(0.3, 3, mode="[NEW]")], tokenizer=str(tmp_path / "more"))
    (view,) = view_rows(
        make_loader(ps.Source(folder), ps.Source(folder, name="d", objective=objective)),
        0,
        [0],
        tokenizer_of,
    )
    begins = [each.begin for each in view.documents if each.source == "d"]
    assert begins
    assert {view.texts[begin] for begin in begins} == {"[NEW]"}
    assert view.spell(int(view.tokens[begins[0]])) == "[NEW]"
