"""Generation with a model of transformers: through our cache, its own, or by reading the text
again.

Which of them is exact is found by trials. The last is exact for every causal model, but slow.
"""

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn

from penstock.core.errors import ConfigError
from penstock.media.prompts import PromptImages
from penstock.media.rows import BlankImage
from penstock.models.attention.compiling import uncompiled
from penstock.models.cache import Cache
from penstock.models.decoding_graphs import Growing, steps_of
from penstock.models.isolation.report import describe
from penstock.models.paged_cache import PagedCache, new_keys
from penstock.models.text_cache import TextCache
from penstock.models.theirs.attention import PROMPT, distance, one_line, rounding
from penstock.models.theirs.cache import TheirCaches
from penstock.models.theirs.image_rows import trial_row
from penstock.models.theirs.image_ways import ImageWays
from penstock.models.theirs.interface import TheirModel
from penstock.models.without_dropout import evaluating
from penstock.plan.inputs.prompt_images import document_of, images_of_document

_log = logging.getLogger("penstock.models")


@final
class Generation:
    """The caches of one model, and what new tokens of a sequence give.

    Attributes:
        own_caches: transformers' own caches; None: not needed yet.
    """

    def __init__(self, model: TheirModel, images: ImageWays) -> None:
        self._model, self._images = model, images
        self.own_caches: TheirCaches | None = None
        self._warned_slow = False
        self.caches_images, self._tried_cached_images = True, False

    def new_cache(self, sequences: int, capacity: int) -> Cache | PagedCache | TextCache:
        """An empty cache for `sequences` sequences of at most `capacity` tokens.

        For a model that needs more than keys and values, and for sequences so long that its rotary
        frequencies change, it is a cache of texts: exact, but slow.
        """
        if self._model.fit.shape is None or not self.caches_images:
            return TextCache(sequences, capacity, self._model.device)
        if self._model.rotary is None or capacity <= self._model.rotary[0]:
            return self._keys(sequences, capacity)
        return TextCache(
            sequences, capacity, self._model.device, self._keys(sequences, self._model.rotary[0])
        )

    def _keys(self, sequences: int, capacity: int) -> Cache | PagedCache:
        assert self._model.fit.shape is not None
        return new_keys(
            layers=self._model.fit.shape.layers,
            sequences=sequences,
            capacity=capacity,
            kv_heads=self._model.fit.shape.kv_heads,
            head_width=self._model.fit.shape.head_width,
            device=self._model.device,
            dtype=self._model.compute_dtype,
            windows=self._model.fit.shape.windows,
            softcap=self._model.fit.shape.softcap,
        )

    @torch.no_grad()
    def extend(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: Cache | PagedCache | TextCache,
        sequences: Tensor | None = None,
        images: Sequence[PromptImages | None] | None = None,
    ) -> Tensor:
        """Like `Transformer.extend`."""
        with uncompiled():
            if isinstance(cache, TextCache):
                return self._extend_texts(tokens, lengths, cache, sequences, images)
            return self._extend_keys(tokens, lengths, cache, sequences, images)

    def _extend_keys(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: Cache | PagedCache,
        sequences: Tensor | None,
        images: Sequence[PromptImages | None] | None,
    ) -> Tensor:
        """`extend` through our cache."""
        if not images and (steps := steps_of(self._model, cache)) is not None:
            logits = steps.run(self._single_step, tokens, lengths, sequences)
            if logits is not None:
                return logits
        growth = cache.growth(tokens, lengths, sequences)
        if images is None or not any(images):
            hidden = self._model.run(tokens, growth.positions, growth.attend)[0]
        else:
            parts = growth.parts(images)
            if any(parts) and len(parts) > 1:
                return self._extend_each(tokens, lengths, cache, sequences, images)
            if parts[0]:
                hidden = self._images.hidden_of_part(tokens, lengths, growth, parts[0])
            else:
                hidden = self._model.run(
                    tokens, self._images.text_positions(growth.positions, parts), growth.attend
                )[0]
        growth.done()
        return self._model.logits(hidden[growth.last])

    def _single_step(self, tokens: Tensor, growth: Growing) -> Tensor:
        """Logits [B, vocab] after one more token of each row."""
        hidden = self._model.run(tokens, growth.positions, growth.attend)[0]
        return self._model.logits(hidden[:, 0])

    def _extend_each(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: Cache | PagedCache,
        sequences: Tensor | None,
        images: Sequence[PromptImages | None],
    ) -> Tensor:
        """`extend` row by row: images of several rows at once would need them in transformers' own
        order.
        """
        chosen = torch.arange(len(tokens)) if sequences is None else sequences
        return torch.cat(
            [
                self.extend(
                    tokens[row : row + 1],
                    lengths[row : row + 1],
                    cache,
                    chosen[row : row + 1],
                    [one],
                )
                for row, one in enumerate(images)
            ]
        )

    def expect_images(self, blank: BlankImage) -> None:
        """Find out how it reads images, and whether that works through a cache."""
        if not self._model.has_vision:
            raise ConfigError(f"{describe(self._model)} reads no images; take a model with vision")
        if (
            self._images.way(blank) == "ours"
            and self._model.fit.shape is not None
            and not self._tried_cached_images
        ):
            self._tried_cached_images = True
            trial = self._model.trial_model
            if trial is self._model:
                self._try_cached(blank)
            else:
                trial.generation.expect_images(blank)
                self.caches_images = trial.generation.caches_images
                self._model.fit.reason = trial.fit.reason

    def _try_cached(self, blank: BlankImage) -> None:
        """Compare a prompt with an image in parts and steps through our cache with the whole; else
        do without cache.
        """
        _, document, *_ = trial_row(blank, self._model.vocab_size)
        assert document.media is not None
        images = images_of_document(document)
        tokens = torch.from_numpy(document.tokens).to(self._model.device)
        with evaluating(self._model.inner):
            truth = self._model.logits(self._images.hidden(self._model.row_tensors(document)))[0]
            cache, cuts = (
                self._keys(1, len(tokens)),
                [0, 2, images.ends[0] + 1, len(tokens) - 2, len(tokens)],
            )
            try:
                found = [
                    self.extend(
                        tokens[None, begin:end], torch.tensor([end - begin]), cache, None, [images]
                    )[0]
                    for begin, end in pairwise(cuts)
                ]
                far = distance(torch.stack(found), truth[torch.tensor(cuts[1:]) - 1])
                reason = (
                    f"logits after a prompt with an image in parts are {far:.2g} standard "
                    "deviations off"
                )
                if far <= rounding(self._model):
                    return
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                reason = one_line(error)
        self.caches_images, self._model.fit.reason = False, reason

    def _extend_texts(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: TextCache,
        sequences: Tensor | None,
        images: Sequence[PromptImages | None] | None,
    ) -> Tensor:
        """`extend` if cached keys are valid for some sequences, or for none."""
        chosen = cache.append(tokens, lengths, sequences)
        rows = [(row, sequence) for row, sequence in enumerate(chosen) if lengths[row] > 0]
        by_keys = [
            pair
            for pair in rows
            if cache.keys is not None and cache.lengths[pair[1]] <= cache.keys.capacity
        ]
        found: dict[int, Tensor] = {}
        if by_keys:
            assert cache.keys is not None
            held = cache.keys.lengths
            new = [cache.text(sequence, int(held[sequence])) for _, sequence in by_keys]
            counts, places = (
                torch.tensor([len(text) for text in new]),
                torch.tensor([place for _, place in by_keys]),
            )
            given = None if images is None else [images[row] for row, _ in by_keys]
            padded = nn.utils.rnn.pad_sequence(new, batch_first=True)
            logits = self.extend(padded, counts, cache.keys, places, given)
            found = {row: one for (row, _), one in zip(by_keys, logits, strict=True)}
        for row, sequence in rows:
            if row not in found:
                found[row] = self._next(cache, sequence, None if images is None else images[row])
        dtype = torch.promote_types(self._model.compute_dtype, torch.float32)
        nothing = torch.zeros(self._model.logits_width, dtype=dtype, device=self._model.device)
        return torch.stack([found.get(row, nothing) for row in range(len(chosen))])

    def _next(self, cache: TextCache, sequence: int, images: PromptImages | None) -> Tensor:
        """Logits [vocab] after a sequence whose keys we cannot keep: by transformers' own cache, or
        from its whole text.
        """
        if images is not None:
            self._warn_slow()
            row = self._model.row_tensors(document_of(images, cache.text(sequence).cpu().numpy()))
            return self._model.logits(self._images.hidden(row)[0, -1])
        if self.own_caches is None and not self._model.uses_our_attention:
            self.own_caches = TheirCaches(self._model)
        if self.own_caches is not None and self.own_caches.steps:
            return self.own_caches.logits(cache, sequence)
        self._warn_slow()
        return self._model.logits(self._model.document(cache.text(sequence))[0, -1])

    def _warn_slow(self) -> None:
        if self._warned_slow:
            return
        self._warned_slow = True
        if self._model.fit.shape is None or not self.caches_images:
            cause = f"generates without a cache: {self._model.fit.reason}"
            if self.own_caches is not None:
                cause += f", and {self.own_caches.reason}"
        else:
            assert self._model.rotary is not None
            cause = (
                f"generates beyond {self._model.rotary[0]} tokens without a cache: its rotary "
                "embedding "
            )
            cause += f"({self._model.rotary[1]}) changes there"
        _log.warning(
            "%s %s. Each new token reads the whole text again, which is exact but slow",
            describe(self._model),
            cause,
        )

    def steps(self, tokens: Tensor) -> Tensor:
        """Logits after a prompt in two parts, and after each single step to the end."""
        cache, cuts = self._keys(1, len(tokens)), [0, PROMPT // 2, *range(PROMPT, len(tokens) + 1)]
        found = [
            self.extend(tokens[None, begin:end], torch.tensor([end - begin]), cache)
            for begin, end in pairwise(cuts)
        ]
        return torch.cat(found[1:])
