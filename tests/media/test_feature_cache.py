"""Features of a frozen tower, kept in a folder: the same logits, each image once, errors where they
would be wrong.
"""

import numpy as np
import pytest
import torch

import penstock as ps
from makers.image_data import model_folder, prepare, write_records
from makers.media import MODELS, model
from penstock.core.errors import ConfigError, CorruptionError
from penstock.models.theirs.model import HuggingFaceModel

WITHOUT = ("llama3_2_vision", "llama4")
"""Their forward projects what the tower gives, or attends to it in other layers."""
FAMILIES = [family for family in MODELS if family not in WITHOUT]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    return folder, write_records(folder / "raw", 12)


def rows_of(home, family, wrapped):
    folder, source = home
    if not (folder / family / "data").exists():
        prepare(source, model_folder(folder / family, family), folder / family / "data")
    loader = ps.Loader(
        ps.Source(folder / family / "data", max_epochs=1), sequence_length=512, rows_per_step=1,
        requirements=wrapped.requirements(),
    )  # fmt: skip
    return loader, [step[0] for step in loader]


def freeze(wrapped):
    inner = wrapped.inner
    text = {id(weight) for weight in inner.get_decoder().parameters()}
    for weight in inner.parameters():
        weight.requires_grad_(id(weight) in text)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_tower(home, family, tmp_path):
    wrapped = HuggingFaceModel(model(family))
    loader, rows = rows_of(home, family, wrapped)
    with torch.no_grad():
        due = [wrapped.logits(wrapped(wrapped.tensors(row)))[0] for row in rows]
    freeze(wrapped)
    wrapped.cache_features(tmp_path / "features", loader.blank_image)
    cache = wrapped.images.features.cache
    for turn in range(2):
        for row, expected in zip(rows, due, strict=True):
            found = wrapped.logits(wrapped(wrapped.tensors(row)))[0].detach()
            gap = (found - expected)[: row.num_tokens].abs().max() / expected.std()
            assert gap < 2e-5, (turn, float(gap))
    pictured = sum(len(row.media) > 0 for row in rows)
    assert cache.misses <= pictured
    assert cache.hits >= pictured
    # In another process: the same weights have the same folder.
    again = HuggingFaceModel(model(family))
    freeze(again)
    again.cache_features(tmp_path / "features", loader.blank_image)
    row = next(row for row in rows if len(row.media))
    again(again.tensors(row))
    assert (again.images.features.cache.hits, again.images.features.cache.misses) == (1, 0)
    # Other weights have another.
    next(iter(again.images.features.cache._weights.values())).data.add_(1.0)
    again.cache_features(tmp_path / "features", loader.blank_image)
    again(again.tensors(row))
    assert (again.images.features.cache.hits, again.images.features.cache.misses) == (0, 1)


def test_what_is_trained_has_no_kept_features(home, tmp_path):
    wrapped = HuggingFaceModel(model("qwen2_vl"))
    loader, _ = rows_of(home, "qwen2_vl", wrapped)
    with pytest.raises(ConfigError, match=r"model\.visual\..*freeze"):
        wrapped.cache_features(tmp_path, loader.blank_image)
    plain = ps.build_model(vocab_size=300, layers=1, width=16, heads=2)
    with pytest.raises(ConfigError, match="no vision tower"):
        plain.cache_features(tmp_path, loader.blank_image)


@pytest.mark.parametrize("family", WITHOUT)
def test_models_that_take_no_features_are_refused(home, family, tmp_path):
    wrapped = HuggingFaceModel(model(family))
    loader, _ = rows_of(home, family, wrapped)
    with pytest.raises(ConfigError, match=r"features.*images"):
        wrapped.cache_features(tmp_path, loader.blank_image)


def test_a_damaged_file_is_named(home, tmp_path):
    wrapped = HuggingFaceModel(model("llava"))
    loader, rows = rows_of(home, "llava", wrapped)
    freeze(wrapped)
    wrapped.cache_features(tmp_path, loader.blank_image)
    row = next(row for row in rows if len(row.media))
    wrapped(wrapped.tensors(row))
    for path in tmp_path.rglob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    with pytest.raises(CorruptionError, match=r"\.safetensors: the features are damaged"):
        wrapped(wrapped.tensors(row))


def test_a_run_computes_each_image_once(home, tmp_path):
    folder, _ = home
    rows_of(home, "qwen2_vl", HuggingFaceModel(model("qwen2_vl")))
    model("qwen2_vl").save_pretrained(tmp_path / "model")
    data = folder / "qwen2_vl" / "data"
    losses = []
    for cache in (None, str(tmp_path / "features")):
        loader = ps.Loader(str(data), sequence_length=512, rows_per_step=2)
        run = ps.train(
            f"hf:{tmp_path / 'model'}",
            loader,
            steps=6,
            output=tmp_path / f"run{len(losses)}",
            progress=False,
            frozen=("*visual*",),
            feature_cache=cache,
            learning_rate=1e-3,
        )
        losses.append([line["loss"] for line in run.metrics if "loss" in line])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    kept = list((tmp_path / "features").rglob("*.safetensors"))
    assert (
        0
        < len(kept)
        <= len({image.digest for one in ps.open_dataset(data) for image in one.images})
    )
    text = ps.write_dataset(tmp_path / "text", [[1, 2, 3]] * 9)
    with pytest.raises(ConfigError, match=r"data have no images|stores its tokenizer"):
        ps.train(
            f"hf:{tmp_path / 'model'}",
            ps.Loader(text, sequence_length=64, rows_per_step=1),
            steps=1,
            output=tmp_path / "none",
            progress=False,
            frozen=("*visual*",),
            feature_cache=str(tmp_path / "features"),
        )
