"""`/v1/responses` by OpenAI's client: text, functions, schemas, streams, and what is refused."""

import json

import jsonschema
import openai
import pytest
from serving_makers import make_model, running
from test_tools_and_formats import SCHEMA, TOOL_TEMPLATE, WRITTEN

from makers.models import tiny_model
from penstock.chat import load_template
from penstock.learn.generation import Engine
from penstock.use.serving import ServedModel

TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}
CITY = {"city": "Zürich", "days": 3, "wide": True}
ONE_CALL = WRITTEN["hermes"].partition("</tool_call>")[0] + "</tool_call>"


def templated(tokenizer, engine, context_length=4096) -> ServedModel:
    template = load_template(TOOL_TEMPLATE, tokenizer=tokenizer)
    return ServedModel(name="tiny", engine=engine, tokenizer=tokenizer, template=template,
                       context_length=context_length)  # fmt: skip


@pytest.fixture(scope="module")
def calling(tokenizer):
    with running(
        templated(tokenizer, make_model(tokenizer, text="Wait.\n" + ONE_CALL).engine)
    ) as server:
        yield server


def prompt_of(server) -> str:
    return server.model.tokenizer.decode(server.engine.asked[-1][0])


def test_text(server):
    with server.openai() as client:
        answer = client.responses.create(
            model="tiny", input="Hi", instructions="Be brief.", temperature=0.5
        )
    assert (answer.output_text, answer.status) == ("Hello wörld 🙂!", "completed")
    assert [item.type for item in answer.output] == ["message"]
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.input_tokens == len(server.engine.asked[-1][0])
    assert prompt_of(server).endswith("<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>")
    assert server.engine.asked[-1][1].temperature == 0.5


def test_a_reply_that_is_cut(server):
    with server.openai() as client:
        answer = client.responses.create(model="tiny", input="Hi", max_output_tokens=3)
        events = list(
            client.responses.create(model="tiny", input="Hi", max_output_tokens=3, stream=True)
        )
    for found in (answer, events[-1].response):
        assert (found.status, found.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        assert found.usage.output_tokens == 3
    assert events[-1].type == "response.incomplete"


def test_a_stream_of_text(server):
    with server.openai() as client, client.responses.stream(model="tiny", input="Hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "Hello wörld 🙂!"
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == final.output_text
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [
        event.type.removeprefix("response.")
        for event in events
        if event.type != "response.output_text.delta"
    ]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


def test_log_probabilities(server):
    asked = {
        "model": "tiny",
        "input": "Hi",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    with server.openai() as client:
        whole = client.responses.create(**asked).output[0].content[0]
        events = list(client.responses.create(**asked, stream=True))
    said = [
        one
        for event in events
        if event.type == "response.output_text.delta"
        for one in event.logprobs
    ]
    assert [one.token for one in said] == [one.token for one in whole.logprobs]
    assert b"".join(bytes(one.bytes) for one in whole.logprobs).decode() == whole.text
    assert all(len(one.top_logprobs) == 2 for one in whole.logprobs)


def test_functions_and_their_results(calling):
    with calling.openai() as client:
        answer = client.responses.create(
            model="tiny", input="Hi", tools=[TOOL], max_output_tokens=400
        )
        message, call = answer.output
        assert (message.content[0].text, call.name, json.loads(call.arguments)) == (
            "Wait.",
            "weather",
            CITY,
        )
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]
        given = [{"role": "user", "content": "Hi"}, *answer.output, *results]
        client.responses.create(model="tiny", input=given, tools=[TOOL])
    prompt = prompt_of(calling)
    assert "<|user|>Hi<|end|><|assistant|>Wait.<tool_call>" in prompt
    assert '"city": "Zürich"' in prompt
    assert prompt.endswith("<|user|>sun<|end|><|assistant|>")


def test_a_stream_of_a_function(calling):
    asked = {"model": "tiny", "input": "Hi", "tools": [TOOL], "max_output_tokens": 400}
    with calling.openai() as client, client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    message, call = final.output
    assert (message.content[0].text, json.loads(call.arguments)) == ("Wait.", CITY)
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert (done.item_id, done.output_index, json.loads(done.arguments)) == (call.id, 1, CITY)


@pytest.mark.parametrize("stream", [False, True])
def test_schemas_and_wanted_calls(tokenizer, stream):
    """By a random model."""
    model = tiny_model(tokenizer.vocab_size, seed=3, init_std=0.2).eval()
    engine = Engine(
        model,
        tokenizer,
        context_length=1024,
        stop_ids=[tokenizer.special_tokens["<|end|>"]],
        slots=2,
    )
    set_level = {
        "type": "object",
        "properties": {"level": {"enum": ["low", "high"]}},
        "required": ["level"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "name": "set", "parameters": set_level, "strict": True}
    with running(templated(tokenizer, engine, 1024)) as server, server.openai() as client:

        def ask(**more):
            found = client.responses.create(
                model="tiny", input="Hi", max_output_tokens=120, stream=stream, **more
            )
            return list(found)[-1].response if stream else found

        schema = {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}
        jsonschema.validate(json.loads(ask(text={"format": schema}).output_text), SCHEMA)
        for choice in ("required", {"type": "function", "name": "set"}):
            answer = ask(tools=[tool], tool_choice=choice, parallel_tool_calls=False)
            [call] = answer.output
            assert json.loads(call.arguments) in ({"level": "low"}, {"level": "high"})
        with pytest.raises(openai.BadRequestError, match=r"text.format: json_schema: Invalid type"):
            ask(text={"format": {**schema, "schema": {"type": "strin"}}})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "Hi", "nonsense": 1}, "nonsense"),
        ({"input": "Hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "Hi", "background": True}, "background"),
        ({"input": "Hi", "temperature": "1"}, "temperature"),
        ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "Hi", "max_output_tokens": 100_000}, "max_output_tokens"),
        ({"input": "Hi", "tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": "Hi", "include_usage": True}, "include_usage"),
        ({"input": "Hi", "text": {"format": {"type": "json_schema", "name": "x"}}}, None),
        ({"input": "  "}, "input"),
        ({"input": []}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
            "input.0.content.0.text",
        ),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input.0"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]},
            "input",
        ),
        ({}, "input"),
    ],
)
def test_what_is_refused(server, body, param):
    answer = server.post("/v1/responses", **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if param is not None:
        assert error["param"] == param, error
        assert error["message"].startswith(param.partition(".")[0]) or param in error["message"]


def test_what_does_not_fit_is_refused_or_left_out(server):
    turns = [{"role": role, "content": "word " * 20} for role in ("user", "assistant")] * 4
    asked = {"input": [*turns, {"role": "user", "content": "Hi"}]}
    answer = server.post("/v1/responses", **asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    assert "truncation: auto" in answer.json()["error"]["message"]
    answer = server.post("/v1/responses", **asked, truncation="auto").json()
    assert answer["tokens_dropped"] > 0


def test_a_stream_that_is_cut_ends_with_an_error(server):
    with server.openai() as client:
        *_, last = client.responses.create(model="tiny", input="fail", stream=True)
    assert (last.type, last.code) == ("error", "internal_error")
    assert "the server failed" in last.message


def test_an_answer_says_how_it_was_sampled(server):
    before = server.model.sampling
    object.__setattr__(server.model, "sampling", {"temperature": 0.3, "top_p": 0.9})
    try:
        for given, said in (({}, (0.3, 0.9)), ({"temperature": 0.5}, (0.5, 0.9))):
            answer = server.post("/v1/responses", input="Hi", **given).json()
            assert (answer["temperature"], answer["top_p"]) == said
    finally:
        object.__setattr__(server.model, "sampling", before)
