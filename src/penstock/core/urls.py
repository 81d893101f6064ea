"""URLs as text: without user info, query and fragment, which may be secrets. The full URL is used
only to open.

`shown_url` is the one way in which a URL becomes text that is stored or that people see. `Address`
holds a full URL and is text only in that form. `without_secrets` cleans the messages of other
libraries, and `quoted` what is quoted from records.

Rules:

- Web addresses (http, https) end at the first `?` or `#`. In the keys of other stores these are
  ordinary characters, so there only a tail such as `?name=value` is cut off. Paths of this machine
  stay as they are.
- User info is cut off, except where the text before `@` names what is read: the container of
  `abfs://`, the repository of `github://`, the revision of `hf://`.
- `url_key` identifies what a URL reads. It ignores parameters that are secrets by their names, so a
  URL that was signed again is the same. Others may select the content (`?id=1` and `?id=2`), so a
  hash of them is part of the key.
"""

import base64
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final
from urllib.parse import quote, unquote, unquote_plus

from penstock.core.json_values import JsonValue

_LINKS = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*(?:::|:/))")
"""Where the URLs of one of fsspec's chains meet: `simplecache::https://…`."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/+)(.*)", re.DOTALL)
_IN_TEXT = re.compile(
    r"""(?:[A-Za-z][A-Za-z0-9+.-]+:(?:\\?/){2,}|(?:https?|s3a?|gs|gcs|abfss?):\\?/)(?:[^\s/?#"<>@]*@)?"""
    r"""(?:(?!,[A-Za-z][A-Za-z0-9+.-]+:/)[^\s'"<>`])+"""
)
"""A URL in a text; JSON may write its slashes as `\\/`, and `Path` leaves one of two."""
_PATH_IN_TEXT = re.compile(r"""((?<![\w:/])/[^\s?'"<>`]*)\?[^\s'"<>`=]+=[^\s'"<>`)]*""")
"""The path of a URL with its query, as some messages have it without the host."""
_NAMED_IN_TEXT = re.compile(
    r"(?i)(?<=[?&;])(x-(?:amz|goog|oss|cos|obs|ms)-[\w-]+|signature|sig|(?:\w*[-_])?token|awsaccesskeyid)=[^\s&'\"<>),;]+"
)
"""Parameters with a secret, as some messages have them without the URL."""
_CLOSING = re.compile(r"[)\]}.,;:]*$")

_WEB = ("http", "https")
_LOCAL = ("file", "local")
_OWNERS = ("abfs", "abfss", "wasb", "wasbs", "github", "gitlab", "git", "hf")
"""Protocols whose text before `@` is no secret, but names what is read."""

_SECRET = re.compile(
    r"x-(?:amz|goog|oss|cos|obs|tos|ms|bz)-.*|q-(?:sign|ak|key|header|url).*|.*(?:signature|secret|passw|credential).*|(?!.*(?:page|next|continuation|start|cursor|sync)).*token|key|(?:api|access|account|auth|secret|shared|sas|signing|subscription|private|client|app|user)[-_.]?key(?:[-_]?id)?|(?:aws|oss)[-_]?access[-_]?key[-_]?id|google[-_]?access[-_]?id|key[-_]pair[-_]id|session(?:[-_]?(?:id|key))?|oauth.*|auth|authorization|bearer|policy|expir(?:es?|y|ation)|sig|sign|hmac|jwt|pwd|pass|hdn(?:ts|ea|tl)"
)
"""Names of parameters, in lower case, that hold a secret, or belong to a signature."""
_SIGNED = {
    "sv",
    "sp",
    "se",
    "st",
    "ss",
    "srt",
    "spr",
    "sr",
    "si",
    "sip",
    "sdd",
    "ses",
    "skoid",
    "sktid",
    "skt",
    "ske",
    "sks",
    "skv",
    "saoid",
    "suoid",
    "scid",
    "hash-algorithm",
}
"""Names that belong to a signature, where there is one: of Azure, and of CloudFront."""
_DRESS = re.compile(r"response-.*|rsc[cdelt]")
"""Names that change the headers of an answer, not its content."""
_KINDS = (FileNotFoundError, PermissionError, TimeoutError, ConnectionError)
_SHORTEST = 4
"""Characters of the shortest secret that is removed from a text wherever it stands: a shorter one
is part of words.
"""


@final
@dataclass(frozen=True, slots=True)
class _Parts:
    """A URL, or one of a chain."""

    start: str
    """Protocol and slashes."""
    user: str
    """User info, without the `@`."""
    rest: str
    """Host and path."""
    tail: str
    """Query and fragment, with their marks."""

    @property
    def protocol(self) -> str:
        return self.start.partition(":")[0].lower()

    @property
    def host(self) -> str:
        return self.rest.partition("/")[0]

    @property
    def shown(self) -> str:
        return f"{self.start}{self.rest}"

    def parameters(self, *, fragment: bool) -> Iterator[tuple[str, str]]:
        """Name in lower case and value of each parameter, as written; of the fragment, too, if
        asked for.
        """
        tail = self.tail
        if not fragment and self.protocol in _WEB:
            tail = tail.partition("#")[0]
        for one in re.split(r"[?#&]|\\u0026", tail.replace("&amp;", "&")):
            name, _, value = one.partition("=")
            if name:
                yield unquote_plus(name).lower(), value

    @property
    def secrets(self) -> list[tuple[str, str]]:
        """The parameters that are secrets."""
        found = list(self.parameters(fragment=True))
        return [(name, value) for name, value in found if _is_secret(name, found)]

    @property
    def selection(self) -> list[str]:
        """The parameters that may select what is read, in order of their names."""
        found = list(self.parameters(fragment=False))
        kept = [
            pair
            for pair in found
            if not _is_secret(pair[0], found) and not _DRESS.fullmatch(pair[0])
        ]
        return sorted(f"{name}={unquote_plus(value)}" for name, value in kept)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """A location that is opened by its full URL, and is text only as `shown_url` shows it."""

    full: str

    def __str__(self) -> str:
        return shown_url(self.full)

    def __repr__(self) -> str:
        return repr(shown_url(self.full))


def shown_url(location: str | os.PathLike[str]) -> str:
    """A URL as it is stored and shown: without user info, query and fragment. A path of this
    machine stays as it is.
    """
    return "::".join(
        link if (parts := _parse(link)) is None else parts.shown
        for link in _LINKS.split(os.fspath(location))
    )


def url_selection(location: str | os.PathLike[str]) -> str:
    """A hash of the parameters of a URL that may select what is read; empty: it has none.

    Two URLs with the same `shown_url` and hash read the same.
    """
    chosen = [
        parts.selection if (parts := _parse(link)) is not None else []
        for link in _LINKS.split(os.fspath(location))
    ]
    if not any(chosen):
        return ""
    return hashlib.blake2b(repr(chosen).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def url_key(location: str | os.PathLike[str]) -> str:
    """Identity of what a URL reads: a URL that was signed again has the same key. It holds no
    secret.
    """
    selection = url_selection(location)
    return f"{shown_url(location)}#{selection}" if selection else shown_url(location)


def has_secrets(location: str | os.PathLike[str]) -> bool:
    """Whether a URL has user info, or a parameter whose name says that it is a secret."""
    return any(bool(parts.user or parts.secrets) for parts in _all_parts(os.fspath(location)))


def user_info(location: str | os.PathLike[str]) -> tuple[str, str] | None:
    """Name and password in a URL, decoded; None: it has none."""
    found = next((parts.user for parts in _all_parts(os.fspath(location)) if parts.user), None)
    if found is None:
        return None
    name, _, password = found.partition(":")
    return unquote(name), unquote(password)


def fsspec_arguments(location: str) -> tuple[str, dict[str, str]]:
    """Argument of fsspec that opens a full URL: s3fs would take user info for a part of a bucket's
    name.
    """
    found = user_info(location) if location.startswith(("s3://", "s3a://")) else None
    parts = _parse(location)
    if found is None or parts is None:
        return location, {}
    return parts.shown + parts.tail, {"key": found[0], "secret": found[1]}


def found_below(location: str, found: str) -> str:
    """The full URL of a file that a store lists.

    Args:
        location: The full URL by which it was found.
        found: The URL that the store's library gives it, often without the host or the user info.
    """
    above, below = _parse(location), _parse(found)
    if (
        above is None
        or below is None
        or "::" in location
        or below.user
        or above.protocol != below.protocol
    ):
        return found
    user, bare = f"{above.user}@" if above.user else "", ":///"
    if not below.start.endswith(bare):
        return f"{below.start}{user}{below.rest}{below.tail}" if above.host == below.host else found
    if above.start.endswith(bare) or above.protocol in (*_LOCAL, "memory"):
        return found
    return f"{above.start}{user}{above.host}/{below.rest}{below.tail}"


def split_query(location: str) -> tuple[str, str]:
    """A full URL before its query, and its query and fragment with their marks."""
    parts = _parse(location)
    return (location, "") if parts is None else (location.removesuffix(parts.tail), parts.tail)


def without_secrets(text: str, *locations: str) -> str:
    """A text of another library with each URL in it as `shown_url` shows it.

    Args:
        text: A message, for example.
        locations: Full URLs that were used; their secrets are removed wherever they stand.
    """
    for location in locations:
        if location != shown_url(location):
            text = text.replace(location, shown_url(location))
            for secret in _secrets_of(location):
                text = text.replace(secret, "" if secret.endswith("@") else "***")
    text = shown_urls(text)
    return _NAMED_IN_TEXT.sub(r"\1=***", _PATH_IN_TEXT.sub(r"\1", text)) if "=" in text else text


def shown_urls(text: str) -> str:
    """A text with each URL in it as `shown_url` shows it."""
    return (
        _IN_TEXT.sub(lambda found: _shown_in_text(found[0]), text) if _may_have_url(text) else text
    )


def shown_values(value: object) -> JsonValue:
    """Values of JSON or YAML with each URL in their texts as `shown_url` shows it."""
    if isinstance(value, str):
        return shown_urls(value)
    if isinstance(value, Mapping):
        return {name: shown_values(one) for name, one in value.items()}
    return [shown_values(one) for one in value] if isinstance(value, list | tuple) else value


def quoted(text: str) -> str:
    """A text that is quoted, with each URL in it that `has_secrets` as `shown_url` shows it; all
    else stays.
    """
    if not _may_have_url(text):
        return text
    return _IN_TEXT.sub(
        lambda found: _shown_in_text(found[0]) if has_secrets(_plain(found[0])) else found[0], text
    )


def plain_cause(error: BaseException, *locations: str) -> BaseException:
    """An exception of another library as the cause of ours: a traceback prints its text, and those
    behind it.

    Returns:
        The exception itself; where its text or that of one behind it holds a secret, one of a
        standard kind without it.
    """
    behind: BaseException | None = error
    while behind is not None:
        said = f"{behind} {behind!r}"
        if without_secrets(said, *locations) != said:
            kind = next((kind for kind in _KINDS if isinstance(error, kind)), OSError)
            return kind(f"{type(error).__name__}: {without_secrets(str(error), *locations)}")
        behind = behind.__cause__ or behind.__context__
    return error


def _may_have_url(text: str) -> bool:
    return ":/" in text or ":\\/" in text


def _shown_in_text(found: str) -> str:
    """A URL in a text as it is shown; punctuation behind it stays."""
    shown = shown_url(_plain(found))
    if shown == _plain(found):
        return found
    closing = _CLOSING.search(found)
    ending = closing[0] if closing else ""
    return shown if shown.endswith(ending) else shown + ending


def _plain(found: str) -> str:
    return found.replace("\\/", "/")


def _all_parts(location: str) -> list[_Parts]:
    return [parts for link in _LINKS.split(location) if (parts := _parse(link)) is not None]


def _parse(link: str) -> _Parts | None:
    """A URL in parts; None: it is none."""
    found = _URL.match(link)
    if found is None:
        return None
    protocol, slashes, rest = found[1].lower(), found[2], found[3]
    start, user = f"{found[1]}:{slashes}", ""
    if len(slashes) == 2 or (len(slashes) == 1 and protocol not in _LOCAL):
        user, rest = _without_user(rest, protocol)
    if protocol in _LOCAL:
        return _Parts(start, user, rest, "")
    mark = re.search(r"[?#]" if protocol in _WEB else r"[?#](?=[^/?#=\s]{1,64}=)", rest)
    at = mark.start() if mark else len(rest)
    return _Parts(start, user, rest[:at], rest[at:])


def _without_user(rest: str, protocol: str) -> tuple[str, str]:
    """The user info of what follows the slashes of a URL, and all else."""
    end = re.search(r"[/?#]", rest)
    host = rest[: end.start()] if end else rest
    if protocol in _OWNERS:
        return "", rest
    if "@" in host:
        user, _, host_only = host.rpartition("@")
        return user, host_only + rest[len(host) :]
    # A password may hold `/`, `?` or `#` that should have been escaped: then what looks like a port
    # is no number.
    port = host.rpartition(":")[2] if ":" in host and not host.startswith("[") else ""
    if port and not port.isdecimal() and "@" in rest:
        user, _, left = rest.rpartition("@")
        return user, left
    return "", rest


def _is_secret(name: str, others: list[tuple[str, str]]) -> bool:
    """Whether a parameter is a secret, among all parameters of its URL."""
    if name in _SIGNED:
        return any(other == "sig" or other.endswith("signature") for other, _ in others)
    return _SECRET.fullmatch(name) is not None


def _secrets_of(location: str) -> list[str]:
    """Secrets that no text may hold, longest first: user info and query, whole and in pieces, in
    all spellings.
    """
    found: list[str] = []
    for parts in _all_parts(location):
        if parts.user:
            name, colon, password = parts.user.partition(":")
            found += [f"{one}@" for one in _spellings(parts.user)]
            found += [*_spellings(parts.user), *_spellings(password if colon else name)]
            plain = unquote_plus(parts.user).encode("utf-8", "surrogatepass")
            found.append(base64.b64encode(plain).decode().rstrip("="))
        if parts.tail:
            found += _spellings(parts.tail)
            found += [spelt for _, value in parts.secrets for spelt in _spellings(value)]
            others = [
                value for _, value in parts.parameters(fragment=True) if len(value) >= 2 * _SHORTEST
            ]
            found += [spelt for value in others for spelt in _spellings(value)]
    return sorted({one for one in found if len(one) >= _SHORTEST}, key=len, reverse=True)


def _spellings(text: str) -> list[str]:
    """A text as written, decoded, and with its special characters escaped."""
    plain = unquote_plus(text)
    return [text, plain, unquote(text), quote(plain, safe=""), quote(plain, safe="/")]
