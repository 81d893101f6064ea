"""`penstock generate`: text from a trained model."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import penstock as ps
from penstock.core.errors import RecordError
from penstock.core.terminal import visible
from penstock.use.cli.declared_options import Option, options, takes
from penstock.use.cli.options import MODEL, OPENING, SAMPLING, AsJson, Given

if TYPE_CHECKING:
    from penstock.use.runs.generating import SampledText


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
        options(
            "learn.generation.unmask_settings.Unmasking",
            "unmask_steps",
            "unmask_block",
            "remasking",
            panel="Diffusion",
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
    trained = ps.open_run(settings.pop("model"))
    texts = settings.pop("prompt", ())
    prompts = [*texts, *([_read(file)] if file is not None else [])] or [""]
    if as_json:
        _print_json(trained, trained.sample(prompts, samples=num, **settings))
    elif len(prompts) * num == 1:
        pieces = trained.stream(prompts[0], **settings)
        _show(prompts[0])
        for piece in pieces:
            _show(piece)
        print()
    else:
        _print_texts(trained.sample(prompts, samples=num, **settings))


def _read(file: Path) -> str:

    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{file}: cannot be read as a prompt: {error}") from None


def _show(text: str) -> None:
    """Print text at once. In a terminal, characters that would move the cursor are made visible."""
    print(visible(text, lines=True) if sys.stdout.isatty() else text, end="", flush=True)


def _print_texts(written: "list[SampledText]") -> None:
    console = ps.inspection.make_console()
    for number, one in enumerate(written, 1):
        console.rule(
            f"{number} of {len(written)}, seed {one.seed}, {len(one.tokens)} tokens",
            style="dim",
            align="left",
        )
        _show(one.prompt + one.text)
        print()


def _print_json(trained: "ps.Run", written: "list[SampledText]") -> None:
    texts = [
        {
            "prompt": one.prompt,
            "text": one.text,
            "finish_reason": one.finish_reason,
            "seed": one.seed,
            "tokens": list(one.tokens),
        }
        for one in written
    ]
    print(
        json.dumps(
            {"model": trained.name, "step": trained.step, "texts": texts}, ensure_ascii=False
        )
    )
