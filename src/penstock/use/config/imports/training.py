"""The section `training` of an axolotl configuration: optimizer, schedule, adapters, preferences,
intervals.
"""

from collections.abc import Sequence
from math import ceil

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonObject
from penstock.use.config.imports.datasets import Prepared
from penstock.use.config.imports.notes import Keys
from penstock.use.config.imports.preferences import read_preference

ADAMW = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_torch_xla",
    "adamw_apex_fused",
    "adamw_hf",
    "adamw_anyprecision",
    "optimi_adamw",
    "flash_adamw",
)
"""Optimizers that are AdamW in 32 bits."""
SMALL_ADAMW = (
    "adamw_bnb_8bit",
    "adamw_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "paged_adamw",
    "adamw_torch_8bit",
    "adamw_torch_4bit",
    "ao_adamw_8bit",
    "ao_adamw_4bit",
    "ao_adamw_fp8",
)
"""AdamW with states of fewer bits, or on the CPU."""
_PROJECTS = ("wandb_project", "trackio_project_name", "mlflow_experiment_name")
_RUN_NAMES = ("wandb_name", "trackio_run_name", "mlflow_run_name")
SHAPES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
AT_END = 1_000_000_000
"""Steps between checkpoints of a run that is saved at its end only."""
_OF_PEFT = {
    "lora_dropout": "dropout",
    "peft_use_rslora": "rslora",
    "lora_rank_pattern": "rank_pattern",
    "lora_alpha_pattern": "alpha_pattern",
    "lora_modules_to_save": "modules_to_save",
}
"""Setting of axolotl → ours of the same meaning."""


def read_training(keys: Keys, steps: int | None, epochs: float, rl: str) -> JsonObject:
    """The section `training`, without evaluators.

    Args:
        keys: The configuration.
        steps: Optimizer steps of the run; None: unknown.
        epochs: Passes over the data.
        rl: Method of learning from answers, or "".
    """
    training: JsonObject = {}
    if keys.get("max_steps") is not None:
        training["steps"] = keys.whole("max_steps")
    training |= {
        "optimizer": _optimizer(keys),
        "schedule": _schedule(keys, steps),
        "seed": keys.whole("seed", 42),
    }
    if lora := _lora(keys):
        training["lora"] = lora
    if keys.get("freeze_mm_modules"):
        training["frozen"] = ["*vision*", "*visual*", "*audio*", "*multi_modal_projector*"]
        keys.note(
            "freeze_mm_modules",
            "decide",
            "training.frozen: check that the patterns fit the model's names",
        )
    if rl:
        training["preference"] = read_preference(keys, rl)
    if keys.get("torch_compile"):
        training["compile"] = True
    keys.mapped("torch_compile", "training.compile")
    _placement(keys, training)
    if keys.get("gradient_checkpointing"):
        training["activation_checkpointing"] = "full"
    keys.mapped("gradient_checkpointing", "training.activation_checkpointing")
    training["checkpoints"] = _checkpoints(keys, steps, epochs)
    _trackers(keys, training)
    if precision := _precision(keys):
        training["precision"] = precision
    return training


def _trackers(keys: Keys, training: JsonObject) -> None:
    wanted = {
        "tensorboard": keys.get("use_tensorboard"),
        "wandb": keys.get("use_wandb")
        or (keys.get("wandb_project") and keys.get("use_wandb") is not False),
        "trackio": keys.get("use_trackio"),
        "mlflow": keys.get("use_mlflow") or keys.get("mlflow_experiment_name"),
    }
    if named := [tracker for tracker, asked in wanted.items() if asked]:
        training["log"] = named
        if project := next(filter(None, map(keys.get, _PROJECTS)), None):
            training["log_project"] = str(project)
        if name := next(filter(None, map(keys.get, _RUN_NAMES)), None):
            training["log_name"] = str(name)
    for name in ("use_tensorboard", "use_wandb", "use_trackio", "use_mlflow"):
        keys.mapped(name, "training.log")
    for name in _PROJECTS:
        keys.mapped(name, "training.log_project")
    for name in _RUN_NAMES:
        keys.mapped(name, "training.log_name")


def _placement(keys: Keys, training: JsonObject) -> None:
    shared = keys.whole("context_parallel_size") or keys.whole("sequence_parallel_degree") or 1
    names = ("context_parallel_size", "sequence_parallel_degree")
    if shared > 1 and "preference" not in training:
        training["context_parallel"] = shared
    for name in names:
        if "preference" in training and keys.get(name):
            keys.note(
                name,
                "unsupported",
                "rows are not shared by processes while learning from answers",
                shown=True,
            )
        else:
            keys.mapped(name, "training.context_parallel")
    shards = any(keys.get(name) for name in ("deepspeed", "fsdp", "fsdp_config"))
    if shards and "lora" not in training:
        training["shard"] = True
    for name in ("deepspeed", "fsdp", "fsdp_config"):
        if keys.get(name) and "lora" in training:
            keys.note(
                name,
                "differs",
                "training.shard and LoRA do not go together: each process holds the whole base",
            )
        else:
            keys.mapped(
                name,
                "training.shard: weights, gradients and states are sharded (FSDP2) over the "
                "processes",
            )


def _precision(keys: Keys) -> str | None:
    """In what the model computes; weights and the optimizer's state stay in float32. None: bfloat16
    on CUDA, else what the model's own config says.
    """
    given = {name: keys.get(name) for name in ("bf16", "bfloat16")}
    asked = {name: value for name, value in given.items() if value is not None}
    half = keys.get("fp16") or keys.get("float16")
    found = None
    if any(value and value != "auto" for value in asked.values()):
        found = "bfloat16"
    elif asked and not half and "auto" not in asked.values():
        found = "float32"
    for name in asked:
        keys.mapped(name, f"training.precision: {found or 'auto'}; trained weights are in float32")
    return found


def _optimizer(keys: Keys) -> JsonObject:
    name = str(keys.get("optimizer", "adamw_torch_fused"))
    kind = "muon" if name == "muon" else "adamw"
    if name in (*ADAMW, "muon"):
        keys.mapped("optimizer", f"training.optimizer.kind: {kind}")
    elif name in SMALL_ADAMW:
        keys.note(
            "optimizer",
            "differs",
            "training.optimizer.kind: adamw, with states in 32 bits: more memory, less rounding",
            shown=True,
        )
    else:
        keys.note(
            "optimizer",
            "unsupported",
            "adamw is written instead; its learning rate may need another value",
            shown=True,
        )
    rate = keys.number("learning_rate")
    if rate is None:
        raise ConfigError(f"{keys.file}: learning_rate is missing; {keys.library} requires it")
    decay, norm = keys.number("weight_decay", 0.0), keys.number("max_grad_norm", 1.0)
    factors = _rate_factors(keys, rate)
    found: JsonObject = {
        "kind": kind,
        "learning_rate": rate,
        "betas": [keys.number("adam_beta1", 0.9), keys.number("adam_beta2", 0.999)],
        "eps": keys.number("adam_epsilon", 1e-8),
        "weight_decay": decay,
        "clip_norm": norm or None,
    }
    if decay and not factors and kind == "adamw":
        # The Trainer decays embeddings; axolotl's own parameter groups, which other rates need, do
        # not.
        found["decay_embeddings"] = True
    if factors:
        found["learning_rate_factors"] = factors
    for name, ours in (
        ("learning_rate", "learning_rate"),
        ("adam_beta1", "betas"),
        ("adam_beta2", "betas"),
        ("adam_epsilon", "eps"),
        ("weight_decay", "weight_decay"),
        ("max_grad_norm", "clip_norm"),
    ):
        keys.mapped(name, f"training.optimizer.{ours}")
    return found


def _rate_factors(keys: Keys, rate: float) -> dict[str, float]:
    """Patterns of weights with a learning rate of their own."""
    factors: dict[str, float] = {}
    own, scale = keys.number("embedding_lr"), keys.number("embedding_lr_scale")
    if own or scale:
        factors |= dict.fromkeys(("*embed_tokens*", "*lm_head*"), scale or (own or rate) / rate)
    for group in keys.get("lr_groups", []):
        factors |= {f"*{module}*": float(group["lr"]) / rate for module in group["modules"]}
    if ratio := keys.number("loraplus_lr_ratio"):
        factors["*lora_B*"] = ratio
    for name in ("embedding_lr", "embedding_lr_scale", "lr_groups", "loraplus_lr_ratio"):
        keys.mapped(name, "training.optimizer.learning_rate_factors")
    return factors


def _schedule(keys: Keys, steps: int | None) -> JsonObject:
    name = str(keys.get("lr_scheduler", "cosine"))
    more = dict(keys.get("lr_scheduler_kwargs", {}))
    found: JsonObject = {"shape": SHAPES.get(name, "cosine")}
    floor = keys.number("cosine_min_lr_ratio")
    if name == "cosine_with_min_lr" and set(more) == {"min_lr_rate"}:
        found["floor"] = float(more["min_lr_rate"])
        keys.mapped("lr_scheduler", "training.schedule: cosine with floor")
        keys.mapped("lr_scheduler_kwargs", "training.schedule.floor")
    elif name == "cosine_with_min_lr" and set(more) == {"min_lr"} and keys.number("learning_rate"):
        found["floor"] = float(more["min_lr"]) / float(keys.number("learning_rate") or 1.0)
        keys.mapped("lr_scheduler", "training.schedule: cosine with floor")
        keys.mapped("lr_scheduler_kwargs", "training.schedule.floor, a share of the learning rate")
    elif name in SHAPES:
        keys.mapped("lr_scheduler", f"training.schedule.shape: {found['shape']}")
    else:
        keys.note(
            "lr_scheduler",
            "unsupported",
            "cosine is written instead; there are constant, linear, cosine and wsd",
            shown=True,
        )
    if more and "floor" not in found:
        keys.note(
            "lr_scheduler_kwargs", "unsupported", "see the keys of training.schedule", shown=True
        )
    if floor is not None and name == "cosine":
        found["floor"] = floor
        keys.mapped("cosine_min_lr_ratio", "training.schedule.floor")
    elif floor is not None:
        keys.note("cosine_min_lr_ratio", "no effect", "it goes with lr_scheduler: cosine")
    warmup = _warmup(keys, steps, has_one=name != "constant")
    if warmup is not None:
        found["warmup_steps"] = warmup
    return found


def _warmup(keys: Keys, steps: int | None, *, has_one: bool) -> int | None:
    """Steps of warm-up; None: unknown, as the number of steps is."""
    given, ratio = keys.whole("warmup_steps"), keys.number("warmup_ratio")
    if not has_one:
        for name in ("warmup_steps", "warmup_ratio"):
            if keys.get(name) is not None:
                keys.note(name, "no effect", "lr_scheduler: constant has no warm-up")
        return 0
    if given is not None:
        if ratio is not None:
            keys.note("warmup_ratio", "no effect", "warmup_steps takes precedence")
        keys.note(
            "warmup_steps",
            "mapped",
            "training.schedule.warmup_steps; the first step has 1 / warmup_steps of the rate "
            "here, not 0",
        )
        return given
    if steps is None:
        share = 0.03 if ratio is None else ratio
        keys.note(
            "warmup_ratio",
            "decide",
            f"set training.schedule.warmup_steps to {share:g} × the steps, which `penstock "
            "train --dry-run` tells (or run this command again with --steps)"
            + ("" if ratio is not None else "; it is axolotl's default, at most 100"),
        )
        return None
    keys.mapped("warmup_ratio", "training.schedule.warmup_steps")
    if ratio is None:
        return min(int(0.03 * steps), 100)
    # Transformers rounds up, axolotl down.
    return int(ratio * steps) if keys.library == "axolotl" else ceil(ratio * steps)


def _lora(keys: Keys) -> JsonObject | None:
    adapter = keys.get("adapter")
    rank, alpha = keys.whole("lora_r", 8), keys.number("lora_alpha", 8.0)
    targets, linear = keys.get("lora_target_modules"), keys.get("lora_target_linear")
    more = {ours: keys.get(name) for name, ours in _OF_PEFT.items()}
    names = ("lora_r", "lora_alpha", "lora_target_modules", "lora_target_linear", *_OF_PEFT)
    four_bits = keys.get("load_in_4bit")
    if adapter != "qlora" and four_bits is not None:
        why = "it goes with LoRA (in axolotl adapter: qlora)"
        keys.note("load_in_4bit", "no effect", why)
    if not adapter:
        for name in names:
            if keys.get(name) is not None:
                keys.note(name, "no effect", "there is no adapter")
        return None
    if adapter == "qlora":
        keys.mapped("adapter", "training.lora, quantize: nf4")
        keys.mapped("load_in_4bit", "training.lora.quantize: nf4, with double quantisation")
    elif adapter == "lora":
        keys.mapped("adapter", "training.lora")
    else:
        keys.note("adapter", "unsupported", "LoRA is written instead", shown=True)
    for name in names:
        keys.mapped(name, "training.lora")
    assert rank is not None
    assert alpha is not None
    found: JsonObject = {"rank": rank, "alpha": alpha}
    found |= {name: value for name, value in more.items() if value}
    if adapter == "qlora":
        found["quantize"] = "nf4"
    if isinstance(targets, list):
        found["targets"] = [str(one) for one in targets]
    elif targets is None and not linear:
        keys.note(
            "lora_target_modules",
            "decide",
            "peft chooses by architecture; here all linear layers but the output get LoRA: "
            "set training.lora.targets",
        )
    elif isinstance(targets, str) and targets != "all-linear":
        keys.note(
            "lora_target_modules",
            "decide",
            "a pattern is not read: list the names in training.lora.targets",
            shown=True,
        )
    return found


def _checkpoints(keys: Keys, steps: int | None, epochs: float) -> JsonObject:
    found: JsonObject = {"keep": keys.whole("save_total_limit") or 4}
    keys.mapped("save_total_limit", "training.checkpoints.keep")
    if keys.get("save_strategy") == "no":
        found["every"] = AT_END
        keys.mapped("save_strategy", "training.checkpoints.every: at the end only")
        return found
    every = _interval(
        keys, "save_steps", "saves_per_epoch", steps, epochs, "training.checkpoints.every"
    )
    if every is None and keys.get("save_steps") is None and keys.get("saves_per_epoch") is None:
        # With max_steps, the steps of an epoch follow from the data.
        known = steps is not None and keys.get("max_steps") is None
        every = max(1, round(steps / epochs)) if known and steps is not None else None
        name = "save_strategy"
        if every is None:
            keys.note(
                name,
                "decide",
                f"{keys.library} saves after each epoch; set training.checkpoints.every to its "
                "steps (500 by default)",
            )
        else:
            keys.mapped(name, "training.checkpoints.every")
    else:
        keys.mapped("save_strategy", "training.checkpoints.every")
    return found if every is None else {"every": every, **found}


def _interval(
    keys: Keys, name: str, by_epoch: str, steps: int | None, epochs: float, target: str
) -> int | None:
    """Steps between two checkpoints or evaluations; None: not given, or not known without the
    number of steps.
    """
    every, times = keys.number(name), keys.number(by_epoch)
    asked = name if every is not None else by_epoch
    if every is None and times is None:
        return None
    if every is not None and every >= 1:
        keys.mapped(name, target)
        return int(every)
    share = every if every is not None else 1 / (float(times or 1) * epochs)
    if steps is None:
        keys.note(
            asked,
            "decide",
            f"set {target} to {share:.4g} × the steps, which `penstock train --dry-run` tells "
            "(or run this command again with --steps)",
            shown=True,
        )
        return None
    keys.mapped(asked, target)
    return max(1, round(share * steps))


def read_evaluation(
    keys: Keys,
    data: Sequence[Prepared],
    held: Sequence[Prepared],
    steps: int | None,
    epochs: float,
    rl: str,
) -> tuple[float, JsonObject | None]:
    """The share of documents that is held out, and the evaluator of what is held out."""
    share = keys.number("val_set_size", 0.0) or 0.0
    if share >= 1:
        keys.note(
            "val_set_size",
            "decide",
            "give a share of the documents: `penstock prepare --validation 0.01`; nothing is "
            "held out",
            shown=True,
        )
        share = 0.0
    elif share:
        keys.note(
            "val_set_size",
            "mapped",
            "penstock prepare --validation, which chooses by a hash of the text: the same "
            "share, other documents",
        )
    paths = [f"data/{one.name}/validation" for one in data] if share else []
    paths += [f"data/{one.name}" for one in held]
    strategy = keys.get("eval_strategy", keys.get("evaluation_strategy"))
    every = _interval(
        keys, "eval_steps", "evals_per_epoch", steps, epochs, "every of training.evaluators"
    )
    asked = "eval_strategy" if keys.get("eval_strategy") is not None else "evaluation_strategy"
    if not paths and strategy not in (None, "no"):
        keys.note(
            asked,
            "decide",
            "nothing is held out, so nothing is evaluated: give `penstock prepare --validation`, "
            "or prepare held-out data, and add an evaluator (training.evaluators)",
            shown=True,
        )
    if not paths or strategy == "no":
        for name in {"eval_strategy", "evaluation_strategy"} - keys.noted:
            keys.mapped(name, "training.evaluators: none")
        if keys.get("early_stopping_patience"):
            why = "nothing is evaluated: give held-out data, then `patience` of an evaluator"
            keys.note("early_stopping_patience", "decide", why, shown=True)
        return share, None
    if (
        every is None
        and strategy == "epoch"
        and steps is not None
        and keys.get("max_steps") is None
    ):
        every = max(1, round(steps / epochs))
    if every is None and strategy == "epoch":
        keys.note(
            asked,
            "decide",
            f"{keys.library} evaluates after each epoch; set every of training.evaluators to its "
            "steps (500 by default)",
        )
    for name in {"eval_strategy", "evaluation_strategy"} - keys.noted:
        keys.mapped(name, "training.evaluators")
    found: JsonObject = {"kind": "preference" if rl else "loss"}
    if len(paths) == 1:
        found["data"] = paths[0]
    else:
        found["sources"] = [{"path": path, "name": path.removeprefix("data/")} for path in paths]
    if patience := keys.whole("early_stopping_patience"):
        found["patience"] = patience
    keys.mapped("early_stopping_patience", "patience of training.evaluators")
    return share, found if every is None else {**found, "every": every}
