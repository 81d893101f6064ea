"""Frozen linear layers whose matrices are held in 4 bits, through bitsandbytes: the base of QLoRA.

Each block of 64 weights has a scale, and each weight is one of 16 values times it (NF4: quantiles
of a normal distribution). The scales themselves are held in 8 bits ("double quantisation"), so a
weight takes 0.516 bytes. Where the layer is used, the matrix is made again in the dtype of its
input; gradients pass through it, and nothing is kept for them but the 4 bits.

The names and bytes of what is stored are those of bitsandbytes (`weight`, `weight.absmax`, …), so
transformers, peft and vLLM read such folders, and folders that they wrote are read here. The scales
are quantised on the CPU, with a mean whose rounding does not depend on the number of threads: the
same weights give the same bytes on every machine.

Source: QLoRA, arXiv:2305.14314, sections 2 and 3.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from penstock.core.errors import ConfigError, MissingExtraError
from penstock.models.ours.layers import Linear
from penstock.models.products import OneDnnLinear

PACKAGE, EXTRA = "bitsandbytes", "qlora"
NF4 = "nf4"
BLOCK, SCALES_BLOCK = 64, 256
"""Weights with one scale, and scales with one scale of their own: bitsandbytes' usual sizes."""
_COMPUTED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that bitsandbytes multiplies in."""
_ROUTERS = ("router", "gate", "wg")
"""Names of layers of transformers' models that choose experts; those that end with `_gate` do
too.
"""
_BLOB = ".weight.quant_state."
"""In the name of what holds the sizes of a stored matrix."""
_MARKS = (
    "hf_quantizer",
    "is_quantized",
    "is_loaded_in_4bit",
    "quantization_method",
    "hf_device_map",
)
"""What transformers notes at a model whose weights it has loaded in 4 bits."""


def require_bitsandbytes() -> None:
    """Raise MissingExtraError if bitsandbytes is not installed."""
    if find_spec(PACKAGE) is None:
        raise MissingExtraError(PACKAGE, EXTRA)


def is_four_bits(config: Mapping[str, Any]) -> bool:
    """Whether the `config.json` of a folder says that its weights are in 4 bits of bitsandbytes."""
    found = config.get("quantization_config")
    return (
        isinstance(found, Mapping)
        and found.get("quant_method") == PACKAGE
        and bool(found.get("load_in_4bit") or found.get("_load_in_4bit"))
    )


_SHAPES_ALONE = ContextVar("shapes of weights alone", default=False)


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Inside, matrices in 4 bits are not dequantised: who asks for one gets its shape, dtype and
    device with undefined values. peft asks some twenty times for each.
    """
    before = _SHAPES_ALONE.set(True)
    try:
        yield
    finally:
        _SHAPES_ALONE.reset(before)


@final
class FourBitLinear(nn.Linear):
    """A frozen linear layer with its matrix in 4 bits.

    Attributes:
        packed: uint8 [weights / 2, 1], two weights in each.
        state: The scales, as bitsandbytes' `QuantState`.
        casts: Whether it was one of our own layers, which compute in the dtype of their input.
    """

    packed: Tensor

    def __init__(
        self, packed: Tensor, state: Any, bias: nn.Parameter | None, *, casts: bool
    ) -> None:
        # The constructor of nn.Linear would make a matrix.
        nn.Module.__init__(self)
        self.out_features, self.in_features = state.shape
        self.register_buffer("packed", packed, persistent=False)
        self.register_parameter("bias", bias)
        self.state, self.casts = state, casts

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[out, in] in the dtype of the computation, made again each time."""
        if _SHAPES_ALONE.get():
            made = torch.empty((), dtype=self.state.dtype, device=self.packed.device)
            return made.expand(self.out_features, self.in_features)
        from bitsandbytes.functional import dequantize_4bit

        found: Tensor = dequantize_4bit(self.packed, self.state)
        return found

    @property
    def held_bytes(self) -> int:
        """What its matrix takes."""
        scales = [self.state.absmax, self.state.code]
        if self.state.nested:
            scales += [self.state.state2.absmax, self.state.state2.code]
        return sum(one.numel() * one.element_size() for one in (self.packed, *scales))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out], in the dtype of the input."""
        given: nn.Parameter | None = self.bias
        bias = None if given is None else given.to(x.dtype)
        if x.dtype not in _COMPUTED:
            return linear(x, self.weight.to(x.dtype), bias)
        from bitsandbytes import matmul_4bit

        out: Tensor = matmul_4bit(x, self.packed.t(), quant_state=self.state, bias=bias)
        return out

    def plain(self, dtype: torch.dtype) -> nn.Linear:
        """The layer with its matrix dequantised."""
        if self.casts:
            made: nn.Linear = Linear(1, 1)
            made.in_features, made.out_features = self.in_features, self.out_features
        else:
            made = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        made.weight = nn.Parameter(self.weight.to(dtype))
        made.bias = self.bias
        return made.train(self.training)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self.packed.device.type != "meta":
            self.state.to(self.packed.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.packed
        computed, self.state.dtype = self.state.dtype, torch.float32
        parts = self.state.as_dict(packed=True)
        self.state.dtype = computed
        for name, part in parts.items():
            # Tables of 16 and 256 values are shared, which a file of safetensors may not hold.
            destination[f"{prefix}weight.{name}"] = part.clone() if part.numel() <= 256 else part

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *others: Any, **more: Any
    ) -> None:
        from bitsandbytes.functional import QuantState

        missing, errors = others[2], others[4]
        begin = f"{prefix}weight."
        parts = {
            name.removeprefix(begin): value
            for name, value in state_dict.items()
            if name.startswith(begin)
        }
        packed = state_dict.get(f"{prefix}weight")
        if packed is None or not parts:
            missing.append(f"{prefix}weight")
        elif packed.shape != self.packed.shape:
            errors.append(
                f"{prefix}weight: has {list(packed.shape)} bytes, expected "
                f"{list(self.packed.shape)}"
            )
        else:
            dtype, device = self.state.dtype, self.packed.device
            self.packed.copy_(packed)
            self.state = QuantState.from_dict(parts, device)
            self.state.dtype = dtype
        if self.bias is not None:
            self.bias.data.copy_(state_dict[f"{prefix}bias"])


def four_bit_layers(model: Any) -> Iterator[tuple[str, FourBitLinear]]:
    """(name, layer) of all layers of a model that are held in 4 bits."""
    for name, module in model.named_modules():
        if isinstance(module, FourBitLinear):
            yield name, module


def has_four_bits(model: Any) -> bool:
    """Whether any layer of a model is held in 4 bits."""
    return any(isinstance(module, FourBitLinear) for module in model.modules())


def quantise(model: Any, kept: Collection[nn.Module] = ()) -> None:
    """Hold the linear layers inside a model's blocks in 4 bits, in place, one matrix at a time.

    Embeddings, the head, norms, routers, experts that are one tensor, and layers that share their
    weight with another one stay as they are. The layers must not have LoRA yet.

    Args:
        model: Its weights may be anywhere; what is packed stays on their device.
        kept: Modules that stay as they are, such as those that are trained whole.

    Raises:
        ConfigError: Its blocks are not known, or have no such layers.
        MissingExtraError: bitsandbytes is not installed.
    """
    require_bitsandbytes()
    blocks: Iterable[nn.Module] = getattr(model, "blocks", ())
    uses: dict[int, int] = {}
    for _, weight in model.named_parameters(remove_duplicate=False):
        uses[id(weight)] = uses.get(id(weight), 0) + 1
    count = 0
    for block in blocks:
        for parent in list(block.modules()):
            for name, layer in list(parent.named_children()):
                plain = type(layer) in (nn.Linear, Linear, OneDnnLinear) and layer not in kept
                if plain and not _is_router(name, layer) and uses[id(layer.weight)] == 1:
                    setattr(parent, name, _packed(layer))  # type: ignore[arg-type]
                    count += 1
    if not count:
        raise ConfigError(
            "lora.quantize: the blocks of this model are not known, or have no linear layers of "
            "torch's kind; leave quantize out"
        )


def _is_router(name: str, layer: nn.Module) -> bool:
    if type(layer) is Linear:
        # In our own SwiGLU, `gate` is no router.
        return name == "router"
    return name in _ROUTERS or name.endswith(("_gate", "_router"))


def _packed(layer: nn.Linear) -> FourBitLinear:
    """A layer in 4 bits, on the device of its matrix."""
    from bitsandbytes.functional import QuantState, quantize_4bit, quantize_blockwise

    device = layer.weight.device
    # On the CPU and in float32, so that the bytes are the same everywhere.
    matrix = layer.weight.detach().to("cpu", torch.float32).contiguous()
    packed, first = quantize_4bit(
        matrix, blocksize=BLOCK, compress_statistics=False, quant_type=NF4
    )
    # torch's mean rounds by the number of threads.
    mean = np.float32(first.absmax.numpy().astype(np.float64).sum() / first.absmax.numel())
    offset = torch.tensor(mean)
    scales, second = quantize_blockwise(first.absmax - offset, blocksize=SCALES_BLOCK)
    state = QuantState(
        absmax=scales,
        shape=matrix.shape,
        dtype=torch.float32,
        blocksize=BLOCK,
        code=first.code,
        quant_type=NF4,
        offset=offset,
        state2=second,
    )
    state.to(device)
    if layer.bias is not None:
        layer.bias.requires_grad_(False)
    made = FourBitLinear(packed.to(device), state, layer.bias, casts=type(layer) is Linear)
    return made.train(layer.training)


def take_four_bits(inner: Any) -> None:
    """Take over the layers of a model that transformers has loaded in 4 bits, in place; the model
    is then no different from one that was quantised here.
    """
    from bitsandbytes.nn import Linear4bit

    for parent in list(inner.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Linear4bit):
                state = layer.weight.quant_state
                state.dtype = torch.float32
                # Some keep the bytes as numbers of another dtype, for other people's FSDP.
                packed = layer.weight.data.view(torch.uint8).reshape(-1, 1)
                made = FourBitLinear(packed, state, layer.bias, casts=False)
                setattr(parent, name, made.train(layer.training))
    for mark in _MARKS:
        vars(inner).pop(mark, None)
    # It remembers how it has read the 4 bits, and cannot undo that when the model is saved.
    inner._weight_conversions = [
        one
        for one in getattr(inner, "_weight_conversions", None) or []
        if not any(type(part).__name__.startswith("Bnb") for part in getattr(one, "operations", ()))
    ]
    vars(inner.config).pop("quantization_config", None)


def make_four_bits(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Give a model of ours layers in 4 bits where stored weights are, in place.

    Args:
        model: With plain layers.
        weights: By their names in the model.

    Raises:
        MissingExtraError: Some are in 4 bits, and bitsandbytes is not installed.
        ValueError, KeyError: What is stored is no such weight.
    """
    for name in [one for one in weights if _BLOB in one]:
        require_bitsandbytes()
        from bitsandbytes.functional import QuantState

        place, begin = name.partition(_BLOB)[0], name.partition(_BLOB)[0] + ".weight."
        layer = model.get_submodule(place)
        parts = {
            one.removeprefix(begin): part for one, part in weights.items() if one.startswith(begin)
        }
        device = layer.weight.device
        state = QuantState.from_dict(parts, device)
        made = FourBitLinear(
            weights[f"{place}.weight"].to(device), state, layer.bias, casts=type(layer) is Linear
        )
        model.set_submodule(place, made.train(layer.training))


def scales(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, scales) of all matrices in 4 bits, where scales are floating."""
    for name, layer in four_bit_layers(model):
        yield f"{name}.weight", (layer.state.state2 if layer.state.nested else layer.state).absmax


def write_four_bits(inner: nn.Module, folder: Path) -> None:
    """Write into the `config.json` of a folder with the weights of a model that, and which of them,
    are in 4 bits.
    """
    packed = dict(four_bit_layers(inner))
    if not packed:
        return
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    state = next(iter(packed.values())).state
    others = [
        name.removesuffix(".base_layer")
        for name, module in inner.named_modules()
        if isinstance(module, nn.Linear) and name not in packed and ".lora_" not in name
    ]
    config["quantization_config"] = {
        "quant_method": PACKAGE,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": state.quant_type,
        "bnb_4bit_use_double_quant": state.nested,
        "bnb_4bit_compute_dtype": str(state.dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": others,
    }
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def dequantise(model: Any) -> None:
    """Give a model plain matrices in place of those in 4 bits, in place; it computes the same. They
    get the dtype of its other weights.
    """
    dtype = next(model.parameters()).dtype
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, FourBitLinear):
                setattr(parent, name, layer.plain(dtype))


def compute_four_bits_in(model: Any, dtype: torch.dtype) -> None:
    """Dequantise straight to this dtype, which is that of the inputs."""
    for _, layer in four_bit_layers(model):
        layer.state.dtype = dtype if dtype in _COMPUTED else torch.float32


def stored_names(model: Any) -> set[str]:
    """Names in a model's `state_dict` of what belongs to matrices in 4 bits, which never change."""
    return {
        f"{name}.{part}" for name, layer in four_bit_layers(model) for part in layer.state_dict()
    }


def four_bit_bytes(model: Any) -> int:
    """Bytes that the matrices in 4 bits take, and the largest of them where it is dequantised to
    float32; 0: there are none.
    """
    layers = [layer for _, layer in four_bit_layers(model)]
    largest = max((layer.in_features * layer.out_features for layer in layers), default=0)
    return sum(layer.held_bytes for layer in layers) + 4 * largest


def num_weights(model: Any) -> int:
    """Weights of a model, each of those in 4 bits counted as one."""
    packed = sum(layer.in_features * layer.out_features for _, layer in four_bit_layers(model))
    return packed + sum(int(weight.numel()) for weight in model.parameters())


def four_bits_in_words(model: Any) -> str:
    """How much of a model is in 4 bits; empty: nothing."""
    layers = [layer for _, layer in four_bit_layers(model)]
    if not layers:
        return ""
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    held = sum(layer.held_bytes for layer in layers)
    kinds = "/".join(sorted({layer.state.quant_type for layer in layers}))
    others = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
    return (
        f"{len(layers)} matrices in 4 bits ({kinds}): {weights:,} weights in {held / 1e6:,.1f} MB; "
        f"{others:,} other frozen weights are not quantised"
    )
