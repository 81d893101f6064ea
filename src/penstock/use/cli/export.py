"""`penstock export`: a trained model in the Hugging Face layout, for transformers, vLLM and
llama.cpp.
"""

import json
import sys
from dataclasses import asdict

import penstock as ps
from penstock.use.cli.declared_options import Option, options, takes
from penstock.use.cli.options import MODEL, AsJson, Given


@takes(
    settings=(
        MODEL,
        options(
            "use.runs.run.Run.export",
            output=Option(metavar="DIR"),
            context_length=Option(),
            dtype=Option(),
            overwrite=Option(),
            adapter=Option(),
        ),
    )
)
def run(*, settings: Given, as_json: AsJson = False) -> None:
    """Write the newest checkpoint of a run as a folder that transformers, vLLM and llama.cpp read.

    The folder includes tokenizer, chat template, stop ids and context length. LoRA is merged into
    the weights, or written alone with --adapter. --dtype bfloat16 halves the size of float32.

    Example:
        penstock export runs/first -o exported
        penstock export runs/first -o half --dtype bfloat16
    """
    output = settings["output"]
    found = ps.open_run(settings.pop("model")).export(**settings)
    for notice in found.notices:
        print(f"penstock: {notice}", file=sys.stderr)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    step = "" if found.dtype is None else f" in {found.dtype}"
    step += "" if found.step is None else f" after step {found.step:,}"
    if found.base is not None:
        print(f"{output}: an adapter of {found.parameters:,} parameters{step} for {found.base}")
        return
    template = "with its chat template" if found.chat_template else "without a chat template"
    print(
        f"{output}: {found.parameters:,} parameters{step}, context of "
        f"{found.context_length:,} tokens, {template}"
    )
