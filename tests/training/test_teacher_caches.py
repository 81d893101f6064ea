"""A run that learns from a cache: as from the teacher itself, which it no longer needs."""

import json
import shutil

import pytest
from training_makers import losses, make, make_teacher, train, values, write_run_file

from makers.datasets import prepare_here
from makers.processes import call_penstock
from makers.texts import make_texts
from penstock import load_tokenizer
from penstock.core.errors import ConfigError, CorruptionError, FormatError, OutputError
from penstock.use.cli.distill import app

pytestmark = pytest.mark.usefixtures("plain_torch")

STEPS = "training.steps=6"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Of the same sentences in another vocabulary."""
    return make_teacher(tmp_path_factory.mktemp("teacher"), 10)


@pytest.fixture(scope="module")
def same(data, tmp_path_factory):
    """With the student's tokenizer."""
    folder = tmp_path_factory.mktemp("same") / "teacher"
    train(data, folder, "training.steps=4")
    return folder


def cache(data, output, *arguments):
    """Call `penstock distill cache` as the command line does."""
    words = (
        "cache",
        data / "run.yaml",
        "--output",
        output,
        "--device",
        "cpu",
        "--json",
        *arguments,
    )
    return json.loads(call_penstock(*words, app=app).stdout)


def section(where, **loss):
    return f"teacher={json.dumps({'teachers': [{**where, 'loss': loss}]})}"


@pytest.mark.parametrize(
    "loss",
    [
        {"kind": "p_kl", "top_k": 8, "temperature": 2.0},
        {"kind": "p_kl", "top_k": 8, "forward_share": 0.4},
        {"kind": "alm"},
    ],
)
def test_as_from_the_teacher_itself(data, tmp_path, teacher, loss):
    told = section({"model": str(teacher)}, **loss)
    said = cache(data, tmp_path / "cache", "--set", told, "--precision", "float32")
    assert said["tokens"] > 1000
    assert said["top_k"] == loss.get("top_k", 64)
    live = train(data, tmp_path / "live", told, STEPS)
    kept = section({"cache": str(tmp_path / "cache")}, **loss)
    found = train(data, tmp_path / "cached", kept, STEPS)
    for name in ("loss", "distillation", "gradient_norm"):
        assert values(found, name) == pytest.approx(values(live, name), rel=1e-4)
    # Neither the teacher nor the same ranks are needed to go on, to the last bit.
    train(data, tmp_path / "broken", kept, STEPS, until=3)
    assert losses(train(data, tmp_path / "broken", kept, STEPS, resume=True)) == losses(found)


def test_half_precision_is_near(data, tmp_path, teacher):
    loss = {"kind": "p_kl", "top_k": 8}
    cache(data, tmp_path / "cache", "--teacher", teacher, "--top-k", 8)
    live = train(data, tmp_path / "live", section({"model": str(teacher)}, **loss), STEPS)
    found = train(
        data, tmp_path / "cached", section({"cache": str(tmp_path / "cache")}, **loss), STEPS
    )
    assert values(found, "distillation") == pytest.approx(values(live, "distillation"), rel=1e-2)


def test_a_cached_run_file_makes_its_own_cache(data, tmp_path, teacher):
    """The file that trains with the cache also says how the teacher reads."""
    told = section({"cache": str(tmp_path / "cache"), "max_tokens": 20}, kind="p_kl", top_k=4)
    with pytest.raises(ConfigError, match=r"teacher\.teachers\.0.*teacher"):
        cache(data, tmp_path / "cache", "--set", told)
    assert cache(data, tmp_path / "cache", "--set", told, "--teacher", teacher)["top_k"] == 4
    assert len(train(data, tmp_path / "run", told, STEPS)) >= 6
    # What is left out is as the cache was made.
    same = section({"cache": str(tmp_path / "cache")}, kind="p_kl", top_k=4)
    assert losses(train(data, tmp_path / "same", same, STEPS)) == losses(
        train(data, tmp_path / "run", told, STEPS, resume=True)
    )
    wider = section({"cache": str(tmp_path / "cache"), "max_tokens": 30}, kind="p_kl", top_k=4)
    with pytest.raises(ConfigError, match=r"teacher.*read.*tokens.*cache"):
        train(data, tmp_path / "other", wider, STEPS)


def test_texts_begin_as_the_teacher_was_trained(data, tmp_path, teacher):
    """Whatever its tokenizer does: its run knows, and its cache."""
    tokenizer = load_tokenizer(teacher / "tokenizer")
    for begins in ("yes", "no"):
        folder = tmp_path / begins
        texts = iter(make_texts(40))
        prepare_here(texts, tokenizer, folder / "data" / "train", add_bos=begins)
        train(write_run_file(folder), folder / "teacher", "training.steps=4")
        told = section({"model": str(folder / "teacher")}, kind="p_kl", top_k=4)
        cache(data, folder / "cache", "--set", told)
        kept = section({"cache": str(folder / "cache")}, kind="p_kl", top_k=4)
        for name, one in (("live", told), ("cached", kept)):
            step = next(iter(make(data, folder / name, one).loader))
            first = step[0].distillation[0].input.tokens[0]
            assert (first == tokenizer.bos_id) == (begins == "yes")
        assert train(data, folder / "run", kept, "training.steps=4")


def test_refusals(data, tmp_path, teacher):
    with pytest.raises(ConfigError, match=r"0.*number 0.*teacher"):
        cache(data, tmp_path / "cache")
    for kind, message in (
        ("p_kl", r"loss p_kl uses all tokens.* set loss\.top_k"),
        ("uld", "uld needs full distributions"),
    ):
        with pytest.raises(ConfigError, match=message):
            cache(data, tmp_path / "cache", "--set", section({"model": str(teacher)}, kind=kind))
    told = section({"model": str(teacher)}, kind="p_kl", top_k=4)
    with pytest.raises(ConfigError, match="there is no number -1"):
        cache(data, tmp_path / "cache", "--set", told, "--number=-1")
    with pytest.raises(ConfigError, match="top_k must be at least 1, got 0"):
        cache(data, tmp_path / "cache", "--set", told, "--top-k", 0)
    said = cache(data, tmp_path / "cache", "--teacher", teacher, "--top-k", 3)
    assert said["top_k"] == 3
    # In another place it is the same cache; without its manifest it is none.
    moved = shutil.move(tmp_path / "cache", tmp_path / "moved")
    with pytest.raises(ConfigError, match="holds the 3 likeliest tokens"):
        train(data, tmp_path / "run", section({"cache": str(moved)}, kind="p_kl", top_k=4), STEPS)
    (moved / "cache.json").unlink()
    with pytest.raises(FormatError, match="not a teacher's cache"):
        train(data, tmp_path / "run", section({"cache": str(moved)}, kind="p_kl", top_k=3), STEPS)


def sources_of(*sources):
    return f"data.sources={json.dumps(sources)}"


def test_objectives_that_rewrite_documents_are_cached_for_one_epoch(data, tmp_path, same):
    """In the next epoch the documents are others."""
    tokens = [f"<extra_id_{number}>" for number in range(3)]
    objective = {"kind": "infill", "tokens": tokens, "rate": 1.0}
    source = {"path": str(data / "data" / "train"), "objective": objective}
    told = section({"model": str(same)}, kind="kl", top_k=4)
    kept = section({"cache": str(tmp_path / "cache")}, kind="kl", top_k=4)
    refused = r"source '.*': its objective, infill, rewrites .* max_epochs to 1"
    with pytest.raises(ConfigError, match=refused):
        cache(data, tmp_path / "cache", "--set", told, "--set", sources_of(source))
    once = sources_of({**source, "max_epochs": 1})
    cache(data, tmp_path / "cache", "--set", told, "--set", once)
    assert train(data, tmp_path / "once", kept, once, STEPS)
    with pytest.raises(ConfigError, match=refused):
        train(data, tmp_path / "run", kept, sources_of(source), STEPS)


def test_sources_that_come_and_go_are_cached_whole(data, tmp_path, teacher):
    sources = sources_of(
        {"path": str(data / "data" / "train"), "name": "a"},
        {"path": str(data / "data" / "validation"), "name": "b", "share": 0},
    )
    changes = f"data.changes={json.dumps([{'step': 2, 'shares': {'a': 0, 'b': 1}}])}"
    words = [word for one in (sources, changes) for word in ("--set", one)]
    cache(data, tmp_path / "cache", "--teacher", teacher, "--top-k", 4, *words)
    kept = section({"cache": str(tmp_path / "cache")}, kind="p_kl", top_k=4)
    # Three times through the smaller source, and the larger one from its first step on.
    train(data, tmp_path / "run", kept, sources, changes, "training.steps=20")
    train(data, tmp_path / "first", kept, "training.steps=20")


def test_a_teacher_that_was_trained_by_diffusion_is_refused(data, tmp_path):
    source = sources_of(
        {
            "path": str(data / "data" / "train"),
            "objective": {"kind": "masked_diffusion", "mask_token": "[NLU]"},
        }
    )
    train(data, tmp_path / "teacher", source, "training.steps=4")
    told = section({"model": str(tmp_path / "teacher")}, kind="kl", top_k=4)
    with pytest.raises(ConfigError, match="a teacher: the model was trained by diffusion"):
        cache(data, tmp_path / "cache", "--set", told)
    with pytest.raises(ConfigError, match="a teacher: the model was trained by diffusion"):
        train(data, tmp_path / "run", told, STEPS)


def test_a_teacher_that_went_on_is_another_one(data, tmp_path, teacher):
    """Neither does its cache take it, nor is a run resumed with it without a word."""
    mine = shutil.copytree(teacher, tmp_path / "teacher")
    told = section({"model": str(mine)}, kind="p_kl", top_k=4)
    cache(data, tmp_path / "cache", "--set", told)
    train(data, tmp_path / "run", told, STEPS, until=3)
    train(teacher.parent, mine, "training.steps=12", resume=True)
    with pytest.raises(OutputError, match=r"cache.*settings.*weights"):
        cache(data, tmp_path / "cache", "--set", told)
    said = []
    make(data, tmp_path / "run", told, STEPS, resume=True, say=said.append)
    assert "resumed with another teacher: the model of teacher.teachers.0 changed" in said


def test_a_finished_cache_is_looked_at_before_it_is_called_complete(data, tmp_path, teacher):
    cache(data, tmp_path / "cache", "--teacher", teacher, "--top-k", 3)
    assert cache(data, tmp_path / "cache", "--teacher", teacher, "--top-k", 3)["top_k"] == 3
    part = tmp_path / "cache" / "part-00000.bin"
    part.write_bytes(part.read_bytes()[:-8])
    with pytest.raises(CorruptionError, match=r"part-00000\.bin"):
        cache(data, tmp_path / "cache", "--teacher", teacher, "--top-k", 3)
