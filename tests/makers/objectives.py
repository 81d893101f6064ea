"""An objective to derive others from."""

from typing import Any


class PlainObjective:
    """Leaves the lengths of documents as they are; what it writes is the test's own."""

    name = "plain"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self) or ''})"

    def document_limit(self, slots: int) -> int:
        return slots

    def measure(self, lengths: Any, keys: Any) -> Any:
        return lengths
