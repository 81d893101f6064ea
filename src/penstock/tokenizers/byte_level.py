"""gigatoken's encoder for a byte-level `tokenizer.json`.

gigatoken reads such a file, but wants a token for each of the 256 bytes, and ignores steps and
settings that it does not know. So here:

- **Bytes without a token** get an id above the vocabulary. SmolLM's family lacks 21, of which 13 never
  occur in UTF-8. No merge names such a byte, so its id shows wherever the byte occurs, and the text is
  left to the own encoder, which drops the byte, or writes `<unk>`.
- **Digits**, if they are cut off first, are cut off by us.
- **What gigatoken would ignore** is refused.
"""  # noqa: E501

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from penstock.core.errors import TokenizerError
from penstock.core.json_values import JsonObject
from penstock.tokenizers.digits import DigitCuts, digits
from penstock.tokenizers.fast import FastEncoder, backend_from_json
from penstock.tokenizers.spelling import is_byte_level, spell_as_characters
from penstock.tokenizers.steps import flatten

MOST_MISSING = 30
"""Bytes that may lack a token; 13 of 256 never occur in UTF-8, and control characters are rare."""

_COMMON = frozenset([*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xC0), 0xC3, 0xE2])
"""Bytes that most texts have: each must have a token, or most texts would be encoded slowly."""


def byte_level_encoder(scrubbed: JsonObject, size: int, content: Collection[str]) -> FastEncoder:
    """The fast encoder of a byte-level BPE.

    Args:
        scrubbed: A `tokenizer.json` without control entries.
        size: One more than its highest id.
        content: Its added entries that are content.

    Raises:
        TokenizerError: gigatoken does not support it; the message is its reason.
    """
    model = scrubbed["model"]
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise _refusal(f"it has a {name}, {model[name]!r}")
    cuts, rest = _cuts(scrubbed.get("pre_tokenizer"))
    if cuts is not None and any(
        digits()[[ord(c) for c in "".join(content) if ord(c) < len(digits())]]
    ):
        raise _refusal(
            f"it cuts at digits, and its added entries have some ({sorted(content)[:3]})"
        )
    # Other strings cannot come from text, and gigatoken would take their characters for bytes.
    vocabulary = {token: i for token, i in model["vocab"].items() if is_byte_level(token)}
    missing = [b for b in range(256) if spell_as_characters(bytes([b])) not in vocabulary]
    _check_missing(missing, model["merges"])
    added = {spell_as_characters(bytes([b])): size + place for place, b in enumerate(missing)}
    given = {
        **scrubbed,
        "pre_tokenizer": rest,
        "model": {**model, "vocab": {**vocabulary, **added}},
    }
    return FastEncoder(
        backend=backend_from_json(given),
        limit=size if missing else None,
        digits=cuts,
        probes=(*_probes_of_bytes(missing), *(_PROBES_OF_DIGITS if cuts is not None else ())),
    )


_PROBES_OF_DIGITS = (
    "a1b 22  333\n4 \n5",
    "it's 1's\t\t2 ",
    "x\u0663\u0301y \u00b2\u00bd\u2167 z1\u0308",
    "0",
    "",
)


def _cuts(pre_tokenizer: JsonObject | None) -> tuple[DigitCuts | None, JsonObject]:
    """The cuts at digits, and the steps that gigatoken does."""
    steps = flatten(pre_tokenizer)
    cuts = None
    if len(steps) > 1 and steps[0]["type"] == "Digits":
        cuts = DigitCuts(bool(steps.pop(0).get("individual_digits")))
    *splits, level = steps or [{"type": "nothing"}]
    spaced = level.get("add_prefix_space", True) and bool(splits or cuts)
    if level["type"] != "ByteLevel" or bool(splits) == level.get("use_regex", True) or spaced:
        raise _refusal(f"it splits text by {_shown(pre_tokenizer)}")
    if not all(map(_isolates, splits)):
        raise _refusal(f"it splits text by {_shown(pre_tokenizer)}")
    return cuts, {"type": "Sequence", "pretokenizers": steps} if splits else level


def _isolates(step: JsonObject) -> bool:
    """Whether a step splits by a regular expression, of which every match is a piece."""
    way = (step.get("behavior"), bool(step.get("invert")))
    return (
        step["type"] == "Split"
        and "Regex" in step["pattern"]
        and way in (("Isolated", False), ("Removed", True))
    )


def _shown(step: JsonObject | None) -> str:
    """The steps in a few words."""
    return (
        ", ".join(
            f"{one['type']} {one['pattern']}" if one["type"] == "Split" else str(one["type"])
            for one in flatten(step)
        )[:300]
        or "nothing"
    )


def _check_missing(missing: list[int], merges: Sequence[Any]) -> None:
    common = [byte for byte in missing if byte in _COMMON]
    if len(missing) > MOST_MISSING or common:
        first = (common or missing)[0]
        raise _refusal(
            f"its vocabulary has no token for {len(missing)} of the 256 bytes alone, such as "
            f"0x{first:02X}; at most {MOST_MISSING} rare ones may lack one"
        )
    names = {spell_as_characters(bytes([byte])) for byte in missing}
    named = [merge for merge in (merges if names else ()) if not names.isdisjoint("".join(merge))]
    if named:
        raise _refusal(f"its merge {named[0]!r} has a byte that is no token alone")


def _probes_of_bytes(missing: list[int]) -> Iterator[str]:
    """For each byte a text that has it, if UTF-8 can have it."""
    for byte in missing:
        for character in (
            bytes([byte]),
            bytes([byte, 0x80]),
            bytes([byte, 0x80, 0x80]),
            bytes([byte, 0xA0, 0x80]),
            bytes([byte, 0x80, 0x80, 0x80]),
            bytes([byte, 0x90, 0x80, 0x80]),
        ):
            try:
                yield f"a {character.decode()}the {character.decode()} b"
            except UnicodeDecodeError:
                continue
            break


def _refusal(reason: str) -> TokenizerError:
    return TokenizerError(f"gigatoken cannot encode it: {reason}")
