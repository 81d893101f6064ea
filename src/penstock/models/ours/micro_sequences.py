"""Trains a row in equal parts (micro-sequences), with the gradients of the uncut row and the memory
of one part.

First the keys and values of all parts are computed without gradients. Then come the parts from last
to first. Each is computed again, with gradients, on the keys and values of what precedes it. Its
backward pass includes the gradients that later parts have for its keys and values, and adds its own
to those of earlier parts. So every path from a token to the loss is followed exactly once.
(Treating past keys as constants would give the same loss, but a wrong gradient.) Recurrent blocks
take the states at a cut instead, of the one document that crosses it, and their gradients go back
the same way.

Attention to the past takes two calls of torch's kernel on the CPU: the past in full, and the part's
own tokens causally. The outputs are joined by their log-sum-exp. Each half has the kernel's own
backward pass, given the joined output and sums, so there is never a mask, and memory is O(tokens).
On other devices it is one call, aligned bottom-right. Source: the joining is that of Ring
Attention, arXiv:2310.01889.

Cost: one more forward pass, and the keys and values of the whole row with their gradients; the
graph covers one part. It runs one backward pass per part, so data parallelism that sums gradients
in hooks must wait for the last.
"""

from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.models.attention import AttentionLayer, RowAttention
from penstock.models.attention.compiling import outside_graphs
from penstock.models.attention.kernels import sdpa
from penstock.models.attention.sinks import add_sinks, sink_gradients
from penstock.models.attention.softcap import capped_attention
from penstock.models.language_model import LanguageModel
from penstock.models.ours.transformer import Transformer
from penstock.models.recurrent.borders import Borders
from penstock.models.recurrent.mixers import State
from penstock.models.row_tensors import RowTensors
from penstock.plan.inputs import AttentionRule

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
PartLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [D, S, width], targets [D, S], loss weights [D, S]) → the part's contribution to the
loss, a scalar.
"""


def attend_past(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_k: Tensor,
    past_v: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to the past in full, and causally to the new tokens themselves.

    Args:
        q: [n, heads, dim].
        k: [n, kv_heads, dim], kv_heads a divisor of heads.
        v: [n, kv_heads, dim].
        past_k: [p, kv_heads, dim], of the p tokens before, p ≥ 1.
        past_v: [p, kv_heads, dim].
        softcap: Scores are kept within ± this number; None: they are as they come.
        sinks: [heads]; None: there are none.

    Returns:
        [n, heads, dim].
    """
    parts = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v, past_k, past_v)]
    cpu = q.device.type == "cpu"
    if softcap is not None or (sinks is not None and not cpu):
        keys, values = torch.cat([parts[3], parts[1]], 2), torch.cat([parts[4], parts[2]], 2)
        seen = torch.ones(len(q), keys.shape[2], dtype=torch.bool, device=q.device).tril(
            len(past_k)
        )
        found = capped_attention(parts[0], keys, values, seen, softcap, sinks)
        return found.squeeze(0).transpose(0, 1)
    if cpu:
        out: Tensor = _Joined.apply(*parts, sinks)
    else:
        out = attend_aligned(*parts)
    return out.squeeze(0).transpose(0, 1)


def attend_aligned(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor) -> Tensor:
    """`attend_past` in one call; [1, heads, tokens, dim] each. On the CPU it makes a mask."""
    # This imports torch's whole compiler, which would cost every start seconds.
    from torch.nn.attention.bias import causal_lower_right

    keys, values = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
    aligned = causal_lower_right(q.shape[2], keys.shape[2])
    return sdpa(q, keys, values, mask=aligned)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past_k: Tensor,
        past_v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        q, k, v, past_k, past_v = (x.contiguous() for x in (q, k, v, past_k, past_v))
        before, before_sums = _flash(q, past_k, past_v, 0.0, False)
        own, own_sums = _flash(q, k, v, 0.0, True)
        sums = torch.logaddexp(before_sums, own_sums)
        shares = ((part - sums).exp()[..., None] for part in (before_sums, own_sums))
        out = sum(
            (part * share).to(q.dtype) for part, share in zip((before, own), shares, strict=True)
        )
        assert isinstance(out, Tensor)
        if sinks is not None:
            found, sums = add_sinks(out.transpose(1, 2), sums, sinks)
            out = found.transpose(1, 2).contiguous()
        ctx.save_for_backward(q, k, v, past_k, past_v, out, sums, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, past_k, past_v, out, sums, sinks = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_before, of_past_k, of_past_v = _flash_backward(
            gradient, q, past_k, past_v, out, sums, 0.0, False
        )
        of_own, of_k, of_v = _flash_backward(gradient, q, k, v, out, sums, 0.0, True)
        of_sinks = None
        if sinks is not None:
            wanted, found = (x[0].transpose(0, 1) for x in (gradient, out))
            of_sinks = sink_gradients(wanted, found, sums[0], sinks)
        return of_before + of_own, of_k, of_v, of_past_k, of_past_v, of_sinks


def backward_in_parts(
    model: LanguageModel, row: RowTensors, parts: int, loss_of: PartLoss
) -> Tensor:
    """Add the gradients of a row's loss to those of the model's weights.

    Args:
        model: One whose attention is ours, or our transformer.
        row: T slots, on the model's device.
        parts: k, a divisor of T.
        loss_of: The loss of a part; the row's loss is the sum.

    Returns:
        The loss, a scalar without gradients.

    Raises:
        ConfigError: T is not a multiple of k, a cut divides a bidirectional prefix, or the model
            has a window.
    """
    cuts = _cuts(row, parts)
    keys = _KeysAndValues()

    def run(part: _Part, begin: int, end: int) -> Tensor:
        tokens, positions = row.tokens[begin:end], row.positions[begin:end]
        if isinstance(model, Transformer):
            return model.run(tokens, positions, part.attend, carried=part)
        return model.run(tokens, positions, part.attend)

    with torch.no_grad():
        for begin, end in cuts[:-1]:
            # Keys of the last part are not needed.
            run(_Part(row, begin, end, keys), begin, end)
    total = torch.zeros((), device=row.tokens.device)
    for begin, end in reversed(cuts):
        part = _Part(row, begin, end, keys)
        hidden = run(part, begin, end)
        loss = loss_of(hidden, row.targets[:, begin:end], row.loss_weights[:, begin:end])
        part.backward(loss)
        total = total + loss.detach()
    return total


def check_cuts(slots: int, parts: int, window: int | None) -> None:
    """Refuse a number of parts that no row can be cut into.

    Args:
        slots: T.
        parts: k.
        window: The model's sliding window; None: it has none.

    Raises:
        ConfigError: T is not a multiple of k, or the model has a window.
    """
    if parts < 1 or slots % parts:
        raise ConfigError(
            f"a row of {slots} slots cannot be cut into {parts} equal parts; take a divisor "
            f"of {slots}"
        )
    if window is not None and parts > 1:
        raise ConfigError(
            "micro-sequences do not support sliding windows; take 1 part, or a model without "
            "a window"
        )


def _cuts(row: RowTensors, parts: int) -> list[tuple[int, int]]:
    if row.part is not None:
        raise ConfigError("micro-sequences do not support slices of rows; run the slice at once")
    slots = row.rule.num_slots
    check_cuts(slots, parts, row.window)
    size = slots // parts
    if row.rule.forked and parts > 1:
        raise ConfigError("micro-sequences do not support prefix trees; set micro_sequences to 1")
    for number, (begin, prefix_end, _) in enumerate(row.rule.pieces.tolist()):
        cut = -(-(begin + 1) // size) * size
        if cut < prefix_end:
            raise ConfigError(
                f"document {number} of the row has a bidirectional prefix in slots {begin} to "
                f"{prefix_end}, across the cut at {cut}; take fewer micro-sequences than "
                f"{parts}, or an objective with bidirectional=False"
            )
    return [(begin, begin + size) for begin in range(0, slots, size)]


@final
class _KeysAndValues:
    """Keys and values of a whole row, a pair [T, kv_heads, dim] per layer, and their gradients from
    later parts.

    Attributes:
        states: (cut, recurrent layer) → states there of the document that crosses it.
        state_gradients: The same → their gradients from later parts.
    """

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self.gradients: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[tuple[int, int], State] = {}
        self.state_gradients: dict[tuple[int, int], tuple[Tensor | None, ...]] = {}

    def store(self, layer: int, slots: slice, total: int, pair: tuple[Tensor, Tensor]) -> None:
        if layer not in self.pairs:
            self.pairs[layer] = tuple(x.new_empty((total, *x.shape[1:])) for x in pair)  # type: ignore[assignment]
        for kept, new in zip(self.pairs[layer], pair, strict=True):
            kept[slots] = new

    def add_gradients(self, layer: int, slots: slice, gradients: tuple[Tensor | None, ...]) -> None:
        """Add gradients; in float32 or wider, because several parts add to the same slots."""
        if layer not in self.gradients:
            wide = torch.promote_types(self.pairs[layer][0].dtype, torch.float32)
            self.gradients[layer] = tuple(
                torch.zeros_like(x, dtype=wide) for x in self.pairs[layer]
            )  # type: ignore[assignment]
        for kept, new in zip(self.gradients[layer], gradients, strict=True):
            if new is not None:
                kept[slots] += new


@final
class _Part:
    """Slots [begin, end) of a row; the first document may have begun before.

    For recurrent blocks it is the `Carried` of its documents, a row of their own.
    """

    keeps = True

    def __init__(self, row: RowTensors, begin: int, end: int, keys: _KeysAndValues) -> None:
        pieces = row.rule.pieces
        here = pieces[(pieces[:, 2] > begin) & (pieces[:, 0] < end)]
        local = np.clip(here, begin, end) - begin
        self._slots, self._total, self._keys = slice(begin, end), row.rule.num_slots, keys
        self._past = slice(int(here[0, 0]), begin)
        # Number of own tokens that continue a document of an earlier part.
        self._continued = int(local[0, 2]) if here[0, 0] < begin else 0
        self._continues = here[-1, 2] > end
        rest = local[1:] - self._continued if self._continued else local
        self._rest, how = None, row.attention
        self._softcap = how.softcap
        if len(rest):
            self._rest = RowAttention.of(
                AttentionRule(rest),
                device=how.device,
                dtype=how.dtype,
                backend=how.backend,
                softcap=how.softcap,
            )
        self._attend = outside_graphs(_attend)
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}
        self.borders = Borders([0, *local[:, 2]], row.tokens.device)
        self._states_before: dict[int, State] = {}
        self._states_after: dict[int, State] = {}

    def row(self, x: Tensor) -> Tensor:
        """The same: all slots are tokens of a row."""
        return x

    def back(self, row: Tensor, like: Tensor) -> Tensor:
        """The same."""
        return row

    def state(self, layer: int) -> State | None:
        """The states of the document that began before, and zeros for the others."""
        kept = self._keys.states.get((self._slots.start, layer))
        if kept is None:
            return None
        first = tuple(x.detach().requires_grad_(torch.is_grad_enabled()) for x in kept)
        self._states_before[layer] = (first[0], first[1])
        others = (x.new_zeros(len(self.borders) - 1, *x.shape[1:]) for x in first)
        convolution, recurrence = (torch.cat(pair) for pair in zip(first, others, strict=True))
        return convolution, recurrence

    def keep(self, layer: int, state: State) -> None:
        """Those of the document that goes on."""
        if not self._continues:
            return
        last = (state[0][-1:], state[1][-1:])
        if torch.is_grad_enabled():
            self._states_after[layer] = last
        else:
            self._keys.states[self._slots.stop, layer] = last

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`LayerAttend` with the past included; stores keys and values, or keeps them in the
        graph.
        """
        out: Tensor = self._attend(self, layer, q, k, v)
        return out

    def attend_now(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`attend`, as it is: what it keeps differs by layer."""
        place, sinks = layer.place, layer.sinks
        if torch.is_grad_enabled():
            self._own[place] = (k, v)
        else:
            self._keys.store(place, self._slots, self._total, (k, v))
        n, out = self._continued, []
        if n:
            past_k, past_v = (
                x[self._past].detach().requires_grad_() for x in self._keys.pairs[place]
            )
            self._leaves[place] = (past_k, past_v)
            out.append(attend_past(q[:n], k[:n], v[:n], past_k, past_v, self._softcap, sinks))
        if self._rest is not None:
            out.append(self._rest(q[n:], k[n:], v[n:], sinks))
        return torch.cat(out) if len(out) > 1 else out[0]

    def backward(self, loss: Tensor) -> None:
        """Backward pass from the loss and from later parts' gradients; adds gradients for earlier
        parts.
        """
        starts: list[tuple[Tensor, Any]] = [(loss, None)]
        if self._continues:
            for layer, gradients in self._keys.gradients.items():
                pair = zip(self._own[layer], gradients, strict=True)
                starts += [(x, gradient[self._slots].to(x.dtype)) for x, gradient in pair]
            for layer, state in self._states_after.items():
                later = self._keys.state_gradients.get((self._slots.stop, layer), (None, None))
                starts += [
                    (x, gradient)
                    for x, gradient in zip(state, later, strict=True)
                    if gradient is not None
                ]
        # A part without targets may have no gradients at all.
        starts = [(x, gradient) for x, gradient in starts if x.requires_grad]
        if not starts:
            return
        torch.autograd.backward([x for x, _ in starts], [gradient for _, gradient in starts])
        for layer, leaves in self._leaves.items():
            self._keys.add_gradients(layer, self._past, tuple(leaf.grad for leaf in leaves))
        for layer, before in self._states_before.items():
            self._keys.state_gradients[self._slots.start, layer] = tuple(
                leaf.grad for leaf in before
            )


def _attend(part: _Part, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return part.attend_now(layer, q, k, v)
