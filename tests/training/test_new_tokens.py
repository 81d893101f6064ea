"""Pretrained models on data with a longer tokenizer: rows for new entries, trained or frozen; and
default rates.
"""

import json

import peft
import pytest
import torch
import transformers
import yaml
from python_makers import SETTINGS, KillAfter, KilledError, make_model, start
from training_makers import losses

import penstock as ps
from makers.datasets import prepare_here
from makers.texts import make_texts
from makers.tokenizers import tiny_tokenizer
from penstock.core.errors import ConfigError
from penstock.learn.training.path_settings import PolicySettings, PreferenceSettings
from penstock.learn.training.settings import TrainSettings
from penstock.models import LoraSettings
from penstock.tokenizers import add_tokens

pytestmark = [
    pytest.mark.usefixtures("plain_torch"),
    # peft asks for it.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
NEW = {"rank": 2, "train_embeddings": "new"}


@pytest.fixture(scope="module")
def base(data, tmp_path_factory):
    """A run, and the same model as a folder of transformers."""
    run = start(data, tmp_path_factory.mktemp("base") / "run", steps=1, warmup_steps=1)
    run.export(run.path.parent / "folder")
    return run.path


@pytest.fixture(scope="module")
def longer(data, tmp_path_factory):
    """Documents with two tokens that the tokenizer of `base` lacks."""
    place = tmp_path_factory.mktemp("longer")
    tokenizer = add_tokens(data / "tokenizer", ["[new]", "[newer]"], output=place / "tokenizer")
    first = tokenizer.vocab_size - 2
    documents = [[5, 6 + n % 40, first, 7, first + 1, 8, 9] for n in range(60)]
    return ps.write_dataset(place / "documents", documents, tokenizer=tokenizer).path


def loader(path):
    return ps.Loader(path, sequence_length=32, rows_per_step=2, seed=1)


def train(model, path, output, **more):
    return ps.train(model, loader(path), output=output, **{**SETTINGS, "steps": 3, **more})


def embedding(model):
    inner = getattr(model, "inner", None)
    return (model.embedding if inner is None else inner.get_input_embeddings()).weight.detach()


def named(base, kind):
    return {
        "run": base,
        "folder": base.parent / "folder",
        "hf": f"hf:{base.parent / 'folder'}",
        "object": ps.load_model(base.parent / "folder"),
        "transformers": transformers.AutoModelForCausalLM.from_pretrained(base.parent / "folder"),
    }[kind]


@pytest.mark.parametrize("kind", ["run", "folder", "hf", "object", "transformers"])
def test_embeddings_grow_and_frozen_rows_are_told(base, longer, tmp_path, capsys, kind):
    old = embedding(ps.load_model(base))
    run = train(named(base, kind), longer, tmp_path / "run", lora={"rank": 2}, progress=True)
    said = capsys.readouterr().err
    assert (
        f"grow from {len(old)} to {len(old) + 2} rows; the new ones begin as the mean of the "
        "old ones" in said
    )
    assert "are frozen in the embedding" in said
    assert "set lora.train_embeddings to new" in said
    mean = old.mean(0, keepdim=True).expand(2, -1)
    torch.testing.assert_close(embedding(ps.load_model(run.path)), torch.cat([old, mean]))
    run.export(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == len(old) + 2
    inner = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(inner.get_input_embeddings().weight) == len(old) + 2
    assert ps.load_tokenizer(tmp_path / "out").vocab_size == len(old) + 2


def test_all_rows_are_trained_without_lora(base, longer, tmp_path, capsys):
    old = embedding(ps.load_model(base))
    run = train(base, longer, tmp_path / "run", progress=True)
    assert "frozen" not in capsys.readouterr().err
    found = embedding(ps.load_model(run.path))
    assert not torch.isclose(found[-2:], old.mean(0)).all(1).any()
    assert len(run.generate("the", max_tokens=2, temperature=0)) >= 0


def test_frozen_patterns_are_told_as_well(base, longer, tmp_path, capsys):
    train(
        base,
        longer,
        tmp_path / "run",
        frozen=("embedding*",),
        steps=1,
        warmup_steps=1,
        progress=True,
    )
    assert "are frozen in the embedding" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["run", "hf"])
def test_new_rows_are_trained_next_to_lora(base, longer, tmp_path, capsys, kind):
    old = embedding(ps.load_model(base))
    run = train(
        named(base, kind), longer, tmp_path / "run", lora=NEW, decay_embeddings=True, progress=True
    )
    assert "frozen" not in capsys.readouterr().err
    trained = ps.load_model(run.path)
    found = embedding(trained)
    assert torch.equal(found[:-2], old)
    assert not torch.isclose(found[-2:], old.mean(0)).all(1).any()
    stored = {path.name for path in (run.model).iterdir()}
    assert stored == {"lora.safetensors", "model.json"}, "the new rows are stored with the adapter"

    run.export(tmp_path / "out", adapter=True)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["trainable_token_indices"] == {"model.embed_tokens": [len(old), len(old) + 1]}
    assert (tmp_path / "out" / "base").is_dir(), "the base by its name has fewer rows"
    inner = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "base")
    theirs = peft.PeftModel.from_pretrained(inner, tmp_path / "out").eval()
    ids = torch.tensor([[5, 6, len(old), 7, len(old) + 1]])
    run.export(tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(theirs(ids).logits, merged(ids).logits, rtol=0, atol=1e-4)


LORA = {
    "rank": 2,
    "dropout": 0.2,
    "rslora": True,
    "rank_pattern": {"query": 3},
    "alpha_pattern": {"key": 4.0},
    "modules_to_save": ("norm",),
    "train_embeddings": "new",
}


def test_a_run_with_all_of_it_goes_on_exactly(base, longer, tmp_path):
    settings = {"lora": LORA, "steps": 6}
    whole = train(base, longer, tmp_path / "whole", **settings)
    with pytest.raises(KilledError, match="after step"):
        train(base, longer, tmp_path / "run", **settings, on_step=KillAfter(3))
    run = ps.open_run(tmp_path / "run").resume(progress=False, on_step=KillAfter(99))
    assert losses(run.metrics) == losses(whole.metrics)
    one, other = ps.load_model(run.path), ps.load_model(whole.path)
    assert one.lora == other.lora
    assert one.lora.rank_pattern == {"query": 3}
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_a_tokenizer_that_is_not_the_old_one_plus_entries_is_refused(base, longer, tmp_path):
    other = tiny_tokenizer(tmp_path / "tokenizer", make_texts(50, 7), 400)
    prepare_here(iter(make_texts(40)), other, tmp_path / "other")
    for kind in ("run", "folder", "hf", "object"):
        with pytest.raises(ConfigError, match=r"prepared.*tokenizer.*model's"):
            train(named(base, kind), tmp_path / "other", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    # Nor the other way round: what was trained with the longer one on data of the shorter.
    grown = train(base, longer, tmp_path / "grown", steps=1, warmup_steps=1)
    short = ps.write_dataset(
        tmp_path / "short", [[5, 6, 7]] * 20, tokenizer=ps.load_tokenizer(base / "tokenizer")
    )
    with pytest.raises(ConfigError, match=r"it has \d+ ids, fewer than"):
        train(grown.path, short.path, tmp_path / "run")


@pytest.mark.parametrize("section", ["normalizer", "pre_tokenizer", "model"])
def test_other_sections_of_the_tokenizer_must_be_the_same(base, data, tmp_path, section):
    longer = add_tokens(data / "tokenizer", ["[new]"], output=tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    if section == "model":
        content["model"]["merges"].append(content["model"]["merges"].pop(0))
    else:
        bytes_alone = {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        }
        content[section] = {"normalizer": {"type": "NFC"}, "pre_tokenizer": bytes_alone}[section]
    path.write_text(json.dumps(content))
    tokenizer = ps.load_tokenizer(tmp_path / "tokenizer")
    assert tokenizer.vocab_size == longer.vocab_size
    ps.write_dataset(tmp_path / "data", [[5, 6, 7]] * 20, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match=rf"section {section}.*tokenizer.json"):
        train(base, tmp_path / "data", tmp_path / "run")


def test_rows_that_are_there_already_keep_their_values(base, longer, tmp_path, capsys):
    """A model whose matrices have more rows than its tokenizer has ids."""
    inner = transformers.AutoModelForCausalLM.from_pretrained(base.parent / "folder")
    size = len(inner.get_input_embeddings().weight)
    inner.resize_token_embeddings(size + 8)
    inner.save_pretrained(tmp_path / "room")
    for path in (base.parent / "folder").glob("tokenizer*"):
        (tmp_path / "room" / path.name).write_bytes(path.read_bytes())
    model = ps.load_model(tmp_path / "room")
    before = embedding(model).clone()
    run = train(model, longer, tmp_path / "run", lora={"rank": 2}, progress=True)
    said = capsys.readouterr().err
    assert (
        f"has ids {size} to {size + 1} that the model {tmp_path / 'room'} was not trained with"
        in said
    )
    assert "are frozen in the embedding" in said
    assert torch.equal(embedding(ps.load_model(run.path)), before)
    tuned = train(tmp_path / "room", longer, tmp_path / "new", lora=NEW)
    moved = (embedding(ps.load_model(tuned.path)) != before).any(1)
    assert moved.nonzero().flatten().tolist() == [size, size + 1]


def test_new_needs_new_entries(base, data, tmp_path):
    with pytest.raises(ConfigError, match="train_embeddings"):
        start(data, tmp_path / "run", model=base, lora=NEW)


RATES = [
    ({}, 2e-5, "the default for a pretrained model\n"),
    ({"lora": {"rank": 2}}, 2e-4, "the default for a pretrained model with LoRA"),
    ({"learning_rate": 1e-3}, 1e-3, None),
]


@pytest.mark.parametrize(("settings", "rate", "message"), RATES)
def test_a_pretrained_model_has_a_rate_fit_for_tuning(
    base, data, tmp_path, capsys, settings, rate, message
):
    given = {**SETTINGS, "steps": 1, "warmup_steps": 0, "progress": True}
    del given["learning_rate"]
    for number, kind in enumerate(("run", "object", "hf")):
        rows = loader(data / "data" / "train")
        run = ps.train(named(base, kind), rows, output=tmp_path / f"{number}", **given, **settings)
        assert run.metrics[0]["learning_rate"] == rate
        said = capsys.readouterr().err
        assert (
            f"learning_rate {rate:g}: {message}" in said if message else "learning_rate" not in said
        )
        kept = yaml.safe_load((run.path / "run.yaml").read_text())
        assert kept["training"]["optimizer"]["learning_rate"] == rate


def test_a_new_model_keeps_its_rate_when_it_goes_on(data, tmp_path, capsys):
    given = {**SETTINGS, "warmup_steps": 0, "steps": 2, "progress": True}
    del given["learning_rate"]
    run = ps.train(
        make_model(data), loader(data / "data" / "train"), output=tmp_path / "run", **given
    )
    assert (
        "learning_rate 0.003: the default for a model with new weights" in capsys.readouterr().err
    )
    again = ps.open_run(run.path).resume(steps=4, progress=False)
    assert again.metrics[-1]["learning_rate"] == 3e-3, "not that of a pretrained model"
    assert "learning_rate: 0.003" in (run.path / "run.yaml").read_text()


def test_whole_answers_need_smaller_steps():
    for more in ({"preference": PreferenceSettings()}, {"policy": PolicySettings()}):
        assert TrainSettings(**more).default_rate(pretrained=True) == 1e-6
        assert TrainSettings(**more, lora=LoraSettings()).default_rate(pretrained=True) == 1e-5
        assert TrainSettings(**more).default_rate(pretrained=False) == 3e-3
