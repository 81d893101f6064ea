"""Blocks of any transformers model: found by rule, tried on a small twin, cast to bfloat16, and run
again in the backward pass.
"""

import copy
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from makers.architectures import make_small
from makers.models import tiny_huggingface
from makers.rows import random_row
from penstock.core.errors import ConfigError
from penstock.learn.training.losses import row_loss
from penstock.models.activation_checkpointing import checkpoint_blocks
from penstock.models.building import build_model
from penstock.models.settings import BlockSettings, ModelSettings
from penstock.models.theirs.blocks import find_blocks
from penstock.models.theirs.model import HuggingFaceModel
from penstock.models.theirs.twin import make_twin

FOUND = ["llama", "gemma3_text", "qwen3_moe", "mamba2", "jamba", "gpt2", "bloom", "bert", "opt"]
ALIKE = [
    "llama",
    "gemma3_text",
    "gemma3n_text",
    "gpt_oss",
    "beam",
    "deepseek_v32",
    "mamba2",
    "gpt2",
]
"""Kinds with the same verdict in half precision."""
LENGTHS = (20, 3, 9, 30)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "mamba2": ("mamba2", {}),
}
OURS: dict[str, ModelSettings] = {
    "ours": ModelSettings(layers=3, width=32, heads=4, kv_heads=2, vocab_size=300),
    "ours, experts and windows": ModelSettings(
        layers=4,
        width=32,
        heads=4,
        vocab_size=300,
        blocks={
            "near": BlockSettings(sliding_window=8),
            "sparse": BlockSettings(experts=3, balance=0.3),
        },
        pattern=("near", "sparse"),
    ),
    "ours, hybrid": ModelSettings(
        layers=4,
        width=32,
        heads=4,
        vocab_size=300,
        blocks={"full": BlockSettings(), "delta": BlockSettings(mixer="gated_delta")},
        pattern=("delta", "full"),
    ),
}


def made(name: str) -> Any:
    """A new model, the same each time."""
    if name in OURS:
        return build_model(OURS[name], vocab_size=300, seed=3)
    kind, settings = MODELS[name]
    if name == "mamba2":
        return HuggingFaceModel(make_small(kind, vocab_size=300).train())
    return HuggingFaceModel(
        tiny_huggingface(kind, vocab_size=300, num_hidden_layers=4, **settings).train()
    )


def row(seed: int = 0) -> Any:
    return random_row(LENGTHS, below=256, seed=seed)


def gradients(model: Any, seed: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a row and all gradients."""
    one = row(seed)
    model.begin_step(seed=0, number=0, tokens=one.num_tokens)
    loss = row_loss(model, model.tensors(one), float(one.loss_weights.sum())).loss
    loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return float(loss.detach()), found


# -- finding


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "gemma3_text",
        "qwen3_moe",
        "mamba2",
        "jamba",
        "gpt2",
        "bloom",
        "bert",
        "opt",
        "zamba2",
    ],
)
def test_the_layers_of_the_decoder_are_found(kind: str) -> None:
    inner = make_small(kind)
    blocks = find_blocks(inner)
    assert len(blocks) == inner.config.get_text_config().num_hidden_layers
    inside = {id(weight) for block in blocks for weight in block.parameters()}
    outside = sum(id(weight) not in inside for weight in inner.parameters())
    assert 0 < outside < 20


@pytest.mark.slow
def test_the_layers_of_nearly_all_decoders_are_found() -> None:
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    found, missing = 0, []
    for kind in names:
        try:
            inner = make_small(kind)
        except Exception:  # transformers makes no small model of it
            continue
        if find_blocks(inner):
            found += 1
        else:
            missing.append(kind)
    assert len(missing) < 0.1 * found, missing


def test_layers_that_are_not_found_are_said() -> None:
    model = HuggingFaceModel(make_small("openai-gpt"))
    assert not model.blocks
    with pytest.raises(ConfigError, match=r"blocks cannot be told apart.*precision to float32"):
        model.compute_in(torch.bfloat16)


# -- the twin


def test_the_first_layers_hold_one_of_each_kind() -> None:
    settings = {"layer_types": ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]}
    inner = tiny_huggingface("gemma3_text", num_hidden_layers=5, head_dim=16, **settings)
    twin = make_twin(inner, torch.device("cpu"), "sdpa")
    assert twin is not None
    windows = [block.self_attn.sliding_window for block in find_blocks(twin)]
    assert windows == [one.self_attn.sliding_window for one in find_blocks(inner)][:4]
    assert {weight.dtype for weight in twin.parameters()} == {torch.float32}


def test_a_twin_draws_nothing_from_the_generators() -> None:
    inner = tiny_huggingface("llama")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_twin(inner, torch.device("cpu"), "sdpa")
    assert torch.equal(torch.rand(3), expected)


class LeakyLayer(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
    """Each token gets a share of all tokens before it in the row."""

    def forward(self, hidden_states: Any, *args: Any, **given: Any) -> Any:
        before = hidden_states.cumsum(1) - hidden_states
        return super().forward(hidden_states + 0.002 * before, *args, **given)


class Leaky(transformers.LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        layers = range(config.num_hidden_layers)
        self.model.layers = torch.nn.ModuleList(LeakyLayer(config, n) for n in layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_leak_is_found_in_half_precision_too(dtype: torch.dtype) -> None:
    """In bfloat16 itself it would be less than rounding."""
    config = tiny_huggingface("llama").config
    sound, leaky = (
        HuggingFaceModel(kind(copy.deepcopy(config)).to(dtype))
        for kind in (transformers.LlamaForCausalLM, Leaky)
    )
    assert sound.packing(64).way == "our attention"
    assert leaky.packing(64).way != "our attention"
    assert "batch" in leaky.packing_way()


@pytest.mark.parametrize("kind", ALIKE)
def test_half_precision_gets_the_verdict_of_float32(kind: str) -> None:
    whole = HuggingFaceModel(make_small(kind))
    half = HuggingFaceModel(make_small(kind).bfloat16())
    assert half.trial_model is not half
    assert whole.trial_model is whole
    assert half.packing(64) == whole.packing(64)
    assert half.packing_way() == whole.packing_way()
    assert half.uses_our_attention == whole.uses_our_attention
    assert half.fit.shape == whole.fit.shape


def test_a_model_without_weights_is_tried_on_its_twin() -> None:
    config = tiny_huggingface("qwen3").config
    with torch.device("meta"):
        inner = transformers.AutoModelForCausalLM.from_config(config)
    model = HuggingFaceModel(inner)
    assert model.uses_our_attention
    assert model.packing(64).longest == 64
    assert model.vocab_size == config.vocab_size


# -- casts


class Products(TorchDispatchMode):
    """Dtypes of the matrix products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "_grouped_mm"):
            tensors = [one for one in args if isinstance(one, torch.Tensor)]
            self.dtypes += [one.dtype for one in tensors if one.is_floating_point()]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [*MODELS, *OURS])
def test_blocks_compute_in_bfloat16_from_float32_weights(name: str) -> None:
    exact, model = made(name), made(name)
    expected, wanted = gradients(exact)
    model.compute_in(torch.bfloat16)
    # Trials run in float32.
    model.tensors(row())
    with Products() as products:
        loss, found = gradients(model)
    assert loss == pytest.approx(expected, abs=0.03)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert {one.dtype for one in found.values()} == {torch.float32}
    # Of our experts, the router's product is in float32: three of two tensors a layer. Of
    # theirs, its softmax is. Recurrences are in float32, too.
    wide = len(products.dtypes) - products.dtypes.count(torch.bfloat16)
    routers = 2 if "experts" in name else 0
    if "hybrid" not in name and name != "mamba2":
        assert wide == routers * 6
    assert products.dtypes.count(torch.bfloat16) > wide
    large = max(wanted, key=lambda key: float(wanted[key].norm()))
    apart = (found[large] - wanted[large]).norm() / wanted[large].norm()
    assert 0 < apart < 0.1


def test_frozen_weights_next_to_lora_are_kept_narrow() -> None:
    from penstock.models.casting import freeze_in

    model = made("llama")
    frozen = [*model.parameters()][:-1]
    for weight in frozen:
        weight.requires_grad_(False)
    freeze_in(model.parameters(), torch.bfloat16)
    assert {weight.dtype for weight in frozen} == {torch.bfloat16}
    assert [*model.parameters()][-1].dtype == torch.float32


def test_trials_of_a_model_that_casts_are_in_float32() -> None:
    model = made("llama")
    model.compute_in(torch.bfloat16)
    assert model.packing(512).longest == 512
    assert model.tensors(row()).attention.dtype == torch.bfloat16


# -- checkpoints


@pytest.mark.parametrize(
    ("name", "selective", "dtype"),
    [
        *product([*MODELS, *OURS], [False, True], ["float32"]),
        *product(["llama", "qwen3_moe", "ours"], [False, True], ["bfloat16"]),
    ],
)
def test_gradients_are_equal_to_the_bit(name: str, selective: bool, dtype: str) -> None:
    plain, again = made(name), made(name)
    for model in (plain, again):
        if dtype != "float32":
            model.compute_in(getattr(torch, dtype))
    checkpoint_blocks(again.blocks, selective=selective)
    (expected, wanted), (loss, found) = gradients(plain), gradients(again)
    assert loss == expected
    assert found.keys() == wanted.keys()
    for key, one in wanted.items():
        assert torch.equal(found[key], one), key


def test_dropout_is_drawn_the_same_again() -> None:
    plain = HuggingFaceModel(make_small("gpt2", resid_pdrop=0.5).train())
    again = copy.deepcopy(plain)
    checkpoint_blocks(again.blocks, selective=False)
    torch.manual_seed(1)
    expected, wanted = gradients(plain)
    torch.manual_seed(1)
    loss, found = gradients(again)
    assert loss == expected
    assert all(torch.equal(found[key], one) for key, one in wanted.items())


def kept(model: Any) -> float:
    """Bytes kept for the backward pass: × width, a slot and layer; of two depths, to leave out the
    rest.
    """
    one, sizes = row(), {}
    slots = len(one.tokens)

    def pack(x: torch.Tensor) -> torch.Tensor:
        if slots in x.shape:
            sizes[x.untyped_storage().data_ptr()] = x, x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hidden = model(model.tensors(one))
    total = sum(size for _, size in sizes.values())
    assert hidden.requires_grad
    return total / slots


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(("kind", "most"), [("none", 100.0), ("full", 2.1), ("selective", 4.6)])
def test_checkpointed_blocks_keep_little(kind: str, most: float) -> None:
    """Compiled, because what selective checkpoints keep is invisible to hooks otherwise."""
    width, found = 64, []
    for layers in (2, 4):
        settings = ModelSettings(layers=layers, width=width, heads=4, vocab_size=300)
        model: Any = build_model(settings, vocab_size=300)
        model.compute_in(torch.bfloat16)
        if kind != "none":
            checkpoint_blocks(model.blocks, selective=kind == "selective")
        for block in model.blocks:
            block.compile(backend="aot_eager")
        torch._dynamo.reset()
        found.append(kept(model))
    each = (found[1] - found[0]) / 2 / width
    assert each <= most
    if kind == "none":
        assert each > 20


def test_nothing_runs_again_without_gradients() -> None:
    model = made("llama")
    calls: list[int] = []
    model.blocks[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpoint_blocks(model.blocks, selective=False)
    tensors = model.tensors(row())
    calls.clear()
    with torch.no_grad():
        model(tensors)
    assert calls == [1]
    gradients(model)
    assert calls == [1, 1, 1]
