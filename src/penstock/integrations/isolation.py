"""Does a model keep the documents of a row apart? Two exact questions, asked of a few random tokens.

*Apart*: the logits of each document in a packed row must equal those of the document alone. This finds wrong positions,
masks that reach across, states that are carried over, expert capacity that documents share; within rounding.
*Dependence*: the gradient of a document's logits with respect to the embeddings of every other document must be zero
to the last bit. This finds leaks of any size, in any dtype. One forward and one backward for each document and
two more, of some dozens of tokens; the model, its modes and the random generators are left as they were.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np

from penstock.errors import IsolationError
from penstock.inputs import IGNORE, ModelInput
from penstock.integrations.model_limits import longer_documents, rotary_limit

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
        sequence_length: Slots of the rows that it will see. Where the model's settings name lengths within it, such as
            that of a sliding window, longer documents are tried, too; and some rotary embeddings change for all
            documents of a batch when one is longer than a limit: they are refused where one can be. None: neither.
        seed: Of the random tokens.

    Raises:
        IsolationError: Documents see each other, or the model cannot be asked; says how much, and the cure.
    """
    if sequence_length is not None:
        refuse_changing_rotary(model, sequence_length)
    report = try_isolation(model, forward, lengths=lengths, seed=seed)
    longer = None if sequence_length is None else longer_documents(model, sequence_length)
    if longer is not None:
        try_isolation(model, forward, lengths=longer, seed=seed, gradients=False)
    return report


def try_isolation(
    model: Any,
    forward: Forward | None = None,
    *,
    lengths: Sequence[int] = DOCUMENT_LENGTHS,
    seed: int = 0,
    gradients: bool = True,
) -> IsolationReport:
    """The check on one row; the arguments and errors of `check_isolation`.

    Args:
        gradients: Whether dependence is asked as well; its backward passes need memory for logits of the whole row.
    """
    import torch

    _refuse_unaskable(model)
    row = _random_row(lengths, PADDING, _vocabulary(model), seed)
    borders = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    with _undisturbed(model), _without_zeros(model, seed) as variant:
        run = forward or _transformers_forward
        call = _guarded(variant, run, model)
        with torch.no_grad():
            together = call(row)
            alone = [call(_cut(row, begin, end)) for begin, end in pairwise(borders)]
        _refuse_nan(model, alone)
        dtype = str(together.dtype).removeprefix("torch.")
        spread = max(_spread(torch.cat(alone)), 1e-30)
        gaps = [
            largest_difference(together[begin : begin + len(logits)], logits) / spread
            for begin, logits in zip(borders, alone, strict=False)
        ]
        worst = int(np.argmax(np.nan_to_num(gaps, nan=np.inf)))
        allowed = tolerance(together.dtype)
        if not gaps[worst] <= allowed:
            raise IsolationError(
                f"{describe(model)}: documents of one row see each other: logits of document {worst + 1} of "
                f"{len(lengths)} differ from those of the document alone by {gaps[worst]:.3g} standard deviations "
                f"(rounding in {dtype} would be below {allowed:.0e}). {CURE}"
            )
        checked = gradients and _check_dependence(model, lambda row: run(variant, row), row, borders)
    return IsolationReport(model=describe(model), difference=gaps[worst], tolerance=allowed, dependence_checked=checked)


def tolerance(dtype: Any) -> float:
    """Largest difference in standard deviations that is taken for the rounding of a torch dtype."""
    return _TOLERANCES.get(str(dtype).removeprefix("torch."), 1e-3)


def largest_difference(left: Any, right: Any) -> float:
    """Of two tensors; infinities of one sign are equal, and NaN where one is NaN or infinite alone."""
    return float((left - right).float().where(left != right, 0.0).abs().max())


def _spread(logits: Any) -> float:
    """The standard deviation of those that are finite: a head may rule ids out with −inf."""
    finite = logits[logits.isfinite()].float()
    return float(finite.std())


def refuse_changing_rotary(model: Any, sequence_length: int) -> None:
    """Refuse a model whose rotary frequencies depend on the longest document of a batch, if one can be long enough.

    Raises:
        IsolationError: It is one.
    """
    found = rotary_limit(model)
    if found is not None and sequence_length > found[0]:
        raise IsolationError(changing_rotary(model, sequence_length, *found))


def changing_rotary(model: Any, sequence_length: int, limit: int, kind: str) -> str:
    """What is wrong with rows that are longer than `rotary_limit`, and the cure."""
    return (
        f"{describe(model)}: documents of one row see each other: its rotary embedding ({kind}) changes for all of "
        f"them when one has more than {limit} tokens, and rows have {sequence_length}. Take a sequence_length of "
        f"{limit} or less. {CURE}"
    )


CURE = (
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
            f"{describe(model)}: the check can say nothing: the last token of a document of {end - begin} depends on "
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
        f"{describe(model)}: documents of one row see each other: logits of document {number} depend on {other} "
        f"(gradient {float(outside.max()):.3g}, within the document {float(reach[begin:end].max()):.3g}). {CURE}"
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
            f"{describe(model)} cannot be checked: it returns no logits; take the model with its head, such as "
            "AutoModelForCausalLM makes it, or pass forward="
        )
    return output.logits[0]


def _guarded(variant: Any, forward: Forward, model: Any) -> Callable[[ModelInput], Any]:
    import torch

    def call(row: ModelInput) -> Any:
        try:
            return forward(variant, row)
        except (IsolationError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a model's own code raises on rows that it does not know
            found = " ".join(f"{type(error).__name__}: {error}".split())
            raise IsolationError(
                f"{describe(model)} cannot be run on a row of several documents ({found}). {CURE}"
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


def _refuse_nan(model: Any, alone: Sequence[Any]) -> None:
    """Nothing can be said of logits that are NaN; where weights are, they are named."""
    if not any(bool(logits.isnan().any()) for logits in alone):
        return
    broken = not_finite(model.named_parameters())
    cause = f"NaN or infinity in {names(broken)}" if broken else "all weights are finite, so its own arithmetic fails"
    raise IsolationError(
        f"{describe(model)} cannot be checked: its logits of a document alone are NaN ({cause}); load weights that are "
        "finite, or compute in float32"
    )


def not_finite(weights: Iterable[tuple[str, Any]]) -> list[str]:
    """Names of the weights that hold NaN or infinity. One pass over them, without a copy."""
    import torch

    found = []
    for name, weight in weights:
        if weight.is_floating_point() and weight.numel():
            ends = torch.stack(torch.aminmax(weight.detach()))
            if not bool(ends.isfinite().all()):
                found.append(name)
    return found


def names(found: Sequence[str], most: int = 4) -> str:
    """Some of many names, and how many there are."""
    shown = ", ".join(found[:most])
    return shown if len(found) <= most else f"{shown}, … ({len(found)} in all)"


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def describe(model: Any) -> str:
    """Class, model type and attention implementation."""
    model = getattr(model, "inner", model)
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
