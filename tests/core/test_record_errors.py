"""Whatever another library raises about a record becomes a RecordError; our own errors and
interrupts pass.
"""

import struct
import zlib

import pytest

from penstock.core.errors import (
    ConversationError,
    CorruptionError,
    MissingExtraError,
    RecordError,
    reason_of,
    record_errors,
)

OTHERS = (
    *(
        kind("odd")
        for kind in (
            AssertionError,
            AttributeError,
            BufferError,
            EOFError,
            IndexError,
            KeyError,
            LookupError,
            MemoryError,
            NotImplementedError,
            OSError,
            OverflowError,
            RecursionError,
            RuntimeError,
            StopIteration,
            SyntaxError,
            TypeError,
            UserWarning,
            ValueError,
            ZeroDivisionError,
            struct.error,
            zlib.error,
        )
    ),
    UnicodeDecodeError("utf-8", b"odd", 0, 1, "odd"),
)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: type(error).__name__)
def test_whatever_is_raised_becomes_an_error_of_the_record(error):
    with (
        pytest.raises(RecordError, match=r"^the image is damaged: .*odd") as caught,
        record_errors("the image is damaged"),
    ):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [ConversationError("ours"), CorruptionError("ours"), MissingExtraError("ours")]
)
def test_errors_of_our_own_pass(error):
    with pytest.raises(type(error), match="ours") as caught, record_errors("the image is damaged"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_program_passes(kind):
    with pytest.raises(kind), record_errors("the image is damaged"):
        raise kind


def test_reasons_are_one_line_and_the_same_in_every_run():
    assert reason_of(ValueError()) == "ValueError"
    assert reason_of(MemoryError()) == "out of memory"
    assert reason_of(KeyError("a")) == "KeyError: 'a'"
    assert (
        reason_of(OSError(2, "No such file or directory", "a.png")) == "No such file or directory"
    )
    assert reason_of(
        RuntimeError("Error opening <_io.BytesIO object at 0x7f8f074bb470>: bad\n  data")
    ) == ("Error opening: bad data")
    assert len(reason_of(ValueError("x" * 5000))) == 300
