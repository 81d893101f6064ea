"""`penstock tokenizer`: train a tokenizer, add control tokens to one, or describe one."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

import penstock as ps
from penstock.core.errors import ConfigError, TokenizerError
from penstock.core.terminal import safe_console, visible
from penstock.tokenizers import Tokenizer
from penstock.use.cli import used
from penstock.use.cli.options import AsJson, Delimiter, Format, OnDamagedFile, Separator, TextField

if TYPE_CHECKING:
    from penstock.tokenizers import Tokenizer

app = typer.Typer(
    help="Train a tokenizer, add control tokens to one, or describe one.", no_args_is_help=True
)


@app.command()
def train(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE", help="Files, folders, globs (quoted) or URLs such as s3://…."
        ),
    ],
    vocab_size: Annotated[
        int,
        typer.Option(
            "--vocab-size", metavar="N", help="Number of ids: 256 bytes, control tokens and merges."
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Folder for tokenizer.json and tokenizer_config.json.",
        ),
    ],
    special: Annotated[
        list[str] | None,
        typer.Option(
            "--special",
            metavar="TEXT",
            help="Control token besides BOS, EOS and padding; may be repeated.",
        ),
    ] = None,
    format: Format = None,
    text_field: TextField = "text",
    separator: Separator = None,
    delimiter: Delimiter = None,
    on_error: Annotated[
        str,
        typer.Option(
            "--on-error",
            metavar="stop|skip",
            help="At a bad record: stop, or skip it and count it.",
        ),
    ] = "stop",
    on_damaged_file: OnDamagedFile = "stop",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", metavar="", help="Replace an existing tokenizer.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    r"""Train a byte-level BPE on text, and save it in a form that transformers loads.

    Its alphabet has all 256 bytes, so it encodes any text. The same text gives the same tokenizer,
    byte for byte.

    Example:
        penstock tokenizer train stories.jsonl --vocab-size 2000 \
            --special '<|im_start|>' --special '<|im_end|>' -o tokenizer
    """
    for name, given in (("on_error", on_error), ("on_damaged_file", on_damaged_file)):
        if given not in ("stop", "skip"):
            raise ConfigError(f"{name} must be stop or skip; got {given!r}")
    rejects: list[ps.sources.Reject] = []
    damage: list[ps.sources.Damage] = []
    damaged = used.records.stop_at_damage if on_damaged_file == "stop" else damage.append
    fields = ps.sources.Fields(text=text_field)
    parts = ps.sources.open_sources(
        sources,
        format=format,
        fields=fields,
        separator=separator,
        delimiter=delimiter,
        damaged=damaged,
    )
    damage.clear()  # reading reports it again
    files = [file for part in parts for file in part.sources]
    packed = any(file.compression or file.suffixes[0] in (".parquet", ".arrow") for file in files)
    try:
        tokenizer = ps.train_tokenizer(
            ps.sources.read_texts(
                parts, skip=rejects.append if on_error == "skip" else None, damaged=damaged
            ),
            vocab_size=vocab_size,
            output=output,
            special_tokens=special or (),
            overwrite=overwrite,
            total_bytes=None if packed else sum(part.size_bytes for part in parts),
        )
    finally:
        if rejects:
            first = visible(str(rejects[0]), lines=True)
            print(
                f"penstock: bad records skipped: {len(rejects):,}; the first: {first}",
                file=sys.stderr,
            )
        for one in damage:
            print(f"penstock: WARNING: {visible(str(one), lines=True)}", file=sys.stderr)
    _show(describe(tokenizer), as_json)


@app.command()
def add(
    tokenizer: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A tokenizer.json, its folder, or a name on the Hugging Face hub."
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Folder for the new tokenizer; the old one is unchanged.",
        ),
    ],
    token: Annotated[
        list[str] | None,
        typer.Option("--token", metavar="TEXT", help="Control token to add; may be repeated."),
    ] = None,
    sentinels: Annotated[
        int,
        typer.Option(
            "--sentinels",
            metavar="N",
            min=0,
            help="Add <extra_id_0> to <extra_id_N-1>, for denoising.",
        ),
    ] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", metavar="", help="Replace an existing tokenizer.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add control tokens after all existing ids, so that prepared datasets stay valid.

    Then enlarge the model's embedding to the new size.

    Example:
        penstock tokenizer add tokenizer --sentinels 100 -o tokenizer-ul2
    """
    made = ps.tokenizers.add_tokens(
        tokenizer, token or (), sentinels=sentinels, output=output, overwrite=overwrite
    )
    _show(describe(made), as_json)


@app.command()
def show(
    tokenizer: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A file, a folder, or a name on the Hugging Face hub."),
    ],
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="NAME", help="Branch, tag or commit on the hub."),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern",
            metavar="REGEX",
            help="Pre-tokenization pattern for a .tiktoken file that has none.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Describe a tokenizer: kind, size, control tokens, encoder, and whether every id has exact
    bytes.

    Example:
        penstock tokenizer show tokenizer
    """
    _show(describe(ps.load_tokenizer(tokenizer, revision=revision, pattern=pattern)), as_json)


def describe(tokenizer: "Tokenizer") -> dict[str, Any]:
    """Properties of a tokenizer, JSON-ready; `byte_table_reason` is None if the table exists."""
    try:
        reason, _ = None, tokenizer.byte_table
    except TokenizerError as error:
        reason = str(error)
    return {
        "name": tokenizer.name,
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": tokenizer.fingerprint,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
        "special_tokens": tokenizer.special_tokens,
        "normalization": tokenizer.normalization,
        "encoder": tokenizer.encoder,
        "fallback_reason": tokenizer.fallback_reason,
        "byte_table": reason is None,
        "byte_table_reason": reason,
    }


def _show(findings: dict[str, Any], as_json: bool) -> None:

    if as_json:
        print(json.dumps(findings, indent=2, ensure_ascii=False))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(findings):
        table.add_row(name, Text(value))  # Text: control tokens in [brackets] are not markup
    safe_console().print(table)


def _rows(findings: dict[str, Any]) -> list[tuple[str, str]]:
    specials = findings["special_tokens"]
    shown = " ".join(f"{text}={token_id}" for text, token_id in list(specials.items())[:24])
    names = {token_id: text for text, token_id in specials.items()}
    roles = [(role, findings[f"{role}_id"]) for role in ("bos", "eos", "pad")]
    return [
        ("tokenizer", f"{findings['name']}: {findings['kind']}, {findings['vocab_size']:,} ids"),
        ("fingerprint", findings["fingerprint"]),
        *(
            (role, "none" if found is None else f"{found}  {names.get(found, '')}")
            for role, found in roles
        ),
        (
            "control",
            f"{len(specials)}: {shown}{' …' if len(specials) > 24 else ''}" if specials else "none",
        ),
        ("normalises", findings["normalization"] or "no"),
        (
            "encoder",
            findings["encoder"]
            + (f" ({findings['fallback_reason']})" if findings["fallback_reason"] else ""),
        ),
        ("byte table", findings["byte_table_reason"] or "exact"),
    ]
