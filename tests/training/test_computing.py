"""Precision, activation checkpoints and compiled blocks in training, of ours and of transformers'
models.
"""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from training_makers import losses, make, train, values

import penstock as ps
from makers.models import tiny_huggingface
from penstock.core.errors import ConfigError
from penstock.learn.training import memory
from penstock.learn.training.computing import kept_bytes, precision_of
from penstock.learn.training.settings import TrainSettings
from penstock.models.building import build_model
from penstock.models.settings import ModelSettings
from penstock.use.config.summary import describe

pytestmark = pytest.mark.usefixtures("plain_torch")
STEPS = "training.steps=4"
NARROW = ("training.precision=bfloat16", "training.activation_checkpointing=selective")
"""As on a GPU."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A folder of transformers."""
    folder = tmp_path_factory.mktemp("theirs")
    settings = {"vocab_size": 400, "max_position_embeddings": 256, "std": 0.05}
    tiny_huggingface("qwen3", head_dim=8, **settings).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_checkpoints_change_no_bit(kind, data, theirs, tmp_path):
    model = () if kind == "ours" else (f"model=hf:{theirs}",)
    wide = train(data, tmp_path / "wide", STEPS, *model)
    found = {
        way: train(
            data,
            tmp_path / way,
            STEPS,
            "training.precision=bfloat16",
            f"training.activation_checkpointing={way}",
            *model,
        )
        for way in ("none", "selective", "full")
    }
    assert losses(found["none"]) == losses(found["selective"]) == losses(found["full"])
    assert losses(found["none"]) != losses(wide)
    assert values(found["none"]) == pytest.approx(values(wide), abs=0.02)


def test_a_run_in_bfloat16_goes_on_bit_for_bit(data, theirs, tmp_path):
    given = ("training.steps=6", *NARROW, f"model=hf:{theirs}")
    whole = train(data, tmp_path / "whole", *given)
    train(data, tmp_path / "cut", *given, until=4)
    assert losses(train(data, tmp_path / "cut", *given, resume=True)) == losses(whole)


def test_another_precision_is_said_when_a_run_goes_on(data, theirs, tmp_path):
    given = ("training.steps=6", f"model=hf:{theirs}")
    train(data, tmp_path / "run", *given, until=4)
    said: list[str] = []
    train(data, tmp_path / "run", *given, *NARROW, resume=True, say=said.append)
    [line] = [one for one in said if "dtype" in one]
    assert "torch.bfloat16 now, torch.float32 then" in line
    # It changes no bit.
    assert "checkpointing" not in line


def test_weights_that_are_trained_stay_in_float32(data, theirs, tmp_path):
    train(data, tmp_path / "run", STEPS, *NARROW, f"model=hf:{theirs}")
    run = ps.open_run(tmp_path / "run")
    [file] = sorted((run.path / "checkpoints").glob("*4/model/*.safetensors"))
    assert {str(one.dtype) for one in load_file(file).values()} == {"torch.float32"}


def test_a_frozen_base_is_kept_and_written_in_bfloat16(data, theirs, tmp_path):
    lora = (STEPS, f"model=hf:{theirs}", "training.lora={rank: 2}")
    trainer = make(data, tmp_path / "run", *lora, *NARROW)
    trained = {one.dtype for one in trainer.model.parameters() if one.requires_grad}
    frozen = {one.dtype for one in trainer.model.parameters() if not one.requires_grad}
    assert (trained, frozen) == ({torch.float32}, {torch.bfloat16})
    found = [record["loss"] for record in trainer.train()]
    assert found == pytest.approx(values(train(data, tmp_path / "wide", *lora)), abs=0.02)
    # It holds the folder.
    del trainer
    run = ps.open_run(tmp_path / "run")
    base = load_file(run.path / "base" / "model.safetensors")
    assert {one.dtype for one in base.values()} == {torch.bfloat16}
    assert list(run.stream("the", max_tokens=3))
    resumed = make(data, tmp_path / "run", *lora, *NARROW, resume=True)
    assert resumed.loader.step == 4


@pytest.mark.filterwarnings("ignore")  # of torch._dynamo itself
def test_compiled_blocks_of_transformers(data, theirs, tmp_path):
    given = (STEPS, f"model=hf:{theirs}")
    plain = train(data, tmp_path / "plain", *given)
    compiled = train(data, tmp_path / "compiled", *given, "training.compile=true")
    torch._dynamo.reset()
    assert values(compiled) == pytest.approx(values(plain), rel=1e-4)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.activation_checkpointing=full", "activation_checkpointing.*no blocks"),
        ("training.compile=true", "compile.*no blocks"),
        ("training.precision=bfloat16", "blocks cannot be told apart.*precision"),
    ],
)
def test_models_without_known_blocks_say_what_to_leave_out(data, tmp_path, setting, message):
    from makers.architectures import make_small

    make_small("openai-gpt", vocab_size=400).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        make(data, tmp_path / "run", STEPS, f"model=hf:{tmp_path / 'model'}", setting)


def test_micro_sequences_do_not_go_with_checkpoints():
    with pytest.raises(ConfigError, match=r"micro_sequences and activation_checkpointing"):
        TrainSettings(micro_sequences=2, activation_checkpointing="full")


@pytest.mark.parametrize("setting", ["precision", "activation_checkpointing"])
def test_unknown_choices_are_named(setting):
    with pytest.raises(ConfigError, match=f"training.{setting} must be one of .*, got 'half'"):
        TrainSettings(**{setting: "half"})  # type: ignore[arg-type]


def test_on_the_cpu_a_model_computes_in_its_own_dtype():
    for dtype in ("float32", "bfloat16", "float64"):
        settings = ModelSettings(layers=1, width=16, heads=2, dtype=dtype)
        model = build_model(settings, vocab_size=300)
        assert precision_of(TrainSettings(), model) == getattr(torch, dtype)
        assert precision_of(TrainSettings(precision="bfloat16"), model) == torch.bfloat16


def test_checkpoints_leave_room_for_more_rows():
    model = build_model(ModelSettings(layers=12, width=64, heads=4), vocab_size=300)
    needed = [
        kept_bytes(model, TrainSettings(activation_checkpointing=kind), torch.bfloat16)
        for kind in ("none", "selective", "full")
    ]
    assert needed == sorted(needed, reverse=True)
    assert needed[0] > 3 * needed[1] > 3 * needed[2]


def test_the_start_says_how_the_model_computes(data, theirs, tmp_path):
    model = f"hf:{theirs}"
    trainer = make(data, tmp_path / "run", STEPS, *NARROW, f"model={model}")
    assert dict(describe(trainer, model))["computation"] == (
        "bfloat16 (weights float32) · attention per_document · activation checkpointing selective"
    )


def test_a_row_that_does_not_fit_names_what_would_make_it_fit(data, theirs, tmp_path, monkeypatch):
    trainer = make(data, tmp_path / "run", STEPS, f"model=hf:{theirs}")
    model, plain = trainer.model, trainer.settings
    full = replace(plain, activation_checkpointing="full")
    sizes = {
        one.activation_checkpointing: memory.held_bytes(model, one, 1)
        + 4096 * kept_bytes(model, one, torch.float32)
        for one in (plain, full)
    }
    there = (sizes["none"] + sizes["full"]) // 2
    monkeypatch.setattr(memory, "device_memory", lambda device: there)
    device = torch.device("cpu")
    with pytest.raises(
        ConfigError, match=r"4,096 slots.*activation_checkpointing to (selective|full)"
    ):
        memory.check_room(model, plain, device, 1, 4096)
    memory.check_room(model, full, device, 1, 4096)
    with pytest.raises(ConfigError, match=r"lower data\.loader\.sequence_length") as found:
        memory.check_room(model, full, device, 1, 1 << 20)
    assert "activation_checkpointing" not in str(found.value)


def test_a_step_without_memory_says_what_lowers_it(data, tmp_path, monkeypatch):
    trainer = make(data, tmp_path / "run", STEPS)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB. GPU 0 has none")

    monkeypatch.setattr(type(trainer._gradients), "add", full)
    with pytest.raises(ConfigError, match=r"2\.00 GiB\).*rows_per_pass.*selective, then full"):
        list(trainer.train())
