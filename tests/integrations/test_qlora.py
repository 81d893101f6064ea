"""LoRA next to frozen matrices in 4 bits, against bitsandbytes under peft and transformers, and
against the same matrices dequantised.
"""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import LENGTH, VOCABULARY, make_loader, make_model
from torch import nn

import penstock as ps
from makers.forked import fork
from makers.models import tiny_huggingface, tiny_model
from penstock.core.errors import ConfigError
from penstock.learn.training.memory import held_bytes
from penstock.learn.training.settings import TrainSettings
from penstock.learn.training.utilisation import Operations
from penstock.models import LoraSettings, add_lora, export_adapter, merge_lora, save_model
from penstock.models.four_bits import (
    FourBitLinear,
    four_bit_layers,
    four_bits_in_words,
    has_four_bits,
    num_weights,
    quantise,
)
from penstock.models.lora.lora import remove_lora
from penstock.models.saving import base_checksum, load_model
from penstock.models.settings import BlockSettings
from penstock.models.theirs.model import HuggingFaceModel

bnb = pytest.importorskip(
    "bitsandbytes", reason="bitsandbytes is not installed: make test-integrations"
)
pytest.importorskip("peft", reason="peft is not installed: pip install 'penstock[lora]'")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    # Dynamo's own.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning"),
]
LORA = LoraSettings(rank=4, quantize="nf4")
# Of some hundred scales each, so that the second quantisation has full blocks, too.
WIDE = {"hidden_size": 128, "intermediate_size": 192}


def theirs(kind: str = "llama", **more: Any) -> Any:
    return HuggingFaceModel(make_model(kind, **{**WIDE, **more}))


def ours(vocab_size: int = VOCABULARY, **more: Any) -> Any:
    return tiny_model(vocab_size, width=128, **more)


def make_row(seed: int = 0) -> Any:
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, LENGTH)
    return torch.from_numpy(tokens)


def stirred(model: Any) -> Any:
    """Neither half of LoRA is zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn_like(weight) * 0.1)
    return model


def loss_of(model: Any) -> torch.Tensor:
    tokens = make_row()
    if isinstance(model, HuggingFaceModel):
        logits = model.logits(model.document(tokens))[0]
    else:
        logits = model(tokens[None], use_cache=False).logits[0]
    return nn.functional.cross_entropy(logits[:-1].float(), tokens[1:])


def gradients(model: Any) -> dict[str, torch.Tensor]:
    loss_of(model).backward()
    found = {
        name.split("layers.")[1]: weight.grad
        for name, weight in model.named_parameters()
        if "lora_" in name
    }
    assert all(one is not None for one in found.values())
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_it_equals_peft_on_bitsandbytes(kind: str, tmp_path: Path) -> None:
    """The folder of its base is read by transformers, with the same bytes; then everything is."""
    import peft
    import transformers

    model = theirs(kind, **({"head_dim": 32} if kind != "llama" else {}))
    add_lora(model, LORA)
    save_model(model, tmp_path, with_lora=False)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    layers = [one for one in peer.modules() if isinstance(one, bnb.nn.Linear4bit)]
    assert len(layers) == len(list(four_bit_layers(model))) == 14
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")
    peer = stirred(peft.get_peft_model(peer, config).train())
    stirred(model)
    # Gemma's windows are another kernel of torch's in transformers.
    far = 1e-5 if kind == "gemma3_text" else 0
    torch.testing.assert_close(loss_of(model), loss_of(peer), rtol=far, atol=far)
    mine, other = gradients(model), gradients(peer)
    assert mine.keys() == other.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, other[name], rtol=far, atol=far)


@pytest.mark.parametrize("make", [theirs, ours])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_equals_the_matrices_dequantised(make: Any, dtype: torch.dtype) -> None:
    packed, plain = (stirred(with_lora(make(), LORA)) for _ in range(2))
    for layer in list(plain.modules()):
        base = getattr(layer, "base_layer", None)
        if isinstance(base, FourBitLinear):
            layer.base_layer = base.plain(torch.float32)
    assert has_four_bits(packed)
    assert not has_four_bits(plain)
    from penstock.learn.training.computing import set_precision

    rows = next(iter(loader_of(make)))
    found = []
    for model in (packed, plain):
        set_precision(model, dtype, sharded=False)
        hidden = model(model.tensors(rows[0]))
        assert hidden.dtype == dtype
        model.logits(hidden).logsumexp(-1).sum().backward()
        found.append({n: w.grad for n, w in model.named_parameters() if w.requires_grad})
    # Dequantised straight to what is multiplied.
    assert {layer.state.dtype for _, layer in four_bit_layers(packed)} == {dtype}
    far = 1e-5 if dtype == torch.float32 else 0.05
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=far, atol=far)


_LOADERS: dict[str, Any] = {}


def loader_of(make: Any) -> Any:
    folder = _LOADERS["folder"]
    return make_loader(folder)


@pytest.fixture(autouse=True)
def _data(counting: Path) -> None:
    _LOADERS["folder"] = counting


def with_lora(model: Any, settings: LoraSettings) -> Any:
    add_lora(model, settings)
    return model


def test_bytes_words_and_counts() -> None:
    plain, model = ours(), with_lora(ours(), LORA)
    whole = sum(weight.numel() for weight in plain.parameters())
    lora = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    layers = [layer for _, layer in four_bit_layers(model)]
    packed = sum(layer.in_features * layer.out_features for layer in layers)
    held = sum(layer.packed.numel() + layer.state.absmax.numel() for layer in layers)
    # Half a byte each, and a byte for 64; tables and scales of scales are left out here.
    assert held == packed * (0.5 + 1 / 64)
    assert num_weights(model) == whole + lora
    assert f"14 matrices in 4 bits (nf4): {packed:,} weights" in four_bits_in_words(model)
    largest = max(layer.in_features * layer.out_features for layer in layers)
    tables = sum(layer.held_bytes for layer in layers) + 4 * largest
    others = 4 * (whole - packed) + 16 * lora
    assert held_bytes(model, TrainSettings(lora=LORA), 1) == tables + others
    # The matrices take part in the mathematics as before, and are frozen.
    frozen = with_lora(ours(), LoraSettings(rank=4))
    assert Operations(model).each_token == Operations(frozen).each_token


def test_what_is_left_as_it_is() -> None:
    model = ours(blocks={"a": BlockSettings(experts=4)}, pattern=("a",))
    add_lora(model, LoraSettings(rank=2, quantize="nf4", modules_to_save=("1.attention.key",)))
    names = {name for name, _ in four_bit_layers(model)}
    assert not any("router" in name or "embedding" in name for name in names)
    assert "blocks.0.mlp.experts.3.up.base_layer" in names
    assert not any(name.startswith("blocks.1.attention.key") for name in names)
    moe = theirs(
        "qwen2_moe", num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32
    )
    quantise(moe)
    kept = {n.rsplit(".", 1)[-1] for n, m in moe.named_modules() if type(m) is nn.Linear}
    assert kept == {"lm_head", "shared_expert_gate"}


@pytest.mark.parametrize("make", [theirs, ours])
def test_saved_read_merged_and_taken_out(make: Any, tmp_path: Path) -> None:
    model, tokens = stirred(with_lora(make(), LORA)), make_row()

    def logits(one: Any) -> torch.Tensor:
        rows = next(iter(loader_of(make)))
        with torch.no_grad():
            found: torch.Tensor = one.logits(one(one.tensors(rows[0])))
        return found

    before = logits(model)
    save_model(model, tmp_path / "saved")
    back = load_model(tmp_path / "saved")
    assert back.lora == LORA
    assert torch.equal(logits(back), before)
    assert base_checksum(back.state_dict()) == base_checksum(model.state_dict())
    assert back.load_state_dict(model.state_dict()).missing_keys == []
    half = load_model(tmp_path / "saved", dtype=torch.bfloat16)
    assert torch.corrcoef(torch.stack([logits(half).flatten(), before.flatten()]))[0, 1] > 0.99

    name, layer = next(iter(four_bit_layers(back)))
    parent = back.get_submodule(name.removesuffix(".base_layer"))
    a, b = parent.lora_A["default"].weight, parent.lora_B["default"].weight
    expected = bnb.functional.dequantize_4bit(layer.packed, layer.state) + 4 * b @ a
    merge_lora(back)
    merged = back.get_submodule(name.removesuffix(".base_layer")).weight
    assert torch.allclose(merged, expected, atol=1e-6)
    assert not has_four_bits(back)
    torch.testing.assert_close(logits(back), before, rtol=1e-4, atol=1e-4)
    remove_lora(model)
    assert all(weight.requires_grad for weight in model.parameters())
    assert len(tokens) == LENGTH


def test_bytes_depend_on_the_weights_alone() -> None:
    """Not on how many threads sum the scales, which is seen where there are many of them."""
    torch.manual_seed(0)
    matrices = [torch.randn(2048, 2048) for _ in range(3)]
    found = []
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in matrices)
            for layer, matrix in zip(layers, matrices, strict=True):
                layer.weight.data = matrix.clone()
            model = nn.Module()
            model.blocks = nn.ModuleList([nn.Sequential(*layers)])
            quantise(model)
            found.append(base_checksum(model.state_dict()))
        finally:
            torch.set_num_threads(before)
    assert found[0] == found[1]


def test_trials_run_on_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    model = theirs()
    assert model.trial_model is model
    add_lora(model, LORA)
    assert model.trial_model is not model
    assert not has_four_bits(model.trial_model)
    assert model.packing(LENGTH).longest == LENGTH


def test_a_pass_keeps_no_dequantised_matrix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = with_lora(theirs(), LORA)
    rows = next(iter(loader_of(theirs)))
    asked = []
    monkeypatch.setattr(FourBitLinear, "weight", property(lambda self: asked.append(self)))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        model(model.tensors(rows[0])).sum().backward()
    assert not asked
    shapes = {
        shape
        for _, layer in four_bit_layers(model)
        for shape in (
            (layer.out_features, layer.in_features),
            (layer.in_features, layer.out_features),
        )
    }
    assert not [one.shape for one in kept if tuple(one.shape) in shapes]


def test_compiled_without_breaks() -> None:
    """One graph with the blocks' matrices, forward and backward."""
    torch._dynamo.reset()
    layer = next(layer for _, layer in four_bit_layers(with_lora(theirs(), LORA)))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, y = (torch.randn(5, layer.in_features, requires_grad=True) for _ in range(2))
    y.data = x.data
    found, expected = compiled(x), layer(y)
    assert torch.equal(found, expected)
    found.sum().backward()
    expected.sum().backward()
    assert torch.equal(x.grad, y.grad)


SETTINGS: dict[str, Any] = {
    "steps": 6,
    "threads": 1,
    "learning_rate": 0.01,
    "warmup_steps": 1,
    "checkpoints": {"every": 2, "keep": 2},
    "progress": False,
    "device": "cpu",
    "lora": {"rank": 4, "quantize": "nf4"},
}


IDS = 300


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts with a tokenizer of their own; read only."""
    place = tmp_path_factory.mktemp("prepared")
    texts = [f"wheel {number} turns the mill {number % 7} and flows" for number in range(200)]
    (place / "texts.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    ps.train_tokenizer(texts, vocab_size=IDS, output=place / "tokenizer", progress=False)
    ps.prepare(
        place / "texts.jsonl",
        tokenizer=place / "tokenizer",
        output=place / "data",
        processes=1,
        progress=False,
    )
    return place / "data"


def folder_of(place: Path) -> str:
    tiny_huggingface("llama", std=0.1, **WIDE, vocab_size=IDS).save_pretrained(place)
    return f"hf:{place}"


def train(folder: Path, data: Path, model: Any, **more: Any) -> Any:
    return ps.train(model, make_loader(data), output=folder, **{**SETTINGS, **more})


def losses(run: Any) -> list[float]:
    return [record["loss"] for record in run.metrics]


class Kill:
    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, model: Any, step: Any, record: Any) -> None:
        if record["step"] == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(folder: Path, data: Path, model: str, more: Any) -> None:
    train(folder, data, model, **more, on_step=Kill(5))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"precision": "bfloat16", "activation_checkpointing": "full"},
        {"precision": "bfloat16", "activation_checkpointing": "selective"},
    ],
    ids=["float32", "bfloat16 full", "bfloat16 selective"],
)
def test_a_killed_run_goes_on_to_the_bit(prepared: Path, tmp_path: Path, more: Any) -> None:
    model = folder_of(tmp_path / "model")
    whole = train(tmp_path / "whole", prepared, model, **more)
    assert losses(whole)[-1] < losses(whole)[0]
    child = fork(killed, tmp_path / "killed", prepared, model, more)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    run = ps.open_run(tmp_path / "killed").resume(progress=False, on_step=Kill(99))
    assert losses(run) == losses(whole)
    newest = tmp_path / "killed/checkpoints/step-00000006/model"
    assert sorted(path.name for path in newest.iterdir()) == ["lora.safetensors", "model.json"]
    first, second = (lora_of(one) for one in (run, whole))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_base_is_quantised_as_it_is_stored(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 and on the CPU; then the rest is widened."""
    from penstock.models.lora import lora

    seen = []

    def watched(model: Any, kept: Any) -> None:
        seen.extend((one.dtype, one.device.type) for one in model.parameters())
        quantise(model, kept)

    monkeypatch.setattr(lora, "quantise", watched)
    made = tiny_huggingface("llama", std=0.1, **WIDE, vocab_size=IDS).bfloat16()
    made.save_pretrained(tmp_path / "model")
    run = train(tmp_path / "run", prepared, f"hf:{tmp_path / 'model'}", steps=1)
    assert set(seen) == {(torch.bfloat16, "cpu")}
    kept = {weight.dtype for weight in ps.load_model(run.path).parameters()}
    assert kept == {torch.float32}


def lora_of(run: Any) -> dict[str, torch.Tensor]:
    model = ps.load_model(run.path)
    return {name: weight for name, weight in model.named_parameters() if "lora_" in name}


def test_checkpointing_gives_the_same_bits(prepared: Path, tmp_path: Path) -> None:
    model = folder_of(tmp_path / "model")
    runs = [
        train(tmp_path / kind, prepared, model, steps=2, activation_checkpointing=kind)
        for kind in ("none", "full")
    ]
    assert losses(runs[0]) == losses(runs[1])


def test_the_base_of_a_run_and_its_export(prepared: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", prepared, folder_of(tmp_path / "model"), steps=2)
    config = json.loads((run.path / "base/config.json").read_text())
    assert config["quantization_config"]["bnb_4bit_quant_type"] == "nf4"
    assert config["quantization_config"]["llm_int8_skip_modules"] == ["lm_head"]
    trained = ps.load_model(run.path)
    assert has_four_bits(trained)
    merged = run.export(tmp_path / "merged")
    assert any("dequantised" in notice for notice in merged.notices)
    import transformers

    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert not hasattr(peer.config, "quantization_config")
    with torch.no_grad():
        torch.testing.assert_close(loss_of(peer), loss_of(trained), rtol=1e-5, atol=1e-5)


def test_adapters_fit_the_base_that_is_written(tmp_path: Path) -> None:
    import peft
    import transformers

    model = stirred(with_lora(theirs(), LORA))
    with torch.no_grad():
        before = loss_of(model)
    export_adapter(model, tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter/base")
    peer = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(peer), before, rtol=1e-5, atol=1e-5)


def test_a_folder_in_4_bits_is_a_base(prepared: Path, tmp_path: Path) -> None:
    """As transformers writes it, without double quantisation, too; and only next to LoRA."""
    import transformers

    folder_of(tmp_path / "model")
    for double in (True, False):
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double
        )
        made = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", quantization_config=config, device_map={"": "cpu"}
        )
        folder = tmp_path / f"packed-{double}"
        made.save_pretrained(folder)
        shutil.copytree(prepared.parent / "tokenizer", folder, dirs_exist_ok=True)
        for place in (f"hf:{folder}", f"from:{folder}"):
            name = place.partition(":")[0]
            run = train(tmp_path / f"{name}-{double}", prepared, place, steps=2, lora={"rank": 4})
            assert has_four_bits(ps.load_model(run.path))
        with torch.no_grad():
            mine = loss_of(load_model(folder))
            assert torch.equal(mine, loss_of(made.train()))
    with pytest.raises(ConfigError, match=r"in 4 bits, which cannot be trained; train LoRA"):
        train(tmp_path / "full", prepared, f"hf:{folder}", lora=None)
    with pytest.raises(ConfigError, match=r"training\.shard: .*4 bits.*leave shard out"):
        train(tmp_path / "sharded", prepared, f"hf:{folder}", lora={"rank": 4}, shard=True)


def test_our_own_model_and_a_run_that_goes_on_from_one(prepared: Path, tmp_path: Path) -> None:
    first = train(tmp_path / "first", prepared, ours(vocab_size=IDS), steps=1, lora=None)
    second = train(tmp_path / "second", prepared, f"from:{first.path}")
    assert losses(second)[-1] < losses(second)[0]
    loaded = ps.load_model(second.path)
    assert (has_four_bits(loaded), type(loaded)) == (True, type(ours(vocab_size=IDS)))
    third = train(tmp_path / "third", prepared, f"from:{second.path}", steps=1)
    # Merged, and quantised again: it begins where the other one ended, on the same rows.
    assert losses(third)[0] < losses(second)[0] - 0.2


def test_texts_are_written_through_the_cache_as_in_one_pass(tmp_path: Path) -> None:
    model = stirred(with_lora(theirs(), LORA)).eval()
    tokens = make_row()
    with torch.no_grad():
        whole = model.logits(model.document(tokens))[0]
        cache = model.new_cache(1, LENGTH)
        steps = [
            model.extend(part[None], torch.tensor([len(part)]), cache)[0]
            for part in (tokens[:20], *tokens[20:].split(1))
        ]
    torch.testing.assert_close(torch.stack(steps), whole[19:], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [theirs, ours])
def test_blocks_compile_to_few_graphs_without_breaks(make: Any) -> None:
    """As many as with LoRA alone, whatever the number of layers; with the same gradients."""
    more = {"num_hidden_layers": 10} if make is theirs else {"layers": 10}
    counts, gradients = [], []
    rows = next(iter(loader_of(make)))
    for settings in (LoraSettings(rank=4), LORA):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = stirred(with_lora(make(**more), settings))
        assert model.packing(LENGTH).reason is None
        graphs: list[Any] = []

        def counted(graph: Any, inputs: Any, kept: list[Any] = graphs) -> Any:
            kept.append(graph)
            return graph

        for compiled in (False, True):
            if compiled:
                for block in model.blocks:
                    block.compile(backend=counted)
            with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
                for row in rows:
                    model.logits(model(model.tensors(row))).logsumexp(-1).sum().backward()
            if settings is LORA:
                gradients.append({n: w.grad for n, w in model.named_parameters() if "lora_" in n})
            model.zero_grad()
        assert not torch._dynamo.utils.counters["graph_break"]
        counts.append(len(graphs))
    torch._dynamo.reset()
    assert counts[1] <= counts[0] + 1
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [theirs, ours])
def test_a_copy_is_a_reference_of_its_own(make: Any) -> None:
    from penstock.learn.training.reference_model import Reference

    model = stirred(with_lora(make(), LORA))
    first = Reference("initial", model, torch.device("cpu"))
    assert first.parameters == num_weights(model)
    name, layer = next(iter(four_bit_layers(model)))
    assert first.frozen is not None
    copied = first.frozen.get_submodule(name)  # type: ignore[attr-defined]
    assert torch.equal(copied.weight, layer.weight)
    before = first.fingerprint()
    copied.packed[0] += 1
    assert first.fingerprint() != before
    assert not torch.equal(copied.weight, layer.weight)


def test_parts_of_rows_give_the_same_losses(prepared: Path, tmp_path: Path) -> None:
    model = folder_of(tmp_path / "model")
    runs = [
        train(tmp_path / str(parts), prepared, model, steps=2, micro_sequences=parts)
        for parts in (1, 2)
    ]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-5)


def test_other_numbers_are_said_on_a_resume(prepared: Path, tmp_path: Path) -> None:
    """The version that dequantises is one of the settings that change bits."""
    run = train(tmp_path / "run", prepared, folder_of(tmp_path / "model"), steps=2)
    state = json.loads((run.path / "checkpoints/step-00000002/state.json").read_text())
    assert json.dumps(state).count(f"torch.float32, bitsandbytes {bnb.__version__}") == 1
