"""One sequence while it is generated: its tokens, its streamed text, and its end.

Text is made from bytes: characters are never cut, and a stop string is found wherever its bytes
are, in whatever tokens. Text is held back only while it may be the beginning of a stop string or of
a character. Costs: about a microsecond a token.
"""

import codecs
from collections import Counter
from collections.abc import Iterable
from typing import final

from penstock.learn.generation.grammar import Constraint
from penstock.learn.generation.sampling import sequence_key
from penstock.learn.generation.settings import FinishReason, Sampling
from penstock.media.prompts import PromptImages
from penstock.tokenizers.token_text import Spelling


@final
class TextStream:
    """The text of one sequence, as far as it is certain.

    Attributes:
        stopped: Whether a stop string was found; the text ends before it.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = [text.encode() for text in stops]
        self._held = b""
        self._passed = 0
        """Bytes of what is held in which no stop string may end."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.stopped = False

    def push(self, data: bytes, *, may_stop: bool = True) -> str:
        """Add the bytes of a token; returns the text that is certain now. A stop string counts only
        if it ends in a token with `may_stop`.
        """
        self._held += data
        if not self._stops:
            return self._emit(len(self._held))
        if not may_stop:
            self._passed = len(self._held)
        found = [
            place
            for stop in self._stops
            if (place := self._held.find(stop, max(0, self._passed - len(stop) + 1))) >= 0
        ]
        if found:
            self.stopped = True
            return self._emit(min(found))
        return self._emit(len(self._held) - self._begun())

    def finish(self) -> str:
        """The held-back text, at the end of the tokens; an incomplete character is left out."""
        return "" if self.stopped else self._emit(len(self._held))

    def _emit(self, count: int) -> str:
        certain, self._held = self._held[:count], self._held[count:]
        self._passed = max(0, self._passed - count)
        return self._decoder.decode(certain)

    def _begun(self) -> int:
        """Number of bytes at the end that may be the beginning of a stop string."""
        longest = max(map(len, self._stops)) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-count:]
            if any(stop.startswith(end) for stop in self._stops):
                return count
        return 0


def same(tokens: list[int], prompt: list[int]) -> int:
    """Tokens at the beginning that are equal; at most all but the last of the prompt."""
    most = min(len(tokens), len(prompt) - 1)
    if tokens[:most] == prompt[:most]:
        return most
    return next(at for at in range(most) if tokens[at] != prompt[at])


@final
class Sequence:
    """A prompt and the tokens chosen after it.

    Attributes:
        number: The sequence's number, known to the engine's caller.
        ids: Prompt and chosen tokens.
        key: Key of its draws.
        slot: Its slot in the cache; −1 while it waits.
        held: Number of its tokens in the cache.
        images: Of its prompt; None: it has none.
        keys: Its ids, with other numbers for tokens of images: what must be equal to share a
            beginning.
        leader: The running sequence that is reading a beginning of its prompt, which it waits for;
            None: none.
        shared: Tokens that it shares with the leader.
        finish_reason: None until it ends.
        counts: How often each token was chosen, if penalties need it.
        seen: The tokens of prompt and text, if a repetition penalty needs them.
        constraint: What its text must meet; None: nothing.
    """

    __slots__ = (
        "_spelling",
        "_stop_ids",
        "_stream",
        "constraint",
        "counts",
        "finish_reason",
        "held",
        "ids",
        "images",
        "key",
        "keys",
        "leader",
        "limit",
        "number",
        "prompt",
        "sampling",
        "seen",
        "shared",
        "slot",
    )

    def __init__(
        self,
        number: int,
        prompt: list[int],
        sampling: Sampling,
        choice: int,
        context_length: int,
        spelling: Spelling,
        stop_ids: frozenset[int],
        images: PromptImages | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.number, self.ids, self.prompt, self.sampling = (
            number,
            list(prompt),
            len(prompt),
            sampling,
        )
        self.images, self.keys = images, self.ids if images is None else images.keyed(self.ids)
        self.key = sequence_key(sampling.seed, choice)
        self.slot, self.held = -1, 0
        self.leader: Sequence | None = None
        self.shared = 0
        room = context_length - len(prompt)
        self.limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        self.finish_reason: FinishReason | None = None
        self.constraint = constraint
        penalised = sampling.frequency_penalty or sampling.presence_penalty
        self.counts: Counter[int] | None = Counter() if penalised else None
        self.seen: set[int] | None = set(prompt) if sampling.repetition_penalty != 1 else None
        self._spelling, self._stop_ids = spelling, stop_ids
        self._stream = TextStream(sampling.stop)

    def part(self, most: int) -> list[int]:
        """The next tokens for the cache: `most`, or more if that would end within an image."""
        end = self.held + most
        return self.ids[self.held : end if self.images is None else self.images.ceiling(end)]

    def common(self, keys: list[int]) -> int:
        """Tokens at the beginning that are those of `keys`: at most all but the last, and never a
        part of an image.
        """
        found = same(keys, self.keys)
        return found if self.images is None else self.images.floor(found)

    @property
    def written(self) -> int:
        """Number of chosen tokens."""
        return len(self.ids) - self.prompt

    @property
    def may_stop(self) -> bool:
        """Whether the next token may be a stop id."""
        return self.constraint is not None or self.written >= self.sampling.min_tokens

    def accept(self, token: int) -> str:
        """Add a chosen token; returns the text that is certain now. Sets `finish_reason` at the
        end.

        Raises:
            ConfigError: The constraint is too complex to go on.
        """
        self.ids.append(token)
        if self.counts is not None:
            self.counts[token] += 1
        if self.seen is not None:
            self.seen.add(token)
        if self.images is not None:
            self.keys.append(token)
        if token in self._stop_ids:
            self.finish_reason = "stop"
            return self._stream.finish()
        if self.constraint is not None:
            self.constraint.accept(token)
        spelled = self._spelling[token]
        if self.written == 1 and spelled.startswith(b" ") and self._spelling.spaced(self.ids[-2]):
            spelled = spelled[1:]
        text = self._stream.push(spelled, may_stop=self.may_stop)
        if self._stream.stopped:
            self.finish_reason = "stop"
        elif self.constraint is not None and self.constraint.complete:
            self.finish_reason = "stop"
            text += self._stream.finish()
        elif self.written >= self.limit:
            self.finish_reason = "length"
            text += self._stream.finish()
        return text
