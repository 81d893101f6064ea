"""Processors of multimodal families, tiny random models for them and messages with pictures, built
without any file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

transformers.logging.set_verbosity_error()


# Templates. Jinja reads the escapes, so these are raw strings.


def _parts(image: str, filters: str = "") -> str:
    """Writes the text of a message, or its parts in their order."""
    return (
        "{% if message['content'] is string %}{{ message['content']" + filters + " }}{% else %}"
        "{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}{{ '" + image + "' }}"
        "{% elif part['type'] == 'text' %}{{ part['text']" + filters + " }}{% endif %}"
        "{% endfor %}{% endif %}"
    )


_EACH, _END = "{% for message in messages %}", "{% endfor %}"


def _prompt(text: str) -> str:
    return "{% if add_generation_prompt %}{{ '" + text + "' }}{% endif %}"


def _chatml(image: str) -> str:
    turn = (
        r"{{ '<|im_start|>' + message['role'] + '\n' }}" + _parts(image) + r"{{ '<|im_end|>\n' }}"
    )
    return _EACH + turn + _END + _prompt(r"<|im_start|>assistant\n")


QWEN = _chatml("<|vision_start|><|image_pad|><|vision_end|>")
INTERN = _chatml(r"<IMG_CONTEXT>\n")
LFM = "{{ bos_token }}" + _chatml("<image>")

GEMMA3 = (
    "{{ bos_token }}"
    + _EACH
    + r"{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) "
    r"+ '\n' }}"
    + _parts("<start_of_image>", " | trim")
    + r"{{ '<end_of_turn>\n' }}"
    + _END
    + _prompt(r"<start_of_turn>model\n")
)
GEMMA3N = GEMMA3.replace("<start_of_image>", "<image_soft_token>")
GEMMA4 = (
    GEMMA3.replace("<start_of_turn>", "<|turn>")
    .replace("<end_of_turn>", "<turn|>")
    .replace("<start_of_image>", "<|image|>")
)

SMOL = (
    "{{ bos_token }}"
    + _EACH
    + "{{ message['role'] | capitalize }}{{ ':' if message['content'][0]['type'] == 'image' "
    "else ': ' }}"
    + _parts("<image>")
    + r"{{ '<end_of_utterance>\n' }}"
    + _END
    + _prompt("Assistant:")
)

LLAVA = (
    _EACH + "{{ message['role'].upper() + ': ' }}" + _parts(r"<image>\n")
    + "{{ eos_token if message['role'] == 'assistant' else ' ' }}" + _END + _prompt("ASSISTANT:")
)  # fmt: skip

MISTRAL = (
    "{{ bos_token }}"
    + _EACH
    + "{{ {'user': '[INST]', 'system': '[SYSTEM_PROMPT]'}.get(message['role'], '') }}"
    + _parts("[IMG]")
    + "{{ {'user': '[/INST]', 'system': '[/SYSTEM_PROMPT]'}.get(message['role'], eos_token) }}"
    + _END
)

LLAMA3 = (
    "{{ bos_token }}"
    + _EACH
    + r"{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    + _parts("<|image|>")
    + "{{ '<|eot_id|>' }}"
    + _END
    + _prompt(r"<|start_header_id|>assistant<|end_header_id|>\n\n")
)
LLAMA4 = (
    LLAMA3.replace("start_header_id", "header_start")
    .replace("end_header_id", "header_end")
    .replace("eot_id", "eot")
)

GLM = (
    "[gMASK]<sop>" + _EACH + r"{{ '<|' + message['role'] + '|>\n' }}"
    + _parts("<|begin_of_image|><|image|><|end_of_image|>") + _END + _prompt("<|assistant|>")
)  # fmt: skip

PADDLE = (
    "{{ bos_token }}"
    + _EACH
    + r"{{ 'Assistant:\n' if message['role'] == 'assistant' else 'User: ' }}"
    + _parts("<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>")
    + r"{{ eos_token if message['role'] == 'assistant' else '\n' }}"
    + _END
    + _prompt(r"Assistant:\n")
)


# Processors.


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the processor of a family is made of."""

    processor: str
    image: str
    """The class of its image processor."""
    specials: str
    """Control tokens, with spaces between them."""
    roles: Mapping[str, str]
    """Argument of the tokenizer → token."""
    template: str
    named: Mapping[str, str] = field(default_factory=dict)
    """Attribute that the processor reads of the tokenizer → token."""
    image_settings: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    """Argument of the processor → class of a part of it that needs no settings."""
    settings: Mapping[str, Any] = field(default_factory=dict)


def _roles(bos: str | None, eos: str, pad: str, side: str = "right") -> dict[str, str]:
    named = {"bos_token": bos, "eos_token": eos, "pad_token": pad, "padding_side": side}
    return {name: text for name, text in named.items() if text is not None}


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _pixels(least: int, most: int) -> dict[str, Any]:
    """Bounds of an image's area, which these processors call edges."""
    return {"size": {"shortest_edge": least, "longest_edge": most}}


_GRID = range(1, 5)
_CHATML_ROLES = _roles(None, "<|im_end|>", "<|endoftext|>")
_GEMMA_ROLES = _roles("<bos>", "<eos>", "<pad>", "left")
_S_ROLES = _roles("<s>", "</s>", "<pad>")

_QWEN2 = Family(
    processor="Qwen2VLProcessor",
    image="Qwen2VLImageProcessor",
    specials=(
        "<|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|> "
        "<|endoftext|>"
    ),
    roles=_CHATML_ROLES,
    template=QWEN,
    image_settings=_pixels(28 * 28 * 2, 28 * 28 * 16),
    others={"video_processor": "Qwen2VLVideoProcessor"},
)
_GEMMA3_NAMED = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_GEMMA3 = Family(
    processor="Gemma3Processor",
    image="Gemma3ImageProcessor",
    specials=(
        "<bos> <eos> <pad> <start_of_turn> <end_of_turn> <start_of_image> <end_of_image> "
        "<image_soft_token> <audio_soft_token> <start_of_audio> <end_of_audio>"
    ),
    roles=_GEMMA_ROLES,
    template=GEMMA3,
    named=_GEMMA3_NAMED,
    image_settings={"size": _square(56), "image_seq_length": 4},
    settings={"image_seq_length": 4},
)
_SMOLVLM2 = Family(
    processor="SmolVLMProcessor",
    image="SmolVLMImageProcessor",
    specials=(
        "<|im_start|> <end_of_utterance> <image> <fake_token_around_image> <global-img> <video> "
        "<|endoftext|> "
    )
    + " ".join(f"<row_{row}_col_{column}>" for row in _GRID for column in _GRID),
    roles=_roles("<|im_start|>", "<end_of_utterance>", "<|endoftext|>"),
    template=SMOL,
    image_settings={"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}},
    others={"video_processor": "SmolVLMVideoProcessor"},
    settings={"image_seq_len": 4},
)
_LLAVA = Family(
    processor="LlavaProcessor",
    image="CLIPImageProcessor",
    specials="<s> </s> <pad> <image>",
    roles=_S_ROLES,
    template=LLAVA,
    image_settings={"size": {"shortest_edge": 56}, "crop_size": _square(56)},
    settings={
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    },
)
_PIXTRAL = Family(
    processor="PixtralProcessor",
    image="PixtralImageProcessor",
    specials=(
        "<s> </s> <pad> [INST] [/INST] [IMG] [IMG_BREAK] [IMG_END] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]"
    ),
    roles=_S_ROLES,
    template=MISTRAL,
    image_settings={"size": {"longest_edge": 64}, "patch_size": _square(16)},
    settings={"patch_size": 16},
)
_GLM4V = Family(
    processor="Glm4vProcessor",
    image="Glm4vImageProcessor",
    specials=(
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|endoftext|> <|image|> "
        "<|video|> <|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|>"
    ),
    roles=_roles(None, "<|endoftext|>", "<|endoftext|>"),
    template=GLM,
    # An image counts twice here, as two frames.
    image_settings=_pixels(28 * 28 * 4, 28 * 28 * 32),
    others={"video_processor": "Glm4vVideoProcessor"},
)
_PINPOINTS = [[56, 112], [112, 56], [112, 112]]

_FAMILIES: dict[str, Family] = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": replace(_QWEN2, processor="Qwen2_5_VLProcessor"),
    "qwen3_vl": replace(
        _QWEN2,
        processor="Qwen3VLProcessor",
        image_settings={"patch_size": 16, **_pixels(32 * 32 * 2, 32 * 32 * 16)},
        others={"video_processor": "Qwen3VLVideoProcessor"},
    ),
    "gemma3": _GEMMA3,
    "gemma3n": replace(
        _GEMMA3,
        processor="Gemma3nProcessor",
        image="SiglipImageProcessor",
        template=GEMMA3N,
        named=_GEMMA3_NAMED
        | {
            "boa_token": "<start_of_audio>",
            "eoa_token": "<end_of_audio>",
            "audio_token": "<audio_soft_token>",
        },
        image_settings={"size": _square(56)},
        others={"feature_extractor": "Gemma3nAudioFeatureExtractor"},
        settings={"image_seq_length": 4, "audio_seq_length": 4},
    ),
    "gemma4": Family(
        processor="Gemma4Processor",
        image="Gemma4ImageProcessor",
        specials=(
            "<bos> <eos> <pad> <|turn> <turn|> <|image|> <|image> <image|> <|audio|> <|audio> "
            "<audio|> <|video|>"
        ),
        roles=_GEMMA_ROLES,
        template=GEMMA4,
        named={"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
        | {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"},
        # 70 is the fewest slots that it accepts as the most of an image.
        image_settings={"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        others={
            "video_processor": "Gemma4VideoProcessor",
            "feature_extractor": "Gemma4AudioFeatureExtractor",
        },
    ),
    "smolvlm2": _SMOLVLM2,
    "idefics3": replace(
        _SMOLVLM2,
        processor="Idefics3Processor",
        image="Idefics3ImageProcessor",
        specials=_SMOLVLM2.specials.replace("<|im_start|>", "<|begin_of_text|>"),
        roles=_roles("<|begin_of_text|>", "<end_of_utterance>", "<|endoftext|>"),
        others={},
    ),
    "llava": _LLAVA,
    "llava_next": replace(
        _LLAVA,
        processor="LlavaNextProcessor",
        image="LlavaNextImageProcessor",
        image_settings={**_LLAVA.image_settings, "image_grid_pinpoints": _PINPOINTS},
    ),
    "pixtral": _PIXTRAL,
    "mistral3": replace(
        _PIXTRAL,
        image_settings={"size": {"longest_edge": 112}, "patch_size": _square(14)},
        settings={"patch_size": 14, "spatial_merge_size": 2},
    ),
    "internvl": Family(
        processor="InternVLProcessor",
        image="GotOcr2ImageProcessor",
        specials="<|im_start|> <|im_end|> <IMG_CONTEXT> <img> </img> <video> <|endoftext|>",
        roles=_CHATML_ROLES,
        template=INTERN,
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        image_settings={"size": _square(56), "crop_to_patches": True, "max_patches": 3},
        others={"video_processor": "InternVLVideoProcessor"},
        settings={"image_seq_length": 4},
    ),
    "llama4": Family(
        processor="Llama4Processor",
        image="Llama4ImageProcessor",
        specials=(
            "<|begin_of_text|> <|eot|> <|pad|> <|header_start|> <|header_end|> <|image|> "
            "<|patch|> <|image_start|> <|image_end|> <|tile_x_separator|> <|tile_y_separator|>"
        ),
        roles=_roles("<|begin_of_text|>", "<|eot|>", "<|pad|>"),
        template=LLAMA4,
        image_settings={"size": _square(56), "max_patches": 4},
        settings={"patch_size": 14},
    ),
    "glm4v": _GLM4V,
    "glm46v": replace(
        _GLM4V,
        processor="Glm46VProcessor",
        image="Glm46VImageProcessor",
        others={"video_processor": "Glm46VVideoProcessor"},
    ),
    "lfm2_vl": Family(
        processor="Lfm2VlProcessor",
        image="Lfm2VlImageProcessor",
        specials=(
            "<|pad|> <|startoftext|> <|im_start|> <|im_end|> <image> <|image_start|> "
            "<|image_end|> <|img_thumbnail|> "
        )
        + " ".join(f"<|img_row_{row}_col_{column}|>" for row in _GRID for column in _GRID),
        roles=_roles("<|startoftext|>", "<|im_end|>", "<|pad|>"),
        template=LFM,
        image_settings={
            "tile_size": 64,
            "max_tiles": 4,
            "min_image_tokens": 4,
            "max_image_tokens": 16,
        },
    ),
    "paddleocr": Family(
        processor="PaddleOCRVLProcessor",
        image="PaddleOCRVLImageProcessor",
        specials=(
            "<|begin_of_sentence|> </s> <pad> <|IMAGE_PLACEHOLDER|> <|IMAGE_START|> <|IMAGE_END|>"
        ),
        roles=_roles("<|begin_of_sentence|>", "</s>", "<pad>"),
        template=PADDLE,
        named={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        image_settings=_pixels(28 * 28 * 2, 28 * 28 * 16),
    ),
    "llama3_2_vision": Family(
        processor="MllamaProcessor",
        image="MllamaImageProcessor",
        specials=(
            "<|begin_of_text|> <|eot_id|> <|pad|> <|start_header_id|> <|end_header_id|> <|image|>"
        ),
        roles=_roles("<|begin_of_text|>", "<|eot_id|>", "<|pad|>"),
        template=LLAMA3,
        image_settings={"size": _square(56), "max_image_tiles": 4},
    ),
}
FAMILIES: tuple[str, ...] = tuple(_FAMILIES)

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pattern: line breaks stay together, so those of a template merge with those that a
processor writes.
"""
_MERGES = [
    ("Ċ", "Ċ"),
    ("ĊĊ", "Ċ"),
    ("ĊĊ", "ĊĊ"),
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "a"),
    ("Y", "e"),
    ("Ye", "s"),
]


@cache
def _bytes() -> str:
    """The state of a tokenizer of bytes, with a few merges."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in _MERGES)]
    words = Tokenizer(
        models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=_MERGES)
    )
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words.decoder = decoders.ByteLevel()
    return words.to_str()


@cache
def tokenizer(name: str) -> Any:
    """The tokenizer of a family: 256 bytes, a few merges and the family's control tokens."""
    family = _FAMILIES[name]
    return small_tokenizer(
        family.specials.split(), extra_special_tokens=dict(family.named), **family.roles
    )


def small_tokenizer(controls: Sequence[str], **settings: Any) -> Any:
    """256 bytes, a few merges and control tokens."""
    words = Tokenizer.from_str(_bytes())
    words.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in controls]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **settings)


@cache
def processor(name: str) -> Any:
    """The processor of a family, with settings that give an image few slots."""
    family = _FAMILIES[name]
    others = {argument: getattr(transformers, found)() for argument, found in family.others.items()}
    return getattr(transformers, family.processor)(
        image_processor=getattr(transformers, family.image)(**family.image_settings),
        tokenizer=tokenizer(name),
        chat_template=family.template,
        **others,
        **family.settings,
    )


# Models.


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """What the configuration of a tiny model is made of."""

    config: str
    tokens: Mapping[str, str]
    """Name of an id in the configuration → token."""
    vision: Mapping[str, Any]
    text: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


_TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip
_MROPE = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
}
_MISTRAL_TEXT = {"model_type": "mistral", "head_dim": 16, "sliding_window": None}
_GEMMA_TEXT = {
    "head_dim": 16,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}

_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_SQUARE_TOWER = _TOWER | {"image_size": 56, "patch_size": 14}
_PIXTRAL_TOWER = _TOWER | {"model_type": "pixtral", "head_dim": 16}
_PATCHES = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_MERGING_TOWER = _PATCHES | {
    "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 64,
}  # fmt: skip

_QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
_GLM_TOKENS = {
    "image_token_id": "<|image|>", "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>", "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>", "video_end_token_id": "<|end_of_video|>",
}  # fmt: skip

_QWEN2_MODEL = Tiny(
    config="Qwen2VLConfig",
    tokens=_QWEN_TOKENS,
    text=_MROPE,
    # Its tower is as wide as embed_dim, and hidden_size is the width of the text.
    vision=_PATCHES
    | {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
)
_SMOLVLM2_MODEL = Tiny(
    config="SmolVLMConfig",
    tokens={"image_token_id": "<image>"},
    text={"model_type": "llama"},
    vision=_TOWER | {"image_size": 64, "patch_size": 16},
    more={"scale_factor": 2},
)
_LLAVA_MODEL = Tiny(
    config="LlavaConfig",
    tokens={"image_token_index": "<image>"},
    text={"model_type": "llama"},
    # One more layer, because the features are those of the last but one.
    vision=_SQUARE_TOWER
    | {"model_type": "clip_vision_model", "num_hidden_layers": 3, "projection_dim": 32},
    more={"image_seq_length": 16},
)
_GLM4V_MODEL = Tiny(
    config="Glm4vConfig",
    tokens=_GLM_TOKENS,
    text=_MROPE,
    vision=_MERGING_TOWER | {"image_size": 56},
)

# Without gemma3n: its tower is a network of 300 million weights from timm, which the tests do not
# install.
_MODELS: dict[str, Tiny] = {
    "qwen2_vl": _QWEN2_MODEL,
    "qwen2_5_vl": replace(
        _QWEN2_MODEL,
        config="Qwen2_5_VLConfig",
        vision=_MERGING_TOWER | {"window_size": 56, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": replace(
        _QWEN2_MODEL,
        config="Qwen3VLConfig",
        text=_MROPE | {"head_dim": 16},
        vision=_MERGING_TOWER
        | {
            "depth": 3,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    ),
    "gemma3": Tiny(
        config="Gemma3Config",
        tokens={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        text=_GEMMA_TEXT | {"query_pre_attn_scalar": 16},
        vision=_SQUARE_TOWER | {"vision_use_head": False},
        more={"mm_tokens_per_image": 4},
    ),
    "gemma4": Tiny(
        config="Gemma4Config",
        tokens={
            "image_token_id": "<|image|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
        }
        | {"video_token_id": "<|video|>", "audio_token_id": "<|audio|>"},
        # As in its larger models, the slots of an image see each other.
        text=_GEMMA_TEXT
        | {
            "global_head_dim": 16,
            "use_bidirectional_attention": "vision",
            "hidden_size_per_layer_input": 0,
        },
        vision=_TOWER
        | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2}
        | {"position_embedding_size": 160},
    ),
    "smolvlm2": _SMOLVLM2_MODEL,
    "idefics3": replace(_SMOLVLM2_MODEL, config="Idefics3Config"),
    "llava": _LLAVA_MODEL,
    "llava_next": replace(
        _LLAVA_MODEL,
        config="LlavaNextConfig",
        more={**_LLAVA_MODEL.more, "image_grid_pinpoints": _PINPOINTS},
    ),
    "pixtral": Tiny(
        config="LlavaConfig",
        tokens={"image_token_index": "[IMG]"},
        text=_MISTRAL_TEXT,
        vision=_PIXTRAL_TOWER | {"image_size": 64, "patch_size": 16},
        more={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "mistral3": Tiny(
        config="Mistral3Config",
        tokens={"image_token_index": "[IMG]"},
        text=_MISTRAL_TEXT,
        vision=_PIXTRAL_TOWER | {"image_size": 112, "patch_size": 14},
        more={"spatial_merge_size": 2},
    ),
    "internvl": Tiny(
        config="InternVLConfig",
        tokens={"image_token_id": "<IMG_CONTEXT>"},
        text={"model_type": "qwen2"},
        vision=_TOWER | {"image_size": [56, 56], "patch_size": [14, 14]},
        more={"image_seq_length": 4},
    ),
    "llama4": Tiny(
        config="Llama4Config",
        tokens={"image_token_index": "<|patch|>"},
        text={"head_dim": 16, "intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 0]}
        | {"num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
        # Four features are joined into one, which makes them four times as wide.
        vision=_SQUARE_TOWER
        | {"intermediate_size": 128, "pixel_shuffle_ratio": 0.5}
        | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "glm4v": _GLM4V_MODEL,
    "glm46v": replace(
        _GLM4V_MODEL,
        config="Glm46VConfig",
        text=_MROPE | {"model_type": "glm4v_text"},
        vision={**_GLM4V_MODEL.vision, "model_type": "glm4v_vision"},
    ),
    "lfm2_vl": Tiny(
        config="Lfm2VlConfig",
        tokens={"image_token_id": "<image>"},
        text={"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
        vision=_TOWER
        | {
            "model_type": "siglip2_vision_model",
            "vision_use_head": False,
            "patch_size": 16,
            "num_patches": 64,
        },
        more={"projector_hidden_size": 64},
    ),
    "paddleocr": Tiny(
        config="PaddleOCRVLConfig",
        tokens={
            "image_token_id": "<|IMAGE_PLACEHOLDER|>",
            "vision_start_token_id": "<|IMAGE_START|>",
            "vision_end_token_id": "<|IMAGE_END|>",
        },
        text=_MROPE | {"head_dim": 16},
        vision=_SQUARE_TOWER,
    ),
    "llama3_2_vision": Tiny(
        config="MllamaConfig",
        tokens={"image_token_index": "<|image|>"},
        text={"cross_attention_layers": [1]},
        # Its features are those of the two layers that are named, and the last ones.
        vision=_SQUARE_TOWER
        | {
            "num_global_layers": 1,
            "max_num_tiles": 4,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 96,
        },
    ),
}
MODELS: tuple[str, ...] = tuple(_MODELS)


def model(name: str) -> Any:
    """A new tiny model of a family, the same each time, which reads what the family's processor
    gives.
    """
    tiny, words = _MODELS[name], tokenizer(name)
    # The defaults are ids of the real vocabularies, and most lie beyond this one.
    ends = {
        f"{role}_token_id": getattr(words, f"{role}_token_id") for role in ("bos", "eos", "pad")
    }
    config = getattr(transformers, tiny.config)(
        text_config=_TEXT | {"vocab_size": len(words), **ends, **tiny.text},
        vision_config=dict(tiny.vision),
        **{named: words.convert_tokens_to_ids(text) for named, text in tiny.tokens.items()},
        **tiny.more,
    )
    made = getattr(transformers, tiny.config.removesuffix("Config") + "ForConditionalGeneration")(
        config
    )
    if name == "llama4":
        made.register_forward_pre_hook(_cast_pixels, with_kwargs=True)
        _skip_if_broken(made)
    return _spread(made.float().eval())


def _skip_if_broken(made: Any) -> None:
    """transformers 5.24.0 reads an attribute that the outputs of Llama 4's text model do not
    have.
    """
    try:
        made(input_ids=torch.tensor([[1, 2]]))
    except AttributeError as error:
        if "image_outputs" not in str(error):
            raise
        pytest.skip(
            f"transformers {transformers.__version__} cannot run its own "
            f"{type(made).__name__}: {error}"
        )


def _cast_pixels(
    made: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    # The processor of Llama 4 gives bfloat16, of whatever type the model is.
    if named.get("pixel_values") is not None:
        named = named | {"pixel_values": named["pixel_values"].to(next(made.parameters()).dtype)}
    return given, named


def _spread(made: torch.nn.Module) -> torch.nn.Module:
    """Draw weights that are large enough for attention and images to change the logits."""
    random = torch.Generator().manual_seed(1)
    tables = {
        id(module.weight) for module in made.modules() if isinstance(module, torch.nn.Embedding)
    }
    with torch.no_grad():
        for name, weights in made.named_parameters():
            # Vectors that are called a weight scale a norm, and stay as they are.
            if weights.ndim > 1 or not name.endswith("weight"):
                scale = _scale(name, weights, id(weights) in tables)
                weights.copy_(torch.randn(weights.shape, generator=random) * scale)
    return made


def _scale(name: str, weights: torch.Tensor, is_table: bool) -> float:
    if name.endswith("bias"):
        return 0.05
    if is_table or weights.ndim < 2:
        return 0.3
    return weights.shape[-1] ** -0.5 if weights.ndim == 2 else 0.15


# Pictures and messages.


def picture(height: int, width: int, seed: int = 0) -> Any:
    """Noise over a gradient, in RGB."""
    noise = np.random.default_rng([seed, height, width]).integers(0, 96, (height, width, 3))
    ground = np.linspace(0, 159, height)[:, None, None] * np.linspace(1, 0.5, width)[:, None]
    return Image.fromarray((ground + noise).astype(np.uint8))


def chat(
    pictures: Sequence[Any], text: str = "What is it?", answer: str = "Yes."
) -> list[dict[str, Any]]:
    """A question with its images before it, and the answer."""
    return _turn([*map(_image, pictures), _text(text)], answer)


def interleaved(pictures: Sequence[Any]) -> list[dict[str, Any]]:
    """A question with text before, between and after its images, some of it with line breaks next
    to them.
    """
    parts = [_text("Here is the first:\n")]
    for number, one in enumerate(pictures):
        parts += [
            _image(one),
            _text(f"\n\nand then, after {number},\n" if number % 2 == 0 else " a little more: "),
        ]
    return _turn([*parts, _text("What is the difference?")], "Yes.")


def _turn(parts: list[dict[str, Any]], answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": [_text(answer)]}]


def _image(one: Any) -> dict[str, Any]:
    return {"type": "image", "image": one}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
