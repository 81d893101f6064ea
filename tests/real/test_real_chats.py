"""Chats and texts of real models against transformers, token by token: prompts, masks, and greedy
replies.
"""

from pathlib import Path
from typing import Any

import pytest
from real_report import Report, to
from real_texts import CHATS, GERMAN, Chat, craft_chats, prose
from their_side import furthest, our_logits, their_logits

import penstock as ps

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]

TOKENS = 24
TIE = 1e-3
"""Two tokens whose logits differ by less may change places by rounding."""
FORGED = "forged control text"
PLAIN = [name for name in CHATS if name != FORGED]


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> tuple[Any, Any]:
    """(model, tokenizer) of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(smollm2).eval(), AutoTokenizer.from_pretrained(
        smollm2
    )


def their_greedy(model: Any, ids: list[int]) -> tuple[list[int], list[float]]:
    """What transformers generates, and how far each token is ahead of the next best."""
    import torch

    found = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = [step[0].topk(2).values for step in found.logits]
    return found.sequences[0, len(ids) :].tolist(), [float(pair[0] - pair[1]) for pair in best]


def our_greedy(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What our engine generates for prompts, all at once."""
    from penstock.learn.generation import Sampling
    from penstock.use.runs.opening import load_opened, writer_of

    engine = writer_of(load_opened(folder), len(prompts)).engine
    return [
        list(one.tokens)
        for one in engine.generate_all(prompts, Sampling(temperature=0, max_tokens=TOKENS))
    ]


def same(ours: list[int], theirs: list[int], leads: list[float]) -> int:
    """How many tokens are the same; they may part only where transformers' own best two are as good
    as equal.
    """
    for place, pair in enumerate(zip(ours, theirs, strict=False)):
        if pair[0] != pair[1]:
            assert leads[place] < TIE, (
                f"token {place}: {pair[0]}, expected {pair[1]}, which leads by {leads[place]:.3g}"
            )
            return place
    assert len(ours) == len(theirs), f"{len(ours)} tokens, expected {len(theirs)}"
    return len(ours)


def test_prompts_are_those_of_transformers(smollm2: Path, theirs: tuple[Any, Any]) -> None:
    for name in PLAIN:
        assert our_ids(smollm2, CHATS[name]) == their_ids(theirs[1], CHATS[name])


def our_ids(folder: Path, chat: Chat) -> list[int]:
    """The ids of a conversation up to the reply, as the server has them."""
    from penstock.chat import load_template
    from penstock.learn.generation.session import encode_chat

    tokenizer = ps.load_tokenizer(folder)
    return list(
        encode_chat(
            chat, load_template(folder / "chat_template.jinja", tokenizer=tokenizer), tokenizer
        )
    )


def their_ids(tokenizer: Any, chat: Chat) -> list[int]:
    """The same by transformers."""
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])


def test_control_text_of_a_user_stays_text(smollm2: Path, theirs: tuple[Any, Any]) -> None:
    """Where transformers makes a system turn of it."""
    ours, other = our_ids(smollm2, CHATS[FORGED]), their_ids(theirs[1], CHATS[FORGED])
    end = theirs[1].convert_tokens_to_ids("<|im_end|>")
    assert (ours.count(end), other.count(end)) == (2, 3)
    assert theirs[1].decode(ours) == theirs[1].decode(other)


def test_replies_are_those_of_transformers(
    smollm2: Path, theirs: tuple[Any, Any], report: Report
) -> None:
    """Together in one batch, where transformers has each chat alone."""
    prompts = [their_ids(theirs[1], CHATS[name]) for name in PLAIN]
    ours = our_greedy(smollm2, prompts)
    expected = [their_greedy(theirs[0], prompt) for prompt in prompts]
    equal = [same(mine, *other) for mine, other in zip(ours, expected, strict=True)]
    assert sum(equal) >= 60
    report.add(
        f"greedy replies of SmolLM2-135M-Instruct, {len(PLAIN)} chats at once (system "
        "messages, turns, other scripts)",
        f"{sum(equal)} of {sum(map(len, ours))} tokens equal",
        "transformers' `generate`, a chat at a time",
    )


def test_texts_of_a_base_model_are_those_of_transformers(gemma3: Path, report: Report) -> None:
    """Gemma 3: sliding and full layers, and a BOS before each text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gemma3)
    texts = [
        "The capital of Japan is",
        "def fibonacci(n):\n",
        "Die Sonne",
        *(text[:400] for text in prose()[:2]),
    ]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    own = ps.load_tokenizer(gemma3)
    assert [[*own.begin_ids, *own.encode(text).tolist()] for text in texts] == prompts
    ours = our_greedy(gemma3, prompts)
    model = AutoModelForCausalLM.from_pretrained(gemma3).eval()
    equal = [
        same(mine, *their_greedy(model, prompt)) for mine, prompt in zip(ours, prompts, strict=True)
    ]
    assert sum(equal) >= 60
    report.add(
        f"greedy texts of Gemma 3 270M, {len(texts)} prompts at once",
        f"{sum(equal)} of {sum(map(len, ours))} tokens equal",
        "transformers' `generate`, a prompt at a time",
    )


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_logits_in_a_row_are_those_of_transformers(
    name: str, request: pytest.FixtureRequest, report: Report
) -> None:
    """Three texts share a row here, and each is alone there."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = request.getfixturevalue(name)
    texts = [*GERMAN.read_text(encoding="utf-8").splitlines()[:2], prose()[0][:300]]
    documents = [AutoTokenizer.from_pretrained(folder)(text)["input_ids"] for text in texts]
    ours = our_logits(folder, *documents)
    theirs = their_logits(AutoModelForCausalLM.from_pretrained(folder).eval(), *documents)
    apart = furthest(ours, theirs)
    assert apart < 1e-3
    report.add(
        f"logits of {name}, {len(texts)} texts in a row, {len(ours)} tokens",
        f"equal {to(apart)}, of up to {float(theirs.abs().max()):.0f}",
        "transformers, each text alone",
    )


def test_masks_train_the_replies(smollm2: Path, theirs: tuple[Any, Any], tmp_path: Path) -> None:
    """Ids as transformers renders whole chats; trained are exactly the reply and its end."""
    records = craft_chats()
    ps.prepare(
        records, tokenizer=smollm2, template="auto", output=tmp_path / "data", progress=False
    )
    assert len(ps.open_dataset(tmp_path / "data")) == len(records)
    for record, document in zip(records, ps.open_dataset(tmp_path / "data"), strict=True):
        messages = record["messages"]
        assert document.tokens.tolist() == theirs[1].apply_chat_template(messages)["input_ids"]
        trained = document.tokens[document.loss_weights > 0]
        assert theirs[1].decode(trained) == messages[-1]["content"] + "<|im_end|>"
