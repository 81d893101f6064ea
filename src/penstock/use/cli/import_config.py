"""`penstock import-config`: a run file and commands from another library's configuration."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.errors import OutputError
from penstock.core.terminal import visible
from penstock.use.cli import used
from penstock.use.cli.help_pages import colourful

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.use.config.imports.notes import Note


def run(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help="A configuration of axolotl, TRL or LLaMA-Factory: YAML, JSON or a command line.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The run file to write.")
    ] = Path("run.yaml"),
    ranks: Annotated[
        int,
        typer.Option(
            metavar="N", help="Processes that will train; they multiply the rows of a step.", min=1
        ),
    ] = 1,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=(
                "Optimizer steps of the run, which `penstock train --dry-run` tells; shares of it "
                "become steps."
            ),
            min=1,
        ),
    ] = None,
    library: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="LIBRARY",
            help=(
                "Whose configuration it is, if its keys do not say so: axolotl, trl (or trl-sft, "
                "trl-dpo, trl-kto, trl-grpo), llama-factory."
            ),
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", metavar="", help="Replace an existing run file.")
    ] = False,
) -> None:
    """Translate a configuration of axolotl, TRL or LLaMA-Factory into a run file, and print the
    commands that prepare the data and train.

    Every key is accounted for: translated, without effect on the result, or not supported, with
    what to do instead. The run file begins with these lists; what needs your attention is also
    printed to standard error.

    Example:
        penstock import-config axolotl.yaml -o imported.yaml
    """
    module = output.with_name(f"{output.stem.replace('-', '_').replace('.', '_')}_prompts.py")
    found = used.reading.import_config(
        config, library=library, run_file=str(output), ranks=ranks, steps=steps
    )
    written = {
        output: found.text(str(config)),
        **({module: found.code} if found.code is not None else {}),
    }
    # What cannot be read as a run file is not written.
    used.checked_models.check(
        used.document.Document(f"the run file made of {config}", dict(found.run), {}),
        used.run_file.RunSettings,
    )
    for path in written:
        if path.exists() and not overwrite:
            raise OutputError(
                f"{path}: exists already; name another with --output, or add --overwrite"
            )
    for path, text in written.items():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
    _show(output, found.notes, found.install)
    print(*found.commands, sep="\n")


def _show(output: Path, notes: "Sequence[Note]", install: str) -> None:
    """Print what needs attention to standard error."""
    bold, plain = ("\x1b[1m", "\x1b[0m") if colourful(sys.stderr) else ("", "")
    width = min(shutil.get_terminal_size().columns, 120)
    head = [used.notes.summary(notes), f"All of them stand at the top of {output}."]
    said = [
        *head,
        "",
        *used.notes.report(notes, used.notes.LOUD),
        "",
        "The commands need:",
        f"  {install}",
        "",
        "Commands:",
    ]
    for line in said:
        text = visible(line)
        # A heading stands alone on its line.
        shown = f"{bold}{text}{plain}" if text.endswith(":") and not text.startswith(" ") else text
        print("\n".join(used.notes.wrapped(shown, width)), file=sys.stderr)
    sys.stderr.flush()
