"""A small twin of a model of transformers: the same code on random float32 weights, to try it on.

Trials compare logits, and in half precision rounding hides what they look for: a packed row of a
sound model is 0.1 to 0.2 standard deviations off, a leak of earlier documents 0.4 and more. Nor can
a model be tried whose weights are not loaded, or are divided among ranks. But what a trial finds
depends on the code and the settings, not on the weights. So it runs on a twin: the same settings,
with the first layers until there is one of each kind, narrow feed-forward parts and few ids.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from penstock.models.isolation.lengths import WINDOWS, text_config
from penstock.models.theirs.blocks import find_blocks
from penstock.models.theirs.interface import TheirModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FEWEST_LAYERS = 2
"""So that one layer reads what another one wrote."""
VOCABULARY, INNER = 512, 64
"""Ids of a twin, and width of its feed-forward parts."""
_INNER_WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff")
"""Ends of the names of settings with the width of a feed-forward part."""
_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")


@final
class Twin:
    """The twin of one model, made when it is first needed.

    Not a module: else its weights would be some of the model's.
    """

    def __init__(self, model: TheirModel) -> None:
        self._of, self._made = model, False
        self._model: Any = None

    @property
    def model(self) -> Any:
        """The twin behind the same interface; None: there is none, so the model is tried itself."""
        if not self._made:
            device = self._of.device
            # A model without weights may not know where they will be.
            device = torch.device("cpu") if device.type == "meta" else device
            of: Any = self._of
            inner = make_twin(of.inner, device, of.fit.own)
            self._model = None if inner is None else type(of)(inner)
            if self._model is not None:
                self._model.compute_with(self._of.operations)
                self._model.packed.says = False
            self._made = True
        return self._model

    def forget(self) -> None:
        """Make it again when it is needed."""
        self._made, self._model = False, None


def make_twin(
    inner: "PreTrainedModel", device: torch.device, attention: str
) -> "PreTrainedModel | None":
    """A twin of a model in float32; None: its layers cannot be told apart, or not be made alone.

    The random generators are left as they were.

    Args:
        inner: The model; its weights are not read, and may be on the meta device.
        device: Of the twin.
        attention: The name of transformers' attention for it.
    """
    # LoRA, shards and compiling change the modules of the model itself.
    with torch.device("meta"), _same_draws(device):
        blocks = find_blocks(_made(inner, copy.deepcopy(inner.config), attention))
    if not blocks:
        return None
    kinds = _kinds(blocks)
    first = max(FEWEST_LAYERS, *(kinds.index(kind) + 1 for kind in kinds))
    for layers, narrow in ((first, True), (first, False), (len(blocks), True)):
        config = copy.deepcopy(inner.config)
        text: Any = text_config(type("_", (), {"config": config}))
        try:
            _cut_layers(text, len(blocks), layers)
            if narrow:
                _narrow(config, text)
            with _same_draws(device):
                made = _made(inner, config, attention).to(device)
                _strengthen(made)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # settings of transformers may refuse a cut in any way
            continue
        # Settings that say how far something reaches may give other kinds than those of the first.
        if _kinds(find_blocks(made)) == kinds[:layers]:
            return made
    return None


def _made(inner: "PreTrainedModel", config: Any, attention: str) -> "PreTrainedModel":
    made: PreTrainedModel = type(inner)._from_config(
        config, dtype=torch.float32, attn_implementation=attention
    )
    return made


@torch.no_grad()
def _strengthen(made: nn.Module) -> None:
    """Make matrices so large that tokens depend on each other: initial weights are small, or zero,
    and a leak through several of them is hardly more than rounding.
    """
    for weight in made.parameters():
        if weight.ndim < 2 or weight.numel() < 2:
            continue
        wanted = weight.shape[-1] ** -0.5
        if 0 < (found := float(weight.std())) < wanted:
            weight.mul_(wanted / found)
        # A token's row, too: that of padding, which a norm may not like.
        empty = ~weight.any(-1, keepdim=True)
        weight.add_(torch.randn_like(weight) * wanted * empty)


def _kinds(blocks: Sequence[nn.Module]) -> list[object]:
    """What tells one block from another but sizes: its modules and their flags, names, windows."""
    return [
        tuple(
            (path, type(module).__name__, tuple(sorted(_marks(module).items())))
            for path, module in block.named_modules()
        )
        for block in blocks
    ]


def _marks(module: nn.Module) -> dict[str, str]:
    return {
        name: repr(value)
        for name, value in vars(module).items()
        if name != "training"
        and not name.startswith("_")
        and (isinstance(value, bool | str) or name in WINDOWS)
    }


def _cut_layers(text: Any, before: int, layers: int) -> None:
    """Fewer layers, in all settings that have an entry for each."""
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == before:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers


def _narrow(config: Any, text: Any) -> None:
    for name, value in list(vars(text).items()):
        if name.endswith(_INNER_WIDTHS) and isinstance(value, int):
            setattr(text, name, min(value, INNER))
    if text is not config:
        # Tokens that stand for images have ids of their own.
        return
    for name in _VOCABULARIES:
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(getattr(text, name), VOCABULARY))
    for name in _IDS:
        if isinstance(number := getattr(text, name, None), int):
            setattr(text, name, min(number, VOCABULARY - 1))


@contextmanager
def _same_draws(device: torch.device) -> Iterator[None]:
    """Seeded within the block; torch's generators are as before afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield
