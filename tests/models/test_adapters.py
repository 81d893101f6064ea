"""LoRA as an adapter in peft's format: peft puts it onto the base, and the logits are those of the
trained model.
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

from makers.models import tiny_huggingface, tiny_model
from makers.rows import random_row
from penstock.core.errors import ConfigError, OutputError
from penstock.models import BlockSettings, LoraSettings, add_lora, export, export_adapter
from penstock.models.theirs.model import HuggingFaceModel

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft asks for it


def trained(model: Any, **settings: Any) -> Any:
    """The model with LoRA that changes its logits."""
    add_lora(model, LoraSettings(rank=4, alpha=12.0, **settings))
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data.normal_(std=0.2, generator=generator)
    return model


def with_peft(base: str | Path, folder: Path) -> Any:
    """transformers' model with the adapter."""
    inner = transformers.AutoModelForCausalLM.from_pretrained(base)
    return HuggingFaceModel(peft.PeftModel.from_pretrained(inner, folder).merge_and_unload().eval())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("targets", [(), ("query", "down")])
def test_our_model_comes_with_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: tuple[str, ...], tied: bool
) -> None:
    model, row = tiny(torch.float32, tied=tied), random_row()
    before = logits_of(model, row)
    after = logits_of(trained(model, targets=targets), row)
    assert (after - before).abs().max() > 0.1
    count = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert export_adapter(model, tmp_path / "out") == count
    assert torch.equal(logits_of(model, row), before), (
        "its base is written, so it has lost its LoRA"
    )

    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 12.0)
    assert config["base_model_name_or_path"] == "base", "no place, which may change"
    monkeypatch.chdir(tmp_path / "out")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "base")
    torch.testing.assert_close(logits_of(HuggingFaceModel(base), row), before, rtol=0, atol=1e-4)
    found = with_peft(config["base_model_name_or_path"], tmp_path / "out")
    torch.testing.assert_close(logits_of(found, row), after, rtol=0, atol=1e-4)
    auto = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {type(module).__name__ for module in auto.modules()} >= {
        "PeftModelForCausalLM",
        "LlamaForCausalLM",
    }


@pytest.mark.parametrize("targets", [(), ("q_proj", "up_proj"), ("0.self_attn.q_proj",)])
def test_a_model_of_transformers_goes_onto_the_folder_it_came_from(
    tmp_path: Path, targets: tuple[str, ...]
) -> None:
    inner = tiny_huggingface()
    inner.save_pretrained(tmp_path / "base")
    model, row = trained(HuggingFaceModel(inner), targets=targets), random_row()
    after = logits_of(model, row)
    export_adapter(model, tmp_path / "out", base=str(tmp_path / "base"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "export.json",
    ]  # fmt: skip
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "base", "the name of its folder, without the place"
    assert torch.equal(logits_of(model, row), after), "nothing of it changes"
    torch.testing.assert_close(
        logits_of(with_peft(tmp_path / "base", tmp_path / "out"), row), after, rtol=0, atol=1e-4
    )
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    everything = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    chosen = {(): everything, ("q_proj", "up_proj"): ["q_proj", "up_proj"]}
    assert sorted(config["target_modules"]) == chosen.get(
        targets, ["model.layers.0.self_attn.q_proj"]
    )


def test_an_earlier_export_is_replaced_if_asked_for(tmp_path: Path) -> None:
    model = trained(HuggingFaceModel(tiny_huggingface()))
    export_adapter(model, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"LoRA.*adapter.*export.*itself"):
        export_adapter(model, tmp_path / "other")
    again = trained(HuggingFaceModel(tiny_huggingface()))
    with pytest.raises(OutputError, match="holds an earlier export"):
        export_adapter(again, tmp_path / "out")
    export_adapter(again, tmp_path / "out", base="some/base", overwrite=True)
    assert not (tmp_path / "out" / "base" / "model.safetensors").exists()
    export(HuggingFaceModel(tiny_huggingface()), tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_matrices_that_the_export_lacks_are_refused(tmp_path: Path) -> None:
    model = trained(
        tiny_model(
            61,
            blocks={"a": BlockSettings(experts=4, experts_per_token=2)},
            pattern=("a",),
            tied=False,
        )
    )
    with pytest.raises(ConfigError, match=r"mlp\.experts.*LoRA"):
        export_adapter(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    some = trained(
        tiny_model(
            61,
            blocks={"a": BlockSettings(experts=4, experts_per_token=2)},
            pattern=("a",),
            tied=False,
        ),
        targets=("query", "value"),
    )
    row = random_row((12,), padding=0)
    after = logits_of(some, row)
    export_adapter(some, tmp_path / "out")
    torch.testing.assert_close(
        logits_of(with_peft(tmp_path / "out" / "base", tmp_path / "out"), row),
        after,
        rtol=0,
        atol=1e-4,
    )


def test_layouts_that_join_matrices_are_refused(tmp_path: Path) -> None:
    blocks = {"delta": BlockSettings(mixer="gated_delta"), "full": BlockSettings(qk_norm=True)}
    model = tiny(torch.float32, layers=2, blocks=blocks, pattern=("delta", "full"))
    with pytest.raises(ConfigError, match="joins and scales matrices"):
        export_adapter(trained(model, targets=("query", "output")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_and_its_base_in_another_dtype(tmp_path: Path) -> None:
    export_adapter(trained(tiny(torch.float32)), tmp_path, dtype="bfloat16")
    for name in ("adapter_model.safetensors", "base/model.safetensors"):
        assert {one.dtype for one in load_file(tmp_path / name).values()} == {torch.bfloat16}
    model = trained(tiny(torch.float32)).to(torch.bfloat16).float()
    row = random_row()
    inner = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32
    )
    with_adapter = peft.PeftModel.from_pretrained(inner, tmp_path).merge_and_unload().eval()
    torch.testing.assert_close(
        logits_of(HuggingFaceModel(with_adapter), row), logits_of(model, row), rtol=0, atol=1e-4
    )
