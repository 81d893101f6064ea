"""Penalties, biases and JSON schemas: what they change, and that they change no other sequence."""

import json
import threading
from collections import Counter
from collections.abc import Collection
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.models import tiny_model
from makers.tokenizers import byte_tokenizer, tiny_tokenizer
from patience import PATIENCE_SECONDS
from penstock.core.errors import ConfigError, MissingExtraError
from penstock.learn.generation import Engine, Sampling, grammar
from penstock.learn.generation.grammar import Grammars
from penstock.learn.generation.sampling import Changes, change

TOKENIZER = byte_tokenizer("<bos>", "<end>")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["a", "ü", 3]},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxItems": 3,
        },
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
TEXT = json.dumps(SCHEMA)


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = tiny_model(TOKENIZER.vocab_size, seed=3, init_std=0.3).eval()
    return Engine(model, TOKENIZER, context_length=256, stop_ids=[257], slots=4)


tokens = st.integers(0, 9)


def changed(
    logits: torch.Tensor, sampling: Sampling, counts: Any, seen: Collection[int] = ()
) -> None:
    """The second row of two, of which the first stays as it is."""
    rows, changes = torch.stack([logits, logits]), Changes(len(logits))
    changes.add(1, sampling, counts, seen)
    change(rows, changes.parts())
    assert torch.equal(rows[0], logits)
    logits.copy_(rows[1])


@settings(deadline=None)
@given(
    st.lists(tokens, max_size=20),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.dictionaries(tokens, st.floats(-100, 100), max_size=4),
)
def test_penalties_are_those_of_the_formula(chosen, frequency, presence, bias) -> None:
    sampling = Sampling(frequency_penalty=frequency, presence_penalty=presence, logit_bias=bias)
    logits = torch.linspace(-1, 1, 10, dtype=torch.float64)
    due = [
        float(logits[token])
        + bias.get(token, 0)
        - chosen.count(token) * frequency
        - (token in chosen) * presence
        for token in range(10)
    ]
    changed(logits, sampling, Counter(chosen))
    torch.testing.assert_close(logits, torch.tensor(due, dtype=torch.float64))


def test_penalties_and_biases_choose_otherwise(engine: Engine) -> None:
    """Greedy, in one batch with a sequence that has none."""
    prompt = list(b"once upon")
    plain = Sampling(temperature=0, max_tokens=24, logprobs=0)
    [free] = engine.generate_all([prompt], plain)
    repeated = Counter(free.tokens).most_common(1)[0]
    assert repeated[1] > 3
    others = [
        Sampling(temperature=0, max_tokens=24, logprobs=0, presence_penalty=50.0),
        Sampling(temperature=0, max_tokens=24, frequency_penalty=50.0),
        Sampling(temperature=0, max_tokens=5, logit_bias={120: 100.0}),
        plain,
    ]
    present, frequent, biased, same = engine.generate_all([prompt] * 4, others)
    assert len(set(present.tokens)) == len(present.tokens)
    assert max(Counter(frequent.tokens).values()) == 1
    assert biased.text == "xxxxx"
    assert same.tokens == free.tokens
    # The model's own log-probabilities: nothing is subtracted.
    assert present.logprobs[0].token == pytest.approx(free.logprobs[0].token, abs=1e-4)


def test_the_prompt_does_not_count(engine: Engine) -> None:
    prompt = list(b"once upon")
    first = engine.generate_all([prompt], Sampling(temperature=0, max_tokens=1))[0].tokens
    again = Sampling(temperature=0, max_tokens=1, presence_penalty=50.0)
    assert engine.generate_all([[*first, *prompt]], again)[0].tokens == (
        engine.generate_all([[*first, *prompt]], Sampling(temperature=0, max_tokens=1))[0].tokens
    )


@pytest.mark.parametrize("temperature", [0, 1.0, 3.0])
def test_texts_meet_their_schema(engine: Engine, temperature: float) -> None:
    """Of a random model, which would write anything; a free sequence of the same batch is
    untouched.
    """
    free = Sampling(temperature=temperature, max_tokens=40, seed=5)
    bound = [
        Sampling(temperature=temperature, max_tokens=200, seed=seed, json_schema=TEXT)
        for seed in range(6)
    ]
    alone = engine.generate_all([[65]], [free])[0]
    *found, untouched = engine.generate_all([[65]] * 7, [*bound, free])
    assert untouched == alone
    for each in found:
        assert each.finish_reason == "stop"
        jsonschema.validate(json.loads(each.text), SCHEMA)
    if temperature == 1.0:
        assert len({each.text for each in found}) > 1


def test_a_text_that_is_cut_is_a_beginning(engine: Engine) -> None:
    [found] = engine.generate_all([[65]], Sampling(max_tokens=7, min_tokens=7, json_schema=TEXT))
    assert found.finish_reason == "length"
    assert found.text.startswith('{"name"')


def test_a_complete_text_ends_whatever_min_tokens_says(engine: Engine) -> None:
    schema = json.dumps({"enum": [True]})
    [found] = engine.generate_all(
        [[65]], Sampling(max_tokens=50, min_tokens=50, json_schema=schema)
    )
    assert (found.text, found.finish_reason) == ("true", "stop")


def test_without_stop_ids() -> None:
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer.vocab_size, seed=3).eval()
    engine = Engine(model, tokenizer, context_length=128)
    [found] = engine.generate_all(
        [[65]], Sampling(max_tokens=100, json_schema='{"type": "boolean"}')
    )
    assert found.text in ("true", "false")


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be -100 to 100, got nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be 0.01 to 100, got 0.0"),
        ({"presence_penalty": float("inf")}, "presence_penalty must be -100 to 100, got inf"),
        ({"logit_bias": {-1: 1.0}}, "an id of logit_bias must be a whole number of 0 or more"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias of id 1 must be -100 to 100, got inf"),
        ({"json_schema": "{"}, "json_schema is not valid JSON"),
        ({"json_schema": "[]"}, "json_schema must be a JSON object"),
    ],
)
def test_settings_that_make_no_sense(given, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        Sampling(**given)


def test_what_an_engine_refuses(engine: Engine, tmp_path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match="id 258 is not in the model's vocabulary"):
        engine.submit([65], Sampling(logit_bias={258: 1.0}))
    with pytest.raises(ConfigError, match="json_schema: Invalid type: strin"):
        engine.submit([65], Sampling(json_schema='{"type": "strin"}'))
    assert engine.num_waiting == 0
    words = tiny_tokenizer(tmp_path / "words", ["some words"], 300)
    cut = _without(TOKENIZER.byte_table, b"{7")
    monkeypatch.setattr(type(words), "byte_table", property(lambda _: cut))
    with pytest.raises(ConfigError, match=r"token.*2.*33.*bytes.*b'7'"):
        Grammars(words, ())
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"penstock\[serve\]"):
        Grammars(TOKENIZER, ())


def _without(table, lost: bytes):
    return type(table)([None if table[token] in {bytes([one]) for one in lost} else table[token]
                        for token in range(len(table))])  # fmt: skip


NEVER = b"\xc0\xc1" + bytes(range(0xF5, 0x100))
"""Bytes that UTF-8 never has."""


@pytest.mark.parametrize(
    "lost",
    [
        b"\x04\x06\x13\x14\x16\x1d\xf1\xf2" + NEVER,
        bytes(range(0x20)) + b"\x7f" + NEVER,
        bytes(range(0x80, 0x100)),
        b"~^QXZ" + bytes(range(0x80, 0xC0)),
        # Where a character of 0xF0 can begin, and not go on.
        bytes(range(0x90, 0xC0)),
    ],
    ids=["SmolLM2", "no controls", "ASCII", "no continuations", "few continuations"],
)
def test_json_by_tokenizers_without_all_bytes(lost: bytes, monkeypatch) -> None:
    """As of byte-level BPE whose alphabet is that of the texts it learned from. The model likes
    other bytes most.
    """
    tokenizer = byte_tokenizer("<bos>", "<end>")
    cut = _without(tokenizer.byte_table, lost)
    monkeypatch.setattr(type(tokenizer), "byte_table", property(lambda _: cut))
    model = tiny_model(tokenizer.vocab_size, seed=3, init_std=0.3).eval()
    engine = Engine(model, tokenizer, context_length=256, stop_ids=[257], slots=8)
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 1, "maxLength": 9}},
        "required": ["text"],
        "additionalProperties": False,
    }
    likes = dict.fromkeys([*range(0xC2, 0xC5), 0xE1, 0xF0, 0xF1, 0xF4], 6.0)
    bound = [
        Sampling(max_tokens=100, seed=seed, json_schema=json.dumps(schema), logit_bias=likes)
        for seed in range(8)
    ]
    for found in engine.generate_all([[65]] * 8, bound):
        assert found.finish_reason == "stop"
        jsonschema.validate(json.loads(found.text), schema)
        assert not set(found.text.encode()) & set(lost)


@pytest.mark.parametrize(
    "schema", [{"const": ["x", {"ö": 1}]}, {"enum": ["ö"]}, {"properties": {"ö": {}}}]
)
def test_texts_of_the_schema_that_the_tokenizer_cannot_spell(schema, monkeypatch) -> None:
    tokenizer = byte_tokenizer("<bos>", "<end>")
    cut = _without(tokenizer.byte_table, "ö".encode()[:1])
    monkeypatch.setattr(type(tokenizer), "byte_table", property(lambda _: cut))
    grammars = Grammars(tokenizer, [257])
    with pytest.raises(ConfigError, match=r"token.*'ö'.*schema's.*'ö'.*needs"):
        grammars.constraint(json.dumps(schema))
    # A property of that name is no text of the schema.
    grammars.constraint(json.dumps({"properties": {"const": {"type": "string"}}, "title": "ö"}))


def _deep(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {
            "type": "array",
            "items": {"anyOf": [{"type": "object", "properties": {"a": schema}}, {}]},
        }
    return schema


@pytest.mark.parametrize(
    ("schema", "cause"),
    [
        ({"properties": {f"p{i}": {} for i in range(5001)}}, "more than 5,000 properties"),
        (
            {
                "$defs": {
                    str(j): {"properties": {f"p{i}": {} for i in range(51)}} for j in range(100)
                }
            },
            "5,000 properties",
        ),
        ({"anyOf": [{"const": i} for i in range(10_001)]}, "more than 10,000 schemas within it"),
        (_deep(11), "objects in more than 10 levels"),
        (
            {"items": {"type": "integer", "multipleOf": 999983}},
            "multipleOf is 999983, at most 10,000",
        ),
    ],
)
def test_schemas_that_are_too_large_are_refused_at_sight(schema, cause, monkeypatch) -> None:
    grammars = Grammars(TOKENIZER, [257])
    monkeypatch.setattr(grammars, "_library", None)
    with pytest.raises(ConfigError, match=cause):
        grammars.constraint(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "cause"),
    [
        ({"$ref": "#"}, "no text meets the schema"),
        ({"properties": {f"p{i}": {} for i in range(700)}, "type": "object"}, "too complex"),
    ],
)
def test_schemas_that_llguidance_gives_up_end_their_own_text(engine: Engine, schema, cause) -> None:
    with pytest.raises(ConfigError, match=cause):
        engine.generate_all([[65]], Sampling(max_tokens=40, temperature=0, logit_bias={125: -100},
                                             json_schema=json.dumps(schema)))  # fmt: skip
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    assert engine.generate_all([[65]], Sampling(max_tokens=2))


def test_a_deep_schema_is_fine(engine: Engine) -> None:
    engine.grammars.constraint(json.dumps(_deep(10)))
    for divisor in (500_000, 0.01, 1e-05):
        engine.grammars.constraint(json.dumps({"type": "number", "multipleOf": divisor}))


def test_a_search_that_takes_long_holds_up_no_other_sequence(engine: Engine, monkeypatch) -> None:
    """The search for what comes after the third token blocks until the other sequence has ended."""
    free, counted, look = threading.Event(), [], grammar.look

    def slow(*given):
        counted.append(1)
        assert len(counted) != 3 or free.wait(PATIENCE_SECONDS)
        return look(*given)

    sampling = Sampling(max_tokens=200, seed=3, json_schema=TEXT)
    due = engine.generate_all([[65]], sampling)[0]
    monkeypatch.setattr(grammar, "look", slow)
    bound, other = engine.submit([65], sampling), engine.submit([66], Sampling(max_tokens=30))
    events = []
    while engine.num_running or engine.num_waiting:
        events += engine.step()
        if engine.num_running == 1:
            free.set()
    ends = [event.sequence for event in events if event.finish_reason]
    assert ends == [other, bound]
    assert tuple(event.token for event in events if event.sequence == bound) == due.tokens


def test_a_search_that_took_too_long_ends_its_text(engine: Engine, monkeypatch) -> None:
    monkeypatch.setattr(grammar, "LONGEST_STEP", -1.0)
    with pytest.raises(ConfigError, match="too complex: a token took"):
        engine.generate_all([[65]], Sampling(max_tokens=20, json_schema='{"type": "string"}'))
    assert engine.num_running == 0


def test_a_schema_is_compiled_once_while_someone_holds_it(engine: Engine, monkeypatch) -> None:
    held = engine.grammars.compile(TEXT)
    monkeypatch.setattr(engine.grammars, "_library", None)
    assert engine.grammars.compile(TEXT) is held
    assert engine.generate_all([[65]], Sampling(max_tokens=5, json_schema=TEXT))[0].text.startswith(
        '{"nam'
    )


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    """Over the prompt and the text."""
    from transformers import RepetitionPenaltyLogitsProcessor

    ids, logits = [3, 1, 1, 5], torch.linspace(-1, 1, 10)
    due = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), logits[None].clone())[0]
    changed(logits, Sampling(repetition_penalty=penalty), {}, set(ids))
    torch.testing.assert_close(logits, due, rtol=0, atol=0)


def test_the_repetition_penalty_counts_prompt_and_text(engine: Engine) -> None:
    prompt = list(b"once upon")
    free = engine.generate_all([prompt], Sampling(temperature=0, max_tokens=24))[0]
    bound = engine.generate_all(
        [prompt], Sampling(temperature=0, max_tokens=24, repetition_penalty=100.0)
    )[0]
    assert len(set(bound.tokens)) > len(set(free.tokens))
    again = [*prompt, *free.tokens[:1]]
    first = engine.generate_all(
        [again], Sampling(temperature=0, max_tokens=1, repetition_penalty=100.0)
    )[0].tokens[0]
    assert first not in again
