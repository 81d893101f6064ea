"""Experts, stochastic blocks and soft-capped logits of our transformer."""

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_makers import logits_of, tiny
from torch.nn.functional import silu

from makers.rows import LENGTHS, random_row
from penstock import check_isolation
from penstock.core.errors import ConfigError
from penstock.models import ModelSettings
from penstock.models.exporting import export
from penstock.models.ours.experts import Balance, Experts
from penstock.models.saving import load_model, save_model
from penstock.models.settings import BlockSettings

MANY: dict[str, Any] = {"experts": 5, "experts_per_token": 2, "expert_width": 24, "balance": 0.5}
EITHER = {
    "near": BlockSettings(sliding_window=3),
    "full": BlockSettings(qk_norm=True),
    "delta": BlockSettings(mixer="gated_delta"),
    "either": BlockSettings(
        mixer="stochastic", choices=("near", "delta", "full"), main="full", chances=(1, 2, 1)
    ),
}


def sparse(**settings: Any) -> Any:
    return tiny(layers=2, blocks={"sparse": BlockSettings(**MANY)}, pattern=("sparse",), **settings)


def test_each_token_goes_to_its_experts() -> None:
    """Against a loop over tokens."""
    layer = sparse().blocks[0].mlp
    assert isinstance(layer, Experts)
    x = torch.randn(17, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    due = []
    for token in x:
        probabilities = (layer.router.weight @ token).softmax(0)
        best = probabilities.argsort(descending=True)[:2]
        each = [
            probabilities[b] / probabilities[best].sum() * expert(layer.experts[int(b)], token)
            for b in best
        ]
        due.append(sum(each))
    torch.testing.assert_close(layer(x), torch.stack(due), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer(x[None, :6])[0], torch.stack(due[:6]), rtol=0, atol=1e-12)


def expert(own: Any, token: torch.Tensor) -> torch.Tensor:
    inner = silu(own.gate.weight @ token) * (own.up.weight @ token)
    out: torch.Tensor = own.down.weight @ inner
    return out


def document(row: Any, begin: int, end: int) -> Any:
    alone = random_row((end - begin,), padding=0)
    alone.tokens[:], alone.targets[:] = row.tokens[begin:end], row.targets[:, begin:end]
    return alone


def backward(model: Any, row: Any, *, tokens: int) -> torch.Tensor:
    """All gradients of one pass, with logits that count for nothing: those of the balance loss."""
    model.begin_step(seed=0, number=0, tokens=tokens)
    model.zero_grad()
    (0 * model(model.tensors(row)).sum()).backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def slow_balance(model: Any, row: Any) -> torch.Tensor:
    """Of one document, by the equations: Σ over blocks of factor × tokens × Σ over experts of share
    × probability.
    """
    found: list[torch.Tensor] = []

    def see(layer: Any, given: tuple[torch.Tensor, ...], _: Any) -> None:
        probabilities = (given[0] @ layer.router.weight.T).softmax(-1)
        best = probabilities.argsort(-1, descending=True)[:, : layer.each]
        n, experts = probabilities.shape
        shares = torch.stack(
            [(best == e).sum().double() * experts / (layer.each * n) for e in range(experts)]
        )
        found.append(layer.factor * n * (shares * probabilities.mean(0)).sum())

    hooks = [block.mlp.register_forward_hook(see) for block in model.blocks]
    model(model.tensors(row))
    for hook in hooks:
        hook.remove()
    return torch.stack(found).sum()


def test_the_balance_loss_is_of_each_document_alone() -> None:
    """A row, with its padding, gives the gradients of its documents one at a time, divided by the
    step's tokens.
    """
    model, row = sparse().train(), random_row()
    whole = backward(model, row, tokens=100)
    figures = model.end_step({name: float(one) for name, one in model.pending_sums().items()})
    parts = [document(row, *borders) for borders in pairwise(np.cumsum([0, *LENGTHS]).tolist())]
    torch.testing.assert_close(
        whole, sum(backward(model, part, tokens=100) for part in parts), rtol=0, atol=1e-14
    )
    model.zero_grad()
    losses = [slow_balance(model, part) / 100 for part in parts]
    sum(losses).backward()
    due = torch.cat(
        [p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )
    torch.testing.assert_close(whole, due, rtol=0, atol=1e-13)
    assert whole.any()
    assert figures["experts.evenness"] == pytest.approx(
        float(sum(losses).detach()) / MANY["balance"] / 2
    )


def test_padding_between_joined_rows_counts_for_nothing() -> None:
    row = random_row((5, 6, 4), padding=0)
    tensors = sparse().tensors(row)
    row.source_ids[1] = -1
    balance = Balance(tensors)
    assert (balance._shares > 0).tolist() == [True, False, True]


def test_evaluation_needs_no_step_and_training_does() -> None:
    model, row = sparse().eval(), random_row()
    model(model.tensors(row))
    model.train()
    with torch.no_grad():
        model(model.tensors(row))
    with pytest.raises(ConfigError, match=r"model\.begin_step"):
        model(model.tensors(row))


def test_documents_apart_and_caches_exact() -> None:
    model, row = sparse().eval(), random_row()
    assert check_isolation(
        model, forward=lambda m, row: m.logits(m(m.tensors(row)))[0]
    ).dependence_checked
    text = torch.from_numpy(row.tokens[:12]).long()
    cache = model.new_cache(1, 12)
    model.extend(text[None, :9], torch.tensor([9]), cache)
    due = logits_of(model, document(row, 0, 12))[0]
    torch.testing.assert_close(
        model.extend(text[None, 9:], torch.tensor([3]), cache)[0], due[-1], rtol=0, atol=1e-12
    )


def stochastic() -> Any:
    return tiny(layers=3, blocks=EITHER, pattern=("either", "near", "either"))


def test_a_stochastic_block_draws_by_seed_step_and_layer() -> None:
    model, row = stochastic(), random_row()
    main = logits_of(model, row)
    model.train()
    drawn = []
    for number in range(400):
        model.begin_step(seed=3, number=number, tokens=1)
        drawn.append(tuple(model._choice(layer) for layer in range(3)))
    assert {layer for _, layer, _ in drawn} == {0}
    for layer in (0, 2):
        # The main one is `full`, then come `near` and `delta`, which is twice as likely.
        shares = np.bincount([each[layer] for each in drawn], minlength=3) / len(drawn)
        np.testing.assert_allclose(shares, [0.25, 0.25, 0.5], atol=0.08)
    assert len(set(drawn)) == 9
    # The same again, and other results than in evaluation; unchosen mixers have no gradient.
    number = drawn.index((1, 0, 2))
    model.begin_step(seed=3, number=number, tokens=1)
    found = model.logits(model(model.tensors(row)))
    assert (found - main).abs().max() > 1e-3
    found.sin().sum().backward()
    names = {
        name.split(".output")[0]
        for name, p in model.named_parameters()
        if p.grad is not None and "output" in name
    }
    assert names == {"blocks.0.others.0", "blocks.1.attention", "blocks.2.others.1"}
    assert (logits_of(model.eval(), row) == main).all()


def test_choices_compute_what_they_compute_alone() -> None:
    """Weights of the drawn mixers, in a model that has only these; windows included."""
    model, row = stochastic(), random_row()
    alone = tiny(
        layers=3,
        blocks={n: EITHER[n] for n in ("near", "delta")},
        pattern=("near", "near", "delta"),
    )
    kept = model.state_dict()
    renamed = {"blocks.0.attention": "blocks.0.others.0", "blocks.2.mixer": "blocks.2.others.1"}
    weights = {}
    for name in alone.state_dict():
        place = ".".join(name.split(".")[:3])
        weights[name] = kept[name.replace(place, renamed.get(place, place))]
    alone.load_state_dict(weights)
    model.train()
    number = next(n for n in range(100) if begun(model, n) == (1, 0, 2))
    model.begin_step(seed=0, number=number, tokens=1)
    found = model.logits(model(model.tensors(row))).detach()
    torch.testing.assert_close(found, logits_of(alone, row), rtol=0, atol=1e-12)


def begun(model: Any, number: int) -> tuple[int, ...]:
    model.begin_step(seed=0, number=number, tokens=1)
    return tuple(model._choice(layer) for layer in range(3))


def test_the_cache_of_a_stochastic_model_is_that_of_its_main_mixers() -> None:
    model, row = stochastic(), random_row()
    cache = model.new_cache(1, 12)
    assert cache.kept(0, 0) == 0
    text = torch.from_numpy(row.tokens[:12]).long()
    due = logits_of(model, document(row, 0, 12))[0]
    model.extend(text[None, :9], torch.tensor([9]), cache)
    torch.testing.assert_close(
        model.extend(text[None, 9:], torch.tensor([3]), cache)[0], due[-1], rtol=0, atol=1e-12
    )
    cache.truncate(0, 4)


def test_soft_capped_logits() -> None:
    plain, capped = tiny(init_std=0.8), tiny(init_std=0.8, logit_softcap=2.0)
    due = logits_of(plain, random_row())
    assert due.abs().max() > 5
    torch.testing.assert_close(
        logits_of(capped, random_row()), 2 * (due / 2).tanh(), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("model", [sparse, stochastic], ids=["experts", "stochastic"])
def test_it_is_saved_and_counted(model: Any, tmp_path: Path) -> None:
    made = model().float()
    assert sum(weight.numel() for weight in made.parameters()) == made.settings.num_parameters()
    save_model(made, tmp_path)
    again = load_model(tmp_path)
    assert again.settings == made.settings
    torch.testing.assert_close(
        logits_of(again, random_row()), logits_of(made, random_row()), rtol=0, atol=0
    )
    assert ModelSettings.of(json.loads(json.dumps(asdict(made.settings)))) == made.settings


SPARSE, DENSE = BlockSettings(**MANY), BlockSettings()
NORMED, NORMED_DENSE = BlockSettings(qk_norm=True, **MANY), BlockSettings(qk_norm=True)


@pytest.mark.parametrize(
    ("kinds", "name"),
    [
        ((SPARSE,), "MixtralForCausalLM"),
        ((BlockSettings(sliding_window=4, **MANY),), "MixtralForCausalLM"),
        ((NORMED, NORMED_DENSE), "Qwen3MoeForCausalLM"),
    ],
)
def test_export(kinds: tuple[BlockSettings, ...], name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    blocks = {f"kind{number}": kind for number, kind in enumerate(kinds)}
    model = tiny(layers=2, blocks=blocks, pattern=tuple(blocks), dtype=torch.float32)
    export(model, tmp_path / "out")
    inner = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(inner).__name__ == name
    row = random_row((12,), padding=0)
    with torch.no_grad():
        found = inner(input_ids=torch.from_numpy(row.tokens).long()[None], use_cache=False).logits[
            0
        ]
    torch.testing.assert_close(found, logits_of(model, row)[0], rtol=0, atol=1e-4)
    # It can also be trained as it is.
    again = load_model(tmp_path / "out")
    torch.testing.assert_close(logits_of(again, row), logits_of(model, row), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("blocks", "settings", "cause"),
    [
        ({"a": SPARSE, "b": DENSE}, {}, "experts that differ"),
        ({"a": SPARSE, "b": BlockSettings(experts=4)}, {}, "experts that differ"),
        ({"a": DENSE}, {"logit_softcap": 5.0}, "logit_softcap"),
    ],
)
def test_what_has_no_layout_is_refused(
    blocks: Any, settings: Any, cause: str, tmp_path: Path
) -> None:
    model = tiny(layers=2, blocks=blocks, pattern=tuple(blocks), **settings)
    with pytest.raises(ConfigError, match=cause):
        export(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_of_main_mixers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    either = BlockSettings(mixer="stochastic", choices=("delta", "full"), main="full")
    blocks = {
        "full": BlockSettings(),
        "delta": BlockSettings(mixer="gated_delta"),
        "either": either,
    }
    model = tiny(layers=2, blocks=blocks, pattern=("either",), dtype=torch.float32)
    assert any("main mixer" in notice for notice in export(model, tmp_path / "out"))
    row = random_row((12,), padding=0)
    inner = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        found = inner(input_ids=torch.from_numpy(row.tokens).long()[None], use_cache=False).logits[
            0
        ]
    torch.testing.assert_close(found, logits_of(model, row)[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"expert_width": 4}, "expert_width cannot be set without experts"),
        ({"experts": 1}, "experts_per_token 2 is more than experts 1"),
        ({"experts": 4, "balance": -1.0}, "balance must be 0 or more"),
        ({"choices": ("a", "b")}, "choices cannot be set with mixer attention"),
        ({"mixer": "stochastic", "qk_norm": True}, "qk_norm cannot be set with mixer stochastic"),
        ({"mixer": "stochastic", "choices": ("a",), "main": "a"}, "two or more blocks"),
        ({"mixer": "stochastic", "choices": ("a", "a"), "main": "a"}, "two or more blocks"),
        ({"mixer": "stochastic", "choices": ("a", "b"), "main": "c"}, "one of them"),
        (
            {"mixer": "stochastic", "choices": ("a", "b"), "main": "a", "chances": (1,)},
            "chances must be 2 numbers",
        ),
    ],
)
def test_blocks_that_make_no_sense_are_refused(given: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        BlockSettings(**given)


@pytest.mark.parametrize(
    ("blocks", "cause"),
    [
        ({"a": DENSE, "s": EITHER["either"]}, "'near' must be one of model.blocks"),
        ({**EITHER, "near": SPARSE}, "set experts there, not in its choice 'near'"),
    ],
)
def test_choices_that_make_no_sense_are_refused(blocks: Any, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        ModelSettings(
            blocks=blocks,
            pattern=(next(reversed(blocks)),) if "s" in blocks else ("either", "full"),
        )
