"""`penstock export`: a trained model in the Hugging Face layout, for transformers, vLLM and
llama.cpp.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import penstock as ps
from penstock.use.cli.model_options import ContextLength, Model
from penstock.use.cli.options import AsJson


def run(
    model: Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="New or empty folder.")
    ],
    context_length: ContextLength = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", metavar="", help="Replace an earlier export in the folder."),
    ] = False,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter", metavar="", help="Write the LoRA alone, as peft and vLLM read it."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the newest checkpoint of a run as a folder that transformers, vLLM and llama.cpp read.

    The folder includes tokenizer, chat template, stop ids and context length. LoRA is merged into
    the weights, or written alone with --adapter.

    Example:
        penstock export runs/first -o exported
    """
    found = ps.open_run(model).export(
        output, context_length=context_length, overwrite=overwrite, adapter=adapter
    )
    for notice in found.notices:
        print(f"penstock: {notice}", file=sys.stderr)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    step = "" if found.step is None else f" after step {found.step:,}"
    if found.base is not None:
        print(f"{output}: an adapter of {found.parameters:,} parameters{step} for {found.base}")
        return
    template = "with its chat template" if found.chat_template else "without a chat template"
    print(
        f"{output}: {found.parameters:,} parameters{step}, context of "
        f"{found.context_length:,} tokens, {template}"
    )
