"""Qwen2-Audio in small: its processor and a tiny random model, and sounds, built without any
file.
"""

import io
import wave
from typing import Any

import numpy as np
import transformers

from makers.media import _TEXT, _spread, small_tokenizer

CONTROLS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_bos|>",
    "<|AUDIO|>",
    "<|audio_eos|>",
]
TEMPLATE = (
    r"{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if "
    r"message['content'] is string %}{{ message['content'] }}{% else %}{% for part in "
    r"message['content'] %}{% if part['type'] == 'audio' %}{{ "
    r"'<|audio_bos|><|AUDIO|><|audio_eos|>\n' }}{% elif part['type'] == 'text' %}{{ "
    r"part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{% if "
    r"add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RATE, SECONDS = 4000, 2


def processor() -> Any:
    """Its processor, for sounds of at most two seconds."""
    extractor = transformers.WhisperFeatureExtractor(
        feature_size=8, sampling_rate=RATE, hop_length=40, chunk_length=SECONDS, n_fft=200
    )
    words = small_tokenizer(CONTROLS, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    return transformers.Qwen2AudioProcessor(extractor, words, chat_template=TEMPLATE)


def model() -> Any:
    """A new tiny model, the same each time."""
    words = processor().tokenizer
    config = transformers.Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 8,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "d_model": 32,
            "max_source_positions": 100,
        },
        text_config={
            **_TEXT,
            "model_type": "qwen2",
            "vocab_size": len(words),
            "bos_token_id": None,
            "eos_token_id": words.eos_token_id,
            "pad_token_id": words.pad_token_id,
        },
        audio_token_index=words.convert_tokens_to_ids("<|AUDIO|>"),
    )
    return _spread(transformers.Qwen2AudioForConditionalGeneration(config).float().eval())


def samples(seconds: float, seed: int = 0) -> np.ndarray[Any, Any]:
    """Tones with noise, float32 from -1 to 1."""
    random = np.random.default_rng([seed, int(seconds * 1000)])
    times = np.arange(int(RATE * seconds)) / RATE
    tones = sum(np.sin(2 * np.pi * random.uniform(100, 1500) * times) for _ in range(3)) / 4
    return (tones + random.normal(0, 0.05, len(times))).clip(-1, 1).astype(np.float32)


def as_wave(
    values: np.ndarray[Any, Any], width: int = 2, channels: int = 1, rate: int = RATE
) -> bytes:
    """The bytes of a WAV file."""
    full = {1: 127, 2: 32767, 3: 8388607, 4: 2147483647}[width]
    whole = (
        np.round(np.repeat(values[:, None], channels, 1).astype(np.float64) * full)
        .astype(np.int64)
        .reshape(-1)
    )
    if width == 1:
        raw = (whole + 128).astype(np.uint8).tobytes()
    elif width == 3:
        raw = whole.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    else:
        raw = whole.astype(f"<i{width}").tobytes()
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(raw)
    return out.getvalue()
