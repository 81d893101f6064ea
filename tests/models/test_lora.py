"""LoRA: changes nothing at first, trains alone, is saved, and is merged."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_makers import logits_of, tiny

from makers.models import tiny_huggingface
from makers.rows import random_row
from penstock.core.errors import ConfigError
from penstock.models import LoraSettings, add_lora, export, merge_lora, save_model
from penstock.models.lora.lora import remove_lora
from penstock.models.saving import load_model
from penstock.models.theirs.model import HuggingFaceModel


def ours() -> Any:
    return tiny(torch.float32, tied=False)


def theirs() -> Any:
    return HuggingFaceModel(tiny_huggingface())


def train(model: Any) -> None:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model.logits(model(model.tensors(random_row()))).logsumexp(-1).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("make", [ours, theirs])
def test_it_changes_nothing_trains_alone_and_is_merged(make: Any, tmp_path: Path) -> None:
    model, row = make(), random_row()
    before, first = (
        logits_of(model, row),
        {name: weight.clone() for name, weight in model.state_dict().items()},
    )
    add_lora(model, LoraSettings(rank=4))
    assert torch.equal(logits_of(model, row), before)
    train(model)
    trained = logits_of(model, row)
    assert (trained - before).abs().max() > 0.1
    for name, weight in model.state_dict().items():
        if ".lora_" not in name:
            assert torch.equal(weight, first[name.replace(".base_layer.", ".")]), "frozen"

    save_model(model, tmp_path / "saved")
    back = load_model(tmp_path / "saved")
    assert back.lora == LoraSettings(rank=4)
    assert torch.equal(logits_of(back, row), trained)

    with pytest.raises(ConfigError, match=r"merge_lora\(model\) first"):
        export(model, tmp_path / "exported")
    merge_lora(model)
    assert set(model.state_dict()) == set(first)
    torch.testing.assert_close(logits_of(model, row), trained, rtol=0, atol=1e-4)
    export(model, tmp_path / "exported")
    inner = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    torch.testing.assert_close(logits_of(HuggingFaceModel(inner), row), trained, rtol=0, atol=1e-4)


def test_targets_are_chosen_by_name() -> None:
    model = ours()
    add_lora(model, LoraSettings(targets=("query", "value")))
    assert {name.split(".")[3] for name, w in model.named_parameters() if w.requires_grad} == {
        "query",
        "value",
    }
    with pytest.raises(ConfigError, match="already has LoRA"):
        add_lora(model, LoraSettings())
    known = "known: down, gate, key, output, query, up, value"
    with pytest.raises(ConfigError, match=known):
        add_lora(ours(), LoraSettings(targets=("q_proj",)))
    with pytest.raises(ConfigError, match="rank must be 1 to 65,536"):
        LoraSettings(rank=0)


def test_first_weights_are_a_function_of_the_seed() -> None:
    made = [ours() for _ in range(3)]
    for model, seed in zip(made, (1, 1, 2), strict=True):
        torch.rand(seed)
        add_lora(model, LoraSettings(), seed=seed)
    first, same, other = ([w for w in model.parameters() if w.requires_grad] for model in made)
    assert all(map(torch.equal, first, same))
    assert not all(map(torch.equal, first, other))


@pytest.mark.parametrize("make", [ours, theirs])
def test_it_is_taken_out_and_put_in_again(make: Any) -> None:
    model, row = make(), random_row()
    before, names = logits_of(model, row), set(model.state_dict())
    for _ in range(2):
        add_lora(model, LoraSettings(rank=4))
        train(model)
        assert (logits_of(model, row) - before).abs().max() > 0.1
        remove_lora(model)
        assert set(model.state_dict()) == names
        assert torch.equal(logits_of(model, row), before)
        assert model.lora is None
        assert all(weight.requires_grad for weight in model.parameters())
