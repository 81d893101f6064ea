import json
import re

import pytest

from penstock.chat.records.conversation import Conversation
from penstock.chat.records.layout_settings import resolve_roles
from penstock.chat.records.layouts import (
    LayoutSettings,
    describe_layout,
    detect_layout,
    read_conversation,
)
from penstock.chat.records.trees import gather_trees
from penstock.chat.render.forms import normalise
from penstock.core.errors import ConfigError, ConversationError

USER = {"role": "user", "content": "Why?"}
REPLY = {"role": "assistant", "content": "Because."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TEXT_CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def read(record, **settings) -> Conversation:
    conversation = read_conversation(record, LayoutSettings(**settings), "chats.jsonl:7")
    assert isinstance(conversation, Conversation)
    return conversation


def messages(record, **settings):
    return list(read(record, **settings).messages)


def normal(record, **settings):
    """With all changed that may be changed for a template."""
    return list(normalise(read(record, **settings)).messages)


ASK = [USER, REPLY]
TURNS = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]


@pytest.mark.parametrize(
    ("record", "layout"),
    [
        ({"messages": ASK}, "messages"),
        ({"conversations": ASK}, "messages"),
        ({"conversations": TURNS}, "sharegpt"),
        ({"messages": TURNS}, "sharegpt"),
        ({"messages": None, "conversations": TURNS}, "sharegpt"),
        ({"instruction": "Why?", "input": "", "output": "Because."}, "alpaca"),
        ({"instruction": "Why?", "response": "Because."}, "alpaca"),
        ({"prompt": "Why?", "completion": "Because."}, "prompt_completion"),
        ({"prompt": [USER], "completion": [REPLY]}, "prompt_completion"),
        ({"prompt": "Why?", "response": "Because."}, "prompt_completion"),
        ({"prompt": "Why?", "chosen": "Because.", "rejected": "No."}, "preference"),
        ({"prompt": [USER], "chosen": [REPLY], "rejected": [REPLY]}, "preference"),
        ({"prompt": "Why?", "chosen": ASK, "rejected": ASK}, "preference"),
        ({"chosen": ASK, "rejected": ASK}, "preference"),
        ({"chosen": "\n\nHuman: Why?\n\nAssistant: Because.", "rejected": ""}, "preference"),
        ({"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": TURNS[1]}, "preference"),
        ({"instruction": "Why?", "chosen": "Because.", "rejected": "No."}, "preference"),
        (
            {
                "prompt": {
                    "role": "prompter",
                    "text": "Why?",
                    "replies": [{"role": "assistant", "text": "Because."}],
                }
            },
            "oasst",
        ),
    ],
)
def test_every_layout_gives_the_same_conversation(record, layout):
    assert detect_layout(record) == layout
    assert describe_layout(record).startswith(f"layout {layout}, because ")
    assert messages(record) == ASK
    assert messages(record, layout=layout) == ASK


def test_the_detection_says_why():
    assert (
        describe_layout({"conversations": TURNS})
        == 'layout sharegpt, because "conversations" holds messages with "from", "value"'
    )
    assert "the rejected ones are not read" in describe_layout({"chosen": ASK})
    assert describe_layout({"a": ASK}, LayoutSettings(field_messages="a")).startswith(
        "layout messages, as configured"
    )
    assert (
        describe_layout({"a": 1}, LayoutSettings(layout="alpaca")) == "layout alpaca, as configured"
    )


def test_an_openai_message_keeps_what_templates_use_and_loses_nulls():
    record = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": "1 + 0?",
                "name": "ann",
                "tool_calls": None,
                "reasoning_content": None,
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning": "Add.",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"a": 1}'},
                    }
                ],
            },
            {"role": "tool", "content": "1", "tool_call_id": "c1"},
        ]
    }
    assert messages(record) == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "1 + 0?", "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Add.",
            "tool_calls": [TEXT_CALL | {"id": "c1"}],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
    ]
    assert normal(record)[2] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Add.",
        "tool_calls": [CALL | {"id": "c1"}],
    }


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("target", ["reasoning_content", "thinking"])
def test_thinking_has_one_name(key, target):
    record = {"messages": [USER, REPLY | {key: "Hm."}]}
    assert messages(record, thinking_key=target)[1] == REPLY | {target: "Hm."}


def test_a_flag_called_thinking_stays_and_doubled_thinking_goes():
    assert messages({"messages": [USER, REPLY | {"thinking": True}]})[1] == REPLY | {
        "thinking": True
    }
    both = REPLY | {"thinking": True, "reasoning": "Hm."}
    assert messages({"messages": [USER, both]}, thinking_key="thinking")[1] == REPLY | {
        "thinking": "Hm."
    }
    doubled = REPLY | {"reasoning": "Hm.", "reasoning_content": "Hm."}
    assert messages({"messages": [USER, doubled]})[1] == REPLY | {"reasoning_content": "Hm."}


@pytest.mark.parametrize(
    ("given", "decode", "due"),
    [
        ({"a": 1}, True, {"a": 1}),
        ('{"a": 1}', True, {"a": 1}),
        ('{"a": 1}', False, '{"a": 1}'),
        ("", True, {}),
        (" \n", False, {}),
        (None, True, {}),
    ],
)
def test_arguments(given, decode, due):
    call = {"name": "add", "arguments": given}
    for form in ([{"function": call}], [call], json.dumps([call]), [json.dumps(call)]):
        record = {"messages": [{"role": "assistant", "tool_calls": form}]}
        [as_given] = messages(record, decode_arguments=decode)
        [decoded] = normal(record, decode_arguments=decode)
        assert as_given["tool_calls"][0]["function"]["arguments"] == (
            given if given and due else {}
        )
        assert decoded["tool_calls"] == [
            {"type": "function", "function": {"name": "add", "arguments": due}}
        ]


@pytest.mark.parametrize(
    "given", ["[1]", "no json", '{"a": 1', "{'a': 1}", '"{}"', "3", '{"a": NaN}', [1], 3, True]
)
@pytest.mark.parametrize("decode", [True, False])
def test_arguments_that_are_no_object_are_refused_with_message_and_call(given, decode):
    calls = [{"name": "now", "arguments": "{}"}, {"name": "add", "arguments": given}]
    for form in ([{"function": call} for call in calls], calls, json.dumps(calls)):
        with pytest.raises(ConversationError, match=r"message 0.*call 1.*object"):
            messages(
                {"messages": [{"role": "assistant", "tool_calls": form}]}, decode_arguments=decode
            )


def test_old_function_calls_and_results():
    record = {
        "messages": [
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "add", "arguments": '{"a": 1}'},
            },
            {"role": "function", "name": "add", "content": "1"},
        ]
    }
    assert messages(record) == [
        {"role": "assistant", "content": None, "tool_calls": [TEXT_CALL]},
        {"role": "tool", "content": "1", "name": "add"},
    ]


def test_sharegpt_tool_calls():
    record = {
        "conversations": [
            {"from": "human", "value": "1 + 0?"},
            {
                "from": "function_call",
                "value": '<think>Add.</think>\n{"name": "add", "arguments": {"a": 1}}',
            },
            {"from": "observation", "value": "1"},
            {"from": "function_call", "value": '[{"name": "add", "arguments": {"a": 1}}]'},
        ],
        "system": "Calculate.",
        "tools": '[{"name": "add", "parameters": "{\\"type\\": \\"object\\"}"}]',
    }
    conversation = read(record, split_thinking=True)
    assert list(conversation.messages) == [
        {"role": "system", "content": "Calculate."},
        {"role": "user", "content": "1 + 0?"},
        {"role": "assistant", "content": None, "reasoning_content": "Add.", "tool_calls": [CALL]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    assert conversation.tools == (
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
    )


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
        [{"name": "add", "parameters": '{"type": "object"}', "strict": None}],
        ['{"name": "add", "parameters": {"type": "object"}}'],
        '{"name": "add", "parameters": {"type": "object"}}',
    ],
)
def test_tools_in_every_form(tools):
    due = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)
    for name in ("tools", "functions"):
        assert read({"messages": ASK, name: tools}).tools == due
    assert (
        read({"messages": ASK, "abilities": tools, "tools": "stale"}, field_tools="abilities").tools
        == due
    )


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"])
def test_no_tools(tools):
    assert read({"messages": ASK, "tools": tools}).tools is None


def test_alpaca_in_full():
    record = {
        "system": "Be kind.",
        "instruction": "Add.",
        "input": "1, 0",
        "output": "1",
        "history": [["Hi", "Hello"]],
    }
    assert [(message["role"], message["content"]) for message in messages(record)] == [
        ("system", "Be kind."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Add.\n1, 0"),
        ("assistant", "1"),
    ]


def test_prompts_are_not_trained():
    record = {"prompt": [USER, REPLY, USER], "completion": [REPLY]}
    assert [mark.train for mark in read(record).message_weights] == [None, False, None, None]
    assert [
        mark.train
        for mark in read({"prompt": [USER, REPLY, USER], "chosen": [REPLY]}).message_weights
    ][1] is False


def test_turns_of_a_text_without_prompt():
    text = "\n\nHuman: a\n\nHuman: odd\n\nAssistant: b\n\nc\n\nAssistant: d"
    assert [message["content"] for message in messages({"chosen": text})] == [
        "a",
        "odd",
        "b\n\nc",
        "d",
    ]


TREE = {
    "message_id": "0",
    "role": "prompter",
    "text": "q",
    "replies": [
        {"message_id": "1", "role": "assistant", "text": "worse", "rank": 1},
        {"message_id": "2", "role": "assistant", "text": "gone", "rank": 0, "deleted": True},
        {
            "message_id": "3",
            "role": "assistant",
            "text": "best",
            "rank": 0,
            "replies": [
                {"message_id": "4", "role": "prompter", "text": "ends"},
                {
                    "message_id": "5",
                    "role": "prompter",
                    "text": "goes on",
                    "replies": [{"message_id": "6", "role": "assistant", "text": "last"}],
                },
            ],
        },
        {"message_id": "7", "role": "assistant", "text": "unranked", "rank": None},
    ],
}


@pytest.mark.parametrize("record", [TREE, {"message_tree_id": "0", "prompt": TREE}])
def test_trees(record):
    assert [message["content"] for message in messages(record)] == ["q", "best", "goes on", "last"]
    paths = read_conversation(record, LayoutSettings(oasst_paths="all"))
    assert isinstance(paths, list)
    assert [[message["content"] for message in path.messages] for path in paths] == [
        ["q", "best", "goes on", "last"],
        ["q", "worse"],
        ["q", "unranked"],
    ]


def flat(node, parent=None, tree="t"):
    replies = node.get("replies", ())
    yield {**node, "replies": None, "parent_id": parent, "message_tree_id": tree}
    for reply in replies:
        yield from flat(reply, node["message_id"], tree)


def test_flat_messages_are_gathered():
    rows = [*flat(TREE), *flat({"message_id": "x", "role": "prompter", "text": "alone"}, tree="u")]
    first, second = gather_trees(rows)
    assert messages(first) == messages(TREE)
    assert [message["content"] for message in messages(second)] == ["alone"]
    with pytest.raises(ConversationError, match=r"chats.jsonl:7.*3.*0, .* gather_trees"):
        read(rows[3])
    with pytest.raises(ConversationError, match=r"message.*6.*replies.*5.*tree"):
        list(gather_trees([row for row in rows if row["message_id"] != "5"]))
    with pytest.raises(ConversationError, match="tree t has 0 messages without a parent"):
        list(gather_trees(rows[1:2]))


def test_configured_names_beat_stale_ones():
    stale = [{"role": "user", "content": "stale"}]
    assert messages({"messages": stale, "chat": ASK}, field_messages="chat") == ASK
    turn = {"role": "stale", "content": "stale", "who": "user", "said": "Why?"}
    mapping = {"role": "who", "content": "said"}
    assert messages({"messages": [turn]}, message_property_mappings=mapping) == [USER]
    record = {
        "messages": stale,
        "instruction": "stale",
        "output": "stale",
        "q": "Why?",
        "a": "Because.",
    }
    assert messages(record, fields={"prompt": "q", "completion": "a"}) == ASK
    assert messages(record, fields={"instruction": "q", "output": "a"}) == ASK
    more = {**record, "input": "stale", "context": "stale", "history": [["stale", "stale"]]}
    fields = {"instruction": "q", "output": "a", "input": "", "history": ""}
    assert messages(more, fields=fields) == ASK
    assert messages({"messages": ASK, "chosen": stale}, field_messages="messages") == ASK
    system = {"role": "system", "content": "stale"}
    assert (
        messages({"messages": [system, *ASK], "s": "new"}, field_system="s")[0]["content"] == "new"
    )
    assert messages({"messages": [system, *ASK], "system": "other"}) == [system, *ASK]
    assert (
        messages({"messages": [system, *ASK], "system": "other"}, drop_system_message=True) == ASK
    )


def test_mapped_properties_are_renamed():
    turn = {"speaker": "gpt", "says": "Because.", "calls": [{"name": "add", "arguments": {"a": 1}}]}
    got = messages(
        {"dialog": [turn]},
        field_messages="dialog",
        message_property_mappings={"role": "speaker", "content": "says", "tool_calls": "calls"},
        roles={"assistant": ["gpt"]},
    )
    assert got == [REPLY | {"tool_calls": [CALL]}]


def test_roles_are_added_and_declared():
    record = {
        "messages": [{"role": "critic", "content": "Bad."}, {"role": "bot", "content": "Sorry."}]
    }
    got = messages(record, roles={"critic": ["critic"], "assistant": ["bot"]})
    assert [message["role"] for message in got] == ["critic", "assistant"]
    swapped = messages({"messages": ASK}, roles={"user": ["assistant"], "assistant": ["user"]})
    assert [message["role"] for message in swapped] == ["assistant", "user"]


def test_roles_to_train_are_resolved():
    assert resolve_roles(["gpt"], {}) == ("assistant",)
    assert resolve_roles(["gpt", "assistant", "human"], {}) == ("assistant", "user")
    assert resolve_roles(["critic", "judge"], {"critic": ["judge"]}) == ("critic",)
    assert resolve_roles(["user"], {"assistant": ["user"]}) == ("user",)
    with pytest.raises(ConfigError, match=r"roles_to_train: 'asistant'.*assistant"):
        resolve_roles(["asistant"], {})


def test_short_call_ids():
    def call(name, **keys):
        return {"function": {"name": name, "arguments": {}}, **keys}

    turns = [
        {
            "role": "assistant",
            "tool_calls": [call("a", id="call_0001"), call("b", id="call_0002"), call("c")],
        },
        {"role": "tool", "content": "b", "tool_call_id": "call_0002"},
        {"role": "tool", "content": "a"},
        {"role": "tool", "content": "c"},
        {"role": "tool", "content": "nobody asked"},
        {"role": "assistant", "tool_calls": [call("a")]},
        {"role": "tool", "content": "a"},
    ]
    got = messages({"messages": turns}, call_ids="short")
    ids = [one["id"] for message in got for one in message.get("tool_calls", ())]
    assert len(set(ids)) == 4
    assert all(re.fullmatch("[0-9A-Za-z]{9}", one) for one in ids)
    assert [message.get("tool_call_id") for message in got if message["role"] == "tool"] == [
        ids[1],
        ids[0],
        ids[2],
        None,
        ids[3],
    ]
    assert messages({"messages": turns}, call_ids="short") == got
    assert messages({"messages": turns})[0]["tool_calls"][0]["id"] == "call_0001"


def test_variables():
    assert read(
        {"messages": ASK, "chat_template_kwargs": {"enable_thinking": False}}
    ).variables == {"enable_thinking": False}


def test_the_same_settings_are_equal_and_survive_pickling():
    import pickle

    settings = LayoutSettings(roles={"assistant": ["gpt"]})
    assert pickle.loads(pickle.dumps(settings)) == settings
    copy = pickle.loads(pickle.dumps(settings))
    call = {
        "conversations": [
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}
        ]
    }
    assert read_conversation(call, copy).messages[0]["tool_calls"] == [CALL]
    assert (
        read_conversation({"messages": [{"role": "gpt", "content": "a"}]}, copy).messages[0]["role"]
        == "assistant"
    )


def test_a_record_is_left_as_it_was():
    record = {
        "messages": [
            USER | {"train": False},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
        ],
        "tools": [{"name": "add", "parameters": "{}"}],
    }
    before = json.dumps(record)
    read(record)
    assert json.dumps(record) == before


@pytest.mark.parametrize(
    ("record", "settings", "message"),
    [
        (
            {"messages": [USER, REPLY, USER, {"role": "gpt", "content": "a"}]},
            {},
            (
                r'^chats.jsonl:7: message 3 has role "gpt"; known: user, assistant, system, '
                r"tool, developer; "
                r"add roles: \{assistant: \[gpt\]\}$"
            ),
        ),
        ({"messages": [{"role": "Human", "content": "a"}]}, {}, r"add roles: \{user: \[Human\]\}"),
        (
            {"messages": [USER, {"content": "a"}]},
            {},
            r'message 1 has no "role" \(its fields: content\)',
        ),
        ({"messages": [USER, {"role": 3, "content": "a"}]}, {}, 'message 1 has role "3"'),
        ({"messages": [USER, {"role": ["a"], "content": "a"}]}, {}, "message 1 has role"),
        (
            {"messages": [USER, {"role": "assistant", "content": None}]},
            {},
            r'message 1 \(assistant\): "content" is null',
        ),
        (
            {"messages": [USER, {"role": "user", "text": "a"}]},
            {},
            r'"content" is missing \(its fields: role, text\)',
        ),
        (
            {"messages": [USER, {"role": "user", "content": 3}]},
            {},
            r"message 1 \(user\): content is 3; expected a text",
        ),
        ({"messages": [USER, "hello"]}, {}, "message 1 is str; expected an object"),
        ({"messages": ["hello"]}, {}, 'message 0 of "messages" is str'),
        (
            {"messages": [{"who": "a"}]},
            {},
            'message 0 of "messages" has fields who; .* message_property_mappings',
        ),
        ({"messages": "hello"}, {}, '"messages" is .hello.; expected a list'),
        ({"text": "a", "id": 1}, {}, r"no known layout \(its fields: text, id\)"),
        ({"input_ids": ["a"]}, {}, "no known layout .*input_ids"),
        (
            {"messages": ASK},
            {"field_messages": "chat"},
            r'"chat" is not there \(it has: messages\)',
        ),
        ({"a": 1}, {"layout": "messages"}, 'no field "messages"'),
        ({"a": 1}, {"layout": "alpaca"}, '"instruction" is None; expected a text'),
        ({"a": 1}, {"layout": "oasst"}, 'no tree under "prompt"'),
        (
            {"q": 1, "a": "b"},
            {"fields": {"prompt": "q", "completion": "a"}},
            '"prompt" is 1; expected a text',
        ),
        ({"instruction": "a", "input": 3, "output": "b"}, {}, '"input" is 3; expected a text'),
        (
            {"instruction": "a", "output": "b", "history": [["a"]]},
            {},
            "history 0 .* expected \\[request, answer\\]",
        ),
        ({"prompt": "a", "completion": "b", "label": False}, {}, '"label" is false'),
        ({"chosen": "Because."}, {}, '"chosen" is a text, and there is no prompt'),
        ({"prompt": "a", "chosen": []}, {}, r'"chosen" is \[\]; expected a text'),
        (
            {"prompt": "a", "chosen": [{"role": "x", "content": ""}]},
            {},
            'chats.jsonl:7, "chosen": message 0 has role "x"',
        ),
        ({"messages": ASK, "tools": "[{"}, {}, "chats.jsonl:7: its tools: not JSON"),
        ({"messages": ASK, "tools": [{"name": "a"}, {"a": 1}]}, {}, "tool 1 has no name"),
        ({"messages": ASK, "tools": 3}, {}, "its tools are int 3; expected a list"),
        ({"messages": ASK, "system": 3}, {}, '"system" is 3; expected a text'),
        (
            {"messages": ASK, "chat_template_kwargs": 3},
            {},
            '"chat_template_kwargs" is 3; expected an object',
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]},
            {},
            "message 0, tool call 0, has no name",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": 3}]},
            {},
            "message 0 has tool calls that are int 3",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "add(1)"}]},
            {},
            "message 0: its tool call: not JSON .*expected .*name",
        ),
        ([], {}, "the record is list"),
    ],
)
def test_errors_name_place_finding_and_cure(record, settings, message):
    with pytest.raises(ConversationError, match=message) as caught:
        read(record, **settings)
    assert str(caught.value).startswith("chats.jsonl:7")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": "chatml"}, 'layout is "chatml"; expected auto or one of'),
        ({"call_ids": "long"}, "expected keep or short"),
        ({"oasst_paths": "some"}, "expected best, all or ranked"),
        ({"fields": {"question": "q"}}, '"question" is no field of a layout'),
        ({"roles": {"assistant": "gpt"}}, r"expected a list of names: assistant: \[gpt\]"),
        ({"roles": {"assistant": ["a"], "user": ["a"]}}, "'a' is listed under assistant and user"),
    ],
)
def test_settings_check_themselves(settings, message):
    with pytest.raises(ConfigError, match=message):
        LayoutSettings(**settings)
