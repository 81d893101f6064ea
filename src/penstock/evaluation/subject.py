"""The model that is evaluated, as tasks see it: it scores continuations and writes texts, from plain prompts or chats.

Guarantees: what a request gets does not depend on what else is asked (but for rounding); what does not fit the context
is cut from the left of the context, and counted. The model must be in evaluation mode; its weights stay.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, final

import torch

from penstock.chat import Template
from penstock.errors import ConfigError
from penstock.evaluation.scoring import Scored, score_pairs
from penstock.generation import Engine, Generated, Sampling, begin_ids
from penstock.generation.prompt import encode_chat
from penstock.models import LanguageModel, most_packed
from penstock.tokenizers import Tokenizer

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Scored", "Subject"]

ONE_A_ROW = "scored one text a row: in rows of several the model lets them see each other"
"""The note on scores of a model of which `PackingVerdict` allows no more."""


@final
class Subject:
    """A model with its tokenizer.

    Attributes:
        num_cut: Contexts and prompts that were shortened so far because they did not fit.
        notes: What whoever reads its scores must know.

    Args:
        model: In evaluation mode.
        tokenizer: The model's.
        context_length: Tokens that it sees at most.
        stop_ids: Ids that end what it writes.
        template: Of its chats; None: it knows none.
        slots: Sequences that are written at the same time.

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
        slots: int = 8,
    ) -> None:
        if model.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"the model has embeddings for {model.vocab_size} ids and its tokenizer ({tokenizer.name}) "
                f"{tokenizer.vocab_size}; give the tokenizer that it was trained with"
            )
        self.model, self.tokenizer, self.context_length = model, tokenizer, context_length
        self.stop_ids = frozenset(int(token) for token in stop_ids)
        self.template, self.num_cut = template, 0
        self.notes: tuple[str, ...] = ()
        self._slots = slots
        self._engine: Engine | None = None

    @property
    def supports_chat(self) -> bool:
        """Whether it has a chat template."""
        return self.template is not None

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of a text from its beginning, BOS first where the model was trained with it."""
        return [*begin_ids(self.tokenizer), *self.tokenizer.encode(text).tolist()]

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation, up to where the assistant's reply begins.

        Raises:
            ConfigError: The model has no chat template.
            RecordError: The template refuses the conversation.
        """
        if self.template is None:
            raise ConfigError("the model has no chat template; give the task as plain text (--plain, chat: false)")
        return list(encode_chat([dict(message) for message in messages], self.template, self.tokenizer))

    def chat_continuation(self, messages: Sequence[Mapping[str, Any]], reply: str) -> tuple[list[int], list[int]]:
        """(context, continuation) ids of an assistant's short reply, as the template and the tokenizer have it there.

        A tokenizer may put a space before a text that stands alone, as SentencePiece does, and none before a reply.
        Where the template writes an answered conversation otherwise than one to be answered, the reply stands alone.
        """
        context = self.chat_ids(messages)
        assert self.template is not None
        answered = [*({**message} for message in messages), {"role": "assistant", "content": reply}]
        whole = list(encode_chat(answered, self.template, self.tokenizer, reply_due=False))
        alone: list[int] = self.tokenizer.encode(reply).tolist()
        if whole[: len(context)] == context:
            for end in range(len(context) + 1, min(len(context) + len(alone) + 2, len(whole) + 1)):
                if self.tokenizer.decode(whole[len(context) : end]).strip() == reply:
                    return context, whole[len(context) : end]
        return context, alone

    def continuation(self, context: str, text: str) -> tuple[list[int], list[int]]:
        """(context, continuation) ids of a text after another, as the tokenizer encodes both together.

        Where a token reaches over the border it belongs to the continuation.
        """
        before, whole = self.prompt_ids(context), self.prompt_ids(context + text)
        same = next((i for i, pair in enumerate(zip(before, whole, strict=False)) if pair[0] != pair[1]), len(before))
        same = min(same, len(whole) - 1)
        return whole[:same], whole[same:]

    def log_likelihoods(self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Scored]:
        """How likely each continuation is after its context, in the order of the requests.

        Args:
            requests: Ids of (context, continuation), neither empty. A context is cut from its left where both together
                are longer than the context by more than the one token that is only predicted.

        Raises:
            ConfigError: A context or a continuation is empty, or a continuation alone is too long.
        """
        pairs = [self._fit(tuple(context), tuple(continuation)) for context, continuation in requests]
        most = most_packed(self.model, min(self.context_length, sum(len(one) + len(two) for one, two in pairs)))
        if most == 0:
            self.notes = (ONE_A_ROW,)
        return score_pairs(self.model, pairs, row_tokens=most, vocab_size=self.tokenizer.vocab_size)

    def write(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Generated]:
        """Write prompts on; one result a prompt.

        Args:
            prompts: Ids of each, cut from the left where they leave too little room: `max_tokens`, or half of the
                context if that is less.
            sampling: For all; or one for each, whose seeds then tell their draws apart whatever else is written.
        """
        if self._engine is None:
            self._engine = Engine(
                self.model,
                self.tokenizer,
                context_length=self.context_length,
                stop_ids=self.stop_ids,
                slots=self._slots,
            )
        shared = sampling is None or isinstance(sampling, Sampling)
        each = [sampling or Sampling()] * len(prompts) if shared else cast("Sequence[Sampling]", sampling)
        fitting = []
        for prompt, one in zip(prompts, cast("Sequence[Sampling]", each), strict=True):
            room = self.room(one.max_tokens)
            self.num_cut += len(prompt) > room
            fitting.append(list(prompt)[-room:])
        return self._engine.generate_all(fitting, sampling)

    def room(self, max_tokens: int | None) -> int:
        """Tokens that a prompt may have: the context without `max_tokens`, or half of it if that is more."""
        half = max(self.context_length // 2, 1)
        return self.context_length - min(max_tokens or half, half)

    def fingerprint(self) -> str:
        """Of weights, tokenizer, context, stop ids and template; the same on every device. A pass over the weights."""
        told = [self.tokenizer.fingerprint, self.context_length, sorted(self.stop_ids)]
        told += [None if self.template is None else (self.template.source, sorted(self.template.variables.items()))]
        digest = hashlib.blake2b(repr(told).encode(), digest_size=8)
        for name, tensor in sorted(cast("nn.Module", self.model).state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} {_sums(tensor)}".encode())
        return digest.hexdigest()

    def _fit(self, context: tuple[int, ...], continuation: tuple[int, ...]) -> tuple[Any, Any]:
        if not context or not continuation:
            what = "continuation" if context else "context"
            raise ConfigError(f"a request has an empty {what}; give at least one token, such as BOS")
        room = self.context_length + 1 - len(continuation)
        if room < 1:
            raise ConfigError(
                f"a continuation has {len(continuation)} tokens, and the model sees {self.context_length}; raise "
                "context_length, or cut it"
            )
        self.num_cut += len(context) > room
        return context[-room:], continuation


def _sums(tensor: torch.Tensor) -> tuple[int, int]:
    """Sums of the bits as whole numbers and of their squares, which wrap: exact in any order, so on any device."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().view(-1).view(kinds[tensor.element_size()]).to(torch.int64)
    return int(bits.sum()), int((bits * bits).sum())
