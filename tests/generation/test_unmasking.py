"""Texts by unmasking: against a slow loop, in any company, and what models of diffusion refuse."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from makers.models import tiny_model
from makers.tokenizers import byte_tokenizer
from penstock.core.errors import ConfigError
from penstock.learn.generation import Engine, Sampling, Unmasker, Unmasking
from penstock.models.facts import DiffusionFacts, ModelFacts
from penstock.plan.inputs import AttentionRule

TOKENIZER = byte_tokenizer("<|bos|>", "<|end|>", "<|mask|>")
IDS = TOKENIZER.special_tokens
MASK, END, BOS = IDS["<|mask|>"], IDS["<|end|>"], IDS["<|bos|>"]
GREEDY = Sampling(temperature=0, max_tokens=12)


def model_of(**facts: Any) -> Any:
    model = tiny_model(TOKENIZER.vocab_size, dtype=torch.float64)
    model.facts = ModelFacts(diffusion=DiffusionFacts(mask_id=MASK, **facts))
    return model


def unmasker(model: Any, context_length: int = 64) -> Unmasker:
    return Unmasker(model, TOKENIZER, context_length=context_length, stop_ids=(END,))


def slow_logits(model: Any, ids: list[int], block: int, first: int) -> torch.Tensor:
    """Of all tokens of a text, by a dense mask: blocks see themselves and those before them."""
    places = np.arange(len(ids))
    number = np.where(places < first, -1, (places - first) // block) if block else 0 * places
    seen = torch.from_numpy(number[None, :] <= number[:, None])

    def attend(layer: int, q: Any, k: Any, v: Any, *more: Any) -> torch.Tensor:
        heads = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

    with torch.no_grad():
        hidden = model.run(torch.tensor(ids), torch.from_numpy(places), attend)[0]
        return model.logits(hidden)


def slow(model: Any, prompt: list[int], most: int, block: int, first: int, steps: int | None):
    """Greedy, the surest of a block's masks first."""
    trained = model.facts.diffusion.block
    ids, begin, end_of_text = list(prompt), len(prompt), len(prompt) + most
    never = [*(set(IDS.values()) - {END})]
    while begin < end_of_text:
        end = min(first + ((begin - first) // block + 1) * block, end_of_text)
        ids = ids[:begin] + [MASK] * ((end if trained else end_of_text) - begin)
        rounds = steps or end - begin
        count = end - begin
        for number in range(min(rounds, count)):
            logits = slow_logits(model, ids, trained, first)
            logits[:, never] = -torch.inf
            left = [place for place in range(begin, end) if ids[place] == MASK]
            best, chosen = logits.log_softmax(-1).max(-1)
            order = sorted(left, key=lambda place: (-float(best[place]), place))
            of = min(rounds, count)
            for place in order[: count // of + (number < count % of)]:
                ids[place] = int(chosen[place])
        if END in ids[begin:end]:
            return ids[len(prompt) : ids.index(END, begin) + 1]
        begin = end
    return ids[len(prompt) :]


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize(
    ("facts", "given", "block", "first"),
    [
        ({}, {}, 32, None),
        ({}, {"unmask_block": 5}, 5, None),
        ({"block": 4, "after_bos": True}, {}, 4, 1),
        ({"block": 4}, {}, 4, 0),
    ],
)
def test_it_is_the_slow_loop(facts, given, block, first, steps):
    model = model_of(**facts)
    prompts = [[BOS, 72, 101], [BOS, *b"a longer one"], [BOS, 9]]
    found = unmasker(model).generate_all(prompts, GREEDY, Unmasking(unmask_steps=steps, **given))
    for prompt, one in zip(prompts, found, strict=True):
        begin = len(prompt) if first is None else first
        assert list(one.tokens) == slow(model, prompt, 12, block, begin, steps)
        assert one.finish_reason == ("stop" if END in one.tokens else "length")
        assert not {MASK, BOS} & set(one.tokens)


@pytest.mark.parametrize("remasking", ["low_confidence", "random"])
@pytest.mark.parametrize("block", [0, 4])
def test_a_text_does_not_depend_on_its_company(block, remasking):
    model, how = model_of(block=block), Unmasking(remasking=remasking)
    settings = [Sampling(temperature=1.0, seed=seed, max_tokens=10) for seed in (3, 3, 4)]
    prompts = [[BOS, 70], [BOS, 70], [BOS, *b"other"]]
    together = unmasker(model).generate_all(prompts, settings, how)
    assert together[0] == together[1]
    for prompt, sampling, one in zip(prompts, settings, together, strict=True):
        assert unmasker(model).generate_all([prompt], [sampling], how) == [one]
    other = unmasker(model).generate_all([prompts[0]], [replace(settings[0], seed=5)], how)
    assert other != together[:1]
    shared = unmasker(model).generate_all(prompts[:2], settings[0], how)
    assert shared[0] != shared[1], "choices of one prompt are drawn apart"


def test_masks_are_filled_in_anywhere():
    """One by one, the surest first; each sees what stands on both sides."""
    model = model_of()
    texts = [[BOS, MASK, 72, MASK, MASK, 101], [BOS, 72, MASK, END]]
    found = unmasker(model).fill(texts, GREEDY)
    for text, one in zip(texts, found, strict=True):
        expected = list(text)
        while MASK in expected:
            logits = slow_logits(model, expected, 0, 0)
            logits[:, [*(set(IDS.values()) - {END})]] = -torch.inf
            best, chosen = logits.log_softmax(-1).max(-1)
            places = [place for place, token in enumerate(expected) if token == MASK]
            place = max(places, key=lambda place: (float(best[place]), -place))
            expected[place] = int(chosen[place])
        assert list(one) == expected
    at_once = unmasker(model).fill(texts, GREEDY, Unmasking(unmask_steps=1))
    assert all(MASK not in one for one in at_once)
    with pytest.raises(ConfigError, match="a mask does not see what stands behind its block"):
        unmasker(model_of(block=4)).fill(texts, GREEDY)
    with pytest.raises(ConfigError, match="text 1 has 2 tokens, 0 of them masks"):
        unmasker(model).fill([texts[0], [BOS, 72]], GREEDY)


@pytest.mark.parametrize("block", [0, 4])
def test_pieces_are_the_text(block):
    model = model_of(block=block)
    sampling = Sampling(temperature=1.0, seed=1, max_tokens=20)
    how = Unmasking(unmask_block=4)
    [whole] = unmasker(model).generate_all([[BOS, 70]], [sampling], how)
    pieces = list(unmasker(model).blocks([BOS, 70], sampling, how))
    assert len(pieces) > 2 or len(whole.tokens) < 8
    assert "".join(pieces) == whole.text


def test_stop_texts_and_the_context():
    model = model_of(block=2)
    [whole] = unmasker(model).generate_all([[BOS]], GREEDY)
    stop = whole.text[3:5]
    [cut] = unmasker(model).generate_all([[BOS]], replace(GREEDY, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    [short] = unmasker(model, 6).generate_all([[BOS]], replace(GREEDY, max_tokens=None))
    assert len(short.tokens) <= 5


def test_rows_are_those_of_training(tmp_path):
    """The rule of a text is that of a document in `prefix` form, with its BOS."""
    objective = ps.BlockDiffusion(mask_token=MASK, block=4, form="prefix")
    data = ps.write_dataset(
        tmp_path / "data", [[BOS, *b"some more text", END]], tokenizer=TOKENIZER
    )
    loader = ps.Loader(
        ps.Source(data, objective=objective, max_epochs=1),
        sequence_length=16,
        rows_per_step=1,
        threads=0,
        requirements=model_of().requirements(),
    )
    [step] = loader
    texts = unmasker(model_of(block=4, after_bos=True))
    [text] = texts._begin([[BOS, *b"some more text"]], Sampling())
    text.ids.append(END)
    row, _ = texts._row([text])
    trained, written = AttentionRule.of(step[0]), AttentionRule.of(row)
    assert trained.pieces.tolist() == written.pieces.tolist()
    assert trained.ends.tolist() == written.ends.tolist()
    assert trained.positions.tolist() == row.positions.tolist()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Unmasking(unmask_steps=0), "unmask_steps must be a whole number of 1 or more"),
        (lambda: Unmasking(unmask_block=True), "unmask_block must be a whole number"),
        (lambda: Unmasking(remasking="all"), "remasking must be low_confidence or random"),
        (lambda: unmasker(tiny_model(300)), "was not trained by diffusion"),
        (
            lambda: unmasker(model_of()).generate_all([[BOS]], Sampling(min_tokens=2)),
            "min_tokens: a model that was trained by diffusion chooses tokens in any order",
        ),
        (
            lambda: unmasker(model_of(block=4)).generate_all(
                [[BOS]], GREEDY, Unmasking(unmask_block=3)
            ),
            "unmask_block is 3, and the model was trained with blocks of 4",
        ),
        (lambda: unmasker(model_of()).generate_all([[]], GREEDY), "a prompt has 0 tokens"),
        (
            lambda: Engine(model_of(), TOKENIZER, context_length=8),
            "writing token by token: the model was trained by diffusion",
        ),
    ],
)
def test_refusals(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
