"""A row in equal parts, with the gradients of the uncut row and the memory of one part.

First the keys and values of all parts are computed without gradients. Then come the parts from last to first: each is
computed again, with gradients, on the keys and values of what lies before it; its backward pass takes in what later
parts asked of its own keys and values, and gives what it asks of earlier ones. So every way by which a token moves the
loss is walked exactly once. (Taking past keys for constants instead gives the same loss and a gradient that is wrong.)

Costs: one more forward pass, and keys and values of the whole row with their gradients; the graph is that of one part.
Works for every model of this room. Backward passes run inside, one for each part: data parallelism that sums gradients
in hooks has to wait for the last.
"""

from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.inputs import AttentionRule
from penstock.models.attention import RowAttention
from penstock.models.language_model import LanguageModel
from penstock.models.past_attention import attend_past
from penstock.models.row_tensors import RowTensors

PartLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [D, S, width], targets [D, S], loss weights [D, S]) → the part's share of the loss, a scalar."""


def backward_in_parts(model: LanguageModel, row: RowTensors, parts: int, loss_of: PartLoss) -> Tensor:
    """Add the gradients of a row's loss to those of the model's weights.

    Args:
        model: Any of this room.
        row: T slots, on its device.
        parts: k, a divisor of T.
        loss_of: The loss of a part; that of the row is their sum.

    Returns:
        The loss, a scalar without gradients.

    Raises:
        ConfigError: T is no multiple of k, a bidirectional prefix lies across a cut, or the model has a window.
    """
    cuts = _cuts(row, parts)
    keys = _KeysAndValues()
    with torch.no_grad():
        for begin, end in cuts[:-1]:
            # Of the last part nobody needs keys.
            model.run(row.tokens[begin:end], row.positions[begin:end], _Part(row, begin, end, keys).attend)
    total = torch.zeros((), device=row.tokens.device)
    for begin, end in reversed(cuts):
        part = _Part(row, begin, end, keys)
        hidden = model.run(row.tokens[begin:end], row.positions[begin:end], part.attend)
        loss = loss_of(hidden, row.targets[:, begin:end], row.loss_weights[:, begin:end])
        part.backward(loss)
        total = total + loss.detach()
    return total


def check_cuts(slots: int, parts: int, window: int | None) -> None:
    """Refuse what no row of a model could be cut in.

    Args:
        slots: T.
        parts: k.
        window: Tokens that a token sees, itself among them; None: all before it.

    Raises:
        ConfigError: T is no multiple of k, or the model has a window.
    """
    if parts < 1 or slots % parts:
        raise ConfigError(f"a row of {slots} slots cannot be cut in {parts} equal parts; take a divisor of {slots}")
    if window is not None and parts > 1:
        raise ConfigError("micro-sequences do not know sliding windows; take 1 part, or a model without a window")


def _cuts(row: RowTensors, parts: int) -> list[tuple[int, int]]:
    slots = row.rule.num_slots
    check_cuts(slots, parts, row.window)
    size = slots // parts
    for number, (begin, prefix_end, _) in enumerate(row.rule.pieces.tolist()):
        cut = -(-(begin + 1) // size) * size
        if cut < prefix_end:
            raise ConfigError(
                f"document {number} of the row has a bidirectional prefix in slots {begin} to {prefix_end}, across "
                f"the cut at {cut}; take fewer micro-sequences than {parts}, or an objective with bidirectional=False"
            )
    return [(begin, begin + size) for begin in range(0, slots, size)]


@final
class _KeysAndValues:
    """Of a whole row, a pair [T, kv_heads, dim] a layer, and the gradients that later parts ask of them."""

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self.gradients: dict[int, tuple[Tensor, Tensor]] = {}

    def store(self, layer: int, slots: slice, total: int, pair: tuple[Tensor, Tensor]) -> None:
        if layer not in self.pairs:
            self.pairs[layer] = tuple(x.new_empty((total, *x.shape[1:])) for x in pair)  # type: ignore[assignment]
        for kept, new in zip(self.pairs[layer], pair, strict=True):
            kept[slots] = new

    def ask(self, layer: int, slots: slice, gradients: tuple[Tensor | None, ...]) -> None:
        """Add gradients; in float32 or wider, as several parts add to the same."""
        if layer not in self.gradients:
            wide = torch.promote_types(self.pairs[layer][0].dtype, torch.float32)
            self.gradients[layer] = tuple(torch.zeros_like(x, dtype=wide) for x in self.pairs[layer])  # type: ignore[assignment]
        for kept, new in zip(self.gradients[layer], gradients, strict=True):
            if new is not None:
                kept[slots] += new


@final
class _Part:
    """Slots begin to end of a row. Its first document may have begun before."""

    def __init__(self, row: RowTensors, begin: int, end: int, keys: _KeysAndValues) -> None:
        pieces = row.rule.pieces
        here = pieces[(pieces[:, 2] > begin) & (pieces[:, 0] < end)]
        local = np.clip(here, begin, end) - begin
        self._slots, self._total, self._keys = slice(begin, end), row.rule.num_slots, keys
        self._past = slice(int(here[0, 0]), begin)
        # So many of the own tokens continue a document of an earlier part.
        self._continued = int(local[0, 2]) if here[0, 0] < begin else 0
        self._wanted = here[-1, 2] > end
        rest = local[1:] - self._continued if self._continued else local
        self._rest = None
        if len(rest):
            how = row.attention
            self._rest = RowAttention.of(AttentionRule(rest), device=how.device, dtype=how.dtype, backend=how.backend)
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`LayerAttend`: with what came before; keeps keys and values, or their places in the graph."""
        if torch.is_grad_enabled():
            self._own[layer] = (k, v)
        else:
            self._keys.store(layer, self._slots, self._total, (k, v))
        n, out = self._continued, []
        if n:
            past_k, past_v = (x[self._past].detach().requires_grad_() for x in self._keys.pairs[layer])
            self._leaves[layer] = (past_k, past_v)
            out.append(attend_past(q[:n], k[:n], v[:n], past_k, past_v))
        if self._rest is not None:
            out.append(self._rest(q[n:], k[n:], v[n:]))
        return torch.cat(out) if len(out) > 1 else out[0]

    def backward(self, loss: Tensor) -> None:
        """Gradients of the loss and of what later parts ask; asks the same of earlier ones."""
        asked: list[tuple[Tensor, Any]] = [(loss, None)]
        if self._wanted:
            for layer, gradients in self._keys.gradients.items():
                pair = zip(self._own[layer], gradients, strict=True)
                asked += [(x, gradient[self._slots].to(x.dtype)) for x, gradient in pair]
        # Of a part without targets nothing may be asked.
        asked = [(x, gradient) for x, gradient in asked if x.requires_grad]
        if not asked:
            return
        torch.autograd.backward([x for x, _ in asked], [gradient for _, gradient in asked])
        for layer, leaves in self._leaves.items():
            self._keys.ask(layer, self._past, tuple(leaf.grad for leaf in leaves))
