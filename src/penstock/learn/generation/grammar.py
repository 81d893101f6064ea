"""Texts that must meet a JSON schema: which tokens may come next, by llguidance
(github.com/guidance-ai/llguidance).

The library walks a grammar made from the schema along the bytes of the tokens, so any tokenizer
that can spell JSON's own characters will do; other characters are written if it can spell them.
Between values is what `json.dumps` writes: whitespace is fixed, otherwise the model could emit
whitespace forever.

A schema may be a stranger's, and some take seconds: to compile, or for the tokens that may come
next. So large ones are refused at sight (`generation.schema_limits`), a server compiles in another
thread than its engine's, and what may come next is found by threads of this module, while an engine
goes on with other sequences. llguidance's limits bound each piece of such work; at one, a text ends
with an error.
"""

import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final
from weakref import WeakValueDictionary

import numpy as np

from penstock.core.arrays import Bool, Bytes, Int64
from penstock.core.errors import ConfigError, MissingExtraError
from penstock.learn.generation.schema_limits import check_schema
from penstock.tokenizers import Tokenizer

NEEDED = frozenset(b'{}[]",: -.0123456789\\abcdeflnrstu')
"""Bytes without which there is JSON that cannot be written: marks, numbers, true, false, null,
escapes of controls.
"""
LONGEST_STEP = 2.0
"""Processor seconds that finding the next tokens of a text may take before the text ends with an
error.
"""
_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SPECIAL = b"\xff"
"""What llguidance expects before the names of control tokens."""
_THREADS = 2

Bits = Bytes


@final
class Grammars:
    """Makes the constraints of one engine's sequences; any thread may use it.

    Args:
        tokenizer: The model's tokenizer.
        stop_ids: Ids that may end a text once it is complete.

    Raises:
        MissingExtraError: llguidance is not installed.
        ConfigError: The tokenizer cannot spell what every JSON is made of.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int]) -> None:
        try:
            import llguidance
        except ImportError:
            raise MissingExtraError("llguidance", "serve") from None
        self._library = llguidance
        self._spelled = _Spelled(tokenizer, stop_ids)
        missing = sorted(NEEDED - self._spelled.bytes)
        if missing:
            raise ConfigError(
                f"json_schema: the tokenizer has no token for {len(missing)} of the "
                f"{len(NEEDED)} bytes that JSON is made of, such as {bytes(missing[:1])!r}, "
                "so it cannot write it; use one with bytes"
            )
        spelled: Any = self._spelled
        self._tokenizer = llguidance.LLTokenizer(
            spelled, eos_token=[*sorted(stop_ids)] or [spelled.eos_token_id]
        )
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._stuck = self._spelled.stuck()
        self._looking = ThreadPoolExecutor(_THREADS, "penstock-grammar")
        self._compiled: WeakValueDictionary[str, Compiled] = WeakValueDictionary()
        self._lock = threading.Lock()

    def check(self, schema: str) -> None:
        """Refuse what can be refused without compiling it.

        Raises:
            ConfigError: It is too large, or prescribes texts that the tokenizer cannot spell.
        """
        for text in check_schema(schema):
            # llguidance escapes control characters only.
            lost = next((one for one in text if one >= " " and not self._spelled.spells(one)), None)
            if lost is not None:
                raise ConfigError(
                    f"json_schema: the tokenizer has no token for {lost!r}, which the "
                    f"schema's {text[:60]!r} needs; leave it out"
                )

    def compile(self, schema: str) -> "Compiled":
        """What all texts of a schema share. As long as someone holds it, the schema is not compiled
        again.

        Raises:
            ConfigError: It is not a JSON schema that llguidance supports, or too large; says why.
        """
        with self._lock:
            known = self._compiled.get(schema)
        if known is not None:
            return known
        self.check(schema)
        try:
            grammar = self._library.LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        except ValueError as error:
            raise ConfigError(f"json_schema: {_short(error)}") from None
        matcher = self._library.LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=self._limits
        )
        compiled = Compiled(matcher, self._stuck, self._looking)
        with self._lock:
            self._compiled[schema] = compiled
        return compiled

    def constraint(self, schema: str) -> "Constraint":
        """The constraint of a new text; at once if the schema is compiled.

        Raises:
            ConfigError: See `compile`.
        """
        return Constraint(self.compile(schema))


@final
class Compiled:
    """A schema's grammar, at the beginning of a text."""

    def __init__(self, matcher: Any, stuck: "Int64", pool: ThreadPoolExecutor) -> None:
        self.matcher, self.stuck, self.pool = matcher, stuck, pool
        self.first = look(matcher, stuck)


@final
class Constraint:
    """What one text may go on with. Belongs to one thread; only the ids that may come next are
    found by another.

    Attributes:
        complete: Whether nothing may follow.
    """

    def __init__(self, compiled: Compiled) -> None:
        self._compiled, self._matcher = compiled, compiled.matcher.deep_copy()
        self._bits: Future[Bits] = Future()
        self._bits.set_result(compiled.first)
        self.complete = bool(self._matcher.is_stopped())

    @property
    def looking(self) -> "Future[Bits] | None":
        """The search for what may come next; None: it has ended."""
        return None if self._bits.done() else self._bits

    @property
    def error(self) -> ConfigError | None:
        """Why the text cannot go on; None: it can, or the search has not ended."""
        error = self._bits.exception() if self._bits.done() else None
        return (
            error
            if error is None or isinstance(error, ConfigError)
            else ConfigError(f"json_schema: {_short(error)}")
        )

    def allowed(self, count: int) -> Bool:
        """bool [count]: ids that may come next; stop ids only where the text may end.

        Raises:
            ConfigError: See `error`.
        """
        bits, found = self._bits.result(), np.zeros(count, np.bool_)
        shared = min(count, len(bits))
        found[:shared] = bits[:shared]
        return found

    def accept(self, token: int) -> None:
        """Go on by a chosen token, which was allowed.

        Raises:
            ConfigError: The schema is so complex that llguidance gives up here.
        """
        self._matcher.consume_token(token)
        _check(self._matcher)
        self.complete = bool(self._matcher.is_stopped())
        if not self.complete:
            self._bits = self._compiled.pool.submit(look, self._matcher, self._compiled.stuck)


def look(matcher: Any, stuck: "Int64") -> Bits:
    """Which ids may come next, uint8 [ids], 1 for those that may; none of those at which the
    tokenizer is stuck.

    Raises:
        ConfigError: llguidance gives up, it takes too long, or nothing may come.
    """
    begun = time.thread_time()
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    # After an error, only the end is allowed, as if the text were complete.
    _check(matcher)
    seconds = time.thread_time() - begun
    if seconds > LONGEST_STEP:
        raise ConfigError(
            f"json_schema: it is too complex: a token took {seconds:.1f} s, more than "
            f"{LONGEST_STEP:g} s; simplify it"
        )
    bits[stuck] = 0
    if not bits.any():
        raise ConfigError(
            "json_schema: the text can go on with nothing that the tokenizer can write; "
            "change the schema"
        )
    return bits


def _check(matcher: Any) -> None:
    if not matcher.is_error():
        return
    message = _short(matcher.get_error())
    if message.startswith("NoExtension"):
        message = (
            "no text meets the schema here, or none that the tokenizer can write (a schema "
            "that refers only to itself has none); change it"
        )
    elif "max is" in message or "limit" in message.lower() or "TooComplex" in message:
        message = (
            f"it is too complex ({message}); use fewer optional properties, alternatives or "
            "patterns"
        )
    raise ConfigError(f"json_schema: {message}")


class _Spelled:
    """A tokenizer as llguidance wants it: see its TokenizerWrapper.

    Attributes:
        bytes: Those that are tokens.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int]) -> None:
        table = tokenizer.byte_table
        names = {
            token: _SPECIAL + text.encode() for text, token in tokenizer.special_tokens.items()
        }
        control = np.flatnonzero(table.is_control).tolist()
        unnamed = {token: _SPECIAL + f"<{token}>".encode() for token in control}
        named = unnamed | {token: name for token, name in names.items() if token in unnamed}
        self.tokens = [named.get(token) or table[token] for token in range(len(table))]
        self.special_token_ids = control
        self.bos_token_id = tokenizer.bos_id
        ends = [*sorted(stop_ids), tokenizer.eos_id, *control]
        found = next((token for token in ends if token is not None), None)
        # It wants an end; ours is a byte that text has none of, where the tokenizer has no control
        # tokens at all.
        self.eos_token_id = len(self.tokens) if found is None else found
        if found is None:
            self.tokens.append(_SPECIAL + b"<end>")
        self.bytes = frozenset(token[0] for token in self.tokens if len(token) == 1)
        self._whole = frozenset(self.tokens)
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of a text, or of its beginning that the tokenizer can spell: encoders leave out what
        they cannot.
        """
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        end = next((at for at, one in enumerate(plain) if not self.spells(one)), len(plain))
        return [int(token) for token in self._encode(plain[:end])]

    def spells(self, character: str) -> bool:
        """Whether tokens can write a character in any place: it is one, or each of its bytes is."""
        spelled = character.encode("utf-8", "surrogatepass")
        return self.bytes.issuperset(spelled) or spelled in self._whole

    def stuck(self) -> "Int64":
        """Ids that end within a character that no tokens can finish, int64 [n]: a text could not go
        on from them.
        """
        unfinished = {token: _unfinished(spelled) for token, spelled in enumerate(self.tokens)}
        cache = {start: self._finishes(start) for start in set(unfinished.values()) if start}
        ids = [token for token, start in unfinished.items() if start and not cache[start]]
        return np.array(ids, np.int64)

    def _finishes(self, start: bytes) -> bool:
        """Whether some bytes that are tokens make a character of its beginning."""
        if _unfinished(start) != start:
            return _is_text(start)
        return any(
            self._finishes(start + bytes([byte]))
            for byte in range(0x80, 0xC0)
            if byte in self.bytes
        )


def _unfinished(spelled: bytes) -> bytes:
    """The bytes at the end that begin a character of UTF-8 which they do not finish; empty: there
    are none.
    """
    for count in range(1, min(3, len(spelled)) + 1):
        lead = spelled[-count]
        if lead >= 0xC2 and lead <= 0xF4:
            return (
                spelled[-count:] if count < (2 if lead < 0xE0 else 3 if lead < 0xF0 else 4) else b""
            )
        if not 0x80 <= lead < 0xC0:
            break
    return b""


def _is_text(spelled: bytes) -> bool:
    try:
        spelled.decode()
    except UnicodeDecodeError:
        return False
    return True


def _short(error: object) -> str:
    """The first line of a message of llguidance."""
    return str(error).strip().split("\n")[0][:300]
