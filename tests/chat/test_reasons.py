"""Why a token is not trained: each such token has a reason, and changing what the reason names
trains it.
"""

import pytest
from chat_makers import CONVERSATIONS, ask, encode_chat, with_tools
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.chat.encoder import encode
from penstock.chat.masks import reasons
from penstock.chat.masks.masks import HISTORY
from penstock.core.errors import ConfigError, ConversationError

TWO = ask("uone", "atwo", "uthree", "afour")
THOUGHT = ask("uone", "<think>\nhm\n</think>\n\natwo", "uthree", "<think>\nso\n</think>\n\nafour")
TWO_ENDS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% else %}{{ m.content + ('</s>' if loop.last else '<|end|>') }}{% endif %}{% endfor %}"
    "{# add_generation_prompt #}"
)
TEMPLATES = ("chatml", "gemma", "llama3", "mistral_v1", "phi_3", "zephyr", TWO_ENDS)
PLAIN = ("turn", "all", "last", "none")
MASKS = st.fixed_dictionaries({
    "roles_to_train": st.sampled_from([("assistant",), ("user",), ("system", "assistant")]),
    "train_on_inputs": st.booleans(), "train_on_eos": st.sampled_from(PLAIN),
    "train_on_eot": st.sampled_from([None, *PLAIN]), "mask_history": st.booleans(),
    "train_on_reasoning": st.booleans(), "trained_control_text": st.just("as_text"),
    "on_missing_terminator": st.just("allow"),
})  # fmt: skip


def by_reason(chat) -> list[tuple[str, str]]:
    """Text and reason of each stretch of tokens with one reason."""
    found: list[tuple[str, str]] = []
    for begin, end, reason in zip(chat.begins, chat.ends, chat.reasons, strict=True):
        if found and found[-1][1] == reason:
            found[-1] = (found[-1][0] + chat.text[begin:end], reason)
        else:
            found.append((chat.text[begin:end], reason))
    return found


def test_the_reasons_of_a_plain_chat(tokenizer):
    user = "role user is not in roles_to_train"
    assert by_reason(encode_chat(TWO, tokenizer)) == [
        ("<|im_start|>user\nuone<|im_end|>\n", user),
        ("<|im_start|>assistant\n", reasons.SUPPLIED),
        ("atwo<|im_end|>", ""),
        ("\n", reasons.BEHIND),
        ("<|im_start|>user\nuthree<|im_end|>\n", user),
        ("<|im_start|>assistant\n", reasons.SUPPLIED),
        ("afour<|im_end|>", ""),
        ("\n", reasons.BEHIND),
    ]


@pytest.mark.parametrize(
    ("change", "text", "reason"),
    [
        ({"train": False}, "atwo", "the record says not to train this message"),
        ({"weight": 0}, "atwo", "the record gives this message weight 0"),
        (
            {"train_detail": [{"begin_offset": 1, "end_offset": 3, "train": False}]},
            "two",
            reasons.RANGE,
        ),
    ],
    ids=["train", "weight", "range"],
)
def test_what_the_record_says(tokenizer, change, text, reason):
    messages = [TWO[0], TWO[1] | change, *TWO[2:]]
    told = [part for part, why in by_reason(encode_chat(messages, tokenizer)) if why == reason]
    assert any(text in part for part in told)


@pytest.mark.parametrize(
    ("changed", "text", "reason"),
    [
        ({"mask_history": True}, "atwo", HISTORY),
        ({"train_on_eos": "none"}, "<|im_end|>", "ends a turn, and train_on_eos is none"),
        ({"train_on_eos": "all"}, "afour", ""),
        ({"train_on_reasoning": False}, "<think>\nso\n</think>", reasons.REASONING),
    ],
)
def test_what_the_settings_say(tokenizer, changed, text, reason):
    chat = encode_chat(THOUGHT, tokenizer, strict=False, **changed)
    assert any(text in part and why == reason for part, why in by_reason(chat))


def test_only_the_last_terminator(tokenizer):
    chat = encode_chat(TWO, tokenizer, train_on_eos="last")
    [told] = {why for part, why in by_reason(chat) if why.startswith("ends a turn")}
    assert told == "ends a turn, and train_on_eos is last and this is not the last trained turn"


@settings(max_examples=60)
@given(name=st.sampled_from(sorted(CONVERSATIONS)), template=st.sampled_from(TEMPLATES), mask=MASKS)
def test_every_untrained_token_has_a_reason_and_the_cure_trains_it(tokenizer, name, template, mask):
    record = {"messages": CONVERSATIONS[name]} | (
        {"tools": with_tools(name)} if with_tools(name) else {}
    )

    def encoded(**changes):
        return encode(
            record, tokenizer=tokenizer, template=template, strict=False, **{**mask, **changes}
        )

    try:
        chat = encoded()
    except (ConversationError, ConfigError):
        return
    assert [bool(why) for why in chat.reasons] == [weight == 0 for weight in chat.loss_weights]
    for why in set(chat.reasons):
        cure = {}
        if why.startswith("role "):
            role = why.split()[1]
            cure = {"roles_to_train": (*mask["roles_to_train"], role), "mask_history": False}
        elif why.startswith("ends a turn"):
            assert why.split()[4] in ("train_on_eos", "train_on_eot")
            cure = {"train_on_eos": "turn", "train_on_eot": "turn"}
        elif why == HISTORY and "all" not in (mask["train_on_eos"], mask["train_on_eot"]):
            # An empty reply has its terminator alone; with "all", that is trained already.
            cure = {"mask_history": False, "train_on_eos": "turn", "train_on_eot": "turn"}
        elif why == reasons.REASONING:
            cure = {"train_on_reasoning": True}
        if cure:
            now = encoded(**cure).loss_weights
            assert any(now[token] for token, told in enumerate(chat.reasons) if told == why), (
                why,
                cure,
            )
