"""The generation engine: continuous batching, where sequences join and leave between steps.

A new sequence gets the free cache slot that has the longest common prefix with its prompt, and only
the rest of the prompt is computed. So the next reply in a chat costs only the new turns, and a
repeated prompt costs one token. If a running sequence has a longer one, that is copied; while its
prompt is still being read, the new sequence waits for it. So prompts with the same beginning, or
several samples of one prompt, cost it once.

Guarantees: a sequence depends on its prompt and settings, not on the other sequences, except for
the rounding of matrix products of another size. Control tokens are never chosen, except stop ids.
No sequence exceeds the context. Costs: the memory of `Cache`, which follows use. A step is one pass
over the weights for all sequences that are being generated, and one more while prompts are read.
Prompts are read in parts of `prompt_part` tokens, so that a long prompt does not delay the others.

An engine belongs to one thread. A server's loop submits and cancels between steps.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.learn.generation import sequence as sequences
from penstock.learn.generation.choosing import Chooser
from penstock.learn.generation.grammar import Grammars
from penstock.learn.generation.scoring import score
from penstock.learn.generation.settings import (
    NO_TOKEN,
    Event,
    FinishReason,
    Generated,
    LogProbabilities,
    Sampling,
)
from penstock.learn.generation.slots import Slots
from penstock.media.prompts import PromptImages
from penstock.media.rows import BlankImage
from penstock.models import LanguageModel
from penstock.models.facts import require_token_by_token
from penstock.plan.inputs.torch_tensors import on_device
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.token_text import Spelling

PROMPT_PART = 512
"""Tokens of a prompt that are read in one step."""
LEAST_SHARED = 16
"""Tokens that a sequence takes from a running one, at least: fewer are read again, without waiting
for it.
"""
LOOK, LOOK_ALONE = 0.02, 0.1
"""Seconds that a step waits for what may come next in texts with a JSON schema: while other
sequences can go on, and while none can.
"""


@final
class Engine:
    """Generates sequences with one model.

    Attributes:
        context_length: Maximum tokens of a sequence, including its prompt.
        stop_ids: Ids that end a sequence.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        context_length: int,
        stop_ids: Collection[int] = (),
        forbidden_ids: Collection[int] | None = None,
        allowed_controls: Collection[int] = (),
        slots: int = 8,
        prompt_part: int = PROMPT_PART,
        images: BlankImage | None = None,
    ) -> None:
        """Allocate the cache.

        Args:
            model: The model.
            tokenizer: The model's tokenizer; its byte table makes the text.
            context_length: Maximum tokens of a sequence, including its prompt.
            stop_ids: Ids that end a sequence.
            forbidden_ids: Ids that are never chosen; None: all control tokens except the stop ids.
                Embedding rows without a tokenizer id are never chosen.
            allowed_controls: Control tokens that may be chosen besides, such as those that begin
                calls of tools; their names are text.
            slots: Number of sequences that run at the same time; others wait.
            prompt_part: Tokens of a prompt that are read in one step.
            images: The blank image of an `ImageReader`, for prompts with images; None: they are
                refused.

        Raises:
            ConfigError: The model reads no such images, a number is out of range, or an id is not
                in the model's vocabulary.
            TokenizerError: The vocabulary has no exact byte table.
        """
        sizes = (
            ("slots", slots, 1),
            ("prompt_part", prompt_part, 1),
            ("context_length", context_length, 2),
        )
        for name, value, least in sizes:
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        require_token_by_token(model, "writing token by token")
        self.tokenizer, self.context_length = tokenizer, context_length
        self.stop_ids = frozenset(int(token) for token in stop_ids)
        self._model, self._part = model, prompt_part
        allowed = self.stop_ids.union(allowed_controls)
        forbidden = (
            control_ids(tokenizer) - allowed if forbidden_ids is None else frozenset(forbidden_ids)
        )
        self._check_ids(self.stop_ids | forbidden)
        self._spelling = Spelling(tokenizer, self.stop_ids)
        unknown = range(min(tokenizer.vocab_size, model.vocab_size), model.vocab_size)
        self._chooser = Chooser({*forbidden, *unknown}, self.stop_ids, model.device)
        self._reads_images = images is not None
        if images is not None:
            model.expect_images(images)
        self._cache = model.new_cache(slots, context_length)
        self._slots = Slots(self._cache, slots)
        self._waiting: deque[sequences.Sequence] = deque()
        self._running: dict[int, sequences.Sequence] = {}
        self._submitted = 0
        self._full = False
        self._grammars: Grammars | None = None
        self._making_grammars = threading.Lock()

    @property
    def num_running(self) -> int:
        """Number of sequences with a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for a slot."""
        return len(self._waiting)

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        *,
        choice: int = 0,
        images: PromptImages | None = None,
    ) -> int:
        """Add a sequence; it runs from the next step, or as soon as a slot is free.

        Args:
            prompt: Ids, including BOS if the model expects it.
            sampling: How tokens are chosen.
            choice: Distinguishes sequences with the same seed, such as several replies to one
                prompt.
            images: Of the prompt; None: it has none.

        Returns:
            The sequence's number, which its events have.

        Raises:
            ConfigError: The prompt is empty, leaves no room in the context, or has ids outside the
                vocabulary, or the JSON schema is not supported.
            MissingExtraError: There is a JSON schema, and llguidance is not installed.
        """
        ids = [int(token) for token in prompt]
        if not ids:
            raise ConfigError(
                "the prompt is empty, but a model needs a token to begin with; give some "
                "text, or BOS"
            )
        if len(ids) >= self.context_length:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens, but the context of {self.context_length} "
                "must hold it and at least one more token; shorten it"
            )
        self._check_ids(ids)
        if images is not None and not self._reads_images:
            raise ConfigError(
                "the prompt has images, and the engine was made without; give it Engine(images=…)"
            )
        number, self._submitted = self._submitted, self._submitted + 1
        settings = sampling or Sampling()
        self._check_ids(settings.logit_bias)
        constraint = (
            None if settings.json_schema is None else self.grammars.constraint(settings.json_schema)
        )
        self._waiting.append(
            sequences.Sequence(
                number,
                ids,
                settings,
                choice,
                self.context_length,
                self._spelling,
                self.stop_ids,
                images,
                constraint,
            )
        )
        return number

    @property
    def grammars(self) -> Grammars:
        """Compiles JSON schemas, in any thread; made at its first use.

        Raises:
            ConfigError: The tokenizer cannot spell what every JSON is made of.
            MissingExtraError: llguidance is not installed.
        """
        with self._making_grammars:
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer, self.stop_ids)
            return self._grammars

    def cancel(self, sequence: int) -> None:
        """Remove a sequence; nothing happens if it has ended."""
        running = self._running.get(sequence)
        if running is not None:
            self._leave(running)
        self._waiting = deque(waiting for waiting in self._waiting if waiting.number != sequence)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Choose one token for each sequence with a fully read prompt, and read a part of the other
        prompts.

        A sequence with a JSON schema is left out while it is not known yet what may come next, so
        that no schema delays other sequences.

        Returns:
            Events in the order in which sequences joined; empty if nothing runs, or none can go on
            yet.
        """
        while self._waiting and len(self._slots) and not self._full:
            self._join(self._waiting.popleft())
        for each in self._running.values():
            if each.leader is not None and each.leader.held >= each.shared:
                self._take_shared(each)
        going = [each for each in self._ready() if each.leader is None]
        failed = [
            self._failed(each)
            for each in going
            if each.constraint is not None and each.constraint.error
        ]
        going = [each for each in going if each.number in self._running]
        written = [each for each in going if each.held == len(each.ids) - 1]
        read = [each for each in going if each.held < len(each.ids) - 1]
        events = failed + self._feed(read, self._part) + self._feed(written, 1)
        return sorted(events, key=lambda event: event.sequence)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        first_choice: int = 0,
        images: Sequence[PromptImages | None] | None = None,
    ) -> Iterator[Event]:
        """Continue any number of prompts; yields events as they come.

        Args:
            prompts: Ids of each prompt.
            sampling: One for all: each prompt then has its own draws. Or one for each: equal
                prompts with equal settings then give equal texts.
            first_choice: Choice number of the first prompt; the others follow; see `submit`.
            images: Of each prompt; None: there are none.

        Yields:
            Events; `sequence` is the prompt's index. If the iterator is closed early, its sequences
            are cancelled.

        Raises:
            ConfigError: See `submit`; or the engine has other sequences; or a JSON schema is too
                complex.
        """
        if self._running or self._waiting:
            raise ConfigError(
                "the engine has other sequences; use submit() and step(), or let them end"
            )
        shared = sampling is None or isinstance(sampling, Sampling)
        settings = (
            [sampling] * len(prompts)
            if sampling is None or isinstance(sampling, Sampling)
            else [*sampling]
        )
        if len(settings) != len(prompts):
            raise ConfigError(
                f"{len(prompts)} prompts have {len(settings)} sampling settings; give one "
                "each, or one for all"
            )
        places: dict[int, int] = {}
        seen = images or [None] * len(prompts)
        try:
            for place, (prompt, each, own) in enumerate(zip(prompts, settings, seen, strict=True)):
                places[
                    self.submit(prompt, each, choice=first_choice + place * shared, images=own)
                ] = place
            while self._running or self._waiting:
                for event in self.step():
                    if event.error is not None:
                        raise event.error
                    yield replace(event, sequence=places[event.sequence])
        finally:
            for number in places:
                self.cancel(number)

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        images: Sequence[PromptImages | None] | None = None,
    ) -> list[Generated]:
        """Run `generate` to its end; returns one result per prompt."""
        events: list[list[Event]] = [[] for _ in prompts]
        for event in self.generate(prompts, sampling, images=images):
            events[event.sequence].append(event)
        return [collect(each) for each in events]

    @torch.inference_mode()
    def score(self, prompt: Sequence[int], most: int) -> list[LogProbabilities]:
        """The model's log-probabilities of all tokens of a prompt but the first, each after those
        before it.

        Args:
            prompt: Ids; at most as many as the context holds.
            most: Number of alternatives for each.

        Raises:
            ConfigError: There is no id, too many, or one outside the vocabulary.
        """
        self._check_ids([*prompt])
        return score(self._model, prompt, most, self.context_length)

    def _join(self, sequence: sequences.Sequence) -> None:
        """Assign a slot; copy the shared prefix once the running sequence has computed it."""
        self._slots.take(sequence)
        shared = {other: sequence.common(other.keys) for other in self._running.values()}
        leader = max(shared, key=lambda other: (shared[other], other.held), default=None)
        if leader is not None and shared[leader] >= sequence.held + LEAST_SHARED:
            sequence.leader, sequence.shared = leader, shared[leader]
        self._running[sequence.number] = sequence

    def _take_shared(self, sequence: sequences.Sequence) -> None:
        """Copy what the cache has of the beginning that a sequence shares with its leader."""
        leader = sequence.leader
        assert leader is not None
        held = self._cache.kept(leader.slot, min(leader.held, sequence.shared))
        if held > sequence.held:
            self._cache.copy(leader.slot, sequence.slot, held)
            sequence.held = held
        sequence.leader = None

    def _ready(self) -> list[sequences.Sequence]:
        """The running sequences of which it is known what may come next; waits a moment for the
        others.
        """
        running = list(self._running.values())
        looking = [each.constraint.looking for each in running if each.constraint is not None]
        searches = [search for search in looking if search is not None]
        if searches:
            alone = len(searches) == len(running)
            wait(searches, LOOK)
            if alone:
                wait(searches, LOOK_ALONE, FIRST_COMPLETED)
        return [
            each for each in running if each.constraint is None or each.constraint.looking is None
        ]

    def _failed(self, sequence: sequences.Sequence) -> Event:
        """End a sequence that its JSON schema lets go on no more."""
        assert sequence.constraint is not None
        self._leave(sequence)
        return Event(sequence.number, NO_TOKEN, "", error=sequence.constraint.error)

    def _feed(self, group: list[sequences.Sequence], most: int) -> list[Event]:
        """Feed each sequence up to `most` tokens that the cache lacks; choose a token for those
        that lack no more.
        """
        group, events = self._with_room(group, most)
        if not group:
            return events
        group.sort(key=lambda each: each.slot)
        parts = [each.part(most) for each in group]
        logits = self._extend(parts, group)
        for each, part in zip(group, parts, strict=True):
            each.held += len(part)
        ready = [row for row, each in enumerate(group) if each.held == len(each.ids)]
        if not ready:
            return events
        if len(ready) < len(group):
            logits = logits[on_device(torch.tensor(ready), logits.device)]
        return events + self._choose([group[row] for row in ready], logits)

    def _with_room(
        self, group: list[sequences.Sequence], most: int
    ) -> tuple[list[sequences.Sequence], list[Event]]:
        """Those that the cache has room for; and an event of one that it will never have room for.

        First, free slots lose what they hold. Then the sequence that joined last waits, and is read
        again later.
        """
        while group := [each for each in group if each.number in self._running]:
            lack = self._cache.lack({each.slot: len(each.part(most)) for each in group})
            if not lack:
                break
            if self._slots.forget():
                continue
            if len(self._running) == 1:
                [alone] = group
                self._leave(alone)
                return [], [Event(alone.number, NO_TOKEN, "", error=ConfigError(lack))]
            last = [*self._running.values()][-1]
            self._leave(last)
            self._slots.forget()
            last.slot, last.leader = -1, None
            self._waiting.appendleft(last)
            # Until one ends, it would be read in vain.
            self._full = True
        return group, []

    def _extend(self, parts: list[list[int]], group: list[sequences.Sequence]) -> Tensor:
        """Logits [B, vocab] after each row's tokens."""
        width = max(map(len, parts))
        # On the host: the cache sends them with all else that the device must know.
        tokens = torch.tensor([part + [0] * (width - len(part)) for part in parts])
        lengths = torch.tensor([len(part) for part in parts])
        slots = torch.tensor([each.slot for each in group])
        if all(each.images is None for each in group):
            return self._model.extend(tokens, lengths, self._cache, slots)
        return self._model.extend(
            tokens, lengths, self._cache, slots, [each.images for each in group]
        )

    def _choose(self, group: list[sequences.Sequence], logits: Tensor) -> list[Event]:
        """The next token of each sequence, from logits [B, vocab]."""
        chosen, logprobs = self._chooser.choose(group, logits)
        events = []
        for row, (each, token) in enumerate(zip(group, chosen, strict=True)):
            reported = logprobs[row] if logprobs else None
            error = None
            try:
                text = each.accept(token)
            except ConfigError as raised:
                # Only this sequence ends.
                text, error = "", raised
            events.append(Event(each.number, token, text, each.finish_reason, reported, error))
            if each.finish_reason is not None or error is not None:
                self._leave(each)
        return events

    def _leave(self, sequence: sequences.Sequence) -> None:
        for follower in self._running.values():
            if follower.leader is sequence:
                self._take_shared(follower)
        del self._running[sequence.number]
        self._full = False
        self._slots.give_back(sequence)

    def _check_ids(self, ids: Collection[int]) -> None:
        known = self._model.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < known):
            wrong = next(token for token in ids if not 0 <= token < known)
            raise ConfigError(
                f"id {wrong} is not in the model's vocabulary of {known}; use the model's own "
                "tokenizer"
            )


def collect(events: Sequence[Event]) -> Generated:
    """Join all events of one sequence to one result."""
    reason: FinishReason | None = events[-1].finish_reason
    assert reason is not None
    return Generated(
        tokens=tuple(event.token for event in events),
        text="".join(event.text for event in events),
        finish_reason=reason,
        logprobs=tuple(event.logprobs for event in events if event.logprobs is not None),
    )


def control_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of all control tokens."""
    return frozenset(np.flatnonzero(tokenizer.byte_table.is_control).tolist())
