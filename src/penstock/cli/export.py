"""`penstock export`: a trained model in the Hugging Face layout, for transformers, vLLM and llama.cpp."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import AsJson
from penstock.cli.writing import ContextLength, Model


def run(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="A folder, new or empty.")],
    context_length: ContextLength = None,
    as_json: AsJson = False,
) -> None:
    """Write the newest checkpoint of a run as a folder that transformers, vLLM and llama.cpp read.

    With its tokenizer, chat template, stop ids and context length; LoRA is merged into the weights.
    """
    from safetensors import SafetensorError

    from penstock.cli.writing import context_of, template_of
    from penstock.errors import OutputError
    from penstock.models import export, load_model, merge_lora
    from penstock.tokenizers import load_tokenizer
    from penstock.training import open_run

    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise OutputError(f"{output}: is there and no empty folder; take another, or empty it")
    found = open_run(model)
    tokenizer = load_tokenizer(found.tokenizer)
    length = context_length or context_of(found)
    trained = load_model(found.model)
    if trained.lora is not None:
        merge_lora(trained)
    try:
        notices = export(
            trained,
            output,
            tokenizer=tokenizer,
            template=None if found.template is None else template_of(found, tokenizer),
            stop_ids=found.stop_ids,
            context_length=length,
        )
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{output}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
    for notice in notices:
        print(f"penstock: {notice}", file=sys.stderr)
    facts = {
        "output": str(output),
        "step": found.step,
        "parameters": sum(weight.numel() for weight in trained.parameters()),
        "context_length": length,
        "stop_ids": list(found.stop_ids),
        "chat_template": found.template is not None,
        "notices": list(notices),
    }
    if as_json:
        import json

        print(json.dumps(facts))
        return
    step = "" if found.step is None else f" after step {found.step:,}"
    template = "with its chat template" if found.template is not None else "without a chat template"
    print(f"{output}: {facts['parameters']:,} parameters{step}, context of {length:,} tokens, {template}")
