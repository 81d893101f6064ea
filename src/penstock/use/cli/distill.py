"""`penstock distill`: audit a student/teacher pair, and precompute projections and teacher
outputs.
"""

import json
from typing import Annotated

import typer

import penstock as ps
from penstock.use.cli import used
from penstock.use.cli.declared_options import Option, options, takes
from penstock.use.cli.options import ASSIGNMENTS, AsJson, Given

Student = Annotated[
    str, typer.Argument(metavar="STUDENT", help="The student's tokenizer, or a run.")
]
Teacher = Annotated[
    str, typer.Argument(metavar="TEACHER", help="The teacher's tokenizer, or a run.")
]
Control = Annotated[
    list[str] | None,
    typer.Option(
        metavar="STUDENT=TEACHER",
        help="Control tokens with the same meaning. May be repeated.",
    ),
]

_AUDIT = "use.inspection.teacher_audit_inputs.audit_teacher"

app = typer.Typer(
    help="Audit and prepare distillation from teachers that may have another tokenizer.",
    no_args_is_help=True,
)


@app.callback()
def group() -> None:
    """Audit and prepare distillation from teachers that may have another tokenizer."""


@app.command()
@takes(
    settings=(
        options(
            _AUDIT,
            student=Option(argument=True, metavar="STUDENT", hint=str),
            teacher=Option(argument=True, metavar="TEACHER", hint=str),
            text=Option(metavar="SOURCE"),
            data=Option(metavar="DATASET"),
            documents=Option(),
            control=Option(metavar="STUDENT=TEACHER"),
            format=Option(),
            text_field=Option(),
        ),
        options(
            _AUDIT,
            panel="Chats",
            chats=Option(metavar="SOURCE"),
            student_template=Option(metavar="PATH"),
            teacher_template=Option(metavar="PATH"),
        ),
    )
)
def audit(*, settings: Given, as_json: AsJson = False) -> None:
    """Measure how well a student's tokens align with a teacher's, and recommend a loss, before any
    training.

    Example:
        penstock distill audit tokenizer runs/first --text stories.jsonl
    """
    report = ps.inspection.audit_teacher(**settings)
    if as_json:
        print(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        used.teacher_terminal.show_audit(report)


@app.command()
@takes(
    settings=(
        options("learn.distillation.projection.project", "top_k", "max_pieces", "decay", "reverse"),
    )
)
def project(
    *,
    student: Student,
    teacher: Teacher,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The .safetensors file to write.")
    ],
    settings: Given,
    control: Control = None,
    as_json: AsJson = False,
) -> None:
    """Build the projection from a student's vocabulary to a teacher's, for the losses p_kl and
    h_kl, and save it.

    Without such a file, each training builds the projection with default settings when it starts.
    The file saves that time and can hold other settings. It is valid only for these two tokenizers.

    Example:
        penstock distill project tokenizer runs/first -o projection.safetensors
    """
    folder_of = used.teacher_audit_inputs.tokenizer_folder
    ours, theirs = (ps.load_tokenizer(folder_of(path)) for path in (student, teacher))
    found = ps.distillation.project(
        ours,
        theirs,
        **settings,
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
@takes(
    settings=(
        options(
            "use.config.teacher_cache.cache_teacher",
            run_file=Option(argument=True, metavar="RUN.YAML"),
            output=Option(metavar="DIR"),
            model=Option(flag="--teacher", metavar="MODEL"),
            number=Option(),
            top_k=Option(metavar="K"),
            temperature=Option(),
            precision=Option(),
            device=Option(),
            threads=Option(),
        ),
        ASSIGNMENTS,
    ),
)
def cache(*, settings: Given, as_json: AsJson = False) -> None:
    """Store a teacher's predictions for the data of a run, so that training does not need the
    teacher's model.

    Use the same data, sequence length and teacher settings as in training. Then set `cache: DIR`
    instead of `model` in the run file. If it is killed, the same command resumes from the last
    finished part.

    Example:
        penstock distill cache run.yaml --teacher runs/first -o data/teacher-cache
    """
    output = settings["output"]
    found = ps.cache_teacher(**settings, progress=not as_json)
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
