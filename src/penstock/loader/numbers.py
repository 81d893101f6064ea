"""Numbers that users pass, checked where they come in, so that a wrong one is named and not found later."""

import operator
from typing import Any

from penstock.errors import ConfigError


def whole(name: str, value: Any) -> int:
    """A whole number of any kind (NumPy's and torch's too) as an int.

    Raises:
        ConfigError: It is something else; floats are, even without a fraction.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be a whole number, got {value!r}") from None


def real(name: str, value: Any) -> float:
    """A number of any kind as a float; inf and nan are floats too.

    Raises:
        ConfigError: It is not a number; text that spells one is none.
    """
    if not isinstance(value, (str, bytes)):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    raise ConfigError(f"{name} must be a number, got {value!r}")
