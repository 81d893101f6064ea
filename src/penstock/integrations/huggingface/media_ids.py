"""What a processor says of its tokens: which stand for media, and its tokenizer as one of penstock."""

import json
import logging
import re
from typing import Any

from penstock.chat.families import token_id
from penstock.errors import TokenizerError
from penstock.tokenizers import Tokenizer

_log = logging.getLogger("penstock.huggingface")
_MEDIA = r"(?:.*_)?(?:image|img|video|audio|boi|eoi|boa|eoa)(?:_.*)?"
_TOKEN = re.compile(rf"{_MEDIA}_token")
"""Names of attributes that hold the text of a media token. Numbers there are something else (audio_ms_per_token)."""
_IDS = re.compile(rf"{_MEDIA}_token_ids?|image_ids")
"""Names of attributes that hold ids of media tokens."""


def media_ids(processor: Any) -> tuple[int, ...]:
    """Ids of the image, audio and video tokens that a processor declares; never that of the unknown token."""
    tokenizer, found = processor.tokenizer, set()
    for holder in (processor, tokenizer):
        for name, value in vars(holder).items():
            entries = value if isinstance(value, (list, tuple, set)) else [value]
            if _TOKEN.fullmatch(name):
                found |= {token_id(entry, tokenizer) for entry in entries if isinstance(entry, str)}
            elif _IDS.fullmatch(name):
                found |= {entry for entry in entries if isinstance(entry, int) and not isinstance(entry, bool)}
    unknown = getattr(tokenizer, "unk_token_id", None)
    return tuple(sorted(entry for entry in found if entry is not None and entry != unknown))


def own_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer of transformers as one of penstock, which finds more forms of a marker; itself where that fails."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer
    content = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    names = {name: str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    files = {"tokenizer.json": json.dumps(content).encode(), "tokenizer_config.json": json.dumps(names).encode()}
    try:
        return Tokenizer(type(tokenizer).__name__, files)
    except TokenizerError as error:
        _log.info("markers are encoded by the tokenizer of transformers: %s", error)
        return tokenizer
