"""What the ranks of a training must share besides their plans: settings, code, weights, teachers,
evaluation data.

Compared once, at the start, by digest. What only changes the last bits of results (versions of
torch, threads, GPUs) is a notice; another version of penstock is an error, because each rank plans
by its own.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.core.version import __version__
from penstock.learn.training.settings import TrainSettings
from penstock.models import LanguageModel
from penstock.models.own_code import code_digest, is_own_code
from penstock.plan.loader.agreement import leaves

if TYPE_CHECKING:
    from penstock.learn.distillation.distiller import Distiller
    from penstock.learn.training.path_training import PathTraining
    from penstock.models.later_weights import LaterWeights

OF_A_RANK = ("device", "threads", "log_every", "log", "log_project", "log_name", "feature_cache")
"""Settings that say where a rank computes, or what the first one reports."""
REFERENCES = ("lora", "cached", "initial")
"""Kinds of reference that are not the path of a model."""
PATHS = (
    "training.evaluators.*.data", "training.evaluators.*.path", "training.preference.reference",
    "training.policy.reference", "teacher.teachers.*.model", "teacher.teachers.*.cache",
    "teacher.teachers.*.projection", "teacher.teachers.*.documents*",
    "teacher.teachers.*.threads", "teacher.teachers.*.process",
)  # fmt: skip
"""Settings that may differ where their contents are the same: those are compared. And how a teacher
is run.
"""


@runtime_checkable
class MadeFromData(Protocol):
    """An evaluator with data of its own."""

    made_from: Mapping[str, str]
    """Digests of the data by their names."""


def shared_settings(
    training: TrainSettings,
    model: object,
    teacher: object,
    objectives: Mapping[str, object],
    rows: Mapping[str, object],
) -> dict[str, str]:
    """The settings of a run that all ranks must share, and digests of the user's own code, by name.

    Args:
        training: The section `training`.
        model: The section `model`; None: an object.
        teacher: The section `teacher`, if there is one.
        objectives: Source → its objective; what the plan says of it is compared with the plan.
        rows: What rows hold besides what the plan says.
    """
    if isinstance(model, str) and not is_own_code(model):
        # A folder, whose weights are compared.
        model = None
    found = dict(leaves({"penstock": __version__, "model": model, "data": rows}))
    found |= leaves({"training": training, "teacher": teacher})
    own = {"model": model, "training.loss": training.loss, "training.on_step": training.on_step}
    own |= {
        f"training.evaluators.{name}.function": one.function
        for name, one in training.evaluators.items()
    }
    own |= {f"objective of source {name!r}": one for name, one in objectives.items()}
    code = {f"the code of {name}": code_digest(one) for name, one in own.items()}
    left_out = [f"training.{name}" for name in OF_A_RANK] + list(PATHS)
    kept = {
        name: text
        for name, text in found.items()
        if not any(fnmatchcase(name, one) for one in left_out)
    }
    return kept | {name: digest for name, digest in code.items() if digest is not None}


def contents(
    model: LanguageModel,
    distiller: "Distiller | None",
    paths: "PathTraining | None",
    evaluators: Mapping[str, tuple[int, object]],
    later: "LaterWeights | None" = None,
) -> dict[str, str]:
    """Digests of what a training begins with: weights, a reference model, teachers, evaluation
    data; of weights that the model does not have yet, where they come from.
    """
    digest = weights_digest(_state(model)) if later is None else later.made_from(model)
    found = {"the initial weights": digest}
    reference = None if paths is None or paths.reference is None else paths.reference
    if reference is not None:
        found["the reference"] = reference.kind if reference.kind in REFERENCES else "a model"
        if reference.frozen is not None:
            found["the weights of the reference"] = weights_digest(_state(reference.frozen))
    for number, made in enumerate([] if distiller is None else distiller.made_from()):
        found |= {f"teacher.teachers.{number}: {what}": digest for what, digest in made.items()}
    for name, (_, evaluator) in evaluators.items():
        made_from = evaluator.made_from if isinstance(evaluator, MadeFromData) else {}
        found |= {
            f"training.evaluators.{name}: {what}": digest for what, digest in made_from.items()
        }
    return found


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Changes with another seed or another checkpoint: names, shapes, and the sum of each tensor's
    bytes as integers.

    Sums of integers are the same in any order, on any device, and cost no more than reading the
    weights once.
    """
    whole = blake2b(digest_size=6)
    for name, weight in sorted(weights.items()):
        whole.update(f"{name} {tuple(weight.shape)} {weight.dtype} {_bytes_sum(weight)}\n".encode())
    return whole.hexdigest()


def _bytes_sum(weight: Tensor) -> int:
    flat = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    # Words begin at multiples of their size.
    flat = flat.clone() if flat.storage_offset() % 8 else flat
    words = flat[: len(flat) // 8 * 8].view(torch.int64)
    return int(words.sum()) + int(flat[len(words) * 8 :].sum())


def digest_of(values: Sequence[object]) -> str:
    """Digest of what objects say of themselves, without their places in memory."""
    whole = blake2b(digest_size=6)
    for value in values:
        whole.update(re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)).encode())
    return whole.hexdigest()


def bits_notices(bits: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """A sentence for each of the settings that change bits, by rank, in which ranks differ."""
    for name, value in bits[0].items():
        others = [(rank, one[name]) for rank, one in enumerate(bits) if one.get(name) != value]
        if others:
            shown = ", ".join(f"{theirs} on rank {rank}" for rank, theirs in others[:4])
            more = f" and {len(others) - 4} more ranks" if len(others) > 4 else ""
            yield (
                f"ranks compute differently: {name} is {value} on rank 0, {shown}{more}; "
                "results may differ in their last bits, and by what was changed between "
                "versions"
            )


def _state(model: LanguageModel) -> dict[str, Tensor]:
    assert isinstance(model, torch.nn.Module)
    return dict(model.state_dict())
