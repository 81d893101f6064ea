"""An exported model in transformers: the same logits, the same greedy text; and back again."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_makers import VOCABULARY, logits_of, tiny

from makers.rows import LENGTHS, random_row
from makers.tokenizers import tiny_tokenizer
from penstock import load_tokenizer
from penstock.chat import load_template
from penstock.core.errors import CorruptionError, FormatError, OutputError
from penstock.models import ModelSettings, Transformer, save_model
from penstock.models.building import build_model
from penstock.models.exporting import export
from penstock.models.ours.importing import import_llama
from penstock.models.saving import load_model
from penstock.models.theirs.model import HuggingFaceModel

SHAPES: list[dict[str, Any]] = [
    {},
    {"tied": False, "head_width": 6, "mlp_width": 40, "rope_theta": 500.0},
    {"prediction_heads": 2},
    {"sliding_window": 3},
]


def exported(model: Any, folder: Path, **extra: Any) -> Any:
    export(model, folder, **extra)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa"
    ).eval()


@pytest.mark.parametrize("extra", SHAPES)
def test_transformers_gives_the_same_logits(tmp_path: Path, extra: dict[str, Any]) -> None:
    """Of each document alone."""
    model = tiny(torch.float32, **extra)
    theirs = exported(model, tmp_path)
    kind = "MistralForCausalLM" if "sliding_window" in extra else "LlamaForCausalLM"
    assert type(theirs).__name__ == kind
    row = random_row()
    ours, begin = logits_of(model, row)[0], 0
    for length in LENGTHS:
        tokens = torch.from_numpy(row.tokens[begin : begin + length])[None]
        with torch.no_grad():
            due = theirs(tokens, use_cache=False).logits[0]
        torch.testing.assert_close(ours[begin : begin + length], due, rtol=0, atol=1e-5)
        begin += length


@pytest.mark.parametrize("extra", SHAPES)
def test_transformers_writes_the_same_greedy_text(tmp_path: Path, extra: dict[str, Any]) -> None:
    model = tiny(torch.float32, **extra)
    theirs = exported(model, tmp_path)
    prompt = torch.arange(1, 6)[None]
    due = theirs.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)[
        0, 5:
    ].tolist()
    cache, new, found = model.new_cache(1, 32), prompt, []
    for _ in range(20):
        new = model.extend(new, torch.tensor([new.shape[1]]), cache).argmax(-1)[:, None]
        found.append(int(new))
    assert found == due
    assert len(set(found)) > 3


@pytest.mark.parametrize("extra", SHAPES)
def test_an_exported_model_comes_back(tmp_path: Path, extra: dict[str, Any]) -> None:
    model = tiny(torch.float32, **extra)
    export(model, tmp_path)
    back = load_model(tmp_path)
    assert isinstance(back, Transformer)
    row = random_row()
    assert torch.equal(logits_of(back, row)[0], logits_of(model, row)[0])


def test_tokenizer_template_and_stop_ids_go_along(tmp_path: Path) -> None:
    names = ["<s>", "</s>", "<end>"]
    tokenizer = tiny_tokenizer(tmp_path / "own", ["some words to learn from"] * 9, 300, names)
    template = load_template(
        "{{ greeting }}{{ messages[0].content }}", tokenizer=tokenizer, greeting="Hi: "
    )
    stop = tokenizer.special_tokens["<end>"]
    out = tmp_path / "out"
    theirs = exported(
        tiny(torch.float32, vocab_size=400),
        out,
        tokenizer=tokenizer,
        template=template,
        stop_ids=[stop],
    )
    assert theirs.generation_config.eos_token_id == [stop]
    loaded = transformers.AutoTokenizer.from_pretrained(out)
    assert loaded("some words").input_ids == tokenizer.encode("some words").tolist()
    messages = [{"role": "user", "content": "you"}]
    assert (
        loaded.apply_chat_template(messages, tokenize=False)
        == "Hi: you"
        == template.render_plain(messages)
    )
    assert loaded.apply_chat_template(messages, tokenize=False, greeting="Ho: ") == "Ho: you"


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    ranks = b"".join(base64.b64encode(bytes([i])) + f" {i}\n".encode() for i in range(256))
    (tmp_path / "own.tiktoken").write_bytes(ranks)
    tokenizer = load_tokenizer(tmp_path / "own.tiktoken", pattern=".")
    heads, vocabulary = export(
        tiny(torch.float32, prediction_heads=3), tmp_path / "out", tokenizer=tokenizer
    )
    assert "2 further prediction heads are left out" in heads
    assert "tiktoken" in vocabulary
    assert export(tiny(torch.float32), tmp_path / "plain") == ()


@pytest.mark.parametrize("extra", SHAPES)
def test_saved_is_loaded(tmp_path: Path, extra: dict[str, Any]) -> None:
    model = tiny(torch.float32, **extra)
    save_model(model, tmp_path)
    back = load_model(tmp_path)
    assert isinstance(back, Transformer)
    assert back.settings == model.settings
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), back.parameters(), strict=True)
    )
    assert next(load_model(tmp_path, dtype=torch.float64).parameters()).dtype == torch.float64


def test_a_model_trained_in_bfloat16_computes_in_what_is_asked(tmp_path: Path) -> None:
    model = build_model(ModelSettings(layers=1, width=32, dtype="bfloat16"), vocab_size=VOCABULARY)
    save_model(model, tmp_path / "saved")
    export(model, tmp_path / "exported")
    for name in ("saved", "exported"):
        assert load_model(tmp_path / name).compute_dtype == torch.bfloat16
        assert load_model(tmp_path / name, dtype=torch.float32).compute_dtype == torch.float32
        assert load_model(tmp_path / name, dtype=torch.float64).compute_dtype == torch.float64


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"neither model\.json nor config\.json"):
        load_model(tmp_path)
    save_model(tiny(), tmp_path)
    saved = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps({**saved, "format": 9}))
    with pytest.raises(FormatError, match=r"model format version 9.*reads version 1"):
        load_model(tmp_path)
    saved["settings"]["layers"] = 3
    (tmp_path / "model.json").write_text(json.dumps(saved))
    with pytest.raises(CorruptionError, match=r"blocks\.2"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model_type": "gpt2"}, "type 'gpt2'"),
        ({"attention_bias": True}, "biases"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "scaled by 'llama3'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers of different kinds"),
    ],
)
def test_what_our_transformer_lacks_is_named(
    tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    export(tiny(torch.float32), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **wrong}))
    with pytest.raises(FormatError, match=message):
        import_llama(tmp_path)


def test_a_model_of_transformers_is_saved_and_loaded(tmp_path: Path) -> None:
    export(tiny(torch.float32), tmp_path / "llama")
    inner = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    model = HuggingFaceModel(inner)
    save_model(model, tmp_path / "saved")
    export(model, tmp_path / "exported")
    row = random_row()
    for name in ("saved", "exported"):
        torch.testing.assert_close(
            logits_of(load_model(tmp_path / name), row), logits_of(model, row), rtol=0, atol=1e-5
        )
    assert model.vocab_size == VOCABULARY


def test_a_failed_export_leaves_nothing_and_another_one_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[str] = []

    def full(weights: object, path: Path, **_: object) -> None:
        Path(path).write_bytes(b"half")
        left.extend(sorted(file.name for file in Path(path).parent.iterdir()))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.models.exporting.save_file", full)
        with pytest.raises(OSError, match="No space left"):
            export(tiny(torch.float32), tmp_path / "out")
    assert left == ["generation_config.json", "model.safetensors"], (
        "the config comes last: killed here, no model is there"
    )
    assert list((tmp_path / "out").iterdir()) == []
    export(tiny(torch.float32), tmp_path / "out")
    with pytest.raises(OutputError, match=r"earlier.*export.*overwrite"):
        export(tiny(torch.float32), tmp_path / "out")


def test_other_users_may_read_the_weights(tmp_path: Path) -> None:
    """safetensors hides what it writes from them."""
    model = tiny(torch.float32)
    export(model, tmp_path / "out")
    save_model(model, tmp_path / "saved")
    (tmp_path / "plain").touch()
    theirs = HuggingFaceModel(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    export(theirs, tmp_path / "theirs")
    save_model(theirs, tmp_path / "saved again")
    for path in (
        tmp_path / name / "model.safetensors" for name in ("out", "saved", "theirs", "saved again")
    ):
        assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
