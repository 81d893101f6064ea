"""Chat templates by name: one text does what transformers does with several."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.tokenizers import tiny_tokenizer
from penstock import load_tokenizer
from penstock.chat.render.template import Template, load_template, own_template
from penstock.core.errors import ConfigError, RecordError, TokenizerError
from penstock.tokenizers.chat_templates import joined

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
EDGES = st.text(st.sampled_from(" \n\tx"), max_size=4)
BODIES = st.sampled_from(
    [
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",
        (
            "{%- for m in messages -%}\n  {% set x = m.content %}\n{{ x }} {{ tools | length if "
            "tools }}{%- endfor -%}"
        ),
        "{% macro say(m) %}<{{ m.content }}>{% endmacro %}\n{{ say(messages[0]) }}",
        "  {# a comment #}\n  {% if tools %}\n  tools\n  {% endif %}",
        "plain",
        "",
    ]
)
TEMPLATES = st.builds("{}{}{}".format, EDGES, BODIES, EDGES)


def render(source, tools):
    return Template(source=source).render(MESSAGES, tools=tools).text


@settings(max_examples=300, deadline=None)
@given(TEMPLATES, TEMPLATES)
def test_each_name_renders_as_it_does_alone(default, tool_use):
    both = joined({"default": default, "tool_use": tool_use, "rag": "{{ rag }}"})
    assert render(both, None) == render(default, None)
    assert render(both, TOOLS) == render(tool_use, TOOLS)


def test_what_there_may_be():
    assert joined({}) is None
    assert joined({"default": "a"}) == "a"
    assert joined({"default": "a", "tool_use": "a"}) == "a"
    only_tools = joined({"tool_use": "t"})
    assert render(only_tools, TOOLS) == "t"
    with pytest.raises(RecordError, match=r"conversations.*tools.*came"):
        render(only_tools, None)
    with pytest.raises(TokenizerError, match=r"named.*plain.*tool_use"):
        joined({"rag": "r", "plain": "p"})


def make_folder(tmp_path, how):
    folder = tmp_path / how
    tiny_tokenizer(folder, ["hi there"], 300)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ messages[0].content }}"}
    if how == "list":
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    if how == "files":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
        (folder / "chat_template.jinja").write_text(named["default"])
    if how == "file and config":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
        config["chat_template"] = named["default"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("how", ["list", "files"])
def test_every_door_takes_the_template_that_transformers_takes(tmp_path, how):
    folder = make_folder(tmp_path, how)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    for template in (own_template(load_tokenizer(folder)), load_template(folder)):
        for tools in (None, TOOLS):
            expected = theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
            assert template.render(MESSAGES, tools=tools).text == expected


def test_a_file_for_tools_next_to_a_template_in_the_configuration(tmp_path):
    """transformers leaves that one out, and refuses conversations without tools."""
    template = load_template(make_folder(tmp_path, "file and config"))
    assert template.render(MESSAGES).text == "Dhi"
    assert template.render(MESSAGES, tools=TOOLS).text == "Thi"


def test_templates_without_a_default_are_named(tmp_path):
    folder = make_folder(tmp_path, "plain")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "rag", "template": "r"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises((ConfigError, TokenizerError), match="chat templates are named rag"):
        load_template(folder)
