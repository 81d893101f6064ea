"""The model that is evaluated, as tasks see it: it scores continuations and writes texts, from
plain prompts or chats.

Guarantees: an answer does not depend on the other requests, except for rounding. A request that
does not fit the context is cut from the left, and counted. A written reply depends only on its
problem and its number. The model must be in evaluation mode; its weights do not change.

Many short sequences are scored in few passes: they are packed into rows as separate documents. The
model is fed the context and the continuation without its last token, which is only predicted. Pairs
with the same fed tokens, such as the letters of a multiple choice, are run once. Only the slots
that predict a continuation reach the head, in blocks. Cost: one pass over all fed tokens, in which
a common beginning of contexts, such as solved problems, counts once for each row of prefix trees
(`inputs.prefix_trees`). A model that needs its own attention code, or has a sliding window, reads
it again for each context.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np
import torch

from penstock.chat import Template
from penstock.core.arrays import Int64
from penstock.core.errors import ConfigError, StateError
from penstock.core.json_values import JsonMapping
from penstock.learn.generation import Engine, Generated, Sampling
from penstock.learn.generation.session import encode_chat
from penstock.models import LanguageModel
from penstock.models.facts import require_token_by_token
from penstock.models.head import Head
from penstock.models.language_model import most_packed
from penstock.plan.inputs import pack_documents
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.prefix_trees import pack_trees, tree_rows
from penstock.tokenizers import Tokenizer

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Scored", "Subject"]

ELEMENTS = 1 << 24
"""Approximate number of logits that exist at once."""
TREE_SLOTS = 4096
"""Slots of a row of prefix trees, at least: the more sequences share a beginning in one row, the
less it costs.
"""
ONE_A_ROW = "scored one text per row: the model lets texts in a packed row see each other"
"""The note on scores if the model's `PackingVerdict` forbids packed rows."""

Ids = tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Scored:
    """How likely a model finds a continuation."""

    log_probability: float
    """Natural logarithm, summed over the tokens."""
    is_greedy: bool
    """Whether each token is the most likely one."""


@torch.no_grad()
def score_pairs(
    model: LanguageModel, pairs: Sequence[tuple[Ids, Ids]], *, row_tokens: int, vocab_size: int
) -> list[Scored]:
    """Log-probabilities of continuations, in the order of the pairs.

    Args:
        model: In evaluation mode.
        pairs: (context, continuation), neither empty.
        row_tokens: Slots of a row, at most what `most_packed` allows; a longer sequence gets its
            own row.
        vocab_size: Number of ids of the tokenizer; logits beyond them are left out.

    Raises:
        IsolationError: Sequences would see each other in rows of this length.
    """
    owners: dict[Ids, list[int]] = {}
    shares = _may_share(model, row_tokens)
    for place, (context, continuation) in enumerate(pairs):
        owners.setdefault((*context, *continuation[:-1]), []).append(place)
    sums = np.zeros(len(pairs))
    greedy = np.ones(len(pairs), np.bool_)
    # Neighbours share most; the order does not depend on the requests'.
    for members in (
        tree_rows(sorted(owners), max(row_tokens, TREE_SLOTS))
        if shares
        else _rows(owners, row_tokens)
    ):
        row, places_of = pack_trees(members) if shares else _separate(members)
        slots, targets, of = _wanted(members, places_of, owners, pairs)
        hidden = model(model.tensors(row))[0]
        places, inverse = np.unique(slots, return_inverse=True)
        order = np.argsort(inverse, kind="stable")
        inverse, targets, of = inverse[order], targets[order], of[order]
        block, head = max(16, ELEMENTS // model.vocab_size), Head.of_model(model)
        for begin in range(0, len(places), block):
            end = begin + block
            index = torch.from_numpy(places[begin:end]).to(hidden.device)
            logits = head.wide(hidden.index_select(0, index))[:, :vocab_size]
            some = slice(*np.searchsorted(inverse, (begin, end)))
            rows = torch.from_numpy(inverse[some] - begin).to(hidden.device)
            chosen = torch.from_numpy(targets[some]).to(hidden.device)
            logs = logits.log_softmax(-1)[rows, chosen].double().cpu().numpy()
            likeliest = (logits.argmax(-1)[rows] == chosen).cpu().numpy()
            np.add.at(sums, of[some], logs)
            np.logical_and.at(greedy, of[some], likeliest)
    return [Scored(float(one), bool(same)) for one, same in zip(sums, greedy, strict=True)]


def _may_share(model: LanguageModel, row_tokens: int) -> bool:
    """Whether common beginnings may be computed once: rows may be packed, and our attention sees
    all before a token.
    """
    if not model.uses_our_attention or row_tokens == 0:
        return False
    longest = max(row_tokens, TREE_SLOTS)
    return model.tensors(packed([[0]])).window is None and model.packing(longest).reason is None


def packed(documents: Sequence[Sequence[int]]) -> ModelInput:
    """A row of separate documents, without padding."""
    return _separate(documents)[0]


def _separate(documents: Sequence[Sequence[int]]) -> tuple[ModelInput, list[Int64]]:
    """A row of separate documents, and the slots of each."""
    ids = [np.array(document, np.int32) for document in documents]
    row, begins = pack_documents(ids, np.zeros(len(ids), np.int32))
    return row, [begin + np.arange(len(one)) for begin, one in zip(begins, ids, strict=True)]


def _rows(sequences: Iterable[Ids], row_tokens: int) -> Iterator[list[Ids]]:
    """Fill rows with sequences, the longest first, so that a row holds sequences of similar
    length.
    """
    row: list[Ids] = []
    used = 0
    for one in sorted(sequences, key=lambda fed: (-len(fed), fed)):
        if row and used + len(one) > row_tokens:
            yield row
            row, used = [], 0
        row.append(one)
        used += len(one)
    if row:
        yield row


def _wanted(
    members: Sequence[Ids],
    places_of: Sequence[Int64],
    owners: dict[Ids, list[int]],
    pairs: Sequence[tuple[Ids, Ids]],
) -> tuple[Int64, Int64, Int64]:
    """For each token to score in a row: the slot that predicts it, its id, and its pair.

    `places_of`: the slots of each member's tokens.
    """
    slots: list[int] = []
    targets: list[int] = []
    of: list[int] = []
    for fed, places in zip(members, places_of, strict=True):
        for pair in owners[fed]:
            context, continuation = pairs[pair]
            slots += places[len(context) - 1 :].tolist()
            targets += continuation
            of += [pair] * len(continuation)
    return np.array(slots, np.int64), np.array(targets, np.int64), np.array(of, np.int64)


@final
class Subject:
    """A model with its tokenizer.

    Attributes:
        begin_ids: The ids before a text.
        num_cut: Number of contexts and prompts that were shortened so far because they did not fit.
        notes: Remarks that readers of its scores must know.

    Args:
        model: In evaluation mode.
        tokenizer: The model's tokenizer.
        context_length: Maximum tokens in the model's context.
        stop_ids: Ids that end a generated text.
        template: The model's chat template, if it has one.
        begin_ids: The ids before a text, as the model was trained; None: as the tokenizer's own
            encoding has them.
        slots: Number of sequences that are generated at the same time.

    Raises:
        ConfigError: The model has fewer embeddings than the tokenizer has ids.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        context_length: int,
        stop_ids: Collection[int] = (),
        template: Template | None = None,
        begin_ids: Sequence[int] | None = None,
        slots: int = 8,
    ) -> None:
        require_token_by_token(model, "a task")
        if model.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"the model has embeddings for {model.vocab_size} ids, its tokenizer "
                f"({tokenizer.name}) has {tokenizer.vocab_size}; give the tokenizer that it "
                "was trained with"
            )
        self.model, self.tokenizer, self.context_length = model, tokenizer, context_length
        self.stop_ids = frozenset(int(token) for token in stop_ids)
        self.template, self.num_cut = template, 0
        self.begin_ids = tuple(tokenizer.begin_ids if begin_ids is None else begin_ids)
        self.notes: tuple[str, ...] = ()
        self._slots = slots
        self._engine: Engine | None = None

    @property
    def supports_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self.template is not None

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of a text, after BOS if the model was trained with it."""
        return [*self.begin_ids, *self.tokenizer.encode(text).tolist()]

    def chat_ids(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Ids of a conversation, up to the place where the assistant's reply begins.

        Raises:
            ConfigError: The model has no chat template.
            RecordError: The template refuses the conversation.
        """
        if self.template is None:
            raise ConfigError(
                "the model has no chat template; set chat to false to run the task as plain text"
            )
        return list(
            encode_chat([dict(message) for message in messages], self.template, self.tokenizer)
        )

    def chat_continuation(
        self, messages: Sequence[JsonMapping], reply: str
    ) -> tuple[list[int], list[int]]:
        """(context, continuation) ids of an assistant's short reply, encoded as part of the
        rendered conversation.

        Some tokenizers, such as SentencePiece, put a space before a separate text but none before a
        reply. If the template writes an answered conversation differently from one to be answered,
        the reply is encoded separately.
        """
        context = self.chat_ids(messages)
        assert self.template is not None
        answered = [*({**message} for message in messages), {"role": "assistant", "content": reply}]
        whole = list(
            encode_chat(answered, self.template, self.tokenizer, add_generation_prompt=False)
        )
        alone: list[int] = self.tokenizer.encode(reply).tolist()
        if whole[: len(context)] == context:
            for end in range(len(context) + 1, min(len(context) + len(alone) + 2, len(whole) + 1)):
                if self.tokenizer.decode(whole[len(context) : end]).strip() == reply:
                    return context, whole[len(context) : end]
        return context, alone

    def continuation(self, context: str, text: str) -> tuple[list[int], list[int]]:
        """(context, continuation) ids of two texts that are encoded together.

        A token that reaches over the border belongs to the continuation.
        """
        before, whole = self.prompt_ids(context), self.prompt_ids(context + text)
        same = next(
            (i for i, pair in enumerate(zip(before, whole, strict=False)) if pair[0] != pair[1]),
            len(before),
        )
        same = min(same, len(whole) - 1)
        return whole[:same], whole[same:]

    def log_likelihoods(
        self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[Scored]:
        """How likely each continuation is after its context, in the order of the requests.

        Args:
            requests: Ids of (context, continuation), neither empty. If both without the last token,
                which is only predicted, do not fit the model's context, the request's context is
                cut from the left.

        Raises:
            ConfigError: A context or a continuation is empty, or a continuation alone is too long.
            StateError: A log-probability is NaN.
        """
        pairs = [
            self._fit(tuple(context), tuple(continuation)) for context, continuation in requests
        ]
        most = most_packed(
            self.model, min(self.context_length, sum(len(one) + len(two) for one, two in pairs))
        )
        if most == 0:
            self.notes = (ONE_A_ROW,)
        scored = score_pairs(
            self.model, pairs, row_tokens=most, vocab_size=self.tokenizer.vocab_size
        )
        if any(math.isnan(one.log_probability) for one in scored):
            raise StateError(
                "the model gives log-probabilities that are NaN, so it has no score; its weights "
                "or its activations are not finite: take an earlier checkpoint, or compute in "
                "float32 or bfloat16"
            )
        return scored

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        stop_ids: Collection[int] = (),
    ) -> list[Generated]:
        """Continue prompts; returns one result per prompt.

        Args:
            prompts: Ids of each. A prompt is cut from the left to leave room for `max_tokens`, or
                for half of the context if that is less.
            sampling: One for all, or one for each; then a draw depends only on its own seed.
            stop_ids: Ids that end these texts, besides those of the model.
        """
        ends = self.stop_ids.union(stop_ids)
        if self._engine is None or self._engine.stop_ids != ends:
            self._engine = None  # Its memory is free before the next one takes some.
            self._engine = Engine(
                self.model,
                self.tokenizer,
                context_length=self.context_length,
                stop_ids=ends,
                slots=self._slots,
            )
        shared = sampling is None or isinstance(sampling, Sampling)
        each = (
            [sampling or Sampling()] * len(prompts)
            if shared
            else cast("Sequence[Sampling]", sampling)
        )
        fitting = []
        for prompt, one in zip(prompts, cast("Sequence[Sampling]", each), strict=True):
            room = self.room(one.max_tokens)
            self.num_cut += len(prompt) > room
            fitting.append(list(prompt)[-room:])
        return self._engine.generate_all(fitting, sampling)

    def room(self, max_tokens: int | None) -> int:
        """Maximum tokens of a prompt: the context minus `max_tokens`, or half of the context if
        that is more.
        """
        half = max(self.context_length // 2, 1)
        return self.context_length - min(max_tokens or half, half)

    def fingerprint(self) -> str:
        """Fingerprint of weights, tokenizer, context, ids around texts and template: reads all
        weights; equal on any device.
        """
        parts = [
            self.tokenizer.fingerprint,
            self.context_length,
            self.begin_ids,
            sorted(self.stop_ids),
        ]
        parts += [
            None
            if self.template is None
            else (self.template.source, sorted(self.template.variables.items()))
        ]
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=8)
        for name, tensor in sorted(cast("nn.Module", self.model).state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} {_sums(tensor)}".encode())
        return digest.hexdigest()

    def _fit(self, context: tuple[int, ...], continuation: tuple[int, ...]) -> tuple[Any, Any]:
        if not context or not continuation:
            what = "continuation" if context else "context"
            raise ConfigError(
                f"a request has an empty {what}; give at least one token, such as BOS"
            )
        room = self.context_length + 1 - len(continuation)
        if room < 1:
            raise ConfigError(
                f"a continuation has {len(continuation)} tokens, but the context is "
                f"{self.context_length}; raise context_length, or shorten the continuation"
            )
        self.num_cut += len(context) > room
        return context[-room:], continuation


def _sums(tensor: torch.Tensor) -> tuple[int, int]:
    """Sums of the bits as integers and of their squares, with wraparound: exact in any order, so on
    any device.
    """
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().view(-1).view(kinds[tensor.element_size()]).to(torch.int64)
    return int(bits.sum()), int((bits * bits).sum())
