"""Our own vision tower and processor: images without transformers, packed, saved and refused where
they do not fit.
"""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

import penstock as ps
from makers.media import chat, picture
from makers.processes import call_penstock
from penstock.core.errors import ConfigError, ConversationError
from penstock.learn.generation.images import ImageReader
from penstock.learn.training.losses import row_loss
from penstock.media import PatchProcessor, load_processor
from penstock.media.images import read_picture
from penstock.media.prompts import PromptImages
from penstock.models.settings import ModelSettings, VisionSettings
from penstock.plan.inputs.prompt_images import document_of

CONTROLS = ["<|im_start|>", "<|im_end|>", "<image>"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tower")
    texts = ["What is in the picture? Yes. user assistant a thing"] * 5
    tokenizer = ps.train_tokenizer(
        texts, vocab_size=300, special_tokens=CONTROLS, output=folder / "tokenizer", progress=False
    )
    PatchProcessor(tokenizer, image_size=32, patch=8).save(folder / "processor")
    lines = []
    for number in range(12):
        names = [f"{number}_{place}.png" for place in range(number % 3)]
        for place, name in enumerate(names):
            picture(30 + number, 50, seed=place).save(folder / name)
        lines.append(
            json.dumps(
                {"messages": chat(names, f"What is {number}?", "a thing " * (1 + number % 4))}
            )
        )
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    ps.prepare(
        folder / "chats.jsonl",
        tokenizer=folder / "processor",
        processor=folder / "processor",
        template="auto",
        output=folder / "data",
        verify_all=True,
        progress=False,
    )
    return folder


def model_of(home, **vision):
    token = load_processor(home / "processor").slot_id
    settings = {
        "image_token": token,
        "image_size": 32,
        "patch": 8,
        "layers": 2,
        "width": 32,
        "heads": 2,
        **vision,
    }
    return ps.build_model(
        vocab_size=300, layers=2, width=32, heads=2, vision=settings, dtype="float64", init_std=0.3
    )


def rows_of(home, model, **settings):
    settings = {"sequence_length": 256, "rows_per_step": 1, **settings}
    source = ps.Source(home / "data", max_epochs=1)
    loader = ps.Loader(source, requirements=model.requirements(), **settings)
    return [(step, row) for step in loader for row in step]


def test_the_processor_comes_back_and_refuses_what_does_not_fit(home):
    found = load_processor(home / "processor")
    dataset = ps.open_dataset(home / "data")
    assert found.fingerprint == dataset.media.fingerprint == dataset.processor.fingerprint
    assert (found.layout((10, 99)).slots, found.slots) == (16, 16)
    assert found.arrays(picture(10, 99))["pixel_values"].shape == (1, 16, 192)
    with pytest.raises(ConfigError, match="multiple of patch"):
        PatchProcessor(found.tokenizer, image_size=30, patch=8)
    with pytest.raises(ConfigError, match="no control token '<picture>'"):
        PatchProcessor(found.tokenizer, image_token="<picture>")


def test_patches_are_the_squares_of_the_picture(home):
    found = load_processor(home / "processor")
    image = picture(32, 32)
    values = found.arrays(image)["pixel_values"][0].reshape(4, 4, 3, 8, 8)
    whole = np.asarray(image, np.float32) / 127.5 - 1
    for row in range(4):
        for column in range(4):
            square = whole[8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
            np.testing.assert_allclose(values[row, column], square.transpose(2, 0, 1), atol=1e-6)


def test_packed_rows_equal_documents_alone(home):
    model = model_of(home)
    packed = {}
    for _, row in rows_of(home, model):
        assert row.num_documents > 1
        with torch.no_grad():
            logits = model.logits(model(model.tensors(row)))[0]
        for begin, end in zip(
            row.cu_seqlens[: row.num_documents], row.cu_seqlens[1:], strict=False
        ):
            packed[row.tokens[begin:end].tobytes()] = logits[begin:end]
    alone = rows_of(home, model, packing="none")
    assert len(packed) == len(alone) == 12
    for _, row in alone:
        with torch.no_grad():
            logits = model.logits(model(model.tensors(row)))[0][: row.num_tokens]
        torch.testing.assert_close(
            logits, packed[row.tokens[: row.num_tokens].tobytes()], atol=1e-12, rtol=0
        )


def test_images_are_seen_and_only_by_their_document(home):
    model = model_of(home)
    _, row = next((step, row) for step, row in rows_of(home, model) if len(row.media) > 1)
    with torch.no_grad():
        before = model(model.tensors(row))[0]
        row.media.arrays["pixel_values"][0] *= -1
        after = model(model.tensors(row))[0]
    changed = (before != after).any(1).numpy()
    begin, end = row.cu_seqlens[row.media.documents[0] :][:2]
    assert changed[row.media.slots[0] : end].any()
    assert not changed[:begin].any()
    assert not changed[end:].any()


def test_the_images_of_a_row_are_shown_on_one_line(home):
    _, row = next((step, row) for step, row in rows_of(home, model_of(home)) if len(row.media) > 1)
    count = len(row.media)
    shape = f"pixel_values float32[{count}, 16, 192]"
    assert (
        repr(row.media)
        == f"RowMedia({count} images in {16 * count} slots, {16 * count} patches; {shape})"
    )


def test_a_row_without_images_gives_the_tower_zeros_for_gradients(home):
    model = model_of(home)
    step, row = next(
        (step, row) for step, row in rows_of(home, model, packing="none") if not len(row.media)
    )
    row_loss(model, model.tensors(row), step.loss_denominators).loss.backward()
    assert all(one.grad is not None and not one.grad.any() for one in model.vision.parameters())
    assert all(one.grad is not None for one in model.parameters())


def test_a_model_is_saved_with_its_tower(home, tmp_path):
    model = model_of(home)
    ps.models.save_model(model, tmp_path / "m")
    again = ps.load_model(tmp_path / "m")
    assert again.settings == model.settings
    assert sum(one.numel() for one in model.parameters()) == model.settings.num_parameters()
    _, row = rows_of(home, model)[0]
    with torch.no_grad():
        torch.testing.assert_close(again(again.tensors(row)), model(model.tensors(row)))
    with pytest.raises(ConfigError, match="our vision tower has no layout"):
        ps.models.export(model, tmp_path / "e")


@pytest.mark.parametrize("wrong", [{"patch": 16}, {"image_size": 64}, {"image_token": 7}])
def test_images_for_another_tower_are_refused(home, wrong):
    model = model_of(home, **wrong)
    _, row = rows_of(home, model)[0]
    with pytest.raises(ConfigError, match=r"model\.vision.*processor.*data"):
        model(model.tensors(row))


def test_training_learns_and_refuses_what_would_lose_images(home, tmp_path):
    loader = ps.Loader(str(home / "data"), sequence_length=256, rows_per_step=2)
    settings = {"learning_rate": 5e-3, "progress": False}
    run = ps.train(model_of(home), loader, steps=30, output=tmp_path / "a", **settings)
    losses = [line["loss"] for line in run.metrics if "loss" in line]
    assert losses[-1] < losses[0] / 2
    loader = ps.Loader(str(home / "data"), sequence_length=256, rows_per_step=2)
    with pytest.raises(ConfigError, match="micro_sequences cut rows"):
        ps.train(
            model_of(home), loader, steps=1, output=tmp_path / "b", micro_sequences=2, **settings
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"image_token": -1},
        {"image_size": 30},
        {"width": 30},
        {"layers": 0},
        {"patch": 0},
        {"heads": 5},
    ],
)
def test_settings_out_of_range(wrong):
    with pytest.raises(ConfigError, match=r"model\.vision"):
        VisionSettings(
            **{"image_token": 1, "image_size": 32, "patch": 8, "width": 32, "heads": 2, **wrong}
        )


def test_settings_come_from_plain_values():
    vision = {"image_token": 1, "image_size": 32, "patch": 8}
    assert ModelSettings.of({"vocab_size": 9, "vision": vision}).vision == VisionSettings(**vision)


def test_a_trained_run_reads_images_in_chats(home, tmp_path):
    loader = ps.Loader(home / "data", sequence_length=128, rows_per_step=2)
    run = ps.train(model_of(home), loader, steps=2, output=tmp_path / "run", progress=False)
    assert (tmp_path / "run" / "processor").is_dir()
    run = ps.open_run(tmp_path / "run")
    image = home / "1_0.png"
    message = {
        "role": "user",
        "content": [{"type": "image", "image": str(image)}, {"type": "text", "text": "What?"}],
    }
    first = run.chat([message], temperature=0, max_tokens=8)
    assert first == run.chat([message], temperature=0, max_tokens=8)
    arguments = [
        "chat",
        str(tmp_path / "run"),
        "--image",
        str(image),
        "--temperature",
        "0",
        "--max-tokens",
        "8",
    ]
    found = call_penstock(*arguments, input="What?\n")
    assert found.exit_code == 0, found.output
    assert found.stdout.rstrip("\n") == first
    text = {"role": "user", "content": "What?"}
    assert run.chat([text], temperature=0, max_tokens=8)
    with pytest.raises(ConversationError, match="cannot be read"):
        run.chat([{"role": "user", "content": [{"type": "image", "image": "nothing.png"}]}])


def test_a_cache_gives_what_the_whole_gives(home):
    model = model_of(home)
    reader = ImageReader(load_processor(home / "processor"))
    dataset = ps.open_dataset(home / "data")
    document = next(one for one in dataset if len(one.images) > 1)
    ids = document.tokens.astype(int).tolist()
    images = PromptImages.of(
        reader.processor, ids, [(one.begin, one.end) for one in document.images],
        [read_picture(one.read(), reader.settings) for one in document.images],
        [one.digest for one in document.images],
    )  # fmt: skip
    with torch.no_grad():
        whole = model.logits(model(model.tensors(document_of(images, ids))))[0]
    for cuts in ([0, len(ids)], [0, images.ends[1], images.ends[1] + 1, len(ids)]):
        cache = model.new_cache(2, len(ids))
        for begin, end in pairwise(cuts):
            # Next to a row of text only, in a batch.
            tokens = torch.tensor([ids[begin:end], [0] * (end - begin)])
            found = model.extend(
                tokens, torch.tensor([end - begin, 1]), cache, None, [images, None]
            )
            assert torch.allclose(found[0], whole[end - 1], atol=1e-9)


def test_features_of_a_frozen_tower_are_kept(home, tmp_path):
    model = model_of(home)
    rows = rows_of(home, model)
    with torch.no_grad():
        due = [model(model.tensors(row)) for _, row in rows]
    for weight in model.vision.parameters():
        weight.requires_grad_(False)
    model.cache_features(tmp_path, rows[0][1].media.blank)
    for _ in range(2):
        for (_, row), expected in zip(rows, due, strict=True):
            assert torch.allclose(model(model.tensors(row)), expected, atol=1e-12)
    assert model.vision.cache.hits >= sum(len(row.media) > 0 for _, row in rows)
    reloaded = model_of(home)
    with pytest.raises(ConfigError, match="features of images depend on"):
        reloaded.cache_features(tmp_path, rows[0][1].media.blank)
