"""An axolotl configuration as a run file and the commands that prepare its data; every key is
accounted for.

What maps exactly is written; so is what axolotl takes by default where our default differs (betas,
weight decay, seed). For what does not map, a note says why and what to do. Source: the
configuration classes and trainers of axolotl 0.19.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import yaml

from penstock.core.errors import ConfigError, CorruptionError, FormatError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.core.terminal import visible
from penstock.core.yaml_files import parse_yaml, write_yaml
from penstock.use.config.document import read_document
from penstock.use.config.imports.axolotl_keys import NO_EFFECT, UNSUPPORTED
from penstock.use.config.imports.datasets import Prepared, read_dataset, transform_code
from penstock.use.config.imports.notes import LOUD, Keys, Note, refuse_wrong_kind, report, wrapped
from penstock.use.config.imports.preferences import PREFERENCES
from penstock.use.config.imports.training import read_evaluation, read_training

OF_ANSWERS = (
    "rl_beta",
    "dpo_beta",
    "orpo_alpha",
    "simpo_gamma",
    "cpo_alpha",
    "dpo_label_smoothing",
    "dpo_loss_type",
    "dpo_loss_weights",
)
"""Keys about learning from answers."""
EXCESS = {"truncate": "truncate", "raise": "error", "keep_end": "keep_end", "split": "split"}
"""excess_length_strategy → `too_long`; the last two are what other libraries ask for."""
KERNEL_PLUGINS = ("liger", "cut_cross_entropy", "LigerPlugin", "CutCrossEntropyPlugin")


@final
@dataclass(frozen=True, slots=True)
class Imported:
    """A run file made of another library's configuration."""

    run: JsonMapping
    """Contents of the run file."""
    commands: Sequence[str]
    """Shell commands that prepare the data, then train."""
    notes: Sequence[Note]
    """What became of each key."""
    code: str | None
    """A Python module that the commands need next to the run file; None: they need none."""
    library: str = "axolotl"
    """Whose configuration it was."""

    @property
    def install(self) -> str:
        """The command that installs what the commands need."""
        training: JsonMapping = self.run.get("training") or {}
        lora, named = training.get("lora"), training.get("log")
        extras = ["train", "huggingface"]
        if isinstance(lora, Mapping):
            extras.append("qlora" if lora.get("quantize") else "lora")
        extras += named if isinstance(named, list) else []
        return f"pip install 'penstock[{','.join(extras)}]'"

    def text(self, source: str) -> str:
        """The run file, with the commands and the notes as comments; it was read back.

        Raises:
            ConfigError: It would not be read as what it is.
        """
        said = [
            f"Made by `penstock import-config {source}` of a configuration of {self.library}.",
            f"The commands need: {self.install}",
            "",
            *self.commands,
            "",
            *report(self.notes, (*LOUD, "mapped", "no effect")),
        ]
        # No value may end its comment and go on as a section.
        comments = "\n".join(
            f"# {line}".rstrip() for long in said for line in wrapped(visible(long), 116)
        )
        body = write_yaml(dict(self.run), "the run file", width=110)
        whole = f"{comments}\n\n{body}"
        if parse_yaml(whole, "the run file")[1] != parse_yaml(body, "the run file")[1]:
            raise ConfigError(
                f"{source}: a value of it breaks out of the comments of the run file; remove it"
            )
        return whole


def import_axolotl(
    path: str | Path, *, run_file: str = "run.yaml", ranks: int = 1, steps: int | None = None
) -> Imported:
    """Translate an axolotl configuration.

    Args:
        path: Its YAML file.
        run_file: Where the result will be written, for the commands.
        ranks: Number of processes that train, which decides how many rows a step has.
        steps: Optimizer steps of the whole run, if known: with them, shares of a run and of an
            epoch become steps.

    Raises:
        ConfigError: The file cannot be read, is not one of axolotl's, or a value has the wrong
            kind.
    """
    values = read_document(path).values
    file = str(path)
    if "base_model" not in values or not ({"datasets", "pretraining_dataset"} & set(values)):
        raise ConfigError(
            f"{path}: expected an axolotl configuration, with base_model and datasets"
        )
    keys = Keys(values, file)
    try:
        return translate(keys, run_file, ranks, steps)
    except ConfigError:
        raise
    except UNEXPECTED as error:
        raise of_another_form(keys) from error


UNEXPECTED = (TypeError, ValueError, AttributeError, KeyError, ArithmeticError)
"""What reading a value of another form raises."""


def of_another_form(keys: Keys) -> ConfigError:
    """The error of the key that was read last."""
    return ConfigError(
        f"{keys.file}: {keys.asked[-1]}: the value does not have the form that {keys.library} "
        "expects"
    )


def translate(keys: Keys, run_file: str, ranks: int, steps: int | None) -> Imported:
    """The translation, section by section."""
    rl = _method(keys)
    data, held = _datasets(keys)
    steps = keys.whole("max_steps") or steps
    epochs = keys.number("num_epochs", 1.0)
    _length_of_run(keys)
    loader = _loader(keys, ranks, rl)
    training = read_training(keys, steps, epochs or 1.0, rl)
    share, evaluators = read_evaluation(keys, data, held, steps, epochs or 1.0, rl)
    if evaluators:
        training["evaluators"] = {"held out": evaluators}
    chat, own = _common_chat(data + held)
    processor = keys.get("processor_type")
    if processor is not None:
        keys.note("processor_type", "mapped", "chat.processor: the model's own")
        chat["processor"] = keys.get("base_model")
    base = str(keys.get("base_model"))
    model = _model(base, training, tokens=bool(keys.get("tokens") or processor))
    keys.mapped("base_model", f"model: {model.partition(':')[0]}:…")
    tokenizer, before = _tokenizer(keys, base)
    run: JsonObject = {
        "data": _data_section(keys, data, loader, share),
        "model": model,
        "training": training,
    }
    if chat:
        run["chat"] = chat
    output = str(keys.get("output_dir", "./model-out"))
    keys.mapped("output_dir", "penstock train -o")
    _plugins(keys)
    _special_tokens(keys)
    keys.rest(NO_EFFECT, UNSUPPORTED)
    module = f"{Path(run_file).stem.replace('-', '_').replace('.', '_')}_prompts"
    commands = [
        *before,
        *(_prepare(one, tokenizer, own.get(one.name), run_file, share, module) for one in data),
        *(_prepare(one, tokenizer, own.get(one.name), run_file, 0.0, module) for one in held),
        f"penstock train {quoted(run_file)} --dry-run",
        _train(run_file, output, ranks),
    ]  # fmt: skip
    code = transform_code(data + held, keys.file)
    return Imported(run, commands, keys.notes, code, keys.library)


def _model(base: str, training: JsonMapping, *, tokens: bool) -> str:
    """The section `model`: our own blocks for a folder that they compute, where all of its weights
    are trained alike; else the model of transformers, whose names patterns and adapters use.
    """
    named = "lora" in training or "frozen" in training
    optimizer = training["optimizer"]
    named = named or (isinstance(optimizer, Mapping) and "learning_rate_factors" in optimizer)
    if named or tokens or not (Path(base) / "config.json").is_file():
        return f"hf:{base}"
    try:
        from penstock.models.ours.importing import refusal

        return f"{'hf' if refusal(Path(base)) else 'from'}:{base}"
    except (ImportError, FormatError, CorruptionError):  # no torch, or what training will say
        return f"hf:{base}"


def _method(keys: Keys) -> str:
    """The method of learning from answers; "" for the cross entropy."""
    rl = str(keys.get("rl", "") or "")
    if rl and rl not in PREFERENCES:
        raise ConfigError(
            f"{keys.file}: rl: {rl} samples answers while it trains, which no single run file "
            "does; sample and judge with `penstock rollouts`, then train with "
            "training.policy, round by round"
        )
    return rl


def _datasets(keys: Keys) -> tuple[list[Prepared], list[Prepared]]:
    """Datasets to train on, and those that are held out."""
    asked = str(keys.get("excess_length_strategy", "drop"))
    # A tree of answers is never cut.
    excess = "drop" if keys.get("rl") else EXCESS.get(asked, "drop")
    keys.mapped("excess_length_strategy", f"too_long of the sources: {excess}")
    taken: set[str] = set()
    found: dict[str, list[Prepared]] = {}
    for name in ("datasets", "pretraining_dataset", "test_datasets"):
        given = keys.get(name, [])
        given = [given] if isinstance(given, str | Mapping) else given
        refuse_wrong_kind(given, list, name, keys.file, "a list of datasets")
        found[name] = []
        keys.noted.add(name)
        for number, entry in enumerate(given):
            if isinstance(entry, str):
                entry = {"path": entry, "type": "pretrain"}
            refuse_wrong_kind(
                entry, dict, f"{name}.{number}", keys.file, "a mapping with path and type"
            )
            if name == "pretraining_dataset":
                entry = {"type": "pretrain", **entry}
            inside = keys.inside(entry, f"{name}.{number}")
            found[name].append(read_dataset(inside, keys, taken, excess=excess))
    _of_prompts(keys)
    for name in () if keys.get("rl") else OF_ANSWERS:
        if keys.get(name) is not None:
            keys.note(name, "no effect", "rl is not set")
    return found["datasets"] + found["pretraining_dataset"], found["test_datasets"]


def _of_prompts(keys: Keys) -> None:
    """Keys about prompts that no dataset has asked for."""
    for name in (
        "train_on_inputs",
        "chat_template",
        "chat_template_jinja",
        "chat_template_kwargs",
        "role_boundaries",
    ):
        if name not in keys.noted and keys.get(name) is not None:
            keys.note(
                name,
                "no effect",
                "no dataset asks for it: each has a prompt or template of its own",
            )
    if keys.get("eot_tokens") is not None:
        keys.note(
            "eot_tokens",
            "differs",
            "terminators are found in what the template writes; chat.train_on_eot says "
            "whether they are trained; look at them with `penstock inspect`",
            shown=True,
        )


def _length_of_run(keys: Keys) -> None:
    if keys.get("max_steps") is not None:
        keys.mapped("max_steps", "training.steps")
        if keys.get("num_epochs") is not None:
            keys.note("num_epochs", "no effect", "max_steps takes precedence")
    else:
        keys.mapped("num_epochs", "max_epochs of the sources")


def _loader(keys: Keys, ranks: int, rl: str) -> JsonObject:
    micro = keys.whole("micro_batch_size", 1) or 1
    batch = keys.whole("batch_size")
    accumulation = keys.whole("gradient_accumulation_steps") or ((batch // micro) if batch else 1)
    shared = keys.whole("context_parallel_size") or keys.whole("sequence_parallel_degree") or 1
    named = keys.whole("world_size")
    if named is not None:
        keys.note(
            "world_size",
            "differs",
            f"the number of processes comes from --ranks, which is {ranks}",
            shown=True,
        )
    if ranks % shared:
        raise ConfigError(
            f"{keys.file}: context_parallel_size {shared} does not divide the {ranks} "
            "processes; set --ranks"
        )
    rows = micro * accumulation * (ranks // shared)
    for name in ("micro_batch_size", "gradient_accumulation_steps", "batch_size"):
        keys.mapped(
            name,
            f"data.loader.rows_per_step: {micro} × {accumulation} × {ranks // shared} groups "
            f"(--ranks {ranks})",
        )
    keys.mapped("sequence_len", "data.loader.sequence_length")
    keys.mapped("seed", "data.loader.seed and training.seed; draws differ")
    loader = {
        "sequence_length": keys.whole("sequence_len", 512),
        "rows_per_step": rows,
        "seed": keys.whole("seed", 42),
    }
    return {**loader, **_packing(keys, rl)}


def _packing(keys: Keys, rl: str) -> JsonObject:
    packs = bool(keys.get("sample_packing")) or (
        keys.get("sample_packing") is None and bool(keys.get("pretraining_dataset"))
    )
    if rl or not packs:
        for name in ("sample_packing_sequentially", "pretraining_sample_concatenation"):
            if keys.get(name) is not None:
                keys.note(name, "no effect", "sample_packing is off")
        keys.note(
            "sample_packing",
            "mapped",
            "data.loader.packing: none, a document a row, so a step has as many documents; "
            "best_fit fills rows and is faster: then lower rows_per_step",
            shown=True,
        )
        return {"packing": "none"}
    if keys.get("pretraining_sample_concatenation"):
        keys.mapped("pretraining_sample_concatenation", "data.loader.packing: concat")
        keys.mapped("sample_packing", "data.loader.packing: concat")
        return {"packing": "concat"}
    keys.get("pretraining_sample_concatenation")
    keys.mapped(
        "sample_packing",
        "data.loader.packing: best_fit, the default, which fills rows at least as well",
    )
    if keys.get("sample_packing_sequentially"):
        keys.mapped("sample_packing_sequentially", "data.loader.packing: next_fit")
        return {"packing": "next_fit"}
    return {}


def _data_section(
    keys: Keys, data: Sequence[Prepared], loader: JsonMapping, share: float
) -> JsonObject:
    """Sources with their order and epochs."""
    keys.mapped("dataset_exact_deduplication", "--drop-duplicates, of each dataset")
    ordered = bool(keys.get("curriculum_sampling")) and keys.get("shuffle_merged_datasets") is False
    for name in (
        "shuffle_merged_datasets",
        "shuffle_before_merging_datasets",
        "curriculum_sampling",
    ):
        if keys.get(name) is not None:
            keys.note(
                name,
                "mapped" if ordered else "no effect",
                "shuffle: none" if ordered else "documents are shuffled in each epoch",
            )
    epochs = None if keys.get("max_steps") is not None else keys.number("num_epochs", 1.0)
    folder = "/train" if share else ""
    # One corpus has one template; documents of several sources are blended by their tokens.
    groups: dict[tuple[str, str], list[str]] = {}
    for one in data:
        groups.setdefault((one.too_long, str(one.chat.get("template"))), []).append(
            f"data/{one.name}{folder}"
        )
    sources: list[JsonObject] = []
    for (too_long, _), paths in groups.items():
        source: JsonObject = {"path": paths[0] if len(paths) == 1 else paths}
        name = paths[0].removeprefix("data/").removesuffix(folder)
        if folder or len(paths) > 1:
            source["name"] = name if len(paths) == 1 else f"{name} and {len(paths) - 1} more"
        if len(groups) > 1:
            source["share"] = "tokens"
        if epochs is not None:
            source["max_epochs"] = epochs
        if ordered:
            source["shuffle"] = "none"
        if loader.get("packing") != "concat":
            source["too_long"] = too_long
        sources.append(source)
    section: JsonObject = {"sources": sources, "loader": dict(loader)}
    if keys.get("pretrain_multipack_attn") is False:
        section["attention"] = "row"
    keys.mapped("pretrain_multipack_attn", "data.attention")
    return section


def _common_chat(data: Sequence[Prepared]) -> tuple[JsonObject, dict[str, JsonObject]]:
    """Chat settings that all datasets of conversations share, and dataset → those in which it
    differs.
    """
    chats = {one.name: one.chat for one in data if one.chat}
    if not chats:
        return {}, {}
    first = next(iter(chats.values()))
    common = {
        key: value
        for key, value in first.items()
        if all(chat.get(key) == value for chat in chats.values())
    }
    common.setdefault("template", "auto")
    own = {
        name: {key: value for key, value in chat.items() if common.get(key) != value}
        for name, chat in chats.items()
    }
    return common, own


def _tokenizer(keys: Keys, base: str) -> tuple[str, list[str]]:
    """The tokenizer that prepares the data, and the command that makes it, if it is a new one."""
    tokenizer = str(keys.get("tokenizer_config", base))
    keys.mapped("tokenizer_config", "penstock prepare -t")
    tokens = [str(one) for one in keys.get("tokens", [])]
    if not tokens:
        return tokenizer, []
    keys.note(
        "tokens",
        "differs",
        "penstock tokenizer add makes a new tokenizer, and training gives the model rows for "
        "them, which begin as the mean of the others; with LoRA, set "
        "training.lora.train_embeddings",
        shown=True,
    )
    added = " ".join(f"--token {quoted(one)}" for one in tokens)
    return "tokenizer", [f"penstock tokenizer add {quoted(tokenizer)} {added} -o tokenizer"]


def _prepare(
    one: Prepared,
    tokenizer: str,
    own: JsonMapping | None,
    run_file: str,
    share: float,
    module: str,
) -> str:
    """The command that prepares one dataset."""
    words = [*one.sources, "-t", tokenizer, "-o", f"data/{one.name}", *one.options]
    if own is not None:
        words += ["--config", run_file]
        for key, value in own.items():
            text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
            text = text.removesuffix("\n...\n")
            words += ["--set", f"{key}={text.strip()}"]
    if one.prompt is not None:
        words += ["--transform", f"{module}:{one.prompt[0]}"]
    if share:
        words += ["--validation", f"{share:g}"]
    return (
        (f"PYTHONPATH={quoted(str(Path(run_file).parent))} " if one.prompt is not None else "")
        + "penstock prepare "
        + " ".join(map(quoted, words))
    )


def quoted(word: str) -> str:
    r"""A word for a shell, on one line: bash and zsh read `$'\n'` as a line end."""
    if word.isprintable():
        return shlex.quote(word)
    escapes = {"\\": "\\\\", "'": "\\'"}
    return (
        "$'" + "".join(escapes.get(c) or (c if c.isprintable() else _escape(c)) for c in word) + "'"
    )


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\U{number:08x}" if number > 127 else f"\\x{number:02x}"


def _train(run_file: str, output: str, ranks: int) -> str:
    launcher = "penstock" if ranks == 1 else f"torchrun --nproc-per-node {ranks} -m penstock"
    return f"{launcher} train {quoted(run_file)} -o {quoted(output)}"


def _special_tokens(keys: Keys) -> None:
    """A padding token changes nothing."""
    tokens = keys.get("special_tokens")
    if isinstance(tokens, Mapping) and set(tokens) <= {"pad_token", "unk_token"}:
        keys.note(
            "special_tokens",
            "no effect",
            "padding is neither trained nor attended to, whatever its token",
        )


def _plugins(keys: Keys) -> None:
    """Plugins that are only kernels change nothing."""
    plugins = keys.get("plugins", [])
    if plugins and all(any(part in str(one) for part in KERNEL_PLUGINS) for one in plugins):
        keys.note("plugins", "no effect", "they are faster kernels for the same result")
