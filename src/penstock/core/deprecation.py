"""Deprecated names: one warning for each, with what to use and the release that removes it."""

import warnings

_WARNED: set[str] = set()
"""Names that this process has warned of. Python's own filter asks for the line, so a loop over
files warns often.
"""


def warn_deprecated(old: str, *, use: str, since: str, until: str) -> None:
    """Warn once in a process that `old` is deprecated.

    The warning names the line of the caller's caller, which is the line to change.

    Args:
        old: The deprecated name, as users write it.
        use: What to write instead.
        since: The release that deprecated it.
        until: The release that removes it.
    """
    if old in _WARNED:
        return
    _WARNED.add(old)
    message = f"{old} is deprecated since penstock {since} and goes in {until}; use {use}"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
