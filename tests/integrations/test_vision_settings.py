"""The vision collator has the settings and the checks of the text path, and what it trains is what
`encode` trains.
"""

import re

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from vision_makers import TinyImages, TinyProcessor

import penstock.integrations.huggingface.vision_collator as module
from makers.tokenizers import tiny_tokenizer
from penstock.chat.encoder import encode
from penstock.chat.render.template import Template
from penstock.core.errors import ConfigError, ConversationError, RecordError
from penstock.integrations.huggingface.vision_collator import VisionCollator
from penstock.integrations.huggingface.vision_examples import media_ids, own_tokenizer

PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if "
    "part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% "
    "endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n" + PARTS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (  # as Qwen 3.5 writes and prompts
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and "
    "loop.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    + PARTS
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if "
    "enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' "
    "}}{% else %}{{ '<think>\n' }}{% endif %}{% endif %}{# <tool_call>\n<function= #}"
)
LLAVA = (  # LLaVA 1.5: no turn has an end
    "{% for m in messages %}{{ m.role.upper() + ': ' }}"
    + PARTS.replace("<|image_pad|>", "<image>\n")
    + "{{ ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
GLM = (  # GLM-4V: a turn ends where the next one begins
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n" + PARTS + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}{# <|begin_of_image|> #}"
)
CONTROLS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<image>",
    "<think>",
    "</think>",
    "<|user|>",
    "</s>",
    "<|assistant|>",
    "<|system|>",
    "<|observation|>",
    "<tool>",
    "[gMASK]",
    "<sop>",
    "<row>",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    texts = [
        "\n\n one\n two\n\n\n three",
        "assistant\n\n x",
        "user\n\n y",
        "tell me what it is",
        "USER: ASSISTANT: ",
    ] * 30
    path = tmp_path_factory.mktemp("vision")
    tiny_tokenizer(path, texts * 30, 380, CONTROLS)
    return path


@pytest.fixture
def make(folder):
    def made(template=CHATML, side="right", image_token="<|image_pad|>", kind=TinyProcessor):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            folder, pad_token="</s>", eos_token="</s>"
        )
        tokenizer.padding_side = side
        processor = kind(TinyImages(), tokenizer, chat_template=template)
        processor.image_token, processor.image_token_id = (
            image_token,
            tokenizer.convert_tokens_to_ids(image_token),
        )
        return processor

    return made


def picture(pixels):
    return {"type": "image", "image": np.ones((1, pixels))}


def said(role, *parts, **more):
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": role, "content": content, **more}


def trained(batch, processor):
    return [processor.tokenizer.decode(row[row != -100].tolist()) for row in batch["labels"]]


TALK = [
    said("system", "be nice"),
    said("user", picture(5), "what is it"),
    said("assistant", "a turbine"),
    said("user", "and ", picture(2), picture(3), " these"),
    said("assistant", "two old gates"),
]


@pytest.mark.parametrize("side", ["right", "left"])
def test_train_weight_and_ranges_of_messages_are_honoured(make, side):
    processor = make(side=side)
    collate = VisionCollator(processor, reads_loss_weights=True)
    plain = collate([TALK])
    assert trained(plain, processor) == ["a turbine<|im_end|>two old gates<|im_end|>"]
    for place, mark, left in (
        (2, {"train": False}, "two old gates<|im_end|>"),
        (4, {"train": False}, "a turbine<|im_end|>"),
        (4, {"weight": 0}, "a turbine<|im_end|>"),
        (1, {"train": True}, "what is it<|im_end|>a turbine<|im_end|>two old gates<|im_end|>"),
    ):
        marked = [
            message | (mark if number == place else {}) for number, message in enumerate(TALK)
        ]
        # A row of another length beside it, so that there is padding.
        assert trained(collate([{"messages": marked}, TALK[1:3]]), processor) == [
            left,
            "a turbine<|im_end|>",
        ]
    half = [*TALK[:2], TALK[2] | {"weight": 0.5}, *TALK[3:]]
    batch = collate([half])
    found = batch["loss_weights"][batch["loss_weights"] != 0]
    assert sorted(set(found.tolist())) == [0.5, 1.0]
    assert (
        processor.tokenizer.decode(batch["input_ids"][batch["loss_weights"] == 0.5])
        == "a turbine<|im_end|>"
    )
    parts = said("assistant", {"type": "text", "text": "a big", "train": False}, " turbine")
    assert trained(collate([[*TALK[:2], parts]]), processor) == [" turbine<|im_end|>"]


def test_weights_that_labels_cannot_say_need_a_loss_that_reads_them(make):
    half = [*TALK[:2], TALK[2] | {"weight": 0.5}]
    with pytest.raises(
        ConfigError,
        match=r"row 1.*reads_loss_weights=True",
    ):
        VisionCollator(make())([TALK, half])


MASK_SETTINGS = [
    {},
    {"mask_history": True},
    {"train_on_eos": "none"},
    {"train_on_eos": "last"},
    {"train_on_eos": "all"},
    {"roles_to_train": ["user"]},
    {"roles_to_train": ["gpt", "system"]},
    {"train_on_inputs": True},
    {"train_on_reasoning": False},
]
TEXTS = [
    {"role": "user", "content": "tell me what <|im_end|> is"},
    {"role": "assistant", "content": "\n it is"},
    {"role": "user", "content": "Zürich 水\n"},
    {"role": "assistant", "content": "and what this is", "reasoning_content": "hm, what"},
]


@pytest.mark.parametrize("template", [CHATML, THINKING], ids=["chatml", "thinking"])
@pytest.mark.parametrize("mask_settings", MASK_SETTINGS, ids=str)
def test_without_media_it_is_what_encode_gives(make, template, mask_settings):
    processor = make(template)
    batch = VisionCollator(processor, **mask_settings)([TEXTS])
    settings = mask_settings | (
        {"roles_to_train": ["assistant", "system"]}
        if "gpt" in mask_settings.get("roles_to_train", [])
        else {}
    )
    chat = encode(
        TEXTS,
        tokenizer=own_tokenizer(processor.tokenizer),
        template=Template(source=template),
        **settings,
    )
    assert processor.tokenizer.decode(batch["input_ids"][0]) == chat.text
    if batch["input_ids"].shape[1] == len(
        chat.tokens
    ):  # transformers encodes control text of users in pieces
        assert batch["loss_weights"][0].tolist() == chat.loss_weights.tolist()
    assert trained(batch, processor) == ["".join(text for _, text in chat.trained_text)]


class Wordy(TinyProcessor):
    """Writes newlines, control tokens and text around and between the tokens of an image, as real
    processors do.
    """

    def replace_image_token(self, image_inputs, image_idx, **kwargs):
        rows = ["<row>" + self.image_token] * int(image_inputs["patches"][image_idx])
        return "\n\n" + "\nUSER: \n".join(rows) + "<row>\n\n"


@pytest.mark.parametrize("side", ["right", "left"])
def test_what_a_processor_writes_around_images_is_never_trained(make, side):
    """Its newlines merge with those of the text, so the tokens around an image are other ones."""
    processor = make(side=side, kind=Wordy)
    talk = [
        said("user", picture(2), "\nwhat", "\n", picture(1), picture(3)),
        said("assistant", "\n a gate", picture(2), "\n and more"),
        said("user", picture(1)),
        said("assistant", "an end"),
    ]
    batch = VisionCollator(processor)([talk, TALK[1:3]])
    # The reply's first newline is one token with the prompt's; after its image it is one with the
    # processor's.
    assert re.fullmatch(
        r"\n+ a gate\n+ and more<\|im_end\|>an end<\|im_end\|>", trained(batch, processor)[0]
    )
    assert trained(batch, processor)[1] == "a turbine<|im_end|>"


class Elsewhere(TinyProcessor):
    """Changes the text itself."""

    def get_text_with_replacements(self, text, *args, **kwargs):
        return super().get_text_with_replacements(
            [one.replace("it", "IT") for one in text], *args, **kwargs
        )


def test_a_row_that_spells_other_text_is_an_error(make):
    with pytest.raises(
        RecordError,
        match=r"row 0.*processor's.*<\|im_end\|>",
    ):
        VisionCollator(make(kind=Elsewhere))([TALK])


def test_unknown_keywords_are_errors(make):
    processor = make(THINKING)
    with pytest.raises(ConfigError, match=r"'trian_on_eos'.*'train_on_eos'"):
        VisionCollator(processor, trian_on_eos="none")
    with pytest.raises(ConfigError, match=r"'xyz'.*template_arguments=\{…\}"):
        VisionCollator(processor, xyz=False)
    with pytest.raises(ConfigError, match=r"template_arguments.*'x'.*mapping"):
        VisionCollator(processor, template_arguments="x")
    with pytest.raises(ConfigError, match=r"on_rewrite.*several.*example"):
        VisionCollator(processor, on_rewrite="split")


def test_what_the_prompt_supplies_is_not_trained(make):
    processor = make(THINKING)
    asked = [*TALK[:2], said("assistant", "a turbine")]
    off = {"enable_thinking": False}
    assert trained(VisionCollator(processor, template_arguments=off)([asked]), processor) == [
        "a turbine<|im_end|>"
    ]
    thought = trained(VisionCollator(processor)([asked]), processor)[0]
    assert "<think>" not in thought
    assert thought.endswith("</think>\n\na turbine<|im_end|>")
    # By role boundaries an empty block is always taken for supplied.
    scanned = VisionCollator(processor, "qwen3_5", template_arguments=off)([asked])
    assert trained(scanned, processor) == ["a turbine<|im_end|>"]
    by_ids = VisionCollator(processor, "qwen3_5")
    hm = [*TALK[:2], said("assistant", "a turbine", reasoning_content="hm")]
    assert trained(by_ids([hm]), processor) == ["hm\n</think>\n\na turbine<|im_end|>"]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("template", "image", "family"), [(LLAVA, "<image>", "llava"), (GLM, "<|image_pad|>", "glm4v")]
)
def test_the_last_turn_learns_to_stop(make, template, image, family, side):
    processor = make(template.replace("<|image_pad|>", image), side=side, image_token=image)
    talk = TALK[1:]
    with pytest.raises(RecordError, match=r"row.*0.*message.*3.*template.*without"):
        VisionCollator(processor)([talk])
    batch = VisionCollator(processor, on_missing_terminator="append")([talk, talk[:2]])
    ends = processor.tokenizer.eos_token
    # With all that the template writes behind the words, so that the end of text is what comes
    # next.
    assert re.search(rf"two old gates ?{ends}$", trained(batch, processor)[0])
    assert re.search(rf"^ ?a turbine ?{ends}$", trained(batch, processor)[1])
    for row in range(2):
        real = batch["labels"][row][batch["attention_mask"][row] == 1].tolist()
        assert real[-1] == processor.tokenizer.eos_token_id
        assert (batch["labels"][row][batch["attention_mask"][row] == 0] == -100).all()
    allowed = VisionCollator(processor, on_missing_terminator="allow")([talk])
    assert ends not in trained(allowed, processor)[0]
    if family:
        with pytest.raises(RecordError, match="its last trained turn has no terminator"):
            VisionCollator(processor, family)([talk])
        assert trained(
            VisionCollator(processor, family, on_missing_terminator="allow")([talk]), processor
        )


def test_role_boundaries_refuse_what_they_cannot_honour(make):
    processor = make()
    for setting in (
        {"mask_history": True},
        {"train_on_reasoning": False},
        {"on_missing_terminator": "append"},
    ):
        name = next(iter(setting))
        with pytest.raises(ConfigError, match=rf"{name}.*boundaries.*support"):
            VisionCollator(processor, "chatml", **setting)
        with pytest.raises(ConfigError, match=rf"{name}.*boundaries.*support"):
            VisionCollator(processor, **setting).label(
                {"input_ids": [[1]], "attention_mask": [[1]]}
            )
    for mark in ({"train": False}, {"weight": 0.5}):
        with pytest.raises(RecordError, match=r"row.*0.*message.*2.*itself.*trained"):
            VisionCollator(processor, "chatml")([[*TALK[:2], TALK[2] | mark]])


def test_ids_are_media_where_the_processor_declares_them(make):
    """Gemma 4's processor has audio_ms_per_token = 40, and others have
    num_additional_image_tokens.
    """
    processor = make()
    before = media_ids(processor)
    assert before == (
        processor.image_token_id,
        processor.tokenizer.convert_tokens_to_ids("<|video_pad|>"),
    )
    for name in (
        "audio_ms_per_token",
        "image_token_divisor",
        "num_additional_image_tokens",
        "video_use_col_tokens",
    ):
        setattr(processor, name, 40)
    assert media_ids(processor) == before
    processor.image_token_ids = [processor.image_token_id, 41]
    assert media_ids(processor) == tuple(sorted({*before, 41}))


def test_control_text_in_a_reply(make):
    processor = make()
    typed = [*TALK[:2], said("assistant", "a <tool> it is")]
    with pytest.raises(RecordError, match=r"row 0.*message 2.*'<tool>'"):
        VisionCollator(processor)([typed])
    tool = processor.tokenizer.convert_tokens_to_ids("<tool>")
    for setting, count in (("as_text", 0), ("as_control_tokens", 1)):
        batch = VisionCollator(processor, trained_control_text=setting)([typed])
        assert int((batch["labels"] == tool).sum()) == count
        assert trained(batch, processor) == ["a <tool> it is<|im_end|>"]
    forged = [said("user", "x <tool>"), said("assistant", "a <tool>")]
    batch = VisionCollator(processor, trained_control_text="as_control_tokens")([forged])
    assert (int((batch["labels"] == tool).sum()), int((batch["input_ids"] == tool).sum())) == (1, 1)
    # The processor itself makes batches with arrays, and cannot tell the two apart.
    forged[0]["content"] = [
        {"type": "image", "image": np.ones((1, 2))},
        {"type": "text", "text": "x <tool>"},
    ]
    with pytest.raises(RecordError, match=r"row.*0.*batch.*message.*0.*text"):
        VisionCollator(processor, trained_control_text="as_control_tokens")([forged])


class Careless(TinyProcessor):
    """Makes control tokens of what users type, although it is asked not to."""

    def apply_chat_template(self, conversations, sanitize_control_tokens=False, **kwargs):
        return super().apply_chat_template(conversations, **kwargs)


def test_control_tokens_that_a_user_typed_are_found(make):
    parts = [{"type": "image", "image": np.ones((1, 2))}, {"type": "text", "text": "x <tool> y"}]
    talk = [{"role": "user", "content": parts}, said("assistant", "a")]
    with pytest.raises(
        RecordError,
        match=r"row.*0.*processor.*control.*'<tool>",
    ):
        VisionCollator(make(kind=Careless))([talk])


def test_media_beside_the_messages_are_an_error(make):
    collate = VisionCollator(make())
    talk = [{"role": "user", "content": "<image>\nwhat"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(RecordError, match=r'row 0.*"images".*media'):
        collate([{"messages": talk, "images": [np.ones((1, 2))]}])
    with pytest.raises(RecordError, match=r'row 1.*message 0.*"image"'):
        collate([TALK, [talk[0] | {"image": np.ones((1, 2))}, talk[1]]])


def test_tools_are_those_of_the_whole_batch(make):
    source = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    processor = make(source)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    own = VisionCollator(processor)([{"messages": TALK, "tools": tools}])
    given = VisionCollator(processor, template_arguments={"tools": tools})([TALK])
    assert own["input_ids"].tolist() == given["input_ids"].tolist()
    assert (
        trained(own, processor)
        == trained(given, processor)
        == ["a turbine<|im_end|>two old gates<|im_end|>"]
    )
    with pytest.raises(RecordError, match=r"row 1.*chat_template_kwargs.*row 0"):
        VisionCollator(processor)([{"messages": TALK, "tools": tools}, TALK])


class TinyModel(torch.nn.Module):
    """Takes what the collator gives, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(500, 8)
        self.seen = []

    def forward(self, input_ids, attention_mask=None, pixel_values=None, labels=None, **kwargs):
        self.seen.append((labels, kwargs["loss_weights"]))
        scores = self.table(input_ids) @ self.table.weight.T
        return {
            "loss": torch.nn.functional.cross_entropy(scores[:, :-1].transpose(1, 2), labels[:, 1:])
        }


def test_the_example_of_the_docstring_runs(make, tmp_path):
    processor, model = make(), TinyModel()
    code = module.__doc__.split("```python\n")[1].split("```")[0]
    assert code.count('"out", ') == 1
    small = (
        f'"{tmp_path}", max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True, '
        'save_strategy="no", '
    )
    names = {
        "VisionCollator": VisionCollator,
        "Trainer": Trainer,
        "TrainingArguments": TrainingArguments,
        "processor": processor,
        "model": model,
        "examples": [{"messages": TALK}, {"messages": TALK[1:3]}],
    }
    exec(code.replace('"out", ', small), names)
    assert len(model.seen) == 2
    assert processor.tokenizer.decode(model.seen[0][0][0][model.seen[0][0][0] != -100]).endswith(
        "<|im_end|>"
    )


def test_columns_that_the_trainer_took_away_are_named(make, tmp_path):
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = Trainer(
        TinyModel(),
        arguments,
        data_collator=VisionCollator(make()),
        train_dataset=[{"messages": TALK}],
    )
    with pytest.raises(
        RecordError,
        match=r"row 0.*remove_unused_columns=False",
    ):
        trainer.train()
    with pytest.raises(ConversationError, match="no known layout"):
        VisionCollator(make())([{"text": "x"}])
