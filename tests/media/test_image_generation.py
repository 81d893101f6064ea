"""Prompts with images: the engine writes what transformers' own forward over the whole text gives."""

import base64
import io

import numpy as np
import pytest
import torch

import penstock as ps
from makers.image_data import model_folder
from makers.media import MODELS, model, picture, processor
from penstock.core.errors import ConfigError, ConversationError, RecordError
from penstock.generation import ChatSession, Engine, Sampling
from penstock.generation.images import ImageReader
from penstock.generation.session import fit_chat
from penstock.media.processor import load_processor
from penstock.models.cache import Cache
from penstock.models.huggingface_model import HuggingFaceModel

READING = [family for family in MODELS if family != "llama3_2_vision"]
WITHOUT_CACHE = {"gemma3", "gemma4", "llama4", "lfm2_vl"}
GREEDY = Sampling(temperature=0, max_tokens=5)


def as_url(image):
    out = io.BytesIO()
    image.save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def asked(*parts):
    """A message of the user: texts, and pictures as data URLs, as clients of a server send them."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": as_url(part)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


def said(text):
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


A, B, C = picture(84, 112, 1), picture(60, 200, 2), picture(112, 112, 3)
CONVERSATIONS = [
    [asked(A, "What is it?"), said("Yes."), asked("And here: ", B, " or ", C, "?")],
    [asked(A, "What is it?"), said("Yes."), asked("No.")],
    [asked(B, "What is it?"), said("Yes."), asked("No.")],
    [asked("Only text.")],
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Family → model, tokenizer, template, reader."""
    home, made = tmp_path_factory.mktemp("models"), {}

    def of(family):
        if family not in made:
            folder = model_folder(home / family, family)
            tokenizer = ps.load_tokenizer(folder)
            template = ps.chat.load_template(folder, tokenizer=tokenizer)
            made[family] = model(family), tokenizer, template, ImageReader(load_processor(folder))
        return made[family]

    return of


def pictures_of(messages):
    """The conversation as transformers takes it, and its pictures."""
    found, turned = [], []
    for message in messages:
        parts = []
        for part in message["content"]:
            if part["type"] == "text":
                parts.append(part)
                continue
            data = part["image_url"]["url"].partition(",")[2]
            from PIL import Image

            found.append(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))
            parts.append({"type": "image"})
        turned.append({**message, "content": parts})
    return turned, found


def written_by_transformers(family, inner, messages, count):
    """The most likely tokens, by a forward of the whole text for each."""
    whole = processor(family)
    messages, images = pictures_of(messages)
    text = whole.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    nested = [images] if images and family in ("smolvlm2", "idefics3") else images
    given = whole(text=[text], images=nested or None, add_special_tokens=False, return_tensors="pt")
    given = {name: value for name, value in given.items() if name != "attention_mask"}
    given = {name: v.float() if v.is_floating_point() else v for name, v in given.items()}
    slots = {name: given.pop(name) for name in ("mm_token_type_ids", "token_type_ids") if name in given}
    tokens = []
    for _ in range(count):
        logits = inner(**given, **slots, use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
        given["input_ids"] = torch.cat([given["input_ids"], torch.tensor([[tokens[-1]]])], 1)
        slots = {name: torch.nn.functional.pad(value, (0, 1)) for name, value in slots.items()}
    return tokens


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # transformers, with GLM-4V
@pytest.mark.parametrize("family", READING)
def test_the_engine_writes_what_transformers_does(opened, family):
    inner, tokenizer, template, reader = opened(family)
    with torch.inference_mode():
        expected = [written_by_transformers(family, model(family), one, 5) for one in CONVERSATIONS]
    engine = Engine(
        HuggingFaceModel(inner), tokenizer, context_length=2048, forbidden_ids=(), slots=3, prompt_part=40,
        images=reader.blank,
    )  # fmt: skip
    assert isinstance(engine._cache, Cache) == (family not in WITHOUT_CACHE)
    prompts = [fit_chat(one, template, tokenizer, room=2000, images=reader) for one in CONVERSATIONS]
    written = engine.generate_all([one.ids for one in prompts], GREEDY, images=[one.images for one in prompts])
    assert [list(one.tokens) for one in written] == expected
    # Again, with slots that hold beginnings of these prompts.
    again = engine.generate_all([one.ids for one in prompts], GREEDY, images=[one.images for one in prompts])
    assert [list(one.tokens) for one in again] == expected
