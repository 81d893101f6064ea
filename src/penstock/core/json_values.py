"""Types of JSON values for signatures: objects whose fields their reader checks."""

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
"""A JSON object as `json.loads` gives it, such as a record of the data or a message of a chat."""
JsonValue = Any
"""Any value of JSON: what `json.loads` gives."""
JsonMapping = Mapping[str, Any]
"""A JSON object that is only read."""
