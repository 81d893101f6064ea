"""LoRA with all its settings, and what is trained next to it: peft reads the same model, and
nothing else moves.
"""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from model_makers import logits_of, tiny
from safetensors.torch import load_file

from makers.models import tiny_huggingface
from makers.rows import random_row
from penstock.core.errors import ConfigError
from penstock.learn.training.optimizer_settings import OptimizerSettings
from penstock.learn.training.optimizers import Optimizers
from penstock.models import LoraSettings, add_lora, export_adapter, merge_lora, save_model
from penstock.models.lora.lora import lora_switched_off, lora_weights, remove_lora, settle_parts
from penstock.models.lora.settings import NewRows
from penstock.models.lora.trained_parts import trained_parts
from penstock.models.saving import base_checksum, load_model
from penstock.models.theirs.model import HuggingFaceModel

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
    ),  # peft asks for it
    # peft looks on the hub for the size of a base's vocabulary, whatever the base is called.
    pytest.mark.filterwarnings("ignore:Unable to fetch remote file:UserWarning"),
    pytest.mark.filterwarnings("ignore:Could not find a config file in base:UserWarning"),
]


def gpt(kind: str) -> Any:
    """GPT-2 has Conv1D and a tied output, GPT-J an output with a bias."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
    more = {"rotary_dim": 8} if kind == "gptj" else {}
    config = transformers.AutoConfig.for_model(
        kind, **sizes, **more, bos_token_id=1, eos_token_id=2
    )
    return HuggingFaceModel(transformers.AutoModelForCausalLM.from_config(config).eval()).eval()


MODELS = {
    "ours, tied": lambda: tiny(torch.float32, tied=True),
    "ours": lambda: tiny(torch.float32, tied=False),
    "llama": lambda: HuggingFaceModel(tiny_huggingface()).eval(),
    "llama, tied": lambda: HuggingFaceModel(tiny_huggingface(tie_word_embeddings=True)).eval(),
    "gemma": lambda: HuggingFaceModel(tiny_huggingface("gemma3_text", head_dim=16)).eval(),
    "gpt2": lambda: gpt("gpt2"),
    "gptj": lambda: gpt("gptj"),
}


def grown(make: Any, by: int = 3) -> Any:
    model = make()
    first = model.grow_vocabulary(model.vocab_size + by)
    model.new_rows = NewRows(first=first, end=first + by, grown=True)
    return model


def tune(model: Any, **settings: Any) -> Any:
    add_lora(model, LoraSettings(rank=4, alpha=12.0, **settings))
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data.normal_(std=0.2, generator=generator)
    return model


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"rslora": True, "dropout": 0.3},
    "new": {"train_embeddings": "new"},
    "all": {"train_embeddings": "all"},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_peft_reads_the_same_model(name: str, settings: str, tmp_path: Path) -> None:
    model, row = grown(MODELS[name]), random_row()
    model.eval()
    before, checksum = logits_of(model, row), base_checksum(model.state_dict())
    tune(model, **SETTINGS[settings])
    assert base_checksum(model.state_dict()) == checksum, "its base stays what it was"
    after = logits_of(model, row)
    assert (after - before).abs().max() > 0.1
    with lora_switched_off(model):
        assert torch.equal(logits_of(model, row), before)

    save_model(model, tmp_path / "saved")
    assert torch.equal(logits_of(load_model(tmp_path / "saved").eval(), row), after)
    export_adapter(model, tmp_path / "out")
    assert torch.equal(logits_of(model, row), before), "it has lost LoRA and the parts"

    inner = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "base")
    with_adapter = peft.PeftModel.from_pretrained(inner, tmp_path / "out")
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert written.keys() == peft.get_peft_model_state_dict(with_adapter).keys()
    found = HuggingFaceModel(with_adapter.merge_and_unload().eval())
    torch.testing.assert_close(logits_of(found, row), after, rtol=0, atol=1e-4)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["use_rslora"], config["lora_dropout"]) == (
        settings == "rslora",
        0.3 if settings == "rslora" else 0,
    )
    if settings == "new":
        count = sum(weight.numel() for weight in written.values())
        whole = model.vocab_size * 32 if name == "gptj" else 0
        assert count < 32 * 4 * 200 + whole, (
            "no matrix of the embedding's size, where peft can do without"
        )


@pytest.mark.parametrize("name", ["ours", "llama"])
def test_patterns_and_whole_modules(name: str, tmp_path: Path) -> None:
    ends = {
        "ours": ("query", "key", "0.mlp.down"),
        "llama": ("q_proj", "k_proj", "0.mlp.down_proj"),
    }[name]
    model, row = MODELS[name](), random_row()
    model.eval()
    patterns: Any = {"rank_pattern": {ends[0]: 2, ends[2]: 3}, "alpha_pattern": {ends[1]: 1.0}}
    tune(model, **patterns, modules_to_save=("norm",))
    ranks = {
        weight.shape[0]
        for n, weight in lora_weights(model.state_dict()).items()
        if f"{ends[0]}.lora_A" in n
    }
    assert ranks == {2}
    after = logits_of(model, row)
    export_adapter(model, tmp_path / "out")
    inner = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "base")
    found = HuggingFaceModel(
        peft.PeftModel.from_pretrained(inner, tmp_path / "out").merge_and_unload().eval()
    )
    torch.testing.assert_close(logits_of(found, row), after, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_old_rows_move_neither_by_gradients_nor_by_decay(name: str) -> None:
    model, row = grown(MODELS[name]), random_row()
    model.eval()
    add_lora(model, LoraSettings(rank=2, train_embeddings="new"))
    start = {n: value.clone() for n, value in model.state_dict().items()}
    settings = OptimizerSettings(learning_rate=0.1, weight_decay=1.0, decay_embeddings=True)
    optimizers = Optimizers(model, settings)
    for _ in range(3):
        model.logits(model(model.tensors(row))).square().mean().backward()
        optimizers.step(0.1)
    for n, value in model.state_dict().items():
        assert torch.equal(value, start[n]) == (".lora_" not in n and not n.endswith(".trained")), n
    weight = (
        model.get_input_embeddings().weight if hasattr(model, "inner") else model.embedding.weight
    )
    assert len(weight) == model.vocab_size == model.new_rows.end
    # Without decay of embeddings, rows without a gradient stay where they are.
    groups = Optimizers(model, OptimizerSettings()).members[0].param_groups
    rows = {id(part.trained) for _, _, part in trained_parts(model)}
    assert rows <= {
        id(p) for group in groups if group["weight_decay"] == 0 for p in group["params"]
    }


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("name", ["ours, tied", "llama, tied", "gptj"])
def test_parts_are_settled_exactly_or_taken_out(name: str, kept: bool) -> None:
    model, row = grown(MODELS[name]), random_row()
    model.eval()
    names, before = set(model.state_dict()), logits_of(model, row)
    tune(model, train_embeddings="new")
    after = logits_of(model, row)
    if kept:
        settle_parts(model)
        assert torch.equal(logits_of(model, row), after)
        merge_lora(model)
        torch.testing.assert_close(logits_of(model, row), after, rtol=0, atol=1e-4)
    else:
        remove_lora(model)
        assert torch.equal(logits_of(model, row), before)
    assert set(model.state_dict()) == names
    if name == "llama, tied":
        assert model.inner.lm_head.weight is model.inner.model.embed_tokens.weight, (
            "still one matrix"
        )


@pytest.mark.parametrize("name", MODELS)
def test_a_vocabulary_grows_by_the_mean(name: str) -> None:
    model = MODELS[name]().eval()
    row, old = random_row(), model.vocab_size
    before = logits_of(model, row)
    assert model.grow_vocabulary(old + 2) == old
    after = logits_of(model, row)
    torch.testing.assert_close(after[..., :old], before)
    # The mean of rows gives the mean of logits, with the bias too.
    mean = before[..., :old].mean(-1, keepdim=True).expand(*before.shape[:-1], 2)
    torch.testing.assert_close(after[..., old:], mean, rtol=1e-3, atol=1e-4)
    settings = model.config.get_text_config() if hasattr(model, "inner") else model.settings
    assert settings.vocab_size == model.vocab_size == old + 2
    table = model.get_input_embeddings() if hasattr(model, "inner") else model.embedding
    torch.testing.assert_close(
        table.weight[old:], table.weight[:old].mean(0, keepdim=True).expand(2, -1)
    )


def test_dropout_is_of_training_alone() -> None:
    model, row = MODELS["ours"]().eval(), random_row()
    tune(model, dropout=0.5)
    assert torch.equal(logits_of(model, row), logits_of(model, row))
    model.train()
    assert not torch.equal(logits_of(model, row), logits_of(model, row))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank_pattern": {"nowhere": 2}}, "rank_pattern: 'nowhere' fits no matrix with LoRA"),
        ({"alpha_pattern": {"norm": 2.0}}, "alpha_pattern: 'norm' fits no matrix with LoRA"),
        (
            {"modules_to_save": ("nowhere",)},
            "modules_to_save: 'nowhere' is the end of no module's name; known: .*norm",
        ),
        (
            {"modules_to_save": ("down",), "targets": ("down",)},
            "down is in targets and in modules_to_save",
        ),
        (
            {"train_embeddings": "new"},
            "train_embeddings: new, but the tokenizer of the data has no entries",
        ),
    ],
)
def test_what_fits_nothing_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        add_lora(MODELS["ours"](), LoraSettings(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dropout": 1.0}, "dropout must be from 0 to below 1"),
        ({"train_embeddings": "some"}, "train_embeddings must be all or new"),
        ({"rank_pattern": {"a": 0}}, "rank_pattern: 'a' has 0"),
        ({"alpha_pattern": {"a": 0.0}}, "alpha_pattern: 'a' has 0"),
        ({"rank_pattern": {"(": 2}}, "no regular expression"),
        ({"modules_to_save": ("",)}, "is empty"),
    ],
)
def test_settings_out_of_range_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraSettings(**settings)


def test_a_new_row_is_trained_whole_or_in_part_not_both() -> None:
    with pytest.raises(ConfigError, match=r"modules_to_save.*train_embeddings"):
        add_lora(
            grown(MODELS["ours"]),
            LoraSettings(modules_to_save=("embedding",), train_embeddings="new"),
        )
