"""A configuration of LLaMA-Factory as a run file and the commands that prepare its data.

Datasets are looked up in `dataset_info.json` of `dataset_dir`, as LLaMA-Factory does. Source: the
argument classes and dataset readers of LLaMA-Factory 0.9.5.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, FormatError
from penstock.core.json_files import read_object
from penstock.core.json_values import JsonObject
from penstock.use.config.imports.conversion import Imported
from penstock.use.config.imports.datasets import TEMPLATES
from penstock.use.config.imports.front import Front, checked, read_trainer
from penstock.use.config.imports.llama_factory_keys import NO_EFFECT, UNSUPPORTED
from penstock.use.config.imports.notes import Keys
from penstock.use.config.imports.sources import FILE

_LOSSES = {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo", "kto_pair": None}
_TAGS = {
    "user": ("user_tag", "human"),
    "assistant": ("assistant_tag", "gpt"),
    "system": ("system_tag", "system"),
    "tool": ("observation_tag", "observation"),
}
"""Our role → the tag that names it, and the tag's default."""


def import_llama_factory(
    values: JsonObject, file: str, run_file: str, ranks: int, steps: int | None
) -> Imported:
    """Translate LLaMA-Factory's configuration; the arguments are those of `import_config`.

    Raises:
        ConfigError: A value has the wrong kind, there is no model or no dataset, or the stage
            samples while it trains or trains a reward model.
    """
    front = Front(Keys(values, file, library="LLaMA-Factory"))

    def work() -> Imported:
        stage = str(front.theirs.get("stage", "sft"))
        if stage not in ("pt", "sft", "dpo", "kto"):
            raise ConfigError(
                f"{file}: stage: {stage} is not translated: reward models have no head here, and "
                "ppo becomes `penstock rollouts` and training.policy, round by round"
            )
        if front.theirs.get("model_name_or_path") is None:
            raise ConfigError(f"{file}: model_name_or_path is missing; LLaMA-Factory requires it")
        front.take("model_name_or_path", "base_model")
        read_trainer(front)
        front.take("learning_rate", default=5e-5)
        _adapter(front)
        _method(front, stage)
        _rows(front, stage)
        _data(front, stage)
        made = front.translate(run_file, ranks, steps, NO_EFFECT, UNSUPPORTED)
        _ftx(front, made)
        return made

    return checked(front, work)


def _adapter(front: Front) -> None:
    theirs = front.theirs
    kind = str(theirs.get("finetuning_type", "lora"))
    of_lora = (
        "lora_rank lora_alpha lora_dropout lora_target additional_target use_rslora "
        "loraplus_lr_ratio quantization_bit"
    )
    if kind in ("full", "freeze"):
        for name in of_lora.split():
            if theirs.get(name) is not None:
                theirs.note(name, "no effect", f"finetuning_type is {kind}")
    if kind == "full":
        theirs.mapped("finetuning_type", "no adapter: all weights are trained")
        return
    if kind == "freeze":
        last = theirs.get("freeze_trainable_layers", 2)
        theirs.note(
            "finetuning_type",
            "decide",
            f"list what is frozen in training.frozen (patterns of names): all but {last} layers",
            shown=True,
        )
        for name in ("freeze_trainable_layers", "freeze_trainable_modules"):
            if theirs.get(name) is not None:
                theirs.note(name, "decide", "list what is frozen in training.frozen")
        return
    four_bits = theirs.get("quantization_bit") == 4
    front.give("adapter", "qlora" if four_bits else kind, "finetuning_type")
    if kind == "lora":
        theirs.mapped("finetuning_type", "training.lora")
    else:
        theirs.noted.add("finetuning_type")
    if four_bits:
        front.take("quantization_bit", "load_in_4bit", made=lambda _: True)
    front.take("lora_rank", "lora_r", default=8)
    rank = theirs.whole("lora_rank", 8) or 8
    front.take("lora_alpha", default=2 * rank)
    front.take("lora_dropout", default=0.0)
    targets = _words(theirs.get("lora_target", "all"))
    if targets == ["all"]:
        front.give("lora_target_linear", True, "lora_target")
        theirs.mapped("lora_target", "training.lora.targets: all linear layers, the default")
    else:
        front.take("lora_target", "lora_target_modules", made=_words)
    front.take("additional_target", "lora_modules_to_save", made=_words)
    front.take("use_rslora", "peft_use_rslora")
    front.take("loraplus_lr_ratio")


def _words(given: Any) -> list[str]:
    """Names in a list, or with commas."""
    given = given.split(",") if isinstance(given, str) else list(given)
    return [str(one).strip() for one in given if str(one).strip()]


def _method(front: Front, stage: str) -> None:
    """Learning from answers."""
    theirs = front.theirs
    answers = stage in ("dpo", "kto")
    theirs.mapped("stage", "training.preference" if answers else "what the data are: text or chats")
    names = ("pref_beta", "pref_loss", "dpo_label_smoothing", "simpo_gamma")
    if not answers:
        for name in (*names, "pref_ftx"):
            if theirs.get(name) is not None:
                theirs.note(name, "no effect", f"stage is {stage}")
        return
    loss = str(theirs.get("pref_loss", "sigmoid"))
    method = loss if stage == "dpo" and loss in ("orpo", "simpo") else stage
    front.give("rl", method, "stage")
    front.take("pref_beta", "orpo_alpha" if method == "orpo" else "rl_beta", default=0.1)
    if stage == "kto":
        theirs.mapped("pref_loss", "training.preference.kind: kto")
    elif method != "dpo":
        theirs.mapped("pref_loss", f"training.preference.kind: {method}")
    elif _LOSSES.get(loss):
        front.take("pref_loss", "dpo_loss_type", made=lambda given: [given])
    else:
        theirs.note("pref_loss", "unsupported", "dpo is written instead", shown=True)
    if method == "dpo" and loss == "sigmoid":
        front.take("dpo_label_smoothing")
    if method == "simpo":
        front.take("simpo_gamma", default=0.5)
        front.give("cpo_alpha", 0.0, "pref_loss")
    for name in ("kto_chosen_weight", "kto_rejected_weight"):
        if theirs.get(name) in (1, 1.0):
            theirs.note(name, "no effect", "it is 1, as always here")
    for name in names:
        if name not in theirs.noted and theirs.get(name) is not None:
            theirs.note(name, "no effect", f"pref_loss is {loss}")
    if theirs.number("pref_ftx", 0.0):
        theirs.note("pref_ftx", "mapped", "training.preference.sft_weight")


def _ftx(front: Front, made: Imported) -> None:
    """The loss of the better answer, which axolotl has no key for."""
    preference, weight = made.run["training"].get("preference"), front.theirs.number("pref_ftx")
    if preference is not None and weight:
        preference["sft_weight"] = preference.get("sft_weight", 0.0) + weight


def _rows(front: Front, stage: str) -> None:
    """Length of rows, packing, optimizer."""
    theirs = front.theirs
    front.take("cutoff_len", "sequence_len", default=2048)
    neat = bool(theirs.get("neat_packing"))
    packs = neat or (bool(theirs.get("packing", stage == "pt")) and stage in ("pt", "sft"))
    front.give("sample_packing", packs, "packing")
    theirs.mapped("packing", f"data.loader.packing: {'best_fit' if packs else 'none'}")
    theirs.mapped("neat_packing", "data.attention: document, the default")
    if packs and stage == "pt":
        front.give("pretraining_sample_concatenation", True, "packing")
    if packs and not neat:
        front.give("pretrain_multipack_attn", False, "neat_packing")
        theirs.note(
            "neat_packing",
            "decide",
            "documents of a row see each other without it, as written (data.attention: row); take "
            "that line out to keep them apart",
        )
    front.give("excess_length_strategy", "drop" if packs else "truncate", "cutoff_len")
    if stage in ("dpo", "kto"):
        text = "longer answers are left out (too_long: drop), not cut"
        theirs.note("cutoff_len", "differs", text)
    elif stage == "sft" and not packs:
        text = "too_long: truncate cuts the end; LLaMA-Factory cuts prompt and answer in proportion"
        theirs.note("cutoff_len", "differs", text)
    if theirs.get("use_muon"):
        front.values["optimizer"] = "muon"
        theirs.mapped("use_muon", "training.optimizer.kind: muon")
    front.take("pure_bf16", "bfloat16")
    tokens = [
        one for name in ("add_tokens", "add_special_tokens") for one in _words(theirs.get(name, []))
    ]
    if tokens:
        front.give("tokens", tokens, "add_tokens")
        for name in ("add_tokens", "add_special_tokens"):
            theirs.mapped(name, "penstock tokenizer add")


def _data(front: Front, stage: str) -> None:
    """Datasets by their names in dataset_info.json, template, masks."""
    theirs = front.theirs
    folder = str(theirs.get("dataset_dir", "data"))
    about, folder = _about(folder, theirs.file)
    theirs.mapped("dataset_dir", "penstock prepare, where dataset_info.json is")
    if not theirs.get("dataset"):
        raise ConfigError(f"{theirs.file}: dataset is missing; LLaMA-Factory requires it")
    for name, place in (("dataset", "datasets"), ("eval_dataset", "test_datasets")):
        found = []
        for number, one in enumerate(_words(theirs.get(name, []))):
            where = f"{place}.{number}."
            front.names |= {f"{where}path": name, f"{where}type": name}
            entry = _entry(front, one, about, folder, stage)
            front.defaults |= {where + key for key in entry if key != "path"}
            if isinstance(entry["type"], Mapping):
                front.defaults |= {f"{where}type.{key}" for key in entry["type"]}
            found.append(entry)
        if found:
            front.values[place] = found
            theirs.noted.add(name)
    front.take("early_stopping_steps", "early_stopping_patience")
    size = theirs.number("val_size", 0.0)
    if size:
        front.take("val_size", "val_set_size")
    strategy = str(theirs.get("mix_strategy", "concat"))
    if strategy != "concat":
        theirs.note("mix_strategy", "decide", "set `share` of each source", shown=True)
    else:
        theirs.mapped("mix_strategy", "documents of all sources, in one order")
    front.take("train_on_prompt", "train_on_inputs")
    _template(front)


def _template(front: Front) -> None:
    theirs = front.theirs
    name = theirs.get("template")
    if name in TEMPLATES:
        front.take("template", "chat_template")
    elif name is not None:
        theirs.note(
            "template",
            "decide",
            "the tokenizer's own template is taken (chat.template: auto); LLaMA-Factory writes a "
            "copy of it, which may differ: look with `penstock inspect`",
            shown=True,
        )
    theirs.mapped("mask_history", "chat.mask_history")


def _about(folder: str, file: str) -> tuple[Mapping[str, Any], str]:
    """What `dataset_info.json` says, and the folder that it lies in; empty for datasets of the Hub
    (`ONLINE`) and where it is not here.
    """
    for place in (Path(folder), Path(file).parent / folder):
        if (found := place / "dataset_info.json").is_file():
            try:
                return read_object(found), place.as_posix()
            except FormatError as error:
                raise ConfigError(f"{found}: {error}") from error
    return {}, folder


def _entry(
    front: Front, name: str, about: Mapping[str, Any], folder: str, stage: str
) -> JsonObject:
    """One dataset in axolotl's words; `folder` holds its files."""
    theirs = front.theirs
    said = about.get(name)
    if said is None:
        theirs.note(
            "dataset",
            "decide",
            f"{name} is not in dataset_info.json, which is looked for in dataset_dir: name its "
            "file or Hub dataset in the command",
        )
        unknown: dict[str, Any] = {"dpo": {}, "kto": {}, "pt": "completion"}
        return {"path": name, "type": unknown.get(stage, "chat_template")}
    keys = theirs.inside(said, f"dataset_info.{name}")
    file, hub = keys.get("file_name"), keys.get("hf_hub_url")
    if file is None and hub is None:
        keys.note(
            "file_name",
            "unsupported",
            "only files and datasets of the Hugging Face hub are read: save it as JSON lines",
        )
    path = str(hub) if hub is not None else (Path(folder) / str(file or name)).as_posix()
    if hub is None and not path.startswith((".", "/", "~")):
        path = f"./{path}" if not FILE.search(path) else path  # no name on the Hub
    entry: JsonObject = {"path": path}
    for key, place in (("split", "split"), ("subset", "name"), ("revision", "revision")):
        if (value := keys.get(key)) is not None:
            entry[place] = value
            keys.noted.add(key)
    if (inside := keys.get("folder")) is not None:
        # A folder of its repository, which load_dataset takes as data_dir.
        entry["path"] = f"{path}/{inside}"
        keys.mapped("folder", "penstock prepare, the folder of the dataset")
    columns = dict(keys.get("columns", {}))
    if media := sorted({"images", "videos", "audios"} & set(columns)):
        keys.note(
            "columns",
            "decide",
            f"{' and '.join(media)}: media are found in fields of these names, or as parts of "
            "messages: rename the column if it is called otherwise, and set chat.processor",
        )
    tags = dict(keys.get("tags", {}))
    form = str(keys.get("formatting", "alpaca"))
    if stage == "kto" and "query" in columns:
        keys.note("columns", "differs", "query is not read: join it to the prompt in the file")
    if stage == "pt":
        entry |= {"type": "completion", "field": columns.get("prompt", "text")}
    elif stage in ("dpo", "kto"):
        entry |= _of_answers(columns, form)
        entry |= _messages(columns, tags, form) if form != "alpaca" else {}
    else:
        entry["type"] = "chat_template"
        entry |= _messages(columns, tags, form) if form != "alpaca" else _alpaca(columns)
    for column, ours in (("system", "field_system"), ("tools", "field_tools")):
        if column in columns and stage != "pt":
            entry[ours] = columns[column]
    if theirs.get("mask_history") and stage == "sft":
        entry["mask_history"] = True
    keys.noted |= {"file_name", "hf_hub_url", "split", "subset", "formatting", "columns", "tags"}
    keys.noted |= {"ranking", "ms_hub_url", "om_hub_url"}
    keys.rest({}, {"num_samples": "take part of it: `slice: [0, 0.5]` of its source"})
    return entry


def _alpaca(columns: Mapping[str, str]) -> JsonObject:
    """Records of an instruction, an input and an output.

    A column that `columns` leaves out is not read, nor is `history` unless it is named.
    """
    named = {"instruction": "prompt", "input": "query", "output": "response", "history": "history"}
    defaults = {} if columns else {"input": "input"}
    fields = {
        ours: str(columns.get(theirs) or defaults.get(ours, ""))
        for ours, theirs in named.items()
        if theirs in columns or ours in ("input", "history")
    }
    return {"fields": {ours: column for ours, column in fields.items() if ours != column}}


def _messages(columns: Mapping[str, str], tags: Mapping[str, str], form: str) -> JsonObject:
    """Records of messages: ShareGPT's names unless tags say others."""
    entry: JsonObject = {"field_messages": columns.get("messages", "conversations")}
    if form == "openai":
        defaults = {"role": "role", "content": "content"}
    else:
        defaults = {"role": "from", "content": "value"}
    entry["message_property_mappings"] = {
        ours: tags.get(f"{ours}_tag", name) for ours, name in defaults.items()
    }
    if form != "openai":
        entry["roles"] = _roles(tags)
    return entry


def _roles(tags: Mapping[str, str]) -> dict[str, list[str]]:
    roles = {ours: [tags.get(tag, name)] for ours, (tag, name) in _TAGS.items()}
    # A call of a tool is a reply, under a role of its own.
    roles["assistant"].append(tags.get("function_tag", "function_call"))
    return roles


def _of_answers(columns: Mapping[str, str], form: str) -> JsonObject:
    """Records with better and worse answers, or one with a label."""
    named = {"field_chosen": "chosen", "field_rejected": "rejected", "field_label": "kto_tag"}
    if form == "alpaca":
        named |= {"field_prompt": "prompt", "field_input": "query"}
        if "kto_tag" in columns:
            named |= {"field_completion": "response"}
    found = {ours: columns[theirs] for ours, theirs in named.items() if theirs in columns}
    if form == "alpaca" and columns:
        found.setdefault("field_input", "")  # a column that is left out is not read
    return {"type": found}
