"""Thinking that stands in the content, between tags, moves to a field of its own, and ranges of characters with it.

Only thinking that opens the content is moved: a tag in the middle of an answer may be what the answer is about.
"""

from collections.abc import Iterable

from penstock.chat.conversation import Range

TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)


def split_thinking(content: str) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Where thinking and answer stand in `content`, as [begin, end) each, without the whitespace around them.

    Returns:
        None where the content does not open with a tag, or the tag is never closed.
    """
    start = len(content) - len(content.lstrip())
    for opening, closing in TAGS:
        if content.startswith(opening, start):
            close = content.find(closing, start)
            if close < 0:
                return None
            thinking = _stripped(content, start + len(opening), close)
            after = close + len(closing)
            return thinking, (after + len(content[after:]) - len(content[after:].lstrip()), len(content))
    return None


def _stripped(text: str, begin: int, end: int) -> tuple[int, int]:
    inner = text[begin:end]
    begin += len(inner) - len(inner.lstrip())
    return begin, begin + len(inner.strip())


def move_ranges(ranges: Iterable[Range], pieces: dict[str, tuple[int, int]]) -> list[Range]:
    """Ranges of `content` as ranges of its pieces, {field: [begin, end) in the old content}; others stay as they are.

    Characters in no piece, the tags and the whitespace around them, are no longer in any text, nor are their ranges.
    """
    moved = []
    for one in ranges:
        if one.field != "content":
            moved.append(one)
            continue
        for name, (begin, end) in pieces.items():
            left, right = max(one.begin, begin), min(one.end, end)
            if left < right:
                moved.append(Range(field=name, begin=left - begin, end=right - begin, weight=one.weight))
    return moved
