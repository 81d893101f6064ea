"""Options that several verbs have: one name, one meaning and one help text for each.

The options of chats come together: `takes_chat_options` gives them to a verb as one dictionary of settings.
"""

import re
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}
"""What a shell's plain quotes cannot write, and what it stands for."""


def unescape(text: str | None) -> str | None:
    r"""`\n\n` as it is typed → two newlines.

    Raises:
        BadParameter: A backslash that is followed by something else.
    """
    if text is None:
        return None
    strange = re.search(r"\\[^ntr\\]|\\$", re.sub(r"\\\\", "", text))
    if strange:
        raise typer.BadParameter(f"{strange[0]!r} is no escape; known: {' '.join(ESCAPES)}")
    return re.sub(r"\\.", lambda found: ESCAPES[found[0]], text)


Format = Annotated[
    str | None,
    typer.Option("--format", metavar="FORMAT", help="jsonl, parquet, text or arrow; by default the file names tell."),
]
TextField = Annotated[
    str, typer.Option("--text-field", metavar="NAME", help="Field that holds the text; a dot goes into objects.")
]
Separator = Annotated[
    str | None,
    typer.Option(
        "--separator",
        metavar="TEXT",
        callback=unescape,
        help=r"Plain text: what stands between documents, such as `'\n\n'` (`\n`, `\t`, `\r` and `\\` are escapes); "
        "by default a file is one document.",
    ),
]
OnDamagedFile = Annotated[
    str,
    typer.Option(
        "--on-damaged-file",
        metavar="stop|skip",
        help="At a file that was cut or is damaged: stop, or go on without what cannot be read of it, and count that.",
    ),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="TYPE", help="Type of the tokens of an .npy file: uint16 or uint32.")
]
EosId = Annotated[
    int | None, typer.Option("--eos-id", metavar="ID", help="The token that ends each document of an .npy file.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the run file, such as data.loader.seed=7; may be repeated.",
    ),
]
Template = Annotated[
    str | None,
    typer.Option(
        "--template",
        metavar="PATH|auto",
        help="Records are conversations, which this chat template writes: a .jinja file, a folder with a tokenizer, or "
        "auto, that of --tokenizer.",
        rich_help_panel="Chats",
    ),
]
ChatConfig = Annotated[
    Path | None,
    typer.Option(
        "--chat-config",
        metavar="FILE",
        help="YAML with settings of chats: those below, and how records are read (layout, field_messages, "
        "message_property_mappings, roles, …).",
        rich_help_panel="Chats",
    ),
]
RunConfig = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="RUN.YAML",
        help="A run file: its section `chat` holds settings of chats, template and role_boundaries included.",
        rich_help_panel="Chats",
    ),
]
ChatAssignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of chats, over --config or --chat-config, such as field_messages=dialogue; may be repeated.",
        rich_help_panel="Chats",
    ),
]
RolesToTrain = Annotated[
    str | None,
    typer.Option(
        "--roles-to-train",
        metavar="ROLES",
        callback=lambda text: None if text is None else text.split(","),
        help="By default: assistant.",
        rich_help_panel="Chats",
    ),
]
TrainOnInputs = Annotated[
    bool | None,
    typer.Option("--train-on-inputs", metavar="", help="Train everything.", rich_help_panel="Chats"),
]
TrainOnEos = Annotated[
    str | None,
    typer.Option(
        "--train-on-eos",
        metavar="turn|all|last|none",
        help="Whose terminators are trained: of trained turns (the default), of all, of the last, of none.",
        rich_help_panel="Chats",
    ),
]
TrainOnEot = Annotated[
    str | None,
    typer.Option(
        "--train-on-eot",
        metavar="turn|all|last|none",
        help="The same for terminators other than EOS; by default as --train-on-eos.",
        rich_help_panel="Chats",
    ),
]
MaskHistory = Annotated[
    bool | None,
    typer.Option("--mask-history", metavar="", help="Train the last trained turn only.", rich_help_panel="Chats"),
]
TrainOnReasoning = Annotated[
    bool | None,
    typer.Option(
        "--no-train-on-reasoning",
        metavar="",
        callback=lambda left_out: False if left_out else None,
        help="Leave out the thinking of trained turns.",
        rich_help_panel="Chats",
    ),
]
OnMissingTerminator = Annotated[
    str | None,
    typer.Option(
        "--on-missing-terminator",
        metavar="error|allow|append",
        help="Where the template ends a trained turn without a terminator; by default an error.",
        rich_help_panel="Chats",
    ),
]
OnRewrite = Annotated[
    str | None,
    typer.Option(
        "--on-rewrite",
        metavar="report|error|split",
        help="Where what is trained is not what will be prompted, as the template writes it: report it (the default), "
        "refuse, or make a document of each reply.",
        rich_help_panel="Chats",
    ),
]
TrainedControlText = Annotated[
    str | None,
    typer.Option(
        "--trained-control-text",
        metavar="error|as_text|as_control_tokens",
        help="Control text of the tokenizer (<tool_call>) in the assistant's own words: refuse it (the default), or "
        "encode it as text, or as control tokens, as transformers does.",
        rich_help_panel="Chats",
    ),
]
Media = Annotated[
    str | None,
    typer.Option(
        "--media",
        metavar="error|drop",
        help="Images, audio and video in conversations: refuse them (the default), or drop and count them.",
        rich_help_panel="Chats",
    ),
]
AllowForged = Annotated[
    bool | None,
    typer.Option(
        "--allow-forged",
        metavar="",
        help="Let text of messages become control tokens.",
        rich_help_panel="Chats",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", metavar="N", help="The longest conversation.", rich_help_panel="Chats"),
]
TooLong = Annotated[
    str | None,
    typer.Option(
        "--too-long",
        metavar="error|drop|truncate",
        help="What becomes of a longer one: by default an error; truncate keeps the turns that fit.",
        rich_help_panel="Chats",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")]
"""A flag takes no value, hence the empty metavar here and elsewhere."""

CHAT_OPTIONS = {
    "template": Template,
    "roles_to_train": RolesToTrain,
    "train_on_inputs": TrainOnInputs,
    "train_on_eos": TrainOnEos,
    "train_on_eot": TrainOnEot,
    "train_on_reasoning": TrainOnReasoning,
    "mask_history": MaskHistory,
    "max_tokens": MaxTokens,
    "too_long": TooLong,
    "on_missing_terminator": OnMissingTerminator,
    "on_rewrite": OnRewrite,
    "trained_control_text": TrainedControlText,
    "media": Media,
    "allow_forged": AllowForged,
}
"""Setting of chats → the option that gives it; None where the command line does not."""


def takes_chat_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb all options of chats in place of its parameter `chat_options`.

    On the command line they are options of their own; the verb, whose parameters are keywords, gets a dictionary of
    those that were given, by the names of the settings.
    """

    @wraps(verb)
    def run(**arguments: Any) -> None:
        values = {name: arguments.pop(name) for name in CHAT_OPTIONS}
        verb(**arguments, chat_options={name: value for name, value in values.items() if value is not None})

    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind) for name, kind in CHAT_OPTIONS.items()
    ]
    parameters: list[Parameter] = []
    for own in signature(verb).parameters.values():
        parameters += options if own.name == "chat_options" else [own]
    # Typer reads the options of a verb off its signature.
    run.__signature__ = signature(verb).replace(parameters=parameters)  # type: ignore[attr-defined]
    return run
