"""`penstock schema`: the JSON Schema of a run file, for editors."""

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.core.errors import OutputError
from penstock.use.cli import used


def run(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write to this file instead of standard output."
        ),
    ] = None,
) -> None:
    """Print the JSON Schema of a run file.

    Editors use it to complete and check run files: put `# yaml-language-server:
    $schema=penstock.schema.json` on the first line of a run file.

    Example:
        penstock schema -o penstock.schema.json
    """
    text = json.dumps(used.config.run_schema(), indent=2, ensure_ascii=False)
    if output is None:
        print(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{output}: cannot be written ({error.strerror})") from error
