"""What OpenAI's own client makes of the server."""

import openai
import pytest
from serving_makers import make_model, running

HELLO = "Hello wörld 🙂!"


def test_models(server):
    with server.openai() as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        found = client.models.retrieve("tiny")
        assert (
            found.owned_by,
            found.model_extra["context_length"],
            found.model_extra["has_chat"],
        ) == (
            "penstock",
            256,
            True,
        )
        with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
            client.models.retrieve("gpt")


def test_completion(server):
    with server.openai() as client:
        answer = client.completions.create(model="tiny", prompt="Say", max_tokens=100)
    assert answer.choices[0].text == HELLO
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "text_completion"
    # BOS and three bytes.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        4,
        len(server.engine.tokens),
    )


def test_completion_without_max_tokens_has_sixteen(server):
    with server.openai() as client:
        answer = client.completions.create(model="tiny", prompt="forever")
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


def test_prompts_of_all_kinds(server):
    with server.openai() as client:
        for prompt, count in (("a", 1), (["a", "b"], 2), ([5, 6, 7], 1), ([[5], [6, 7]], 2)):
            answer = client.completions.create(model="tiny", prompt=prompt, n=2, max_tokens=3)
            assert [choice.index for choice in answer.choices] == list(range(2 * count))
            assert answer.usage.completion_tokens == 6 * count
    # Ids are taken as they are; choices of one prompt are distinguished.
    assert [(ids, choice) for ids, _, choice in server.engine.asked[-4:]] == [
        ([5], 0),
        ([5], 1),
        ([6, 7], 2),
        ([6, 7], 3),
    ]
    # With a seed, a prompt has the same replies wherever it stands.
    server.post(prompt=["a", "a"], n=2, max_tokens=3, seed=5)
    assert [choice for _, _, choice in server.engine.asked[-4:]] == [0, 1, 0, 1]


def test_a_very_small_temperature(server):
    """Clients write 0 so."""
    for given, used in ((1e-7, 1e-6), (0, 0)):
        assert server.post(prompt="a", max_tokens=3, temperature=given).status_code == 200
        assert server.engine.asked[-1][1].temperature == used


def test_a_long_prompt_leaves_the_others_their_tokens(server):
    room = server.model.context_length
    server.post(prompt=["a" * (room - 5), "b"])
    first, second = (sampling.max_tokens for _, sampling, _ in server.engine.asked[-2:])
    assert first == second == 16
    assert server.post(prompt=[[5] * (room - 5), [6]], max_tokens=6).status_code == 400


def test_conversations_are_not_counted(server):
    """What does not fit is left out, however many turns there are."""
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant")] * 150
    messages = [*turns, {"role": "user", "content": "a"}]
    answer = server.post("/v1/chat/completions", messages=messages, max_tokens=3)
    assert answer.status_code == 200


def test_stream_of_a_completion(server):
    with server.openai() as client:
        chunks = list(
            client.completions.create(
                model="tiny",
                prompt="Say",
                n=2,
                max_tokens=50,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [HELLO, HELLO]
    assert chunks[-1].usage.total_tokens == 4 + 2 * len(server.engine.tokens)
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat(server):
    with server.openai() as client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "developer", "content": "Be brief."},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Hi "},
                        {"type": "text", "text": "there<|end|>"},
                    ],
                },
            ],
            temperature=0.5,
            top_p=0.9,
            seed=7,
            stop="zzz",
            max_completion_tokens=50,
            user="me",
            extra_body={"top_k": 5, "min_p": 0.1},
        )
    assert answer.choices[0].message.content == HELLO
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model_extra["tokens_dropped"] == 0
    ids, sampling, _ = server.engine.asked[-1]
    # The user's own "<|end|>" is text: the model's template wrote two.
    assert ids.count(server.model.tokenizer.special_tokens["<|end|>"]) == 2
    assert ids.count(server.model.tokenizer.special_tokens["<|system|>"]) == 1
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.stop) == (
        0.5,
        0.9,
        7,
        ("zzz",),
    )
    assert (sampling.top_k, sampling.min_p, sampling.max_tokens, sampling.min_tokens) == (
        5,
        0.1,
        50,
        1,
    )


def test_a_reply_can_be_sent_back_as_the_client_has_it(server):
    with server.openai() as client:
        messages = [{"role": "user", "content": "Hi"}]
        answer = client.chat.completions.create(model="tiny", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "And?"}]
        assert (
            client.chat.completions.create(model="tiny", messages=messages)
            .choices[0]
            .message.content
            == HELLO
        )


def test_stream_of_a_chat(server):
    with server.openai() as client:
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].model_extra["tokens_dropped"] == 0
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == HELLO
    assert [
        chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason
    ] == ["stop"]
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == (
        [],
        len(server.engine.tokens),
    )


def test_the_window_rolls_by_whole_turns_and_tells(server):
    turn = [{"role": "user", "content": "x" * 60}, {"role": "assistant", "content": "y" * 20}]
    with server.openai() as client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "system", "content": "S"},
                *turn * 4,
                {"role": "user", "content": "now"},
            ],
        )
        with pytest.raises(openai.BadRequestError, match="there is room for 192") as caught:
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x" * 250}]
            )
    assert answer.model_extra["tokens_dropped"] == 2 * 84
    text = server.model.tokenizer.decode(server.engine.asked[-1][0])
    assert (text.count("x"), text.count("S"), text.count("now")) == (120, 1, 1)
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


def test_log_probabilities(server):
    with server.openai() as client:
        chat = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hi"}],
            logprobs=True,
            top_logprobs=2,
            max_tokens=2,
        )
        reported = (
            client.completions.create(model="tiny", prompt="a", logprobs=1, max_tokens=2)
            .choices[0]
            .logprobs
        )
        plain = (
            client.completions.create(model="tiny", prompt="a", max_tokens=2).choices[0].logprobs
        )
    first = chat.choices[0].logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("H", -0.5, [72])
    assert [top.logprob for top in first.top_logprobs] == [-0.5, -2.0]
    assert (reported.tokens, reported.token_logprobs, reported.text_offset) == (
        ["H", "e"],
        [-0.5, -0.5],
        [0, 1],
    )
    assert reported.top_logprobs == [{"H": -0.5}, {"e": -0.5}]
    assert plain is None


def test_seeds(server):
    for seed in (3, None, None):
        server.post(prompt="a", seed=seed)
    seeds = [sampling.seed for _, sampling, _ in server.engine.asked[-3:]]
    assert seeds[0] == 3
    assert seeds[1] != seeds[2]


def test_a_model_without_a_template_completes_only(tokenizer):
    with running(make_model(tokenizer, chat=False)) as server, server.openai() as client:
        assert client.completions.create(model="tiny", prompt="a").choices[0].text
        with pytest.raises(openai.BadRequestError, match=r"chat.*template.*/v1/completions"):
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hi"}]
            )


def test_faults_of_the_engine_are_500_and_tell_nothing(tokenizer):
    with running(make_model(tokenizer)) as server, server.openai() as client:
        with pytest.raises(openai.InternalServerError, match="the server failed") as caught:
            client.completions.create(model="tiny", prompt="fail")
        assert "secret" not in str(caught.value)
        with pytest.raises(openai.APIError, match="the server failed"):
            list(client.completions.create(model="tiny", prompt="fail", stream=True))
        # Those who come after are served.
        assert (
            client.completions.create(model="tiny", prompt="a", max_tokens=50).choices[0].text
            == HELLO
        )
        assert server.metric("sequences_running") == 0
