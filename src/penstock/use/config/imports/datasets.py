"""The datasets of an axolotl configuration: the commands that prepare them, and the settings of
their chats.

A dataset of conversations keeps axolotl's own names of mask settings, which are ours too. A dataset
with a fixed prompt (alpaca, a format of the user's) becomes text with ranges of characters that are
trained, by a Python function that is written next to the run file. `completion` is plain text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pprint import pformat
from typing import final

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.core.urls import shown_url
from penstock.use.config.imports.notes import Keys
from penstock.use.config.imports.sources import FILE, read_sources, take_format

TEMPLATES = {
    "chatml": "chatml",
    "llama3": "llama3",
    "gemma": "gemma",
    "phi_3": "phi_3",
    "mistral_v1": "mistral_v1",
}
"""axolotl's name of a chat template → ours, of those that come with the package."""
ALPACA = (
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    "{system}\n\n",
)
CHAT = ("USER: {instruction}\n{input}\nASSISTANT:", "SYSTEM: {system}\n")
CHATML = (
    "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\n{system}<|im_end|>\n",
)
_TASK = "Below is an instruction that describes a task"
_WITH_INPUT = (
    f"{_TASK}, paired with an input that provides further context. Write a response that "
    "appropriately completes the request."
)
_NO_INPUT = f"{_TASK}. Write a response that appropriately completes the request."
PROMPTS: Mapping[str, tuple[tuple[str, str], str, str]] = {
    "alpaca": (ALPACA, _WITH_INPUT, _NO_INPUT),
    "gpteacher": (ALPACA, _WITH_INPUT, _NO_INPUT),
    "alpaca:chat": (CHAT, _WITH_INPUT, _NO_INPUT),
    "alpaca:chatml": (CHATML, _WITH_INPUT, _NO_INPUT),
    "alpaca_chat.load_no_prompt": (CHAT, "", ""),
}
"""Type of a dataset → the formats of its prompt and its system text, and the system texts with and
without an input.
"""
PREFERENCE_FIELDS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "intel": {},
    "ultra": {},
    "prompt_pairs": {},
    "argilla_chat": {},
    "icr": {"prompt": "input"},
    "argilla": {"chosen": "chosen_response", "rejected": "rejected_response"},
}
"""Kind of preference records, the last part of its type → the fields that have other names
there.
"""
LABEL_FIELDS: Mapping[str, Mapping[str, str]] = {
    "argilla": {"prompt": "instruction"},
    "argilla_chat": {},
    "intel": {"prompt": "question"},
    "prompt_pairs": {},
    "ultra": {},
}
"""The same for records with one labelled answer."""
CHAT_KEYS = (
    "field_messages",
    "field_system",
    "field_tools",
    "message_field_training",
    "message_field_training_detail",
    "roles",
    "roles_to_train",
    "train_on_eos",
    "train_on_eot",
    "drop_system_message",
    "split_thinking",
)
"""Keys of a dataset that are chat settings of ours under the same names."""
OTHERS = ("fields", "mask_history")
"""Chat settings that datasets of other libraries have besides."""
NO_EFFECT = {
    "trust_remote_code": "no code of a repository is run",
    "preprocess_shards": "files are prepared in parts anyway",
}
UNSUPPORTED = {
    "name": "only whole datasets on the Hub have subsets: name the files of this one",
    "revision": "only datasets on the Hub have revisions",
    "input_transform": "give a function of your own: penstock prepare --transform module:function",
    "shards": "give part of the files instead",
    "shards_idx": "give part of the files instead",
    "conversation": "axolotl 0.19 reads chat_template instead",
    "logprobs_field": "prepare the teacher's outputs with penstock distill cache",
    "temperature": "see the loss of a teacher (teacher.teachers.0.loss.temperature)",
    "skip": "leave the first records out of the files",
    "input_format": "give a function of your own: penstock prepare --transform module:function",
    "step_separator": "reward models have no head here",
    "max_completion_length": "reward models have no head here",
    "train_on_last_step_only": "reward models have no head here",
    "field_human": "axolotl 0.19 does not read it; use message_property_mappings",
    "field_model": "axolotl 0.19 does not read it; use message_property_mappings",
}
_WRITE = '''"""Prompts of FILE, for `penstock prepare --transform`: text, and the characters of it that are trained."""


def _write(record, *, turn, turn_without_input, system, text, text_without_input, fields, trains_prompt):
    more = record.get(fields["input"]) or ""
    text = record.get(fields["system"]) or (text if more else text_without_input)
    prompt = system.replace("{system}", text) if text else ""
    form = turn if more else turn_without_input
    parts = {"{instruction}": record.get(fields["instruction"]) or "", "{input}": more}
    prompt += _filled(form, parts)
    whole = prompt + record[fields["output"]]
    begin = 0 if trains_prompt else len(prompt)
    ranges = [{"begin": begin, "end": len(whole), "weight": 1.0}]
    return {**record, fields["output"]: whole, "loss_weights": ranges}


def _filled(form, parts):
    """The form with its places filled, once: text that spells a place stays text."""
    place = min((at for at in ((form.find(name), name) for name in parts) if at[0] >= 0), default=None)
    if place is None:
        return form
    at, name = place
    return form[:at] + parts[name] + _filled(form[at + len(name) :], parts)
'''  # noqa: E501


@final
@dataclass(slots=True)
class Prepared:
    """One dataset: what prepares it, and what it becomes."""

    name: str
    sources: list[str] = field(default_factory=list)
    """Files, folders and URLs that `penstock prepare` reads."""
    too_long: str = "drop"
    chat: JsonObject = field(default_factory=dict)
    """Chat settings, for conversations."""
    options: list[str] = field(default_factory=list)
    """Other words of the command."""
    prompt: tuple[str, JsonMapping] | None = None
    """Name and arguments of the function that writes its text."""


def read_dataset(keys: Keys, general: Keys, taken: set[str], *, excess: str) -> Prepared:
    """One entry of `datasets`, `test_datasets` or `pretraining_dataset`.

    Args:
        keys: The entry.
        general: The whole configuration, of which an entry takes the chat template and
            `train_on_inputs`.
        taken: Names of datasets so far; the new one is added.
        excess: `too_long` of documents that are not plain text.
    """
    kind = keys.get("type", "chat_template")
    path = str(keys.get("path", ""))
    if not path:
        raise ConfigError(f"{keys.file}: {keys.where}path is missing; it is required")
    prepared = Prepared(_name(shown_url(path), taken), too_long=excess)
    prepared.sources = read_sources(keys, path, prepared.options)
    ours = f"penstock prepare … -o data/{prepared.name}"
    keys.note("path", "mapped", ours)
    keys.mapped("data_files", ours)
    take_format(keys, prepared.options)
    if general.get("rl"):
        _preference(keys, general, prepared, kind)
    elif isinstance(kind, Mapping):
        _own_format(keys, keys.inside(kind, "type"), general, prepared)
    elif str(kind) in ("completion", "pretrain"):
        _plain_text(keys, prepared)
    elif str(kind) == "chat_template":
        prepared.chat = _chat(keys, general)
        keys.mapped("type", "chat: conversations")
    elif str(kind) in PROMPTS:
        _fixed_prompt(keys, general, prepared, str(kind))
    else:
        keys.note(
            "type",
            "unsupported",
            "records are read as conversations of any known layout: look at them with "
            "`penstock inspect`, or write a function for penstock prepare --transform",
            shown=True,
        )
        prepared.chat = _chat(keys, general)
    keys.rest(NO_EFFECT, UNSUPPORTED)
    return prepared


def _name(path: str, taken: set[str]) -> str:
    """A folder's name for a dataset, of which there is no other."""
    plain = [part for part in path.rstrip("/").split("/") if not re.search(r"[*?\[]", part)]
    stem = FILE.sub("", plain[-1] if plain else "")
    base = re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "data"
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    taken.add(name)
    return name


def _plain_text(keys: Keys, prepared: Prepared) -> None:
    if keys.library == "axolotl":
        prepared.too_long = "split"
    keys.mapped("type", f"text; what is longer than a row: too_long {prepared.too_long}")
    for name in ("field", "text_column"):
        if (text_field := keys.get(name)) is not None:
            prepared.options += ["--text-field", str(text_field)]
            keys.mapped(name, "--text-field")


def _chat(keys: Keys, general: Keys) -> JsonObject:
    """Chat settings of an entry, with those of the whole configuration behind them."""
    chat: JsonObject = {"template": _template(keys, general)}
    for name in CHAT_KEYS:
        if (value := keys.get(name)) is not None:
            chat[name] = value
            keys.mapped(name, f"chat.{name}")
    for name in OTHERS if keys.library != "axolotl" else ():
        if (value := keys.get(name)) is not None:
            chat[name] = value
            keys.mapped(name, f"chat.{name}")
    mapping = dict(keys.get("message_property_mappings", {}))
    for name, prop in (("message_field_role", "role"), ("message_field_content", "content")):
        if (value := keys.get(name)) is not None:
            mapping.setdefault(prop, value)
            keys.mapped(name, f"chat.message_property_mappings.{prop}")
    thinking = keys.get("template_thinking_key")
    if (source := keys.get("field_thinking")) is not None:
        mapping.setdefault(thinking or "reasoning_content", source)
        keys.mapped("field_thinking", "chat.message_property_mappings")
    if thinking is not None:
        chat["thinking_key"] = thinking
        keys.mapped("template_thinking_key", "chat.thinking_key")
    keys.mapped("message_property_mappings", "chat.message_property_mappings")
    if mapping and mapping != {"role": "role", "content": "content"}:
        chat["message_property_mappings"] = mapping
    if general.get("train_on_inputs"):
        chat["train_on_inputs"] = True
    general.mapped("train_on_inputs", "chat.train_on_inputs")
    if variables := general.get("chat_template_kwargs"):
        chat["chat_template_kwargs"] = variables
    general.mapped("chat_template_kwargs", "chat.chat_template_kwargs")
    if boundaries := general.get("role_boundaries"):
        chat["role_boundaries"] = boundaries
    general.mapped("role_boundaries", "chat.role_boundaries, which only check the masks here")
    return chat


def _template(keys: Keys, general: Keys) -> str:
    """The chat template of an entry: its own, else that of the whole configuration."""
    own = keys.get("chat_template") is not None or keys.get("chat_template_jinja") is not None
    asked = keys if own else general
    written = asked.get("chat_template_jinja")
    name = str(asked.get("chat_template", "jinja" if written else "tokenizer_default"))
    if name == "jinja":
        for key in ("chat_template", "chat_template_jinja"):
            asked.mapped(key, "chat.template")
        return str(written)
    if name == "tokenizer_default":
        asked.mapped("chat_template", "chat.template: auto, the tokenizer's own")
        return "auto"
    if name in TEMPLATES:
        asked.mapped("chat_template", f"chat.template: {TEMPLATES[name]}")
        return TEMPLATES[name]
    if name.startswith("tokenizer_default_fallback_"):
        asked.note(
            "chat_template",
            "differs",
            "the tokenizer's own template is taken (auto); if it has none, prepare says so",
            shown=True,
        )
        return "auto"
    asked.note(
        "chat_template",
        "decide",
        "the tokenizer's own template is taken (auto): for this one save its .jinja "
        "file and set chat.template to it",
        shown=True,
    )
    return "auto"


def _fixed_prompt(keys: Keys, general: Keys, prepared: Prepared, kind: str) -> None:
    """A prompt of axolotl's own, which no chat template writes."""
    (turn, system), with_input, no_input = PROMPTS[kind]
    without = turn.replace("\n\n### Input:\n{input}", "").replace("\n{input}", "")
    _as_text(
        prepared, general,
        {
            "turn": turn, "turn_without_input": without, "system": system, "text": with_input,
            "text_without_input": no_input,
        },
    )  # fmt: skip
    keys.mapped("type", f"--transform, the same prompt and mask: {kind}")


def _own_format(keys: Keys, own: Keys, general: Keys, prepared: Prepared) -> None:
    """A prompt that the user wrote into the configuration."""
    turn = str(own.get("format", "{instruction} {input} "))
    text = str(own.get("system_prompt", ""))
    fields = {
        name: str(own.get(f"field_{name}", name))
        for name in ("instruction", "input", "output", "system")
    }
    _as_text(
        prepared,
        general,
        {
            "turn": turn,
            "turn_without_input": str(own.get("no_input_format", "{instruction} ")),
            "system": str(own.get("system_format", "{system}")),
            "text": text,
            "text_without_input": text,
        },
        fields,
    )
    keys.mapped("type", "--transform, the same prompt and mask")
    own.rest({}, {})


def _as_text(
    prepared: Prepared,
    general: Keys,
    form: Mapping[str, str],
    fields: Mapping[str, str] | None = None,
) -> None:
    # A prompt of axolotl's own reads no system message.
    fields = fields or {
        "instruction": "instruction",
        "input": "input",
        "output": "output",
        "system": "",
    }
    trains_prompt = bool(general.get("train_on_inputs", False))
    general.mapped("train_on_inputs", "--weights-field, ranges of characters")
    function = re.sub(r"\W", "_", prepared.name)
    prepared.prompt = (
        f"text_of_{function}",
        {**form, "fields": dict(fields), "trains_prompt": trains_prompt},
    )
    prepared.options += ["--text-field", fields["output"], "--weights-field", "loss_weights"]
    for name in filter(None, (fields["instruction"], fields["input"], fields["system"])):
        prepared.options += ["--column", name]


def _preference(keys: Keys, general: Keys, prepared: Prepared, kind: object) -> None:
    """Records with better and worse answers."""
    chat: JsonObject = {"answers": "tree"}
    if isinstance(kind, Mapping):
        own = keys.inside(kind, "type")
        more = () if keys.library == "axolotl" else ("input",)
        fields = {
            name: str(own.get(f"field_{name}"))
            for name in ("prompt", "chosen", "rejected", "completion", "label", *more)
            if own.get(f"field_{name}") or (more and own.get(f"field_{name}") == "")
        }
        for name in fields:
            own.mapped(f"field_{name}", f"chat.fields.{name}")
        if (system := own.get("field_system")) is not None:
            chat["field_system"] = system
            own.mapped("field_system", "chat.field_system")
        formats = "the chat template writes the prompt instead: see it with `penstock inspect`"
        own.rest(
            {},
            dict.fromkeys(
                ("prompt_format", "chosen_format", "rejected_format", "completion_format"), formats
            ),
        )
        family = "own"
    else:
        family, _, form = str(kind).partition(".")
        form = form or "default"
        known = LABEL_FIELDS if general.get("rl") == "kto" else PREFERENCE_FIELDS
        fields = dict(known.get(form, {}))
        if form not in known:
            keys.note(
                "type",
                "decide",
                "records are read by their fields: look at them with `penstock inspect`, and "
                "set chat.fields",
                shown=True,
            )
        else:
            keys.mapped("type", "chat.answers: tree")
    chat = {**_chat(keys, general), **chat}
    if family in TEMPLATES:
        chat["template"] = TEMPLATES[family]
    for name in ("field_chosen", "field_rejected"):
        if (value := keys.get(name)) is not None:
            fields[name.removeprefix("field_")] = str(value)
            keys.mapped(name, f"chat.fields.{name.removeprefix('field_')}")
    if fields:
        chat["fields"] = fields
    prepared.chat = chat


def transform_code(prepared: Sequence[Prepared], file: str) -> str | None:
    """A Python module with a function for each dataset that has a fixed prompt; None if none
    has.
    """
    asked = [one.prompt for one in prepared if one.prompt is not None]
    if not asked:
        return None
    functions = [
        f"\n\ndef {name}(record: dict) -> dict | None:\n"
        f'    """Text of one record, with what is trained of it."""\n'
        f"    return _write(record, **{name.upper()})\n\n\n"
        f"{name.upper()} = {pformat(form, width=110, sort_dicts=False)}\n"
        for name, form in asked
    ]
    return _WRITE.replace("FILE", file) + "".join(functions)
