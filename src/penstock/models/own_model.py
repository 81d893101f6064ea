"""A torch module of the user's own behind the door that all models have.

Two methods and a number are enough (`OwnModule`); the rest is made of them. Whether documents may
share a row is tried, not believed: logits of each document in a row must be those of the document
alone. Texts are written without a cache, by reading the whole text again for each token: exact, and
slow.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.errors import ConfigError, FormatError, IsolationError
from penstock.core.json_values import JsonObject
from penstock.core.randomness import key_for
from penstock.media.prompts import PromptImages
from penstock.media.rows import BlankImage
from penstock.models.attention import LayerAttend
from penstock.models.facts import ModelFacts
from penstock.models.head import wide
from penstock.models.isolation.documents import try_isolation
from penstock.models.isolation.trees import try_tree
from penstock.models.language_model import PackingVerdict
from penstock.models.lora.settings import LoraSettings, NewRows
from penstock.models.own_code import check_signature, load_own_code, name_of
from penstock.models.row_tensors import RowTensors
from penstock.models.text_cache import TextCache
from penstock.plan.inputs import RowSlice
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.inputs.requirements import InputRequirements

PREFIX = "module."
"""What the names of weights begin with behind the door."""


@runtime_checkable
class OwnModule(Protocol):
    """What a `torch.nn.Module` needs to be trained. T slots, D target distances.

    It may also have `requirements()`, an `InputRequirements` with what a row must hold besides
    targets, loss weights, positions and document borders (`AsksForMore`); `prediction_weights`, one
    number a target distance, by default one distance (`PredictsFurther`); and
    `get_input_embeddings()` (`Embeds`).
    """

    vocab_size: int
    """Ids below it are known."""

    def forward(self, row: RowTensors) -> Tensor:
        """Final hidden states [T, width] of one row, or [D, T, width]; no document may see another.

        `row.tokens` and `row.positions` are int64 [T]; `row.attention(q, k, v)` attends within
        documents, with q [T, heads, dim], k and v [T, kv_heads, dim]. Rows also come with one
        document, of any length.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., width] → [..., vocab_size]; called on the positions that have a target."""


@runtime_checkable
class AsksForMore(Protocol):
    """A module that reads more of a row than targets, loss weights, positions and borders."""

    def requirements(self) -> InputRequirements:
        """What a row must hold besides."""


@runtime_checkable
class PredictsFurther(Protocol):
    """A module with several target distances."""

    prediction_weights: Sequence[float]
    """How much each of them counts in the loss."""


@runtime_checkable
class Embeds(Protocol):
    """A module that gives its embedding, so that gradients show what mixes documents."""

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""


@final
class OwnModel(nn.Module):
    """The door; see `LanguageModel` for its methods.

    Args:
        module: Meets `OwnModule`.
        code: `module:function` that makes it, where a run file names one; then a folder with its
            weights can be loaded.

    Raises:
        ConfigError: The module lacks something, or has no weights.
    """

    uses_our_attention = divisible_rows = False

    def __init__(self, module: nn.Module, code: str | None = None) -> None:
        super().__init__()
        _check_module(module)
        self.module, self.code = module, code
        self.lora: LoraSettings | None = None
        self.new_rows: NewRows | None = None
        self.origin: str | None = None
        self.facts = ModelFacts()
        self._verdict: PackingVerdict | None = None

    def forward(self, row: RowTensors) -> Tensor:
        """Final hidden states [D, T, width]."""
        hidden = self.module(row)
        if (
            not isinstance(hidden, Tensor)
            or hidden.ndim not in (2, 3)
            or hidden.shape[-2] != len(row.tokens)
        ):
            found = list(hidden.shape) if isinstance(hidden, Tensor) else repr(hidden)
            raise ConfigError(
                f"{self._name}: forward gave {found}; expected hidden states [T, width] or "
                f"[distances, T, width], with T = {len(row.tokens)}"
            )
        return hidden if hidden.ndim == 3 else hidden[None]

    def begin_step(self, *, seed: int, number: int, tokens: int) -> None:
        """No-op: this model keeps nothing per step."""

    def pending_sums(self) -> dict[str, Tensor]:
        """No sums."""
        return {}

    def end_step(self, sums: Mapping[str, float]) -> dict[str, float]:
        """No figures."""
        return {}

    def run(self, tokens: Tensor, positions: Tensor, attend: LayerAttend) -> Tensor:
        """Unsupported: user modules attend by `row.attention`."""
        raise ConfigError(f"{self._name}: a module of your own cannot attend by another function")

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., width] → [..., vocab], in float32 or wider."""
        return wide(self.narrow_logits(hidden))

    def narrow_logits(self, hidden: Tensor) -> Tensor:
        """[..., width] → [..., vocab], as the module gives them."""
        scores: Tensor = self.module.logits(hidden)  # type: ignore[operator]
        return scores

    def requirements(self) -> InputRequirements:
        """What a loader must give for it."""
        needed = InputRequirements(
            asked_by=f"the model {self._name}",
            target_distances=len(self.prediction_weights),
            loss_weights=True,
            positions=True,
            cu_seqlens=True,
        )
        own = self.module
        return needed.merge(own.requirements()) if isinstance(own, AsksForMore) else needed

    def packing(self, slots: int) -> PackingVerdict:
        """Whether documents may share a row; tried once, on random tokens."""
        if self._verdict is None:
            try:
                try_isolation(self, self._trial_logits, gradients=isinstance(self.module, Embeds))
                if self.requirements().trees:
                    try_tree(self, self._trial_logits)
                self._verdict = PackingVerdict(slots)
            except IsolationError as error:
                self._verdict = PackingVerdict(0, str(error))
        return PackingVerdict(slots) if self._verdict.reason is None else self._verdict

    def _trial_logits(self, _: object, row: ModelInput) -> Tensor:
        return self.logits(self(self.tensors(row)))[0]

    lora_module = None

    def get_output_embeddings(self) -> None:
        """Unknown: the module's `logits` are its own code."""

    def get_input_embeddings(self) -> nn.Module:
        """The module's embedding, or what stands for one: the isolation check reads the vocabulary
        off it.
        """
        if isinstance(self.module, Embeds):
            return self.module.get_input_embeddings()
        return nn.Embedding(self.vocab_size, 1, device="meta")

    def tensors(self, row: ModelInput, backend: str = "auto") -> RowTensors:
        """A row on the model's device."""
        return RowTensors.of(
            row,
            device=self.device,
            dtype=self.compute_dtype,
            backend=backend,
            vocab_size=self.vocab_size,
        )

    def slice_tensors(
        self, part: RowSlice, group: object = None, backend: str = "auto"
    ) -> RowTensors:
        """Unsupported for user modules: we cannot tell whether only attention mixes tokens."""
        raise ConfigError(
            f"{self._name}: a module of your own gets no slices of rows; call slice_attention of "
            "penstock.models.attention in a loop of your own"
        )

    def new_cache(self, sequences: int, capacity: int) -> TextCache:
        """Room for sequences, kept as tokens."""
        return TextCache(sequences, capacity, self.device)

    @torch.no_grad()
    def extend(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: TextCache,
        sequences: Tensor | None = None,
        images: Sequence[PromptImages | None] | None = None,
    ) -> Tensor:
        """Feed new tokens of sequences; logits [B, vocab] after each one's last new token."""
        chosen = cache.append(tokens, lengths, sequences)
        found = [self._last_logits(cache.text(sequence)) for sequence in chosen]
        return torch.stack(found)

    def expect_images(self, blank: BlankImage) -> None:
        """Unsupported for user modules."""
        raise ConfigError(
            f"{self._name}: prompts with images are not supported for a module of your own"
        )

    def cache_features(self, folder: str | Path, blank: BlankImage) -> None:
        """Unsupported for user modules."""
        raise ConfigError(
            f"{self._name}: training.feature_cache is not supported for a module of your own"
        )

    def _last_logits(self, text: Tensor) -> Tensor:
        if not len(text):
            return torch.zeros(self.vocab_size, device=self.device)
        count = len(text)
        row = ModelInput(
            tokens=text.to("cpu", torch.int32).numpy(),
            targets=np.full((1, count), -100, np.int32),
            loss_weights=np.zeros((1, count), np.float32),
            positions=np.arange(count, dtype=np.int32),
            document_ids=np.zeros(count, np.int32),
            cu_seqlens=np.array([0, count], np.int32),
            max_seqlen=count,
            num_tokens=count,
            source_ids=np.zeros(1, np.int32),
        )
        return self.logits(self(self.tensors(row))[0, -1])

    @property
    def vocab_size(self) -> int:
        """Ids below it are known."""
        return int(self.module.vocab_size)  # type: ignore[arg-type]

    def grow_vocabulary(self, size: int) -> int:
        """See `LanguageModel`: it cannot."""
        raise ConfigError(
            f"model: a module of your own has {self.vocab_size} ids, and the data need "
            f"{size}; give it more rows"
        )

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.module.parameters()).device

    @property
    def compute_dtype(self) -> torch.dtype:
        """That of its weights."""
        return next(self.module.parameters()).dtype

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Those that it names `blocks`; empty: it has none."""
        found = getattr(self.module, "blocks", None)
        return list(found) if isinstance(found, nn.ModuleList) else []

    def compute_in(self, dtype: torch.dtype, *, casts: bool = True) -> None:
        """See `LanguageModel`: a module of the user's own computes as it is written."""
        if dtype != self.compute_dtype:
            raise ConfigError(
                f"training.precision: {self._name} is a module of your own and computes in "
                f"{self.compute_dtype}; leave precision out, and cast in its forward, or give it "
                "weights of another dtype"
            )

    @property
    def prediction_weights(self) -> tuple[float, ...]:
        """How much each target distance counts in the loss."""
        own = self.module
        return tuple(own.prediction_weights) if isinstance(own, PredictsFurther) else (1.0,)

    @property
    def _name(self) -> str:
        return type(self.module).__name__


def build_own(code: str, vocab_size: int, seed: int, where: str = "model") -> OwnModel:
    """The module that code of the user's own makes: `function(vocab_size)`, or a class that is
    called so.

    Args:
        code: `module:function` or `path/to/file.py:function`.
        vocab_size: Ids that it must know.
        seed: Of fresh weights, as torch draws them.
        where: For errors.

    Raises:
        ConfigError: There is no such code, or what it makes is no such module.
    """
    make: Callable[[int], Any] = check_signature(load_own_code(code, where), where, ("vocab_size",))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key_for(seed, "weights", "own") >> 1)
        module = make(vocab_size)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{where}: {code} gave {module!r}, expected a torch.nn.Module")
    model = OwnModel(module, code)
    if model.vocab_size < vocab_size:
        raise ConfigError(
            f"{where}: {code} made a model of {model.vocab_size} ids, and the data need "
            f"{vocab_size}"
        )
    return model


def load_own(folder: Path, described: JsonObject, module: nn.Module | None) -> OwnModel:
    """A user module with the weights of a folder.

    Args:
        folder: That `save_model` wrote.
        described: What its `model.json` says.
        module: To load into; None: made by the code that the folder names.

    Raises:
        FormatError: The folder names no code that makes it, or code that lies in itself.
    """
    code = described.get("code")
    if module is not None:
        return OwnModel(module, code)
    if code is None:
        raise FormatError(
            f"{folder}: has the weights of {described.get('class')}, a module that was given "
            "as an object, and a folder holds no code; make the module and load them by "
            "ps.load_model(folder, module=…)"
        )
    # Whoever copies a run from elsewhere does not expect that it runs code which came with it.
    shipped = [whole := folder.resolve(), *whole.parents[:3]]
    place = Path(code.rpartition(":")[0]).resolve()
    if any(
        place.is_relative_to(one) for one in shipped if (one / "run.yaml").exists() or one == whole
    ):
        raise FormatError(
            f"{folder}: is made by code that came with it, {place}, which is not run; move "
            "the file out of the folder, or load the weights by ps.load_model(folder, "
            "module=…)"
        )
    return build_own(code, described["vocab_size"], 0, str(folder))


def own_description(model: OwnModel) -> JsonObject:
    """The entry of a user module in `model.json`."""
    kind = type(model.module)
    return {
        "kind": "own",
        "code": model.code,
        "class": name_of(kind) or kind.__qualname__,
        "vocab_size": model.vocab_size,
    }


def _check_module(module: nn.Module) -> None:
    name = type(module).__name__
    size = getattr(module, "vocab_size", None)
    if not isinstance(size, int) or size < 1:
        raise ConfigError(
            f"model {name}: vocab_size is {size!r}, expected the number of ids that it knows"
        )
    if not callable(getattr(module, "logits", None)):
        raise ConfigError(
            f"model {name}: has no logits(hidden), which makes [..., vocab_size] of hidden states"
        )
    check_signature(module.forward, f"model {name}: forward", ("row",))
    check_signature(module.logits, f"model {name}: logits", ("hidden",))
    if next(module.parameters(), None) is None:
        raise ConfigError(f"model {name}: has no weights to train")
