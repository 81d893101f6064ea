"""`penstock generate`: text from a trained model."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import penstock as ps
from penstock.core.errors import RecordError
from penstock.core.terminal import visible
from penstock.use.cli import used
from penstock.use.cli.declared_options import Option, options, takes
from penstock.use.cli.options import MODEL, OPENING, SAMPLING, AsJson, Given


@takes(
    settings=(
        MODEL,
        options(
            "use.runs.run.Run.generate",
            prompt=Option(repeated=True, hint=str),
        ),
        SAMPLING,
        options(
            "learn.generation.settings.Sampling",
            "min_tokens",
            max_tokens=Option(default="the model's own, or 256"),
        ),
        OPENING,
    )
)
def run(
    *,
    settings: Given,
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read a prompt from a file; - is standard input."),
    ] = None,
    num: Annotated[
        int,
        typer.Option(
            "--num",
            "-n",
            metavar="N",
            help="Texts per prompt, with seeds --seed, --seed + 1, …",
            min=1,
        ),
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Generate text with a trained model.

    A single text is streamed; several are printed one after another, each with its prompt. Each
    prompt is preceded by BOS if the model was trained so. Control tokens are never generated.

    Example:
        penstock generate runs/first --prompt 'The wheel' -n 3 --max-tokens 40
    """
    actions = used.actions  # Refused before anything is read where torch is missing.
    opening = actions.take_opening(settings)
    texts = settings.pop("prompt", ())
    prompts = [*texts, *([_read(file)] if file is not None else [])] or [""]
    found = used.run_folder.RunFolder.open(settings.pop("model"))
    asked = actions.ask(prompts, num, actions.sampling_of(settings, actions.own_sampling(found)))
    writer = used.opening.load_writer(found, **opening, slots=min(len(asked), actions.MOST_AT_ONCE))
    ids = actions.prompt_ids(writer, asked)
    ways = [way for _, way in asked]
    if as_json:
        _print_json(writer, asked, writer.engine.generate_all(ids, ways))
    elif len(asked) == 1:
        _show(asked[0][0])
        for event in writer.engine.generate(ids, ways):
            _show(event.text)
        print()
    else:
        _print_texts(asked, writer.engine.generate_all(ids, ways))


def _read(file: Path) -> str:

    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{file}: cannot be read as a prompt: {error}") from None


def _show(text: str) -> None:
    """Print text at once. In a terminal, characters that would move the cursor are made visible."""
    print(visible(text, lines=True) if sys.stdout.isatty() else text, end="", flush=True)


def _print_texts(asked: list[tuple[str, Any]], written: list[Any]) -> None:

    console = ps.inspection.make_console()
    for number, ((prompt, way), found) in enumerate(zip(asked, written, strict=True), 1):
        console.rule(
            f"{number} of {len(asked)}, seed {way.seed}, {len(found.tokens)} tokens",
            style="dim",
            align="left",
        )
        _show(prompt + found.text)
        print()


def _print_json(writer: Any, asked: list[tuple[str, Any]], written: list[Any]) -> None:

    texts = [
        {
            "prompt": prompt,
            "text": found.text,
            "finish_reason": found.finish_reason,
            "seed": way.seed,
            "tokens": list(found.tokens),
        }
        for (prompt, way), found in zip(asked, written, strict=True)
    ]
    print(
        json.dumps({"model": writer.name, "step": writer.step, "texts": texts}, ensure_ascii=False)
    )
