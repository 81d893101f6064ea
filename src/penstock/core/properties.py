"""`cached_property` for classes that protocols describe.

Pyright takes no `functools.cached_property` for the property of a protocol, so a user's editor
would mark `Loader(dataset)` as an error.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from builtins import property as cached_property
else:
    from functools import cached_property

__all__ = ["cached_property"]
