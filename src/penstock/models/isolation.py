"""Checks that a model keeps the documents of a row apart: two exact tests on a few random tokens.

*Equal logits*: each document in a packed row must give the same logits as the document alone, up to rounding. This
finds wrong positions, masks that reach across documents, carried-over states and shared expert capacity.

*No gradient*: the gradient of a document's logits with respect to the embeddings of every other document must be zero
to the last bit. This finds leaks of any size, in any dtype.

Some models of transformers behave differently above a length that their settings name, such as a sliding window; rows
that reach beyond these lengths are tested too. The check costs one forward and one backward pass per document plus two,
over a few dozen tokens. The model, its modes and the random generators are left as they were.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np

from penstock.core.errors import IsolationError
from penstock.core.suggestions import suggests
from penstock.data.shards.trees import build_tree
from penstock.media.rows import BlankImage
from penstock.plan.inputs import IGNORE
from penstock.plan.inputs.model_input import ModelInput

Forward = Callable[[Any, ModelInput], Any]
"""(model, row) → logits [T, vocabulary]."""

DOCUMENT_LENGTHS = (13, 1, 18)
"""Lengths of the documents in the test row; one has a single token, for which restarting positions matter least."""
PADDING = 5

CURE = (
    "Train it with one document per row, Loader(packing='none'), or take another attention implementation or model; "
    "docs/reference/isolation.md lists those that were measured"
)

_TOLERANCES = {"float64": 1e-6, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}
"""Largest difference of logits that counts as rounding, in standard deviations of the logits."""
MOST_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
"""Settings of transformers: maximum tokens of a document."""
WINDOWS = (
    "sliding_window", "sliding_window_size", "window_size", "attention_window", "attention_window_size",
    "attention_chunk_size", "local_attention",
)  # fmt: skip
"""Settings of transformers: maximum tokens that a token sees."""
_OTHER_LENGTHS = ("index_topk", "block_size", "chunk_size", "mamba_chunk_size")
"""Settings of transformers: lengths at which something else changes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationReport:
    """What `check_isolation` found about a model that passed."""

    model: str
    """Class, model type and attention implementation."""
    difference: float
    """Largest difference between logits in the row and alone, in standard deviations of the logits."""
    tolerance: float
    """Largest difference that would have passed."""
    dependence_checked: bool
    """Whether gradients were tested too; False if a kernel has no backward pass on this device."""


@suggests
def check_isolation(
    model: Any,
    *,
    forward: Forward | None = None,
    lengths: Sequence[int] = DOCUMENT_LENGTHS,
    sequence_length: int | None = None,
    trees: bool = False,
    images: BlankImage | None = None,
    seed: int = 0,
) -> IsolationReport:
    """Refuse a model that lets documents of one row see each other.

    Args:
        model: A torch module, unwrapped (before DDP or FSDP), on any device and in any dtype.
        forward: (model, row) → logits [T, vocabulary]; `to_torch(row)` gives tensors. By default the call of a
            transformers causal language model with the arguments of `penstock.huggingface.model_inputs`, as the Trainer
            trains it.
        lengths: Tokens of the documents in the test row.
        sequence_length: Slots of the rows that the model will see. If the model's settings name shorter lengths, such
            as a sliding window, longer documents are tested too. Some rotary embeddings change for all documents of a
            batch if one exceeds a limit; the model is refused if such a document fits a row. None: neither.
        trees: Also try a prefix tree, whose branches must not see each other: for models that get such documents.
        images: Also try documents with images of noise, which must not change other documents: the blank image of a
            loader's rows (`row.media.blank`).
        seed: Seed of the random tokens.

    Raises:
        IsolationError: Documents see each other, or the model cannot be checked; says how much, and the cure.
    """
    if sequence_length is not None:
        refuse_changing_rotary(model, sequence_length)
    if forward is None:
        forward = _transformers_forward if images is None else _forward_of_images
    else:
        forward = _explained(forward)
    report = try_isolation(model, forward, lengths=lengths, seed=seed)
    longer = None if sequence_length is None else longer_documents(model, sequence_length)
    if longer is not None:
        try_isolation(model, forward, lengths=longer, seed=seed, gradients=False)
    if trees:
        try_tree(model, forward, seed=seed)
    if images is not None:
        try_images(model, images, forward, seed=seed)
    return report


def try_images(model: Any, blank: BlankImage, forward: Forward | None = None, *, seed: int = 0) -> None:
    """Compare documents with images in a row with the documents alone, and with another image in the first of them.

    Raises:
        IsolationError: A document's logits depend on others, or the model reads images otherwise than alone.
    """
    import torch

    # Here, not at the top: it needs torch.
    from penstock.models.theirs.image_rows import trial_row

    _refuse_uncheckable(model)
    row, *alone = trial_row(blank, _vocabulary(model), seed)
    other, *_ = trial_row(blank, _vocabulary(model), seed, swapped=True)
    with _undisturbed(model), torch.no_grad():
        call = _guarded(model, forward or _transformers_forward, model)
        by_itself = _guarded(model, forward or _images_alone, model)
        together, swapped, single = call(row), call(other), torch.cat([by_itself(one) for one in alone])
    first, count, scale = len(alone[0].tokens), len(single), spread(single)
    gap = largest_difference(together[:count], single) / scale
    leak = largest_difference(together[first:count], swapped[first:count]) / scale
    if not max(gap, leak) <= tolerance(together.dtype):
        raise IsolationError(
            f"{describe(model)}: documents with images see each other in one row: logits differ from those of the "
            f"document alone by {gap:.3g} standard deviations, and by {leak:.3g} with another image in another "
            f"document. {CURE}"
        )


def try_tree(model: Any, forward: Forward | None = None, *, seed: int = 0) -> None:
    """Compare each path of a prefix tree, between two ordinary documents, with the path alone.

    Raises:
        IsolationError: Branches see each other, or do not see their beginning.
    """
    import torch

    _refuse_uncheckable(model)
    row, paths = _random_tree(_vocabulary(model), seed)
    with _undisturbed(model), _without_zeros(model, seed) as variant, torch.no_grad():
        call = _guarded(variant, forward or _transformers_forward, model)
        together = call(row)
        for number, slots in enumerate(paths):
            alone = call(_path_alone(row, slots))
            gap = largest_difference(together[torch.from_numpy(slots).to(together.device)], alone) / spread(alone)
            if not gap <= tolerance(together.dtype):
                raise IsolationError(
                    f"{describe(model)}: the branches of a prefix tree see each other, or miss their beginning: logits "
                    f"of path {number + 1} of {len(paths)} differ from those of the path alone by {gap:.3g} standard "
                    "deviations. Its attention must follow `reach` of a row (query q sees key k if k ≤ q < reach[k]), "
                    "as penstock.models.attention does; or prepare the data with answers: separate"
                )


def _random_tree(vocabulary: int, seed: int) -> tuple[ModelInput, list[Any]]:
    """A row of an ordinary document, a tree of four paths, and padding; and the slots of each path."""
    tokens = np.random.default_rng(seed).integers(0, vocabulary, 40).tolist()
    first, start, (a, b, c, d) = tokens[:5], tokens[5:12], (tokens[12:16], tokens[16:21], tokens[21:23], tokens[23:30])
    built = build_tree([[*start, *a, *b], [*start, *a, *c], [*start, *d], [*d, *a]])
    begins, ends, positions = built.tree.nodes(len(built.tokens))
    at, count, slots = len(first), len(built.tokens), len(first) + len(built.tokens) + PADDING
    borders = np.array([0, *(at + begin for begin in begins), at + count, slots], np.int32)
    row = ModelInput(
        tokens=np.concatenate([first, built.tokens, np.zeros(PADDING, np.int64)]),
        targets=np.full((1, slots), IGNORE),
        loss_weights=np.zeros((1, slots), np.float32),
        positions=np.concatenate([np.arange(at), positions, np.arange(PADDING)]),
        document_ids=np.repeat(np.arange(len(borders) - 1), np.diff(borders)),
        cu_seqlens=borders,
        max_seqlen=int(np.diff(borders).max()),
        num_tokens=at + count,
        source_ids=np.zeros(len(borders) - 2, np.int32),
        reach=np.array([at, *(at + end for end in ends), slots], np.int32),
    )
    return row, [np.arange(at), *(at + built.tree.slots(path) for path in range(4))]


def _path_alone(row: ModelInput, slots: Any) -> ModelInput:
    """One path of a row, as a separate row."""
    count = len(slots)
    return ModelInput(
        tokens=row.tokens[slots],
        targets=np.full((1, count), IGNORE),
        loss_weights=np.zeros((1, count), np.float32),
        positions=np.arange(count),
        document_ids=np.zeros(count, np.int64),
        cu_seqlens=np.array([0, count], np.int32),
        max_seqlen=count,
        num_tokens=count,
        source_ids=np.zeros(1, np.int32),
    )


def try_isolation(
    model: Any,
    forward: Forward | None = None,
    *,
    lengths: Sequence[int] = DOCUMENT_LENGTHS,
    seed: int = 0,
    gradients: bool = True,
) -> IsolationReport:
    """The check on one row, with the arguments and errors of `check_isolation`.

    Args:
        gradients: Whether to test gradients too; the backward passes need memory for the logits of the whole row.
    """
    import torch

    _refuse_uncheckable(model)
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
        scale = spread(torch.cat(alone))
        gaps = [
            largest_difference(together[begin : begin + len(logits)], logits) / scale
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
    """Largest difference that counts as rounding in a torch dtype, in standard deviations."""
    return _TOLERANCES.get(str(dtype).removeprefix("torch."), 1e-3)


def largest_difference(left: Any, right: Any) -> float:
    """Largest absolute difference of two tensors.

    Infinities of the same sign are equal; the result is NaN or infinite if only one of the two is.
    """
    return float((left - right).float().where(left != right, 0.0).abs().max())


def spread(logits: Any) -> float:
    """Standard deviation of the finite logits, above 0: a head may exclude ids with −inf."""
    return max(float(logits[logits.isfinite()].float().std()), 1e-30)


def refuse_changing_rotary(model: Any, sequence_length: int) -> None:
    """Refuse a model with rotary frequencies that depend on the longest document of a batch, if one can be long enough.

    Raises:
        IsolationError: The model is one of these.
    """
    found = rotary_limit(model)
    if found is not None and sequence_length > found[0]:
        raise IsolationError(changing_rotary(model, sequence_length, *found))


def changing_rotary(model: Any, sequence_length: int, limit: int, kind: str) -> str:
    """The message about rows that are longer than `rotary_limit`."""
    return (
        f"{describe(model)}: documents of one row see each other: its rotary embedding ({kind}) changes for all of "
        f"them when one has more than {limit} tokens, and rows have {sequence_length}. Take a sequence_length of "
        f"{limit} or less. {CURE}"
    )


def longer_documents(model: Any, sequence_length: int) -> tuple[int, ...] | None:
    """Document lengths beyond every length within a row that the model's settings name; None if they name none.

    Only longer rows exercise masks of windows and chunks, tables of positions and the like.
    """
    named = _named_lengths(_text_config(model))
    within = [length for length in named.values() if length < sequence_length]
    if not within:
        return None
    limits = [length for name, length in named.items() if name in MOST_POSITIONS]
    rotary = rotary_limit(model)
    return (5, min([max(within) + 8, *limits, *([] if rotary is None else rotary[:1])]), 11)


def documents_of_a_row(model: Any, slots: int) -> tuple[int, ...] | None:
    """Lengths of documents, long and short, that fill a row of `slots` slots; None if that is hardly more than a trial.

    Some models do with a row what depends on its length: biases by place in half precision, tables of positions.
    """
    room = slots - PADDING
    if room <= 2 * sum(DOCUMENT_LENGTHS):
        return None
    named = _named_lengths(_text_config(model))
    limits = [length for name, length in named.items() if name in MOST_POSITIONS]
    rotary = rotary_limit(model)
    longest = min([room * 2 // 5, *limits, *([] if rotary is None else rotary[:1])])
    lengths: list[int] = []
    while room:
        lengths.append(min(longest if len(lengths) % 2 == 0 else 7, room))
        room -= lengths[-1]
    return tuple(lengths)


def changing_lengths(model: Any) -> set[int]:
    """Lengths that the model's settings name, where it may begin to treat texts differently."""
    return set(_named_lengths(_text_config(model)).values())


def _named_lengths(config: Any) -> dict[str, int]:
    found = {name: getattr(config, name, None) for name in (*MOST_POSITIONS, *WINDOWS, *_OTHER_LENGTHS)}
    return {name: length for name, length in found.items() if isinstance(length, int) and length > 0}


def _text_config(model: Any) -> Any:
    """A model's settings; those of its text model if it has several."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def asks_for_router_loss(model: Any) -> bool:
    """Whether a model of transformers asks for its auxiliary router loss.

    That loss counts padding as tokens, and the documents of a row as one; no loss of ours includes it.
    """
    return any(
        getattr(config, "output_router_logits", False)
        for config in (getattr(model, "config", None), _text_config(model))
    )


def rotary_limit(model: Any) -> tuple[int, str] | None:
    """Document length above which the rotary frequencies of the whole batch change, and the responsible type.

    transformers recomputes the frequencies of types `dynamic` and `longrope` from the highest position of the batch.
    """
    config = _text_config(model)
    limits = []
    for settings in _rotary_settings(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)):
        kind = settings.get("rope_type", settings.get("type"))
        original = settings.get("original_max_position_embeddings")
        original = original or getattr(config, "original_max_position_embeddings", None)
        limit = original or getattr(config, "max_position_embeddings", None)
        if kind in ("dynamic", "longrope") and limit is not None:
            limits.append((int(limit), str(kind)))
    return min(limits, default=None)


def _rotary_settings(value: Any) -> Iterator[dict[str, Any]]:
    """Every mapping with a type, at any depth: some models have one for each kind of layer."""
    if isinstance(value, dict):
        if "rope_type" in value or "type" in value:
            yield value
        for entry in value.values():
            yield from _rotary_settings(entry)


def _check_dependence(model: Any, call: Callable[[ModelInput], Any], row: ModelInput, borders: list[int]) -> bool:
    """Require that gradients between documents are exactly zero; returns False if gradients are not available."""
    import torch

    try:
        with torch.enable_grad(), _embeddings(model) as embeddings:
            logits = call(row)
            weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
            scores = (logits * weights).float().sum(-1)
            for number, (begin, end) in enumerate(pairwise(borders), 1):
                _refuse_dependence(model, _reach(scores[begin:end].sum(), embeddings[0]), number, borders)
            # The test must be able to fail: a document's last token depends on an earlier one.
            begin, end = borders[-2:]
            context = _reach(scores[end - 1], embeddings[0])[begin : end - 1]
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, IsolationError):
            raise
        return False
    if not float(context.max()) > 0:
        raise IsolationError(
            f"{describe(model)}: the check is meaningless: the last token of a document of {end - begin} does not "
            "depend on any token before it, so the model uses no context at all, as if it had no attention"
        )
    return True


@contextmanager
def _embeddings(model: Any) -> Iterator[list[Any]]:
    """Collects the output of the token embeddings in later forward passes, as leaves for gradients."""
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
    """[T]: how much each token's embedding moves a score; exactly 0 where no path connects them."""
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
    """A row of documents of random tokens, with padding at the end."""
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
    """One document of a row, as a separate row."""
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


def _images_alone(model: Any, document: ModelInput) -> Any:
    """transformers' own logits of one document with its images."""
    from penstock.models.theirs.image_rows import image_arguments

    weights = next(model.parameters())
    given = image_arguments(model, document, weights.device, weights.dtype)
    del given["position_ids"]
    return model(**given).logits[0]


def _forward_of_images(model: Any, row: ModelInput) -> Any:
    """transformers' logits of a row of data with images, whose positions have grids where the model's have."""
    from penstock.models.theirs.image_rows import uses_grids
    from penstock.models.theirs.tensors import model_inputs

    given = model_inputs(row, next(model.parameters()).device)
    if uses_grids(model) and given["position_ids"].ndim == 2:
        given["position_ids"] = given["position_ids"][None].expand(4, -1, -1)
    return model(**given).logits[0]


def _transformers_forward(model: Any, row: ModelInput) -> Any:
    from penstock.models.theirs.tensors import model_inputs

    device = next(model.parameters()).device
    output = model(**model_inputs(row, device))
    if getattr(output, "logits", None) is None:
        raise IsolationError(
            f"{describe(model)} cannot be checked: it returns no logits; take the model with its head, as "
            "AutoModelForCausalLM loads it, or pass forward="
        )
    return output.logits[0]


def _explained(forward: Forward) -> Forward:
    """A caller's own function, whose mistakes are more likely than a model that takes no packed rows."""
    import torch

    def call(model: Any, row: ModelInput) -> Any:
        try:
            return forward(model, row)
        except (IsolationError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a caller's code raises
            found = " ".join(f"{type(error).__name__}: {error}".split())
            raise IsolationError(
                f"{describe(model)}: forward= failed on a row of several documents ({found}). It gets the model and "
                "one row of NumPy arrays (ps.to_torch(row) has tensors by name), and returns logits [T, vocabulary]. "
                f"If it is right, the model takes no such rows. {CURE}"
            ) from error

    return call


def _guarded(variant: Any, forward: Forward, model: Any) -> Callable[[ModelInput], Any]:
    import torch

    def call(row: ModelInput) -> Any:
        try:
            return forward(variant, row)
        except (IsolationError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model's own code may raise anything on packed rows
            found = " ".join(f"{type(error).__name__}: {error}".split())
            raise IsolationError(
                f"{describe(model)} cannot be run on a row of several documents ({found}). {CURE}"
            ) from error

    return call


def _refuse_uncheckable(model: Any) -> None:
    import torch

    embeddings = getattr(model, "get_input_embeddings", None) if isinstance(model, torch.nn.Module) else None
    with suppress(AttributeError, NotImplementedError):
        if callable(embeddings) and embeddings().weight is not None:
            return
    raise IsolationError(
        f"{type(model).__name__} cannot be checked: it has no get_input_embeddings(), which the check needs to trace "
        "tokens; pass a language model of transformers, unwrapped (model.module of DDP), or give yours that method "
        "and pass forward=, a function (model, row) → logits [T, vocabulary]"
    )


def _refuse_nan(model: Any, alone: Sequence[Any]) -> None:
    """Refuse a model with NaN logits; the error names weights that are not finite."""
    if not any(bool(logits.isnan().any()) for logits in alone):
        return
    broken = not_finite(model.named_parameters())
    cause = f"NaN or infinity in {names(broken)}" if broken else "all weights are finite, so its own arithmetic fails"
    raise IsolationError(
        f"{describe(model)} cannot be checked: its logits of a document alone are NaN ({cause}); load weights that are "
        "finite, or compute in float32"
    )


def not_finite(weights: Iterable[tuple[str, Any]]) -> list[str]:
    """Names of the weights that hold NaN or infinity; one pass over them, without a copy."""
    import torch

    found = []
    for name, weight in weights:
        if weight.is_floating_point() and weight.numel():
            ends = torch.stack(torch.aminmax(weight.detach()))
            if not bool(ends.isfinite().all()):
                found.append(name)
    return found


def names(found: Sequence[str], most: int = 4) -> str:
    """The first `most` names, and how many there are in all."""
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
    """Evaluation mode and separate random generators within the block."""
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
    """The model with noise in every all-zero parameter: projections that start at zero would hide a leak."""
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
