"""Certificates: each kind of problem is told where it is, and nowhere else."""

import pytest
from chat_makers import TOOLS, ask, call, kinds, result, trained

from makers.tokenizers import CHATML
from penstock.chat.encoder import ChatEncoder, encode
from penstock.chat.masks.certificate import Dropped, Problem
from penstock.chat.masks.mask_settings import MaskSettings
from penstock.chat.records.layouts import read_conversation
from penstock.chat.render.template import load_template
from penstock.core.errors import ConversationError

TWO = ask("uone", "atwo", "uthree", "afour")
HEAD = "{{ '<|im_start|>' + m.role + '\n' }}"


def look(messages, tokenizer, template=CHATML, **mask_settings):
    return encode(messages, tokenizer=tokenizer, template=template, strict=False, **mask_settings)


def found(chat, kind):
    return [
        (problem.message, problem.text)
        for problem in chat.certificate.problems
        if problem.kind == kind
    ]


def test_a_good_conversation_has_no_problems(tokenizer):
    chat = look(TWO, tokenizer)
    certificate = chat.certificate
    assert certificate.problems == ()
    assert certificate.ok
    assert certificate.terminators == (
        (0, "<|im_end|>", False),
        (1, "<|im_end|>", True),
        (2, "<|im_end|>", False),
        (3, "<|im_end|>", True),
    )
    assert certificate.dropped == certificate.straddling == certificate.forged == ()
    assert certificate.checks == ("boundaries of chatml agree",)
    assert chat.trained_text == ((1, "atwo<|im_end|>"), (3, "afour<|im_end|>"))


def test_a_certificate_prints_as_lines_and_a_chat_as_one(tokenizer):
    chat = look(TWO, tokenizer)
    assert str(chat.certificate).splitlines() == [
        "proven: only what the settings train is trained",
        "ends trained: <|im_end|> of messages 1, 3",
        "ends only read: <|im_end|> of messages 0, 2",
        "cross-check: boundaries of chatml agree",
    ]
    count = int((chat.loss_weights != 0).sum())
    assert (
        repr(chat) == f"EncodedChat(4 messages, {len(chat.tokens)} tokens, {count} trained; proven)"
    )
    endless = look(
        ask("q", "a"), tokenizer, CHATML.replace("<|im_end|>", "").replace("eos_token", "''")
    )
    head, *lines = str(endless.certificate).splitlines()
    assert head == "refused"
    assert any(
        line.startswith("error: message 1: the template ends the turn without a terminator")
        for line in lines
    )
    assert repr(endless).endswith("missing_terminator)")


def test_generation_tags_that_agree_are_told(tokenizer):
    source = (
        "{% for m in messages %}"
        + HEAD
        + "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% "
        "endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% "
        "endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    chat = look(TWO, tokenizer, source)
    assert "generation tags agree" in chat.certificate.checks
    assert chat.certificate.problems == ()
    without_end = source.replace(
        "m.content + '<|im_end|>' }}{% endgen", "m.content }}{% endgen"
    ).replace("{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>' }}")
    chat = look(TWO, tokenizer, without_end)
    assert "generation tags disagree" in chat.certificate.checks
    [(message, text)] = found(chat, "disagreement")
    assert message == -1
    assert "generation tags do not train '<|im_end|>'" in text
    assert "(2 tokens differ)" in text
    assert trained(chat) == ["atwo<|im_end|>", "afour<|im_end|>"]
    assert chat.certificate.ok


def test_generation_blocks_inside_macros_and_sets_mark_the_right_words(tokenizer):
    """transformers takes their places in the macro for places in the text."""
    body = "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    ways = {
        "macro": ("{% macro say(m) %}" + body + "{% endmacro %}", "{{ say(m) }}"),
        "set": ("", "{% set said %}" + body + "{% endset %}{{ said }}"),
    }
    for way, (definition, use) in ways.items():
        source = (
            definition + "{% for m in messages %}" + HEAD + "{% if m.role == 'assistant' %}" + use
            + "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        )  # fmt: skip
        chat = look(TWO, tokenizer, source)
        assert "generation tags agree" in chat.certificate.checks, way
        assert trained(chat) == ["atwo<|im_end|>", "afour<|im_end|>"], way
        assert chat.certificate.problems == (), way


def test_nothing_trained(tokenizer):
    assert found(look(TWO[:1], tokenizer), "nothing_trained") == [
        (-1, "no token is trained: role user is not in roles_to_train")
    ]
    assert not look(TWO[:1], tokenizer).certificate.ok
    flagged = [
        message | ({"train": False} if message["role"] == "assistant" else {}) for message in TWO
    ]
    assert found(look(flagged, tokenizer), "nothing_trained") == [
        (
            -1,
            (
                "no token is trained: role user is not in roles_to_train; the record says not to "
                "train this message"
            ),
        )
    ]
    with pytest.raises(ConversationError, match="no token is trained"):
        encode(TWO[:1], tokenizer=tokenizer, template=CHATML)


def test_missing_terminator(tokenizer):
    source = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    chat = look(TWO, tokenizer, source)
    assert [message for message, _ in found(chat, "missing_terminator")] == [1, 3]
    assert not chat.certificate.ok
    assert look(TWO, tokenizer, source, on_missing_terminator="allow").certificate.ok


def test_not_written_words(tokenizer):
    source = CHATML.replace("m.content", "(m.content if m.content != 'atwo' else '')")
    chat = look(TWO, tokenizer, source)
    assert found(chat, "not_written") == [
        (1, "the template leaves out 'atwo' of its content: all of it")
    ]
    assert not chat.certificate.ok


def test_not_written_turns(tokenizer):
    source = CHATML.replace(
        "{{ '<|im_start|>' + m",
        "{% if m.content == 'atwo' %}{% continue %}{% endif %}{{ '<|im_start|>' + m",
    )
    chat = look(TWO, tokenizer, source)
    assert (1, "the template writes nothing of this message") in found(chat, "not_written")
    assert trained(chat) == ["afour<|im_end|>"]
    dropped_user = look(TWO, tokenizer, source.replace("atwo", "uthree"))
    assert found(dropped_user, "dropped") == [
        (2, "the template leaves out 'uthree' of its content")
    ]
    assert dropped_user.certificate.ok


def test_not_written_tool_calls_and_tools(tokenizer):
    messages = [TWO[0], {"role": "assistant", "content": "alook", "tool_calls": [call(city="x")]}]
    chat = look({"messages": messages, "tools": TOOLS}, tokenizer)
    assert found(chat, "not_written") == [
        (1, "the template writes none of its tool calls; take one that does")
    ]
    assert found(chat, "dropped") == [(-1, "the template writes none of the tools")]
    source = "{{ tools | tojson }}" + CHATML.replace(
        "m.content", "m.content + (m.tool_calls | tojson if m.tool_calls else '')"
    )
    chat = look({"messages": messages, "tools": TOOLS}, tokenizer, source)
    assert kinds(chat) == set()
    assert trained(chat)[0].startswith('alook[{"')
    assert trained(chat)[0].endswith('"city": "x"}}}]<|im_end|>')


def test_foreign_text(tokenizer):
    """A template that repeats the question inside the answer."""
    source = (
        "{% for m in messages %}"
        + HEAD
        + "{{ (messages[loop.index0 - 1].content + ' ' if m.role == 'assistant' else '')"
        " + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    chat = look(TWO, tokenizer, source)
    assert found(chat, "foreign_text") == [
        (0, "the template writes 'uone' where message 1 is trained"),
        (2, "the template writes 'uthree' where message 3 is trained"),
    ]  # fmt: skip
    assert not chat.certificate.ok
    with pytest.raises(ConversationError, match=r"message 0.*'uone'.*message 1"):
        encode(TWO, tokenizer=tokenizer, template=source)
    assert "foreign_text" not in kinds(
        look(TWO, tokenizer, source, roles_to_train=["user", "assistant"])
    )


def test_untraced(tokenizer):
    """A template that writes the last answer outside of its loop over messages."""
    source = (
        "{% for m in messages[:-1] %}{{ '<|im_start|>' + m.role + '\n' + m.content + "
        "'<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' + messages[-1].content + "
        "'<|im_end|>' }}"
    )
    chat = look(TWO, tokenizer, source)
    assert "untraced" in kinds(chat)
    assert [message for message, _ in found(chat, "untraced")] == [3]
    assert not chat.certificate.ok
    assert "afour" not in "".join(trained(chat))


def test_rewritten(tokenizer):
    source = CHATML.replace("m.content", "(m.content if loop.last else m.content | upper)")
    chat = look(TWO, tokenizer, source)
    [(message, text)] = found(chat, "rewritten")
    assert message == 1
    assert "writes 'uone" in text or "writes 'atwo" in text
    assert chat.certificate.ok


MORE_FOLLOWS = CHATML.replace("+ '<|im_end|>", "+ ('' if loop.last else '!') + '<|im_end|>")
"""A template that writes more at the end of a turn when another follows."""


def test_context_differs(tokenizer):
    chat = look(TWO[:2], tokenizer, MORE_FOLLOWS)
    [(message, text)] = found(chat, "context_differs")
    assert message == 1
    assert text.startswith(
        r"when it prompts for this reply, the template writes "
        r"'<|im_end|>\n<|im_start|>assista' instead of '!<|im_end|>\n<|im_start|>assist' "
        r"before it; on_rewrite: split"
    )
    assert chat.certificate.ok
    assert "context_differs" not in kinds(
        look(TWO[:2], tokenizer, MORE_FOLLOWS, roles_to_train=["user"])
    )
    with pytest.raises(ConversationError, match=r"prompts.*template"):
        look(TWO[:2], tokenizer, MORE_FOLLOWS, on_rewrite="error")


def test_context_that_differs_in_few_conversations_is_told(tokenizer):
    """However often the template was found in order: what kinds of messages are before a reply is
    looked at.
    """
    source = CHATML.replace(
        "+ '<|im_end|>", "+ ('!' if m.role == 'tool' and not loop.last else '') + '<|im_end|>"
    )
    encoder = ChatEncoder(tokenizer, load_template(source, tokenizer=tokenizer))
    for _ in range(40):
        [chat] = encoder.encode(read_conversation({"messages": TWO}))
        assert kinds(chat) == set()
    [chat] = encoder.encode(read_conversation({"messages": [TWO[0], result("t"), TWO[1]]}))
    assert [message for message, _ in found(chat, "context_differs")] == [2]


def test_split_gives_each_reply_the_text_that_prompts_for_it(tokenizer):
    encoder = ChatEncoder(
        tokenizer,
        load_template(MORE_FOLLOWS, tokenizer=tokenizer),
        MaskSettings(on_rewrite="split"),
    )
    first, second = encoder.encode(read_conversation({"messages": TWO}))
    begin, end = "<|im_start|>", "<|im_end|>\n"
    assert first.text == f"{begin}user\nuone{end}{begin}assistant\natwo{end}"
    assert second.text == (
        f"{begin}user\nuone!{end}{begin}assistant\natwo!{end}{begin}user\nuthree{end}{begin}assistant\nafour{end}"
    )
    for chat, reply in (first, "atwo"), (second, "afour"):
        assert trained(chat) == [f"{reply}<|im_end|>"]
        assert chat.certificate.problems == ()


def test_dropped(tokenizer):
    source = CHATML.replace("m.content", "m.content[:4]")
    chat = look(ask("question", "answer"), tokenizer, source)
    assert found(chat, "dropped") == [
        (0, "the template leaves out 'tion' of its content"),
        (1, "the template leaves out 'er' of its content"),
    ]
    assert chat.certificate.dropped == (
        Dropped(0, "content", 4, 8, "tion"),
        Dropped(1, "content", 4, 6, "er"),
    )
    assert chat.certificate.ok


def test_trimmed_whitespace_is_listed_but_no_problem(tokenizer):
    chat = look(ask(" u ", "\na "), tokenizer, CHATML.replace("m.content", "m.content | trim"))
    assert kinds(chat) == set()
    assert [(part.message, part.begin, part.end) for part in chat.certificate.dropped] == [
        (0, 0, 1), (0, 2, 3), (1, 0, 1), (1, 2, 3)
    ]  # fmt: skip
    assert all(part.is_blank for part in chat.certificate.dropped)


def test_dropped_reasoning(tokenizer):
    messages = ask("u", "a", reasoning_content="because")
    chat = look(messages, tokenizer)
    assert found(chat, "dropped") == [
        (1, "the template leaves out 'because' of its reasoning_content")
    ]
    assert chat.certificate.ok


def test_opening_differs(tokenizer):
    source = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    chat = look(TWO, tokenizer, source)
    assert found(chat, "opening_differs")[0] == (
        1,
        ("the generation prompt is '<|im_start|>assistant\\n<think>\\n', "
        "but the turn begins with '<|im_start|>assistant\\n'"),
    )  # fmt: skip
    assert trained(chat) == ["atwo<|im_end|>", "afour<|im_end|>"]
    assert chat.certificate.ok


def test_forged(tokenizer):
    chat = look(ask("x<|im_end|>", "y</s>"), tokenizer, trained_control_text="as_text")
    at = chat.text.index("x<|im_end|>") + 1
    assert chat.certificate.forged[0] == (at, "<|im_end|>")
    assert found(chat, "forged")[0] == (-1, f"'<|im_end|>' at character {at} stays text")
    assert [control for _, control in chat.certificate.forged] == ["<|im_end|>", "</s>"]
    assert chat.certificate.ok


def test_forged_by_tools_and_by_names_of_arguments(tokenizer):
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "description": "x<|im_end|>y", "parameters": {}},
        }
    ]
    messages = [
        TWO[0],
        {"role": "assistant", "content": "a", "tool_calls": [call("f", **{"k<|im_end|>": 1})]},
    ]
    source = "{{ tools | tojson }}" + CHATML.replace(
        "m.content",
        "m.content + (m.tool_calls[0].function.arguments.keys() | list | join if m.tool_calls "
        "else '')",
    )
    chat = look({"messages": messages, "tools": tools}, tokenizer, source)
    assert [control for _, control in chat.certificate.forged] == ["<|im_end|>"] * 2
    assert int(chat.is_control[chat.tokens == tokenizer.special_tokens["<|im_end|>"]].sum()) == 2


SILENT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' "
    "and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + END + '\n' }}{% "
    "endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if "
    "enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' "
    "}}{% endif %}{% else %}BYE{% endif %}"
)
"""As Qwen3: the prompt supplies an empty block of thinking if the model is not to think."""


@pytest.mark.parametrize(("end", "bye"), [("<|im_end|>", ""), ("</s>", "bye")])
def test_what_a_prompt_supplies_is_no_disagreement_of_boundaries(tokenizer, end, bye):
    messages = {"messages": TWO[:2], "chat_template_kwargs": {"enable_thinking": False}}
    source = SILENT.replace("END", f"('{end}' if m.role == 'assistant' else '<|im_end|>')").replace(
        "BYE", bye
    )
    chat = look(messages, tokenizer, source)
    assert trained(chat) == [f"atwo{end}"]
    verdict = "disagree" if bye else "agree"
    assert chat.certificate.checks == (
        f"boundaries of chatml {verdict}, apart from what the prompt supplies",
    )
    assert len(found(chat, "disagreement")) == (verdict == "disagree")
    thinking = look({"messages": TWO[:2]}, tokenizer, source)
    assert trained(thinking) == [f"<think>\n\n</think>\n\natwo{end}"]
    assert thinking.certificate.checks == (f"boundaries of chatml {verdict}",)


def test_tags_are_not_excused_for_what_a_prompt_supplies(tokenizer):
    """Whoever writes tags into a template knows its prompt."""
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == "
        "'assistant' %}{% generation %}{{ '<think>\\n\\n</think>\\n\\n' + m.content + "
        "'<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif "
        "%}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
        "'<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    )
    chat = look(TWO[:2], tokenizer, source)
    assert trained(chat) == ["atwo<|im_end|>"]
    agreed = "boundaries of chatml agree, apart from what the prompt supplies"
    assert chat.certificate.checks == ("generation tags disagree", agreed)
    [(_, text)] = found(chat, "disagreement")
    assert "generation tags train" in text


def test_boundaries_that_disagree_are_told(tokenizer):
    """A template that ends replies otherwise than its family."""
    source = CHATML.replace(
        "+ '<|im_end|>\n'", "+ ('</s>' if m.role == 'assistant' else '<|im_end|>') + '\n'"
    )
    chat = look(TWO, tokenizer, source)
    assert trained(chat) == ["atwo</s>", "afour</s>"]
    assert "boundaries of chatml disagree" in chat.certificate.checks
    assert len(found(chat, "disagreement")) == 1
    assert chat.certificate.ok


@pytest.mark.parametrize(
    "mask_settings",
    [
        {"train_on_eos": "all"},
        {"train_on_eos": "none"},
        {"mask_history": True},
        {"roles_to_train": ["user"]},
        {"train_on_inputs": True},
        {"train_on_eos": "last"},
    ],
)
def test_other_methods_are_asked_only_what_they_can_tell(tokenizer, mask_settings):
    chat = look(TWO, tokenizer, **mask_settings)
    assert chat.certificate.checks == ()
    assert chat.certificate.problems == ()


def test_straddling_tokens_are_named(tokenizer):
    messages = [TWO[0], {"role": "assistant", "content": "weather", "train_detail": [
        {"begin_offset": 0, "end_offset": 3, "train": False},
        {"begin_offset": 4, "end_offset": 6, "train": True}]}]  # fmt: skip
    chat = look(messages, tokenizer)
    for token in chat.certificate.straddling:
        text = chat.text[chat.begins[token] : chat.ends[token]]
        assert len(text) > 1
        assert text in "weather"
    whole = "".join(trained(chat))
    assert whole.endswith("her<|im_end|>")
    borders = {chat.text.index("weather") + 4}
    inside = [
        t
        for t in range(len(chat.tokens))
        if any(chat.begins[t] < b < chat.ends[t] for b in borders)
    ]
    assert list(chat.certificate.straddling) == inside


def test_problems_read_well():
    assert str(Problem("dropped", 3, "x")) == "message 3: x"
    assert str(Problem("forged", -1, "x")) == "x"
    assert Problem("untraced", 0, "x").is_error
    assert not Problem("rewritten", 0, "x").is_error
