"""How prompts end, what templates are told, ids of tokens in answers, and places of tokens in
texts.
"""

import pytest
from serving_makers import CONTROLS, FakeEngine, make_model, running

from makers.tokenizers import tiny_tokenizer
from penstock.chat import load_template
from penstock.use.serving import ServedModel

THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim if trimmed else m.content "
    "}}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is "
    "false %}(no thoughts){% endif %}{% endif %}"
)
HI = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def thinking(tokenizer):
    template = load_template(THINKING, tokenizer=tokenizer)
    model = ServedModel(
        name="tiny",
        engine=FakeEngine(tokenizer),
        tokenizer=tokenizer,
        template=template,
        context_length=256,
    )
    with running(model) as server:
        yield server


def prompt_of(server, messages, **more) -> str:
    answer = server.post("/v1/chat/completions", messages=messages, **more)
    assert answer.status_code == 200, answer.text
    return server.model.tokenizer.decode(server.engine.asked[-1][0])


def error_of(server, messages, **more) -> str:
    answer = server.post("/v1/chat/completions", messages=messages, **more)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


def test_variables_of_the_template(thinking):
    assert prompt_of(thinking, [HI]).endswith("<|assistant|>")
    given = {"enable_thinking": False, "other": {"a": [1, None]}}
    assert prompt_of(thinking, [HI], chat_template_kwargs=given).endswith(
        "<|assistant|>(no thoughts)"
    )
    for name in ("messages", "tools", "add_generation_prompt"):
        assert f"{name!r} is no variable of a template" in error_of(
            thinking, [HI], chat_template_kwargs={name: 1}
        )
    # Controls in them are the client's text.
    template = load_template(
        "{{ word }}<|user|>{{ messages[0].content }}", tokenizer=thinking.model.tokenizer
    )
    model = ServedModel(
        name="tiny",
        engine=FakeEngine(thinking.model.tokenizer),
        tokenizer=thinking.model.tokenizer,
        template=template,
        context_length=256,
    )
    with running(model) as server:
        prompt_of(server, [HI], chat_template_kwargs={"word": "<|end|>"})
        end, user = (model.tokenizer.special_tokens[name] for name in ("<|end|>", "<|user|>"))
        assert user in model.engine.asked[-1][0]
        assert end not in model.engine.asked[-1][0]


@pytest.mark.parametrize("said", ["Sure:", "Sure: ", "Well,\n", " a <|end|> b", "wör🙂"])
def test_a_reply_is_continued_exactly(thinking, said):
    written = [HI, {"role": "assistant", "content": said}]
    for more in ({"add_generation_prompt": False}, {}):
        assert (
            prompt_of(thinking, written, continue_final_message=True, **more)
            == f"<|user|>Hi<|end|><|assistant|>{said}"
        )
    ids, tokenizer = thinking.engine.asked[-1][0], thinking.model.tokenizer
    assert ids[-len(tokenizer.encode(said)) :] == tokenizer.encode(said).tolist()
    # As transformers, where the template strips texts.
    stripped = prompt_of(
        thinking, written, continue_final_message=True, chat_template_kwargs={"trimmed": True}
    )
    assert stripped == f"<|user|>Hi<|end|><|assistant|>{said.strip()}"
    assert prompt_of(thinking, written, add_generation_prompt=False).endswith(f"{said}<|end|>")


def test_what_cannot_be_continued(thinking, tokenizer):
    def refused(messages, **more):
        return error_of(thinking, messages, continue_final_message=True, **more)

    said = {"role": "assistant", "content": "a"}
    assert "exclude each other" in refused([HI, said], add_generation_prompt=True)
    assert "needs a last message of the assistant" in refused([HI])
    assert "has no text that could be continued" in refused(
        [HI, {"role": "assistant", "content": " "}]
    )
    template = load_template(
        "{% for m in messages %}{{ m.content | upper }} {{ m.content[1:] }}{% endfor %}"
    )
    model = ServedModel(
        name="tiny",
        engine=FakeEngine(tokenizer),
        tokenizer=tokenizer,
        template=template,
        context_length=256,
    )
    with running(model) as server:
        found = error_of(
            server, [HI, {"role": "assistant", "content": "abc"}], continue_final_message=True
        )
    assert "does not write the last message's text as it is" in found


@pytest.mark.parametrize("message", [{"content": None}, {}], ids=["null", "none"])
def test_a_reply_without_content(thinking, message):
    found = prompt_of(thinking, [HI, {"role": "assistant", **message}, HI])
    assert found == "<|user|>Hi<|end|><|assistant|><|end|><|user|>Hi<|end|><|assistant|>"
    for role in ("user", "system"):
        answer = thinking.post("/v1/chat/completions", messages=[{"role": role, **message}])
        assert answer.json()["error"]["param"] == "messages.0.content"


def test_top_k_that_is_off_and_the_repetition_penalty(server):
    for top_k in (0, -1, None):
        server.post(prompt="a", top_k=top_k, repetition_penalty=1.5)
        assert (
            server.engine.asked[-1][1].top_k,
            server.engine.asked[-1][1].repetition_penalty,
        ) == (None, 1.5)
    server.post(prompt="a", top_k=3)
    assert (server.engine.asked[-1][1].top_k, server.engine.asked[-1][1].repetition_penalty) == (
        3,
        1.0,
    )


def test_ids_of_completions(server):
    written, prompts = server.engine.tokens, [[65, 66], [7]]
    found = server.post(prompt=prompts, return_token_ids=True, n=2, max_tokens=4, echo=True).json()[
        "choices"
    ]
    assert [choice["prompt_token_ids"] for choice in found] == [[65, 66]] * 2 + [[7]] * 2
    assert [choice["token_ids"] for choice in found] == [written[:4]] * 4
    assert "token_ids" not in server.post(prompt="a").json()["choices"][0]
    with server.openai() as client:
        chunks = [
            chunk.choices[0].model_dump()
            for chunk in client.completions.create(
                model="tiny",
                prompt=[65, 66],
                stream=True,
                max_tokens=60,
                extra_body={"return_token_ids": True},
            )
        ]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[65, 66]] + [None] * (
        len(chunks) - 1
    )
    # Those of a character in several tokens, too, whose text comes with the last.
    assert [token for chunk in chunks for token in chunk["token_ids"]] == written


def test_ids_of_chats(thinking):
    asked = {"messages": [HI], "return_token_ids": True}
    found = thinking.post("/v1/chat/completions", **asked).json()
    assert found["prompt_token_ids"] == thinking.engine.asked[-1][0]
    assert found["choices"][0]["token_ids"] == thinking.engine.tokens
    with thinking.openai() as client:
        chunks = [
            chunk.model_dump()
            for chunk in client.chat.completions.create(
                model="tiny", messages=[HI], stream=True, extra_body={"return_token_ids": True}
            )
        ]
    assert chunks[0]["prompt_token_ids"] == thinking.engine.asked[-1][0]
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids") or []]
    assert ids == thinking.engine.tokens


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory):
    """A tokenizer with a BOS, and a reply whose 🙂 is several tokens."""
    tokenizer = tiny_tokenizer(
        tmp_path_factory.mktemp("bos"), ["some words"], 280, [*CONTROLS, "<s>"]
    )
    with running(make_model(tokenizer, text="a 🙂 b")) as server:
        yield server


def offsets(choices) -> tuple[str, list[tuple[str, int]]]:
    text = "".join(choice["text"] for choice in choices)
    found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    return text, [
        pair for one in found for pair in zip(one["tokens"], one["text_offset"], strict=True)
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["so 🙂", "<s>", "wörd"])
def test_tokens_begin_where_the_text_has_them(with_bos, prompt, stream):
    """A BOS has no place in the text; parts of a character begin where it does."""
    asked = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 40}
    with with_bos.openai() as client:
        found = client.completions.create(**asked, stream=stream)
        chunks = (
            [chunk.choices[0].model_dump() for chunk in found]
            if stream
            else [found.choices[0].model_dump()]
        )
    text, places = offsets(chunks)
    assert text == prompt + "a 🙂 b"
    assert places[0] == ("<|bos|>", 0)
    tokenizer = with_bos.model.tokenizer
    spelled = [
        tokenizer.byte_table[token]
        for token in [*tokenizer.encode(prompt), *with_bos.engine.tokens]
    ]
    due = [len(b"".join(spelled[:at]).decode("utf-8", "ignore")) for at in range(len(spelled))]
    assert [place for _, place in places[1:]] == due


def test_control_tokens_of_ids_are_in_the_text(with_bos):
    [bos] = with_bos.model.tokenizer.begin_ids
    found = with_bos.post(prompt=[bos, bos, 65], echo=True, logprobs=0, max_tokens=1).json()[
        "choices"
    ][0]
    text, places = offsets([found])
    assert text.startswith("<|bos|><|bos|>")
    assert [place for _, place in places] == [0, 7, 14, 15]
