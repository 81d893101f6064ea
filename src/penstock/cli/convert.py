"""`penstock convert`."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import Dtype, EosId

READ, WRITTEN = ("penstock", "megatron", "npy"), ("penstock", "megatron")
"""Formats to convert from, and to."""


def run(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A dataset's folder, a Megatron prefix, or an .npy file.")
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="PATH", help="New folder for a dataset; prefix for .bin and .idx."),
    ],
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="|".join(READ), help="What PATH is; by default found by looking."),
    ] = None,
    target: Annotated[str, typer.Option("--to", metavar="|".join(WRITTEN), help="What to write.")] = "penstock",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="The tokenizer whose ids a foreign corpus holds (or a hub name); they are checked."
        ),
    ] = None,
    dtype: Dtype = None,
    eos_id: EosId = None,
    drop_spans: Annotated[
        bool,
        typer.Option("--drop-spans", metavar="", help="Lose the loss weights, which Megatron's format cannot hold."),
    ] = False,
) -> None:
    """Convert between penstock datasets and Megatron's .bin/.idx; import .npy files of bare tokens."""
    from penstock.errors import ConfigError
    from penstock.shards import InPlaceCorpus, import_corpus, open_dataset, write_megatron

    for option, given, known in (("--from", source, READ), ("--to", target, WRITTEN)):
        if given is not None and given not in known:
            raise ConfigError(f"{option} {given}: not known; known: {', '.join(known)}")
    corpus = open_dataset(path, dtype=dtype, eos_id=eos_id)
    kind = corpus.kind.lower() if isinstance(corpus, InPlaceCorpus) else "penstock"
    if source is not None and source != kind:
        raise ConfigError(f"{path}: is {kind}, not {source}; leave --from out, or give another path")
    if target == "megatron":
        prefix = write_megatron(corpus, output, drop_spans=drop_spans, progress=True)
        print(f"{len(corpus):,} documents to {prefix}.bin and {prefix}.idx")
    elif isinstance(corpus, InPlaceCorpus):
        loaded = None
        if tokenizer is not None:
            from penstock.tokenizers import load_tokenizer

            loaded = load_tokenizer(tokenizer)
        dataset = import_corpus(corpus, output, loaded, progress=True)
        print(f"{len(dataset):,} documents, {dataset.manifest.tokens:,} tokens to {output}")
    else:
        raise ConfigError(
            f"{path}: is a penstock dataset already; --to megatron converts it, and a copy is a plain `cp`"
        )
