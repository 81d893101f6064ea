"""A template is given what the record has; in another form only where it fails on that, or writes
something else.
"""

import json

import pytest
from chat_makers import (
    ALL_CONTROLS,
    CONVERSATIONS,
    TOKENS,
    TOOLS,
    ask,
    call,
    make_tokenizer,
    markers_of,
    read_chat,
    result,
)

from makers.tokenizers import CHATML
from penstock.chat.encoder import ChatEncoder
from penstock.chat.render.choosing import render_form
from penstock.chat.render.template import Template
from penstock.core.errors import ConversationError, RecordError


def text_call(place=0):
    return {
        **call(place=place),
        "function": {"name": "get_weather", "arguments": '{"city": "aParis"}'},
    }


def calling(content, one):
    return [
        {"role": "user", "content": "uweather?"},
        {"role": "assistant", "content": content, "tool_calls": [one]},
        result("tsun"),
        {"role": "assistant", "content": "aDone."},
    ]


GIVEN = {
    "null": calling(None, call(city="aParis")),
    "text": calling("", text_call()),
    "null and text": calling(None, text_call()),
    "parts": CONVERSATIONS["parts"],
}
PARTS = [{"type": "text", "text": "ab "}, {"type": "text", "text": "cd"}]
HEAD, END = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}",
    "{{ '<|im_end|>\n' }}{% endfor %}",
)
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def around(body):
    return HEAD + body + END + PROMPT


CALL = "{% for c in m.tool_calls %}{{ '<call>' + c.function.arguments + '</call>' }}{% endfor %}"
PAIRS = (
    "{% for c in m.tool_calls %}{% for k, v in c.function.arguments.items() %}{{ k + '=' + v }}{% "
    "endfor %}{% endfor %}"
)
QUOTED = (
    "{% for c in m.tool_calls %}{{ '<call>' + (c.function.arguments | tojson) + '</call>' }}{% "
    "endfor %}"
)
TAKES = {
    "null alone calls": (
        "{% if m.content is none %}" + CALL + "{% else %}{{ m.content }}{% endif %}",
        "null and text",
        (),
        '{"city": "aParis"}',
    ),
    "null fails": (
        "{{ m.content + '' }}" + QUOTED,
        "null",
        ("empty_content",),
        '{"city": "aParis"}',
    ),
    "null is written as None": (
        "{{ m.content }}" + QUOTED,
        "null",
        ("empty_content",),
        '{"city": "aParis"}',
    ),
    "text as it is": ("{{ m.content or '' }}" + CALL, "text", (), '{"city": "aParis"}'),
    "text is quoted": (
        "{{ m.content or '' }}" + QUOTED,
        "text",
        ("decode_arguments",),
        '{"city": "aParis"}',
    ),
    "objects alone": (
        "{{ m.content or '' }}" + PAIRS,
        "text",
        ("decode_arguments",),
        "city=aParis",
    ),
    # As GLM 4.6: it writes the name, and nothing of arguments that are text.
    "objects or nothing": (
        (
            "{% for c in m.tool_calls %}{{ c.function.name }}{% if c.function.arguments is "
            "mapping %}{% for k, v in c.function.arguments.items() %}{{ k + '=' + v }}{% "
            "endfor %}{% endif %}{% endfor %}{{ m.content or '' }}"
        ),
        "text",
        ("decode_arguments",),
        "city=aParis",
    ),
    "a null and objects": (
        (
            "{{ m.content + '' }}{% for c in m.tool_calls %}{{ c.function.arguments.city }}{% "
            "endfor %}"
        ),
        "null and text",
        ("empty_content", "decode_arguments"),
        "aParis",
    ),
    "lists": ("{% for p in m.content %}{{ p.text }}{% endfor %}", "parts", (), "abeta aone"),
    "lists fail": ("{{ '' + m.content }}", "parts", ("join_text_parts",), "abeta aone"),
    "lists are written in Python's notation": (
        "{{ m.content }}",
        "parts",
        ("join_text_parts",),
        "abeta aone",
    ),
    "lists are left out": (
        "{% if m.content is string %}{{ m.content }}{% endif %}",
        "parts",
        ("join_text_parts",),
        "abeta aone",
    ),
}
"""Body of a template, conversation, what is changed for it, and what is written for the first
reply.
"""


def encoder(source, folder, controls=ALL_CONTROLS):
    return ChatEncoder(
        make_tokenizer(folder, list(controls)), Template(source=source, variables=TOKENS)
    )


def normal(messages, changed):
    """By plain means: what `changed` says was done to the messages."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        if "empty_content" in changed and message["content"] is None:
            message["content"] = ""
        if "join_text_parts" in changed and isinstance(message["content"], list):
            message["content"] = "".join(part["text"] for part in message["content"])
        if "null_content" in changed and message["content"] == "" and message.get("tool_calls"):
            message["content"] = None
        for one in message.get("tool_calls", ()):
            given = one["function"]["arguments"]
            if "decode_arguments" in changed and isinstance(given, str):
                one["function"]["arguments"] = json.loads(given)
            if "encode_arguments" in changed and isinstance(given, dict):
                one["function"]["arguments"] = json.dumps(given)
    return messages


@pytest.mark.parametrize("name", TAKES)
def test_the_first_form_that_a_template_takes_is_rendered(name, folder):
    body, given, changed, written = TAKES[name]
    [chat] = encoder(around(body), folder).encode(read_chat(GIVEN[given]))
    assert chat.certificate.changed == changed
    assert written in chat.trained_text[0][1]
    assert "None" not in chat.text
    plain = Template(source=around(body), variables=TOKENS).render_plain(
        normal(GIVEN[given], changed), tools=TOOLS
    )
    assert chat.text == plain


def test_settings_keep_the_form_of_the_record(folder):
    quoted = encoder(around("{{ m.content or '' }}" + QUOTED), folder)
    python = encoder(around("{{ m.content }}"), folder)
    [chat] = quoted.encode(read_chat(GIVEN["text"], decode_arguments=False))
    assert r'<call>"{\"city\": \"aParis\"}"</call>' in chat.text
    [chat] = python.encode(read_chat(GIVEN["parts"], join_text_parts=False))
    assert "[{'type': 'text', 'text': 'abeta '}" in chat.text
    assert not chat.certificate.ok


def test_plain_conversations_are_rendered_once(folder, monkeypatch):
    own, rendered = encoder(CHATML, folder), []
    monkeypatch.setattr(
        Template, "render", lambda self, *a, **k: rendered.append(1) or RENDER(self, *a, **k)
    )
    for messages in (ask("u", "a", "v", "b"), ask("u", "")):
        render_form(read_chat(messages), own.template)
    assert len(rendered) == 2


RENDER = Template.render

FAILING = {
    "arguments that stay text": (
        around("{% for c in m.tool_calls %}{{ c.function.arguments.city + '' }}{% endfor %}"),
        "text",
        {"decode_arguments": False},
        "decode_arguments: true gives it the arguments of tool calls as objects",
    ),
    "parts that stay a list": (
        CHATML,
        "parts",
        {"join_text_parts": False},
        (
            r'can only concatenate str \(not "list"\) to str; join_text_parts: true gives it one '
            r"text for the parts"
        ),
    ),
    "neither": (
        around("{{ m.content.images + '' }}"),
        "parts",
        {},
        (
            r"'list object' has no attribute 'images'; with join_text_parts: 'str object' has no "
            r"attribute 'images'"
        ),
    ),
    "both forms": (
        "{{ raise_exception('no calls') }}",
        "null and text",
        {},
        (
            "refuses the conversation: no calls; with an empty content for null and "
            "decode_arguments as well"
        ),
    ),
    "objects where text is wanted": (
        around("{{ m.content or '' }}" + CALL),
        "null",
        {"decode_arguments": False},
        r'not "dict"\) to str',
    ),
    "an attribute of a message": (
        around("{{ m.words + '' }}"),
        "parts",
        {},
        "'dict object' has no attribute 'words'",
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_errors_name_the_settings_and_no_class_of_ours(name, folder):
    source, given, settings, message = FAILING[name]
    with pytest.raises(ConversationError, match=message) as caught:
        encoder(source, folder).encode(read_chat(GIVEN[given], **settings))
    assert "Traced" not in str(caught.value)
    assert "penstock" not in str(caught.value)


def test_weights_of_parts_hold_in_either_form(folder):
    message = {"role": "assistant", "content": [PARTS[0], PARTS[1] | {"train": False}]}
    for body in ("{% for p in m.content %}{{ p.text }}{% endfor %}", "{{ '' + m.content }}"):
        [chat] = encoder(around(body), folder).encode(read_chat([*ask([PARTS[0]]), message]))
        assert [text for _, text in chat.trained_text] == ["ab ", "<|im_end|>"]


@pytest.mark.real_data
@pytest.mark.parametrize("given", GIVEN)
def test_texts_equal_those_of_transformers(real_data, folder, given):
    """For what the record has where the template takes that, else for what it was changed to."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    found = []
    for path in sorted(real_data.joinpath("chat_templates").glob("*/*.jinja")):
        own = encoder(
            path.read_text(encoding="utf-8"), folder, markers_of(path.read_text(encoding="utf-8"))
        )
        conversation = read_chat(GIVEN[given])
        try:
            [chat] = own.encode(conversation)
        except ConversationError:
            with pytest.raises(RecordError, match=r"refuses|fails"):
                own.template.render_plain(conversation.messages, tools=conversation.tools)
            continue
        changed = chat.certificate.changed
        rendered = utils.render_jinja_template(
            [normal(GIVEN[given], changed)],
            tools=conversation.tools,
            chat_template=own.template.source,
            **TOKENS,
        )
        assert chat.text == rendered[0][0], path.stem
        found.append(changed)
    as_given = {"null": 24, "text": 25, "null and text": 10, "parts": 17}[given]
    assert found.count(()) >= as_given, (found.count(()), len(found))
    assert len(found) >= {"null": 46, "text": 47, "null and text": 46, "parts": 57}[given]


def test_a_template_of_texts_refuses_an_image_and_names_the_cure():
    """`template="chatml"` together with a processor: the template joins texts, and an image is no
    text.
    """
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "usee?"}]}
    conversation = read_chat([*ask("uhello", "ahi"), asked])
    with pytest.raises(RecordError, match=r"2 \(user\).*type image.*template: auto"):
        render_form(conversation, Template(source=CHATML, name="chatml"))
