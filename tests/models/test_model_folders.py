"""A folder whose weights are not those of the model that it describes is refused, with names and a
cure.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from makers.models import tiny_huggingface
from penstock.core.errors import ConfigError, CorruptionError, FormatError, PenstockError
from penstock.models import save_model
from penstock.models.building import build_model
from penstock.models.ours.importing import import_llama
from penstock.models.saving import load_model

WEIGHTS = "model.safetensors"
KINDS = ("llama", "qwen2")
"""The first is read by ourselves, the second by transformers."""
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def make_folder(folder: Path, kind: str, **settings: Any) -> Path:
    tiny_huggingface(kind, pad_token_id=None, **settings).save_pretrained(folder)
    return folder


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / WEIGHTS)
    edit(weights)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def configure(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "quantization_config=FineGrainedFP8Config(dequant",
        ),
        (
            {"quant_method": "mxfp4"},
            "quantization_config=Mxfp4Config(dequantize=True), dtype='bfloat16').save_pretr",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "int-quantized"},
            "CompressedTensorsConfig(dequantize=True)",
        ),
        (
            {"quant_method": "gptq", "bits": 4},
            "take the float32 or bfloat16 folder that it was made from",
        ),
        (
            {"quant_method": "awq", "bits": 4},
            "take the float32 or bfloat16 folder that it was made from",
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            "take the float32 or bfloat16 folder",
        ),
    ],
    ids=lambda value: value["quant_method"] if isinstance(value, dict) else "",
)
def test_quantised_by_its_settings(
    tmp_path: Path, kind: str, settings: dict[str, Any], cure: str
) -> None:
    configure(make_folder(tmp_path, kind), quantization_config=settings)
    found = rf"its weights are quantised \({settings['quant_method']}\); .*{re.escape(cure)}"
    for load in (load_model, lambda path: build_model(f"hf:{path}", vocab_size=61)):
        with pytest.raises(FormatError, match=found):
            load(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8], ids=str)
def test_quantised_by_how_they_are_stored(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """As FP8 and INT8 folders without their settings: numbers without their scales."""
    change(
        make_folder(tmp_path, kind),
        lambda weights: weights.update({Q_PROJ: weights[Q_PROJ].to(dtype)}),
    )
    with pytest.raises(
        FormatError,
        match=rf"{re.escape(Q_PROJ)} .*[FIU]8\S*, .*F32",
    ):
        load_model(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [f"{Q_PROJ}_scale", "model.layers.0.self_attn.q_norm.weight",
                                  "model.layers.2.mlp.up_proj.weight"])  # fmt: skip
def test_weights_that_nothing_uses(tmp_path: Path, kind: str, name: str) -> None:
    """Scales of quantised weights, norms of another architecture, a layer too many."""
    change(make_folder(tmp_path, kind), lambda weights: weights.update({name: torch.ones(8)}))
    with pytest.raises(CorruptionError, match=rf"1.*config.json.*use: {name}"):
        load_model(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_and_other_parts_are_left_out(tmp_path: Path, kind: str) -> None:
    plain = load_model(make_folder(tmp_path, kind)).state_dict()
    others = (
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "mtp.layers.0.norm.weight",
        "score.weight",
        "model.vision_tower.patches.weight",
    )
    change(tmp_path, lambda weights: weights.update({name: torch.ones(8) for name in others}))
    found = load_model(tmp_path).state_dict()
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], weight) for name, weight in plain.items())


@pytest.mark.parametrize("kind", KINDS)
def test_missing_weights_are_not_made_up(tmp_path: Path, kind: str) -> None:
    names = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    change(make_folder(tmp_path, kind), lambda weights: [weights.pop(name) for name in names])
    with pytest.raises(CorruptionError, match=r"lack 2 weights .* random: " + ", ".join(names)):
        load_model(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_tied_weights_are_not_missing(tmp_path: Path, kind: str) -> None:
    make_folder(tmp_path, kind, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    load_model(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_weights_that_are_no_numbers_are_named(tmp_path: Path, kind: str, value: float) -> None:
    change(
        make_folder(tmp_path, kind),
        lambda weights: weights["model.norm.weight"].__setitem__(3, value),
    )
    with pytest.raises(
        CorruptionError,
        match=r"NaN or infinity.*norm\.weight",
    ):
        load_model(tmp_path)
    own = import_llama(make_folder(tmp_path / "other", "llama"))
    with torch.no_grad():
        own.norm.weight[0] = value
    save_model(own, tmp_path / "own")
    with pytest.raises(CorruptionError, match=r"NaN.*norm\.weight.*model"):
        load_model(tmp_path / "own")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut short": lambda folder: cut(folder / WEIGHTS),
    "no header": lambda folder: (folder / WEIGHTS).write_bytes(b"\x00" * 4),
    "a header of 2 ** 60 bytes": lambda folder: (folder / WEIGHTS).write_bytes(
        b"\x00" * 7 + b"\x10" + b"x" * 99
    ),
    "header no JSON": lambda folder: (folder / WEIGHTS).write_bytes(
        b"\x05" + b"\x00" * 7 + b"hello"
    ),
    "header a list": lambda folder: (folder / WEIGHTS).write_bytes(b"\x02" + b"\x00" * 7 + b"[]"),
    "empty": lambda folder: (folder / WEIGHTS).write_bytes(b""),
    "a folder": lambda folder: ((folder / WEIGHTS).unlink(), (folder / WEIGHTS).mkdir()),
    "gone": lambda folder: (folder / WEIGHTS).unlink(),
    "a pickle": lambda folder: (
        (folder / WEIGHTS).unlink(),
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x04x"),
    ),
    "an index of nothing": lambda folder: (
        (folder / WEIGHTS).unlink(),
        (folder / f"{WEIGHTS}.index.json").write_text('{"weight_map": {"a": "b"}}'),
    ),
    "an index no JSON": lambda folder: (
        (folder / WEIGHTS).unlink(),
        (folder / f"{WEIGHTS}.index.json").write_text("{"),
    ),
    "config no JSON": lambda folder: (folder / "config.json").write_text("{"),
    "config a list": lambda folder: (folder / "config.json").write_text("[]"),
    "config not UTF-8": lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\xfa"),
    "no model type": lambda folder: (folder / "config.json").write_text('{"hidden_size": 32}'),
    "unknown model type": lambda folder: configure(folder, model_type="never_heard_of"),
    "other sizes": lambda folder: configure(folder, hidden_size=64),
    "sizes no numbers": lambda folder: configure(
        folder, hidden_size="many", num_attention_heads=None
    ),
    "no heads": lambda folder: configure(folder, num_attention_heads=0),
    "negative layers": lambda folder: configure(folder, num_hidden_layers=-1),
    "activation unknown": lambda folder: configure(folder, hidden_act="never_heard_of"),
    "code of its own": lambda folder: configure(
        folder, auto_map={"AutoConfig": "x.Y"}, model_type="never_heard_of"
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_one_line(tmp_path: Path, kind: str, damage: str) -> None:
    DAMAGE[damage](make_folder(tmp_path, kind))
    with pytest.raises(PenstockError, match=re.escape(str(tmp_path))) as raised:
        load_model(tmp_path)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600


def test_models_that_are_not_causal_are_refused(tmp_path: Path) -> None:
    make_folder(tmp_path, "bert")
    with pytest.raises(ConfigError, match=r"\(bert, .* is not a causal.* standard"):
        load_model(tmp_path)
