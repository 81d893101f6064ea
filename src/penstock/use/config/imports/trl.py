"""A configuration of TRL's trainers as a run file and the commands that prepare its data.

SFTConfig, DPOConfig, KTOConfig and GRPOConfig with ModelConfig and the arguments of TRL's scripts.
GRPO samples while it trains; here it goes in rounds, so its run file is that of one round. Source:
the configuration classes and trainers of TRL 1.16.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from penstock.core.errors import ConfigError, RecordError
from penstock.core.json_values import JsonObject
from penstock.use.config.imports.conversion import Imported, quoted
from penstock.use.config.imports.front import Front, checked, read_trainer
from penstock.use.config.imports.notes import Keys
from penstock.use.config.imports.sources import files_of_split
from penstock.use.config.imports.trl_keys import NO_EFFECT, UNSUPPORTED

Method = Literal["sft", "dpo", "kto", "grpo"]
OF_ONE: Mapping[Method, str] = {
    "grpo": "num_generations max_completion_length reward_funcs epsilon epsilon_high "
    "num_iterations scale_rewards use_vllm vllm_mode temperature generation_batch_size "
    "steps_per_generation importance_sampling_level mask_truncated_completions reward_weights",
    "kto": "desirable_weight undesirable_weight",
    "dpo": "beta label_smoothing loss_weights precompute_ref_log_probs f_divergence_type ld_alpha "
    "use_weighting discopop_tau rpo_alpha",
    "sft": "packing packing_strategy completion_only_loss assistant_only_loss dataset_text_field "
    "eval_packing chat_template_path eos_token dataset_kwargs",
}
"""Method → keys that only its configuration has, those of methods with more keys first."""
OF_NONE = ("max_length", "truncation_mode", "loss_weights", "vllm_importance_sampling_clip_max")
"""Keys of several methods that others do not have."""
OF_SEVERAL = {"beta", "precompute_ref_log_probs"}
"""Of these, those that other methods have, too."""
_POLICIES = {"grpo": "sequence", "dapo": "token", "bnpo": "token", "dr_grpo": "constant"}
_ROUND, _NEXT = "data/round-1", "data/round-2"


def method_of(values: Mapping[str, Any]) -> Method | None:
    """The method that a configuration's keys belong to; None: keys of all of them alone."""
    return next(
        (method for method, names in OF_ONE.items() if set(names.split()) & set(values)), None
    )


def import_trl(
    values: JsonObject,
    file: str,
    method: Method | None,
    run_file: str,
    ranks: int,
    steps: int | None,
) -> Imported:
    """Translate TRL's configuration; the arguments are those of `import_config`.

    Raises:
        ConfigError: A value has the wrong kind, or there is no model or no dataset.
    """
    front = Front(Keys(values, file, library="TRL"))
    chosen = method or method_of(values) or "sft"

    def work() -> Imported:
        if method is None and not (set(OF_ONE[chosen].split()) - OF_SEVERAL) & set(values):
            front.theirs.note(
                "model_name_or_path",
                "decide",
                f"read as the configuration of `trl {chosen}`, which no key says: --from trl-sft, "
                "trl-dpo, trl-kto or trl-grpo does",
            )
        _common(front, chosen)
        if chosen == "grpo":
            return _grpo(front, run_file, ranks, steps)
        if chosen == "sft":
            _sft(front)
        else:
            _answers(front, chosen)
        return front.translate(run_file, ranks, steps, _no_effect(chosen), UNSUPPORTED)

    return checked(front, work)


def _no_effect(method: Method) -> dict[str, str]:
    """Keys without effect, those of other methods among them."""
    others = {
        name: f"it is for trl {other}"
        for other, names in OF_ONE.items()
        for name in names.split()
        if other != method
    }
    unread = dict.fromkeys(OF_NONE, f"trl {method} does not read it")
    return {**unread, **others, **NO_EFFECT}


def _common(front: Front, method: Method) -> None:
    """The Trainer's keys, the model, LoRA."""
    theirs = front.theirs
    if theirs.get("model_name_or_path") is None:
        raise ConfigError(f"{theirs.file}: model_name_or_path is missing; TRL requires it")
    front.take("model_name_or_path", "base_model")
    read_trainer(front)
    epochs = theirs.get("num_train_epochs")
    if method == "grpo" and epochs is None:
        front.values.pop("num_epochs", None)
    front.take("learning_rate", default=2e-5 if method == "sft" else 1e-6)
    if theirs.get("model_revision") == "main":
        theirs.note("model_revision", "no effect", "it is the newest, as always here")
    _adapter(front)


def _adapter(front: Front) -> None:
    theirs = front.theirs
    peft = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save")
    if not theirs.get("use_peft"):
        for name in (*peft, "use_rslora", "load_in_4bit"):
            if theirs.get(name) is not None:
                theirs.note(name, "no effect", "use_peft is off")
        theirs.mapped("use_peft", "no adapter: all weights are trained")
        return
    four_bits = bool(theirs.get("load_in_4bit"))
    front.take("use_peft", "adapter", made=lambda _: "qlora" if four_bits else "lora")
    front.take("load_in_4bit")
    for name, default in zip(peft, (16, 32, 0.05, None, None), strict=True):
        front.take(name, default=default, made=_listed)
    front.take("use_rslora", "peft_use_rslora")


def _listed(given: Any) -> Any:
    """Names of modules as a list, of which a command line may have one; `all-linear` is a word."""
    named = [given] if isinstance(given, str) else given
    return "all-linear" if named == ["all-linear"] else named


def _length(front: Front) -> None:
    if front.take("max_length", "sequence_len", default=1024) is None:
        return
    if front.theirs.values.get("max_length", 1) is None:
        front.theirs.note(
            "max_length", "decide", "nothing is cut in TRL; set data.loader.sequence_length"
        )


def _sources(front: Front, **entry: Any) -> list[JsonObject]:
    """The entries of `datasets`; `entry` are keys that each gets."""
    theirs = front.theirs
    given, name = theirs.get("datasets"), theirs.get("dataset_name")
    if given:
        given = json.loads(given) if isinstance(given, str) else given
        if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
            raise ConfigError(f"{theirs.file}: datasets: expected a list of mappings with path")
        theirs.noted.add("datasets")
        for key in ("dataset_name", "dataset_config", "dataset_train_split"):
            if theirs.get(key) is not None:
                theirs.note(key, "no effect", "datasets takes precedence")
        if theirs.number("test_split_size"):
            front.take("test_split_size", "val_set_size")
        found = [_of_mixture(theirs.inside(one, f"datasets.{n}")) for n, one in enumerate(given)]
    elif name is not None:
        found = [{"path": str(name)}]
        front.names["datasets.0.path"] = "dataset_name"
        for key, place in (("dataset_config", "name"), ("dataset_train_split", "split")):
            if (value := theirs.get(key)) is not None:
                found[0][place] = value
                front.names[f"datasets.0.{place}"] = key
                theirs.noted.add(key)
        theirs.noted.add("dataset_name")
        if theirs.get("test_split_size") is not None:
            theirs.note("test_split_size", "no effect", "it goes with datasets")
    else:
        raise ConfigError(
            f"{theirs.file}: dataset_name or datasets is missing; a script that makes its dataset "
            "in Python: write it as JSON lines (Dataset.to_json), and name the file"
        )
    _held_out(front, found)
    for number, one in enumerate(found):
        # What the file does not spell is not in the notes.
        front.defaults |= {f"datasets.{number}.{key}" for key in entry}
        one.update(entry)
    return found


def _of_mixture(keys: Keys) -> JsonObject:
    """One dataset of a mixture in axolotl's words."""
    found: JsonObject = {}
    for name in ("path", "name", "split", "data_files"):
        if (value := keys.get(name)) is not None:
            found[name] = value
        keys.noted.add(name)
    if (folder := keys.get("data_dir")) is not None:
        found["path"] = f"{found.get('path', '')}/{folder}"
        keys.mapped("data_dir", "penstock prepare, the folder of the dataset")
    whole = {"columns": "columns are chosen by name anyway"}
    share = {"fraction": "take part of it: `slice: [0, 0.5]` of its source"}
    if keys.get("fraction") in (1, 1.0):
        keys.note("fraction", "no effect", "it is all of the dataset")
    keys.rest(whole, share)
    return found


def _held_out(front: Front, found: list[JsonObject]) -> None:
    """The test split, which TRL evaluates."""
    theirs, split = front.theirs, front.theirs.get("dataset_test_split", "test")
    wanted = front.values.get("eval_strategy", "no") != "no"
    first = str(found[0].get("path", ""))
    if wanted and not theirs.get("datasets") and _may_have(first, str(split)):
        front.values["test_datasets"] = [{**found[0], "split": split}]
        front.names |= {f"test_datasets.0.{key}": "dataset_name" for key in ("path", "name")}
        front.names["test_datasets.0.split"] = "dataset_test_split"
        theirs.noted.add("dataset_test_split")
    elif theirs.get("dataset_test_split") is not None:
        theirs.note("dataset_test_split", "no effect", "nothing is evaluated, or there is no split")


def _may_have(path: str, split: str) -> bool:
    """Whether a dataset has a split, as far as can be seen from here."""
    if not Path(path).is_dir():
        return not Path(path).exists()
    try:
        return files_of_split(path, None, split) != [path]
    except (ConfigError, RecordError):
        return False


def _first_record(path: str) -> Mapping[str, Any]:
    """The first record of a local file of JSON lines; empty where it cannot be read."""
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            found = json.loads(next(line for line in file if line.strip()))
    except (OSError, ValueError, StopIteration, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _sft(front: Front) -> None:
    """The keys of SFTConfig."""
    theirs = front.theirs
    _length(front)
    front.take("packing", "sample_packing", default=False)
    _cut(front)
    sources = _sources(front)
    front.values["datasets"] = sources
    fields = _first_record(str(sources[0].get("path", "")))
    text = str(theirs.get("dataset_text_field", "text"))
    plain = text in fields and "messages" not in fields and "prompt" not in fields
    masked = theirs.get("assistant_only_loss") or theirs.get("completion_only_loss")
    if plain or (not fields and theirs.get("dataset_text_field") is not None and not masked):
        if not plain:
            theirs.note(
                "dataset_text_field",
                "decide",
                "records are taken for plain texts; for conversations take --text-field out of the "
                "penstock prepare command, and add `chat: {template: auto}` to the run file",
                shown=True,
            )
        for number, one in enumerate(sources):
            one |= {"type": "completion", "field": text}
            front.defaults |= {f"datasets.{number}.type", f"datasets.{number}.field"}
        theirs.mapped("dataset_text_field", "--text-field")
        for name in ("assistant_only_loss", "completion_only_loss"):
            if theirs.get(name) is not None:
                theirs.note(name, "no effect", "records are plain text")
    else:
        if theirs.get("dataset_text_field") is not None:
            theirs.note("dataset_text_field", "no effect", "records are conversations")
        _trained(front, fields)
    _template(front)
    loss = str(theirs.get("loss_type", "nll"))
    if loss not in ("nll", "chunked_nll"):
        theirs.note("loss_type", "unsupported", "give your own loss (training.loss)", shown=True)
    else:
        theirs.mapped("loss_type", "the cross entropy")


def _cut(front: Front) -> None:
    """What happens to documents that are longer than a row."""
    theirs = front.theirs
    packs, strategy = theirs.get("packing"), str(theirs.get("packing_strategy", "bfd"))
    if packs and strategy == "wrapped":
        theirs.note(
            "packing_strategy",
            "differs",
            "documents of a row are kept apart; data.attention: row lets them see each other",
            shown=True,
        )
        front.take("packing_strategy", "pretraining_sample_concatenation", made=lambda _: True)
    elif packs and strategy in ("bfd_split", "bfd-requeue"):
        front.take("packing_strategy", "excess_length_strategy", made=lambda _: "split")
    elif packs:
        theirs.mapped("packing_strategy", "data.loader.packing: best_fit")
    elif theirs.get("packing_strategy") is not None:
        theirs.note("packing_strategy", "no effect", "packing is off")
    if "excess_length_strategy" not in front.values:
        end = theirs.get("truncation_mode") == "keep_end"
        front.give("excess_length_strategy", "keep_end" if end else "truncate", "truncation_mode")
    theirs.mapped("truncation_mode", "too_long of the sources: truncate or keep_end")


def _trained(front: Front, fields: Mapping[str, Any]) -> None:
    """Which tokens of a conversation are trained: in TRL all, unless a key says otherwise; of a
    prompt with its completion, the completion.
    """
    theirs = front.theirs
    replies, completions = theirs.get("assistant_only_loss"), theirs.get("completion_only_loss")
    all_of_it = not replies and not completions
    if "completion" in fields and completions is None:
        all_of_it = False
    if replies:
        theirs.mapped("assistant_only_loss", "chat: the replies are trained, as by default")
    elif replies is not None:
        theirs.mapped("assistant_only_loss", "chat.train_on_inputs: true")
    theirs.mapped("completion_only_loss", f"chat.train_on_inputs: {str(all_of_it).lower()}")
    if all_of_it:
        front.give("train_on_inputs", True, "assistant_only_loss")
        if replies is None and completions is None:
            theirs.note(
                "assistant_only_loss",
                "decide",
                "TRL trains every token of a conversation without it (chat.train_on_inputs: "
                "true); take that line out to train the replies alone, and for records of prompt "
                "and completion, of which TRL trains the completion",
            )


def _template(front: Front) -> None:
    theirs = front.theirs
    path = theirs.get("chat_template_path")
    if path is not None and str(path).endswith((".jinja", ".jinja2")):
        front.take("chat_template_path", "chat_template_jinja")
    elif path is not None:
        theirs.note(
            "chat_template_path",
            "decide",
            "the tokenizer's own template is taken (auto): name the .jinja file of that folder as "
            "chat.template",
            shown=True,
        )


def _answers(front: Front, method: Method) -> None:
    """The keys of DPOConfig and KTOConfig."""
    theirs = front.theirs
    _length(front)
    front.give("rl", method, "loss_type")
    front.give("sample_packing", False, "packing")
    theirs.note("max_length", "differs", "longer answers are left out (too_long: drop), not cut")
    theirs.mapped("truncation_mode", "too_long: drop")
    front.take("beta", "rl_beta", default=0.1)
    losses = theirs.get("loss_type", ["sigmoid"] if method == "dpo" else "kto")
    losses = [losses] if isinstance(losses, str) else list(losses)
    if method == "dpo":
        front.take("loss_type", "dpo_loss_type")
        if theirs.get("loss_type") is not None:
            front.take("loss_weights", "dpo_loss_weights")
        elif theirs.get("loss_weights") is not None:
            theirs.note("loss_weights", "no effect", "there is one loss")
        _smoothing(front, losses)
        _switched_off(front, losses)
    elif losses == ["kto"]:
        theirs.mapped("loss_type", "training.preference.kind: kto")
    else:
        theirs.note("loss_type", "unsupported", "kto is written instead", shown=True)
    for name in ("desirable_weight", "undesirable_weight"):
        if theirs.get(name) in (1, 1.0):
            theirs.note(name, "no effect", "it is 1, as always here")
    front.values["datasets"] = _sources(front, type={})


def _switched_off(front: Front, losses: list[Any]) -> None:
    """Keys that say nothing unless another one asks for them."""
    theirs = front.theirs
    divergence = theirs.get("f_divergence_type", "reverse_kl")
    off = {
        "f_divergence_type": divergence == "reverse_kl",
        "f_alpha_divergence_coef": divergence != "alpha_divergence",
        "discopop_tau": "discopop" not in losses,
        **dict.fromkeys(
            ("ref_model_mixup_alpha", "ref_model_sync_steps"), not theirs.get("sync_ref_model")
        ),
    }
    for name, is_off in off.items():
        if is_off and theirs.get(name) is not None:
            theirs.note(name, "no effect", "it is off, as it always is here")


def _smoothing(front: Front, losses: list[Any]) -> None:
    """label_smoothing is a loss of its own here; the robust one needs it, too."""
    if front.theirs.number("label_smoothing", 0.0):
        front.take("label_smoothing", "dpo_label_smoothing")
    elif losses == ["robust"]:
        front.theirs.note("loss_type", "decide", "robust without label_smoothing is dpo")


def _grpo(front: Front, run_file: str, ranks: int, steps: int | None) -> Imported:
    """The run file of one round, and the commands that sample and train."""
    theirs = front.theirs
    each = theirs.whole("num_generations", 8) or 8
    longest = theirs.whole("max_completion_length", 512) or 512
    temperature = theirs.number("temperature", 1.0)
    for name in ("num_generations", "max_completion_length", "temperature"):
        theirs.mapped(name, "penstock rollouts: --samples, --max-tokens, --temperature")
    policy = _policy(front, longest)
    # A prompt with all of its answers is one document, a row.
    front.give("sequence_len", each * longest + 1024, "max_completion_length")
    front.give("sample_packing", False, "num_generations")
    epochs = theirs.get("num_train_epochs")
    front.values.pop("num_epochs", None)
    front.give("num_epochs", 1.0, "num_train_epochs")
    front.values["datasets"] = sources = _sources(front)
    front.values.pop("test_datasets", None)
    _schedule_of_rounds(front)
    if theirs.get("max_steps") is not None or epochs is not None:
        front.values.pop("max_steps", None)
        for name in ("max_steps", "num_train_epochs"):
            if theirs.get(name) is not None:
                theirs.note(
                    name,
                    "differs",
                    "the run file is one round; the last two commands are the next one: repeat "
                    "them, with the numbers after those, until it is reached",
                )
    for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
        if theirs.get(name) in (1, 1.0, 0, -1) and theirs.get(name) is not None:
            theirs.note(name, "no effect", "it is off")
    if theirs.get("num_iterations") == 1:
        theirs.note("num_iterations", "no effect", "a round's answers are seen once")
    made = front.translate(run_file, ranks, steps, _no_effect("grpo"), UNSUPPORTED)
    run = json.loads(json.dumps(made.run))
    run.pop("chat", None)
    loader, training = run["data"]["loader"], run["training"]
    loader["rows_per_step"] = max(1, loader["rows_per_step"] // each)
    run["data"]["sources"] = [{"path": _ROUND, "max_epochs": 1, "too_long": "drop"}]
    training.pop("evaluators", None)
    training["policy"] = policy
    theirs.note("reward_funcs", "decide", UNSUPPORTED["reward_funcs"])
    theirs.note(
        "per_device_train_batch_size",
        "decide",
        f"answers of a step / {each} are its rows, each a prompt with its answers; check "
        "data.loader.sequence_length: all answers, and 1,024 tokens for the prompt",
    )
    prompts = str(sources[0].get("path"))
    if not Path(prompts).exists():
        theirs.note("dataset_name", "decide", "save its prompts as prompts.jsonl")
        prompts = "prompts.jsonl"
    model = str(front.values["base_model"])
    asked = (
        f"{quoted(prompts)} --reward rewards.py:reward --samples {each} --max-tokens {longest} "
        f"--temperature {temperature:g}"
    )
    sample = f"penstock rollouts {quoted(model)} {asked} -o {_ROUND}"
    theirs.notes[:] = [
        note for note in theirs.notes if not note.text.startswith("penstock prepare")
    ]
    kept = [line for line in made.commands if "penstock prepare" not in line]
    done = str(front.values["output_dir"])
    again = f"penstock rollouts {quoted(done)} {asked} --seed 1 -o {_NEXT}"
    trained = (
        f"{kept[-1].rpartition(' -o ')[0]} -o {quoted(f'{done}-2')} "
        f"--set {quoted(f'model=from:{done}')} --set data.sources.0.path={_NEXT}"
    )
    return replace(made, run=run, commands=[sample, *kept, again, trained])


def _schedule_of_rounds(front: Front) -> None:
    """A round has its own schedule, which would decay and warm up again in each."""
    theirs = front.theirs
    names = {
        "lr_scheduler_type": "lr_scheduler", "lr_scheduler_kwargs": "lr_scheduler_kwargs",
        "warmup_steps": "warmup_steps", "warmup_ratio": "warmup_ratio",
    }  # fmt: skip
    for name, place in names.items():
        front.values.pop(place, None)
        if theirs.get(name):
            theirs.note(
                name,
                "differs",
                "a round has a constant learning rate; lower training.optimizer.learning_rate "
                "from round to round",
            )
        elif theirs.get(name) is not None:
            theirs.note(name, "no effect", "it is off")
    front.give("lr_scheduler", "constant", "lr_scheduler_type")


def _policy(front: Front, longest: int) -> JsonObject:
    """The section `training.policy`."""
    theirs = front.theirs
    loss = str(theirs.get("loss_type", "dapo"))
    low = theirs.number("epsilon", 0.2)
    high = theirs.number("epsilon_high", low)
    assert low is not None
    assert high is not None
    found: JsonObject = {"normalise": _POLICIES.get(loss, "token")}
    if loss == "cispo":
        found |= {"kind": "cispo", "clip_low": 1.0, "clip_high": max(high - 1.0, 0.0)}
    else:
        found |= {"clip_low": low, "clip_high": high}
    if loss == "dr_grpo":
        found["length"] = longest
    if loss in (*_POLICIES, "cispo"):
        theirs.mapped("loss_type", "training.policy.kind and normalise")
    else:
        theirs.note("loss_type", "unsupported", "dapo is written instead", shown=True)
    for name in ("epsilon", "epsilon_high"):
        theirs.mapped(name, "training.policy.clip_low and clip_high")
    found["kl"] = theirs.number("beta", 0.0)
    theirs.mapped("beta", "training.policy.kl")
    level = str(theirs.get("importance_sampling_level", "token"))
    if level in ("token", "sequence"):
        found["importance"] = level
        theirs.mapped("importance_sampling_level", "training.policy.importance")
    else:
        theirs.note("importance_sampling_level", "unsupported", "token or sequence", shown=True)
    scale = theirs.get("scale_rewards", "group")
    found["scale"] = "none" if scale in (False, "none") else "group"
    if scale == "batch":
        theirs.note("scale_rewards", "unsupported", "group is written instead", shown=True)
    else:
        theirs.mapped("scale_rewards", "training.policy.scale")
    if theirs.get("mask_truncated_completions"):
        found["truncated"] = "mask"
    theirs.mapped("mask_truncated_completions", "training.policy.truncated")
    cap = theirs.number("vllm_importance_sampling_clip_max", 3.0)
    if theirs.get("vllm_importance_sampling_mode") == "token_truncate" and theirs.get("use_vllm"):
        found["importance_cap"] = cap
        for name in ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"):
            theirs.mapped(name, "training.policy.importance_cap")
    return found
