"""An export with a dtype: the weights are those of the export without one, rounded once; the rest
of the folder is the same.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_makers import logits_of, tiny
from safetensors import safe_open
from safetensors.torch import load_file

from makers.models import tiny_huggingface
from makers.rows import random_row
from penstock.core.errors import ConfigError
from penstock.models import BlockSettings, export
from penstock.models.saving import load_model
from penstock.models.stored_dtype import cast_weights, with_dtype
from penstock.models.theirs.model import HuggingFaceModel

HALVES = ("bfloat16", "float16")
MODELS: dict[str, Any] = {
    "ours": lambda: tiny(torch.float32, tied=False),
    "ours, tied": lambda: tiny(torch.float32, tied=True),
    "ours, recurrent": lambda: tiny(
        torch.float32,
        blocks={"a": BlockSettings(mixer="gated_delta"), "b": BlockSettings(qk_norm=True)},
        pattern=("a", "b"),
    ),
    "llama": lambda: HuggingFaceModel(tiny_huggingface()),
    "llama, tied": lambda: HuggingFaceModel(tiny_huggingface(tie_word_embeddings=True, std=0.4)),
    "gemma3_text": lambda: HuggingFaceModel(tiny_huggingface("gemma3_text", head_dim=8)),
    "deepseek_v3": lambda: HuggingFaceModel(
        tiny_huggingface(
            "deepseek_v3", num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2,
            n_group=1, topk_group=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4,
            qk_nope_head_dim=4, v_head_dim=8, moe_intermediate_size=16, first_k_dense_replace=1,
        )
    ),
}  # fmt: skip


def read(folder: Path, **given: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa", **given
    ).eval()


def greedy(model: Any) -> list[int]:
    found = model.generate(
        torch.arange(1, 6)[None], max_new_tokens=16, do_sample=False, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    return list(found[0, 5:].tolist())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", MODELS)
def test_weights_are_those_that_transformers_rounds_itself(
    tmp_path: Path, kind: str, dtype: Any
) -> None:
    """Also where it keeps some in float32, as the bias of DeepSeek's routers."""
    model = MODELS[kind]()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    export(model, tmp_path / "whole")
    export(model, tmp_path / "half", dtype=dtype)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    half = read(tmp_path / "half")
    rounded = read(tmp_path / "whole", dtype=getattr(torch, dtype))
    assert half.dtype == rounded.dtype == getattr(torch, dtype)
    theirs = rounded.state_dict()
    assert half.state_dict().keys() == theirs.keys()
    for name, weight in half.state_dict().items():
        assert weight.dtype == theirs[name].dtype, name
        assert torch.equal(weight, theirs[name]), name
    assert greedy(half) == greedy(rounded)


@pytest.mark.parametrize("kind", MODELS)
def test_a_half_has_half_the_bytes_and_the_same_other_files(tmp_path: Path, kind: str) -> None:
    model = MODELS[kind]()
    export(model, tmp_path / "whole")
    export(model, tmp_path / "half", dtype="bfloat16")
    whole, half = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "half"))
    assert whole.keys() == half.keys()
    for name, weight in half.items():
        assert weight.shape == whole[name].shape
        kept = kind == "deepseek_v3" and ".gate." in name
        assert weight.dtype == (torch.float32 if kept else torch.bfloat16)
    with safe_open(tmp_path / "half/model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
    names = [sorted(path.name for path in (tmp_path / one).iterdir()) for one in ("whole", "half")]
    assert names[0] == names[1]
    for name in names[0]:
        written = [(tmp_path / one / name).read_bytes() for one in ("whole", "half")]
        if name == "config.json":
            configs = [json.loads(one) for one in written]
            assert [one.pop("dtype") for one in configs] == ["float32", "bfloat16"]
            assert configs[0] == configs[1]
        elif name != "model.safetensors":
            assert written[0] == written[1], name


@pytest.mark.parametrize("kind", ["ours", "ours, tied", "llama", "llama, tied", "gemma3_text"])
def test_we_and_transformers_write_the_same_greedy_text(tmp_path: Path, kind: str) -> None:
    """From the same rounded weights."""
    export(MODELS[kind](), tmp_path, dtype="bfloat16")
    theirs = greedy(read(tmp_path, dtype=torch.float32))
    ours = load_model(tmp_path, dtype=torch.float32)
    cache, new, found = ours.new_cache(1, 32), torch.arange(1, 6)[None], []
    for _ in range(16):
        new = ours.extend(new, torch.tensor([new.shape[1]]), cache).argmax(-1)[:, None]
        found.append(int(new))
    assert found == theirs


def test_a_model_in_bfloat16_may_be_written_in_float32(tmp_path: Path) -> None:
    model = tiny(torch.float32).to(torch.bfloat16)
    export(model, tmp_path, dtype="float32")
    back = load_model(tmp_path)
    assert back.compute_dtype == torch.float32
    row = random_row()
    assert torch.equal(logits_of(back, row), logits_of(tiny(torch.float32).bfloat16().float(), row))


def test_a_weight_that_does_not_fit_is_refused_and_leaves_no_folder(tmp_path: Path) -> None:
    model = tiny(torch.float32)
    model.embedding.weight.data[3, 2] = -70000.0
    with pytest.raises(ConfigError, match=r"embed_tokens.*70,000.*65,504; export in bfloat16"):
        export(model, tmp_path / "half", dtype="float16")
    assert list((tmp_path / "half").glob("*")) == []
    export(model, tmp_path / "half", dtype="bfloat16")
    earlier = {path.name: path.read_bytes() for path in (tmp_path / "half").iterdir()}
    with pytest.raises(ConfigError, match="export in bfloat16"):
        export(model, tmp_path / "half", dtype="float16", overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "half").iterdir()} == earlier


def test_another_dtype_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dtype must be one of float32, .*got 'int8'"):
        export(tiny(torch.float32), tmp_path / "out", dtype="int8")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_shared_matrix_stays_shared_and_integers_stay() -> None:
    matrix = torch.randn(3, 4)
    numbers = torch.arange(3)
    found = cast_weights({"a": matrix, "b": matrix, "row": matrix[0], "n": numbers}, torch.bfloat16)
    assert found["a"] is found["b"]
    assert found["row"].shape == (4,)
    assert found["n"] is numbers


def test_settings_of_parts_name_it_too() -> None:
    config = {"torch_dtype": "float32", "text_config": {"dtype": "float32", "a": 1}, "b": {"c": 2}}
    assert with_dtype(config, torch.float16) == {
        "torch_dtype": "float16",
        "text_config": {"dtype": "float16", "a": 1},
        "b": {"c": 2},
    }
    assert with_dtype({"a": 1}, torch.float16) == {"a": 1, "dtype": "float16"}
