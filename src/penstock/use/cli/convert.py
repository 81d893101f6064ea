"""`penstock convert`: datasets to and from Megatron's format; import of .npy files."""

from pathlib import Path
from typing import Annotated

import typer

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.use.cli.declared_options import Option, options, takes
from penstock.use.cli.options import BARE_TOKENS, Given

READ, WRITTEN = ("penstock", "megatron", "npy"), ("penstock", "megatron")
"""Formats to convert from, and to."""


@takes(
    opening=(
        options(
            "data.shards.opening.open_dataset",
            path=Option(argument=True, metavar="PATH", hint=Path),
        ),
        BARE_TOKENS,
    ),
    settings=(
        options(
            "data.shards.convert.import_corpus",
            output=Option(metavar="PATH"),
            tokenizer=Option(),
        ),
        options("data.shards.convert.write_megatron", "drop_spans"),
    ),
)
def run(
    *,
    opening: Given,
    settings: Given,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="|".join(READ), help="Format of PATH; by default detected."),
    ] = None,
    target: Annotated[
        str, typer.Option("--to", metavar="|".join(WRITTEN), help="Format to write.")
    ] = "penstock",
) -> None:
    """Convert between penstock datasets and Megatron's .bin/.idx, and import .npy files of token
    ids.

    Example:
        penstock convert data/stories/train --to megatron -o megatron/stories
        penstock convert megatron/stories --tokenizer tokenizer -o data/from-megatron
    """
    for option, given, known in (("--from", source, READ), ("--to", target, WRITTEN)):
        if given is not None and given not in known:
            raise ConfigError(f"{option} {given}: unknown; expected one of {', '.join(known)}")
    path, output = opening["path"], settings["output"]
    corpus = ps.open_dataset(**opening)
    kind = "penstock" if isinstance(corpus, ps.Dataset) else corpus.kind.lower()
    if source is not None and source != kind:
        raise ConfigError(f"{path}: is {kind}, not {source}; omit --from, or give another path")
    if target == "megatron":
        prefix = ps.shards.write_megatron(
            corpus, output, drop_spans=settings.get("drop_spans", False), progress=True
        )
        print(f"{len(corpus):,} documents to {prefix}.bin and {prefix}.idx")
    elif not isinstance(corpus, ps.Dataset) and kind != "penstock":
        name = settings.get("tokenizer")
        loaded = None if name is None else ps.load_tokenizer(name)
        dataset = ps.shards.import_corpus(corpus, output, loaded, progress=True)
        print(f"{len(dataset):,} documents, {dataset.manifest.tokens:,} tokens to {output}")
    else:
        raise ConfigError(
            f"{path}: is already a penstock dataset; convert it with --to megatron, or copy "
            "it with `cp -r`"
        )
