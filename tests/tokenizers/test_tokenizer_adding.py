"""Control entries behind all others: ids keep their meaning, text its ids, and transformers
agrees.
"""

import json

import pytest

from makers.processes import call_penstock
from makers.tokenizers import tiny_tokenizer
from penstock import load_tokenizer
from penstock.core.errors import ConfigError, OutputError, TokenizerError
from penstock.tokenizers import add_tokens
from penstock.tokenizers.extension import difference

TEXT = "the [NLU] cat <extra_id_1> sat on 12 mats"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adding") / "base"
    return tiny_tokenizer(folder, ["the cat sat on the mat"] * 20, 290)


def test_old_ids_and_texts_stay(base, tmp_path):
    made = add_tokens(base, ["[NLU]"], sentinels=3, output=tmp_path / "made")
    names = ["[NLU]", "<extra_id_0>", "<extra_id_1>", "<extra_id_2>"]
    first = base.vocab_size
    assert {name: made.special_tokens[name] for name in names} == {
        n: first + i for i, n in enumerate(names)
    }
    assert made.vocab_size == first + 4
    assert made.encode(TEXT).tolist() == base.encode(TEXT).tolist()
    assert first + 2 in made.encode(TEXT, allow_control=True).tolist()
    assert (made.bos_id, made.eos_id, made.pad_id) == (base.bos_id, base.eos_id, base.pad_id)
    assert difference(base, made) is None
    assert "fewer than" in difference(made, base)
    assert load_tokenizer(tmp_path / "made").fingerprint == made.fingerprint != base.fingerprint


def test_transformers_loads_it(base, tmp_path):
    transformers = pytest.importorskip("transformers")
    made = add_tokens(base, ["[NLU]"], sentinels=2, output=tmp_path / "made")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "made"))
    assert theirs.convert_tokens_to_ids(["[NLU]", "<extra_id_1>"]) == [
        base.vocab_size,
        base.vocab_size + 2,
    ]
    assert len(theirs) == made.vocab_size
    assert theirs(TEXT)["input_ids"] == made.encode(TEXT, allow_control=True).tolist()


def test_sentinels_that_are_there_count(base):
    once = add_tokens(base, sentinels=2)
    assert add_tokens(once, sentinels=5).vocab_size == base.vocab_size + 5


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "expected: new control entries"),
        (["[A]", "[A]"], "expected: new control entries, each once"),
        ([""], "expected: new control entries"),
        (["<|bos|>"], r"has '<\|bos\|>' already, as id 0"),
        (["the"], "has 'the' already"),
    ],
)
def test_entries_that_cannot_be_added(base, tokens, message):
    with pytest.raises(ConfigError, match=message):
        add_tokens(base, tokens)


def test_a_folder_in_use_stays(base, tmp_path):
    add_tokens(base, ["[A]"], output=tmp_path)
    before = (tmp_path / "tokenizer.json").read_bytes()
    with pytest.raises(OutputError, match="exists already"):
        add_tokens(base, ["[B]"], output=tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == before


def test_the_verb(base, tmp_path):
    base.save(tmp_path / "base")
    words = ("--token", "[NLU]", "--sentinels", 2, "--output", tmp_path / "made", "--json")
    result = call_penstock("tokenizer", "add", tmp_path / "base", *words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["special_tokens"]["<extra_id_1>"] == base.vocab_size + 2


@pytest.mark.real_data
@pytest.mark.parametrize(
    "name", ["hf/gpt2", "hf/t5-small", "hf/bert-base-uncased", "hf/phi-3-mini"]
)
def test_real_tokenizers(real_data, name):
    base = load_tokenizer(real_data / "tokenizers" / name)
    made = add_tokens(base, ["[NLU]"], sentinels=120)
    assert made.special_tokens["[NLU]"] == base.vocab_size
    assert made.encode(TEXT).tolist() == base.encode(TEXT).tolist()


@pytest.mark.real_data
def test_other_formats_are_refused(real_data):
    with pytest.raises(TokenizerError, match=r"entries.*added.*tokenizer\.json"):
        add_tokens(real_data / "tokenizers" / "tiktoken" / "r50k_base.tiktoken", ["[A]"])
