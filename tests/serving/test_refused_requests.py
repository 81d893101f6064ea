"""Rubbish, and what is asked for in vain: always a 4xx in OpenAI's shape that names the field,
never a 5xx.
"""

import asyncio
import json
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_makers import make_model, running

from penstock.use.serving.settings import LEAST_BODY

JSON = {"content-type": "application/json"}
HI = [{"role": "user", "content": "Hi"}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}


def refusal(response, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "temperature": 3}, "temperature"),
        ({"prompt": "a", "temperature": "0.5"}, "temperature"),
        ({"prompt": "a", "temperature": True}, "temperature"),
        ({"prompt": "a", "temperature": 10**400}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "top_k": -2}, "top_k"),
        ({"prompt": "a", "min_p": -1}, "min_p"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 9}, "n"),
        ({"prompt": "a", "n": 10**30}, "n"),
        ({"prompt": "a", "seed": 1 << 63}, "seed"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 5000}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 255}, "max_tokens"),
        ({"prompt": "a" * 300}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": ["a"] * 1000}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "a", "stop": ""}, "stop.0"),
        ({"prompt": "a", "stop": ["a"] * 5}, "stop"),
        ({"prompt": "a", "stop": ["a" * 300]}, "stop.0"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "logprobs": 6}, "logprobs"),
        ({"prompt": "a", "echo": "yes"}, "echo"),
        ({"prompt": "a", "frequency_penalty": 2.5}, "frequency_penalty"),
        ({"prompt": "a", "presence_penalty": "1"}, "presence_penalty"),
        ({"prompt": "a", "logit_bias": {"a": 5}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
        ({"prompt": "a", "nonsense": 1}, "nonsense"),
        ({"prompt": "a", "model": 5}, "model"),
        (
            {"prompt": "a", "stream_options": {"include_usage": 1}, "stream": True},
            "stream_options.include_usage",
        ),
    ],
)
def test_completions_name_the_field(server, body, param):
    error = refusal(server.post(**body))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": HI * 4097}, "messages"),
        ({"messages": [*HI, 5]}, "messages.1"),
        ({"messages": [{"role": "alien", "content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": ["user"], "content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages.0.content"),
        (
            {"messages": [*HI, {"role": "user", "content": " \n\t\u00a0\u2003"}]},
            "messages.1.content",
        ),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": " "}] * 2}]},
            "messages.0.content",
        ),
        (
            {"messages": [{"role": "user", "content": "Hi", "tool_calls": [1]}]},
            "messages.0.tool_calls.0",
        ),
        ({"messages": [{"role": "user", "content": "Hi", "tool_calls": [CALL]}]}, "messages.0"),
        ({"messages": [*HI, {"role": "tool", "content": "5"}]}, "messages.1"),
        (
            {
                "messages": [
                    *HI,
                    {
                        "role": "assistant",
                        "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[]"}}],
                    },
                ]
            },
            "messages.1.tool_calls.0.function.arguments",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.image_url.url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}] * 65}]},
            "messages.0.content",
        ),
        ({"messages": [*HI, {"role": "system", "content": "late"}]}, "messages"),
        ({"messages": HI, "tools": [{"type": "function"}]}, "tools.0.function"),
        (
            {"messages": HI, "tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools.0.function.name",
        ),
        # This template has no place for tools.
        ({"messages": HI, "tools": [TOOL]}, "tools"),
        ({"messages": HI, "tools": [TOOL, TOOL]}, None),
        ({"messages": HI, "tool_choice": "required"}, None),
        (
            {
                "messages": HI,
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            None,
        ),
        ({"messages": HI, "tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        (
            {"messages": HI, "tools": [TOOL], "tool_choice": {"type": "allowed_tools"}},
            "tool_choice",
        ),
        ({"messages": HI, "tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"messages": HI, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        (
            {
                "messages": HI,
                "tools": [{**TOOL, "function": {"name": "f", "parameters": {"type": "array"}}}],
            },
            "tools.0.function.parameters",
        ),
        ({"messages": HI, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"messages": HI, "tools": [TOOL], "response_format": {"type": "json_object"}}, None),
        ({"messages": HI, "response_format": {"type": "json"}}, "response_format.type"),
        ({"messages": HI, "response_format": {"type": "json_schema"}}, "response_format"),
        (
            {
                "messages": HI,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": 5}},
                },
            },
            "response_format",
        ),
        (
            {
                "messages": HI,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {}, "b": 1},
                },
            },
            "response_format.json_schema.b",
        ),
        ({"messages": HI, "max_completion_tokens": 5000}, "max_completion_tokens"),
        ({"messages": HI, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"messages": HI, "prompt": "a"}, "prompt"),
    ],
)
def test_chats_name_the_field(server, body, param):
    assert refusal(server.post("/v1/chat/completions", **body))["param"] == param


def test_what_changes_nothing_is_accepted(server):
    answer = server.post(
        "/v1/chat/completions",
        messages=HI,
        user="me",
        metadata={"a": "b"},
        store=False,
        frequency_penalty=0,
        presence_penalty=0.0,
        tools=[],
        logit_bias={},
        response_format={"type": "text"},
        seed=None,
        stop=None,
        max_tokens=5,
        parallel_tool_calls=True,
    )
    assert answer.status_code == 200, answer.text


def test_another_model_is_not_here(server):
    error = refusal(server.post(model="gpt-4", prompt="a"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"5",
        b'"a"',
        b"[1]",
        b"\xff\xfe{}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}',
        b'{"temperature": NaN, "prompt": "a"}',
        b'{"temperature": Infinity}',
        b"[" * 200_000,
        b'{"a":' * 30_000,
        b'{"n": ' + b"9" * 10_000 + b"}",
        b'{"model": "tiny", "prompt": "a"} x',
        b"\x00" * 100,
    ],
    ids=range(17),
)
def test_bodies_that_are_no_json_object(server, body):
    assert (
        refusal(server.http.post("/v1/completions", content=body, headers=JSON))["code"]
        == "invalid_json"
    )


def test_a_number_too_large_for_a_float(server):
    body = b'{"model": "tiny", "prompt": "a", "temperature": 1e999}'
    assert (
        refusal(server.http.post("/v1/completions", content=body, headers=JSON))["param"]
        == "temperature"
    )


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", ""],
)
def test_content_type(server, kind):
    answer = server.http.post(
        "/v1/completions", content=b'{"model":"tiny","prompt":"a"}', headers={"content-type": kind}
    )
    assert refusal(answer, 415)["param"] == "content-type"


def test_large_bodies_are_refused_by_announcement_and_while_they_come(server):
    large = b" " * (LEAST_BODY + 1)
    assert (
        refusal(server.http.post("/v1/completions", content=large, headers=JSON), 413)["code"]
        == "body_too_large"
    )
    chunked = (large[:1000] for _ in range(len(large) // 1000 + 2))
    assert (
        refusal(server.http.post("/v1/completions", content=chunked, headers=JSON), 413)["code"]
        == "body_too_large"
    )
    assert server.post(prompt="a").status_code == 200


def test_no_such_path_and_no_such_method(server):
    assert "no such path" in refusal(server.http.get("/v1/nothing"), 404)["message"]
    answer = server.http.get("/v1/completions")
    assert "GET is not" in refusal(answer, 405)["message"]
    assert answer.headers["allow"] == "POST"
    assert answer.json()["error"]["code"] == "method_not_allowed"
    assert refusal(server.http.get("/docs"), 404)
    assert refusal(server.http.get("/openapi.json"), 404)


def raw(server, data: bytes, seconds: float = 9) -> bytes:
    """What the server answers to bytes, until it closes or says no more; less time than
    `body_seconds` by default.
    """
    with socket.create_connection(
        ("127.0.0.1", server.settings.port or int(server.url.rsplit(":", 1)[1])), seconds
    ) as to:
        to.sendall(data)
        answer = b""
        while part := to.recv(1 << 16):
            answer += part
            if b"\r\n\r\n" in answer:
                break
    return answer


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00" * 9 + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"x: y\r\n" * 9000,
    ],
)
def test_what_is_no_http_is_a_400(server, data):
    assert raw(server, data).startswith(b"HTTP/1.1 4")


def test_two_lengths(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    assert raw(server, head + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}").startswith(
        b"HTTP/1.1 400"
    )
    assert raw(server, head + b"Content-Length: -1\r\n\r\n{}").startswith(b"HTTP/1.1 400")
    assert raw(server, head + b"Content-Length: 99999999999999999999\r\n\r\n{}").startswith(
        b"HTTP/1.1 4"
    )


def test_the_rest_of_a_refused_body_is_read_before_the_connection_is_closed(server):
    """Closing on unread bytes resets the connection, and the answer may be lost on its way."""
    log: list[str] = []
    body = [
        {"type": "http.request", "body": b"x", "more_body": more} for more in (True, True, False)
    ]

    async def receive() -> dict:
        log.append("read")
        return body.pop(0)

    async def send(message: dict) -> None:
        log.append(f"{message['type']} {message.get('status', '')}")

    headers = [(b"host", b"localhost"), (b"content-type", b"text/plain")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": headers,
        "query_string": b"",
        "client": ("127.0.0.1", 1),
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "raw_path": b"",
        "server": ("127.0.0.1", 80),
    }
    asyncio.run(server.service.app(scope, receive, send))
    assert log == ["read"] * 3 + ["http.response.start 415", "http.response.body "]


def test_slow_headers_and_bodies(tokenizer):
    with running(make_model(tokenizer), body_seconds=0.3) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        assert raw(server, head) == b""
        slow = raw(server, head + b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{")
        assert slow.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in slow.lower()


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "text"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "name", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
names = st.sampled_from(
    [
        "prompt",
        "messages",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "seed",
        "max_tokens",
        "min_tokens",
        "stop",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "max_completion_tokens",
        "tools",
        "logit_bias",
        "best_of",
        "user",
    ]
)


@settings(deadline=None, max_examples=150)
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    body=st.dictionaries(names, values, max_size=5),
)
def test_no_value_of_any_field_is_a_5xx(server, path, body):
    sent = json.dumps(
        {
            "model": "tiny",
            "max_tokens": 3,
            "prompt" if path == "/v1/completions" else "messages": "a",
            **body,
        }
    )
    answer = server.http.post(path, content=sent.encode("utf-8", "surrogatepass"), headers=JSON)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        refusal(answer)


@settings(deadline=None, max_examples=60)
@given(body=st.binary(max_size=200))
def test_no_bytes_are_a_5xx(server, body):
    assert refusal(server.http.post("/v1/chat/completions", content=body, headers=JSON))
