"""Prompts with images: the engine writes what transformers' own forward over the whole text
gives.
"""

import base64
import io

import numpy as np
import pytest
import torch

import penstock as ps
from makers.image_data import model_folder
from makers.media import MODELS, model, picture, processor
from penstock.core.errors import ConfigError, ConversationError, RecordError
from penstock.learn.generation import ChatSession, Engine, Sampling
from penstock.learn.generation.images import ImageReader
from penstock.learn.generation.session import fit_chat
from penstock.media.processor import load_processor
from penstock.models.cache import Cache
from penstock.models.theirs.model import HuggingFaceModel

WITHOUT_CACHE = {"gemma3", "gemma4", "llama4", "lfm2_vl", "llama3_2_vision"}
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
    [asked(picture(84, 112, 9), "What is it?"), said("Yes."), asked("No.")],
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
            made[family] = (
                HuggingFaceModel(model(family)),
                tokenizer,
                template,
                ImageReader(load_processor(folder)),
            )
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
    nested = (
        [images] if images and family in ("smolvlm2", "idefics3", "llama3_2_vision") else images
    )
    given = whole(text=[text], images=nested or None, add_special_tokens=False, return_tensors="pt")
    given = {name: value for name, value in given.items() if name != "attention_mask"}
    given = {name: v.float() if v.is_floating_point() else v for name, v in given.items()}
    slots = {
        name: given.pop(name) for name in ("mm_token_type_ids", "token_type_ids") if name in given
    }
    tokens = []
    for _ in range(count):
        logits = inner(**given, **slots, use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
        given["input_ids"] = torch.cat([given["input_ids"], torch.tensor([[tokens[-1]]])], 1)
        slots = {name: torch.nn.functional.pad(value, (0, 1)) for name, value in slots.items()}
        if (seen := given.get("cross_attention_mask")) is not None:
            given["cross_attention_mask"] = torch.cat([seen, seen[:, -1:]], 1)
    return tokens


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # transformers, with GLM-4V
@pytest.mark.parametrize("family", MODELS)
def test_the_engine_writes_what_transformers_does(opened, family):
    inner, tokenizer, template, reader = opened(family)
    with torch.inference_mode():
        expected = [written_by_transformers(family, model(family), one, 5) for one in CONVERSATIONS]
    engine = Engine(
        inner, tokenizer, context_length=2048, forbidden_ids=(), slots=3, prompt_part=40,
        images=reader.blank,
    )  # fmt: skip
    assert isinstance(engine._cache, Cache) == (family not in WITHOUT_CACHE)
    prompts = [
        fit_chat(one, template, tokenizer, room=2000, images=reader) for one in CONVERSATIONS
    ]
    written = engine.generate_all(
        [one.ids for one in prompts], GREEDY, images=[one.images for one in prompts]
    )
    assert [list(one.tokens) for one in written] == expected
    # Again, with slots that hold beginnings of these prompts.
    again = engine.generate_all(
        [one.ids for one in prompts], GREEDY, images=[one.images for one in prompts]
    )
    assert [list(one.tokens) for one in again] == expected


def test_files_are_read_only_where_that_is_allowed(opened, tmp_path):
    _, tokenizer, template, reader = opened("llava")
    inside, outside = tmp_path / "images", tmp_path / "else"
    inside.mkdir()
    outside.mkdir()
    for folder in (inside, outside):
        A.save(folder / "a.png")
    (inside / "link.png").symlink_to(outside / "a.png")
    (inside / "damaged.png").write_bytes((inside / "a.png").read_bytes()[:200])

    def prompt(url, folder):
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        return fit_chat(messages, template, tokenizer, room=500, images=reader.within(folder))

    whole = prompt(as_url(A), None)
    assert prompt("a.png", inside).ids == prompt(str(inside / "a.png"), inside).ids == whole.ids
    assert prompt(f"file://{outside / 'a.png'}", "").ids == whole.ids
    for url in (str(inside / "a.png"), "a.png", "https://example.com/a.png", "file:///etc/passwd"):
        with pytest.raises(RecordError, match="only images in data URLs"):
            prompt(url, None)
    for url in (
        "https://example.com/a.png",
        str(outside / "a.png"),
        "../else/a.png",
        "link.png",
        "/etc/passwd",
    ):
        with pytest.raises(RecordError, match="only images in data URLs"):
            prompt(url, inside)
    for url, message in (
        ("damaged.png", "damaged"),
        ("data:image/png;base64,AAAA", "not an image"),
    ):
        with pytest.raises(ConversationError, match=f"message 0: .*{message}"):
            prompt(url, inside)


def test_images_need_a_model_and_an_engine_that_read_them(opened, tmp_path):
    inner, tokenizer, template, reader = opened("llava")
    prompt = fit_chat(CONVERSATIONS[1], template, tokenizer, room=500, images=reader)
    with pytest.raises(ConfigError, match=r"Engine\(images=…\)"):
        Engine(inner, tokenizer, context_length=600).submit(prompt.ids, images=prompt.images)
    with pytest.raises(RecordError, match="are not supported here"):
        fit_chat(CONVERSATIONS[1], template, tokenizer, room=500)
    plain = ps.build_model(vocab_size=tokenizer.vocab_size, layers=1, width=16, heads=2)
    with pytest.raises(ConfigError, match="no vision tower"):
        Engine(plain, tokenizer, context_length=600, images=reader.blank)
    other = opened("internvl")[3]
    with pytest.raises(ConfigError, match="images stand at token"):
        Engine(HuggingFaceModel(model("llava")), tokenizer, context_length=600, images=other.blank)


def test_a_chat_drops_the_oldest_turns_with_their_images(opened):
    inner, tokenizer, template, reader = opened("qwen2_vl")
    engine = Engine(inner, tokenizer, context_length=160, images=reader.blank)
    session = ChatSession(
        engine, template, sampling=Sampling(max_tokens=8, min_tokens=4), images=reader
    )
    dropped = []
    for number in range(5):
        reply = session.reply(f"Number {number}?", [as_url(picture(84, 112, number))])
        "".join(reply)
        assert reply.prompt.images is not None
        slots = np.flatnonzero(np.array(reply.prompt.ids) == reader.processor.slot_id)
        assert slots.tolist() == np.concatenate(reply.prompt.images.slots).tolist()
        dropped.append(reply.prompt.messages_dropped)
    assert dropped[0] == 0
    assert dropped[-1] > 0


def test_a_text_is_not_lost_in_a_template_that_reads_parts(opened):
    _, tokenizer, _, reader = opened("llava")
    parts = "{% for part in message['content'] | selectattr('type', 'equalto', '@') %}"
    template = ps.chat.Template(
        source="{% for message in messages %}{{ message['role'] }}: "
        + parts.replace("@", "image") + "<image>{% endfor %}"
        + parts.replace("@", "text") + "{{ part['text'] }}</s>{% endfor %}{% endfor %}",
    )  # fmt: skip
    turns = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]
    encoded = ps.chat.encode(turns, tokenizer=tokenizer, template=template)
    assert encoded.text == "user: Hello?</s>assistant: Hello.</s>"
    assert encoded.trained_text == ((1, "Hello.</s>"),)
    messages = [asked(A, "What?"), said("Yes."), {"role": "user", "content": "Hello?"}]
    prompt = fit_chat(messages, template, tokenizer, room=500, images=reader)
    assert tokenizer.decode(prompt.ids).endswith("What?</s>assistant: Yes.</s>user: Hello?</s>")
