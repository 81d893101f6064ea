"""The figures that tests of real models measure: a table in the terminal, a file, a section of
docs/benchmarks.md.
"""

import json
import os
import platform
import re
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

COMMAND = "make test-real"
BEGIN, END = "<!-- real models: begin -->", "<!-- real models: end -->"
"""Around what `write_section` writes into a page."""
PEERS = ("torch", "transformers", "trl", "peft", "lm_eval")


def to(apart: float) -> str:
    """How far two figures are apart, in words."""
    return "bit for bit" if apart == 0 else f"to {apart:.0e}"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table: what was measured, ours, and the peer's with what it is compared
    by.
    """

    what: str
    ours: str
    against: str


@dataclass(kw_only=True)
class Report:
    """Figures in the order in which they were measured."""

    figures: list[Figure] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, what: str, ours: str, against: str) -> None:
        """Add a line; texts may have Markdown, and no `|`."""
        self.figures.append(Figure(what=what, ours=ours, against=against))

    @property
    def conditions(self) -> str:
        """Command, date, machine and versions."""
        packages = ", ".join(f"{name} {version(name)}" for name in PEERS)
        load = os.getloadavg()[2]  # of a quarter of an hour: what else the machine did
        machine = (
            f"{os.cpu_count()} CPU cores with a load of {load:.0f}, Python "
            f"{platform.python_version()}"
        )
        return (
            f"`{COMMAND}`, {date.today().isoformat()}, {machine}, {packages}: "
            f"{self.seconds / 60:.0f} minutes."
        )

    @property
    def table(self) -> str:
        """The figures as a table of Markdown."""
        lines = [f"| {one.what} | {one.ours} | {one.against} |" for one in self.figures]
        return "\n".join(["| what | penstock | against |", "|---|---|---|", *lines])

    def save(self, path: Path) -> None:
        """Write the figures as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        found = {
            "command": COMMAND,
            "conditions": self.conditions,
            "figures": [asdict(one) for one in self.figures],
        }
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def write_section(self, page: Path) -> None:
        """Replace the section of a page between `BEGIN` and `END`.

        Raises:
            ValueError: The page has no such section.
        """
        text = page.read_text(encoding="utf-8")
        found = re.search(f"{re.escape(BEGIN)}.*{re.escape(END)}", text, re.DOTALL)
        if found is None:
            raise ValueError(f"{page}: has no {BEGIN} with {END} after it")
        section = f"{BEGIN}\n{self.conditions}\n\n{self.table}\n{END}"
        page.write_text(text[: found.start()] + section + text[found.end() :], encoding="utf-8")
