"""The engine with a model that is a table: joining, leaving, ends, what is never chosen, what is
read twice.
"""

import dataclasses
import json
import math

import pytest
import torch
from generation_makers import TableModel, successor_table
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.tokenizers import added_token, byte_tokenizer
from penstock import load_tokenizer
from penstock.core.errors import ConfigError
from penstock.learn.generation import Engine, Sampling
from penstock.learn.generation import engine as engine_module

TOKENIZER = byte_tokenizer("<bos>", "<end>", "<tool>")
END, TOOL, SIZE = 257, 258, 259
GREEDY = Sampling(temperature=0, max_tokens=40)


def engine_of(table: torch.Tensor, **options) -> tuple[Engine, TableModel]:
    model = TableModel(table)
    return Engine(
        model, TOKENIZER, **{"context_length": 64, "stop_ids": [END], "slots": 2, **options}
    ), model


def writer(text: str, **options) -> tuple[Engine, TableModel]:
    return engine_of(successor_table(text.encode(), SIZE, END), **options)


def random_table(seed: int = 0) -> torch.Tensor:
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_text_to_its_stop_id():
    engine, _ = writer("abcé日!")
    [found] = engine.generate_all([b"a"], GREEDY)
    assert (found.text, found.finish_reason) == ("bcé日!", "stop")
    assert found.tokens == (*"bcé日!".encode(), END)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_space_that_the_tokenizer_puts_behind_a_control_token_is_no_text(tmp_path, scheme):
    """The text of a reply is the one that encodes to the reply's tokens."""
    bytes_of = {f"<0x{byte:02X}>": byte for byte in range(256)}
    words = {
        text: 256 + place
        for place, text in enumerate(["▁Yes", "▁no", "▁", "x", "▁x", "Y", "e", "s", "n", "o"])
    }
    merges = ["▁ x", "▁ Y", "▁Y e", "▁Ye s", "▁ n", "▁n o"]
    words |= {text: 266 + place for place, text in enumerate(["▁Y", "▁Ye", "▁n"])}
    controls = [
        added_token(text, 269 + place) for place, text in enumerate(["<|assistant|>", "<|end|>"])
    ]
    tokenizer = {
        "added_tokens": controls,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": scheme,
            "split": False,
        },
        "model": {
            "type": "BPE",
            "vocab": bytes_of | words,
            "merges": merges,
            "byte_fallback": True,
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    loaded = load_tokenizer(tmp_path)
    table = torch.zeros(271, 271)
    for here, there in ((269, 256), (120, 256), (256, 257), (257, 256)):
        table[here, there] = 10.0
    engine = Engine(TableModel(table), loaded, context_length=64, stop_ids=[270], slots=2)
    prompt = "<|assistant|>"
    [found] = engine.generate_all([[269]], Sampling(temperature=0, max_tokens=3))
    assert found.text == ("Yes no Yes" if scheme == "always" else " Yes no Yes")
    assert loaded.encode(prompt + found.text, allow_control=True).tolist() == [269, *found.tokens]
    [plain] = engine.generate_all([[269, 120]], Sampling(temperature=0, max_tokens=2))
    assert plain.text == " Yes no"


def test_pieces_add_up_and_characters_are_whole():
    engine, _ = writer("abcé日!")
    events = list(engine.generate([b"a"], GREEDY))
    assert [event.text for event in events] == ["b", "c", "", "é", "", "", "日", "!", ""]
    assert [event.finish_reason for event in events] == [None] * 8 + ["stop"]


def test_a_stop_string_is_found_across_tokens_and_is_no_part_of_the_text():
    engine, _ = writer("abcdefgh")
    [found] = engine.generate_all([b"a"], Sampling(temperature=0, stop=("def", "zz")))
    assert (found.text, found.finish_reason) == ("bc", "stop")


def test_most_and_least_tokens():
    engine, _ = writer("abc")
    [cut] = engine.generate_all([b"a"], Sampling(temperature=0, max_tokens=2))
    assert (cut.text, cut.finish_reason) == ("bc", "length")
    [more] = engine.generate_all([b"a"], Sampling(temperature=0, min_tokens=4, max_tokens=4))
    assert END not in more.tokens
    assert len(more.tokens) == 4
    engine, _ = writer("abcdefgh")
    [late] = engine.generate_all([b"a"], Sampling(temperature=0, min_tokens=3, stop=("c",)))
    assert late.text == "bcdefgh"


def test_the_context_ends_a_sequence():
    engine, _ = engine_of(random_table(), context_length=9, stop_ids=[])
    [found] = engine.generate_all([b"abc"], Sampling(max_tokens=None))
    assert (len(found.tokens), found.finish_reason) == (6, "length")
    [short] = engine.generate_all([b"abcdefgh"], Sampling(max_tokens=5))
    assert len(short.tokens) == 1


def test_control_tokens_are_never_chosen_but_stop_ids_are():
    table = torch.zeros(SIZE + 5, SIZE + 5)
    table[:, TOOL:] = 50.0  # and rows that the tokenizer has no ids for
    table[:, END] = 3.0
    engine, _ = engine_of(table)
    found = engine.generate_all([b"a"] * 50, Sampling(max_tokens=30))
    chosen = {token for each in found for token in each.tokens}
    assert max(chosen) == END
    assert TOKENIZER.bos_id not in chosen
    assert "<tool>" not in "".join(each.text for each in found)
    engine, _ = engine_of(table, forbidden_ids=[])
    assert (
        engine.generate_all([b"a"], Sampling(temperature=0, max_tokens=2))[0].text == "<tool><tool>"
    )


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("prompt_part", [1, 2, 100])
def test_company_changes_nothing(slots, prompt_part):
    prompts = [b"a", b"hello there", b"xy", b"a longer prompt", b"z", b"hello"]
    ways = [
        Sampling(seed=5, max_tokens=9),
        Sampling(temperature=0, max_tokens=4),
        Sampling(top_k=3, max_tokens=12),
        Sampling(top_p=0.5, seed=2),
        Sampling(max_tokens=1),
        Sampling(min_p=0.2, logprobs=2, min_tokens=3),
    ]
    alone = [
        engine_of(random_table())[0].generate_all([p], [way])[0]
        for p, way in zip(prompts, ways, strict=True)
    ]
    engine, _ = engine_of(random_table(), slots=slots, prompt_part=prompt_part)
    for found, expected in zip(engine.generate_all(prompts, ways), alone, strict=True):
        assert (found.tokens, found.text, found.finish_reason) == (
            expected.tokens,
            expected.text,
            expected.finish_reason,
        )
        assert len(found.logprobs) == len(expected.logprobs)


def test_sequences_join_and_leave_between_steps():
    engine, model = engine_of(random_table(), stop_ids=[], slots=2)
    first = engine.submit(b"one", Sampling(max_tokens=6))
    engine.step()
    second, third = engine.submit(b"two"), engine.submit(b"three", Sampling(max_tokens=1))
    assert [event.sequence for event in engine.step()] == [first, second]
    assert (engine.num_running, engine.num_waiting) == (2, 1)
    engine.cancel(second)
    assert [event.sequence for event in engine.step()] == [first, third]
    while engine.num_running:
        engine.step()
    assert engine.step() == []
    expected = (
        engine_of(random_table(), stop_ids=[])[0]
        .generate_all([b"one"], Sampling(max_tokens=6))[0]
        .tokens
    )
    assert model.seen[-1] == [*b"one", *expected[:-1]]


def test_a_waiting_sequence_can_be_cancelled():
    engine, _ = writer("abc", slots=1)
    engine.submit(b"a", GREEDY)
    waiting = engine.submit(b"b", GREEDY)
    engine.cancel(waiting)
    engine.cancel(99)
    assert engine.num_waiting == 1


def test_seeds_reproduce_and_choices_differ():
    engine, _ = engine_of(random_table(), stop_ids=[])
    way = Sampling(seed=4, max_tokens=12)
    found = [each.tokens for each in engine.generate_all([b"same"] * 3, way)]
    assert len(set(found)) == 3
    assert [each.tokens for each in engine.generate_all([b"same"] * 3, way)] == found
    assert engine.generate_all([b"same"], [way])[0].tokens == found[0]
    events = list(engine.generate([b"same"], way, first_choice=2))
    assert tuple(event.token for event in events) == found[2]
    assert engine.generate_all([b"same"], Sampling(seed=5, max_tokens=12))[0].tokens not in found


def test_long_prompts_are_read_in_parts_while_others_go_on():
    engine, model = engine_of(random_table(), stop_ids=[], prompt_part=4)
    running = engine.submit(b"ab")
    engine.step()
    engine.submit(bytes(range(10)))
    model.fed.clear()
    steps = [[event.sequence for event in engine.step()] for _ in range(4)]
    assert steps == [[running]] * 2 + [[0, 1]] * 2
    assert model.fed == [[4], [1], [4], [1], [2], [1], [1, 1]]


def test_what_the_cache_still_has_is_not_read_again():
    engine, model = engine_of(random_table(), stop_ids=[])
    [first] = engine.generate_all([b"a long beginning"], Sampling(max_tokens=5))
    model.fed.clear()
    prompt = [*b"a long beginning", *first.tokens, *b" more"]
    [cached] = engine.generate_all([prompt], Sampling(max_tokens=5))
    assert model.fed[0] == [6]
    assert model.seen[-5] == prompt
    fresh = engine_of(random_table(), stop_ids=[])[0]
    assert fresh.generate_all([prompt], Sampling(max_tokens=5))[0].tokens == cached.tokens
    # The same prompt again costs its last token.
    model.fed.clear()
    engine.generate_all([prompt], Sampling(max_tokens=1))
    assert model.fed == [[1]]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(b"ab"), min_size=1, max_size=9), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_the_cache_always_holds_what_was_asked(prompts, slots, prompt_part):
    engine, model = engine_of(random_table(), stop_ids=[], slots=slots, prompt_part=prompt_part)
    for sampling in (Sampling(max_tokens=3), Sampling(max_tokens=2, seed=1)):
        model.seen.clear()
        for prompt, found in zip(prompts, engine.generate_all(prompts, sampling), strict=True):
            assert prompt in model.seen
            assert [*prompt, *found.tokens[:-1]] in model.seen


def test_a_common_beginning_is_read_once():
    """By all that run, by those that wait for a slot, and by several samples of one prompt."""
    common = list(range(40))
    prompts = [[*common, *ends] for ends in (b"a", b"bc", b"defg", b"h", b"h")]
    engine, model = engine_of(random_table(), stop_ids=[], slots=3, prompt_part=16)
    found = engine.generate_all(prompts, Sampling(max_tokens=4, temperature=0))
    assert (
        sum(map(sum, model.fed))
        == len(common) + sum(len(prompt) - 40 for prompt in prompts) - 1 + 5 * 3 + 1
    )
    for prompt, one in zip(prompts, found, strict=True):
        assert [*prompt, *one.tokens[:-1]] in model.seen
        assert (
            engine_of(random_table(), stop_ids=[])[0]
            .generate_all([prompt], Sampling(max_tokens=4, temperature=0))[0]
            .tokens
            == one.tokens
        )


def test_a_short_common_beginning_is_not_waited_for():
    engine, model = engine_of(random_table(), stop_ids=[])
    engine.submit([*range(15), 20])
    engine.submit([*range(15), 30])
    engine.step()
    assert model.fed == [[16, 16]]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_who_waits_for_one_that_is_cancelled_goes_on(steps):
    engine, model = engine_of(random_table(), stop_ids=[], prompt_part=8)
    first, second = (engine.submit([*range(30), end]) for end in (40, 41))
    for _ in range(steps):
        engine.step()
    engine.cancel(first)
    events = [event for _ in range(8) for event in engine.step()]
    assert {event.sequence for event in events} == {second}
    assert [*range(30), 41] in model.seen
    # What the first had read is not read again.
    assert sum(map(sum, model.fed)) == 31 + len(events) - 1


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(b"ab"), min_size=1, max_size=12),
            st.integers(0, 4),
            st.integers(0, 12),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_sharing_changes_no_text(submitted, slots, prompt_part):
    """Sequences that join at different steps, share beginnings with others, and are cancelled at
    any step.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "LEAST_SHARED", 1)
        engine, _ = engine_of(random_table(), stop_ids=[], slots=slots, prompt_part=prompt_part)
        texts: dict[int, list[int]] = {}
        waiting, cancels, step = list(submitted), {}, 0
        while waiting or engine.num_running or engine.num_waiting:
            while waiting and waiting[0][1] <= step:
                prompt, _, cancelled = waiting.pop(0)
                number = engine.submit(prompt, Sampling(temperature=0, max_tokens=6))
                cancels[number] = (step + cancelled, prompt)
            for number, (when, _) in cancels.items():
                if when == step and when % 3 == 0:
                    engine.cancel(number)
            for event in engine.step():
                texts.setdefault(event.sequence, []).append(event.token)
            step += 1
            if waiting and waiting[0][1] > step and not (engine.num_running or engine.num_waiting):
                step = waiting[0][1]
    for number, text in texts.items():
        [alone] = engine_of(random_table(), stop_ids=[])[0].generate_all(
            [cancels[number][1]], Sampling(temperature=0, max_tokens=6)
        )
        assert text == [*alone.tokens][: len(text)]
        assert len(text) == 6 or cancels[number][0] % 3 == 0


def test_log_probabilities_are_of_the_model_itself():
    engine, model = engine_of(random_table(), stop_ids=[])
    [found] = engine.generate_all(
        [b"q"], Sampling(temperature=0.3, top_k=2, max_tokens=4, logprobs=3)
    )
    before = [ord("q"), *found.tokens[:-1]]
    for last, token, reported in zip(before, found.tokens, found.logprobs, strict=True):
        logs = model.table[last].log_softmax(-1)
        assert reported.token == pytest.approx(logs[token].item())
        assert [token for token, _ in reported.likeliest] == logs.topk(3).indices.tolist()
    assert (
        engine.generate_all([b"q"], Sampling(max_tokens=2, logprobs=0))[0].logprobs[0].likeliest
        == ()
    )


def test_log_probabilities_at_the_temperature():
    """Each sequence has its own, next to one that asks for the model's."""
    engine, model = engine_of(random_table(), stop_ids=[])
    asked = [
        Sampling(temperature=warm, top_k=3, max_tokens=4, logprobs=2, tempered_logprobs=tempered)
        for warm, tempered in ((0.3, True), (1.7, True), (0.3, False))
    ]
    for sampling, found in zip(asked, engine.generate_all([b"q"] * 3, asked), strict=True):
        divisor = sampling.temperature if sampling.tempered_logprobs else 1.0
        for last, token, reported in zip(
            [ord("q"), *found.tokens[:-1]], found.tokens, found.logprobs, strict=True
        ):
            logs = (model.table[last] / divisor).log_softmax(-1)
            assert reported.token == pytest.approx(logs[token].item(), abs=1e-5)
            assert [value for _, value in reported.likeliest] == pytest.approx(
                logs.topk(2).values.tolist(), abs=1e-5
            )
    with pytest.raises(ConfigError, match="above 0 with tempered_logprobs"):
        Sampling(temperature=0, tempered_logprobs=True)


def test_settings_that_change_what_is_drawn():
    assert Sampling(temperature=0.3, seed=4, max_tokens=9, stop=("a",), logprobs=1).filters() == {}
    every = {
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "min_tokens": 2,
        "frequency_penalty": 1.0,
        "presence_penalty": -1.0,
        "repetition_penalty": 1.2,
        "logit_bias": {3: 1.0},
        "json_schema": "{}",
    }
    for name, value in every.items():
        assert Sampling(**{name: value}).filters() == {name: value}
    neutral = {"temperature", "seed", "max_tokens", "stop", "logprobs", "tempered_logprobs"}
    assert {one.name for one in dataclasses.fields(Sampling)} == neutral | set(every), (
        "does the new one change it?"
    )


def test_an_iterator_that_is_left_frees_the_engine():
    engine, _ = engine_of(random_table(), stop_ids=[])
    events = engine.generate([b"a"] * 5, Sampling(max_tokens=9))
    next(events)
    with pytest.raises(ConfigError, match="has other sequences"):
        next(engine.generate([b"b"]))
    events.close()
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    assert len(engine.generate_all([b"b"], Sampling(max_tokens=3))[0].tokens) == 3


def test_what_cannot_be_written_is_refused():
    engine, _ = writer("abc")
    with pytest.raises(ConfigError, match="prompt is empty"):
        engine.submit([])
    with pytest.raises(ConfigError, match="64 tokens, but the context of 64"):
        engine.submit(b"a" * 64)
    with pytest.raises(ConfigError, match=r"id 999.*model's.*259"):
        engine.submit([1, 999])
    with pytest.raises(ConfigError, match="2 prompts have 1 sampling settings"):
        engine.generate_all([b"a", b"b"], [Sampling()])
    with pytest.raises(ConfigError, match="slots must be at least 1, got 0"):
        writer("abc", slots=0)
    with pytest.raises(ConfigError, match="context_length must be at least 2, got 1"):
        writer("abc", context_length=1)


def test_temperature_zero_beside_others_is_exact():
    engine, _ = engine_of(random_table(), stop_ids=[])
    [greedy, _] = engine.generate_all([b"a", b"a"], [GREEDY, Sampling()])
    last, expected = ord("a"), []
    table = random_table()
    table[:, [256, 257, 258]] = -math.inf
    for _ in range(40):
        last = int(table[last].argmax())
        expected.append(last)
    assert list(greedy.tokens) == expected
