"""Whether a model reads trees, said without its weights as with them."""

import json

import pytest

from makers.models import tiny_huggingface, tiny_model
from penstock.models import LoraSettings
from penstock.models.lora.lora import add_lora
from penstock.models.saving import Base, base_checksum, load_model, save_model
from penstock.models.tree_readers import reads_trees


@pytest.mark.parametrize(("kind", "expected"), [("qwen3", True), ("llama", True), ("mamba", False)])
def test_models_of_transformers(kind, expected, tmp_path):
    tiny_huggingface(kind).save_pretrained(tmp_path)
    assert load_model(tmp_path).requirements().trees is expected
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    assert reads_trees(tmp_path) is expected


def test_lora_is_as_its_base(tmp_path):
    model = tiny_model(61)
    save_model(model, tmp_path / "base")
    base = Base(folder="../base", checksum=base_checksum(model.state_dict()))
    add_lora(model, LoraSettings(rank=2))
    save_model(model, tmp_path / "lora", base=base)
    assert reads_trees(tmp_path / "lora") is True


def test_what_nobody_knows(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of_tomorrow"}))
    assert reads_trees(tmp_path) is None
