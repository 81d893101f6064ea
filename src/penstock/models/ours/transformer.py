"""A decoder-only transformer over packed rows, written to be read from top to bottom.

An embedding, blocks (`blocks.py`), a norm, and the unembedding. Further prediction heads are blocks
on the trunk that share norm and unembedding (Gloeckle et al. 2024, arXiv:2404.19737): the last
block of the plain model is the head of distance 1.

Positions and the attention function are given from outside. So the same code runs a packed row,
sequences with a cache, and a part of a row; it knows nothing about documents.

Initial weights are a function of the seed and of each weight's name, drawn on the CPU: the same on
every device and rank, and for every weight that two models of different depth share.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from penstock.core.errors import ConfigError
from penstock.core.randomness import key_for
from penstock.media.prompts import PromptImages
from penstock.media.rows import BlankImage, RowMedia
from penstock.models.attention import LayerAttend
from penstock.models.attention.compiling import uncompiled
from penstock.models.facts import ModelFacts
from penstock.models.head import matrix_of, wide
from penstock.models.image_features import FeatureCache
from penstock.models.key_caches import KeyCache, new_key_cache
from penstock.models.language_model import PackingVerdict
from penstock.models.lora.settings import LoraSettings, NewRows
from penstock.models.ours.blocks import Block, rotary_angles
from penstock.models.ours.experts import Balance
from penstock.models.ours.layers import Linear, RMSNorm
from penstock.models.ours.vision import VisionTower, check_images, with_images
from penstock.models.products import linear
from penstock.models.recurrent.borders import Borders
from penstock.models.recurrent.mixers import Carried, RowDocuments
from penstock.models.row_tensors import RowTensors
from penstock.models.settings import ModelSettings
from penstock.models.vocabulary import with_mean_rows
from penstock.plan.inputs import RowSlice
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.requirements import InputRequirements


@final
@dataclass(slots=True)
class StepOfTraining:
    """What a model must know of a training step.

    Attributes:
        seed: Of the training.
        number: From 0.
        tokens: Of all ranks, without padding.
        evenness: Σ over experts' blocks and tokens of this rank; see `Balance`.
    """

    seed: int
    number: int
    tokens: int
    evenness: Tensor | float = 0.0


@final
class Transformer(nn.Module):
    """The model; make it with `build_model`, which initialises its weights.

    Attributes:
        settings: Its size and shape.
        lora: The LoRA that trains next to it; see `add_lora`.
        new_rows: Rows for entries that its tokenizer gained.
        origin: The run or folder that its weights came from; None: they are new.
        home: Where its weights will be, if it has none yet.
        facts: What its folder says; empty if its weights were made here.
        blocks: `layers` blocks, the last of which is the head of distance 1, then one for each
            further distance.
        draws: Whether stochastic blocks draw their mixer in training; False: they take their main
            one.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        if settings.vocab_size is None:
            raise ConfigError(
                "model.vocab_size is not known yet; settings.with_vocabulary(tokenizer.vocab_size)"
            )
        self.settings = settings
        self.lora: LoraSettings | None = None
        self.new_rows: NewRows | None = None
        self.origin: str | None = None
        self.home: torch.device | None = None
        self.facts = ModelFacts()
        self.embedding = nn.Embedding(settings.vocab_size, settings.width)
        # A step asks each layer for its kind.
        self._kinds = [settings.block(layer) for layer in range(settings.num_blocks)]
        self._places = settings.places()
        self.blocks = nn.ModuleList(
            Block(settings, kind, places)
            for kind, places in zip(self._kinds, self._places, strict=True)
        )
        self._step: StepOfTraining | None = None
        self._computes: torch.dtype | None = None
        self.draws = True
        self.norm = RMSNorm(settings.width, settings.norm_eps)
        self.unembedding = None if settings.tied else Linear(settings.width, settings.vocab_size)
        self.vision = None if settings.vision is None else VisionTower(settings)

    divisible_rows = True

    @property
    def uses_our_attention(self) -> bool:
        """Whether attention alone mixes tokens."""
        return not self.settings.is_recurrent

    def forward(self, row: RowTensors) -> Tensor:
        """Final hidden states [D, T, width] of a row, for each target distance."""
        embedded = None
        if self.vision is not None and row.source.media is not None:
            embedded = with_images(
                self.embedding(row.tokens).to(self.compute_dtype), self.vision, row.source.media
            )
        carried = None
        if self.settings.is_recurrent:
            carried = RowDocuments(Borders([0, *row.rule.pieces[:, 2]], self.device))
        balance = None
        if self.settings.has_experts and self._trains:
            balance = Balance(row)
        hidden = self.run(
            row.tokens,
            row.positions,
            row.attend,
            embedded=embedded,
            carried=carried,
            balance=balance,
        )
        if balance is not None:
            step = self._begun()
            step.evenness = step.evenness + balance.evenness
            hidden = balance.attach(hidden, step.tokens)
        return hidden

    def begin_step(self, *, seed: int, number: int, tokens: int) -> None:
        """Say which training step comes: stochastic blocks draw by it, and balance losses are
        divided by its tokens.

        Args:
            seed: Of the training.
            number: Of the step, from 0.
            tokens: Of all ranks, without padding.
        """
        self._step = StepOfTraining(seed, number, tokens)

    def pending_sums(self) -> dict[str, Tensor]:
        """`experts.evenness`, for a model with experts; on the device, not divided."""
        if not self.settings.has_experts:
            return {}
        found = torch.as_tensor(self._begun().evenness, device=self.device)
        return {"experts.evenness": found}

    def end_step(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Figures of the step.

        Args:
            sums: Those of `pending_sums`, over all ranks.

        Returns:
            `experts.evenness`, for a model with experts: 1 if each document uses all experts alike;
            at most the number of experts by the number that a token goes to.
        """
        if not self.settings.has_experts:
            return {}
        step = self._begun()
        blocks = sum(
            self.settings.block(layer).experts is not None
            for layer in range(self.settings.num_blocks)
        )
        return {"experts.evenness": sums["experts.evenness"] / (step.tokens * blocks)}

    @property
    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _begun(self) -> StepOfTraining:
        if self._step is None:
            raise ConfigError(
                "a model with experts or stochastic blocks must know the training step: call "
                "model.begin_step(seed=…, number=step.index, tokens=step.num_tokens) before "
                "each; or model.eval()"
            )
        return self._step

    def _choice(self, layer: int) -> int:
        """Which way of mixing tokens a block takes: 0, its main one, unless it is stochastic and
        trains.
        """
        kind = self._kinds[layer]
        if kind.mixer != "stochastic" or not (self._trains and self.draws):
            return 0
        step = self._begun()
        bounds = list(accumulate(kind.shares))
        drawn = bisect_right(
            bounds, key_for(step.seed, "mixer", step.number, layer) / 2**64 * bounds[-1]
        )
        return kind.ways.index(kind.choices[min(drawn, len(bounds) - 1)])

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: LayerAttend,
        distances: int | None = None,
        embedded: Tensor | None = None,
        carried: Carried | None = None,
        balance: Balance | None = None,
    ) -> Tensor:
        """Final hidden states, with `attend` as the attention.

        Args:
            tokens: int64 [...].
            positions: int64 [...].
            attend: Called once per block with attention, in order.
            distances: Number of prediction heads to run; None: all.
            embedded: [..., width] embeddings in place of those of the tokens, with features of
                images among them.
            carried: The documents, for recurrent blocks.
            balance: Where experts add how evenly they are used.

        Returns:
            [D, ..., width].
        """
        dtype, trunk = self.compute_dtype, self.settings.layers - 1
        rotary = rotary_angles(positions, self.settings.each_head, self.settings.rope_theta, dtype)
        x = self.embedding(tokens).to(dtype) if embedded is None else embedded

        def block(layer: int, x: Tensor) -> Tensor:
            choice = self._choice(layer)
            out: Tensor = self.blocks[layer](
                x, rotary, self._places[layer][choice], attend, carried, balance, choice
            )
            return out

        for layer in range(trunk):
            x = block(layer, x)
        heads = range(trunk, trunk + (distances or self.settings.prediction_heads))
        found = [block(layer, x) for layer in heads]
        out: Tensor = self.norm(torch.stack(found))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., width] → [..., vocab], in float32 or wider."""
        return wide(self.narrow_logits(hidden))

    def narrow_logits(self, hidden: Tensor) -> Tensor:
        """[..., width] → [..., vocab], in the dtype of the hidden states unless they have a soft
        cap.
        """
        table = self.embedding if self.unembedding is None else self.unembedding
        scores = linear(hidden, matrix_of(table, hidden.dtype))
        if (most := self.settings.logit_softcap) is not None:
            scores = most * (wide(scores) / most).tanh()
        return scores

    def packing(self, slots: int) -> PackingVerdict:
        """Documents may share any row: only attention mixes tokens, and it sees one document at a
        time.
        """
        return PackingVerdict(slots)

    def new_cache(self, sequences: int, capacity: int) -> KeyCache:
        """An empty cache for `sequences` sequences of at most `capacity` tokens."""
        # Only main mixers write texts.
        mains = [
            self.settings.mixers(self.settings.block(layer))[0]
            for layer in range(self.settings.layers)
        ]
        windows = tuple(main.sliding_window for main in mains if not main.is_recurrent)
        return new_key_cache(
            self,
            layers=len(windows),
            sequences=sequences,
            capacity=capacity,
            kv_heads=self.settings.key_heads,
            head_width=self.settings.each_head,
            device=self.device,
            dtype=self.compute_dtype,
            windows=windows,
            softcap=self.settings.attention_softcap,
            recurrent=any(main.is_recurrent for main in mains),
        )

    @torch.no_grad()
    def extend(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: KeyCache,
        sequences: Tensor | None = None,
        images: Sequence[PromptImages | None] | None = None,
    ) -> Tensor:
        """Append new tokens to sequences, which grow by `lengths`.

        Args:
            tokens: int64 [B, n], preferably on the CPU, right-padded with any id.
            lengths: int64 [B], preferably on the CPU: tokens of each row. Results of a row with 0
                are undefined.
            cache: From `new_cache`.
            sequences: int64 [B]: the cache's sequence of each row; None: all, in order.
            images: Of each row's prompt; None: there are none.

        Returns:
            Logits [B, vocab] after each row's last new token.

        Raises:
            ConfigError: Shapes do not fit, or a sequence exceeds the cache's capacity.
        """
        growth = cache.growth(tokens, lengths, sequences)
        embedded = None
        if images is not None:
            embedded = self._embedded(growth.tokens, growth.parts(images))
        carried = growth if self.settings.is_recurrent else None
        with uncompiled():
            if embedded is None and carried is None:
                found = growth.step(self._decode)
                if found is not None:
                    return found
            hidden = self.run(
                growth.tokens,
                growth.positions,
                growth.attend,
                distances=1,
                embedded=embedded,
                carried=carried,
            )[0]
        growth.done()
        return self.logits(growth.at_last(hidden))

    def _decode(self, tokens: Tensor, positions: Tensor, attend: LayerAttend) -> Tensor:
        """Logits [B, vocab] after one token of each sequence [B, 1]."""
        return self.logits(self.run(tokens, positions, attend, distances=1)[0][:, -1])

    def _embedded(self, tokens: Tensor, parts: Sequence[RowMedia | None]) -> Tensor | None:
        """Embeddings [B, n, width] of new tokens, with features of images at their slots; None:
        there are none.
        """
        if self.vision is None or not any(parts):
            return None
        found = list(self.embedding(tokens).to(self.compute_dtype))
        for row, media in enumerate(parts):
            if media:
                found[row] = with_images(found[row], self.vision, media)
        return torch.stack(found)

    def cache_features(self, folder: str | Path, blank: BlankImage) -> None:
        """Keep the features of images in a folder."""
        self.expect_images(blank)
        assert self.vision is not None
        self.vision.cache = FeatureCache(folder, dict(self.vision.named_parameters()))

    def expect_images(self, blank: BlankImage) -> None:
        """Check that its vision tower reads images of this kind."""
        if self.vision is None:
            raise ConfigError(
                "the model has no vision tower, so it cannot read images; set model.vision"
            )
        check_images(self.vision, blank)

    def tensors(self, row: ModelInput, backend: str = "auto") -> RowTensors:
        """A row on the model's device, ready for this model's attention.

        Raises:
            ConfigError: As `RowTensors.of`.
        """
        return RowTensors.of(
            row,
            device=self.device,
            dtype=self.compute_dtype,
            backend=backend,
            windows=self.settings.windows,
            softcap=self.settings.attention_softcap,
            vocab_size=self.vocab_size,
        )

    def slice_tensors(
        self, part: RowSlice, group: object = None, backend: str = "auto"
    ) -> RowTensors:
        """This rank's part of a row that several ranks share, ready for this model's attention.

        Args:
            part: What `RowSlice.of` gives.
            group: The ranks that share the row: a process group, or a `DeviceMesh` of one
                dimension; None: all ranks.
            backend: per_document, varlen, dense or auto.

        Raises:
            ConfigError: The model has recurrent blocks or experts, or as `RowTensors.of_slice`.
            DistributedError: The group is not the one that the row was split for.
        """
        if self.settings.is_recurrent:
            raise ConfigError(
                "recurrent blocks need whole documents; train this model without context "
                "parallelism"
            )
        if self.settings.has_experts:
            raise ConfigError(
                "the balance loss of experts needs whole documents; train this model without "
                "context parallelism"
            )
        return RowTensors.of_slice(
            part,
            group,
            device=self.device,
            dtype=self.compute_dtype,
            backend=backend,
            windows=self.settings.windows,
            softcap=self.settings.attention_softcap,
            vocab_size=self.vocab_size,
        )

    def requirements(self) -> InputRequirements:
        """What a loader must provide for it."""
        return self.settings.requirements()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, under transformers' name: `check_isolation` needs it to trace tokens."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module | None:
        """The output matrix; None: it is the embedding."""
        return self.unembedding

    @property
    def lora_module(self) -> nn.Module:
        """Itself."""
        return self

    @property
    def vocab_size(self) -> int:
        """Number of known ids."""
        return self.embedding.num_embeddings

    def grow_vocabulary(self, size: int) -> int:
        """See `LanguageModel`."""
        tables: list[Any] = [
            self.embedding,
            *([] if self.unembedding is None else [self.unembedding]),
        ]
        first = len(self.embedding.weight)
        for table in tables:
            old = table.weight
            table.weight = nn.Parameter(
                with_mean_rows(old.detach(), size), requires_grad=old.requires_grad
            )
        self.embedding.num_embeddings = size
        if self.unembedding is not None:
            self.unembedding.out_features = size
        self.settings = replace(self.settings, vocab_size=size)
        return first

    @property
    def device(self) -> torch.device:
        """Device of the weights, or the one where they will be."""
        found = self.embedding.weight.device
        return found if found.type != "meta" or self.home is None else self.home

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the settings if weights are in float32, otherwise that of the weights;
        unless `compute_in` chose another.
        """
        if self._computes is not None:
            return self._computes
        kept = self.embedding.weight.dtype
        return getattr(torch, self.settings.dtype) if kept == torch.float32 else kept

    def compute_in(self, dtype: torch.dtype, *, casts: bool = True) -> None:
        """See `LanguageModel`; each layer casts its own weights."""
        self._computes = dtype

    @property
    def prediction_weights(self) -> tuple[float, ...]:
        """How much each target distance counts in the loss."""
        return self.settings.distance_weights
