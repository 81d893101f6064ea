"""Checkpoints of LoRA: small, next to one base that must not change; and the adapter that is
exported.
"""

import json
import shutil

import pytest
import torch
from python_makers import KillAfter, KilledError, make_model, start
from training_makers import losses

import penstock as ps
from makers.models import tiny_huggingface
from makers.processes import call_penstock
from penstock.core.errors import ConfigError, CorruptionError, StateError
from penstock.models import LoraSettings, add_lora

pytest.importorskip("peft", reason="LoRA needs peft: pip install 'penstock[lora]'")
pytestmark = pytest.mark.usefixtures("plain_torch")
LORA = {"steps": 4, "lora": {"rank": 2, "alpha": 4}, "warmup_steps": 1}


@pytest.fixture(scope="module")
def first(data, tmp_path_factory):
    """A run whose model the others begin with."""
    return start(data, tmp_path_factory.mktemp("first") / "run", steps=1, warmup_steps=1).path


@pytest.fixture(scope="module")
def tuned(data, first, tmp_path_factory):
    """A run of four steps."""
    return start(data, tmp_path_factory.mktemp("tuned") / "run", model=first, **LORA)


def newest(run):
    return run.path / "checkpoints" / f"step-{run.step:08d}" / "model"


def test_checkpoints_hold_the_lora_and_the_checksum_of_its_base(tuned):
    for folder in (tuned.path / "checkpoints").iterdir():
        assert sorted(path.name for path in (folder / "model").iterdir()) == [
            "lora.safetensors",
            "model.json",
        ]
    described = json.loads((newest(tuned) / "model.json").read_text())
    manifest = json.loads((tuned.path / "base" / "manifest.json").read_text())
    assert described["base"] == {"folder": "../../../base", "checksum": manifest["checksum"]}
    base, loaded = ps.load_model(tuned.path / "base"), ps.load_model(tuned.path)
    assert base.lora is None
    assert loaded.lora == LoraSettings(rank=2, alpha=4.0)
    kept = {name.replace(".base_layer", ""): weight for name, weight in loaded.state_dict().items()}
    assert all(torch.equal(weight, kept[name]) for name, weight in base.state_dict().items())


def test_a_run_goes_on_without_the_model_it_began_with(data, first, tuned, tmp_path):
    """Its base has all that is needed, and is what it was: LoRA is not merged into it meanwhile."""
    shutil.copytree(first, tmp_path / "start")
    with pytest.raises(KilledError, match="after step"):
        start(data, tmp_path / "run", model=tmp_path / "start", **LORA, on_step=KillAfter(3))
    shutil.rmtree(tmp_path / "start")
    run = ps.open_run(tmp_path / "run").resume(progress=False, on_step=KillAfter(99))
    assert losses(run.metrics) == losses(tuned.metrics)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert torch.equal(_first_lora(tmp_path / "moved"), _first_lora(tuned.path))


def _first_lora(folder):
    return next(
        weight for name, weight in ps.load_model(folder).named_parameters() if ".lora_B" in name
    )


def test_another_base_is_refused(data, tuned, tmp_path):
    shutil.copytree(tuned.path, tmp_path / "run")
    other = make_model(data, seed=1)
    with pytest.raises(StateError, match=r"LoRA.*trained.*weights"):
        start(data, tmp_path / "run", model=other, **{**LORA, "steps": 6}, resume=True)
    weights = tmp_path / "run" / "base" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CorruptionError, match=r"model.*LoRA.*trained"):
        ps.load_model(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "base")
    with pytest.raises(CorruptionError, match=r"LoRA.*belongs.*cannot"):
        ps.load_model(tmp_path / "run")


@pytest.mark.parametrize("tied", [False, True])
def test_models_of_transformers(data, tmp_path, tied):
    """In bfloat16, so that the base is kept in another dtype than that of its folder."""
    vocabulary = ps.open_dataset(data / "data" / "train").tokenizer.vocab_size
    inner = tiny_huggingface(vocab_size=vocabulary, tie_word_embeddings=tied).to(torch.bfloat16)
    inner.save_pretrained(tmp_path / "base")
    settings = {"model": f"hf:{tmp_path / 'base'}", **LORA}
    run = start(data, tmp_path / "run", **settings)
    assert sorted(path.name for path in newest(run).iterdir()) == ["lora.safetensors", "model.json"]
    assert ps.load_model(run.path).lora == LoraSettings(rank=2, alpha=4.0)
    assert run.export(tmp_path / "out", adapter=True).base == str(tmp_path / "base")
    assert not (tmp_path / "out" / "base").exists()
    with pytest.raises(KilledError, match="after step"):
        start(data, tmp_path / "cut", **settings, on_step=KillAfter(3))
    assert losses(start(data, tmp_path / "cut", **settings, resume=True).metrics) == losses(
        run.metrics
    )
    inner.model.norm.weight.data[3] += 1
    inner.save_pretrained(tmp_path / "base")
    with pytest.raises(StateError, match=r"weights.*changed"):
        start(data, tmp_path / "run", **{**settings, "steps": 8}, resume=True)


def test_a_model_that_trains_more_than_lora_is_kept_whole(data, tmp_path):
    """And goes on as before."""

    def tune(output, **more):
        model = make_model(data)
        add_lora(model, LoraSettings(rank=2, alpha=4.0))
        model.norm.weight.requires_grad_(True)
        return start(data, output, model=model, **{**LORA, **more})

    whole = tune(tmp_path / "whole")
    assert (newest(whole) / "model.safetensors").is_file()
    assert not (whole.path / "base").exists()
    with pytest.raises(KilledError, match="after step"):
        tune(tmp_path / "run", on_step=KillAfter(2))
    assert losses(tune(tmp_path / "run", resume=True).metrics) == losses(whole.metrics)


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft asks for it
def test_the_adapter_is_exported(tuned, data, tmp_path):
    """By Python and by the command; peft puts it onto its base."""
    import peft
    import transformers

    found = tuned.export(tmp_path / "out", adapter=True)
    assert found.base == str(tmp_path / "out" / "base")
    assert found.parameters == sum(
        w.numel() for n, w in ps.load_model(tuned.path).named_parameters() if ".lora_" in n
    )
    tuned.export(tmp_path / "merged")
    tokens = torch.arange(3, 20)[None]
    base = transformers.AutoModelForCausalLM.from_pretrained(found.base)
    with torch.no_grad():
        plain = base(tokens).logits
        wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(
            tokens
        ).logits
        logits = peft.PeftModel.from_pretrained(base, tmp_path / "out")(tokens).logits
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4)
    assert (wanted - plain).abs().max() > 1e-3
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    shown = call_penstock(
        "export", tuned.path, "--adapter", "--output", tmp_path / "out", "--overwrite"
    )
    assert shown.exit_code == 0
    whole = start(data, tmp_path / "whole", steps=2, warmup_steps=1)
    with pytest.raises(ConfigError, match=r"trained.*LoRA.*adapter.*without.*adapter"):
        whole.export(tmp_path / "none", adapter=True)
