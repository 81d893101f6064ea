"""Added entries that tokenizer_config.json lists: transformers, which reads both files, gives the
same ids.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from makers.tokenizers import tiny_tokenizer
from penstock import load_tokenizer
from penstock.core.errors import TokenizerError
from penstock.tokenizers import Tokenizer

transformers = pytest.importorskip("transformers")

TEXTS = ("<a>hi <b>", " x <a>  the <b>\n the<b><a>", "the cat <c> sat<a>", "mat dog, dogs")
FLAGS = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(
        tmp_path_factory.mktemp("config") / "base", ["the cat sat on the mat"] * 20, 290
    )


def write(
    folder: Path, base: Tokenizer, added: list[dict[str, Any]], config: dict[str, Any]
) -> Path:
    content = json.loads(base.source_bytes["tokenizer.json"])
    content["added_tokens"] += added
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def entry(token_id: int, content: str, **flags: bool) -> dict[str, Any]:
    return {"id": token_id, "content": content, **FLAGS, **flags}


def decoder(*entries: dict[str, Any]) -> dict[str, Any]:
    return {
        str(e["id"]): {name: value for name, value in e.items() if name != "id"} for e in entries
    }


def assert_the_same(folder: Path) -> Tokenizer:
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, allow_control=True).tolist() == expected, text
    return ours


def test_entries_that_only_the_configuration_lists(base: Tokenizer, tmp_path: Path) -> None:
    first = base.vocab_size
    listed = decoder(entry(first + 1, "<b>", rstrip=True), entry(first, "<a>"))
    folder = write(
        tmp_path, base, [], {"added_tokens_decoder": listed, "extra_special_tokens": ["<c>", "<a>"]}
    )
    ours = assert_the_same(folder)
    assert {name: ours.special_tokens[name] - first for name in ("<a>", "<b>", "<c>")} == {
        "<a>": 0,
        "<b>": 1,
        "<c>": 2,
    }
    ours.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").fingerprint == ours.fingerprint
    text = "the <a> cat <b>"
    assert ours.encode(text).tolist() == base.encode(text).tolist(), (
        "control text is text, unless it is allowed"
    )


@pytest.mark.parametrize(
    "more", [{"image_token": "<c>", "other": "<a>"}, ["<c>"]], ids=["by name", "a list"]
)
@pytest.mark.parametrize("key", ["extra_special_tokens", "additional_special_tokens"])
def test_special_tokens_without_numbers(
    base: Tokenizer, tmp_path: Path, key: str, more: Any
) -> None:
    if isinstance(more, dict) and key.startswith("additional"):
        more = list(more.values())
    ours = assert_the_same(write(tmp_path, base, [], {key: more}))
    assert ours.special_tokens["<c>"] == base.vocab_size


flags = st.fixed_dictionaries({name: st.booleans() for name in ("lstrip", "rstrip", "special")})


@given(flags, flags, st.booleans())
def test_its_flags_replace_those_of_the_file(
    base: Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
    of_file: Any,
    of_config: Any,
    listed: bool,
) -> None:
    first = base.vocab_size
    in_file = [entry(first, "<a>", **of_file), entry(first + 1, "<b>", **of_config)]
    config = {"added_tokens_decoder": decoder(entry(first, "<a>", **of_config))} if listed else {}
    ours = assert_the_same(write(tmp_path_factory.mktemp("flags"), base, in_file, config))
    # Pointed brackets make an entry a control entry whatever the flag says; so this asks for other
    # text.
    assert "<a>" in ours.special_tokens


@pytest.mark.parametrize("special", [True, False])
def test_the_configuration_decides_what_is_content(
    base: Tokenizer, tmp_path: Path, special: bool
) -> None:
    first = base.vocab_size
    listed = {"added_tokens_decoder": decoder(entry(first, "dog", special=special))}
    folder = write(tmp_path, base, [entry(first, "dog", special=not special)], listed)
    assert ("dog" in assert_the_same(folder).special_tokens) == special


def test_a_number_that_the_entry_would_not_get_is_refused(base: Tokenizer, tmp_path: Path) -> None:
    first = base.vocab_size
    folder = write(tmp_path, base, [], {"added_tokens_decoder": decoder(entry(first + 2, "<a>"))})
    with pytest.raises(TokenizerError, match=rf"'<a>'.*{first + 2}.*become {first}.*add"):
        load_tokenizer(folder)


def test_the_file_decides_the_number_of_what_it_has(base: Tokenizer, tmp_path: Path) -> None:
    first = base.vocab_size
    folder = write(
        tmp_path,
        base,
        [entry(first, "<a>")],
        {"added_tokens_decoder": decoder(entry(first + 9, "<a>", rstrip=True))},
    )
    assert assert_the_same(folder).special_tokens["<a>"] == first
