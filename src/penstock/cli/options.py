"""Options that several verbs have: one name, one meaning and one help text for each."""

import re
from typing import Annotated

import typer

ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}
"""What a shell's plain quotes cannot write, and what it stands for."""


def unescape(text: str | None) -> str | None:
    r"""`\n\n` as it is typed → two newlines.

    Raises:
        BadParameter: A backslash that is followed by something else.
    """
    if text is None:
        return None
    strange = re.search(r"\\[^ntr\\]|\\$", re.sub(r"\\\\", "", text))
    if strange:
        raise typer.BadParameter(f"{strange[0]!r} is no escape; known: {' '.join(ESCAPES)}")
    return re.sub(r"\\.", lambda found: ESCAPES[found[0]], text)


Format = Annotated[
    str | None,
    typer.Option("--format", metavar="FORMAT", help="jsonl, parquet, text or arrow; by default the file names tell."),
]
TextField = Annotated[
    str, typer.Option("--text-field", metavar="NAME", help="Field that holds the text; a dot goes into objects.")
]
Separator = Annotated[
    str | None,
    typer.Option(
        "--separator",
        metavar="TEXT",
        callback=unescape,
        help=r"Plain text: what stands between documents, such as `'\n\n'` (`\n`, `\t`, `\r` and `\\` are escapes); "
        "by default a file is one document.",
    ),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="TYPE", help="Type of the tokens of an .npy file: uint16 or uint32.")
]
EosId = Annotated[
    int | None, typer.Option("--eos-id", metavar="ID", help="The token that ends each document of an .npy file.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the run file, such as data.loader.seed=7; may be repeated.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")]
"""A flag takes no value, hence the empty metavar here and elsewhere."""
