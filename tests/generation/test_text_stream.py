"""Text from tokens: what is streamed adds up to what decoding the whole would give, up to the first
stop string.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.learn.generation.sequence import TextStream

PIECES = st.lists(
    st.sampled_from(
        [b"a", b"b", b"ab", "é".encode(), b"\xc3", b"\xa9", "日本".encode(), b"\xe6\x97", b"\xff"]
    )
)
STOPS = st.lists(
    st.sampled_from(["ab", "aab", "ba", "é", "bé", "日本日", "b"]), max_size=3, unique=True
)


def whole_text(pieces: list[bytes], stops: list[str]) -> tuple[str, bool]:
    """Text before the first stop string that is complete; an unfinished character at the end is
    left out.
    """
    data = b""
    for piece in pieces:
        data += piece
        found = [data.find(stop.encode()) for stop in stops if stop.encode() in data]
        if found:
            data = data[: min(found)]
            return data.decode(errors="replace").rstrip("\ufffd"), True
    text = data.decode(errors="replace")
    return text.rstrip("\ufffd"), False


@settings(deadline=None, max_examples=500)
@given(PIECES, STOPS)
def test_streamed_text_is_the_whole_text(pieces, stops):
    stream = TextStream(stops)
    text = ""
    for piece in pieces:
        text += stream.push(piece)
        if stream.stopped:
            break
    text += stream.finish()
    expected, stopped = whole_text(pieces, stops)
    # Broken characters at the very end may be shown or left out; everything before is exact.
    assert text.rstrip("\ufffd") == expected
    assert stream.stopped == stopped


@settings(deadline=None, max_examples=300)
@given(PIECES, STOPS, st.integers(0, 8))
def test_a_stop_string_counts_if_it_ends_behind_the_minimum(pieces, stops, least):
    stream, text = TextStream(stops), ""
    for number, piece in enumerate(pieces):
        text += stream.push(piece, may_stop=number >= least)
        if stream.stopped:
            break
    data, before = b"".join(pieces), len(b"".join(pieces[:least]))
    ends = [
        (data.find(stop.encode(), max(0, before - len(stop.encode()) + 1)), stop) for stop in stops
    ]
    found = [(place + len(stop.encode()), place) for place, stop in ends if place >= 0]
    assert stream.stopped == bool(found)
    if not found:
        text += stream.finish()
        assert text.rstrip("\ufffd") == data.decode(errors="replace").rstrip("\ufffd")
    else:
        # What is complete first, with the token that completes it.
        sizes = [len(b"".join(pieces[:number])) for number in range(len(pieces) + 1)]
        first = min(end for end, _ in found)
        token = next(number for number, size in enumerate(sizes) if size >= first)
        place = min(place for end, place in found if end <= sizes[token])
        shown = data[:place].decode(errors="replace")
        assert text.rstrip("\ufffd") == shown.rstrip("\ufffd")


def test_only_what_may_begin_a_stop_string_is_held_back():
    stream = TextStream(["\n\nUser:"])
    assert [stream.push(piece) for piece in (b"one\n", b"\n", b"Us", b"ed", b"!")] == [
        "one",
        "",
        "",
        "\n\nUsed",
        "!",
    ]


def test_characters_are_never_cut():
    stream = TextStream()
    assert [stream.push(bytes([byte])) for byte in "é日".encode()] == ["", "é", "", "", "日"]


def test_an_unfinished_character_at_the_end_is_left_out():
    stream = TextStream()
    assert stream.push(b"a\xe6\x97") + stream.finish() == "a"


def test_broken_bytes_inside_are_shown():
    stream = TextStream()
    assert stream.push(b"a\xffb") + stream.finish() == "a\ufffdb"
