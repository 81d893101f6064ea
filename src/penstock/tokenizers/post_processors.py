"""Post-processors of the tokenizers package: what puts BOS and EOS around a text, in a
`tokenizer.json`.

They alone say what a model's own tokenizer adds: that a configuration names a BOS does not mean
that texts begin with it. Templates, and the two older kinds that do the same, are read and written;
the others only change positions.
"""

from collections.abc import Mapping

from penstock.core.json_values import JsonObject

_ADDING = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")


def before_a_text(processor: JsonObject) -> list[int]:
    """The ids that a post-processor of the tokenizers package puts before a single text."""
    kind = processor["type"]
    if kind == "Sequence":
        return [
            token for step in reversed(processor["processors"]) for token in before_a_text(step)
        ]
    if kind in ("BertProcessing", "RobertaProcessing"):
        return [int(processor["cls"][1])]
    found: list[int] = []
    for piece in processor["single"] if kind == "TemplateProcessing" else []:
        if "Sequence" in piece:
            break
        found += processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    return found


def text_template(before: Mapping[str, int], after: Mapping[str, int]) -> JsonObject:
    """A post-processor of the tokenizers package that puts control entries (text → id) around each
    text.
    """

    def around(sequence: str, kind: int) -> list[JsonObject]:
        first, last = (
            [{"SpecialToken": {"id": text, "type_id": kind}} for text in side]
            for side in (before, after)
        )
        return [*first, {"Sequence": {"id": sequence, "type_id": kind}}, *last]

    tokens = {
        text: {"id": text, "ids": [number], "tokens": [text]}
        for text, number in {**before, **after}.items()
    }
    single = around("A", 0)
    pair = [*single, *around("B", 1)]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def with_bos(processor: JsonObject | None, text: str, token_id: int) -> JsonObject:
    """A post-processor that puts one control entry before each text, and does what `processor` does
    besides.
    """
    kind = None if processor is None else processor["type"]
    if processor is None or kind in ("BertProcessing", "RobertaProcessing"):
        return text_template(
            {text: token_id}, {} if processor is None else dict([processor["sep"]])
        )
    if kind == "TemplateProcessing":
        entry = {"id": text, "ids": [token_id], "tokens": [text]}
        sides = {
            side: [new for piece in processor[side] for new in _after(text, piece)]
            for side in ("single", "pair")
        }
        return {
            **processor,
            **sides,
            "special_tokens": {**processor["special_tokens"], text: entry},
        }
    steps = processor["processors"] if kind == "Sequence" else [processor]
    # A template that follows another one would treat its tokens as a text of their own.
    place = next((place for place, step in enumerate(steps) if step["type"] in _ADDING), None)
    if place is None:
        return {"type": "Sequence", "processors": [*steps, text_template({text: token_id}, {})]}
    return {
        "type": "Sequence",
        "processors": [*steps[:place], with_bos(steps[place], text, token_id), *steps[place + 1 :]],
    }


def _after(text: str, piece: JsonObject) -> list[JsonObject]:
    """A piece of a template, with a control entry before it if it is a text."""
    if "Sequence" not in piece:
        return [piece]
    return [{"SpecialToken": {"id": text, "type_id": piece["Sequence"]["type_id"]}}, piece]


def without_bos(processor: JsonObject | None, token_id: int) -> JsonObject:
    """A post-processor that does what `processor` does, but puts no BOS before a text."""
    if processor is None:
        return text_template({}, {})
    if processor["type"] == "Sequence":
        return {
            **processor,
            "processors": [without_bos(step, token_id) for step in processor["processors"]],
        }
    if (
        processor["type"] in ("BertProcessing", "RobertaProcessing")
        and processor["cls"][1] == token_id
    ):
        text, number = processor["sep"]
        return text_template({}, {text: number})
    if processor["type"] != "TemplateProcessing":
        return processor
    named = {
        name for name, entry in processor["special_tokens"].items() if entry["ids"] == [token_id]
    }
    kept = {name: entry for name, entry in processor["special_tokens"].items() if name not in named}
    sides = {
        side: [
            piece
            for piece in processor[side]
            if piece.get("SpecialToken", {}).get("id") not in named
        ]
        for side in ("single", "pair")
    }
    return {**processor, **sides, "special_tokens": kept}
