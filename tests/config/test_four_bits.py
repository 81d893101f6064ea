"""A base in 4 bits: its settings, what they do not go with, and what is said where bitsandbytes is
missing. That it trains is tested in `tests/integrations`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from makers.models import tiny_huggingface, tiny_model
from penstock.core.errors import ConfigError, FormatError, MissingExtraError
from penstock.learn.training.settings import TrainSettings
from penstock.models import LoraSettings, add_lora
from penstock.models.building import build_model
from penstock.models.four_bits import has_four_bits
from penstock.models.saving import load_model
from penstock.use.config.imports.conversion import import_axolotl

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CURE = r"bitsandbytes is not installed; .* pip install 'penstock\[qlora\]'"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without bitsandbytes."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)


def test_the_only_kind_is_nf4() -> None:
    assert LoraSettings().quantize is None
    assert LoraSettings(quantize="nf4").quantize == "nf4"
    for wrong in ("int8", "4bit", ""):
        with pytest.raises(ConfigError, match=r"lora\.quantize must be nf4"):
            LoraSettings(quantize=wrong)  # type: ignore[arg-type]
    assert LoraSettings.of({"rank": 4, "quantize": "nf4"}).quantize == "nf4"


def test_it_does_not_go_with_shard() -> None:
    lora = LoraSettings(quantize="nf4")
    assert TrainSettings(lora=lora).lora == lora
    for over in (True, 2):
        with pytest.raises(ConfigError, match=r"training\.shard and lora\.quantize do not go"):
            TrainSettings(lora=lora, shard=over)


@pytest.mark.usefixtures("without")
def test_without_the_package_a_model_stays_whole() -> None:
    pytest.importorskip("peft")
    model = tiny_model(61)
    with pytest.raises(MissingExtraError, match=CURE):
        add_lora(model, LoraSettings(quantize="nf4"))
    assert model.lora is None
    assert not has_four_bits(model)
    assert all(weight.requires_grad for weight in model.parameters())


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize(
    "load", [load_model, lambda path: build_model(f"hf:{path}", vocab_size=61)]
)
def test_without_the_package_a_folder_is_refused(load: Any, tmp_path: Path) -> None:
    tiny_huggingface().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": NF4}))
    with pytest.raises(MissingExtraError, match=CURE):
        load(tmp_path)
    # 8 bits are refused with or without it.
    eight = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    path.write_text(json.dumps({**config, "quantization_config": eight}))
    with pytest.raises(FormatError, match=r"quantised \(bitsandbytes\); take the float32"):
        load(tmp_path)


def test_other_runs_ask_for_no_package(without: None) -> None:
    pytest.importorskip("peft")
    model = tiny_model(61)
    add_lora(model, LoraSettings(rank=2))
    assert model.lora == LoraSettings(rank=2)
    assert torch.is_tensor(model.blocks[0].mlp.up.base_layer.weight)


AXOLOTL = {
    "base_model": "org/base",
    "datasets": [{"path": "chats.jsonl"}],
    "learning_rate": "2e-4",
    "lora_r": 16,
    "lora_target_linear": True,
}


@pytest.mark.parametrize(
    ("given", "lora"),
    [
        ({"adapter": "qlora", "load_in_4bit": True}, {"quantize": "nf4"}),
        ({"adapter": "lora"}, {}),
        ({"adapter": "lora", "load_in_4bit": False}, {}),
    ],
)
def test_configurations_of_axolotl(given: Any, lora: Any, tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yaml"
    path.write_text(yaml.safe_dump({**AXOLOTL, **given}))
    found = import_axolotl(path)
    written = yaml.safe_load(found.text("axolotl.yaml"))["training"]["lora"]
    assert written == {"rank": 16, "alpha": 8.0, **lora}
    fates = {note.key: note.fate for note in found.notes}
    assert fates["adapter"] == "mapped"
    if "load_in_4bit" in given:
        assert fates["load_in_4bit"] == ("mapped" if lora else "no effect")
