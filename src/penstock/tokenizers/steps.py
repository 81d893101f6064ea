"""The steps of a normalizer or a pre-tokenizer of a `tokenizer.json`."""

from penstock.core.json_values import JsonObject


def flatten(step: JsonObject | None) -> list[JsonObject]:
    """The steps of a normalizer or pre-tokenizer, sequences opened."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [
        flat
        for part in step.get("normalizers") or step.get("pretokenizers") or []
        for flat in flatten(part)
    ]


def without_first_space(step: JsonObject | None) -> JsonObject | None:
    """The pre-tokenizer without the space that it puts before the text only, not before each
    stretch.
    """
    if step is None:
        return None
    if step["type"] == "Sequence":
        return {
            **step,
            "pretokenizers": [without_first_space(part) for part in step["pretokenizers"]],
        }
    first_only = step["type"] == "Metaspace" and step.get("prepend_scheme") == "first"
    return {**step, "prepend_scheme": "never"} if first_only else step


def only_spaces(step: JsonObject) -> bool:
    """Whether a step only writes spaces as SentencePiece does: as `▁`, with one put before the
    text.
    """
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": " "} and step["content"] == "▁")
    return bool(step["type"] == "Prepend" and step["prepend"] == "▁")


def adds_space(step: JsonObject) -> bool:
    """Whether a step puts a space before the text."""
    if step["type"] == "Metaspace" and "prepend_scheme" in step:
        return bool(step["prepend_scheme"] != "never")
    return step["type"] == "Prepend" or bool(step.get("add_prefix_space"))
