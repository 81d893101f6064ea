"""`penstock distill`: audit a student/teacher pair, and precompute projections and teacher
outputs.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.use.cli import used
from penstock.use.cli.model_options import Device, Threads
from penstock.use.cli.options import AsJson, Assignments, Format, TextField

app = typer.Typer(
    help="Audit and prepare distillation from teachers that may have another tokenizer.",
    no_args_is_help=True,
)


@app.callback()
def group() -> None:
    """Audit and prepare distillation from teachers that may have another tokenizer."""


@app.command()
def audit(
    student: Annotated[
        str, typer.Argument(metavar="STUDENT", help="The student's tokenizer, or a run.")
    ],
    teacher: Annotated[
        str, typer.Argument(metavar="TEACHER", help="The teacher's tokenizer, or a run.")
    ],
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text", metavar="SOURCE", help="Text files, globs or URLs; may be repeated."
        ),
    ] = None,
    format: Format = None,
    text_field: TextField = "text",
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="DATASET",
            help="Datasets prepared with the student's tokenizer; may be repeated.",
        ),
    ] = None,
    chats: Annotated[
        list[str] | None,
        typer.Option(
            "--chats",
            metavar="SOURCE",
            help="Conversations, which are aligned turn by turn.",
            rich_help_panel="Chats",
        ),
    ] = None,
    student_template: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="By default that of its tokenizer's folder.",
            rich_help_panel="Chats",
        ),
    ] = None,
    teacher_template: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="By default that of its tokenizer's folder.",
            rich_help_panel="Chats",
        ),
    ] = None,
    control: Annotated[
        list[str] | None,
        typer.Option(
            "--control",
            metavar="STUDENT=TEACHER",
            help="Control tokens with the same meaning; may be repeated.",
        ),
    ] = None,
    documents: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum documents of each kind of input.")
    ] = 1000,
    as_json: AsJson = False,
) -> None:
    """Measure how well a student's tokens align with a teacher's, and recommend a loss, before any
    training.

    Example:
        penstock distill audit tokenizer runs/first --text stories.jsonl
    """
    if not (text or data or chats):
        raise ConfigError("nothing to audit: give --text, --data or --chats")
    folders = tokenizer_folder(student), tokenizer_folder(teacher)
    ours, theirs = ps.load_tokenizer(folders[0]), ps.load_tokenizer(folders[1])
    found = used.teacher_audit.Audit(
        ours, theirs, control_pairs=used.projection.control_pairs(control or [], ours, theirs)
    )
    if text:
        used.teacher_audit.audit_texts(found, text, documents, format=format, text_field=text_field)
    for dataset in data or []:
        used.teacher_audit.audit_dataset(found, dataset, ours, documents)
    if chats:
        templates = student_template or folders[0], teacher_template or folders[1]
        used.teacher_audit.audit_chats(found, chats, (ours, theirs), templates, documents)
    report = found.report()
    if as_json:
        print(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        used.teacher_terminal.show_audit(report)


def tokenizer_folder(path: str) -> str:
    """The tokenizer that a path means: a run has its own in the folder `tokenizer`."""
    folder = Path(path) / "tokenizer"
    return str(folder) if folder.is_dir() else path


@app.command()
def project(
    student: Annotated[
        str, typer.Argument(metavar="STUDENT", help="The student's tokenizer, or a run.")
    ],
    teacher: Annotated[
        str, typer.Argument(metavar="TEACHER", help="The teacher's tokenizer, or a run.")
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The .safetensors file to write.")
    ],
    top_k: Annotated[
        int,
        typer.Option(
            "--top-k", metavar="N", min=1, help="Maximum teacher tokens for each student token."
        ),
    ] = 4,
    max_pieces: Annotated[
        int,
        typer.Option(
            "--max-pieces",
            metavar="N",
            min=1,
            help="If a token splits into several, use the first N.",
        ),
    ] = 4,
    decay: Annotated[
        float,
        typer.Option(
            "--decay", metavar="X", help="Weight of each of these, relative to the one before it."
        ),
    ] = 0.1,
    reverse: Annotated[
        bool,
        typer.Option(
            "--reverse/--no-reverse",
            metavar="",
            help="Also split the teacher's tokens into the student's.",
        ),
    ] = True,
    control: Annotated[
        list[str] | None,
        typer.Option(
            "--control",
            metavar="STUDENT=TEACHER",
            help="Control tokens with the same meaning; may be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build the projection from a student's vocabulary to a teacher's, for the losses p_kl and
    h_kl, and save it.

    Without such a file, each training builds the projection with default settings when it starts.
    The file saves that time and can hold other settings. It is valid only for these two tokenizers.

    Example:
        penstock distill project tokenizer runs/first -o projection.safetensors
    """
    ours, theirs = (ps.load_tokenizer(tokenizer_folder(path)) for path in (student, teacher))
    found = used.projection.project(
        ours,
        theirs,
        top_k=top_k,
        max_pieces=max_pieces,
        decay=decay,
        reverse=reverse,
        control_pairs=used.projection.control_pairs(control or [], ours, theirs),
        progress=not as_json,
    )
    found.save(output)
    report = {"output": output, **used.projection.describe_projection(found, ours, theirs)}
    if as_json:
        print(json.dumps(report))
    else:
        used.projection.show_projection(report)


@app.command()
def cache(
    run_file: Annotated[
        str, typer.Argument(metavar="RUN.YAML", help="The run file that will train with the cache.")
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="DIR", help="Folder of the cache.")
    ],
    teacher: Annotated[
        str | None,
        typer.Option(
            "--teacher",
            metavar="MODEL",
            help="A run or a transformers model; by default the run file's.",
        ),
    ] = None,
    number: Annotated[
        int,
        typer.Option(
            "--number", metavar="N", min=0, help="Index of the teacher in the run file, from 0."
        ),
    ] = 0,
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k",
            metavar="K",
            min=1,
            help="Tokens stored for each prediction; by default the loss's top_k, or 64.",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", metavar="T", help="Of the stored probabilities; by default the loss's."
        ),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            "--precision", metavar="float16|float32", help="Of the stored log-probabilities."
        ),
    ] = "float16",
    device: Device = "auto",
    threads: Threads = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Store a teacher's predictions for the data of a run, so that training does not need the
    teacher's model.

    Use the same data, sequence length and teacher settings as in training. Then set `cache: DIR`
    instead of `model` in the run file. If it is killed, the same command resumes from the last
    finished part.

    Example:
        penstock distill cache run.yaml --teacher runs/first -o data/teacher-cache
    """
    # Plain strings from the command line; cache_teacher checks them.
    choices: dict[str, Any] = {"precision": precision}
    found = ps.cache_teacher(
        run_file,
        output,
        number=number,
        model=teacher,
        top_k=top_k,
        temperature=temperature,
        **choices,
        device=device,
        threads=threads,
        assignments=assignments or (),
        progress=not as_json,
    )
    size = sum(found.part_bytes)
    facts = {"cache": output, "pieces": found.pieces, "tokens": found.tokens, "bytes": size}
    if as_json:
        print(
            json.dumps(
                {**facts, "top_k": found.settings.top_k, "temperature": found.settings.temperature}
            )
        )
        return
    print(
        f"{output}: {found.tokens:,} tokens of {found.settings.teacher} in {found.pieces:,} "
        f"pieces, {size:,} bytes ({size / max(found.tokens, 1):.0f} a token)"
    )
