"""Penalties, biases and JSON schemas: what they change, and that they change no other sequence."""

import json
from collections import Counter

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.models import tiny_model
from makers.tokenizers import byte_tokenizer, tiny_tokenizer
from penstock.core.errors import ConfigError, MissingExtraError
from penstock.generation import Engine, Sampling
from penstock.generation.grammar import Grammars
from penstock.generation.sampling import change

TOKENIZER = byte_tokenizer("<bos>", "<end>")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["a", "ü", 3]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
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
        float(logits[token]) + bias.get(token, 0) - chosen.count(token) * frequency - (token in chosen) * presence
        for token in range(10)
    ]
    change(logits, sampling, Counter(chosen))
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
    """Of a random model, which would write anything; a free sequence of the same batch is untouched."""
    free = Sampling(temperature=temperature, max_tokens=40, seed=5)
    bound = [Sampling(temperature=temperature, max_tokens=200, seed=seed, json_schema=TEXT) for seed in range(6)]
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
    [found] = engine.generate_all([[65]], Sampling(max_tokens=50, min_tokens=50, json_schema=schema))
    assert (found.text, found.finish_reason) == ("true", "stop")


def test_without_stop_ids() -> None:
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer.vocab_size, seed=3).eval()
    engine = Engine(model, tokenizer, context_length=128)
    [found] = engine.generate_all([[65]], Sampling(max_tokens=100, json_schema='{"type": "boolean"}'))
    assert found.text in ("true", "false")


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be -100 to 100, got nan"),
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
    cut = _cut(TOKENIZER.byte_table)
    monkeypatch.setattr(type(words), "byte_table", property(lambda _: cut))
    with pytest.raises(ConfigError, match=r"no token for 1 of the 256 bytes, such as b'\\x00'"):
        Grammars(words, ())
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"penstock\[serve\]"):
        Grammars(TOKENIZER, ())


def _cut(table):
    return type(table)([None, *(table[token] for token in range(1, len(table)))])
