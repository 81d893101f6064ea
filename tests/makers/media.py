"""Processors of multimodal families, tiny random models for them, and pictures: built offline, from small parts."""

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_MERGES = [("\n", "\n"), ("\n\n", "\n"), ("t", "h"), ("th", "e"), (" ", "a"), ("Y", "e"), ("Ye", "s")]


transformers.logging.set_verbosity_error()


def tokenizer(specials: Sequence[str], named: Mapping[str, str] | None = None, **tokens: str) -> Any:
    """A byte-level vocabulary with a few merges, some of newlines, and control tokens."""
    byte = pre_tokenizers.ByteLevel.alphabet()
    encode = {chr(value): shown for value, shown in zip((10, 32), ("Ċ", "Ġ"), strict=True)}
    vocabulary = {token: number for number, token in enumerate(sorted(byte))}
    merges = [tuple("".join(encode.get(one, one) for one in text) for text in pair) for pair in _MERGES]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    whole = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    whole.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=whole, extra_special_tokens=dict(named or {}), **tokens
    )


def _turns(begin: str, end: str, image: str, prompt: str, head: str = "", strip: bool = False, roles: str = "") -> str:
    """A template that writes each message's parts in their order."""
    role = (
        f"{{%- set role = {roles}[message['role']] if message['role'] in {roles} else message['role'] -%}}"
        if roles
        else ("{%- set role = message['role'] -%}")
    )
    text = "{{- part['text'] | trim -}}" if strip else "{{- part['text'] -}}"
    return (
        head + "{%- for message in messages -%}" + role + "{{- '" + begin + "' -}}"
        "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
        "{%- for part in message['content'] -%}{%- if part['type'] == 'image' -%}{{- '" + image + "' -}}"
        "{%- elif part['type'] == 'text' -%}" + text + "{%- endif -%}{%- endfor -%}{%- endif -%}"
        "{{- '" + end + "' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '" + prompt + "' -}}{%- endif -%}"
    )  # fmt: skip


CHATML = ("<|im_start|>' + role + '\\n", "<|im_end|>\\n")
_QWEN = [
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|endoftext|>",
]
_GEMMA = [
    "<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>",
    "<image_soft_token>", "<audio_soft_token>", "<start_of_audio>", "<end_of_audio>",
]  # fmt: skip
_MISTRAL = ["<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]


def _of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


def _qwen(module: str, name: str, video: tuple[str, str] = ("qwen2_vl", "Qwen2VLVideoProcessor")) -> Any:
    template = _turns(*CHATML, "<|vision_start|><|image_pad|><|vision_end|>", "<|im_start|>assistant\\n")
    images = _of("qwen2_vl", "Qwen2VLImageProcessor")(min_pixels=28 * 28 * 2, max_pixels=28 * 28 * 16)
    words = tokenizer(_QWEN, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    return _of(module, name)(images, words, _of(*video)(), chat_template=template)


def _gemma_template(image: str) -> str:
    return _turns(
        "<start_of_turn>' + role + '\\n", "<end_of_turn>\\n", image, "<start_of_turn>model\\n", "{{- bos_token -}}",
        strip=True, roles="{'assistant': 'model'}",
    )  # fmt: skip


def _gemma3() -> Any:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    images = _of("gemma3", "Gemma3ImageProcessor")(size={"height": 56, "width": 56}, image_seq_length=4)
    words = tokenizer(_GEMMA, named, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    template = _gemma_template("<start_of_image>")
    return _of("gemma3", "Gemma3Processor")(images, words, chat_template=template, image_seq_length=4)


def _gemma3n() -> Any:
    named = {
        "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>",
        "boa_token": "<start_of_audio>", "eoa_token": "<end_of_audio>", "audio_token": "<audio_soft_token>",
    }  # fmt: skip
    images = _of("siglip", "SiglipImageProcessor")(size={"height": 56, "width": 56})
    words = tokenizer(_GEMMA, named, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    sound = _of("gemma3n", "Gemma3nAudioFeatureExtractor")()
    return _of("gemma3n", "Gemma3nProcessor")(
        sound,
        images,
        words,
        chat_template=_gemma_template("<image_soft_token>"),
        image_seq_length=4,
        audio_seq_length=4,
    )


def _gemma4() -> Any:
    specials = [
        "<bos>", "<eos>", "<pad>", "<|turn>", "<turn|>", "<|image|>", "<|audio|>", "<|video|>", "<|image>", "<image|>",
        "<|audio>", "<audio|>",
    ]  # fmt: skip
    named = {
        "boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>", "boa_token": "<|audio>",
        "eoa_token": "<audio|>", "audio_token": "<|audio|>",
    }  # fmt: skip
    words = tokenizer(specials, named, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    template = _turns(
        "<|turn>' + role + '\\n", "<turn|>\\n", "<|image|>", "<|turn>model\\n", "{{- bos_token -}}",
        roles="{'assistant': 'model'}",
    )  # fmt: skip
    parts = ("Gemma4AudioFeatureExtractor", "Gemma4ImageProcessor", "Gemma4VideoProcessor")
    sound, images, video = (_of("gemma4", name)() for name in parts)
    return _of("gemma4", "Gemma4Processor")(sound, images, words, video, chat_template=template)


def _llama(image: str, head: str, end: str, name: str, more: Sequence[str]) -> tuple[Any, str]:
    specials = ["<|begin_of_text|>", end, "<|pad|>", f"<|{head}start|>", f"<|{head}end|>", "<|image|>", *more]
    if head == "header_":
        begin = "<|header_start|>' + role + '<|header_end|>\\n\\n"
    else:
        specials += ["<|start_header_id|>", "<|end_header_id|>"]
        begin = "<|start_header_id|>' + role + '<|end_header_id|>\\n\\n"
    prompt = begin.replace("' + role + '", "assistant")
    words = tokenizer(specials, bos_token="<|begin_of_text|>", eos_token=end, pad_token="<|pad|>")
    return words, _turns(begin, end, image, prompt, "{{- bos_token -}}")


def _llama4() -> Any:
    more = ["<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"]
    words, template = _llama("<|image|>", "header_", "<|eot|>", "llama4", more)
    images = _of("llama4", "Llama4ImageProcessor")(size={"height": 56, "width": 56}, max_patches=4)
    return _of("llama4", "Llama4Processor")(images, words, patch_size=14, chat_template=template)


def _mllama() -> Any:
    words, template = _llama("<|image|>", "", "<|eot_id|>", "mllama", ["<|python_tag|>"])
    images = _of("mllama", "MllamaImageProcessor")(size={"height": 56, "width": 56}, max_image_tiles=4)
    return _of("mllama", "MllamaProcessor")(images, words, chat_template=template)


def _pixtral(size: int = 64, patch: int = 16, merge: int = 1) -> Any:
    template = (
        "{{- bos_token -}}{%- for message in messages -%}{%- if message['role'] == 'user' -%}{{- '[INST]' -}}"
        "{%- for part in message['content'] -%}{%- if part['type'] == 'image' -%}{{- '[IMG]' -}}"
        "{%- else -%}{{- part['text'] -}}{%- endif -%}{%- endfor -%}{{- '[/INST]' -}}{%- else -%}"
        "{%- for part in message['content'] -%}{{- part['text'] -}}{%- endfor -%}{{- eos_token -}}"
        "{%- endif -%}{%- endfor -%}"
    )
    images = _of("pixtral", "PixtralImageProcessor")(
        size={"longest_edge": size}, patch_size={"height": patch, "width": patch}
    )
    words = tokenizer(_MISTRAL, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    return _of("pixtral", "PixtralProcessor")(
        images, words, patch_size=patch, spatial_merge_size=merge, chat_template=template
    )


def _smol(module: str) -> Any:
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    specials = [
        "<|im_start|>",
        "<end_of_utterance>",
        "<image>",
        "<fake_token_around_image>",
        "<global-img>",
        "<video>",
        "<|endoftext|>",
    ]
    template = _turns("<|im_start|>' + role + ':", "<end_of_utterance>\\n", "<image>", "<|im_start|>assistant:")
    words = tokenizer(
        [*specials, *rows], bos_token="<|im_start|>", eos_token="<end_of_utterance>", pad_token="<|endoftext|>"
    )
    sizes = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}
    if module == "smolvlm":
        images, video = _of("smolvlm", "SmolVLMImageProcessor")(**sizes), _of("smolvlm", "SmolVLMVideoProcessor")()
        return _of("smolvlm", "SmolVLMProcessor")(images, words, video, image_seq_len=4, chat_template=template)
    images = _of("idefics3", "Idefics3ImageProcessor")(**sizes)
    return _of("idefics3", "Idefics3Processor")(images, words, image_seq_len=4, chat_template=template)


def _internvl() -> Any:
    specials = ["<|im_start|>", "<|im_end|>", "<IMG_CONTEXT>", "<img>", "</img>", "<video>", "<|endoftext|>"]
    named = {
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }  # fmt: skip
    images = _of("got_ocr2", "GotOcr2ImageProcessor")(
        size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=3
    )
    words = tokenizer(specials, named, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    template = _turns(*CHATML, "<IMG_CONTEXT>\\n", "<|im_start|>assistant\\n")
    return _of("internvl", "InternVLProcessor")(
        images, words, _of("internvl", "InternVLVideoProcessor")(), image_seq_length=4, chat_template=template
    )


def _llava(module: str, name: str, images: Any) -> Any:
    words = tokenizer(["<image>", "<s>", "</s>", "<pad>"], bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    template = _turns("' + (role | upper) + ': ", "</s>", "<image>\\n", "ASSISTANT: ")
    return _of(module, name)(
        images, words, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=template,
    )  # fmt: skip


def _llava_15() -> Any:
    size = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    return _llava("llava", "LlavaProcessor", _of("clip", "CLIPImageProcessor")(**size))


def _llava_next() -> Any:
    images = _of("llava_next", "LlavaNextImageProcessor")(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56},
        image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]],
    )  # fmt: skip
    return _llava("llava_next", "LlavaNextProcessor", images)


def _glm(module: str, name: str, part: str) -> Any:
    specials = [
        "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|endoftext|>", "<|image|>", "<|video|>",
        "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    ]  # fmt: skip
    template = _turns(
        "<|' + role + '|>\\n",
        "<|endoftext|>",
        "<|begin_of_image|><|image|><|end_of_image|>",
        "<|assistant|>\\n",
        "[gMASK]<sop>",
    )
    images = _of(module, f"{part}ImageProcessor")(size={"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 64})
    words = tokenizer(specials, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    return _of(module, name)(images, words, _of(module, f"{part}VideoProcessor")(), chat_template=template)


def _lfm2() -> Any:
    specials = [
        "<|startoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<image>",
        "<|image_start|>",
        "<|image_end|>",
        "<|img_thumbnail|>",
        "<|pad|>",
    ]
    words = tokenizer(specials, bos_token="<|startoftext|>", eos_token="<|im_end|>", pad_token="<|pad|>")
    template = _turns(*CHATML, "<image>", "<|im_start|>assistant\\n", "{{- bos_token -}}")
    return _of("lfm2_vl", "Lfm2VlProcessor")(_of("lfm2_vl", "Lfm2VlImageProcessor")(), words, chat_template=template)


def _paddle() -> Any:
    specials = ["<|begin_of_sentence|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<pad>", "</s>"]
    words = tokenizer(
        specials, {"image_token": "<|IMAGE_PLACEHOLDER|>"},
        bos_token="<|begin_of_sentence|>", eos_token="</s>", pad_token="<pad>",
    )  # fmt: skip
    template = _turns(
        "' + (role | capitalize) + ': ", "</s>", "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>", "Assistant: ",
        "{{- bos_token -}}",
    )  # fmt: skip
    images = _of("paddleocr_vl", "PaddleOCRVLImageProcessor")()
    return _of("paddleocr_vl", "PaddleOCRVLProcessor")(images, words, chat_template=template)


_PROCESSORS = {
    "qwen2_vl": lambda: _qwen("qwen2_vl", "Qwen2VLProcessor"),
    "qwen2_5_vl": lambda: _qwen("qwen2_5_vl", "Qwen2_5_VLProcessor"),
    "qwen3_vl": lambda: _qwen("qwen3_vl", "Qwen3VLProcessor", ("qwen3_vl", "Qwen3VLVideoProcessor")),
    "gemma3": _gemma3,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "smolvlm2": lambda: _smol("smolvlm"),
    "idefics3": lambda: _smol("idefics3"),
    "llava": _llava_15,
    "llava_next": _llava_next,
    "pixtral": _pixtral,
    "mistral3": lambda: _pixtral(128, 14, 2),
    "internvl": _internvl,
    "llama4": _llama4,
    "glm4v": lambda: _glm("glm4v", "Glm4vProcessor", "Glm4v"),
    "glm46v": lambda: _glm("glm46v", "Glm46VProcessor", "Glm46V"),
    "lfm2_vl": _lfm2,
    "paddleocr": _paddle,
    "llama3_2_vision": _mllama,
}
FAMILIES = tuple(_PROCESSORS)


@cache
def processor(family: str) -> Any:
    """The processor of a family, with settings that make few slots of an image."""
    return _PROCESSORS[family]()


TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip
_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def _qwen_model(family: str, config: str, model: str, vision: dict[str, Any]) -> Any:
    words = processor(family).tokenizer
    ids = words.convert_tokens_to_ids
    text = {
        **TEXT,
        "vocab_size": len(words),
        "rope_parameters": _ROPE,
        **({"head_dim": 16} if family == "qwen3_vl" else {}),
    }
    return getattr(transformers, model)(
        getattr(transformers, config)(
            text_config=text,
            vision_config={
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "num_heads": 2,
                **vision,
            },
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
        )
    )


def _simple(
    family: str, config: str, model: str, token: str, text: dict[str, Any], vision: dict[str, Any], **more: Any
) -> Any:
    words = processor(family).tokenizer
    token_id = words.convert_tokens_to_ids(token)
    made = getattr(transformers, config)(
        text_config={**TEXT, "vocab_size": len(words), **text},
        vision_config={**_TOWER, **vision},
        image_token_id=token_id,
        image_token_index=token_id,
        **more,
    )
    return getattr(transformers, model)(made)


def _gemma3_model() -> Any:
    words = processor("gemma3").tokenizer
    ids = words.convert_tokens_to_ids
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    text = {
        **TEXT,
        "vocab_size": len(words),
        "head_dim": 16,
        "sliding_window": 6,
        "layer_types": layers,
        "query_pre_attn_scalar": 16,
    }
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config=text,
            vision_config={**_TOWER, "image_size": 56, "patch_size": 14},
            mm_tokens_per_image=4,
            image_token_index=ids("<image_soft_token>"),
            boi_token_index=ids("<start_of_image>"),
            eoi_token_index=ids("<end_of_image>"),
        )
    )


def _glm_model() -> Any:
    words = processor("glm4v").tokenizer
    ids = words.convert_tokens_to_ids
    named = {
        "image_token_id": "<|image|>", "video_token_id": "<|video|>", "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>", "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    }  # fmt: skip
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 64,
        "patch_size": 14,
        "image_size": 56,
    }
    text = {**TEXT, "vocab_size": len(words), "rope_parameters": _ROPE}
    config = transformers.Glm4vConfig(
        text_config=text, vision_config=vision, **{name: ids(token) for name, token in named.items()}
    )
    return transformers.Glm4vForConditionalGeneration(config)


_MODELS = {
    "qwen2_vl": lambda: _qwen_model(
        "qwen2_vl", "Qwen2VLConfig", "Qwen2VLForConditionalGeneration",
        {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    ),
    "qwen2_5_vl": lambda: _qwen_model(
        "qwen2_5_vl", "Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration",
        {"depth": 2, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "window_size": 56,
         "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": lambda: _qwen_model(
        "qwen3_vl", "Qwen3VLConfig", "Qwen3VLForConditionalGeneration",
        {"depth": 3, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "num_position_embeddings": 64,
         "deepstack_visual_indexes": [0, 1]},
    ),
    "gemma3": _gemma3_model,
    "glm4v": _glm_model,
    "smolvlm2": lambda: _simple(
        "smolvlm2", "SmolVLMConfig", "SmolVLMForConditionalGeneration", "<image>", {"model_type": "llama"},
        {"image_size": 64, "patch_size": 16}, scale_factor=2, pad_token_id=0,
    ),
    "idefics3": lambda: _simple(
        "idefics3", "Idefics3Config", "Idefics3ForConditionalGeneration", "<image>", {"model_type": "llama"},
        {"image_size": 64, "patch_size": 16}, scale_factor=2, pad_token_id=0,
    ),
    "llava": lambda: _simple(
        "llava", "LlavaConfig", "LlavaForConditionalGeneration", "<image>", {"model_type": "llama"},
        {"model_type": "clip_vision_model", "num_hidden_layers": 3, "image_size": 56, "patch_size": 14,
         "projection_dim": 32},
    ),
    "pixtral": lambda: _simple(
        "pixtral", "LlavaConfig", "LlavaForConditionalGeneration", "[IMG]",
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        {"model_type": "pixtral", "head_dim": 16, "image_size": 64, "patch_size": 16},
        vision_feature_layer=-1, vision_feature_select_strategy="full",
    ),
    "mistral3": lambda: _simple(
        "mistral3", "Mistral3Config", "Mistral3ForConditionalGeneration", "[IMG]",
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        {"model_type": "pixtral", "head_dim": 16, "image_size": 140, "patch_size": 14}, spatial_merge_size=2,
    ),
    "internvl": lambda: _simple(
        "internvl", "InternVLConfig", "InternVLForConditionalGeneration", "<IMG_CONTEXT>", {"model_type": "qwen2"},
        {"image_size": [56, 56], "patch_size": [14, 14]}, image_seq_length=4,
    ),
    "llama4": lambda: _simple(
        "llama4", "Llama4Config", "Llama4ForConditionalGeneration", "<|patch|>",
        {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2, "num_experts_per_tok": 1,
         "attention_chunk_size": 8192, "no_rope_layers": [1, 1, 0], "interleave_moe_layer_step": 2},
        {"intermediate_size": 128, "image_size": 56, "patch_size": 14, "vision_output_dim": 32,
         "projector_input_dim": 32, "projector_output_dim": 32, "pixel_shuffle_ratio": 0.5},
    ),
}  # fmt: skip
MODELS = tuple(_MODELS)


def model(family: str) -> Any:
    """A new tiny model of a family, the same each time, with weights spread so far that attention matters."""
    made = _MODELS[family]()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weights in made.named_parameters():
            values = torch.randn(weights.shape, generator=random)
            if weights.ndim == 2:
                weights.copy_(values * (0.3 if "embed" in name else 1 / weights.shape[-1] ** 0.5))
            elif weights.ndim > 2:
                weights.copy_(values * 0.15)
            elif "norm" not in name:
                weights.copy_(values * 0.05)
    return made.float().eval()


def picture(height: int, width: int, seed: int = 0) -> Any:
    """Noise over a gradient."""
    random = np.random.default_rng([seed, height, width])
    ground = np.linspace(0, 155, height)[:, None, None] + np.zeros((1, width, 3))
    return Image.fromarray((ground + random.integers(0, 100, (height, width, 3))).astype(np.uint8))


def chat(pictures: Sequence[Any], text: str = "What is it?", answer: str = "Yes.") -> list[dict[str, Any]]:
    """A message with pictures and text, and an answer."""
    asked = [*({"type": "image", "image": one} for one in pictures), {"type": "text", "text": text}]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]


def interleaved(pictures: Sequence[Any]) -> list[dict[str, Any]]:
    """Pictures with text between them, and an answer."""
    content: list[dict[str, Any]] = [{"type": "text", "text": "A "}]
    for one in pictures:
        content += [{"type": "image", "image": one}, {"type": "text", "text": "\n then "}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}]
