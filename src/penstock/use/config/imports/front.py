"""Hands another library's keys on under the names of axolotl, which `conversion` translates.

TRL and LLaMA-Factory run the Trainer of transformers, as axolotl does, so most of their keys have
an equal there. A `Front` remembers what each key is called in the file, and which values are the
library's defaults, so that the notes speak of the user's own keys.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonObject
from penstock.use.config.imports.conversion import (
    UNEXPECTED,
    Imported,
    of_another_form,
    translate,
)
from penstock.use.config.imports.notes import Keys
from penstock.use.config.imports.trainer_keys import NO_EFFECT, UNSUPPORTED

TRAINER: Mapping[str, tuple[str, Any]] = {
    "seed": ("seed", 42),
    "output_dir": ("output_dir", "trainer_output"),
    "num_train_epochs": ("num_epochs", 3.0),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
    "per_device_train_batch_size": ("micro_batch_size", 8),
    "optim": ("optimizer", "adamw_torch_fused"),
    "lr_scheduler_type": ("lr_scheduler", "linear"),
    "adam_beta1": ("adam_beta1", 0.9),
    "adam_beta2": ("adam_beta2", 0.999),
    "adam_epsilon": ("adam_epsilon", 1e-8),
    "weight_decay": ("weight_decay", 0.0),
    "max_grad_norm": ("max_grad_norm", 1.0),
    "bf16": ("bf16", None),
    "fp16": ("fp16", None),
    "torch_compile": ("torch_compile", None),
    "gradient_checkpointing": ("gradient_checkpointing", None),
    "deepspeed": ("deepspeed", None),
    "fsdp": ("fsdp", None),
    "save_total_limit": ("save_total_limit", None),
}
"""Key of transformers' TrainingArguments → axolotl's name, and the default."""
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


@final
@dataclass(slots=True)
class Front:
    """A configuration on its way to axolotl's names."""

    theirs: Keys
    values: JsonObject = field(default_factory=dict)
    """What is handed on."""
    names: dict[str, str] = field(default_factory=dict)
    """Place of a value → the key in the file that it comes from."""
    defaults: set[str] = field(default_factory=set)

    def take(
        self,
        name: str,
        place: str | None = None,
        default: Any = None,
        made: Callable[[Any], Any] = lambda given: given,
    ) -> Any:
        """Hand a key on under axolotl's name, and return its value or the default.

        Args:
            name: The key in the file.
            place: axolotl's name; None: the same.
            default: What the library takes without the key; None: the key is left out.
            made: Makes axolotl's value of the given one.
        """
        given = self.theirs.get(name)
        if given is None:
            if default is not None:
                self.give(place or name, default, name)
            return default
        self.theirs.noted.add(name)
        value = made(given)
        self.values[place or name] = value
        self.names[place or name] = name
        return value

    def give(self, place: str, value: Any, name: str) -> None:
        """Hand on a value that the file does not spell; notes about it that matter name a key."""
        self.values[place] = value
        self.names[place] = name
        self.defaults.add(place)

    def translate(
        self,
        run_file: str,
        ranks: int,
        steps: int | None,
        no_effect: Mapping[str, str],
        unsupported: Mapping[str, str],
    ) -> Imported:
        """The run file of all that was taken; the other keys get their answers.

        Raises:
            ConfigError: A value has another form than the library's.
        """
        keys = Keys(
            self.values,
            self.theirs.file,
            self.theirs.notes,
            asked=self.theirs.asked,
            library=self.theirs.library,
            names=self.names,
            defaults=frozenset(self.defaults),
        )
        found = translate(keys, run_file, ranks, steps)
        self.theirs.rest({**NO_EFFECT, **no_effect}, {**UNSUPPORTED, **unsupported})
        return found


def checked(front: Front, work: Callable[[], Imported]) -> Imported:
    """What `work` makes; an error of Python about a value names the key."""
    try:
        return work()
    except ConfigError:
        raise
    except UNEXPECTED as error:
        raise of_another_form(front.theirs) from error


def read_trainer(front: Front) -> None:
    """The keys of transformers' TrainingArguments, which both libraries take."""
    theirs = front.theirs
    for name, (place, default) in TRAINER.items():
        front.take(name, place, default)
    if theirs.values.get("fsdp") in (None, True) or theirs.get("fsdp"):
        front.take("fsdp_config")
    elif theirs.get("fsdp_config") is not None:
        theirs.note("fsdp_config", "no effect", "fsdp is off")
    steps = theirs.whole("max_steps", -1) or -1
    if steps > 0:
        front.take("max_steps")
        front.values.pop("num_epochs")
        if theirs.get("num_train_epochs") is not None:
            theirs.note("num_train_epochs", "no effect", "max_steps takes precedence")
    elif theirs.get("max_steps") is not None:
        theirs.note("max_steps", "no effect", "num_train_epochs says how long the run is")
    if theirs.get("gradient_checkpointing") is None:
        front.take("activation_checkpointing", "gradient_checkpointing")
    elif theirs.get("activation_checkpointing") is not None:
        theirs.note("activation_checkpointing", "no effect", "gradient_checkpointing is read")
    if theirs.get("train_sampling_strategy") == "random":
        theirs.note("train_sampling_strategy", "no effect", "documents are shuffled in each epoch")
    _warmup(front)
    if theirs.get("lr_scheduler_kwargs"):
        front.take("lr_scheduler_kwargs", made=_mapping)
    _intervals(front)
    _trackers(front)


def _mapping(given: Any) -> Any:
    """Settings in a setting; command lines have them as JSON."""
    return json.loads(given) if isinstance(given, str) else given


def _warmup(front: Front) -> None:
    """Steps, or a share of the run: also as warmup_steps below 1, as transformers 5 takes it."""
    given = front.theirs.number("warmup_steps", 0.0) or 0.0
    ratio = front.theirs.number("warmup_ratio", 0.0)
    if 0 < given < 1:
        front.take("warmup_steps", "warmup_ratio")
    elif given or not ratio:
        front.take("warmup_steps", default=0)
    if given and front.theirs.get("warmup_ratio") is not None:
        front.theirs.note("warmup_ratio", "no effect", "warmup_steps takes precedence")
    elif ratio:
        front.take("warmup_ratio")


def _intervals(front: Front) -> None:
    """When checkpoints are saved and held-out data evaluated."""
    theirs = front.theirs
    saves = _strategy(front.take("save_strategy", default="steps", made=_strategy))
    if saves == "steps":
        front.take("save_steps", default=500)
    elif theirs.get("save_steps") is not None:
        theirs.note("save_steps", "no effect", "save_strategy is not steps")
    if saves == "best":
        theirs.note(
            "save_strategy", "decide", "all checkpoints are kept: penstock plot shows the best"
        )
        front.values.pop("save_strategy")
    if theirs.get("save_total_limit") is None and saves != "no":
        theirs.note(
            "save_total_limit",
            "differs",
            f"the newest 4 checkpoints are kept (training.checkpoints.keep); {theirs.library} "
            "keeps all",
        )
    evaluates = _strategy(front.take("eval_strategy", default="no", made=_strategy))
    every = theirs.get("eval_steps")
    if evaluates == "steps":
        logged = 10 if theirs.library == "TRL" else 500
        front.take("eval_steps", default=theirs.get("logging_steps") or logged)
    elif every is not None:
        theirs.note("eval_steps", "no effect", "eval_strategy is not steps")


def _strategy(given: Any) -> str:
    """steps, epoch or no, which YAML takes for false."""
    return "no" if given is False else str(given)


def _trackers(front: Front) -> None:
    """report_to → training.log; run_name and project say under which names."""
    theirs = front.theirs
    given = theirs.get("report_to")
    named = [given] if isinstance(given, str) else list(given or ())
    known = TRACKERS if "all" in named else [one for one in named if one in TRACKERS]
    others = [one for one in named if one not in (*TRACKERS, "none", "all")]
    for tracker in known:
        front.give(f"use_{tracker}", True, "report_to")
    if others:
        theirs.note("report_to", "unsupported", UNSUPPORTED["report_to"], shown=True)
    else:
        theirs.mapped("report_to", f"training.log: {', '.join(known) or 'none'}")
    for name, place in (("run_name", "wandb_name"), ("project", "wandb_project")):
        if known:
            front.take(name, place)
        elif theirs.get(name) is not None:
            theirs.note(name, "no effect", "report_to names no tracker")
