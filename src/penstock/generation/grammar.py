"""Texts that must meet a JSON schema: which tokens may come next, by llguidance (github.com/guidance-ai/llguidance).

The library walks a grammar made from the schema along the bytes of the tokens, so any tokenizer that can spell every
byte will do. Between values stands what `json.dumps` writes: white space is not the model's choice, which would let it
write nothing else.
"""

from collections.abc import Collection
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError, MissingExtraError
from penstock.tokenizers import Tokenizer

_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SPECIAL = b"\xff"
"""What llguidance expects before the names of control tokens."""


@final
class Grammars:
    """Makes the constraints of one engine's sequences.

    Args:
        tokenizer: The model's tokenizer.
        stop_ids: Ids that may end a text once it is complete.

    Raises:
        MissingExtraError: llguidance is not installed.
        ConfigError: The tokenizer cannot spell every byte.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int]) -> None:
        try:
            import llguidance
        except ImportError:
            raise MissingExtraError("llguidance", "serve") from None
        self._library = llguidance
        spelled: Any = _Spelled(tokenizer, stop_ids)
        missing = {bytes([byte]) for byte in range(256)} - set(spelled.tokens)
        if missing:
            raise ConfigError(
                f"json_schema: the tokenizer has no token for {len(missing)} of the 256 bytes, such as "
                f"{min(missing)!r}, so it cannot write every JSON; use one with bytes"
            )
        self._tokenizer = llguidance.LLTokenizer(spelled, eos_token=[*sorted(stop_ids)] or [spelled.eos_token_id])

    def constraint(self, schema: str) -> "Constraint":
        """The constraint of a new text.

        Raises:
            ConfigError: It is not a JSON schema that llguidance supports; says why.
        """
        try:
            grammar = self._library.LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        except ValueError as error:
            raise ConfigError(f"json_schema: {_short(error)}") from None
        return Constraint(self._library.LLMatcher(self._tokenizer, grammar, log_level=0))


@final
class Constraint:
    """What one text may go on with.

    Attributes:
        complete: Whether nothing may follow.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._look()

    def allowed(self, count: int, device: torch.device) -> Tensor:
        """bool [count]: ids that may come next; stop ids only where the text may end."""
        found = np.zeros(count, np.bool_)
        shared = min(count, len(self._bits))
        found[:shared] = self._bits[:shared]
        return torch.from_numpy(found).to(device)

    def accept(self, token: int) -> None:
        """Go on by a chosen token, which was allowed.

        Raises:
            ConfigError: The schema is so complex that llguidance gives up here.
        """
        self._matcher.consume_token(token)
        self._look()

    def _look(self) -> None:
        """Find out what may come next."""
        self._bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        # After an error, only the end is allowed, as if the text were complete.
        if self._matcher.is_error():
            raise ConfigError(f"json_schema: {_short(self._matcher.get_error())}")
        self.complete = bool(self._matcher.is_stopped())


class _Spelled:
    """A tokenizer as llguidance wants it: see its TokenizerWrapper."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int]) -> None:
        table = tokenizer.byte_table
        names = {token: _SPECIAL + text.encode() for text, token in tokenizer.special_tokens.items()}
        control = np.flatnonzero(table.is_control).tolist()
        unnamed = {token: _SPECIAL + f"<{token}>".encode() for token in control}
        named = unnamed | {token: name for token, name in names.items() if token in unnamed}
        self.tokens = [named.get(token) or table[token] for token in range(len(table))]
        self.special_token_ids = control
        self.bos_token_id = tokenizer.bos_id
        ends = [*sorted(stop_ids), tokenizer.eos_id, *control]
        found = next((token for token in ends if token is not None), None)
        # It wants an end; ours is a byte that text has none of, where the tokenizer has no control tokens at all.
        self.eos_token_id = len(self.tokens) if found is None else found
        if found is None:
            self.tokens.append(_SPECIAL + b"<end>")
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return [int(token) for token in self._encode(plain)]


def _short(error: object) -> str:
    """The first line of a message of llguidance."""
    return str(error).strip().split("\n")[0][:300]
