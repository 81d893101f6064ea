"""Causal depthwise convolution that stops at the borders of documents.

One ordinary convolution runs over the whole row. The first K − 1 outputs of each document, which
would read the document before, are computed again from their own document's slots, and put in their
place: cheaper than zeros between the documents or K masked shifts, and gradients to other documents
are exactly 0.
"""

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from penstock.models.recurrent.borders import Borders


def causal_convolution(
    row: Tensor, weight: Tensor, bias: Tensor | None, borders: Borders, state: Tensor | None = None
) -> Tensor:
    """Depthwise causal convolution of each document alone.

    Args:
        row: [T, channels].
        weight: [channels, K]; the last tap is that of the slot itself.
        bias: [channels], or None.
        borders: The documents of the row.
        state: [documents, K − 1, channels], the inputs before each document; None: zeros.

    Returns:
        [T, channels].
    """
    taps, channels = weight.shape[1], weight.shape[0]
    if state is not None:
        wider, among, real = behind_state(row, borders, state)
        return causal_convolution(wider, weight, bias, among)[real]
    plain = conv1d(pad(row.T[None], (taps - 1, 0)), weight[:, None], bias, groups=channels)[0]
    heads, chosen, slots = borders.restarts(taps)
    if len(slots):
        first = row.index_select(0, heads.flatten()).view(*heads.shape, channels).unbind(1)
        # Output i of a document reads its inputs 0 to i, with the last taps.
        again = [
            torch.stack([first[j] * weight[:, taps - 1 - i + j] for j in range(i + 1)]).sum(0)
            for i in range(taps - 1)
        ]
        outputs = torch.stack(again, 1).flatten(0, 1).index_select(0, chosen)
        plain = plain.index_copy(1, slots, (outputs if bias is None else outputs + bias).T)
    return plain.T


def behind_state(row: Tensor, borders: Borders, state: Tensor) -> tuple[Tensor, Borders, Tensor]:
    """Each document behind its K − 1 earlier inputs, which so are slots of it.

    Returns:
        [T + documents × (K − 1), channels], its borders, and the places of the row's own slots in
        it.
    """
    wider, real = _behind(row, borders, state)
    return wider, Borders(_wider_borders(borders, state.shape[1]), row.device), real


def last_inputs(row: Tensor, borders: Borders, taps: int, state: Tensor | None = None) -> Tensor:
    """[documents, K − 1, channels]: the inputs that the slot after each document would read; zeros
    before its start.
    """
    if state is None:
        state = row.new_zeros(len(borders), taps - 1, row.shape[1])
    wider, _ = _behind(row, borders, state)
    ends = borders.place(_wider_borders(borders, taps - 1)[1:])
    return wider[ends[:, None] + torch.arange(1 - taps, 0, device=row.device)]


def _wider_borders(borders: Borders, more: int):  # type: ignore[no-untyped-def]
    return borders.cu_seqlens + more * torch.arange(len(borders) + 1).numpy()


def _behind(row: Tensor, borders: Borders, state: Tensor) -> tuple[Tensor, Tensor]:
    """Each document behind its state, and the places of the row's own slots among these."""
    more, count = state.shape[1], len(borders)
    wider = _wider_borders(borders, more)
    held = borders.place(wider[:-1])[:, None] + torch.arange(more, device=row.device)
    shift = torch.repeat_interleave(
        torch.arange(1, count + 1, device=row.device), borders.place(borders.cu_seqlens).diff()
    )
    real = torch.arange(len(row), device=row.device) + more * shift
    base = row.new_zeros(len(row) + more * count, row.shape[1])
    return base.index_copy(0, held.flatten(), state.flatten(0, 1).to(row.dtype)).index_copy(
        0, real, row
    ), real
