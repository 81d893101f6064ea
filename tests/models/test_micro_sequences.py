"""A row in parts: the gradients of the uncut row, less memory, documents apart."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_makers import VOCABULARY, tiny
from torch.nn.functional import cross_entropy

from makers.rows import random_row
from penstock import ModelInput
from penstock.core.errors import ConfigError
from penstock.models.ours.micro_sequences import (
    PartLoss,
    _Part,
    attend_aligned,
    attend_past,
    backward_in_parts,
)
from penstock.models.settings import BlockSettings


def loss_of(model: Any) -> PartLoss:
    def call(hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        losses = cross_entropy(
            model.logits(hidden).flatten(0, 1), targets.flatten(), reduction="none"
        )
        return (losses * weights.flatten()).sum() / 7

    return call


def gradients_of(model: Any, run: Callable[[], Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and all gradients in one vector."""
    model.zero_grad()
    loss = run()
    found = [torch.zeros_like(w) if w.grad is None else w.grad for w in model.parameters()]
    return loss.detach(), torch.cat([gradient.flatten() for gradient in found])


def whole(model: Any, row: ModelInput) -> tuple[torch.Tensor, torch.Tensor]:
    def run() -> torch.Tensor:
        tensors = model.tensors(row)
        loss = loss_of(model)(model(tensors), tensors.targets, tensors.loss_weights)
        loss.backward()
        return loss

    return gradients_of(model, run)


def cut(model: Any, row: ModelInput, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    return gradients_of(
        model, lambda: backward_in_parts(model, model.tensors(row), parts, loss_of(model))
    )


def assert_same(
    found: tuple[torch.Tensor, torch.Tensor], due: tuple[torch.Tensor, torch.Tensor]
) -> None:
    for one, other in zip(found, due, strict=True):
        assert (one - other).norm() <= 1e-12 * other.norm()


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=5),
    parts=st.integers(1, 6),
    heads=st.integers(1, 2),
    seed=st.integers(0, 9),
)
def test_gradients_are_those_of_the_uncut_row(
    lengths: list[int], parts: int, heads: int, seed: int
) -> None:
    model = tiny(prediction_heads=heads, layers=3)
    row = random_row(
        tuple(lengths), padding=parts - sum(lengths) % parts, distances=heads, seed=seed
    )
    assert_same(cut(model, row, parts), whole(model, row))


@pytest.mark.parametrize("parts", [2, 4, 23])
def test_with_prefixes_that_no_cut_divides(parts: int) -> None:
    """Prefixes lie before, between and behind the cuts."""
    if parts == 23:
        row = random_row(prefixes=(1, 1, 0))
    else:
        row = random_row((8, 4, 12), padding=0, prefixes=(4 if parts == 4 else 5, 3, 3))
    model = tiny()
    causal = whole(model, replace(row, prefix=None, prefix_lengths=None))
    assert_same(cut(model, row, parts), whole(model, row))
    assert parts == 23 or (causal[1] != whole(model, row)[1]).any()


RECURRENT = {
    name: BlockSettings(mixer=mixer, heads=2, head_width=5, state_width=4, convolution=taps)
    for name, mixer, taps in (
        ("delta", "gated_delta", 4),
        ("kimi", "kimi_delta", 2),
        ("mamba", "mamba", 3),
    )
} | {"full": BlockSettings()}


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    parts=st.integers(1, 6),
    pattern=st.sampled_from(
        [("delta",), ("kimi", "full"), ("full", "mamba"), ("delta", "mamba", "kimi")]
    ),
    distances=st.integers(1, 2),
)
def test_gradients_go_through_recurrent_states(
    lengths: list[int], parts: int, pattern: tuple[str, ...], distances: int
) -> None:
    """Also of a document that crosses several cuts, which parts of a token or two make."""
    blocks = {name: RECURRENT[name] for name in pattern}
    model = tiny(layers=3, blocks=blocks, pattern=pattern, prediction_heads=distances)
    row = random_row(tuple(lengths), padding=-sum(lengths) % parts, distances=distances)
    found, due = cut(model, row, parts), whole(model, row)
    assert abs(found[0] - due[0]) <= 1e-12 * due[0]
    assert (found[1] - due[1]).norm() <= 1e-10 * due[1].norm()


def test_states_are_no_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without their gradients the loss is the same and the gradients are not."""
    model = tiny(layers=2, blocks={"delta": RECURRENT["delta"]}, pattern=("delta",))
    row = random_row((24,), padding=0)
    due = whole(model, row)
    monkeypatch.setattr(
        _Part, "keep", lambda self, layer, state: _keep_detached(self, layer, state)
    )
    found = cut(model, row, 3)
    assert abs(found[0] - due[0]) <= 1e-12 * due[0]
    assert (found[1] - due[1]).norm() > 1e-4 * due[1].norm()


def _keep_detached(part: Any, layer: int, state: Any) -> None:
    if not torch.is_grad_enabled() and part._continues:
        part._keys.states[part._slots.stop, layer] = tuple(x[-1:] for x in state)


def test_past_keys_are_no_constants() -> None:
    """What the test above would miss if it compared losses: a gradient without later parts' share
    is far off.
    """
    model, row = tiny(), random_row((24,), padding=0)

    def run() -> torch.Tensor:
        tensors, total, past = model.tensors(row), torch.zeros(()), {}

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            before = past.get(layer)
            past[layer] = (
                (k, v)
                if before is None
                else tuple(map(torch.cat, zip(before, (k, v), strict=True)))
            )
            past[layer] = tuple(x.detach() for x in past[layer])
            if before is None:
                return attend_aligned(*(x.transpose(0, 1)[None] for x in (q, k, v, k[:0], v[:0])))[
                    0
                ].transpose(0, 1)
            return attend_past(q, k, v, *before)

        for begin in range(0, 24, 6):
            some = slice(begin, begin + 6)
            hidden = model.run(tensors.tokens[some], tensors.positions[some], attend)
            loss = loss_of(model)(hidden, tensors.targets[:, some], tensors.loss_weights[:, some])
            loss.backward()
            total = total + loss.detach()
        return total

    (found_loss, found), (due_loss, due) = gradients_of(model, run), whole(model, row)
    assert abs(found_loss - due_loss) <= 1e-12 * due_loss
    assert (found - due).norm() > 0.1 * due.norm()


def test_parts_without_targets_ask_nothing() -> None:
    """Whole parts of padding, with a loss that is a constant there."""
    model, row = tiny(), random_row((5, 4), padding=15)

    def each(hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return loss_of(model)(hidden, targets, weights) if weights.any() else torch.zeros(())

    found = gradients_of(model, lambda: backward_in_parts(model, model.tensors(row), 4, each))
    assert_same(found, whole(model, row))


def saved_bytes(model: Any, run: Callable[[], Any]) -> int:
    """Most bytes that were saved for backward passes at any time, weights not counted."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    held: dict[int, int] = {}
    peak = 0

    class Saved:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    def pack(tensor: torch.Tensor) -> Saved:
        nonlocal peak
        saved = Saved(tensor.detach())
        if tensor.untyped_storage().data_ptr() not in weights:
            held[id(saved)] = tensor.numel() * tensor.element_size()
            weakref.finalize(saved, held.pop, id(saved))
            peak = max(peak, sum(held.values()))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        run()
    return peak


def test_saved_memory_falls_with_the_number_of_parts() -> None:
    model, row = tiny(), random_row((500, 12), padding=0)
    uncut = saved_bytes(model, lambda: whole(model, row))
    peaks = [saved_bytes(model, lambda k=parts: cut(model, row, k)) for parts in (2, 4, 8)]  # type: ignore[misc]
    # What is left beside 1/k are the past keys and values, of a layer each.
    assert peaks[0] < 0.62 * uncut
    assert peaks[1] < 0.40 * uncut
    assert peaks[2] < 0.28 * uncut


def test_a_token_moves_no_loss_of_another_document() -> None:
    model, row = tiny(), random_row((7, 1, 12), padding=4)

    def losses(tokens: Any) -> torch.Tensor:
        found: list[torch.Tensor] = []

        def each(
            hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
        ) -> torch.Tensor:
            found.insert(0, model.logits(hidden).detach())
            return loss_of(model)(hidden, targets, weights)

        backward_in_parts(model, model.tensors(replace(row, tokens=tokens)), 4, each)
        return torch.cat(found, dim=1)[0]

    before = losses(row.tokens)
    for slot in range(row.sequence_length):
        tokens = row.tokens.copy()
        tokens[slot] = (tokens[slot] + 1) % VOCABULARY
        changed = (losses(tokens) != before).any(-1).numpy()
        assert changed[slot]
        assert not changed[row.document_ids != row.document_ids[slot]].any()  # type: ignore[index]


def test_what_cannot_be_cut_is_refused() -> None:
    model = tiny()
    with pytest.raises(ConfigError, match=r"23.*slots.*cannot.*into.*4"):
        cut(model, random_row(), 4)
    row = random_row((8, 16), padding=0, prefixes=(0, 5))
    with pytest.raises(ConfigError, match=r"document 1.*slots 8.*12"):
        cut(model, row, 2)
    with pytest.raises(ConfigError, match="do not support sliding windows"):
        cut(tiny(sliding_window=3), random_row((8,), padding=0), 2)


@settings(deadline=None, max_examples=25)
@given(
    tokens=st.integers(1, 40),
    past=st.integers(1, 40),
    heads=st.sampled_from([(4, 4), (4, 2), (2, 1)]),
    seed=st.integers(0, 9),
)
def test_joined_is_the_aligned_call(
    tokens: int, past: int, heads: tuple[int, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads[0])] + [(n, heads[1]) for n in (tokens, tokens, past, past)]
    made = [
        torch.randn(*shape, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]
    found = attend_past(*made)
    due = attend_aligned(*(x.transpose(0, 1)[None] for x in made))[0].transpose(0, 1)
    torch.testing.assert_close(found, due, rtol=0, atol=1e-12)
    weights = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    for one, other in zip(
        *(torch.autograd.grad((x * weights).sum(), made) for x in (found, due)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
