"""Batches of the collator with images: the processor's own, array for array, with the weights of
`prepare`.
"""

import json

import numpy as np
import pytest
import torch

from makers.image_data import model_folder, prepare
from makers.media import FAMILIES, chat, interleaved, picture, processor
from penstock.core.errors import ConfigError, RecordError
from penstock.integrations.huggingface.vision_collator import VisionCollator
from penstock.media.images import ImageSettings

ALONE = "llama3_2_vision"
"""Its mask of text over images depends on the whole batch, so its processor makes its batches
itself.
"""
EXAMPLES = [
    chat([picture(84, 112)], "What is it?", "A thing."),
    chat([], "Only text?", "Yes."),
    interleaved([picture(60, 200), picture(150, 66), picture(112, 112)]),
]


@pytest.fixture
def made():
    def of(family, side="right"):
        found = processor(family)
        found.tokenizer.padding_side = side
        return found

    yield of
    for family in FAMILIES:
        processor(family).tokenizer.padding_side = "right"


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # transformers, with GLM-4V
@pytest.mark.parametrize("family", FAMILIES)
def test_batches_are_those_of_the_processor(made, family):
    side = "left" if FAMILIES.index(family) % 2 else "right"
    inner = made(family, side)
    collate = VisionCollator(inner, on_missing_terminator="allow")
    assert (collate._images is None) == (family == ALONE)
    batch = collate(EXAMPLES)
    texts = [inner.apply_chat_template(one, tokenize=False) for one in EXAMPLES]
    pictures = [
        [part["image"] for turn in one for part in turn["content"] if "image" in part]
        for one in EXAMPLES
    ]
    flat = [image for one in pictures for image in one]
    nested = family in ("smolvlm2", "idefics3", "gemma3", "gemma3n", "gemma4", "lfm2_vl", ALONE)
    given = inner(
        text=texts,
        images=pictures if nested else flat,
        padding=True,
        add_special_tokens=False,
        return_tensors="pt",
    )
    assert set(given) <= set(batch)
    for name, expected in given.items():
        found = batch[name]
        assert torch.equal(found, expected.to(found.dtype)), name
    answers = [inner.tokenizer.decode(row[row != -100].tolist()) for row in batch["labels"]]
    assert [
        text.startswith(answer)
        for text, answer in zip(answers, ("A thing.", "Yes.", "Yes."), strict=True)
    ]
    assert not batch["loss_weights"][batch["attention_mask"] == 0].any()


def test_weights_are_those_of_prepare(made, tmp_path):
    family = "qwen2_vl"
    folder = model_folder(tmp_path, family)
    for number, one in enumerate(EXAMPLES[:2]):
        for part in one[0]["content"]:
            if "image" in part:
                part["image"].save(tmp_path / f"{number}.png")
    records = [
        {
            "messages": [
                {"role": "user", "content": "<image>\nWhat?"},
                {"role": "assistant", "content": "A thing."},
            ],
            "images": ["0.png"],
        },
        {
            "messages": [
                {"role": "user", "content": "Only text?"},
                {"role": "assistant", "content": "Yes."},
            ]
        },
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    data = prepare(tmp_path / "chats.jsonl", folder, tmp_path / "data", train_on_eos="none")
    settings = ImageSettings(image_folder=str(tmp_path))
    collate = VisionCollator(
        made(family), image_settings=settings, train_on_eos="none", on_missing_terminator="allow"
    )
    batch = collate(records)
    for row, document in enumerate(data):
        real = batch["attention_mask"][row] == 1
        assert batch["input_ids"][row][real].tolist() == document.tokens.tolist()
        assert batch["loss_weights"][row][real].tolist() == document.loss_weights.tolist()


def test_settings_of_images_apply(made, tmp_path):
    wide = [chat([picture(20, 300)])]
    with pytest.raises(RecordError, match=r"row 0 of the batch: message 0: .*300x20"):
        VisionCollator(
            made("llava"), image_settings=ImageSettings(max_ratio=10), on_missing_terminator="allow"
        )(wide)
    with pytest.raises(ConfigError, match=r"image_settings: .*depends"):
        VisionCollator(made(ALONE), image_settings=ImageSettings())
    upright = picture(60, 200)
    exif = upright.getexif()
    exif[0x0112] = 6
    upright.save(tmp_path / "turned.jpg", exif=exif.tobytes(), quality=95)
    turned = VisionCollator(made("qwen2_vl"), on_missing_terminator="allow")
    grid = turned([chat([str(tmp_path / "turned.jpg")])])["image_grid_thw"][0]
    assert int(grid[1]) > int(grid[2])


def test_models_read_the_batches(made):
    from makers.media import model

    batch = VisionCollator(made("qwen2_vl"), on_missing_terminator="allow")(EXAMPLES)
    del batch["loss_weights"]
    loss = model("qwen2_vl")(**batch).loss
    assert np.isfinite(float(loss.detach()))
