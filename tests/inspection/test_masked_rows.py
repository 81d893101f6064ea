"""Rows whose targets are the objective's own: what each slot stands for, blocks and their noise,
who sees whom, against what the objective wrote.
"""

import json
from dataclasses import dataclass

import numpy as np
import pytest
from test_html_in_browser import card, see  # noqa: F401

import penstock as ps
from makers.objectives import PlainObjective
from makers.tokenizers import tiny_tokenizer
from makers.views import console_of, printed
from penstock.data.shards import TokenizerInfo
from penstock.plan.inputs import AttentionRule
from penstock.plan.objectives import Written
from penstock.tokenizers import add_tokens
from penstock.use.config.run_file import LOOKED_AT
from penstock.use.inspection import Style, row_view, slots_view, tokenizer_of, view_rows
from penstock.use.inspection.page import payload
from penstock.use.inspection.page_model import PageData
from penstock.use.inspection.terminal_rewritten import legend_of_rows

TEXTS = [
    f"What is {a} times {b}? It is {a * b}, ✓ and no more." for a in range(2, 9) for b in (3, 7)
]


@dataclass(frozen=True)
class Bert:
    """The 80 / 10 / 10 of BERT, with many words so that all kinds are seen."""

    mask: int
    vocab_size: int
    name: str = "bert"
    bidirectional: bool = True
    writes_targets: bool = True

    def document_limit(self, sequence_length):
        return sequence_length

    def measure(self, lengths, keys):
        return lengths

    def write(self, tokens, weights, key):
        numbers = np.random.default_rng(key)
        chosen = numbers.random(len(tokens)) < 0.5
        how, others = numbers.random(len(tokens)), numbers.integers(0, self.vocab_size, len(tokens))
        shown = np.where(how < 0.6, self.mask, np.where(how < 0.8, others, tokens))
        return Written(
            tokens=np.where(chosen, shown, tokens),
            targets=np.where(chosen, tokens, -100),
            prefix=len(tokens),
        )


class NextToken(PlainObjective):
    """Targets of its own that are the tokens behind slots: no slot stands for its target."""

    name = "next"
    writes_targets = True

    def write(self, tokens, weights, key):
        return Written(tokens=tokens, targets=np.append(tokens[1:], -100))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    tokenizer = add_tokens(tiny_tokenizer(folder / "tiny", TEXTS, 350), ["<|mask|>"])
    documents = [[tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id] for text in TEXTS]
    made = ps.write_dataset(folder / "data", documents, tokenizer=TokenizerInfo.of(tokenizer))
    tokenizer.save(folder / "data" / "tokenizer")
    return made


def mask_of(data):
    return tokenizer_of(data).special_tokens["<|mask|>"]


def objectives(data):
    return {
        "masked": ps.MaskedDiffusion(),
        "blocks": ps.BlockDiffusion(block=8),
        "prefix": ps.BlockDiffusion(block=8, form="prefix", fill_blocks=True),
        "bert": Bert(mask=mask_of(data), vocab_size=mask_of(data)),
    }


def make_loader(*sources, **options):
    return ps.Loader(
        ps.Mixture(list(sources)),
        **{
            "sequence_length": 256,
            "rows_per_step": 4,
            "threads": 0,
            "requirements": LOOKED_AT,
            **options,
        },
    )


def views_of(data, name, **options):
    loader = make_loader(ps.Source(data, objective=objectives(data)[name]), seed=3)
    return loader, view_rows(loader, 0, [0, 1, 2, 3], tokenizer_of, **options)


@pytest.mark.parametrize("name", ["masked", "blocks", "prefix", "bert"])
def test_every_slot_is_told_and_the_text_restored(data, name):
    """From the row alone: what is masked, kept and replaced, and the text that it stands for."""
    _, views = views_of(data, name, lines=True)
    mask, roles = mask_of(data), set()
    for view in views:
        learned = view.learned_weights
        for document in view.documents:
            assert (document.own_targets, document.prefix > 0) == (True, True)
            places = [each.begin for each in document.stretches] + [document.end]
            assert places == [document.begin, *(each.end for each in document.stretches)]
            assert "".join(text for text, _ in document.restored) == TEXTS[document.document]
            for each in document.stretches:
                slots = range(each.begin, each.end)
                targets = view.targets[0, each.begin : each.end]
                tokens = view.tokens[each.begin : each.end]
                if each.role in ("masked", "replaced", "kept"):
                    assert (learned[each.begin : each.end] > 0).all()
                    assert (tokens == mask).all() == (each.role == "masked")
                    assert (tokens == targets).all() == (each.role == "kept")
                    assert all(view.target_texts[slot] for slot in slots)
                    assert each.span >= 0
                else:
                    assert (targets == -100).all()
                    assert not learned[each.begin : each.end].any()
            roles |= {each.role for each in document.stretches}
    assert (
        roles
        == {
            "masked": {"BOS", "input", "masked", "EOS"},
            "blocks": {"BOS", "input", "masked", "EOS", "clean"},
            "prefix": {"BOS", "input", "masked", "EOS", "filling"},
            "bert": {"BOS", "input", "masked", "kept", "replaced", "EOS"},
        }[name]
    )


@pytest.mark.parametrize("name", ["masked", "blocks", "prefix"])
def test_noise_is_that_of_the_weights(data, name):
    _, views = views_of(data, name)
    levels = set()
    for view in views:
        for each in (each for document in view.documents for each in document.stretches):
            if each.role == "masked":
                weights = view.loss_weights[0, each.begin : each.end]
                np.testing.assert_allclose(weights * each.level, 1, rtol=1e-6)
                levels.add((each.level, each.block >= 0))
            assert each.role != "clean" or each.level is None
    assert len({level for level, _ in levels}) > 3
    assert {has for _, has in levels} == {name != "masked"}


@pytest.mark.parametrize("name", ["masked", "blocks", "prefix"])
def test_nodes_say_who_sees_whom(data, name):
    loader, views = views_of(data, name)
    rows = next(iter(loader.seek(0)))
    for view, row in zip(views, rows, strict=True):
        if name == "masked":
            assert view.nodes == ()
            continue
        seen = np.zeros((view.num_tokens, view.num_tokens), bool)
        for node in view.nodes:
            for slot in range(node.begin, node.reach):
                stop = node.end if slot >= node.end else slot + 1
                seen[slot, node.begin : max(stop, node.begin + node.prefix)] = True
        wanted = AttentionRule.of(row).dense_mask()[: view.num_tokens, : view.num_tokens]
        np.testing.assert_array_equal(seen, wanted)


def test_blocks_are_told_by_number(data):
    _, views = views_of(data, "blocks")
    parts = [each.part for each in views[0].documents[0].stretches]
    assert list(dict.fromkeys(parts))[:5] == [
        "BOS", "block 0", "block 0, clean copy", "block 1", "block 1, clean copy",
    ]  # fmt: skip
    clean = [each for each in views[0].documents[0].stretches if each.role == "clean"]
    assert [each.block for each in clean] == list(range(len(clean)))
    assert all(each.word == -1 for each in clean)


def test_targets_that_slots_do_not_stand_for(data):
    loader = make_loader(ps.Source(data, objective=NextToken()), seed=3)
    (view,) = view_rows(loader, 0, [0], tokenizer_of)
    document = view.documents[0]
    assert document.restored == ()
    assert {each.role for each in document.stretches} == {"BOS", "EOS", "predicts", "input"}
    assert document.task == "next"


def test_a_source_next_to_them_predicts_the_token_behind(data):
    loader = make_loader(
        ps.Source(data, name="causal"),
        ps.Source(data, name="masked", objective=ps.MaskedDiffusion()),
    )
    views = view_rows(loader, 0, [0, 1, 2, 3], tokenizer_of)
    told = {}
    for view in views:
        learned = view.learned_weights
        for part in view.documents:
            told.setdefault(part.source, set()).add(part.own_targets)
            if part.source == "causal":
                assert (part.stretches, part.prefix) == ((), 0)
                assert learned[part.begin] == 0
                assert learned[part.begin + 1 : part.end].all()
    assert told == {"causal": {False}, "masked": {True}}


def test_the_terminal_says_masks_by_their_words(data):
    _, (view, *_) = views_of(data, "blocks")
    shown = printed(row_view(view, style(), 100), width=200)
    document = view.documents[0]
    assert "at distance" not in shown
    assert f"block_diffusion, predicts {document.num_predicted}" in shown
    first = next(each for each in document.stretches if each.role == "masked")
    words = "".join(view.target_texts[first.begin : first.end])
    assert f"⟪_: {words}⟫" in shown
    part = [each for each in document.stretches if each.part == first.part]
    count = sum(each.end - each.begin for each in part if each.role == "masked")
    assert f"noise {first.level:.2f}, {count} masked, each ×{1 / first.level:.3g}" in shown
    assert "more parts…" not in shown
    small = make_loader(ps.Source(data, objective=ps.BlockDiffusion(block=1)), seed=3)
    (fine, *_) = view_rows(small, 0, [0], tokenizer_of)
    assert "more parts…" in printed(row_view(fine, style(), 100), width=200)
    assert "⟪_: words that masks stand for⟫" in legend_of_rows([view], style()).plain
    lines = printed(slots_view(view, 0, document.end), width=200).splitlines()
    assert lines[0].split()[-3:] == ["target", "weight", "role"]
    assert lines[1 + first.begin].rstrip().endswith("masked")


def style():
    return Style(console_of())


def test_json_has_targets_blocks_and_nodes(data):
    _, (view, *_) = views_of(data, "blocks")
    told = json.loads(json.dumps(view.as_json()))
    masked = [
        each for part in told["documents"] for each in part["stretches"] if each["role"] == "masked"
    ]
    assert masked
    assert all(each["level"] > 0 and each["block"] >= 0 for each in masked)
    assert told["nodes"][0] == {"begin": 0, "end": 1, "prefix": 1, "reach": view.documents[0].end}
    assert sum(bool(text) for text in told["target_texts"]) == view.num_targets()
    assert told["documents"][0]["own_targets"] is True


def test_the_page_draws_blocks_and_masks(data, see):  # noqa: F811
    _, (view, *_) = views_of(data, "blocks", lines=True)
    row = payload(PageData(title="t", rows=[view]))["rows"][0]
    assert row["nodes"][1] == [1, 9, 8, 9]
    browser = see(rows=[view])
    shapes = browser.run(
        "[...document.querySelectorAll('.triangle')].map(part => part.getAttribute('d'))"
    )
    end = view.documents[0].end
    assert shapes[:3] == [f"M0 0V{end}H1V1Z", "M1 1V9H9L9 9V1Z", f"M9 9V{end}H17V17L17 17V9Z"]
    stretches = [each for each in view.documents[0].stretches if each.role == "masked"]
    first = next(each for each in stretches if each.block > 1)
    slot = first.begin
    shown = browser.run(f"document.querySelector('.t[data-i=\"{slot}\"]').dataset.word")
    assert shown.replace("\xa0", " ") == view.target_texts[slot]
    browser.point(f".t[data-i='{slot}']")
    told = card(browser)
    assert told["role"] == f"masked, block {first.block}, noise {first.level:.2f}"
    assert told["loss"].startswith("predicts its target, weight ")
    node = next(node for node in view.nodes if node.begin <= slot < node.end)
    assert node.begin == 1 + 16 * first.block
    clean = "".join(f", {9 + 16 * block}–{16 + 16 * block}" for block in range(first.block - 1))
    last = f", {node.begin - 8}–{node.end - 1} and is seen from {node.begin}–{node.end - 1}"
    assert f"slot {slot} sees slots 0{clean}{last}" in browser.text(".attention")
    assert "a noised block (a square) also sees the clean copies" in browser.text(".attention")
    lit = browser.run("document.querySelectorAll('.span.lit').length")
    assert lit >= 1
