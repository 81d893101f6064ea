"""Writes texts with a model that restores masked tokens: masks are appended to a prompt, block by
block, and in each step those that the model is surest of are replaced by what it chose.

A block begins where those of training do. A model of whole documents sees all masks of a text, also
those of blocks to come (LLaDA's semi-autoregressive sampling, Nie et al. 2025, arXiv:2502.09992,
algorithm 5); a model of blocks sees the blocks so far (Arriola et al. 2025, arXiv:2503.09573). A
text ends at the first stop id, once all of its block is written.

Guarantees: a text depends on its prompt, seed and settings, not on the others, except for the
rounding of matrix products of another size. A mask is never chosen, nor a control token other than
stop ids. Costs: a pass over all texts for each step, without a cache.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import final

import numpy as np
import torch

from penstock.core.arrays import Float64, Int64
from penstock.core.errors import ConfigError
from penstock.core.randomness import key_for
from penstock.learn.generation.engine import control_ids
from penstock.learn.generation.sampling import Sampler, check_finite, draw
from penstock.learn.generation.settings import FinishReason, Generated, Sampling
from penstock.learn.generation.unmask_settings import Unmasking
from penstock.models import LanguageModel
from penstock.models.facts import DiffusionFacts
from penstock.plan.inputs.model_input import ModelInput, pack_documents
from penstock.plan.inputs.torch_tensors import on_device
from penstock.tokenizers import Tokenizer

BLOCK = 32
"""Tokens of a block of a model that sees whole documents, by default."""
_HONOURED = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop")
"""Settings of `Sampling` that have a meaning where tokens are chosen in any order."""


@final
@dataclass(slots=True)
class _Text:
    """A text that is being written."""

    ids: list[int]
    """Prompt, and what is written; masks where it is not."""
    prompt: int
    """Tokens of the prompt."""
    end: int
    """Maximum tokens, with the prompt."""
    sampling: Sampling
    key: int
    begin: int = 0
    """First token of the block that is being written."""
    done: bool = False
    steps: int = 0
    """Of all blocks so far."""
    stop: int | None = None
    """Where the stop id is."""


@final
class Unmasker:
    """Writes texts with a model that was trained by diffusion.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        context_length: Maximum tokens of a text, with its prompt.
        stop_ids: Ids that end a text.

    Raises:
        ConfigError: The model was not trained by diffusion.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        context_length: int,
        stop_ids: Collection[int] = (),
    ) -> None:
        if model.facts.diffusion is None:
            raise ConfigError(
                "the model was not trained by diffusion, so it writes token by token; leave out "
                "unmask_steps, unmask_block and remasking"
            )
        self._model, self._tokenizer, self.context_length = model, tokenizer, context_length
        self._facts: DiffusionFacts = model.facts.diffusion
        self.stop_ids = frozenset(stop_ids)
        never = {*control_ids(tokenizer) - self.stop_ids, self._facts.mask_id}
        never |= {*range(tokenizer.vocab_size, model.vocab_size)}
        self._never = torch.tensor(sorted(never), dtype=torch.int64, device=model.device)

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        samplings: Sampling | Sequence[Sampling],
        how: Unmasking | None = None,
    ) -> list[Generated]:
        """Whole texts, without their prompts; see `blocks`."""
        texts = self._begin(prompts, samplings)
        for _ in self._run(texts, how or Unmasking()):
            pass
        return [self._written(text) for text in texts]

    def fill(
        self, texts: Sequence[Sequence[int]], sampling: Sampling, how: Unmasking | None = None
    ) -> list[tuple[int, ...]]:
        """Texts with all their masks replaced, wherever they are.

        Args:
            texts: Ids, with BOS if the model expects it, and masks.
            sampling: temperature, top_k, top_p, min_p and seed have a meaning.
            how: How masks are replaced; all of a text's masks are one block.

        Raises:
            ConfigError: The model sees texts block by block, so it cannot see what stands behind a
                mask; or a text has no mask, or is longer than the context.
        """
        how, mask = how or Unmasking(), self._facts.mask_id
        if self._facts.block:
            raise ConfigError(
                f"the model was trained with blocks of {self._facts.block}, so a mask does not see "
                "what stands behind its block; train with masked_diffusion to fill masks in "
                "anywhere"
            )
        _check(sampling)
        begun = []
        for place, ids in enumerate(texts):
            if mask not in ids or len(ids) > self.context_length:
                raise ConfigError(
                    f"text {place} has {len(ids)} tokens, {list(ids).count(mask)} of them masks; "
                    f"expected a mask, and at most {self.context_length} tokens"
                )
            key = key_for(sampling.seed, "unmasking", place)
            begun.append(_Text([*map(int, ids)], 0, len(ids), sampling, key))
        masks = [text.ids.count(mask) for text in begun]
        self._unmask(begun, [text.end for text in begun], masks, how)
        return [tuple(text.ids) for text in begun]

    def blocks(
        self, prompt: Sequence[int], sampling: Sampling, how: Unmasking | None = None
    ) -> Iterator[str]:
        """A text, piece by piece: as each block is written.

        Args:
            prompt: Ids, with BOS if the model expects it.
            sampling: temperature, top_k, top_p, min_p, seed, max_tokens and stop have a meaning.
            how: How masks are replaced.

        Raises:
            ConfigError: A setting has none here, or the prompt is empty or fills the context.
        """
        [text] = self._begin([prompt], sampling)
        shown = 0
        for _ in self._run([text], how or Unmasking()):
            written = self._written(text).text
            # What may be half a character is shown with the rest of it.
            sure = written if text.done else written.rstrip("\N{REPLACEMENT CHARACTER}")
            yield sure[shown:]
            shown = max(shown, len(sure))

    def _begin(
        self, prompts: Sequence[Sequence[int]], samplings: Sampling | Sequence[Sampling]
    ) -> list[_Text]:
        # As with an engine: texts with settings of their own have seeds of their own.
        shared = isinstance(samplings, Sampling)
        each = [samplings] * len(prompts) if isinstance(samplings, Sampling) else samplings
        texts = []
        for place, (ids, sampling) in enumerate(zip(prompts, each, strict=True)):
            _check(sampling)
            if not 0 < len(ids) < self.context_length:
                raise ConfigError(
                    f"a prompt has {len(ids)} tokens; a text needs 1 to {self.context_length - 1} "
                    "to begin with"
                )
            room = self.context_length - len(ids)
            new = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
            texts.append(
                _Text(
                    ids=[*map(int, ids)],
                    prompt=len(ids),
                    end=len(ids) + new,
                    sampling=sampling,
                    key=key_for(sampling.seed, "unmasking", place * shared),
                    begin=len(ids),
                )
            )
        return texts

    def _run(self, texts: Sequence[_Text], how: Unmasking) -> Iterator[None]:
        """Write a block of each text that is not done, as often as there is one."""
        while open_texts := [text for text in texts if not text.done]:
            ends = [self._open_block(text, how) for text in open_texts]
            left = [end - text.begin for text, end in zip(open_texts, ends, strict=True)]
            self._unmask(open_texts, ends, left, how)
            for text, end in zip(open_texts, ends, strict=True):
                self._close_block(text, end)
            yield

    def _unmask(
        self, texts: Sequence[_Text], ends: Sequence[int], masks: Sequence[int], how: Unmasking
    ) -> None:
        """Replace the masks of the texts' blocks in some steps; `masks`: the number of each."""
        steps = [min(how.unmask_steps or count, count) for count in masks]
        for number in range(max(steps, default=0)):
            counts = [
                count // of + (number < count % of) if number < of else 0
                for count, of in zip(masks, steps, strict=True)
            ]
            self._replace(texts, ends, counts, how)

    def _open_block(self, text: _Text, how: Unmasking) -> int:
        """Append masks; returns the end of the block that is being written."""
        block = how.unmask_block or self._facts.block or BLOCK
        if self._facts.block and block != self._facts.block:
            raise ConfigError(
                f"unmask_block is {block}, and the model was trained with blocks of "
                f"{self._facts.block}; leave unmask_block out"
            )
        first = text.prompt if not self._facts.block else self._first(text.ids)
        end = min(first + ((text.begin - first) // block + 1) * block, text.end)
        # A model of whole documents has never seen a text that ends with a block.
        until = end if self._facts.block else text.end
        text.ids += [self._facts.mask_id] * (until - len(text.ids))
        return end

    def _close_block(self, text: _Text, end: int) -> None:
        written = range(text.begin, end)
        text.stop = next((place for place in written if text.ids[place] in self.stop_ids), None)
        text.begin = end
        text.done = end >= text.end or self._written(text).finish_reason == "stop"

    def _first(self, ids: Sequence[int]) -> int:
        """Where blocks begin."""
        return int(self._facts.after_bos and ids[0] == self._tokenizer.bos_id)

    @torch.no_grad()
    def _replace(
        self, texts: Sequence[_Text], ends: Sequence[int], counts: Sequence[int], how: Unmasking
    ) -> None:
        """One pass: choose a token for each mask of the texts' blocks, and keep some."""
        taken = [place for place, count in enumerate(counts) if count]
        row, begins = self._row([texts[place] for place in taken])
        slots, owners, places = [], [], []
        for begin, number in zip(begins, taken, strict=True):
            text = texts[number]
            masks = [
                place
                for place in range(text.begin, ends[number])
                if text.ids[place] == self._facts.mask_id
            ]
            slots += [begin + place for place in masks]
            owners += [number] * len(masks)
            places += masks
        chosen, sure = self._choose(row, slots, [texts[one] for one in owners], places, how)
        of = np.array(owners)
        for number in taken:
            mine = np.flatnonzero(of == number)
            # The surest first; of equal ones, the first in the text.
            best = mine[np.argsort(-sure[mine], kind="stable")][: counts[number]]
            for one in best.tolist():
                texts[number].ids[places[one]] = int(chosen[one])
            texts[number].steps += 1

    def _choose(
        self,
        row: ModelInput,
        slots: Sequence[int],
        texts: Sequence[_Text],
        places: Sequence[int],
        how: Unmasking,
    ) -> tuple[Int64, Float64]:
        """A token for each of n slots, and how sure it is: int64 [n] and float64 [n]."""
        model = self._model
        hidden = model(model.tensors(row))[0]
        at = on_device(torch.tensor(slots), model.device)
        logits = model.logits(hidden.index_select(0, at)).index_fill(-1, self._never, -torch.inf)
        sampler = Sampler([text.sampling for text in texts], model.device)
        numbers = None
        # Two draws for each place of each step.
        keys = [key_for(text.key, "step", text.steps) for text in texts]
        if not sampler.greedy:
            numbers = on_device(
                torch.from_numpy(draw(keys, [2 * one for one in places])), at.device
            )
        chosen, finite = sampler.pick(logits, numbers)
        if how.remasking == "random":
            sure = draw(keys, [2 * one + 1 for one in places])
        else:
            shares = logits.double().log_softmax(-1).gather(1, chosen[:, None])[:, 0]
            sure = shares.cpu().numpy()
        check_finite(bool(finite.all()))
        return chosen.cpu().numpy(), sure

    def _row(self, texts: Sequence[_Text]) -> tuple[ModelInput, list[int]]:
        """The texts as one row, as training has it, and the first slot of each."""
        row, begins = pack_documents(
            [np.array(text.ids, np.int32) for text in texts], np.zeros(len(texts), np.int32)
        )
        borders, reach = row.cu_seqlens, None
        assert borders is not None
        if self._facts.block:
            ends = borders[1:].tolist()
            cuts = [self._cuts(*one) for one in zip(texts, begins.tolist(), ends, strict=True)]
            borders = np.array([*chain(*cuts), row.num_tokens], np.int32)
            reach = np.repeat(ends, [len(one) for one in cuts]).astype(np.int32)
        sizes = np.diff(borders)
        made = replace(
            row,
            document_ids=np.repeat(np.arange(len(sizes), dtype=np.int32), sizes),
            cu_seqlens=borders,
            max_seqlen=int(sizes.max()),
            source_ids=np.zeros(len(sizes), np.int32),
            prefix_lengths=sizes,
            prefix=np.ones(row.num_tokens, np.bool_),
            reach=reach,
        )
        return made, begins.tolist()

    def _cuts(self, text: _Text, begin: int, end: int) -> list[int]:
        """Where the blocks of a text begin in the row, a BOS before them among them."""
        return sorted({begin, *range(begin + self._first(text.ids), end, self._facts.block)})

    def _written(self, text: _Text) -> Generated:
        """What is written so far."""
        end = text.begin if text.stop is None else text.stop + 1
        tokens = tuple(text.ids[text.prompt : end])
        words: str = self._tokenizer.decode(tokens if text.stop is None else tokens[:-1])
        cuts = [place for one in text.sampling.stop if (place := words.find(one)) >= 0]
        reason: FinishReason = "length" if text.stop is None and not cuts else "stop"
        return Generated(tokens, words[: min(cuts, default=len(words))], reason)


def _check(sampling: Sampling) -> None:
    """Refuse settings that need a text in its order."""
    given = [
        one.name
        for one in fields(sampling)
        if one.name not in _HONOURED and getattr(sampling, one.name) not in (one.default, {})
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: a model that was trained by diffusion chooses tokens in any "
            f"order, so this has no meaning; leave it out ({', '.join(_HONOURED)} have one)"
        )
