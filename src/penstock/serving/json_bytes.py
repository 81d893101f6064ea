"""JSON as bytes: read strictly, written so that it can always be read."""

import json
from typing import Any


def json_bytes(value: Any) -> bytes:
    """UTF-8; a lone surrogate, which UTF-8 cannot write, becomes its JSON escape."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", "backslashreplace"
    )
