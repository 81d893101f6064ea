"""`penstock distill`: what a student can learn from a teacher with another tokenizer, before and for training."""

from typing import Annotated

import typer

from penstock.cli.options import AsJson, Assignments, Format, TextField
from penstock.cli.writing import Device, Threads

app = typer.Typer(help="Look at, and prepare, distillation from teachers with other tokenizers.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Look at, and prepare, distillation from teachers with other tokenizers."""


@app.command()
def audit(
    student: Annotated[str, typer.Argument(metavar="STUDENT", help="Its tokenizer, or a run.")],
    teacher: Annotated[str, typer.Argument(metavar="TEACHER", help="Its tokenizer, or a run.")],
    text: Annotated[
        list[str] | None, typer.Option("--text", metavar="SOURCE", help="Files, globs or URLs of texts; repeatable.")
    ] = None,
    format: Format = None,
    text_field: TextField = "text",
    data: Annotated[
        list[str] | None, typer.Option("--data", metavar="DATASET", help="Datasets of the student's tokens.")
    ] = None,
    chats: Annotated[
        list[str] | None,
        typer.Option("--chats", metavar="SOURCE", help="Conversations, aligned turn by turn.", rich_help_panel="Chats"),
    ] = None,
    student_template: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="By default that of its tokenizer's folder.", rich_help_panel="Chats"),
    ] = None,
    teacher_template: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="By default that of its tokenizer's folder.", rich_help_panel="Chats"),
    ] = None,
    control: Annotated[
        list[str] | None,
        typer.Option(
            "--control", metavar="STUDENT=TEACHER", help="Control tokens that mean the same; may be repeated."
        ),
    ] = None,
    documents: Annotated[int, typer.Option(metavar="N", min=1, help="Of each kind of input, at most.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """Count how a student's tokens lie against a teacher's, and say which loss fits, before anything is trained."""
    import json

    from penstock.distillation.audit import Audit
    from penstock.distillation.audit_inputs import audit_chats, audit_dataset, audit_texts
    from penstock.distillation.audit_view import show_audit
    from penstock.distillation.projection_report import control_pairs
    from penstock.errors import ConfigError
    from penstock.tokenizers import load_tokenizer

    if not (text or data or chats):
        raise ConfigError("there is nothing to count: give --text, --data or --chats")
    folders = tokenizer_folder(student), tokenizer_folder(teacher)
    ours, theirs = load_tokenizer(folders[0]), load_tokenizer(folders[1])
    found = Audit(ours, theirs, control_pairs=control_pairs(control or [], ours, theirs))
    if text:
        audit_texts(found, text, documents, format=format, text_field=text_field)
    for dataset in data or []:
        audit_dataset(found, dataset, ours, documents)
    if chats:
        templates = student_template or folders[0], teacher_template or folders[1]
        audit_chats(found, chats, (ours, theirs), templates, documents)
    report = found.report()
    if as_json:
        print(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        show_audit(report)


def tokenizer_folder(path: str) -> str:
    """Where the tokenizer is of what a user names: a run has its own in a folder of that name."""
    from pathlib import Path

    folder = Path(path) / "tokenizer"
    return str(folder) if folder.is_dir() else path


@app.command()
def project(
    student: Annotated[str, typer.Argument(metavar="STUDENT", help="Its tokenizer, or a run.")],
    teacher: Annotated[str, typer.Argument(metavar="TEACHER", help="Its tokenizer, or a run.")],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="A .safetensors file.")],
    top_k: Annotated[
        int, typer.Option("--top-k", metavar="N", min=1, help="Teacher tokens of a student token, at most.")
    ] = 4,
    max_pieces: Annotated[
        int, typer.Option("--max-pieces", metavar="N", min=1, help="Of a token in pieces, so many count, the first.")
    ] = 4,
    decay: Annotated[
        float, typer.Option("--decay", metavar="X", help="Weight of a piece over that of the piece before it.")
    ] = 0.1,
    reverse: Annotated[
        bool,
        typer.Option("--reverse/--no-reverse", metavar="", help="Also split the teacher's tokens into the student's."),
    ] = True,
    control: Annotated[
        list[str] | None,
        typer.Option(
            "--control", metavar="STUDENT=TEACHER", help="Control tokens that mean the same; may be repeated."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say a student's vocabulary in a teacher's words, for the losses p_kl and h_kl, and save it.

    Built anew at the start of each training where no file is given; a file saves these seconds, and takes other
    settings. It goes with these two tokenizers only.
    """
    import json

    from penstock.distillation.projection import project as build
    from penstock.distillation.projection_report import control_pairs, describe_projection, show_projection
    from penstock.tokenizers import load_tokenizer

    ours, theirs = (load_tokenizer(tokenizer_folder(path)) for path in (student, teacher))
    found = build(
        ours, theirs, top_k=top_k, max_pieces=max_pieces, decay=decay, reverse=reverse,
        control_pairs=control_pairs(control or [], ours, theirs), progress=not as_json,
    )  # fmt: skip
    found.save(output)
    report = {"output": output, **describe_projection(found, ours, theirs)}
    if as_json:
        print(json.dumps(report))
    else:
        show_projection(report)


@app.command()
def cache(
    run_file: Annotated[str, typer.Argument(metavar="RUN.YAML", help="The run file that will train with the cache.")],
    output: Annotated[str, typer.Option("--output", "-o", metavar="DIR", help="The cache's folder.")],
    teacher: Annotated[
        str | None,
        typer.Option("--teacher", metavar="MODEL", help="A run or a model of transformers; by default the run file's."),
    ] = None,
    number: Annotated[
        int, typer.Option("--number", metavar="N", min=0, help="Which of the run file's teachers, from 0.")
    ] = 0,
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k", metavar="K", min=1, help="Tokens kept of each prediction; by default the loss's, or 64."
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", metavar="T", help="Of what is kept; by default the loss's.")
    ] = None,
    precision: Annotated[
        str, typer.Option("--precision", metavar="TYPE", help="Of log-probabilities: float16 or float32.")
    ] = "float16",
    device: Device = "auto",
    threads: Threads = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Write down once what a teacher says about the data of a run; training then needs no teacher.

    The run file's data, sequence length and settings of the teacher must be those of the training; then set
    `cache: DIR` instead of `model`. Killed at any moment, the same command goes on from the last part.
    """
    import json

    import torch

    from penstock.config import load_run
    from penstock.config.teacher_caches import cache_teacher
    from penstock.training.distributed import local_device

    if threads is not None:
        torch.set_num_threads(threads)
    if precision not in ("float16", "float32"):
        raise typer.BadParameter(f"{precision!r}; known: float16, float32", param_hint="--precision")
    found = cache_teacher(
        load_run(run_file, assignments or []),
        output,
        run_file=run_file,
        number=number,
        model=teacher,
        top_k=top_k,
        temperature=temperature,
        precision="float32" if precision == "float32" else "float16",
        device=local_device(device),
        progress=not as_json,
    )
    size = sum(found.part_bytes)
    facts = {"cache": output, "pieces": found.pieces, "tokens": found.tokens, "bytes": size}
    if as_json:
        print(json.dumps({**facts, "top_k": found.settings.top_k, "temperature": found.settings.temperature}))
        return
    print(
        f"{output}: {found.tokens:,} tokens of {found.settings.teacher} in {found.pieces:,} pieces, {size:,} bytes "
        f"({size / max(found.tokens, 1):.0f} a token)"
    )
