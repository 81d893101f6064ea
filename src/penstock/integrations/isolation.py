"""Does a model keep the documents of a row apart? Two exact questions, asked of a few random tokens.

*Apart*: the logits of each document in a packed row must equal those of the document alone. This finds wrong positions,
masks that reach across, states that are carried over, expert capacity that documents share; within rounding.
*Dependence*: the gradient of a document's logits with respect to the embeddings of every other document must be zero
to the last bit. This finds leaks of any size, in any dtype. One forward and one backward for each document and
two more, of some dozens of tokens; the model, its modes and the random generators are left as they were.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np

from penstock.errors import IsolationError
from penstock.inputs import IGNORE, ModelInput

DOCUMENT_LENGTHS = (13, 1, 18)
"""Documents of the row that is tried; one has a single token, where restarting positions say least."""
PADDING = 5

_TOLERANCES = {"float64": 1e-6, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}
"""Largest difference between together and apart that is taken for rounding, in standard deviations of the logits."""

Forward = Callable[[Any, ModelInput], Any]
"""(model, row) → logits [T, vocabulary]."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationReport:
    """What `check_isolation` found out about a model that passed."""

    model: str
    """Class, model type and attention implementation."""
    difference: float
    """Largest difference of logits between together and apart, in standard deviations of the logits."""
    tolerance: float
    """Largest difference that would have passed."""
    dependence_checked: bool
    """Whether gradients could be asked too; not where a kernel has no backward pass on this device."""


def check_isolation(
    model: Any,
    *,
    forward: Forward | None = None,
    lengths: Sequence[int] = DOCUMENT_LENGTHS,
    sequence_length: int | None = None,
    seed: int = 0,
) -> IsolationReport:
    """Refuse a model that lets documents of one row see each other.

    Args:
        model: A torch module, unwrapped (before DDP or FSDP), on any device and in any dtype.
        forward: (model, row) → logits [T, vocabulary]; by default the call of a transformers causal language model with
            the arguments of `penstock.huggingface.model_inputs`, which is what the Trainer trains with.
        lengths: Tokens of the documents that are tried.
        sequence_length: Slots of the rows that it will see. Some rotary embeddings change for all documents of a batch
            when one is longer than a limit; they are refused where one can be. None: that is not asked.
        seed: Of the random tokens.

    Raises:
        IsolationError: Documents see each other, or the model cannot be asked; says how much, and the cure.
    """
    import torch

    _refuse_unaskable(model)
    if sequence_length is not None:
        refuse_changing_rotary(model, sequence_length)
    row = _random_row(lengths, PADDING, _vocabulary(model), seed)
    borders = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    with _undisturbed(model), _without_zeros(model, seed) as variant:
        call = _guarded(variant, forward or _transformers_forward, model)
        with torch.no_grad():
            together = call(row)
            alone = [call(_cut(row, begin, end)) for begin, end in pairwise(borders)]
        dtype = str(together.dtype).removeprefix("torch.")
        spread = max(float(torch.cat(alone).float().std()), 1e-30)
        gaps = [
            float((together[begin : begin + len(logits)].float() - logits.float()).abs().max()) / spread
            for begin, logits in zip(borders, alone, strict=False)
        ]
        worst = int(np.argmax(np.nan_to_num(gaps, nan=np.inf)))
        tolerance = _TOLERANCES.get(dtype, 1e-3)
        if not gaps[worst] <= tolerance:
            raise IsolationError(
                f"{_describe(model)}: documents of one row see each other: logits of document {worst + 1} of "
                f"{len(lengths)} differ from those of the document alone by {gaps[worst]:.3g} standard deviations "
                f"(rounding in {dtype} would be below {tolerance:.0e}). {_CURE}"
            )
        checked = _check_dependence(model, call, row, borders)
    return IsolationReport(
        model=_describe(model), difference=gaps[worst], tolerance=tolerance, dependence_checked=checked
    )


def refuse_changing_rotary(model: Any, sequence_length: int) -> None:
    """Refuse a model whose rotary frequencies depend on the longest document of a batch, if one can be long enough.

    transformers recomputes those of the types `dynamic` and `longrope` from the highest position of the whole batch.

    Raises:
        IsolationError: It is one.
    """
    config = getattr(model, "config", None)
    found = list(_rotary_settings(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)))
    for settings in found:
        kind = settings.get("rope_type", settings.get("type"))
        original = settings.get("original_max_position_embeddings")
        original = original or getattr(config, "original_max_position_embeddings", None)
        limit = original or getattr(config, "max_position_embeddings", None)
        if kind in ("dynamic", "longrope") and limit is not None and sequence_length > limit:
            raise IsolationError(
                f"{_describe(model)}: documents of one row see each other: its rotary embedding ({kind}) changes for "
                f"all of them when one has more than {limit} tokens, and rows have {sequence_length}. Take a "
                f"sequence_length of {limit} or less. {_CURE}"
            )


def _rotary_settings(value: Any) -> Iterator[dict[str, Any]]:
    """Every mapping with a type, however deep: some models have one for each kind of layer."""
    if isinstance(value, dict):
        if "rope_type" in value or "type" in value:
            yield value
        for entry in value.values():
            yield from _rotary_settings(entry)


_CURE = (
    "Train it with one document a row, Loader(packing='none'), or take another attention implementation or model; "
    "docs/isolation.md lists those that were measured"
)


def _check_dependence(model: Any, call: Callable[[ModelInput], Any], row: ModelInput, borders: list[int]) -> bool:
    """Gradients between documents must be exactly zero; returns False where they cannot be taken."""
    import torch

    try:
        with torch.enable_grad(), _embeddings(model) as embeddings:
            logits = call(row)
            weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
            scores = (logits * weights).float().sum(-1)
            for number, (begin, end) in enumerate(pairwise(borders), 1):
                _refuse_dependence(model, _reach(scores[begin:end].sum(), embeddings[0]), number, borders)
            # The question must have been able to fail: a document's last token depends on an earlier one.
            begin, end = borders[-2:]
            context = _reach(scores[end - 1], embeddings[0])[begin : end - 1]
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, IsolationError):
            raise
        return False
    if not float(context.max()) > 0:
        raise IsolationError(
            f"{_describe(model)}: the check can say nothing: the last token of a document of {end - begin} depends on "
            "none before it, so the model uses no context at all, as if it had no attention"
        )
    return True


@contextmanager
def _embeddings(model: Any) -> Iterator[list[Any]]:
    """The output of the token embeddings in later forwards, as leaves to which gradients can be taken."""
    found: list[Any] = []

    def remember(_module: Any, _inputs: Any, output: Any) -> Any:
        found.append(output.detach().requires_grad_(True))
        return found[-1]

    handle = model.get_input_embeddings().register_forward_hook(remember)
    try:
        yield found
    finally:
        handle.remove()


def _reach(score: Any, embeddings: Any) -> Any:
    """[T]: how much each token's embedding moves a score; exactly 0 where there is no way from one to the other."""
    import torch

    gradient = torch.autograd.grad(score, embeddings, retain_graph=True)[0].float()
    return gradient.reshape(-1, gradient.shape[-1]).abs().amax(-1)


def _refuse_dependence(model: Any, reach: Any, number: int, borders: list[int]) -> None:
    begin, end = borders[number - 1 : number + 1]
    outside = reach.clone()
    outside[begin:end] = 0
    if float(outside.max()) == 0:
        return
    slot = int(outside.argmax())
    other = next((f"document {i}" for i, border in enumerate(borders[1:], 1) if slot < border), "the padding")
    raise IsolationError(
        f"{_describe(model)}: documents of one row see each other: logits of document {number} depend on {other} "
        f"(gradient {float(outside.max()):.3g}, within the document {float(reach[begin:end].max()):.3g}). {_CURE}"
    )


def _random_row(lengths: Sequence[int], padding: int, vocabulary: int, seed: int) -> ModelInput:
    """Documents of random tokens, padding at the end."""
    pieces = [*lengths, padding]
    slots = sum(pieces)
    return ModelInput(
        tokens=np.random.default_rng(seed).integers(0, vocabulary, slots),
        targets=np.full((1, slots), IGNORE),
        loss_weights=np.zeros((1, slots), np.float32),
        positions=np.concatenate([np.arange(length) for length in pieces]),
        document_ids=np.repeat(np.arange(len(pieces)), pieces),
        cu_seqlens=np.concatenate([[0], np.cumsum(pieces)]).astype(np.int32),
        max_seqlen=max(pieces),
        num_tokens=slots - padding,
        source_ids=np.zeros(len(lengths), np.int32),
    )


def _cut(row: ModelInput, begin: int, end: int) -> ModelInput:
    """One document of a row as a row of its own."""
    assert row.positions is not None
    return ModelInput(
        tokens=row.tokens[begin:end],
        targets=row.targets[:, begin:end],
        loss_weights=np.zeros((1, end - begin), np.float32),
        positions=row.positions[begin:end],
        document_ids=np.zeros(end - begin, np.int64),
        cu_seqlens=np.array([0, end - begin], np.int32),
        max_seqlen=end - begin,
        num_tokens=end - begin,
        source_ids=np.zeros(1, np.int32),
    )


def _transformers_forward(model: Any, row: ModelInput) -> Any:
    from penstock.integrations.huggingface.tensors import model_inputs

    device = next(model.parameters()).device
    output = model(**model_inputs(row, device))
    if getattr(output, "logits", None) is None:
        raise IsolationError(
            f"{_describe(model)} cannot be checked: it returns no logits; take the model with its head, such as "
            "AutoModelForCausalLM makes it, or pass forward="
        )
    return output.logits[0]


def _guarded(variant: Any, forward: Forward, model: Any) -> Callable[[ModelInput], Any]:
    def call(row: ModelInput) -> Any:
        try:
            return forward(variant, row)
        except (TypeError, ValueError) as error:
            raise IsolationError(
                f"{_describe(model)} cannot be run on a row of several documents ({error}). {_CURE}"
            ) from error

    return call


def _refuse_unaskable(model: Any) -> None:
    import torch

    embeddings = getattr(model, "get_input_embeddings", None) if isinstance(model, torch.nn.Module) else None
    with suppress(AttributeError, NotImplementedError):
        if callable(embeddings) and embeddings().weight is not None:
            return
    raise IsolationError(
        f"{type(model).__name__} cannot be checked: no get_input_embeddings(), by which the check follows tokens; "
        "pass a language model of transformers, unwrapped (model.module of DDP), or give yours that method and pass "
        "forward=, a function (model, row) → logits [T, vocabulary]"
    )


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _describe(model: Any) -> str:
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    attention = getattr(config, "_attn_implementation", None)
    return type(model).__name__ + (f" ({kind}, attention {attention!r})" if kind else "")


@contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Evaluation mode and generators of our own, for a while."""
    import torch

    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    model.eval()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _without_zeros(model: Any, seed: int) -> Iterator[Any]:
    """The model with noise for every parameter that is all zero: projections that start at zero would hide a leak."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    filled = [p for p in model.parameters() if p.numel() and not bool(p.detach().any())]
    with torch.no_grad():
        for parameter in filled:
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    try:
        yield model
    finally:
        with torch.no_grad():
            for parameter in filled:
                parameter.zero_()
