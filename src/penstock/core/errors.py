"""Every error that penstock raises on purpose, in one tree.

    PenstockError
    ├── ConfigError     (ValueError)         a setting is out of range, unknown, or disagrees with another
    ├── RecordError     (ValueError)         a raw record cannot be read: file, line, what was expected
    │   ├── ConversationError                a record cannot be read as a conversation: also names the message
    │   └── DamagedFileError                 a file of the input was cut, is damaged, or changed while it was read
    ├── TokenizerError  (ValueError)         a vocabulary cannot be loaded, or does not support an operation
    ├── FormatError     (ValueError)         a dataset, shard or manifest on disk breaks the format
    │   └── CorruptionError                  bytes differ from their checksum, or a file was cut
    ├── StateError      (ValueError)         a saved state does not fit these data or settings
    ├── StoreError      (OSError)            an object store refuses, fails, or lacks a file of a dataset
    ├── OutputError     (OSError)            the output folder cannot be used: full, read-only, holds other files
    ├── DistributedError (RuntimeError)      ranks disagree, or a rank was left at its default
    ├── IsolationError  (RuntimeError)       a model lets documents of one row see each other
    └── MissingExtraError (ImportError)      an optional dependency is not installed; names the pip command

A message says where, what was found, what was expected, and the cure. URLs in it have no user info
and no query.
"""  # noqa: E501

import re
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.core.urls import shown_urls

_OBJECT = re.compile(r" ?<[^<>]* at 0x[0-9a-fA-F]+>")
"""An object without a name of its own, as Python writes it: its address differs from run to run."""
_LONGEST_REASON = 300


class PenstockError(Exception):
    """The root of all errors that penstock raises on purpose."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(shown_urls(one) if isinstance(one, str) else one for one in arguments))


class ConfigError(PenstockError, ValueError):
    """A setting is out of range, unknown, or disagrees with another."""


class RecordError(PenstockError, ValueError):
    """A raw record cannot be read."""


class ConversationError(RecordError):
    """A record cannot be read as a conversation; names the index of the message at fault, from 0,
    if there is one.
    """


class DamagedFileError(RecordError):
    """A file of the input cannot be read to its end: it was cut, is damaged, or changed while it
    was read.
    """


class TokenizerError(PenstockError, ValueError):
    """A vocabulary cannot be loaded, or does not support an operation."""


class FormatError(PenstockError, ValueError):
    """A dataset, shard or manifest on disk breaks the format."""


class CorruptionError(FormatError):
    """Stored bytes differ from their checksum, or a file was cut short."""


class StateError(PenstockError, ValueError):
    """A saved state does not fit the data or the settings it is loaded into."""


class StoreError(PenstockError, OSError):
    """An object store refuses or fails, or lacks a file of a dataset; names the URL."""


class OutputError(PenstockError, OSError):
    """The output folder cannot be used."""


class DistributedError(PenstockError, RuntimeError):
    """Ranks disagree, or a rank was left at its default in a run of several."""

    failed_rank: int | None = None
    """The rank whose error this one reports; None: it is an error of its own."""


class IsolationError(PenstockError, RuntimeError):
    """A model lets the documents of one row see each other."""


class MissingExtraError(PenstockError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str | None = None) -> None:
        """Args: `extra` that brings the package; None: the package is installed by its own name."""
        if extra is None:
            super().__init__(
                f"{package} is not installed, and this needs it: pip install {package}"
            )
        else:
            super().__init__(
                f"{package} is not installed; it comes with the extra: pip install "
                f"'penstock[{extra}]'"
            )


@contextmanager
def record_errors(what: str) -> Iterator[None]:
    """Turn whatever another library raises about a record into a RecordError, `what` and its
    reason.

    For calls into libraries that read bytes of strangers, and for nothing else: what they raise for
    damage is written down nowhere, and differs between versions. Errors of our own pass unchanged,
    as does what is no `Exception` (KeyboardInterrupt, SystemExit).

    Args:
        what: Where the record is at fault, such as "the image is damaged".
    """
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        raise RecordError(f"{what}: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """Message of another library's exception in one line, the same in every run."""
    text = " ".join(_OBJECT.sub("", str(getattr(error, "strerror", None) or error)).split())[
        :_LONGEST_REASON
    ]
    name = type(error).__name__
    if not text:
        return "out of memory" if isinstance(error, MemoryError) else name
    return (
        text
        if isinstance(error, OSError | ValueError | SyntaxError | RuntimeError)
        else f"{name}: {text}"
    )


def require_above_zero(where: str, settings: object, *names: str) -> None:
    """Check numbers of settings; None is no number.

    Raises:
        ConfigError: One is 0 or less, or NaN.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{where}.{name} must be above 0, got {value!r}")
