"""Tools, JSON schemas, and prompts that come back with their log-probabilities; by OpenAI's
client.
"""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pytest
from serving_makers import CONTROLS, make_model, running

from makers.models import tiny_model
from makers.tokenizers import tiny_tokenizer
from patience import PATIENCE_SECONDS
from penstock.chat import load_template
from penstock.chat.calls import FAMILIES, Splitter, allowed_controls, family_of
from penstock.core.errors import ConfigError
from penstock.learn.generation import Engine, Sampling
from penstock.learn.generation.grammar import Constraint, Grammars
from penstock.use.serving import ServedModel, served_model

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "wide": {"type": "boolean"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ASKED = [("weather", {"city": "Zürich", "days": 3, "wide": True}), ("now", {})]
FIRST = '{"city": "Zürich", "days": 3, "wide": true}'
WRITTEN = {
    "hermes": (
        f'<tool_call>\n{{"name": "weather", "arguments": {FIRST}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ),
    "qwen-coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=wide>\nTrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "glm": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>wide</arg_key>\n<arg_value>true</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>"
    ),
    "mistral": (
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {FIRST}}}, {{"name": "now", "arguments": '
        "{}}]"
    ),
    "mistral, later": f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{FIRST}[TOOL_CALLS]now[ARGS]{{}}",  # noqa: E501
    "llama": f'{{"name": "weather", "parameters": {FIRST}}}; {{"name": "now", "parameters": {{}}}}',
    "llama, with its mark": (
        f'<|python_tag|>{{"name": "weather", "parameters": {FIRST}}}{{"name": "now", '
        '"parameters": {}}'
    ),
    "deepseek": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{FIRST}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek, 3.1": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{FIRST}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
}
NAMED = {family.name: family for family in FAMILIES}


def split(name: str, text: str, step: int) -> tuple[str, list[tuple[str, dict]]]:
    splitter = Splitter(NAMED[name.partition(",")[0]], TOOLS)
    content = "".join(splitter.push(text[at : at + step]) for at in range(0, len(text), step))
    rest, calls = splitter.finish()
    return content + rest, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_found_however_the_text_comes(name, step):
    assert split(name, WRITTEN[name], step) == ("", ASKED)
    said = "I look it up."
    if name.startswith("llama"):
        # They only begin a reply: JSON in its middle is content.
        assert split(name, said + WRITTEN[name], step) == (said + WRITTEN[name], [])
    else:
        assert split(name, f"{said}\n{WRITTEN[name]}", step) == (said, ASKED)


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("name", WRITTEN)
def test_nothing_is_lost_of_what_is_malformed(name, step):
    for text in (
        WRITTEN[name].replace("weather", "", 1),
        WRITTEN[name] + " and more",
        WRITTEN[name][:20],
    ):
        content, calls = split(name, text, step)
        assert content == text or (calls and not content.strip())
    for text in ("", "plain text", "a < b", "{", '{"a": 5}', "[TOOL", "<tool", "   "):
        assert split(name, text, step) == (text, [])


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("name", ["hermes", "mistral", "llama"])
def test_numbers_that_json_cannot_hold_are_no_arguments(name, number):
    """They would be written as no JSON, which a client sends back and we refuse."""
    text = WRITTEN[name].replace('"days": 3', f'"days": {number}')
    assert number in text
    content, calls = split(name, text, 1000)
    assert content == text
    assert not calls


def test_families_are_told_by_templates():
    for name, shown in (
        ("hermes", "<tool_call>"),
        ("qwen-coder", "<tool_call><function=x><parameter=y>"),
        ("mistral", "[TOOL_CALLS]"),
        ("glm", "<tool_call><arg_key>"),
        ("llama", "dictionary of argument name"),
    ):
        assert family_of(f"a {shown} b").name == name
    assert family_of("{{ tools }}") is None
    assert allowed_controls("[TOOL_CALLS]", {"[TOOL_CALLS]": 5, "[ARGS]": 6, "[INST]": 7}) == {5, 6}


@pytest.mark.real_data
def test_calls_of_real_templates_come_back(real_data):
    """What a template writes for calls in a conversation is what the model learns to write."""
    from penstock.learn.generation.session import _render

    found = set()
    for path in sorted(real_data.joinpath("chat_templates").glob("*/*.jinja")):
        source = path.read_text(encoding="utf-8")
        if (family := family_of(source)) is None:
            continue
        template = load_template("{% set eos_token = '</s>' %}{% set bos_token = '<s>' %}" + source)
        arguments = json.dumps(ASKED[0][1], ensure_ascii=False)
        call = {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "weather", "arguments": arguments},
        }
        asked = {"role": "user", "content": "uask"}
        text = _render(
            [asked, {"role": "assistant", "content": "", "tool_calls": [call]}],
            template,
            TOOLS[:1],
            False,
        ).text
        after = text[text.index("uask") + 4 :]
        after = after[min(place for mark in family.begins if (place := after.find(mark)) >= 0) :]
        for end in (
            "<|im_end|>",
            "</s>",
            "<|eot_id|>",
            "<|eot|>",
            "<|eom_id|>",
            "<｜end▁of▁sentence｜>",
        ):
            after = after.partition(end)[0]
        content, calls = split(family.name, after.rstrip(), 3)
        assert (content.strip(), calls) == ("", ASKED[:1]), path.stem
        found.add(family.name)
    assert found == set(NAMED)


TOOL_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %} Answer "
    "<tool_call>…</tool_call>.<|end|>{% endif %}{% for m in messages %}<|{{ 'user' if m.role "
    "== 'tool' else m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls %}<tool_call>{{ "
    "c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}{% if "
    "add_generation_prompt %}<|assistant|>{% endif %}"
)


def served(tokenizer, text: str, **engine) -> ServedModel:
    model = make_model(tokenizer, context_length=4096, text=text, **engine)
    template = load_template(TOOL_TEMPLATE, tokenizer=tokenizer)
    return ServedModel(**{name: getattr(model, name) for name in ("name", "engine", "tokenizer")},
                       template=template, context_length=4096)  # fmt: skip


@pytest.fixture(scope="module")
def calling(tokenizer):
    with running(served(tokenizer, "Wait.\n" + WRITTEN["hermes"])) as server:
        yield server


HI = [{"role": "user", "content": "Hi"}]


def test_tools_by_the_client(calling):
    with calling.openai() as client:
        answer = client.chat.completions.create(
            model="tiny", messages=HI, tools=TOOLS, max_tokens=400
        ).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content == "Wait."
        found = [
            (call.function.name, json.loads(call.function.arguments))
            for call in answer.message.tool_calls
        ]
        assert found == ASKED
        assert len({call.id for call in answer.message.tool_calls}) == 2
        prompt = calling.model.tokenizer.decode(calling.engine.asked[-1][0])
        assert '"The weather of a city."' in prompt
        # The conversation goes on with what the client has.
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "sun"}
            for call in answer.message.tool_calls
        ]
        client.chat.completions.create(
            model="tiny", messages=[*HI, answer.message, *results], tools=TOOLS
        )
        prompt = calling.model.tokenizer.decode(calling.engine.asked[-1][0])
        assert (
            '<tool_call>{"name": "weather", "arguments": {"city": "Zürich", "days": 3, '
            '"wide": true}}' in prompt
        )
        assert prompt.count("sun") == 2


def test_tools_in_a_stream(calling):
    with calling.openai() as client:
        stream = client.chat.completions.create(
            model="tiny", messages=HI, tools=TOOLS, stream=True, max_tokens=400, n=2
        )
        chunks = [chunk.choices[0] for chunk in stream]
    for index in range(2):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.delta.content or "" for chunk in own) == "Wait."
        assert own[-1].finish_reason == "tool_calls"
        calls = [call for chunk in own for call in chunk.delta.tool_calls or []]
        assert [call.index for call in calls] == [0, 1]
        assert [
            (call.function.name, json.loads(call.function.arguments)) for call in calls
        ] == ASKED


def test_a_call_that_was_cut_is_content(calling):
    with calling.openai() as client:
        answer = client.chat.completions.create(
            model="tiny", messages=HI, tools=TOOLS, max_tokens=30
        ).choices[0]
    assert answer.finish_reason == "length"
    assert answer.message.tool_calls is None
    assert answer.message.content.startswith("Wait.\n<tool_call>")


@pytest.mark.parametrize(
    "more", [{}, {"tools": TOOLS, "tool_choice": "none"}], ids=["no tools", "none"]
)
def test_without_tools_nothing_is_a_call(calling, more):
    with calling.openai() as client:
        answer = client.chat.completions.create(
            model="tiny", messages=HI, max_tokens=400, **more
        ).choices[0]
    assert answer.message.content == "Wait.\n" + WRITTEN["hermes"]
    assert answer.finish_reason == "stop"
    assert "weather of a city" not in calling.model.tokenizer.decode(calling.engine.asked[-1][0])


def test_controls_that_begin_calls_may_be_chosen(tmp_path):
    """A model that likes nothing else; other control tokens stay forbidden."""
    tokenizer = tiny_tokenizer(tmp_path, ["some words"], 272, [*CONTROLS, "[TOOL_CALLS]"])
    model = tiny_model(tokenizer.vocab_size, seed=3).eval()
    mark, user = tokenizer.special_tokens["[TOOL_CALLS]"], tokenizer.special_tokens["<|user|>"]
    bias = Sampling(temperature=0, max_tokens=2, logit_bias={mark: 90.0, user: 100.0})
    engine = Engine(model, tokenizer, context_length=32, allowed_controls=[mark])
    assert engine.generate_all([[65]], bias)[0].text == "[TOOL_CALLS][TOOL_CALLS]"
    assert (
        mark not in Engine(model, tokenizer, context_length=32).generate_all([[65]], bias)[0].tokens
    )


def test_a_prompt_comes_back_with_its_log_probabilities(server):
    with server.openai() as client:
        answer = client.completions.create(
            model="tiny", prompt=[7, 65, 66], echo=True, logprobs=2, max_tokens=1
        )
        found = answer.choices[0]
        assert found.logprobs.token_logprobs == [None, -0.65, -0.66, -0.5]
        assert found.logprobs.tokens[1:3] == ["b", "c"] or len(found.logprobs.tokens) == 4
        assert found.logprobs.top_logprobs[0] is None
        assert found.text.startswith(server.model.tokenizer.decode([7, 65, 66]))
        assert answer.usage.completion_tokens == 1
        # Nothing is written; a text comes back as it was given.
        answer = client.completions.create(
            model="tiny", prompt=["Say", "it"], echo=True, logprobs=0, max_tokens=0, n=2
        )
        assert [choice.text for choice in answer.choices] == ["Say", "Say", "it", "it"]
        assert {choice.finish_reason for choice in answer.choices} == {"length"}
        assert answer.usage.completion_tokens == 0
        assert (
            client.completions.create(model="tiny", prompt="Say", echo=True).choices[0].logprobs
            is None
        )


def test_a_prompt_comes_back_in_a_stream(server):
    with server.openai() as client:
        chunks = list(
            client.completions.create(
                model="tiny", prompt="Say", echo=True, logprobs=1, max_tokens=3, stream=True
            )
        )
        assert "".join(chunk.choices[0].text for chunk in chunks).startswith("SayHel")
        values = [value for chunk in chunks for value in chunk.choices[0].logprobs.token_logprobs]
        assert len(values) == 4 + 3
        [only] = client.completions.create(
            model="tiny", prompt="Say", echo=True, max_tokens=0, stream=True
        )
        assert (only.choices[0].text, only.choices[0].finish_reason) == ("Say", "length")


def test_places_are_released_after_scores(server):
    with server.openai() as client:
        for _ in range(3 * server.settings.sequences):
            client.completions.create(
                model="tiny", prompt="Say", echo=True, logprobs=1, max_tokens=0
            )
        with pytest.raises(openai.InternalServerError, match="the server failed"):
            client.completions.create(
                model="tiny", prompt="fail", echo=True, logprobs=1, max_tokens=0
            )
        assert (
            client.completions.create(model="tiny", prompt="Say", echo=True)
            .choices[0]
            .text.startswith("Say")
        )
    assert server.service.engine.running == 0


def test_penalties_and_biases_reach_the_engine(server):
    with server.openai() as client:
        client.completions.create(
            model="tiny",
            prompt="Say",
            frequency_penalty=0.5,
            presence_penalty=-1,
            logit_bias={"65": -100},
        )
    sampling = server.engine.asked[-1][1]
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.logit_bias) == (
        0.5,
        -1,
        {65: -100},
    )


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "maximum": 9, "minimum": 0},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def writing(tokenizer):
    """A random model, and an engine of ours."""
    model = tiny_model(tokenizer.vocab_size, seed=3, init_std=0.2).eval()
    engine = Engine(
        model,
        tokenizer,
        context_length=1024,
        stop_ids=[tokenizer.special_tokens["<|end|>"]],
        slots=4,
    )
    template = load_template(TOOL_TEMPLATE, tokenizer=tokenizer)
    with running(
        ServedModel(
            name="tiny", engine=engine, tokenizer=tokenizer, template=template, context_length=1024
        )
    ) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_replies_meet_a_schema(writing, stream):
    with writing.openai() as client:
        for seed in range(3):
            asked = {
                "model": "tiny",
                "messages": HI,
                "max_tokens": 120,
                "seed": seed,
                "response_format": FORMAT,
            }
            if stream:
                chunks = client.chat.completions.create(**asked, stream=True)
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            else:
                text = client.chat.completions.create(**asked).choices[0].message.content
            jsonschema.validate(json.loads(text), SCHEMA)


def test_a_json_object(writing):
    with writing.openai() as client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=HI,
            max_tokens=60,
            response_format={"type": "json_object"},
            temperature=0.3,
        )
    assert answer.choices[0].message.content.startswith("{")


def test_scores_of_an_engine_are_those_of_the_model(writing):
    """And the schema's own tokens are reported as the model rates them."""
    engine, ids = writing.engine, [65, 66, 67, 200, 5]
    found = engine.score(ids, 1)
    steps = [
        engine.generate_all([ids[:end]], Sampling(max_tokens=1, logprobs=100, temperature=0))[
            0
        ].logprobs[0]
        for end in range(1, 5)
    ]
    for one, step, due in zip(found, steps, ids[1:], strict=True):
        assert one.likeliest[0][0] == step.likeliest[0][0]
        assert one.likeliest[0][1] == pytest.approx(step.likeliest[0][1], abs=1e-4)
        if due in dict(step.likeliest):
            assert one.token == pytest.approx(dict(step.likeliest)[due], abs=1e-4)


BOUND = {
    "type": "function",
    "function": {
        "name": "set",
        "parameters": {
            "type": "object",
            "properties": {"level": {"$ref": "#/$defs/level"}},
            "required": ["level"],
            "additionalProperties": False,
            "$defs": {"level": {"enum": ["low", "high"]}},
        },
        "strict": True,
    },
}
OTHER = {"type": "function", "function": {"name": "stop", "parameters": None}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "allowed"),
    [({"type": "function", "function": {"name": "set"}}, {"set"}), ("required", {"set", "stop"})],
    ids=["named", "required"],
)
def test_a_call_that_is_wanted_comes(writing, choice, allowed, stream):
    """Of a random model; arguments meet the function's schema."""
    asked = {
        "model": "tiny",
        "messages": HI,
        "tools": [BOUND, OTHER],
        "tool_choice": choice,
        "max_tokens": 100,
    }
    found = []
    with writing.openai() as client:
        for seed in range(6):
            more = {"seed": seed, "parallel_tool_calls": False}
            if stream:
                chunks = [
                    x.choices[0]
                    for x in client.chat.completions.create(**asked, **more, stream=True)
                ]
                found += [
                    (call, chunks[-1].finish_reason)
                    for x in chunks
                    for call in x.delta.tool_calls or []
                ]
            else:
                answer = client.chat.completions.create(**asked, **more).choices[0]
                found += [(call, answer.finish_reason) for call in answer.message.tool_calls or []]
    # Arguments that are any object may be cut by max_tokens.
    assert len(found) >= (1 if choice == "required" else 6)
    for call, reason in found:
        assert call.function.name in allowed
        assert reason == "tool_calls"
        arguments = json.loads(call.function.arguments)
        assert isinstance(arguments, dict)
        if call.function.name == "set":
            assert arguments in ({"level": "low"}, {"level": "high"})


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {"type": "integer"}}}}},
        {"anyOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}]},
    ],
)
def test_arguments_are_an_object_also_where_no_type_says_so(writing, parameters):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    asked = {"model": "tiny", "messages": HI, "tools": [tool], "max_tokens": 60}
    with writing.openai() as client:
        for seed in range(3):
            said = client.chat.completions.create(
                **asked, tool_choice="required", parallel_tool_calls=False, seed=seed
            ).choices[0]
            text = said.message.content or ""
            assert said.message.tool_calls or text.startswith('[{"name": "f", "arguments": {')


def test_strict_tools_that_may_be_called(calling):
    """`openai`'s own parsing makes all tools strict; it checks what comes."""
    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    with calling.openai() as client:
        said = client.chat.completions.create(
            model="tiny", messages=HI, tools=tools, max_tokens=400
        ).choices[0]
    assert len(said.message.tool_calls) == 2


def test_only_one_call_if_others_are_not_wanted(calling):
    with calling.openai() as client:
        answer = client.chat.completions.create(
            model="tiny", messages=HI, tools=TOOLS, max_tokens=400, parallel_tool_calls=False
        ).choices[0]
    assert [call.function.name for call in answer.message.tool_calls] == ["weather"]


def test_a_schema_that_becomes_too_complex_ends_only_its_own_reply(writing, monkeypatch):
    """As llguidance gives up in the middle of a text."""
    accept, calls = Constraint.accept, []

    def fail(self, token):
        calls.append(token)
        if len(calls) == 5:
            raise ConfigError("json_schema: too complex")
        return accept(self, token)

    monkeypatch.setattr(Constraint, "accept", fail)
    with writing.openai() as client:
        with pytest.raises(openai.BadRequestError, match="json_schema: too complex"):
            client.chat.completions.create(
                model="tiny", messages=HI, max_tokens=120, response_format=FORMAT
            )
        assert (
            client.chat.completions.create(model="tiny", messages=HI, max_tokens=5)
            .choices[0]
            .message.content
        )
    assert writing.service.engine.running == 0


@pytest.mark.parametrize("step", [1, 1000])
def test_calls_of_unknown_tools_are_content_where_nothing_else_marks_a_call(step):
    for text in (
        '{"name": "rain", "parameters": {}}',
        '{"name": "now", "parameters": {}}; {"name": "rain", "parameters": {}}',
        '{"name": "", "parameters": {}}',
    ):
        assert split("llama", text, step) == (text, [])


@pytest.mark.parametrize("between", ["", "and ", "</tool_calls>"])
def test_a_call_that_does_not_end_before_the_next_is_malformed(between):
    one, other = (
        '<tool_call>{"name": "now", "arguments": {}}',
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    )
    assert split("hermes", f"{one}</tool_call>{other}", 1000) == ("", [("now", {})] * 2)
    assert split("hermes", f"{one}{between}{other}", 1000) == (f"{one}{between}{other}", [])


def test_a_schema_that_compiles_for_ever_holds_up_no_other_client(writing, monkeypatch):
    """It waits for an event that comes only after another client's replies, one of them with a
    schema of its own.
    """
    answered, compile_schema = threading.Event(), Grammars.compile

    def slow(self, schema):
        if "never" in schema:
            assert answered.wait(PATIENCE_SECONDS)
        return compile_schema(self, schema)

    monkeypatch.setattr(Grammars, "compile", slow)
    schema = {"type": "object", "properties": {"never": {"type": "integer"}}, "required": ["never"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with writing.openai() as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(
            client.chat.completions.create,
            model="tiny",
            messages=HI,
            max_tokens=20,
            response_format=wanted,
        )
        assert (
            client.completions.create(
                model="tiny", prompt="Hi", max_tokens=2
            ).usage.completion_tokens
            == 2
        )
        assert client.chat.completions.create(
            model="tiny", messages=HI, max_tokens=9, response_format=FORMAT
        )
        assert not first.done()
        answered.set()
        assert first.result(PATIENCE_SECONDS).choices[0].message.content.startswith('{"never": ')


def test_schemas_that_are_too_large_or_too_slow(writing, monkeypatch):
    def ask(schema):
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with (
            writing.openai() as client,
            pytest.raises(openai.BadRequestError, match="json_schema: ") as refused,
        ):
            client.chat.completions.create(
                model="tiny", messages=HI, max_tokens=9, response_format=wanted
            )
        assert refused.value.param == "response_format"
        return str(refused.value)

    assert "more than 5,000 properties" in ask({"properties": {f"p{i}": {} for i in range(7000)}})
    assert "no text meets the schema" in ask({"$ref": "#"})
    monkeypatch.setattr(served_model, "COMPILE_SECONDS", 0.0)
    assert "longer than 0 s to compile" in ask({"type": "boolean"})


def test_the_chosen_token_is_among_the_alternatives(writing):
    """One more than asked for, as in OpenAI's API."""
    answer = writing.post(prompt="Hi", logprobs=1, temperature=2, max_tokens=20, seed=1).json()
    found = answer["choices"][0]["logprobs"]
    others = [len(one) for one in found["top_logprobs"]]
    assert set(others) == {1, 2}
    for token, own, alternatives in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        # Parts of characters look alike; the likeliest of those is told.
        assert alternatives[token] == pytest.approx(own) or (
            "\ufffd" in token and alternatives[token] > own
        )


def test_places_in_a_stream_end_with_the_text(writing):
    """A stop text of two tokens: the first is told before it is known that it is cut off."""
    asked = {"model": "tiny", "prompt": "Hi", "temperature": 0, "max_tokens": 12, "logprobs": 0}
    with writing.openai() as client:
        tokens = client.completions.create(**asked).choices[0].logprobs.tokens
        asked["stop"] = "".join(tokens[4:6])
        whole = client.completions.create(**asked).choices[0]
        chunks = [one.choices[0] for one in client.completions.create(**asked, stream=True)]
    text = "".join(one.text for one in chunks)
    places = [place for one in chunks if one.logprobs for place in one.logprobs.text_offset]
    assert (text, places[-1]) == (whole.text, whole.logprobs.text_offset[-1])
    assert places[-1] == len(text)
