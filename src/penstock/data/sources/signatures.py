"""What a file is by its first bytes: compressed, in a format of its own, text, or something that is
not read here.

A name may be wrong, or say nothing. First bytes are certain where a format has a signature: then
they decide. JSON has none, so its beginning decides only where the name does not, or names a format
that has one.

Sources: RFC 1952 (gzip), RFC 8878 (Zstandard), the specifications of bzip2, xz, LZ4 frames,
Parquet, Arrow and tar.
"""

import re
from dataclasses import dataclass
from typing import final

from penstock.core.errors import ConfigError

HEAD_BYTES = 512
"""First bytes of a file that are looked at: the signature of tar lies at byte 257."""

_BOM = b"\xef\xbb\xbf"
_TAR_AT = 257
_MOST_ARROW = 1 << 24
"""Bytes of the longest schema of an Arrow stream that is taken for one."""

_UNPACK = "unpack it first"

_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGE = re.compile(rb"\s*<(?:!doctype html|html)\b", re.IGNORECASE)
_JSON = re.compile(rb'\s*(?:\{\s*["}]|\[\s*(?:[\[{"\]\d-]|\Z))')
_BARE_BRACE = re.compile(rb"\s*[\[{]\s*\Z")
_CONTROLS = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f\x7f]")


@final
@dataclass(frozen=True, slots=True)
class Signature:
    """What a file certainly is."""

    name: str
    """In words: "gzip"."""
    codec: str | None = None
    """Its compression, one of those of `compression.COMPRESSIONS`."""
    format: str | None = None
    """Its format, one of `formats.FORMATS`."""
    cure: str = ""
    """What to do with it, if it is not read here."""


_SIGNATURES = (
    (re.compile(rb"\x1f\x8b\x08"), Signature("gzip", codec="gzip")),
    (re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"), Signature("bzip2", codec="bz2")),
    (re.compile(rb"\xfd7zXZ\0"), Signature("xz", codec="xz")),
    (
        re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
        Signature("Zstandard", codec="zstd"),
    ),
    (re.compile(rb"\x04\x22\x4d\x18"), Signature("LZ4", codec="lz4")),
    (re.compile(rb"PAR1"), Signature("Parquet", format="parquet")),
    (re.compile(rb"ARROW1\0\0"), Signature("Arrow", format="arrow")),
    (re.compile(rb"PK(?:\x03\x04|\x05\x06|\x07\x08)"), Signature("a zip archive", cure=_UNPACK)),
    (re.compile(rb"7z\xbc\xaf\x27\x1c"), Signature("a 7z archive", cure=_UNPACK)),
    (re.compile(rb"Rar!\x1a\x07"), Signature("a RAR archive", cure=_UNPACK)),
    (re.compile(rb"LZIP"), Signature("lzip", cure=_UNPACK)),
    (re.compile(rb"\x1f[\x9d\xa0]"), Signature("compressed by `compress`", cure=_UNPACK)),
    (re.compile(rb"\xff\x06\0\0sNaPpY"), Signature("Snappy", cure=_UNPACK)),
    (
        re.compile(rb"\x02\x21\x4c\x18"),
        Signature("LZ4 in its old format", cure="compress it again with lz4"),
    ),
    (re.compile(rb"PARE"), Signature("encrypted Parquet", cure="decrypt it first")),
    (re.compile(rb"FEA1"), Signature("Feather 1", cure="write it as Parquet")),
    (re.compile(rb"ORC"), Signature("ORC", cure="write it as Parquet")),
    (re.compile(rb"Obj\x01"), Signature("Avro", cure="write it as Parquet or JSON lines")),
    (
        re.compile(rb"\x89HDF\r\n\x1a\n"),
        Signature("HDF5", cure="write it as Parquet or JSON lines"),
    ),
    (
        re.compile(rb"SQLite format 3\0"),
        Signature("a SQLite database", cure="write its table as CSV or JSON lines"),
    ),
    (
        re.compile(rb"\x93NUMPY"),
        Signature("a NumPy array", cure="if it holds tokens, name it as a source of a loader"),
    ),
    (re.compile(rb"%PDF-"), Signature("a PDF", cure="extract its text first")),
    (
        re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP", re.DOTALL),
        Signature("an image", cure="images with captions are read with format imagefolder"),
    ),
)

PAGE = Signature(
    "an HTML page, as servers send for a login or an error",
    cure="check the address, and open it once",
)


def recognise(head: bytes) -> Signature | None:
    """What a file certainly is, by its first `HEAD_BYTES`; None: its name must say."""
    if head.startswith(_POINTER):
        return Signature(
            "a pointer of Git LFS, not the file itself", cure="fetch the file: git lfs pull"
        )
    if is_text(head):
        return None  # a text may begin with PAR1, too
    for pattern, signature in _SIGNATURES:
        if pattern.match(head):
            return signature
    if head[_TAR_AT : _TAR_AT + 5] == b"ustar":
        return Signature("a tar archive", format="webdataset")
    if head.startswith(b"\xff\xff\xff\xff") and len(head) >= 8:
        size = int.from_bytes(head[4:8], "little")
        if 0 < size <= _MOST_ARROW and size % 8 == 0:
            return Signature("an Arrow stream", format="arrow")
    return None


def is_page(head: bytes) -> bool:
    """Whether a file begins as an HTML page."""
    return _PAGE.match(head.removeprefix(_BOM)) is not None


def begins_json(head: bytes) -> bool:
    """Whether a file begins as JSON with objects or arrays does."""
    text = head.removeprefix(_BOM)
    return is_text(head) and (_JSON.match(text) is not None or _BARE_BRACE.match(text) is not None)


def is_text(head: bytes) -> bool:
    """Whether first bytes are UTF-8 without control characters; the last character may be cut."""
    if not head or _CONTROLS.search(head):
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and len(head) - error.start < 4
    return True


def refuse_content(path: str, signature: Signature) -> None:
    """Raise for a file that is nothing that is read here.

    Raises:
        ConfigError: It is not; the message says what it is, and what to do.
    """
    if signature.cure:
        raise ConfigError(f"{path}: is {signature.name}, which is not read; {signature.cure}")


def described(raw: bytes) -> str | None:
    """In words what the first line of a file is that is no text; None: its bytes do not say."""
    found = recognise(raw)
    if found is None:
        return None
    cure = found.cure or "name it so, or let its content decide: leave format out"
    return f"the file is {found.name}, not lines of text; {cure}"
