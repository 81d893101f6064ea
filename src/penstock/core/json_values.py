"""Types of JSON values for signatures: objects whose fields their reader checks; and no NaN."""

import math
from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
"""A JSON object as `json.loads` gives it, such as a record of the data or a message of a chat."""
JsonValue = Any
"""Any value of JSON: what `json.loads` gives."""
JsonMapping = Mapping[str, Any]
"""A JSON object that is only read."""


def without_nan(value: object) -> JsonValue:
    """A value with null in place of NaN and infinity, which JSON has not; tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: without_nan(one) for name, one in value.items()}
    return [without_nan(one) for one in value] if isinstance(value, list | tuple) else value
