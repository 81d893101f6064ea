"""Control tokens only from the template, the tokenizer's own ids, exact positions: small
vocabularies.
"""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoding_makers import CONTROLS, WORDS, add, make_variants, open_variant, train_base
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import tokenizers
from makers.tokenizers import added_token
from penstock.chat.tokens import encoding
from penstock.chat.tokens.control_text import control_text
from penstock.chat.tokens.encoding import encode_rendered, encode_rendered_batch, encode_whole
from penstock.core.errors import TokenizerError
from penstock.tokenizers import Tokenizer

NAMES = [
    "plain",
    "nfc",
    "prefix space",
    "strips",
    "space runs",
    "space runs later",
    "two passes",
    "two passes meet",
    "strips and runs",
    "single words",
    "normalized",
    "normalized strips",
    "metaspace first",
    "metaspace first strips",
    "metaspace always",
    "metaspace content",
    "prepend",
    "word piece",
    "word piece normalized",
]
SLOW = {
    "two passes meet",
    "strips and runs",
    "single words",
    "normalized",
    "normalized strips",
    "word piece normalized",
}
ODD = [
    "<",
    "|",
    ">",
    "s",
    "x",
    " ",
    "  ",
    "\n",
    "\t",
    "\x1c",
    "\x85",
    "\u2003",
    "\u3000",
    "\u200b",
    "e\u0301",
    "é",
]
ODD += ["🤦🏼\u200d♂️", "[UNK]", "wORd", "<A>"]
PIECES = st.tuples(st.sampled_from(CONTROLS * 2 + WORDS + ODD), st.booleans())
RENDERED = st.lists(PIECES, max_size=12)
slowly = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="session")
def opened(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]:
    """Ours and the tokenizers package's, by the name of the variant."""
    folder = tmp_path_factory.mktemp("encoding")
    variants = make_variants(folder / "base")
    assert list(variants) == NAMES
    return {
        name: (
            open_variant(parsed, folder / name),
            tokenizers.Tokenizer.from_str(json.dumps(parsed)),
        )
        for name, parsed in variants.items()
    }


@pytest.fixture(params=[name for name in NAMES if name != "strips and runs"])
def both(
    request: pytest.FixtureRequest, opened: dict[str, Any]
) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    pair: tuple[Tokenizer, tokenizers.Tokenizer] = opened[request.param]
    return pair


def join(pieces: list[tuple[str, bool]]) -> tuple[str, Any]:
    flags = [literal for text, literal in pieces for _ in text]
    return "".join(text for text, _ in pieces), np.array(flags, np.bool_)


def bare(control: str) -> str:
    """What normalizers leave of control text; BERT's also puts the space of "<think> " before 水."""  # noqa: E501
    return control.lower().replace("水", "").strip()


def test_which_vocabularies_are_cut(opened: dict[str, Any]) -> None:
    assert {name for name, (ours, _) in opened.items() if control_text(ours) is None} == SLOW


def encode_or_leave(tokenizer: Tokenizer, *arguments: Any, **options: Any) -> Any:
    """Leave out what is refused: BERT's normalizer writes a space before 水, so "<think> " and it
    share a character.
    """
    try:
        return encode_rendered(tokenizer, *arguments, **options)
    except TokenizerError as error:
        known = re.search("have no positions|cannot stay text", str(error))
        assume(tokenizer.name != "word piece normalized" or known is None)
        raise


@slowly
@given(pieces=RENDERED)
def test_ids_are_the_own_encoders_when_nothing_is_forged(
    both: Any, pieces: list[tuple[str, bool]]
) -> None:
    ours, own = both
    text, literal = join(pieces)
    due = own.encode(text, add_special_tokens=False).ids
    assert encode_or_leave(ours, text, np.ones(len(text), np.bool_)).ids.tolist() == due
    assert encode_or_leave(ours, text, literal, allow_forged=True).ids.tolist() == due
    encoded = encode_or_leave(ours, text, literal)
    if not encoded.forged:
        assert encoded.ids.tolist() == due


@slowly
@given(pieces=RENDERED)
def test_control_tokens_come_from_the_template_only(
    both: Any, pieces: list[tuple[str, bool]]
) -> None:
    ours, _ = both
    text, literal = join(pieces)
    encoded = encode_or_leave(ours, text, literal)
    names = {token_id: control for control, token_id in ours.special_tokens.items()}
    for token in np.flatnonzero(encoded.is_control).tolist():
        control = names[int(encoded.ids[token])]
        begin = int(encoded.begins[token])
        covered = text[begin : int(encoded.ends[token])]
        begin += len(covered) - len(covered.lstrip())
        assert literal[begin : begin + len(control.strip())].all()
        assert bare(covered) == bare(control)
    others = set(encoded.ids[~encoded.is_control].tolist())
    assert not others & (set(ours.special_tokens.values()) - {ours.unknown_id})
    for character, control in encoded.forged:
        assert bare(text[character : character + len(control)]) == bare(control)
        assert not literal[character : character + len(control)].all()


@slowly
@given(pieces=RENDERED)
def test_cutting_equals_the_way_over_the_whole_text(
    both: Any, pieces: list[tuple[str, bool]]
) -> None:
    ours, _ = both
    text, literal = join(pieces)
    try:
        whole = encode_whole(ours, text, literal)
    except TokenizerError:
        return  # refused: it could not be shown that nothing else changes
    encoded = encode_rendered(ours, text, literal)
    assert encoded.ids.tolist() == whole.ids.tolist()
    assert encoded.is_control.tolist() == whole.is_control.tolist()
    assert bool(encoded.forged) == bool(whole.forged)


@slowly
@given(pieces=RENDERED)
def test_positions_are_the_bytes_of_each_token(both: Any, pieces: list[tuple[str, bool]]) -> None:
    ours, _ = both
    text, literal = join(pieces)
    encoded = encode_rendered(ours, text, literal)
    spans = list(zip(encoded.begins.tolist(), encoded.ends.tolist(), strict=True))
    assert all(0 <= begin <= end <= len(text) for begin, end in spans)
    assert spans == sorted(spans)
    if ours.kind == "WordPiece" or ours.normalization:
        return
    touched = {place for begin, end in spans for place in range(begin, end)}
    assert touched == set(range(len(text)))
    for (_, end), (begin, _) in pairwise(spans):
        assert end - 1 <= begin <= end
    for token_id, control, (begin, end) in zip(
        encoded.ids.tolist(), encoded.is_control, spans, strict=True
    ):
        spelled = ours.byte_table[token_id]
        if not control and spelled != b" ":
            assert spelled.removeprefix(b" ") in b" " + text[begin:end].encode()


@pytest.fixture
def by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches go the way of large ones; single texts have at most a few stretches."""
    monkeypatch.setattr(encoding, "FEW", 3)


@slowly
@given(rows=st.lists(RENDERED, max_size=5))
def test_a_batch_is_its_texts_one_by_one(
    by_batch: None, both: Any, rows: list[list[tuple[str, bool]]]
) -> None:
    ours, _ = both
    texts, literals = [join(row)[0] for row in rows], [join(row)[1] for row in rows]
    for text, literal, batched in zip(
        texts, literals, encode_rendered_batch(ours, texts, literals), strict=True
    ):
        single = encode_rendered(ours, text, literal)
        for field in ("ids", "begins", "ends", "is_control"):
            assert np.array_equal(getattr(single, field), getattr(batched, field)), field
        assert single.forged == batched.forged


def test_space_that_the_tokenizers_package_encodes_twice_is_refused(opened: dict[str, Any]) -> None:
    ours, own = opened["strips and runs"]
    text = "<|s|>  hi"
    assert own.encode(text, add_special_tokens=False).offsets[:2] == [(0, 7), (5, 7)]
    with pytest.raises(TokenizerError, match=r"follow.*9.*characters.*drop"):
        encode_rendered(ours, text, np.ones(9, np.bool_))
    assert encode_rendered(ours, "<|s|> hi", np.ones(8, np.bool_)).ends.tolist()[0] == 6


def test_whitespace_goes_to_the_control_token_that_takes_it_along(opened: dict[str, Any]) -> None:
    ours, _ = opened["strips"]
    text = "<|s|> \nhi 水<|e|>"
    encoded = encode_rendered(ours, text, np.array([True] * 5 + [False] * 6 + [True] * 5))
    covered = [text[begin:end] for begin, end in zip(encoded.begins, encoded.ends, strict=True)]
    assert encoded.is_control.tolist() == [True, *[False] * (len(covered) - 2), True]
    assert covered[0] == "<|s|> \n"
    assert covered[-1] == "<|e|>"
    assert covered[1] == "hi"
    assert covered[-2].strip() == "水"


def test_a_control_token_that_only_the_config_names(opened: dict[str, Any], tmp_path: Path) -> None:
    base = train_base(tmp_path / "base")
    model = {**base["model"], "vocab": base["model"]["vocab"] | {"<|x|>": 400}}
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|x|>"}))
    ours = open_variant({**base, "model": model}, tmp_path / "named")
    literal = np.array([True] * 7 + [False] * 5)
    encoded = encode_rendered(ours, "hi<|x|><|x|>", literal)
    assert (encoded.ids == 400).tolist() == encoded.is_control.tolist()
    assert encoded.is_control.sum() == 1
    assert encoded.forged == ((7, "<|x|>"),)
    both = encode_rendered(ours, "hi<|x|><|x|>", literal, allow_forged=True)
    assert both.ids.tolist() == ours.encode("hi<|x|><|x|>", allow_control=True).tolist()


def test_texts_that_are_no_texts_are_refused(opened: dict[str, Any]) -> None:
    for name in ("plain", "single words"):
        ours, _ = opened[name]
        with pytest.raises(TokenizerError, match=r"text.*1.*2.*characters.*literal.*\(3,\)"):
            encode_rendered_batch(ours, ["", "hi"], [[], [True] * 3])
        with pytest.raises(TokenizerError, match=r"1.*texts.*literal.*0.*array"):
            encode_rendered_batch(ours, ["hi"], [])
        with pytest.raises(TokenizerError, match=r"text 0: character 1.*U\+D83E"):
            encode_rendered(ours, "a\ud83e", [True, False])
        assert encode_rendered_batch(ours, [], []) == []
        assert len(encode_rendered(ours, "", []).ids) == 0


def test_control_text_that_cannot_be_kept_out_is_refused(tmp_path: Path) -> None:
    fillers = {filler * 2: {"single_word": True} for filler in "xqzjv0"}
    ours = open_variant(add(train_base(tmp_path / "base"), fillers), tmp_path / "fillers")
    with pytest.raises(TokenizerError, match=r"'..'.*message.*tokenizer"):
        encode_rendered(ours, "00", [False, False])


def test_a_model_that_makes_control_tokens_of_text_is_refused(tmp_path: Path) -> None:
    ours = open_variant(add(train_base(tmp_path / "base"), {}), tmp_path / "leaking")
    letter = int(ours.encode("z")[0])
    base = json.loads((tmp_path / "leaking" / "tokenizer.json").read_text())
    base["added_tokens"].append(added_token("z", letter))
    leaking = open_variant(base, tmp_path / "leaking")
    assert encode_rendered(leaking, "z", [True]).ids.tolist() == [letter]
    with pytest.raises(TokenizerError, match=r"vocabulary's.*model.*ordinary"):
        encode_rendered(leaking, "az", [True, False])
