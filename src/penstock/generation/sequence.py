"""One sequence while it is written: its tokens, its text, and when it ends."""

from typing import final

from penstock.generation.events import FinishReason
from penstock.generation.sampling import sequence_key
from penstock.generation.settings import Sampling
from penstock.generation.text import Spelling, TextStream


@final
class Sequence:
    """A prompt and what was chosen after it.

    Attributes:
        number: By which the engine's caller knows it.
        ids: Prompt and chosen tokens.
        key: Of its draws.
        slot: Its place in the cache; −1 while it waits.
        held: How many of its tokens the cache has.
        finish_reason: None while it goes on.
    """

    __slots__ = (
        "_spelling", "_stop_ids", "_stream", "finish_reason", "held", "ids", "key", "limit", "number", "prompt",
        "sampling", "slot",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        prompt: list[int],
        sampling: Sampling,
        choice: int,
        context_length: int,
        spelling: Spelling,
        stop_ids: frozenset[int],
    ) -> None:
        self.number, self.ids, self.prompt, self.sampling = number, list(prompt), len(prompt), sampling
        self.key = sequence_key(sampling.seed, choice)
        self.slot, self.held = -1, 0
        room = context_length - len(prompt)
        self.limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        self.finish_reason: FinishReason | None = None
        self._spelling, self._stop_ids = spelling, stop_ids
        self._stream = TextStream(sampling.stop)

    @property
    def written(self) -> int:
        """Tokens that were chosen."""
        return len(self.ids) - self.prompt

    @property
    def may_stop(self) -> bool:
        """Whether the next token may be a stop id."""
        return self.written >= self.sampling.min_tokens

    def accept(self, token: int) -> str:
        """Take a token that was chosen; the text that is certain now. Sets `finish_reason` at the end."""
        self.ids.append(token)
        if token in self._stop_ids:
            self.finish_reason = "stop"
            return self._stream.finish()
        text = self._stream.push(self._spelling[token], may_stop=self.may_stop)
        if self._stream.stopped:
            self.finish_reason = "stop"
        elif self.written >= self.limit:
            self.finish_reason = "length"
            text += self._stream.finish()
        return text
