"""The formats on disk: how each file names its format and version, and how other versions are
refused.

A file says which format it has in one of three spellings. New formats use `"fields"`; the others
are kept, so that files of every release stay readable and equal byte for byte.

| `spelling` | what is written |
|---|---|
| `"fields"` | `"format": "penstock dataset", "version": 1` |
| `"number"` | `"format": 1`, in files that hold nothing but one format |
| `"text"` | `"format": "penstock projection 1"`, where values must be text |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

from penstock.core.errors import FormatError, PenstockError


@final
@dataclass(frozen=True, slots=True)
class Format:
    """One format on disk."""

    name: str
    """Name in files, such as "penstock dataset"."""
    version: int
    """The version that is written; it rises when an older penstock could not read the file
    correctly.
    """
    reads: tuple[int, ...] = ()
    """Older versions that can still be read."""
    spelling: Literal["fields", "number", "text"] = "fields"

    def fields(self) -> dict[str, str | int]:
        """The entries of a file that name its format and version."""
        if self.spelling == "fields":
            return {"format": self.name, "version": self.version}
        return {"format": self.version if self.spelling == "number" else self.text}

    @property
    def _kind(self) -> str:
        return self.name.removeprefix("penstock ")

    @property
    def text(self) -> str:
        """Name and version in one text."""
        return f"{self.name} {self.version}"

    def found_in(self, value: Mapping[str, object]) -> int | None:
        """The version of a file of this format; None: the file has another format, or none."""
        named = value.get("format")
        if self.spelling == "fields":
            number = value.get("version") if named == self.name else None
        elif self.spelling == "number":
            number = named
        else:
            name, _, digits = str(named).rpartition(" ")
            number = int(digits) if name == self.name and digits.isdecimal() else None
        return number if isinstance(number, int) and not isinstance(number, bool) else None

    def check(
        self,
        value: Mapping[str, object],
        where: object,
        *,
        cure: str,
        error: type[PenstockError] = FormatError,
    ) -> int:
        """The version of a file, which can be read.

        Args:
            value: The file's entries.
            where: The file, for messages.
            cure: How to get a file of this format, such as "prepare the data again".
            error: The class of the error.

        Raises:
            FormatError: The file has another format, or a version that is not read; of class
                `error`.
        """
        found = self.found_in(value)
        if found is None:
            expected = ", ".join(f"{name} {one!r}" for name, one in self.fields().items())
            given = value.get("format")
            raise error(
                f"{where}: not a {self._kind}: its format is {given!r}, expected {expected}; {cure}"
            )
        if found == self.version or found in self.reads:
            return found
        first = (
            "upgrade penstock"
            if found > self.version
            else "use the version of penstock that wrote it"
        )
        known = " and ".join(map(str, (*self.reads, self.version)))
        raise error(
            f"{where}: {self._kind} format version {found}, but this penstock reads version "
            f"{known}; {first}, or {cure}"
        )


DATASET = Format("penstock dataset", 1)
TEACHER_CACHE = Format("penstock teacher cache", 1)
PROJECTION = Format("penstock projection", 1, spelling="text")
MODEL = Format("penstock model", 1, spelling="number")
CHECKPOINT = Format("penstock checkpoint", 2, reads=(1,), spelling="number")
CONTINUED = Format("penstock continued run", 1, spelling="number")
LOADER_STATE = Format("penstock loader state", 2, spelling="number")
PREPARATION = Format("penstock preparation", 1)
"""Part of the identity of prepared parts: rises when `prepare` gives other bytes for the same
settings, so that old parts are not mixed with new ones.
"""
KERNEL = Format("penstock kernel", 1)
"""Part of the names of compiled kernels: rises when older files can no longer be read."""
PLACE = Format("penstock place in the data", 1, spelling="number")
