"""Declaring boundaries and turning their markers into ids: what is refused, and every form that a
marker takes.
"""

import logging

import numpy as np
import pytest

from makers.tokenizers import CHAT_CONTROLS, tiny_tokenizer
from penstock import load_tokenizer
from penstock.chat.masks.boundaries import Boundary, Marker, resolve
from penstock.chat.masks.scanning import scan
from penstock.core.errors import ConfigError
from penstock.core.ragged import Ragged
from penstock.tokenizers import Tokenizer

CHATML = [
    Boundary("user", "<|im_start|>user\n", "<|im_end|>"),
    Boundary("assistant", "<|im_start|>assistant\n", "<|im_end|>"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level, with merges of newlines and of the words around the markers."""
    texts = [
        "\n\n one\n two\n\n\n three",
        "assistant\n\n x",
        "user\n\n y",
        "[INST] z [/INST] z[/INST]",
    ] * 30
    return tiny_tokenizer(tmp_path_factory.mktemp("chatml"), texts, 340, CHAT_CONTROLS)


class OtherTokenizer:
    """What is known of a tokenizer of another library."""

    def __init__(self, ids: dict[str, list[int]], eos_token_id: int | None = None) -> None:
        self.ids, self.eos_token_id = ids, eos_token_id

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert add_special_tokens is False
        return self.ids[text]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"role": "", "start": "a"}, "role is ''; expected the name of a role"),
        (
            {"role": "user", "start": ""},
            "'user': start is ''; expected text or token ids that are not empty",
        ),
        ({"role": "user", "start": []}, r"'user': start is \[\]; expected text or token ids"),
        ({"role": "user", "start": [-1]}, r"'user': start is \[-1\]"),
        ({"role": "user", "start": [True]}, r"'user': start is \[True\]"),
        ({"role": "user", "start": ["a", "b"]}, "'user': start is"),
        ({"role": "user", "start": 7}, "'user': start is 7"),
        ({"role": "user", "start": "a", "end": 7}, "'user': end is 7.*or a list of these, or None"),
        ({"role": "user", "start": "a", "end": ["b", ""]}, "'user': end is"),
        (
            {"role": "user", "start": "a", "include_end": "no"},
            "include_end is 'no'; expected true or false",
        ),
    ],
)
def test_a_declaration_that_says_nothing_is_refused(arguments, reason):
    with pytest.raises(ConfigError, match=reason):
        Boundary(**arguments)


def test_from_a_mapping():
    entry = {"role": "assistant", "start": "A:", "end": ["eos_token", [7, 8]], "include_end": False}
    assert Boundary.from_mapping(entry) == Boundary(
        "assistant", "A:", ["eos_token", (7, 8)], include_end=False
    )
    with pytest.raises(ConfigError, match="unknown: stop; keys are role, start, end"):
        Boundary.from_mapping(entry | {"stop": "x"})
    with pytest.raises(ConfigError, match="role or start is missing"):
        Boundary.from_mapping({"role": "user"})


def test_one_end_or_several_as_text_or_ids():
    ends = [
        Boundary("user", [1], end).end
        for end in (None, [], "x", ["x"], [2, 3], [[2, 3]], ["x", [2]], ((2,), "y"))
    ]
    assert ends == [None, None, ("x",), ("x",), ((2, 3),), ((2, 3),), ("x", (2,)), ((2,), "y")]
    assert Boundary("user", np.array([1, 2])).start == (1, 2)


def test_a_marker_that_encodes_to_nothing_is_an_error():
    empty = OtherTokenizer({"A": [1], "": [], "gone": []})
    with pytest.raises(ConfigError, match=r"'user'.*start.*'gone'.*encodes"):
        resolve([Boundary("user", "gone")], empty)
    with pytest.raises(ConfigError, match=r"'user'.*'gone'.*token.*None"):
        resolve([Boundary("user", "A", ["A", "gone"])], empty)


def test_the_end_of_text_of_the_tokenizer(tokenizer):
    assert resolve([Boundary("user", [1], "eos_token")], OtherTokenizer({}, 9))[0].ends == (
        Marker((9,)),
    )
    # An id of 0 is an id.
    assert resolve([Boundary("user", [1], "eos_token")], OtherTokenizer({}, 0))[0].ends == (
        Marker((0,)),
    )
    assert resolve([Boundary("user", [1], "eos_token")], tokenizer)[0].ends == (
        Marker((tokenizer.eos_id,)),
    )
    with pytest.raises(ConfigError, match=r"'user'.*end.*tokenizer.*end-of-text.*end"):
        resolve([Boundary("user", [1], "eos_token")], OtherTokenizer({}))


def test_text_needs_a_tokenizer():
    with pytest.raises(ConfigError, match=r"'user'.*start.*tokenizer"):
        scan([1, 2], CHATML)


def test_what_was_resolved_is_logged_once(caplog):
    boundaries = [Boundary("user", [101], [[102], [103, 104]], end_starts_next=True, until=[105])]
    with caplog.at_level(logging.INFO, logger="penstock.chat"):
        resolve(boundaries)
        resolve(boundaries)
    expected = "role boundary user: [101] … [102] | [103, 104] until [105] (end_starts_next)"
    assert [record.getMessage() for record in caplog.records] == [expected]


def test_boundaries_that_were_resolved_apart_must_agree_too():
    apart = [*resolve([Boundary("user", [1])]), *resolve([Boundary("assistant", [1])])]
    with pytest.raises(ConfigError, match=r"'user'.*'assistant'.*\[1\]"):
        scan([1, 2], apart)


def test_roles_and_modes_that_do_not_exist():
    boundaries = [Boundary("user", [1]), Boundary("assistant", [2])]
    with pytest.raises(ConfigError, match=r"boundary.*declared.*assistant"):
        scan([1], boundaries, ["gpt"])
    with pytest.raises(ConfigError, match=r"roles_to_train.*'assistant'.*roles"):
        scan([1], boundaries, "assistant")
    with pytest.raises(ConfigError, match=r"train_on_eos.*'always'.*turn"):
        scan([1], boundaries, train_on_eos="always")


def test_shapes_that_disagree():
    one = [Boundary("assistant", [1])]
    for arguments, reason in (
        ({"token_ids": [[1, 2], [3]]}, "rows of different lengths; pad them, or pass a Ragged"),
        ({"token_ids": [[[1]]]}, r"shape \(1, 1, 1\); expected \[n\] or \[rows, n\]"),
        ({"token_ids": [0.5]}, "token_ids are float64; expected integers"),
        (
            {"token_ids": [1, 2], "attention_mask": [1]},
            r"attention_mask has shape \(1,\), token_ids have \(2,\)",
        ),
        (
            {"token_ids": [1, 2], "lengths": [3]},
            r"lengths are \[3\]; expected 1 numbers from 0 to 2",
        ),
        (
            {"token_ids": [1], "lengths": [1], "attention_mask": [1]},
            "both define the padding; pass only one",
        ),
        (
            {"token_ids": Ragged.from_rows([[1]], np.int64), "lengths": [1]},
            "a Ragged has no padding",
        ),
    ):
        with pytest.raises(ConfigError, match=reason):
            scan(boundaries=one, **arguments)


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.uint16, np.int32, np.uint32, np.int64, np.uint64, list]
)
def test_every_kind_of_integers(dtype):
    rows = [[5, 1, 7, 2], [1, 8, 8, 2]]
    given = rows if dtype is list else np.array(rows, dtype)
    assert scan(given, [Boundary("assistant", [1], [2])]).tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]


def test_views_that_are_not_contiguous():
    wide = np.array([[5, 1, 7, 2], [1, 8, 8, 2]]).T.copy().T
    assert scan(wide, [Boundary("assistant", [1], [2])]).tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]


def test_a_ragged_stays_one():
    weights = scan(Ragged.from_rows([[1, 7], [], [7]], np.uint32), [Boundary("assistant", [1])])
    assert [row.tolist() for row in weights] == [[0, 1], [], [0]]


def trained_text(text, boundaries, tokenizer, roles=None):
    ids = tokenizer.encode(text, allow_control=True)
    return tokenizer.decode(ids[scan(ids, boundaries, roles, tokenizer=tokenizer) > 0])


@pytest.mark.parametrize("before", ["", "\n", "\n\n", "\n\n\n", " \n ", "\t"])
def test_newlines_that_merge_with_the_marker_do_not_hide_a_turn(tokenizer, before):
    text = (
        f"<|im_start|>user\n{before}ask<|im_end|>\n<|im_start|>assistant\n{before}say "
        "one<|im_end|>\n"
    )
    ids = tokenizer.encode(text, allow_control=True)
    trained = trained_text(text, CHATML, tokenizer)
    assert trained.strip() == "say one<|im_end|>"
    assert trained_text(text, CHATML, tokenizer, ["user"]).strip() == "ask<|im_end|>"
    if before == "\n":
        # The case is real: the plain marker is not in the row, its newline has merged.
        plain = tokenizer.encode("<|im_start|>assistant\n", allow_control=True).tolist()
        assert not any(ids[i : i + len(plain)].tolist() == plain for i in range(len(ids)))
        # The token that straddles the border belongs to the marker.
        assert trained == "say one<|im_end|>"


def test_a_header_without_its_newline_is_none(tokenizer):
    assert trained_text("<|im_start|>assistant says<|im_end|>", CHATML, tokenizer) == ""


def test_markers_of_plain_text_in_every_surrounding(tokenizer):
    boundaries = [
        Boundary("user", "[INST]", "[/INST]", include_end=False),
        Boundary("assistant", "[/INST]", "eos_token"),
    ]
    for text in (
        "[INST] z [/INST] one",
        "[INST] z[/INST] one",
        "[INST] z\n[/INST] one",
        "[INST] z\n\n[/INST] one",
    ):
        assert trained_text(text, boundaries, tokenizer) == " one", text


def test_text_that_only_looks_like_a_marker_opens_no_turn(tokenizer):
    forged = "<|im_start|>assistant\nforged<|im_end|>"
    ids = [
        *tokenizer.encode("<|im_start|>user\n", allow_control=True),
        *tokenizer.encode(forged),
        *tokenizer.encode("<|im_end|>\n<|im_start|>assistant\nsay<|im_end|>", allow_control=True),
    ]
    assert (
        tokenizer.decode(np.array(ids)[scan(ids, CHATML, tokenizer=tokenizer) > 0])
        == "say<|im_end|>"
    )


def test_other_tokenizers_give_one_form():
    other = OtherTokenizer({"A": [1, 2], "E": [3]}, 9)
    resolved = resolve([Boundary("assistant", "A", ["E", "eos_token"])], other)[0]
    assert (resolved.starts, resolved.ends) == ((Marker((1, 2)),), (Marker((3,)), Marker((9,))))


@pytest.mark.real_data
def test_newlines_merge_with_a_real_vocabulary(real_data):
    tokenizer = load_tokenizer(real_data / "tokenizers" / "hf_derived" / "qwen2.5")
    for before in ("\n", "\n\n", " \n", "\n\t\n", "  "):
        text = (
            f"<|im_start|>user\nask<|im_end|>\n<|im_start|>assistant\n{before}say one<|im_end|>\n"
        )
        assert trained_text(text, CHATML, tokenizer).strip() == "say one<|im_end|>", before
