"""Options that several verbs share: each has one name, one meaning and one help text.

`takes_chat_options` adds all chat options to a verb, which gets them as one dictionary of settings.
"""

import re
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}
"""Escape → its character: what cannot be typed inside plain shell quotes."""


def unescape(text: str | None) -> str | None:
    r"""Replace escapes: `\n\n` as typed → two newlines.

    Raises:
        BadParameter: Something else follows a backslash.
    """
    if text is None:
        return None
    strange = re.search(r"\\[^ntr\\]|\\$", re.sub(r"\\\\", "", text))
    if strange:
        raise typer.BadParameter(
            f"{strange[0]!r} is not a known escape; expected one of {' '.join(ESCAPES)}"
        )
    return re.sub(r"\\.", lambda found: ESCAPES[found[0]], text)


Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help=(
            "jsonl, parquet, text, csv, tsv, arrow, webdataset or imagefolder; by default from "
            "the file names and the first bytes."
        ),
    ),
]
TextField = Annotated[
    str,
    typer.Option(
        "--text-field",
        metavar="NAME",
        help="Field with the text; a dot enters nested objects (a.b).",
    ),
]
Separator = Annotated[
    str | None,
    typer.Option(
        "--separator",
        metavar="TEXT",
        callback=unescape,
        help=r"Plain text: separator between documents, such as `'\n\n'` (`\n`, `\t`, `\r` and `\\` are escapes); "  # noqa: E501
        "by default a file is one document.",
    ),
]
Delimiter = Annotated[
    str | None,
    typer.Option(
        "--delimiter",
        metavar="CHARACTER",
        callback=unescape,
        help=(
            r"CSV and TSV: the character between cells, such as `;` or `\t`; by default a tab in "
            r".tsv, else a comma."
        ),
    ),
]
OnDamagedFile = Annotated[
    str,
    typer.Option(
        "--on-damaged-file",
        metavar="stop|skip",
        help="At a truncated or damaged file: stop, or skip what cannot be read and count it.",
    ),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="uint16|uint32", help="Token type of an .npy file.")
]
EosId = Annotated[
    int | None,
    typer.Option(
        "--eos-id", metavar="ID", help="Id of the token that ends each document in an .npy file."
    ),
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
        help=(
            "Records are conversations, rendered with this chat template: a .jinja file, a folder "
            "with a tokenizer, auto (the template of --tokenizer), or the name of a plain one "
            "that comes with penstock (chatml, llama3, …)."
        ),
        rich_help_panel="Chats",
    ),
]
ChatConfig = Annotated[
    Path | None,
    typer.Option(
        "--chat-config",
        metavar="FILE",
        help=(
            "YAML file of chat settings: those of these options, and how records are read "
            "(layout, field_messages, message_property_mappings, roles, …)."
        ),
        rich_help_panel="Chats",
    ),
]
RunConfig = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="RUN.YAML",
        help=(
            "A run file; its section `chat` has the chat settings, including template and "
            "role_boundaries."
        ),
        rich_help_panel="Chats",
    ),
]
ChatAssignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help=(
            "A chat setting, over --config or --chat-config, such as field_messages=dialogue; may "
            "be repeated."
        ),
        rich_help_panel="Chats",
    ),
]
RolesToTrain = Annotated[
    str | None,
    typer.Option(
        "--roles-to-train",
        metavar="ROLES",
        callback=lambda text: None if text is None else text.split(","),
        help="Roles to train, separated by commas; by default assistant.",
        rich_help_panel="Chats",
    ),
]
TrainOnInputs = Annotated[
    bool | None,
    typer.Option("--train-on-inputs", metavar="", help="Train all roles.", rich_help_panel="Chats"),
]
TrainOnEos = Annotated[
    str | None,
    typer.Option(
        "--train-on-eos",
        metavar="turn|all|last|none",
        help="Which turns' EOS is trained: trained turns (default), all, the last, or none.",
        rich_help_panel="Chats",
    ),
]
TrainOnEot = Annotated[
    str | None,
    typer.Option(
        "--train-on-eot",
        metavar="turn|all|last|none",
        help="The same for other end-of-turn tokens; by default as --train-on-eos.",
        rich_help_panel="Chats",
    ),
]
MaskHistory = Annotated[
    bool | None,
    typer.Option(
        "--mask-history",
        metavar="",
        help="Train only the last of the trained turns.",
        rich_help_panel="Chats",
    ),
]
TrainOnReasoning = Annotated[
    bool | None,
    typer.Option(
        "--no-train-on-reasoning",
        metavar="",
        callback=lambda left_out: False if left_out else None,
        help="Do not train the reasoning of trained turns.",
        rich_help_panel="Chats",
    ),
]
OnMissingTerminator = Annotated[
    str | None,
    typer.Option(
        "--on-missing-terminator",
        metavar="error|allow|append",
        help="If the template ends a trained turn without a terminator; by default an error.",
        rich_help_panel="Chats",
    ),
]
OnRewrite = Annotated[
    str | None,
    typer.Option(
        "--on-rewrite",
        metavar="report|error|split",
        help=(
            "If the template renders earlier turns differently in training than in the prompt: "
            "report it (default), refuse, or make one document per reply."
        ),
        rich_help_panel="Chats",
    ),
]
TrainedControlText = Annotated[
    str | None,
    typer.Option(
        "--trained-control-text",
        metavar="error|as_text|as_control_tokens",
        help=(
            "If the assistant's own text contains control text (<tool_call>): refuse it "
            "(default), encode it as text, or as control tokens like transformers."
        ),
        rich_help_panel="Chats",
    ),
]
Media = Annotated[
    str | None,
    typer.Option(
        "--media",
        metavar="error|drop",
        help=(
            "Images, audio and video in conversations: refuse them (default), or drop and count "
            "them."
        ),
        rich_help_panel="Chats",
    ),
]
Processor = Annotated[
    str | None,
    typer.Option(
        "--processor",
        metavar="FOLDER",
        help=(
            "A model's folder, or its name on the Hub, with the processor of its images: "
            "conversations may have images."
        ),
        rich_help_panel="Chats",
    ),
]
ImageFolder = Annotated[
    str | None,
    typer.Option(
        "--image-folder",
        metavar="DIR",
        help="Where relative paths of images begin; by default the folder of the record's file.",
        rich_help_panel="Chats",
    ),
]
ImageStorage = Annotated[
    str | None,
    typer.Option(
        "--image-storage",
        metavar="copy|reference",
        help=(
            "Store the images' bytes next to the shards (default), or only their paths and digests."
        ),
        rich_help_panel="Chats",
    ),
]
Probe = Annotated[
    str | None,
    typer.Option(
        "--probe",
        metavar="decode|header",
        help="How images are checked: all of each (default), or its size only, which is fast.",
        rich_help_panel="Chats",
    ),
]
VideoFrames = Annotated[
    int | None,
    typer.Option(
        "--video-frames",
        metavar="N",
        min=0,
        help="Frames of a video that become images, evenly spread. By default videos are refused.",
        rich_help_panel="Chats",
    ),
]
ShrinkPixels = Annotated[
    int | None,
    typer.Option(
        "--shrink-pixels",
        metavar="N",
        min=1,
        help="Make images with more pixels smaller, in proportion, before the processor sees them.",
        rich_help_panel="Chats",
    ),
]
VerifyAll = Annotated[
    bool | None,
    typer.Option(
        "--verify-all",
        metavar="",
        help=(
            "Compare every conversation with images with the processor's own encoding, not only "
            "the first ones."
        ),
        rich_help_panel="Chats",
    ),
]
Answers = Annotated[
    str | None,
    typer.Option(
        "--answers",
        metavar="best|tree|separate",
        help=(
            "Records with several answers (chosen and rejected, ranked, labelled): train the best "
            "alone (default); keep all, what they begin with once; or keep all, each by itself."
        ),
        rich_help_panel="Chats",
    ),
]
OasstPaths = Annotated[
    str | None,
    typer.Option(
        "--oasst-paths",
        metavar="best|all|ranked",
        help=(
            "Of a tree of messages: the best path (default), all, or with --answers tree the "
            "ranked replies."
        ),
        rich_help_panel="Chats",
    ),
]
AllowForged = Annotated[
    bool | None,
    typer.Option(
        "--allow-forged",
        metavar="",
        help="Let text inside messages become control tokens.",
        rich_help_panel="Chats",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        metavar="N",
        help="Maximum tokens of a conversation.",
        rich_help_panel="Chats",
    ),
]
TooLong = Annotated[
    str | None,
    typer.Option(
        "--too-long",
        metavar="error|drop|truncate",
        help=(
            "What to do with a longer one; by default an error. truncate keeps the turns that fit."
        ),
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
    "answers": Answers,
    "oasst_paths": OasstPaths,
    "media": Media,
    "processor": Processor,
    "image_folder": ImageFolder,
    "image_storage": ImageStorage,
    "probe": Probe,
    "shrink_pixels": ShrinkPixels,
    "video_frames": VideoFrames,
    "verify_all": VerifyAll,
    "allow_forged": AllowForged,
}
"""Chat setting → its command-line option, which is None unless given."""


def takes_chat_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Replace a verb's parameter `chat_options` by one command-line option per chat setting.

    The verb, which must take keyword arguments, gets a dictionary of the options that were given,
    keyed by setting.
    """

    @wraps(verb)
    def run(**arguments: Any) -> None:
        values = {name: arguments.pop(name) for name in CHAT_OPTIONS}
        verb(
            **arguments,
            chat_options={name: value for name, value in values.items() if value is not None},
        )

    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in CHAT_OPTIONS.items()
    ]
    parameters: list[Parameter] = []
    for own in signature(verb).parameters.values():
        parameters += options if own.name == "chat_options" else [own]
    # Typer reads the options of a verb from its signature.
    run.__signature__ = signature(verb).replace(parameters=parameters)  # type: ignore[attr-defined]
    return run
