"""`penstock tokenizer`: train a tokenizer, add control tokens to one, or describe one."""

import json
import sys
from typing import TYPE_CHECKING, Any

import typer

import penstock as ps
from penstock.core.errors import TokenizerError
from penstock.core.terminal import safe_console, visible
from penstock.use.cli import used
from penstock.use.cli.declared_options import Option, options, takes
from penstock.use.cli.options import ESCAPED, FIELDS, SOURCES, AsJson, Given

if TYPE_CHECKING:
    from penstock.tokenizers import Tokenizer

app = typer.Typer(
    help="Train a tokenizer, add control tokens to one, or describe one.", no_args_is_help=True
)


_PREPARE = "data.prepare.settings.PrepareSettings"


@app.command()
@takes(
    settings=(
        options(
            "tokenizers.training.train_tokenizer",
            "vocab_size",
            output=Option(metavar="DIR"),
            special_tokens=Option(flag="--special"),
            overwrite=Option(),
        ),
    ),
    reading=(
        options(
            "data.prepare.preparation.prepare",
            source=Option(argument=True, metavar="SOURCE", repeated=True, help=SOURCES),
        ),
        options(_PREPARE, "format"),
        FIELDS,
        options(_PREPARE, "on_error", "on_damaged_file", separator=ESCAPED, delimiter=ESCAPED),
    ),
)
def train(*, reading: Given, settings: Given, as_json: AsJson = False) -> None:
    r"""Train a byte-level BPE on text, and save it in a form that transformers loads.

    Its alphabet has all 256 bytes, so it encodes any text. The same text gives the same tokenizer,
    byte for byte.

    Example:
        penstock tokenizer train stories.jsonl --vocab-size 2000 \
            --special '<|im_start|>' --special '<|im_end|>' -o tokenizer
    """
    rejects: list[ps.sources.Reject] = []
    damage: list[ps.sources.Damage] = []
    skip = rejects.append if reading.pop("on_error", "stop") == "skip" else None
    stop = reading.pop("on_damaged_file", "stop") == "stop"
    damaged = used.records.stop_at_damage if stop else damage.append
    fields = ps.sources.Fields(text=reading.pop("text_field", "text"))
    parts = ps.sources.open_sources(
        reading.pop("source"), fields=fields, damaged=damaged, **reading
    )
    damage.clear()  # reading reports it again
    files = [file for part in parts for file in part.sources]
    packed = any(file.compression or file.suffixes[0] in (".parquet", ".arrow") for file in files)
    try:
        tokenizer = ps.train_tokenizer(
            ps.sources.read_texts(parts, skip=skip, damaged=damaged),
            total_bytes=None if packed else sum(part.size_bytes for part in parts),
            **settings,
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
@takes(
    settings=(
        options(
            "tokenizers.extension.add_tokens",
            tokenizer=Option(argument=True, metavar="PATH", hint=str),
            tokens=Option(flag="--token"),
            sentinels=Option(),
            output=Option(metavar="DIR", required=True),
            overwrite=Option(),
        ),
    )
)
def add(*, settings: Given, as_json: AsJson = False) -> None:
    """Add control tokens after all existing ids, so that prepared datasets stay valid.

    Then enlarge the model's embedding to the new size.

    Example:
        penstock tokenizer add tokenizer --sentinels 100 -o tokenizer-ul2
    """
    made = ps.tokenizers.add_tokens(**settings)
    _show(describe(made), as_json)


@app.command()
@takes(
    settings=(
        options(
            "tokenizers.loading.load_tokenizer",
            path_or_name=Option(argument=True, metavar="PATH"),
            revision=Option(metavar="NAME"),
            pattern=Option(metavar="REGEX"),
        ),
    )
)
def show(*, settings: Given, as_json: AsJson = False) -> None:
    """Describe a tokenizer: kind, size, control tokens, encoder, and whether every id has exact
    bytes.

    Example:
        penstock tokenizer show tokenizer
    """
    _show(describe(ps.load_tokenizer(**settings)), as_json)


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
