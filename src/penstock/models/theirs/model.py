"""Any causal model of transformers with the interface of our own models, on the same rows.

If possible, our attention replaces the model's (see `their_attention`). Then packed rows, prefixes, caches and
micro-sequences work as for our own transformer, and documents are kept apart without a mask. Whether it is possible is
tested on a few tokens when the model is loaded: the logits of a document, and those of a prompt and single steps
through the cache, must equal transformers' logits for the whole document alone. Models with other kinds of layers,
sinks or dropout fail this test. They run in one of the other ways of `packed_ways`, without prefixes.

Exact means: equal to the document alone in transformers, up to rounding. Rows of one document run as that document.
A folder with a model that would compute something else is refused.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from penstock.core.arrays import Int64
from penstock.core.errors import ConfigError, CorruptionError, IsolationError
from penstock.media.prompts import PromptImages
from penstock.media.rows import BlankImage, RowMedia
from penstock.models.attention.windows import attention_of
from penstock.models.cache import Cache, Growth, LayerAttend, TextCache
from penstock.models.facts import ModelFacts, with_facts
from penstock.models.image_features import FeatureCache, as_outputs, features_of
from penstock.models.isolation.lengths import rotary_limit
from penstock.models.isolation.report import CURE, describe
from penstock.models.language_model import PackingVerdict, RowTensors, require_packed_rows
from penstock.models.lora.settings import LoraSettings, NewRows
from penstock.models.lora.trained_parts import num_rows
from penstock.models.ours.importing import (
    listed_files,
    read_config,
    refuse_incomplete,
    refuse_not_finite,
    refuse_oversized,
    refuse_quantised,
)
from penstock.models.recurrent import Borders
from penstock.models.recurrent.operations import TORCH, Operations
from penstock.models.theirs.attention import (
    NAME,
    PROMPT,
    AttentionShape,
    UnfitAttentionError,
    distance,
    one_line,
    restart_rotary,
    rounding,
    take_attention,
    trial_tokens,
    true_logits,
    use_attention,
    values_alone,
)
from penstock.models.theirs.cache import TheirCaches
from penstock.models.theirs.image_rows import (
    Way,
    has_vision,
    image_arguments,
    image_masks,
    image_token,
    needs_cross_attention,
    part_arguments,
    trial_row,
    uses_grids,
)
from penstock.models.theirs.packed_ways import PackedWays
from penstock.models.theirs.recurrence import bordered, replace_functions
from penstock.models.theirs.tensors import REQUIREMENTS
from penstock.models.vocabulary import mean_row
from penstock.models.without_dropout import evaluating
from penstock.plan.inputs import AttentionRule, RowSlice
from penstock.plan.inputs.blank_images import with_blank
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.prompt_images import document_of, images_of_document
from penstock.plan.inputs.requirements import InputRequirements

_log = logging.getLogger("penstock.models")

_WAYS: dict[Way, str] = {
    "ours": "our attention",
    "own": "transformers' attention and restarting positions",
    "borders": "our recurrent functions in place of transformers'",
    "masks": "transformers' attention and masks of documents and images",
    "sliding_masks": "transformers' attention and masks of documents, and of images in sliding layers",
    "alone": "one document a row",
}

_TRIED: tuple[Way, ...] = ("ours", "own", "borders", "masks", "sliding_masks")

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "base_model": lambda inner: inner.base_model,
    "get_decoder": lambda inner: inner.get_decoder(),
}
"""Ways to the part of a model that returns hidden states; for some models, one of them is the whole model."""


@final
class HuggingFaceModel(nn.Module):
    """A model of transformers; `load_huggingface` makes it.

    Attributes:
        inner: The model itself.
        lora: The LoRA that trains next to it; see `add_lora`.
        new_rows: Rows for entries that its tokenizer gained.
        origin: The run, folder or hub name that its weights came from; None: unknown.
        facts: What its folder says; empty if its weights were made here.
        operations: What computes recurrences in rows; see `use_recurrent`.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.lora: LoraSettings | None = None
        self.new_rows: NewRows | None = None
        self.origin: str | None = getattr(inner, "name_or_path", None) or None
        self.operations = TORCH
        self.facts = ModelFacts()
        if inner.name_or_path:
            # It was read from a folder or from the hub, whose files may be gone.
            self.facts = ModelFacts.of_config(inner.config.to_dict(), _generation(inner))
        replace_functions(inner)
        self._warned_slow = False
        self._own_caches: TheirCaches | None = None
        self._decoder: str | None = None
        self._fallback_reason = ""
        own, truth = inner.config._attn_implementation, true_logits(inner)
        self._own_attention = own
        self._way: Way | None = None
        self._way_reason = ""
        self._caches_images, self._tried_cached_images = True, False
        self._features: tuple[FeatureCache, Any] | None = None
        self._limit, self._width = rotary_limit(inner), truth.shape[-1]
        self._shape: AttentionShape | None = None
        try:
            self._take_attention(truth)
        except UnfitAttentionError as reason:
            self._shape = None
            self._fallback_reason = str(reason)
            use_attention(inner, own)
        self._decoder = self._find_decoder()
        self._packed = PackedWays(self)

    @property
    def uses_our_attention(self) -> bool:
        """Whether our attention replaces the model's own, so that a cache of keys and values is enough."""
        return self._shape is not None

    @property
    def divisible_rows(self) -> bool:
        """With our attention."""
        return self.uses_our_attention

    def packing(self, slots: int) -> PackingVerdict:
        """Whether documents may share a row of `slots` slots; tested once, on random tokens."""
        return self._packed.packing(slots)

    def compute_with(self, operations: Operations) -> None:
        """Compute recurrences in rows with these; how rows run is then found again."""
        self.operations = operations
        self._packed = PackedWays(self)

    def packing_way(self) -> str:
        """How rows of several documents run, in words; known once `packing` was asked."""
        return self._packed.describe()

    def packing_cost(self, begins: Annotated[Int64, "documents"], ends: Annotated[Int64, "documents"]) -> str:
        """What a row of documents costs more than one pass, in words; empty: nothing."""
        return self._packed.cost(begins, ends) if self.runs_several_passes else ""

    @property
    def runs_several_passes(self) -> bool:
        """Whether a row of several documents takes several passes; known once `packing` was asked."""
        return self._packed.several_passes

    def grow_vocabulary(self, size: int) -> int:
        """See `LanguageModel`."""
        inner, first = self.inner, len(self.inner.get_input_embeddings().weight)
        trial = trial_tokens(inner)
        with evaluating(inner):
            before = self.logits(self._document(trial))
        inner.resize_token_embeddings(size, mean_resizing=False)
        head = inner.get_output_embeddings()
        with torch.no_grad():
            for table in (inner.get_input_embeddings(), *([] if head is None else [head])):
                for weight in table.parameters(recurse=False):
                    weight[first:] = mean_row(weight[:first])
        with evaluating(inner):
            after = self.logits(self._document(trial))
        self._width = after.shape[-1]
        old = before.shape[-1]
        if self.vocab_size != size or not distance(after[..., :old], before) <= rounding(inner):
            raise ConfigError(
                f"{describe(self)}: its vocabulary cannot grow to {size} ids: it has {self.vocab_size} then, or "
                "logits of its old tokens change; prepare the data with the model's own tokenizer"
            )
        return first

    @property
    def has_vision(self) -> bool:
        """Whether it reads images."""
        return has_vision(self.inner)

    def forward(self, row: RowTensors) -> Tensor:
        """Final hidden states [1, T, width] of a row; zeros in the padding if it holds one document."""
        if row.source.media is not None and self.has_vision:
            return self._with_images(row)
        if self.uses_our_attention:
            return self.run(row.tokens, row.positions, row.attend)
        if len(_documents(row)) > 1 or self._packed.runs_single_documents():
            return self._packed.hidden(row, self._hidden)
        slots, used = len(row.tokens), row.source.num_tokens or len(row.tokens)
        return pad(self._document(row.tokens[:used]), (0, 0, 0, slots - used))

    def _with_images(self, row: RowTensors) -> Tensor:
        """Final hidden states of a row of data with images."""
        media, slots = row.source.media, len(row.tokens)
        assert media is not None
        way = self.way_of_images(media.blank)
        if not len(media) and needs_cross_attention(self.inner):
            # Without an image these layers are left out, which a blank one would not do.
            return pad(self._document(row.tokens[: row.source.num_tokens]), (0, 0, 0, slots - row.source.num_tokens))
        if not len(media) and torch.is_grad_enabled() and self._features is None:
            # Its vision tower must have gradients on all ranks.
            row = self.row_tensors(with_blank(row.source))
        given = image_arguments(self.inner, row.source, self.device, self.compute_dtype)
        if self._features is not None and media.keys:
            given = self._with_features(given, media)
        if way == "ours":
            given["penstock_attend"] = lambda layer, q, k, v, *_: row.attend(layer, q[0], k[0], v[0])[None]
        elif way in ("masks", "sliding_masks"):
            given["attention_mask"] = image_masks(
                row.source, self._sliding_window, self.device, self.compute_dtype, everywhere=way == "masks"
            )
        elif way == "alone":
            del given["position_ids"]
        elif way == "borders":
            borders = Borders([0, *row.rule.pieces[:, 2]], self.device)
            with bordered(self.inner, borders, operations=self.operations):
                return self._hidden(given)[:, :slots]
        return self._hidden(given)[:, :slots]

    @property
    def _sliding_window(self) -> int | None:
        found = getattr(self.inner.config.get_text_config(), "sliding_window", None)
        return found if isinstance(found, int) else None

    def way_of_images(self, blank: BlankImage) -> Way:
        """How rows with images run; found once, by a trial.

        Args:
            blank: The blank image of a loader.

        Raises:
            ConfigError: The images belong to another model.
        """
        if self._way is None:
            expected, found = image_token(self.inner), int(blank.tokens[0])
            if expected is not None and expected != found:
                raise ConfigError(
                    f"images stand at token {found} in the data, but {describe(self)} reads them at {expected}; "
                    "prepare the data with the model's own processor"
                )
            if needs_cross_attention(self.inner):
                self._way, self._way_reason = "alone", "text attends to images in layers of its own"
                # Our attention knows nothing of these layers.
                self._shape, self._fallback_reason = None, self._way_reason
                use_attention(self.inner, self._own_attention)
            else:
                self._way = self._find_way(blank)
            _log.info("%s: rows with images run with %s", describe(self), _WAYS[self._way])
        return self._way

    def _find_way(self, blank: BlankImage) -> Way:
        row, *alone = trial_row(blank, self.vocab_size)
        other, *_ = trial_row(blank, self.vocab_size, swapped=True)
        ours = self.uses_our_attention
        with evaluating(self.inner):
            use_attention(self.inner, self._own_attention)
            truth = [self._own_logits(one) for one in alone]
            for way in _TRIED:
                if way == "ours" and not ours:
                    continue
                use_attention(self.inner, NAME if way == "ours" else self._own_attention)
                self._way = way
                try:
                    found, swapped = (self.logits(self._with_images(self.row_tensors(one)))[0] for one in (row, other))
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    self._way_reason = one_line(error)
                    continue
                first = len(alone[0].tokens)
                whole = torch.cat(truth)
                far = distance(found[: len(whole)], whole)
                leak = distance(swapped[first : len(whole)], found[first : len(whole)])
                if far <= rounding(self.inner) and leak <= rounding(self.inner):
                    if way != "ours":
                        self._shape = None
                        self._fallback_reason = self._fallback_reason or "images are read otherwise with our attention"
                    return way
                self._way_reason = f"logits differ from those of the document alone by {far:.2g} standard deviations"
            self._shape = None
            use_attention(self.inner, self._own_attention)
        return "alone"

    def _own_logits(self, document: ModelInput) -> Tensor:
        """transformers' own logits of one document with its images."""
        given = image_arguments(self.inner, document, self.device, self.compute_dtype)
        del given["position_ids"]
        logits: Tensor = self.inner(**given).logits[0]
        return logits

    def begin_step(self, *, seed: int, number: int, tokens: int) -> None:
        """No-op: this model keeps nothing per step."""

    def end_step(self, total: Callable[[Sequence[float]], list[float]]) -> dict[str, float]:
        """No figures."""
        return {}

    def run(self, tokens: Tensor, positions: Tensor, attend: LayerAttend, distances: int | None = None) -> Tensor:
        """Final hidden states [1, ..., width] of tokens [T] or [B, n], with `attend` as the attention.

        Raises:
            ConfigError: Our attention cannot replace that of this model.
        """
        self._require_our_attention()
        batched = tokens.ndim == 2

        def call(layer: int, q: Tensor, k: Tensor, v: Tensor, *_: float | None) -> Tensor:
            return attend(layer, q, k, v) if batched else attend(layer, q[0], k[0], v[0])[None]

        rows, places = (x if batched else x[None] for x in (tokens, positions))
        given = {"input_ids": rows, "position_ids": places, "use_cache": False, "penstock_attend": call}
        hidden = self._hidden(given)
        return hidden[None] if batched else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., width] → [..., vocab], in float32 or wider."""
        scores: Tensor = hidden if self._decoder is None else self.inner.get_output_embeddings()(hidden)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def new_cache(self, sequences: int, capacity: int) -> Cache | TextCache:
        """An empty cache for `sequences` sequences of at most `capacity` tokens.

        For a model that needs more than keys and values, and for sequences so long that its rotary frequencies change,
        it is a cache of texts: exact, but slow.
        """
        if self._shape is None or not self._caches_images:
            return TextCache(sequences, capacity, self.device)
        if self._limit is None or capacity <= self._limit[0]:
            return self._keys(sequences, capacity)
        return TextCache(sequences, capacity, self.device, self._keys(sequences, self._limit[0]))

    def _keys(self, sequences: int, capacity: int) -> Cache:
        assert self._shape is not None
        return Cache(
            layers=self._shape.layers,
            sequences=sequences,
            capacity=capacity,
            kv_heads=self._shape.kv_heads,
            head_width=self._shape.head_width,
            device=self.device,
            dtype=self.compute_dtype,
            windows=self._shape.windows,
            softcap=self._shape.softcap,
        )

    @torch.no_grad()
    def extend(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: Cache | TextCache,
        sequences: Tensor | None = None,
        images: Sequence[PromptImages | None] | None = None,
    ) -> Tensor:
        """Like `Transformer.extend`."""
        if isinstance(cache, TextCache):
            return self._extend_texts(tokens, lengths, cache, sequences, images)
        growth = cache.growth(tokens, lengths, sequences)
        if images is None or not any(images):
            hidden = self.run(tokens, growth.positions, growth.attend)[0]
        else:
            parts = growth.parts(images)
            if any(parts) and len(parts) > 1:
                return self._extend_each(tokens, lengths, cache, sequences, images)
            if parts[0]:
                hidden = self._hidden_of_part(tokens, lengths, growth, parts[0])
            else:
                hidden = self.run(tokens, self._text_positions(growth.positions, parts), growth.attend)[0]
        growth.done()
        return self.logits(hidden[growth.last])

    def _extend_each(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: Cache,
        sequences: Tensor | None,
        images: Sequence[PromptImages | None],
    ) -> Tensor:
        """`extend` row by row: images of several rows at once would need them in transformers' own order."""
        chosen = torch.arange(len(tokens)) if sequences is None else sequences
        return torch.cat(
            [
                self.extend(tokens[row : row + 1], lengths[row : row + 1], cache, chosen[row : row + 1], [one])
                for row, one in enumerate(images)
            ]
        )

    def _text_positions(self, places: Tensor, parts: Sequence[RowMedia | None]) -> Tensor:
        """Positions [B, n] of text around images, which counts on from their largest position."""
        found = places.clone()
        for row, media in enumerate(parts):
            if media is not None and media.positions is not None and uses_grids(self.inner):
                count = media.positions.shape[2]
                found[row, :count] = torch.from_numpy(media.positions[1, 0])
        return found

    def _hidden_of_part(self, tokens: Tensor, lengths: Tensor, growth: Growth, media: RowMedia) -> Tensor:
        """Final hidden states [1, n, width] of one row's new tokens [1, n], with images among them."""
        count = int(lengths[0])
        given = part_arguments(
            self.inner, tokens[0, :count], growth.positions[0, :count], media, self.device, self.compute_dtype
        )
        given["penstock_attend"] = lambda layer, q, k, v, *_: growth.attend(layer, q, k, v)
        return self._hidden(given)

    def cache_features(self, folder: str | Path, blank: BlankImage) -> None:
        """Keep the features of images in a folder."""
        self.way_of_images(blank)
        tower = getattr(self.inner, "get_image_features", None)
        body = getattr(self.inner, "model", None)
        if tower is None or body is None or "mm_encoder_outputs" not in inspect.signature(body.forward).parameters:
            raise ConfigError(
                f"{describe(self)}: training.feature_cache needs a model that takes features of images in place of "
                "pixels, which this one does not; leave it out"
            )
        text = {id(weight) for weight in self.inner.get_decoder().parameters()}
        text |= {id(weight) for weight in self.inner.get_output_embeddings().parameters()}
        weights = {name: weight for name, weight in self.inner.named_parameters() if id(weight) not in text}
        with torch.no_grad(), evaluating(self.inner):
            outputs = self._tower_outputs(blank.arrays)
        self._features = FeatureCache(folder, weights), outputs

    def _tower_outputs(self, arrays: Mapping[str, Any]) -> Any:
        """What the vision tower and its projector give for arrays of images."""
        tower = self.inner.model.get_image_features
        known = inspect.signature(tower).parameters
        given = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items() if name in known}
        moved = {
            name: value.to(self.device, self.compute_dtype if value.is_floating_point() else None)
            for name, value in given.items()
        }
        return tower(**moved, return_dict=True)

    def _with_features(self, given: dict[str, Any], media: RowMedia) -> dict[str, Any]:
        """Arguments with kept features in place of pixels."""
        assert self._features is not None
        cache, outputs = self._features
        slots = np.diff(np.searchsorted(media.slots, [*media.begins, np.iinfo(np.int32).max])).tolist()
        parts = cache.rows(media.keys, slots, lambda: features_of(self._tower_outputs(media.arrays)), self.device)
        kept = {name: value for name, value in given.items() if name != "pixel_values"}
        return {**kept, "mm_encoder_outputs": {"image": as_outputs(outputs, parts)}}

    def expect_images(self, blank: BlankImage) -> None:
        """Find out how it reads images, and whether that works through a cache."""
        if not self.has_vision:
            raise ConfigError(f"{describe(self)} reads no images; take a model with vision")
        if self.way_of_images(blank) == "ours" and self._shape is not None and not self._tried_cached_images:
            self._tried_cached_images = True
            self._try_cached_images(blank)

    def _try_cached_images(self, blank: BlankImage) -> None:
        """Compare a prompt with an image in parts and steps through our cache with the whole; else do without cache."""
        _, document, *_ = trial_row(blank, self.vocab_size)
        assert document.media is not None
        images = images_of_document(document)
        tokens = torch.from_numpy(document.tokens).to(self.device)
        with evaluating(self.inner):
            truth = self.logits(self._with_images(self.row_tensors(document)))[0]
            cache, cuts = self._keys(1, len(tokens)), [0, 2, images.ends[0] + 1, len(tokens) - 2, len(tokens)]
            try:
                found = [
                    self.extend(tokens[None, begin:end], torch.tensor([end - begin]), cache, None, [images])[0]
                    for begin, end in pairwise(cuts)
                ]
                far = distance(torch.stack(found), truth[torch.tensor(cuts[1:]) - 1])
                reason = f"logits after a prompt with an image in parts are {far:.2g} standard deviations off"
                if far <= rounding(self.inner):
                    return
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                reason = one_line(error)
        self._caches_images, self._fallback_reason = False, reason

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
        by_keys = [pair for pair in rows if cache.keys is not None and cache.lengths[pair[1]] <= cache.keys.capacity]
        found: dict[int, Tensor] = {}
        if by_keys:
            assert cache.keys is not None
            held = cache.keys.lengths
            new = [cache.text(sequence, int(held[sequence])) for _, sequence in by_keys]
            counts, places = torch.tensor([len(text) for text in new]), torch.tensor([place for _, place in by_keys])
            given = None if images is None else [images[row] for row, _ in by_keys]
            padded = nn.utils.rnn.pad_sequence(new, batch_first=True)
            logits = self.extend(padded, counts, cache.keys, places, given)
            found = {row: one for (row, _), one in zip(by_keys, logits, strict=True)}
        for row, sequence in rows:
            if row not in found:
                found[row] = self._next(cache, sequence, None if images is None else images[row])
        dtype = torch.promote_types(self.compute_dtype, torch.float32)
        nothing = torch.zeros(self._width, dtype=dtype, device=self.device)
        return torch.stack([found.get(row, nothing) for row in range(len(chosen))])

    def _next(self, cache: TextCache, sequence: int, images: PromptImages | None) -> Tensor:
        """Logits [vocab] after a sequence whose keys we cannot keep: by transformers' own cache, or from its whole
        text."""
        if images is not None:
            self._warn_slow()
            row = self.row_tensors(document_of(images, cache.text(sequence).cpu().numpy()))
            return self.logits(self._with_images(row)[0, -1])
        if self._own_caches is None and not self.uses_our_attention:
            self._own_caches = TheirCaches(self)
        if self._own_caches is not None and self._own_caches.steps:
            return self._own_caches.logits(cache, sequence)
        self._warn_slow()
        return self.logits(self._document(cache.text(sequence))[0, -1])

    def _warn_slow(self) -> None:
        if self._warned_slow:
            return
        self._warned_slow = True
        if self._shape is None or not self._caches_images:
            cause = f"generates without a cache: {self._fallback_reason}"
            if self._own_caches is not None:
                cause += f", and {self._own_caches.reason}"
        else:
            assert self._limit is not None
            cause = f"generates beyond {self._limit[0]} tokens without a cache: its rotary embedding "
            cause += f"({self._limit[1]}) changes there"
        _log.warning("%s %s. Each new token reads the whole text again, which is exact but slow", describe(self), cause)

    def _document(self, tokens: Tensor) -> Tensor:
        """Final hidden states [1, n, width] of one document [n]; logits if `_hidden` returns these."""
        if not self.uses_our_attention:
            return self._hidden({"input_ids": tokens[None], "use_cache": False})
        assert self._shape is not None
        rule = AttentionRule(np.array([[0, 0, len(tokens)]]))
        windows, device, dtype = self._shape.windows, self.device, self.compute_dtype
        attentions = {
            one: attention_of(rule, one, device=device, dtype=dtype, softcap=self._shape.softcap)
            for one in set(windows)
        }
        places = torch.arange(len(tokens), device=device)
        return self.run(tokens, places, lambda layer, q, k, v: attentions[windows[layer]](q, k, v))

    def tensors(self, row: ModelInput, backend: str = "auto") -> RowTensors:
        """A row on the model's device, ready for this model's attention.

        Raises:
            ConfigError: As `RowTensors.of`.
            IsolationError: The row holds several documents, and the model would let them see each other.
        """
        if row.media is not None and self.has_vision:
            way = self.way_of_images(row.media.blank)
            if way == "alone" and row.num_documents > 1:
                raise IsolationError(
                    f"{describe(self)}: documents with images see each other in one row: {self._way_reason}. {CURE}"
                )
        made = self.row_tensors(row, backend)
        documents = _documents(made)
        if len(documents) > 1:
            require_packed_rows(self, row.sequence_length, int(documents.max()))
        return made

    def row_tensors(self, row: ModelInput, backend: str = "auto") -> RowTensors:
        """`tensors` without its checks, for trials of rows."""
        windows = () if self._shape is None else self._shape.windows
        if self._limit is not None and row.positions is not None:
            # Frequencies depend on the highest position, and padding may be longer than any document.
            row = replace(row, positions=np.where(np.arange(row.sequence_length) < row.num_tokens, row.positions, 0))
        return RowTensors.of(
            row,
            device=self.device,
            dtype=self.compute_dtype,
            backend=backend,
            windows=windows,
            softcap=None if self._shape is None else self._shape.softcap,
            vocab_size=self.vocab_size,
        )

    def slice_tensors(self, part: RowSlice, group: Any = None, backend: str = "auto") -> RowTensors:
        """This rank's part of a row that several ranks share, ready for this model's attention.

        Raises:
            ConfigError: Not our attention alone mixes tokens, or as `RowTensors.of_slice`.
            DistributedError: The group is not the one that the row was split for.
            IsolationError: The row holds several documents, and the model would let them see each other.
        """
        if self._shape is None:
            raise ConfigError(
                f"{describe(self)}: runs with its own attention ({self._fallback_reason}), which has no slices of "
                "rows; train it without context parallelism"
            )
        if self._limit is not None:
            raise ConfigError(
                f"{describe(self)}: its rotary embedding ({self._limit[1]}) depends on the longest document of a row, "
                "which a slice does not hold; train it without context parallelism"
            )
        made = RowTensors.of_slice(
            part,
            group,
            device=self.device,
            dtype=self.compute_dtype,
            backend=backend,
            windows=self._shape.windows,
            softcap=self._shape.softcap,
            vocab_size=self.vocab_size,
        )
        documents = _documents(made)
        if len(documents) > 1:
            require_packed_rows(self, len(part.order), int(documents.max()))
        return made

    def requirements(self) -> InputRequirements:
        """What a loader must provide for it."""
        prefixes = self._shape is not None and self._shape.window is None
        return InputRequirements(
            asked_by=f"the model {type(self.inner).__name__}", loss_weights=True, positions=True, cu_seqlens=True,
            prefix=prefixes or REQUIREMENTS.prefix, trees=self._shape is not None, images=self.has_vision,
        )  # fmt: skip

    def get_input_embeddings(self) -> nn.Module:
        """The embedding; `check_isolation` needs it to trace tokens."""
        embeddings: nn.Module = self.inner.get_input_embeddings()
        return embeddings

    @property
    def config(self) -> Any:
        """The settings of the model itself."""
        return self.inner.config

    @property
    def vocab_size(self) -> int:
        """Number of known ids, which have an embedding and logits."""
        return min(num_rows(self.inner.get_input_embeddings()), self._width)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.inner.parameters()).device  # type: ignore[no-any-return]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return next(self.inner.parameters()).dtype  # type: ignore[no-any-return]

    @property
    def prediction_weights(self) -> tuple[float, ...]:
        """It predicts the next token only."""
        return (1.0,)

    def _hidden(self, given: dict[str, Any]) -> Tensor:
        """Hidden states [B, n, width]; logits if the head is more than a matrix."""
        return self.read(given)[0]

    def read(self, given: dict[str, Any]) -> tuple[Tensor, Any]:
        """Hidden states [B, n, width] for arguments of transformers, or logits as in `_hidden`; and its whole
        output."""
        if self._limit is not None:
            restart_rotary(self.inner)
        if self._decoder is None:
            output = self.inner(**given)
            return output.logits, output
        output = _DECODERS[self._decoder](self.inner)(**given)
        return output.last_hidden_state, output

    def _find_decoder(self) -> str | None:
        """The way to hidden states that the output matrix alone turns into logits; None: there is none.

        Logits must be equal to the last bit, because a soft cap hardly changes small logits.
        """
        head = self.inner.get_output_embeddings()
        given: dict[str, Any] = {"input_ids": trial_tokens(self.inner)[None, :2], "use_cache": False}
        if self.uses_our_attention:
            given["penstock_attend"] = values_alone
        with evaluating(self.inner):
            truth = self.inner(**given).logits
            for name, decoder in _DECODERS.items():
                try:
                    if torch.equal(head(decoder(self.inner)(**given).last_hidden_state), truth):
                        return name
                except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
                    continue
        return None

    def _take_attention(self, truth: Tensor) -> None:
        """Replace the model's attention by ours, and compare the results with the reference.

        Raises:
            UnfitAttentionError: Our attention does not fit, or gives other results; says why.
        """
        self._shape = take_attention(self.inner)
        tokens, allowed = trial_tokens(self.inner), rounding(self.inner)
        try:
            with evaluating(self.inner):
                whole, steps = self.logits(self._document(tokens))[0], self._step(tokens)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UnfitAttentionError(f"our attention cannot replace its own ({one_line(error)})") from None
        if not (far := distance(whole, truth)) <= allowed:
            raise UnfitAttentionError(f"with our attention its logits are {far:.2g} standard deviations off")
        if not (far := distance(steps, truth[-len(steps) :])) <= allowed:
            raise UnfitAttentionError(
                f"after a prompt and single steps through our cache its logits are {far:.2g} standard deviations off, "
                "so it needs more of a text than keys, values and positions"
            )

    def _step(self, tokens: Tensor) -> Tensor:
        """Logits after a prompt in two parts, and after each single step to the end."""
        cache, cuts = self._keys(1, len(tokens)), [0, PROMPT // 2, *range(PROMPT, len(tokens) + 1)]
        found = [
            self.extend(tokens[None, begin:end], torch.tensor([end - begin]), cache) for begin, end in pairwise(cuts)
        ]
        return torch.cat(found[1:])

    def _require_our_attention(self) -> None:
        if not self.uses_our_attention:
            raise ConfigError(
                f"{describe(self)} does not support micro-sequences or another attention function: "
                f"{self._fallback_reason}; set micro_sequences to 1"
            )


def _documents(row: RowTensors) -> Int64:
    """Lengths of a row's documents, without padding."""
    begins, _, ends = row.rule.pieces.T
    lengths: Int64 = (ends - begins)[begins < row.source.num_tokens]
    return lengths


def _generation(inner: Any) -> dict[str, Any]:
    """What the `generation_config.json` of a model of transformers says."""
    found = getattr(inner, "generation_config", None)
    return {} if found is None else dict(found.to_diff_dict())


def load_huggingface(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> HuggingFaceModel:
    """Load a causal model of transformers from a folder.

    Args:
        folder: A folder in the Hugging Face layout.
        device: Target device.
        dtype: Dtype of the weights; None: as stored.

    Raises:
        ConfigError: There is no causal model, or transformers cannot run it.
        FormatError: The weights are quantised.
        CorruptionError: Weights are damaged, missing, left over, or not finite.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    path, kind = Path(folder), AutoModelForCausalLM
    if (path / "config.json").is_file():
        config = read_config(path)
        listed_files(path)
        refuse_quantised(path, config)
        refuse_oversized(path, config)
        kind = AutoModelForMultimodalLM if {"vision_config", "audio_config"} & set(config) else kind
    try:
        inner, found = kind.from_pretrained(
            str(folder), dtype=dtype or "auto", trust_remote_code=False, output_loading_info=True
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(f"{folder}: no causal model of transformers there: {one_line(error)}") from None
    except Exception as error:  # transformers, torch and safetensors may raise anything for a damaged folder
        raise CorruptionError(f"{folder}: the model cannot be read: {one_line(error)}; copy it again") from None
    refuse_quantised(path, inner.config.to_dict())
    refuse_incomplete(path, found["missing_keys"], found["unexpected_keys"])
    refuse_not_finite(path, inner.named_parameters())
    made = HuggingFaceModel(inner.to(device).train())
    return with_facts(made, ModelFacts.of_folder(path)) if (path / "config.json").is_file() else made
