"""Any causal model of transformers with the interface of our own models, on the same rows.

If possible, our attention replaces the model's (see `attention`). Then packed rows, prefixes,
caches and micro-sequences work as for our own transformer, and documents are kept apart without a
mask. Whether it is possible is tested on a few tokens when the model is loaded: the logits of a
document, and those of a prompt and single steps through the cache, must equal transformers' logits
for the whole document alone. Models with other kinds of layers, sinks or dropout fail this test.
They run in one of the other ways of `packed_ways`, without prefixes.

Exact means: equal to the document alone in transformers, up to rounding. Rows of one document run
as that document. `loading` refuses a folder with a model that would compute something else;
`images` and `generation` are the parts for rows with images and for caches.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from penstock.core.arrays import Int64
from penstock.core.errors import ConfigError
from penstock.media.prompts import PromptImages
from penstock.media.rows import BlankImage
from penstock.models.attention import LayerAttend, RowAttend, RowAttention
from penstock.models.casting import cast_model
from penstock.models.facts import ModelFacts
from penstock.models.four_bits import has_four_bits
from penstock.models.head import wide
from penstock.models.isolation.lengths import rotary_limit
from penstock.models.isolation.report import describe
from penstock.models.key_caches import KeyCache
from penstock.models.language_model import PackingVerdict, require_packed_rows
from penstock.models.lora.settings import LoraSettings, NewRows
from penstock.models.lora.trained_parts import num_rows
from penstock.models.products import replace_linear, uses_onednn
from penstock.models.recurrent.operations import TORCH, Operations
from penstock.models.row_tensors import RowTensors
from penstock.models.text_cache import TextCache
from penstock.models.theirs.attention import (
    AttentionFit,
    InBatch,
    distance,
    restart_rotary,
    rounding,
    trial_tokens,
    true_logits,
)
from penstock.models.theirs.blocks import find_blocks
from penstock.models.theirs.decoder import Decoder, find_decoder
from penstock.models.theirs.fitting import fit_attention
from penstock.models.theirs.generation import Generation
from penstock.models.theirs.image_rows import has_vision
from penstock.models.theirs.image_ways import ImageWays
from penstock.models.theirs.packed_ways import PackedWays
from penstock.models.theirs.recurrence import replace_functions
from penstock.models.theirs.tensors import REQUIREMENTS
from penstock.models.theirs.twin import Twin
from penstock.models.vocabulary import mean_row
from penstock.models.without_dropout import evaluating
from penstock.plan.inputs import AttentionRule, RowSlice
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.requirements import InputRequirements

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_log = logging.getLogger("penstock.models")


@final
class HuggingFaceModel(nn.Module):
    """A model of transformers; `load_huggingface` makes it.

    Attributes:
        inner: The model itself.
        home: Where its weights will be, if it has none yet.
        lora: The LoRA that trains next to it; see `add_lora`.
        new_rows: Rows for entries that its tokenizer gained.
        origin: The run, folder or hub name that its weights came from; None: unknown.
        facts: What its folder says; empty if its weights were made here.
        blocks: The layers of its text decoder; empty: they cannot be told apart, so it is neither
            compiled, nor sharded, nor checkpointed block by block.
        operations: What computes recurrences in rows; see `use_recurrent`.
        packed: How its rows of several documents run.
    """

    def __init__(self, inner: "PreTrainedModel", home: torch.device | None = None) -> None:
        super().__init__()
        self.inner, self.home = inner, home
        self.lora: LoraSettings | None = None
        self.new_rows: NewRows | None = None
        self.origin: str | None = getattr(inner, "name_or_path", None) or None
        self.operations = TORCH
        self.facts = ModelFacts()
        if inner.name_or_path:
            # It was read from a folder or from the hub, whose files may be gone.
            self.facts = ModelFacts.of_config(inner.config.to_dict(), _generation(inner))
        replace_functions(inner)
        if uses_onednn():
            replace_linear(inner)
        self.blocks: Sequence[nn.Module] = find_blocks(inner)
        self._computes: torch.dtype | None = None
        self._decoder: Decoder | None = None
        self.fit = AttentionFit(inner.config._attn_implementation)
        self._twin = Twin(self)
        trial = self.trial_model
        # Of a model with a twin, rounding would hide what the twin was asked when it was made.
        truth = None if self.is_on_meta else true_logits(inner, causal=trial is self)
        self.rotary = rotary_limit(inner)
        self.logits_width = (
            num_rows(inner.get_output_embeddings() or inner.get_input_embeddings())
            if truth is None
            else truth.shape[-1]
        )
        self.images = ImageWays(self)
        self.generation = Generation(self, self.images)
        fit_attention(self, truth)
        self._decoder = (
            find_decoder(inner, self.uses_our_attention) if trial is self else trial.decoder
        )
        self.packed = PackedWays(self)

    @property
    def trial_model(self) -> "HuggingFaceModel":
        """The model that trials run on: itself as long as it computes in float32 as it was loaded,
        then its twin; see `twin`.
        """
        weight = next(self.inner.parameters())
        whole = (
            type(weight) is nn.Parameter
            # Sharded, some weights may be gathered at this moment, and others not.
            and not hasattr(self, "reshard")
            and weight.dtype in (torch.float32, torch.float64)
            and weight.device.type != "meta"
            and self._computes in (None, weight.dtype)
            and all(block._compiled_call_impl is None for block in self.blocks)
            and not has_four_bits(self.inner)
        )
        return self if whole else self._twin.model or self

    @property
    def is_on_meta(self) -> bool:
        """Whether it has no weights yet."""
        return bool(next(self.inner.parameters()).is_meta)

    @property
    def decoder(self) -> Decoder | None:
        """The way to its hidden states; None: it gives logits."""
        return self._decoder

    @property
    def uses_our_attention(self) -> bool:
        """Whether our attention replaces the model's own, so that a cache of keys and values is
        enough.
        """
        return self.fit.shape is not None

    @property
    def divisible_rows(self) -> bool:
        """With our attention."""
        return self.uses_our_attention

    def packing(self, slots: int) -> PackingVerdict:
        """Whether documents may share a row of `slots` slots; tested once, on random tokens."""
        return self.packed.packing(slots)

    def compute_with(self, operations: Operations) -> None:
        """Compute recurrences in rows with these; how rows run is then found again."""
        self.operations = operations
        self.packed = PackedWays(self)
        self._twin.forget()

    def packing_way(self) -> str:
        """How rows of several documents run, in words; known once `packing` was asked."""
        return self.packed.describe()

    def packing_cost(
        self, begins: Annotated[Int64, "documents"], ends: Annotated[Int64, "documents"]
    ) -> str:
        """What a row of documents costs more than one pass, in words; empty: nothing."""
        return self.packed.cost(begins, ends) if self.runs_several_passes else ""

    @property
    def runs_several_passes(self) -> bool:
        """Whether a row of several documents takes several passes; known once `packing` was
        asked.
        """
        return self.packed.several_passes

    def grow_vocabulary(self, size: int) -> int:
        """See `LanguageModel`."""
        inner, first = self.inner, len(self.inner.get_input_embeddings().weight)
        trial = trial_tokens(inner)
        with evaluating(inner):
            before = self.logits(self.document(trial))
        inner.resize_token_embeddings(size, mean_resizing=False)
        head = inner.get_output_embeddings()
        with torch.no_grad():
            for table in (inner.get_input_embeddings(), *([] if head is None else [head])):
                for weight in table.parameters(recurse=False):
                    weight[first:] = mean_row(weight[:first])
        with evaluating(inner):
            after = self.logits(self.document(trial))
        self.logits_width = after.shape[-1]
        old = before.shape[-1]
        if self.vocab_size != size or not distance(after[..., :old], before) <= rounding(self):
            raise ConfigError(
                f"{describe(self)}: its vocabulary cannot grow to {size} ids: it has "
                f"{self.vocab_size} then, or logits of its old tokens change; prepare the "
                "data with the model's own tokenizer"
            )
        return first

    @property
    def has_vision(self) -> bool:
        """Whether it reads images."""
        return has_vision(self.inner)

    def forward(self, row: RowTensors) -> Tensor:
        """Final hidden states [1, T, width] of a row; zeros in the padding if it holds one
        document.
        """
        if row.source.media is not None and self.has_vision:
            return self.images.hidden(row)
        if self.uses_our_attention:
            return self.run(row.tokens, row.positions, row.attend)
        if len(_documents(row)) > 1 or self.packed.runs_single_documents():
            return self.packed.hidden(row, self.hidden)
        slots, used = len(row.tokens), row.source.num_tokens or len(row.tokens)
        return pad(self.document(row.tokens[:used]), (0, 0, 0, slots - used))

    def begin_step(self, *, seed: int, number: int, tokens: int) -> None:
        """No-op: this model keeps nothing per step."""

    def pending_sums(self) -> dict[str, Tensor]:
        """No sums."""
        return {}

    def end_step(self, sums: Mapping[str, float]) -> dict[str, float]:
        """No figures."""
        return {}

    def run(
        self, tokens: Tensor, positions: Tensor, attend: LayerAttend, distances: int | None = None
    ) -> Tensor:
        """Final hidden states [1, ..., width] of tokens [T] or [B, n], with `attend` as the
        attention.

        Raises:
            ConfigError: Our attention cannot replace that of this model.
        """
        self._require_our_attention()
        batched = tokens.ndim == 2
        rows, places = (x if batched else x[None] for x in (tokens, positions))
        given = {
            "input_ids": rows,
            "position_ids": places,
            "use_cache": False,
            "penstock_attend": attend if batched else InBatch(attend),
        }
        hidden = self.hidden(given)
        return hidden[None] if batched else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., width] → [..., vocab], in float32 or wider."""
        return wide(self.narrow_logits(hidden))

    def narrow_logits(self, hidden: Tensor) -> Tensor:
        """[..., width] → [..., vocab], in the dtype in which the model makes them."""
        if self._decoder is None:
            return hidden
        return self._decoder.logits(self.inner, hidden.to(self.compute_dtype))

    def document(self, tokens: Tensor) -> Tensor:
        """Final hidden states [1, n, width] of one document [n]; logits if `hidden` returns
        these.
        """
        if not self.uses_our_attention:
            return self.hidden({"input_ids": tokens[None], "use_cache": False})
        assert self.fit.shape is not None
        rule = AttentionRule(np.array([[0, 0, len(tokens)]]))
        shape, device, dtype = self.fit.shape, self.device, self.compute_dtype

        def attention(window: int | None) -> RowAttention:
            return RowAttention.of(
                rule, device=device, dtype=dtype, window=window, softcap=shape.softcap
            )

        places = torch.arange(len(tokens), device=device)
        return self.run(tokens, places, RowAttend.of(shape.windows, attention))

    def new_cache(self, sequences: int, capacity: int) -> KeyCache | TextCache:
        """An empty cache for `sequences` sequences of at most `capacity` tokens; see
        `Generation.new_cache`.
        """
        return self.generation.new_cache(sequences, capacity)

    def extend(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: KeyCache | TextCache,
        sequences: Tensor | None = None,
        images: Sequence[PromptImages | None] | None = None,
    ) -> Tensor:
        """Like `Transformer.extend`."""
        return self.generation.extend(tokens, lengths, cache, sequences, images)

    def expect_images(self, blank: BlankImage) -> None:
        """Find out how it reads images, and whether that works through a cache."""
        self.generation.expect_images(blank)

    def cache_features(self, folder: str | Path, blank: BlankImage) -> None:
        """Keep the features of images in a folder."""
        self.images.keep_features(folder, blank)

    def tensors(self, row: ModelInput, backend: str = "auto") -> RowTensors:
        """A row on the model's device, ready for this model's attention.

        Raises:
            ConfigError: As `RowTensors.of`; or it reads images in a way that knows no prefix trees.
            IsolationError: The row holds several documents, and the model would let them see each
                other.
        """
        if row.media is not None and self.has_vision:
            self.images.check(row)
        made = self.row_tensors(row, backend)
        documents = _documents(made)
        if len(documents) > 1:
            require_packed_rows(self, row.sequence_length, int(documents.max()))
        return made

    def row_tensors(self, row: ModelInput, backend: str = "auto") -> RowTensors:
        """`tensors` without its checks, for trials of rows."""
        windows = () if self.fit.shape is None else self.fit.shape.windows
        if self.rotary is not None and row.positions is not None:
            # Frequencies depend on the highest position, and padding may be longer than any
            # document.
            row = replace(
                row,
                positions=np.where(
                    np.arange(row.sequence_length) < row.num_tokens, row.positions, 0
                ),
            )
        return RowTensors.of(
            row,
            device=self.device,
            dtype=self.compute_dtype,
            backend=backend,
            windows=windows,
            softcap=None if self.fit.shape is None else self.fit.shape.softcap,
            vocab_size=self.vocab_size,
        )

    def slice_tensors(
        self, part: RowSlice, group: object = None, backend: str = "auto"
    ) -> RowTensors:
        """This rank's part of a row that several ranks share, ready for this model's attention.

        Raises:
            ConfigError: Not our attention alone mixes tokens, or as `RowTensors.of_slice`.
            DistributedError: The group is not the one that the row was split for.
            IsolationError: The row holds several documents, and the model would let them see each
                other.
        """
        if self.fit.shape is None:
            raise ConfigError(
                f"{describe(self)}: runs with its own attention ({self.fit.reason}), which "
                "has no slices of rows; train it without context parallelism"
            )
        if self.rotary is not None:
            raise ConfigError(
                f"{describe(self)}: its rotary embedding ({self.rotary[1]}) depends on the "
                "longest document of a row, which a slice does not hold; train it without "
                "context parallelism"
            )
        made = RowTensors.of_slice(
            part,
            group,
            device=self.device,
            dtype=self.compute_dtype,
            backend=backend,
            windows=self.fit.shape.windows,
            softcap=self.fit.shape.softcap,
            vocab_size=self.vocab_size,
        )
        documents = _documents(made)
        if len(documents) > 1:
            require_packed_rows(self, len(part.order), int(documents.max()))
        return made

    def requirements(self) -> InputRequirements:
        """What a loader must provide for it."""
        prefixes = self.fit.shape is not None and self.fit.shape.window is None
        return InputRequirements(
            asked_by=f"the model {type(self.inner).__name__}",
            loss_weights=True,
            positions=True,
            cu_seqlens=True,
            prefix=prefixes or REQUIREMENTS.prefix,
            trees=self.fit.shape is not None,
            images=self.has_vision,
        )

    @property
    def lora_module(self) -> nn.Module:
        """The model itself, without what wraps it: peft reads its attributes."""
        inner: nn.Module = self.inner
        return inner

    def get_output_embeddings(self) -> nn.Module | None:
        """The output matrix."""
        head: nn.Module | None = self.inner.get_output_embeddings()
        return head

    def get_input_embeddings(self) -> nn.Module:
        """The embedding; `check_isolation` needs it to trace tokens."""
        embeddings: nn.Module = self.inner.get_input_embeddings()
        return embeddings

    @property
    def config(self) -> "PretrainedConfig":
        """The settings of the model itself."""
        return self.inner.config

    @property
    def vocab_size(self) -> int:
        """Number of known ids, which have an embedding and logits."""
        return min(num_rows(self.inner.get_input_embeddings()), self.logits_width)

    @property
    def device(self) -> torch.device:
        """Device of the weights, or the one where they will be."""
        found = next(self.inner.parameters()).device
        return found if found.type != "meta" or self.home is None else self.home

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the weights, unless `compute_in` chose another."""
        return self._computes or next(self.inner.parameters()).dtype

    def compute_in(self, dtype: torch.dtype, *, casts: bool = True) -> None:
        """See `LanguageModel`."""
        if dtype != self.compute_dtype and not self.blocks:
            raise ConfigError(
                f"{describe(self)}: its blocks cannot be told apart, so it computes in the dtype "
                f"of its weights, {self.compute_dtype}; set training.precision to float32"
            )
        before, self._computes = self.compute_dtype, dtype
        if casts and dtype != before:
            cast_model(self.inner, self.blocks, dtype)

    @property
    def prediction_weights(self) -> tuple[float, ...]:
        """It predicts the next token only."""
        return (1.0,)

    def hidden(self, given: dict[str, object]) -> Tensor:
        """Hidden states [B, n, width]; logits if the head is more than a matrix."""
        return self.read(given)[0]

    def read(self, given: dict[str, Any]) -> tuple[Tensor, Any]:
        """Hidden states [B, n, width] for arguments of transformers, or logits as in `hidden`; and
        its whole output.
        """
        if self.rotary is not None:
            restart_rotary(self.inner)
        if self._decoder is None:
            output = self.inner(**given)
            return output.logits, output
        output = self._decoder(self.inner, given)
        return output.last_hidden_state, output

    def _require_our_attention(self) -> None:
        if not self.uses_our_attention:
            raise ConfigError(
                f"{describe(self)} does not support micro-sequences or another attention function: "
                f"{self.fit.reason}; set micro_sequences to 1"
            )


def _documents(row: RowTensors) -> Int64:
    """Lengths of a row's documents, without padding."""
    begins, _, ends = row.rule.pieces.T
    lengths: Int64 = (ends - begins)[begins < row.source.num_tokens]
    return lengths


def _generation(inner: object) -> dict[str, object]:
    """What the `generation_config.json` of a model of transformers says."""
    found = getattr(inner, "generation_config", None)
    return {} if found is None else dict(found.to_diff_dict())
