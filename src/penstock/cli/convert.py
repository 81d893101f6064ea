"""`penstock convert`."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Format(Enum):
    """Formats to convert from or to."""

    PENSTOCK = "penstock"
    MEGATRON = "megatron"
    NPY = "npy"


def run(
    path: Annotated[Path, typer.Argument(help="A dataset's folder, a Megatron prefix, or an .npy file.")],
    output: Annotated[Path, typer.Option(help="New folder for a dataset; prefix for Megatron.")],
    source: Annotated[
        Format | None, typer.Option("--from", help="What PATH is; found by looking, when not given.")
    ] = None,
    target: Annotated[Format, typer.Option("--to", help="What to write: penstock or megatron.")] = Format.PENSTOCK,
    tokenizer: Annotated[
        str | None, typer.Option(help="Whose ids a foreign corpus holds (a path or name); ids are checked against it.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Type of the tokens of an .npy file: uint16 or uint32.")] = None,
    eos_id: Annotated[int | None, typer.Option(help="The token that ends each document of an .npy file.")] = None,
    drop_spans: Annotated[
        bool, typer.Option("--drop-spans", help="Lose the loss weights, which Megatron's format cannot hold.")
    ] = False,
) -> None:
    """Convert between penstock datasets and Megatron's .bin/.idx; read .npy files of bare tokens."""
    from penstock.errors import ConfigError
    from penstock.shards import InPlaceCorpus, import_corpus, open_dataset, write_megatron

    corpus = open_dataset(path, dtype=dtype, eos_id=eos_id)
    kind = corpus.kind.lower() if isinstance(corpus, InPlaceCorpus) else "penstock"
    if source is not None and source.value != kind:
        raise ConfigError(f"{path}: is {kind}, not {source.value}; leave --from out, or give another path")
    if target is Format.MEGATRON:
        prefix = write_megatron(corpus, output, drop_spans=drop_spans, progress=True)
        print(f"{len(corpus):,} documents to {prefix}.bin and {prefix}.idx")
    elif target is Format.PENSTOCK and isinstance(corpus, InPlaceCorpus):
        loaded = None
        if tokenizer is not None:
            from penstock.tokenizers import load_tokenizer

            loaded = load_tokenizer(tokenizer)
        dataset = import_corpus(corpus, output, loaded, progress=True)
        print(f"{len(dataset):,} documents, {dataset.manifest.tokens:,} tokens to {output}")
    else:
        raise ConfigError(
            f"cannot convert {kind} to {target.value}; known: anything to megatron, megatron or npy to penstock"
        )
