"""`penstock convert`: datasets to and from Megatron's format; import of .npy files."""

from pathlib import Path
from typing import Annotated

import typer

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.use.cli.options import Dtype, EosId

READ, WRITTEN = ("penstock", "megatron", "npy"), ("penstock", "megatron")
"""Formats to convert from, and to."""


def run(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Dataset folder, Megatron prefix, or .npy file.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="New dataset folder, or prefix for .bin and .idx.",
        ),
    ],
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="|".join(READ), help="Format of PATH; by default detected."),
    ] = None,
    target: Annotated[
        str, typer.Option("--to", metavar="|".join(WRITTEN), help="Format to write.")
    ] = "penstock",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help=(
                "Tokenizer of a Megatron or .npy corpus (or a hub name); all ids are checked "
                "against it."
            ),
        ),
    ] = None,
    dtype: Dtype = None,
    eos_id: EosId = None,
    drop_spans: Annotated[
        bool,
        typer.Option(
            "--drop-spans",
            metavar="",
            help="Discard loss weights, which Megatron's format cannot store.",
        ),
    ] = False,
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
    corpus = ps.open_dataset(path, dtype=dtype, eos_id=eos_id)
    kind = "penstock" if isinstance(corpus, ps.Dataset) else corpus.kind.lower()
    if source is not None and source != kind:
        raise ConfigError(f"{path}: is {kind}, not {source}; omit --from, or give another path")
    if target == "megatron":
        prefix = ps.shards.write_megatron(corpus, output, drop_spans=drop_spans, progress=True)
        print(f"{len(corpus):,} documents to {prefix}.bin and {prefix}.idx")
    elif not isinstance(corpus, ps.Dataset) and kind != "penstock":
        loaded = None
        if tokenizer is not None:
            loaded = ps.load_tokenizer(tokenizer)
        dataset = ps.shards.import_corpus(corpus, output, loaded, progress=True)
        print(f"{len(dataset):,} documents, {dataset.manifest.tokens:,} tokens to {output}")
    else:
        raise ConfigError(
            f"{path}: is already a penstock dataset; convert it with --to megatron, or copy "
            "it with `cp -r`"
        )
