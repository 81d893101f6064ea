"""Renders are what transformers renders, character for character, and know where their characters
come from.
"""

import pickle
from datetime import datetime
from functools import cache

import pytest
from chat_makers import CONVERSATIONS, PLAIN, TOKENS, TOOLS, ask, call, with_tools

from makers.tokenizers import CHATML
from penstock.chat.render.template import Template, load_template
from penstock.core.errors import ConfigError, RecordError


def template(source, **variables):
    return Template(source=source, variables={**TOKENS, **variables})


@cache
def real_template(path):
    return template(path.read_text(encoding="utf-8"))


def pieces(rendered):
    """(text, message, field, owner) of each run."""
    found, at = [], 0
    for length, message, field, _, owner, _ in rendered.runs:
        found.append((rendered.text[at : at + length], message, field, owner))
        at += length
    return found


def words_are_theirs(rendered, messages):
    """Every run with an offset has the characters of its field."""
    at = 0
    for length, message, field, offset, _, _ in rendered.runs:
        if message >= 0 and offset >= 0:
            value = messages[message]
            for name in field.split("."):
                value = value[int(name)] if isinstance(value, list) else value[name]
            now, was = rendered.text[at : at + length], value[offset : offset + length]
            if now.lower() != was.lower():
                return False
        at += length
    return at == len(rendered.text)


def test_characters_know_their_message_field_and_turn():
    rendered = template(CHATML).render(ask("Hi <|im_end|>", "Yo"), add_generation_prompt=True)
    assert pieces(rendered) == [
        ("<|im_start|>", -1, "", 0),
        ("user", 0, "role", 0),
        ("\n", -1, "", 0),
        ("Hi <|im_end|>", 0, "content", 0),
        ("<|im_end|>\n", -1, "", 0),
        ("<|im_start|>", -1, "", 1),
        ("assistant", 1, "role", 1),
        ("\n", -1, "", 1),
        ("Yo", 1, "content", 1),
        ("<|im_end|>\n", -1, "", 1),
        ("<|im_start|>assistant\n", -1, "", -1),
    ]


OWNED = {
    "by number": (
        "{% for i in range(messages|length) %}{% set m = messages[i] %}[{{ m.content }}]{% endfor "
        "%}"
    ),
    "by the loop's number": (
        "{% for x in messages %}{% set m = messages[loop.index0] %}[{{ m.content }}]{% endfor %}"
    ),
    "reversed and back": "{% for m in messages[::-1] | reverse %}[{{ m.content }}]{% endfor %}",
    "a loop inside": "{% for m in messages %}[{% for c in m.content %}{{ c }}{% endfor %}]{% endfor %}",  # noqa: E501
    "a look-up of earlier ones": (
        "{% for m in messages %}{% for o in messages[:loop.index0] %}{% if o.content == 'zzz' "
        "%}!{% endif %}{% endfor %}[{{ m.content }}]{% endfor %}"
    ),
    "writing during a look-up": (
        "{% for m in messages %}{% for o in messages[:loop.index] %}{% if loop.first %}[{% "
        "endif %}{% endfor %}{{ m.content }}]{% endfor %}"
    ),
    "a macro": (
        "{% macro show(m) %}[{{ m.content }}]{% endmacro %}{% for m in messages %}{{ show(m) }}{% "
        "endfor %}"
    ),
    "a set block": (
        "{% for m in messages %}{% set t %}[{{ m.content }}]{% endset %}{{ t }}{% endfor %}"
    ),
    "a namespace": (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + '[' + "
        "m.content + ']' %}{% endfor %}{{ ns.t }}"
    ),
    "a filtered loop": "{% for m in messages if m.content %}[{{ m.content }}]{% endfor %}",
    "a call block": (
        "{% macro show() %}[{{ caller() }}]{% endmacro %}"
        "{% for m in messages %}{% call show() %}{{ m.content }}{% endcall %}{% endfor %}"
    ),
    "formatting": "{% for m in messages %}{{ '[%s]' % m.content }}{% endfor %}",
    "braces": "{% for m in messages %}{{ '[{}]'.format(m.content) }}{% endfor %}",
    "with": "{% for m in messages %}{% with c = m.content %}[{{ c }}]{% endwith %}{% endfor %}",
    "break and continue": (
        "{% for m in messages %}{% if loop.index0 < 0 %}{% continue %}{% endif %}[{{ m.content }}]"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    ),
    "unpacked": (
        "{% for m in messages %}{% set i, n = loop.index, m %}[{{ n.content }}]{% endfor %}"
    ),
    "items of a list of pairs": (
        "{% for m in messages %}{% for k, v in m.items() %}{% if k == 'content' %}[{{ v }}]{% "
        "endif %}{% endfor %}{% endfor %}"
    ),
}
"""Ways in which templates go over messages; all write [content] for each."""


@pytest.mark.parametrize("way", OWNED)
def test_the_turn_is_known_however_a_template_goes_over_messages(way):
    messages = ask("one", "two", "three", "four")
    rendered = template(OWNED[way]).render(messages)
    assert rendered.text == "[one][two][three][four]"
    found = [(text, message, owner) for text, message, _, owner in pieces(rendered)]
    joined = {}
    for text, _, owner in found:
        joined[owner] = joined.get(owner, "") + text
    assert joined == {0: "[one]", 1: "[two]", 2: "[three]", 3: "[four]"}
    words = {message: "".join(t for t, m, _ in found if m == message) for message in range(4)}
    assert words == {0: "one", 1: "two", 2: "three", 3: "four"}


def test_text_outside_the_loop_has_no_turn():
    rendered = template(
        "{{ bos_token }}Head{% for m in messages %}{{ m.content }}{% endfor %}Tail"
    ).render(ask("a", "b"))
    owners = [(text, owner) for text, _, _, owner in pieces(rendered)]
    assert owners == [("<s>", -1), ("Head", -1), ("a", 0), ("b", 1), ("Tail", -1)]


def test_system_text_hoisted_out_of_the_loop_is_the_messages():
    source = (
        "{% set s = messages[0].content %}{{ '<<' + s + '>>' }}{% for m in messages[1:] %}{{ "
        "m.content }}{% endfor %}"
    )
    rendered = template(source).render([{"role": "system", "content": "S"}, *ask("a", "b")])
    assert [piece[:3] for piece in pieces(rendered)] == [
        ("<<", -1, ""),
        ("S", 0, "content"),
        (">>", -1, ""),
        ("a", 1, "content"),
        ("b", 2, "content"),
    ]


def test_generation_blocks_are_marked():
    source = (
        "{% for m in messages %}<{% generation %}{{ m.content }};{% endgeneration %}>{% endfor %}"
    )
    rendered = template(source).render(ask("a", "b"))
    at, inside = 0, ""
    for run in rendered.runs:
        inside += rendered.text[at : at + run[0]] if run[5] else ""
        at += run[0]
    assert (rendered.text, inside) == ("<a;><b;>", "a;b;")


def test_images_do_not_reach_templates():
    source = (
        "{% for m in messages %}{% for p in m.content %}{{ p.image if p.image else p.text }}{% "
        "endfor %}{% endfor %}"
    )
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "image": object()}, {"type": "text", "text": "x"}],
        }
    ]
    assert template(source).render(messages).text == "<object>x"


def test_reasoning_has_one_name():
    for name in ("reasoning_content", "thinking", "reasoning"):
        for read in ("reasoning_content", "thinking"):
            source = "{% for m in messages %}{{ m." + read + " }}{% endfor %}"
            rendered = template(source).render([{"role": "assistant", "content": "x", name: "hm"}])
            assert pieces(rendered) == [("hm", 0, "reasoning_content", 0)], (name, read)


def test_strftime_uses_the_given_time_and_copies_render_the_same():
    dated = Template(source="{{ strftime_now('%d %b %Y') }}", now=datetime(2024, 2, 3))
    assert dated.render([]).text == dated.render_plain([]) == "03 Feb 2024"
    assert pickle.loads(pickle.dumps(dated)).render([]).text == "03 Feb 2024"
    assert pickle.loads(pickle.dumps(dated)).fingerprint == dated.fingerprint
    assert Template(source="{{ strftime_now('%d') }}").fingerprint != dated.fingerprint


def test_refusals_and_mistakes_are_told():
    with pytest.raises(RecordError, match=r"template.*conversation"):
        template("{{ raise_exception('no system') }}").render(PLAIN)
    with pytest.raises(RecordError, match=r"conversation.*'nothing'.*undefined"):
        template("{{ nothing.x }}").render(PLAIN)
    with pytest.raises(RecordError, match=r"concatenate str|unsupported operand"):
        template("{{ 'a' + messages[0].content }}").render(ask([{"type": "text", "text": "x"}]))
    with pytest.raises(ConfigError, match=r"template.*given.*line.*2.*endfor"):
        load_template("{{ 1 }}\n{% for m in messages %}")
    with pytest.raises(RecordError, match="unsafe"):
        template("{{ messages.__class__.__mro__ }}").render(PLAIN)
    with pytest.raises(RecordError, match="begins with _"):
        template("{% set ns = namespace(_x=1) %}").render(PLAIN)


def test_templates_come_from_files_folders_and_text(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "<e>"}, "bos_token": "<b>", "chat_template": "{{ bos_token '
        '}}x{{ eos_token }}"}'
    )
    assert load_template(tmp_path).render([]).text == "<b>x<e>"
    (tmp_path / "chat_template.jinja").write_text("own {{ eos_token }}")
    assert load_template(tmp_path).render([]).text == "own <e>"
    (tmp_path / "own.jinja").write_text("file {{ y }}")
    assert load_template(tmp_path / "own.jinja", y=3).render([]).text == "file 3"
    with pytest.raises(ConfigError, match="no chat template there"):
        load_template(tmp_path / "absent")


@pytest.mark.real_data
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_renders_equal_those_of_transformers(real_data, name):
    """Every template, with and without generation prompt and tools."""
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages, tools = CONVERSATIONS[name], with_tools(name)
    paths = sorted(real_data.joinpath("chat_templates").glob("*/*.jinja"))
    rendered = 0
    for path in paths:
        own = real_template(path)
        for prompt in (False, True):
            try:
                expected = chat_template_utils.render_jinja_template(
                    [messages],
                    tools=tools,
                    chat_template=own.source,
                    add_generation_prompt=prompt,
                    **own.variables,
                )[0][0]
            except Exception:
                for render in (own.render, own.render_plain):
                    with pytest.raises(
                        RecordError, match=r"chat template template (refuses|fails)"
                    ):
                        render(messages, tools=tools, add_generation_prompt=prompt)
                continue
            traced = own.render(messages, tools=tools, add_generation_prompt=prompt)
            assert traced.text == expected, path.stem
            assert (
                own.render_plain(messages, tools=tools, add_generation_prompt=prompt) == expected
            ), path.stem
            assert words_are_theirs(traced, messages), path.stem
            rendered += 1
    assert len(paths) == 58
    assert rendered >= {"parts": 50, "tools": 70, "two calls": 70, "developer": 60}.get(name, 90), (
        rendered
    )


@pytest.mark.real_data
def test_forged_control_text_is_never_literal(real_data):
    """No template makes the words of a message, of a tool call or of an argument's name its own
    text.
    """
    evil = "<|evil|>"
    messages = [
        {"role": "system", "content": f"s{evil}"},
        {"role": "user", "content": f"u{evil}"},
        {"role": "assistant", "content": f"a{evil}", "reasoning_content": f"r{evil}",
         "tool_calls": [call(**{f"k{evil}": f"v{evil}", "list": [evil, {evil: evil}]})]},
        {"role": "tool", "name": "get_weather", "tool_call_id": "callno000", "content": f"t{evil}"},
        {"role": "assistant", "content": f"a{evil}"},
    ]  # fmt: skip
    seen = 0
    for path in sorted(real_data.joinpath("chat_templates").glob("*/*.jinja")):
        own = real_template(path)
        for conversation in (messages, messages[1:], [messages[1], messages[4]]):
            try:
                rendered = own.render(conversation, tools=TOOLS if len(conversation) > 2 else None)
            except RecordError:
                continue
            literal = "".join(
                text if message < 0 or field == "role" else " "
                for text, message, field, _ in pieces(rendered)
            )
            assert "evil" not in literal, path.stem
            seen += "evil" in rendered.text
    assert seen > 120


ESCAPING = {
    "m.content | safe + '<'": "a <b> & 'c'&lt;",
    "'<' + m.content | e": "&lt;a &lt;b&gt; &amp; &#39;c&#39;",
    "'<%s>' | safe % m.content": "<a &lt;b&gt; &amp; &#39;c&#39;>",
    "('<' | safe + m.content) + '&amp;'": "<a &lt;b&gt; &amp; &#39;c&#39;&amp;amp;",
    "'<' + ({'k': m.content} | tojson | safe) + '>'": '&lt;{"k": "a <b> & \'c\'"}&gt;',
    "('\"' | safe + m.content + '\"') | safe + (m.content | tojson)": (
        '"a &lt;b&gt; &amp; &#39;c&#39;&#34;&#34;a &lt;b&gt; &amp; &#39;c&#39;&#34;'
    ),
}
"""What a template adds, and what Jinja, and so transformers, writes."""


@pytest.mark.parametrize("added", ESCAPING)
def test_text_that_jinja_escapes_is_traced_as_it_is_written(added):
    own = Template(source="{% for m in messages %}{{ " + added + " }}{% endfor %}")
    rendered = own.render(ask("a <b> & 'c'"))
    assert rendered.text == own.render_plain(ask("a <b> & 'c'")) == ESCAPING[added]
    assert rendered.escaped > 0
    assert {owner for _, _, _, owner in pieces(rendered)} == {0}
    words = "".join(text for text, message, _, _ in pieces(rendered) if message == 0)
    assert "a " in words
    for length, message, field, offset, _, _ in rendered.runs:
        assert length
        assert offset < 0 or (message, field) == (0, "content")
    assert words_are_theirs(rendered, ask("a <b> & 'c'"))


def test_text_that_jinja_rewrites_otherwise_is_refused():
    source = (
        "{% for m in messages %}{% set t = '<' | safe + m.content %}{{ 'x' if '&' in t else t "
        "}}{% endfor %}"
    )
    with pytest.raises(RecordError, match=r"unknown.*rewrites"):
        Template(source=source).render(ask("a <b>"))


def test_filters_that_make_markup_are_no_problem_by_themselves():
    template = Template(
        source="{% for m in messages %}{{ m.content | safe ~ '<' }}{{ m.content | e }}{% endfor %}"
    )
    assert (
        template.render(ask("a <b>")).text
        == template.render_plain(ask("a <b>"))
        == "a <b><a &lt;b&gt;"
    )


def test_a_macro_that_calls_itself_without_end_is_an_error_of_the_record():
    """Hermes 3's does for a tool whose argument may be null: "null" is no type that it knows, so it
    goes through the letters of the type's name, which are none either.
    """
    own = Template(
        source="{% macro kind(name) %}{% if name == 'string' %}str{% else %}"
        "{% for one in name %}{{ kind(one) }}{% endfor %}{% endif %}{% endmacro %}"
        "{% for tool in tools %}{{ kind(tool.type) }}{% endfor %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "hi"}]
    for render in (own.render, own.render_plain):
        with pytest.raises(RecordError, match=r"calls itself without end.*argument"):
            render(messages, tools=[{"type": "null"}])
    assert own.render(messages, tools=[{"type": "string"}]).text == "strhi"
