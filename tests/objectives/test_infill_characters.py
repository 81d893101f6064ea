"""Fill-in-the-middle at characters: the text stays, also with control tokens and characters of
several tokens.
"""

import base64
import gzip
import json
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers.tokenizers import tiny_tokenizer
from penstock import load_tokenizer
from penstock.core.errors import ConfigError
from penstock.plan.objectives import Facts
from penstock.plan.objectives.character_splits import CharacterSplitter
from penstock.plan.objectives.infill import Infill

TEXT = (
    "the pump flows into the turbine,  the gate's\n\n  water: don't 12 345 def pump(x):\n\treturn "
    "x # Zürich "
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A byte-level BPE with tokens for infilling; Greek and emoji become a token a byte."""
    names = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<turn>"]
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_tokenizer(folder, [TEXT] * 20, 400, names)


@pytest.fixture(scope="module")
def byte_pairs(tmp_path_factory):
    """Bytes and four pairs, of which the first in order merges first."""
    pairs = [b"bc", b"ab", "水".encode()[2:] + b"a", b"ab" + "水".encode()[:1]]
    ranks = [bytes([byte]) for byte in range(256)] + pairs
    folder = tmp_path_factory.mktemp("pairs")
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks)]
    (folder / "t.tiktoken").write_bytes(b"".join(lines))
    names = {
        name: len(ranks) + place for place, name in enumerate(["[PREFIX]", "[MIDDLE]", "[SUFFIX]"])
    }
    (folder / "encoding.json").write_text(
        json.dumps({"pattern": r"\s+|\S+", "special_tokens": names})
    )
    return load_tokenizer(folder / "t.tiktoken")


def resolved(tokenizer, **changes):
    facts = Facts(
        where="source 'code'", tokenizer=lambda: tokenizer, sequence_length=4096, longest=4000
    )
    return Infill(**({"rate": 1, "split": "character"} | changes)).resolve(facts)


def spelled(tokenizer, ids):
    """Bytes, with control tokens as their id in a byte that text never has."""
    table = tokenizer.byte_table
    return b"".join(table[token] or b"\xff%d\xff" % token for token in np.asarray(ids).tolist())


words = st.sampled_from([*TEXT.split(), " ", "  ", "\n", "αβ", "🤦🏼\u200d♂️", "\u0301", "<turn>"])


@settings(deadline=None, max_examples=150)
@given(
    st.lists(words, min_size=1, max_size=40),
    st.integers(0, 2**64 - 1),
    st.booleans(),
    st.integers(0, 3),
)
def test_the_text_is_restored_and_the_measure_kept(tiny, parts, key, spm, cut):
    tokens = tiny.encode(" ".join(parts), allow_control=True).astype(np.int32)
    tokens = tokens[
        min(cut, len(tokens) - 1) :
    ]  # documents that are split may begin inside a character
    room = key % 9
    objective = resolved(tiny, spm_rate=int(spm), room=room)
    written = objective.write(tokens, None, key)
    measured = objective.measure(np.array([len(tokens)]), np.array([key], np.uint64))
    assert (
        measured.tolist()
        == [len(written.tokens)]
        == [len(written.weights)]
        == [len(tokens) + 3 + room]
    )
    assert spelled(tiny, objective.restore(written.tokens, len(tokens), key)) == spelled(
        tiny, tokens
    )
    pad = tiny.special_tokens["<fim_pad>"]
    assert written.weights.tolist() == [float(token != pad) for token in written.tokens]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_cuts_fall_between_the_characters_that_are_asked_for(tiny, data):
    # All of these are whole in the vocabulary's bytes, so no cut has to move.
    text = data.draw(st.text(alphabet=TEXT + "αβ水🤦", min_size=1, max_size=60))
    tokens = tiny.encode(text).astype(np.int32)
    splitter = CharacterSplitter(tiny)
    assert splitter.count(tokens) == len(text)
    first, second = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    sections = splitter.split(tokens, np.ones(len(tokens), np.float32), first, second, room=1000)
    texts = [spelled(tiny, section.ids).decode() for section in sections]
    assert texts == [text[:first], text[first:second], text[second:]]


def test_a_control_token_is_one_character_and_never_cut(tiny):
    tokens = tiny.encode("the<turn>gate", allow_control=True).astype(np.int32)
    splitter = CharacterSplitter(tiny)
    assert splitter.count(tokens) == 8
    turn = b"\xff%d\xff" % tiny.special_tokens["<turn>"]
    due = [b"th", b"e" + turn + b"ga", b"te"]
    sections = splitter.split(tokens, np.ones(len(tokens), np.float32), 2, 6, room=8)
    assert [spelled(tiny, section.ids) for section in sections] == due


def test_a_cut_without_room_moves_to_the_border_of_its_token(tiny):
    tokens = tiny.encode("the turbine").astype(np.int32)
    assert [tiny.decode([token]) for token in tokens] == ["the", " turbine"]
    objective = CharacterSplitter(tiny)
    ones = np.ones(2, np.float32)

    def cut(first, second, room):
        sections = objective.split(tokens, ones, first, second, room)
        return [tiny.decode(section.ids) for section in sections]

    assert cut(1, 6, 8) == ["t", "he tu", "rbine"]
    assert cut(1, 6, 0) == ["", "the turbine", ""]
    # One of two cuts stays where there is room for it alone.
    kept = [cut(1, 6, room) for room in range(9)]
    assert ["t", "he turbine", ""] in kept


def test_a_token_encoded_anew_weighs_as_its_last_byte_did(byte_pairs):
    tokens = byte_pairs.encode("abc").astype(np.int32)
    assert [byte_pairs.decode([token]) for token in tokens] == ["a", "bc"]
    sections = CharacterSplitter(byte_pairs).split(tokens, np.array([0.5, 2], np.float32), 2, 3, 20)
    assert [byte_pairs.decode(section.ids) for section in sections] == ["ab", "c", ""]
    assert [section.weights.tolist() for section in sections] == [[2], [2], []]


def test_windows_end_where_characters_do(byte_pairs):
    """Here a character is three tokens, and the cut token begins or ends inside one, wherever a
    window would end.
    """
    tokens = byte_pairs.encode("水" * 30 + "a" + "水" * 30).astype(np.int32)
    assert byte_pairs.byte_table[tokens[89]] == "水".encode()[2:] + b"a"
    sections = CharacterSplitter(byte_pairs).split(
        tokens, np.ones(len(tokens), np.float32), 30, 61, 20
    )
    assert [spelled(byte_pairs, s.ids).decode() for s in sections] == [
        "水" * 30,
        "a" + "水" * 30,
        "",
    ]
    tokens = byte_pairs.encode("ab" + "水" * 30).astype(np.int32)
    assert byte_pairs.byte_table[tokens[0]] == b"ab" + "水".encode()[:1]
    sections = CharacterSplitter(byte_pairs).split(
        tokens, np.ones(len(tokens), np.float32), 0, 1, 20
    )
    assert [spelled(byte_pairs, s.ids).decode() for s in sections] == ["", "a", "b" + "水" * 30]


@pytest.mark.parametrize("spm", [0, 1])
def test_only_the_middle_is_trained_when_asked(tiny, spm):
    tokens = tiny.encode(TEXT).astype(np.int32)
    for key in range(50):
        objective = resolved(tiny, spm_rate=spm, train_on_context=False)
        written = objective.write(tokens, None, key)
        trained = spelled(tiny, written.tokens[written.weights > 0]).decode()
        whole = objective.restore(written.tokens, len(tokens), key)
        assert trained in spelled(tiny, whole).decode()
        kept = np.flatnonzero(written.tokens != tiny.special_tokens["<fim_pad>"])[-1] + 1
        begin = int(np.argmax(written.weights > 0)) if trained else kept
        assert (written.weights[begin:kept] == 1).all()
        assert not written.weights[kept:].any()
        if not spm:
            assert written.tokens[begin - 1] == tiny.special_tokens["<fim_middle>"]


def test_loss_weights_go_with_their_tokens(tiny):
    tokens = tiny.encode(TEXT).astype(np.int32)
    weights = np.where(np.arange(len(tokens)) < len(tokens) // 2, 0, 2).astype(np.float32)
    text_weights = np.repeat(weights, tiny.byte_table.lengths[tokens])
    for key in range(50):
        written = resolved(tiny).write(tokens, weights, key)
        middle, suffix = (tiny.special_tokens[name] for name in ("<fim_middle>", "<fim_suffix>"))
        suffix_at, middle_at = (
            int(np.argmax(written.tokens == token)) for token in (suffix, middle)
        )
        sections = [
            (1, suffix_at),
            (middle_at + 1, len(written.tokens)),
            (suffix_at + 1, middle_at),
        ]
        at = 0
        for begin, end in sections:
            for place in range(begin, end):
                size = int(tiny.byte_table.lengths[written.tokens[place]])
                at += size
                assert written.weights[place] == (text_weights[at - 1] if size else 0)
        for place, (begin, end) in zip(
            (suffix_at, middle_at), (sections[2], sections[1]), strict=True
        ):
            inside = written.weights[begin:end]
            assert written.weights[place] == inside.max(initial=0) or not inside.any()


def test_a_tokenizer_with_a_space_before_each_text_is_cut_too(tmp_path):
    """Its pieces are encoded without that space."""
    spm = pytest.importorskip("sentencepiece")
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT.replace("\n", " ")] * 20),
        model_prefix=str(tmp_path / "m"),
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=["[PREFIX]", "[MIDDLE]", "[SUFFIX]", "<pad>"],
        pad_id=-1,
        minloglevel=2,
    )
    tokenizer = load_tokenizer(tmp_path / "m.model")
    text = " the turbine flows\ninto the water"
    tokens = tokenizer.encode(text).astype(np.int32)
    splitter = CharacterSplitter(tokenizer)
    whole = spelled(tokenizer, tokens).decode()
    for first in range(len(whole) + 1):
        sections = splitter.split(
            tokens, np.ones(len(tokens), np.float32), first, len(whole), room=20
        )
        assert spelled(tokenizer, sections[0].ids).decode() == whole[:first]
        assert spelled(tokenizer, sections[1].ids).decode() == whole[first:]
    assert resolved(tokenizer).tokens == tuple(
        tokenizer.special_tokens[n] for n in ("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "<pad>")
    )


def test_what_character_splits_need_is_said(tiny, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"'code'.*infill.*characters"):
        resolved(load_tokenizer(tmp_path))
    with pytest.raises(ConfigError, match=r"tokenizer; call resolve\(facts\) first"):
        Infill(rate=1, split="character", tokens=(1, 2, 3, 4)).write(
            np.arange(5, dtype=np.int32), None, 1
        )


def test_without_padding_in_the_vocabulary_one_must_be_named(byte_pairs):
    with pytest.raises(ConfigError, match=r"document.*padding.*fourth"):
        resolved(byte_pairs)
    named = resolved(byte_pairs, tokens=("[PREFIX]", "[MIDDLE]", "[SUFFIX]", 0))
    assert named.tokens == (
        *(byte_pairs.special_tokens[name] for name in ("[PREFIX]", "[MIDDLE]", "[SUFFIX]")),
        0,
    )


REAL = [
    ("hf_derived/qwen2.5", None),
    ("hf/gpt2", (50254, 50255, 50256, 50253)),
    ("hf/phi-3-mini", (32000, 32001, 32002, 32003)),
    ("spm/mistral-v3.model", (5, 6, 7, 2)),
]


@pytest.mark.real_data
@pytest.mark.parametrize(("name", "ids"), REAL)
def test_real_texts_keep_their_text_and_their_sections_encode_as_alone(real_data, name, ids):
    """And as the paper has it: all but 1 of 100 sections are what encoding each alone gives."""
    tokenizer = load_tokenizer(real_data / "tokenizers" / name)
    objective, splitter = resolved(tokenizer, tokens=ids), CharacterSplitter(tokenizer)
    with gzip.open(real_data / "text/code/cpython311_stdlib_sample.jsonl.gz", "rt") as lines:
        code = max(
            (value for value in json.loads(next(lines)).values() if isinstance(value, str)), key=len
        )
    texts = [code, (real_data / "text/tinyshakespeare.txt").read_text()]
    texts += [
        (real_data / f"text/tatoeba/tatoeba.{lang}-eng.{lang}").read_text()
        for lang in ("jpn", "hin", "fra")
    ]
    alike = total = 0
    for text in texts:
        for part in range(20):
            document = unicodedata.normalize("NFC", text[part * 97 : part * 97 + 900])
            tokens = tokenizer.encode(document).astype(np.int32)
            written = objective.write(tokens, None, part)
            assert len(written.tokens) == len(tokens) + 11
            assert spelled(
                tokenizer, objective.restore(written.tokens, len(tokens), part)
            ) == spelled(tokenizer, tokens)
            whole = spelled(tokenizer, tokens).decode()
            first, second = sorted(
                np.random.default_rng(part).integers(0, len(whole) + 1, 2).tolist()
            )
            sections = splitter.split(
                tokens, np.ones(len(tokens), np.float32), first, second, room=8
            )
            for section, due in zip(
                sections, (whole[:first], whole[first:second], whole[second:]), strict=True
            ):
                assert spelled(tokenizer, section.ids).decode() == due
                total += bool(due)
                alike += bool(due) and section.ids.tolist() == tokenizer.encode(due).tolist()
    if (
        tokenizer.kind == "byte-level BPE"
    ):  # the others put a space before a section that is encoded alone
        assert alike >= 0.99 * total
