"""Groups, clipping, and a state that goes on exactly."""

import pytest
import torch
from torch import nn

from penstock.core.errors import ConfigError, StateError
from penstock.learn.training.gradient_sums import GradientSums
from penstock.learn.training.optimizer_settings import OptimizerSettings
from penstock.learn.training.optimizers import Optimizers


class Tiny(nn.Module):
    """An embedding, a matrix with a bias, a norm, and an untied output matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 4)
        self.matrix = nn.Linear(4, 4)
        self.norm = nn.RMSNorm(4)
        self.head = nn.Linear(4, 11, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.matrix(self.embedding(tokens))))


def train(model: nn.Module, optimizers: Optimizers, steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.arange(step, step + 5) % 11
        loss = nn.functional.cross_entropy(model(tokens), (tokens * 3 + 1) % 11)
        loss.backward()
        optimizers.step(0.01)
        losses.append(loss.item())
    return losses


def decayed(optimizers: Optimizers, model: nn.Module) -> set[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [group for member in optimizers.members for group in member.param_groups]
    return {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_only_matrices_decay(kind):
    model = Tiny()
    assert decayed(Optimizers(model, OptimizerSettings(kind=kind)), model) == {"matrix.weight"}
    asked = OptimizerSettings(kind=kind, decay_embeddings=True)
    assert decayed(Optimizers(model, asked), model) == {
        "matrix.weight",
        "embedding.weight",
        "head.weight",
    }


def test_muon_takes_the_inner_matrices_and_no_others():
    model = Tiny()
    muon, adamw = Optimizers(model, OptimizerSettings(kind="muon")).members
    assert [id(p) for p in muon.param_groups[0]["params"]] == [id(model.matrix.weight)]
    assert sum(len(group["params"]) for group in adamw.param_groups) == 4


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_it_learns(kind):
    model = Tiny()
    losses = train(model, Optimizers(model, OptimizerSettings(kind=kind)), range(200))
    assert losses[-1] < losses[0] / 4


def test_one_step_of_adamw_is_torchs_own():
    model, twin = Tiny(), Tiny()
    optimizers = Optimizers(model, OptimizerSettings(weight_decay=0.0, clip_norm=None, fused=False))
    plain = torch.optim.AdamW(twin.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        for each in (model, twin):
            each(torch.arange(5)).square().sum().backward()
        optimizers.step(0.01)
        plain.step()
        plain.zero_grad()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0)


def test_clipping_is_by_the_norm_over_all_parameters():
    model = Tiny()
    optimizers = Optimizers(model, OptimizerSettings(clip_norm=0.5))
    model(torch.arange(5)).square().sum().backward()
    due = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    torch.testing.assert_close(optimizers.clip(), due)
    torch.testing.assert_close(
        torch.cat([p.grad.flatten() for p in model.parameters()]).norm(),
        torch.tensor(0.5),
        rtol=1e-4,
        atol=0,
    )


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_loaded_state_goes_on_bit_for_bit(kind, fused):
    settings = OptimizerSettings(kind=kind, fused=fused)
    model = Tiny()
    optimizers = Optimizers(model, settings)
    train(model, optimizers, range(5))
    weights = {name: p.clone() for name, p in model.state_dict().items()}
    state = {name: p.clone() for name, p in optimizers.state_tensors().items()}
    due = train(model, optimizers, range(5, 12))
    again = Tiny()
    again.load_state_dict(weights)
    resumed = Optimizers(again, settings)
    resumed.load_state_tensors(state)
    assert train(again, resumed, range(5, 12)) == due
    forgotten = Optimizers(again, settings)
    again.load_state_dict(weights)
    assert train(again, forgotten, range(5, 12)) != due


def test_a_filled_state_has_all_entries_and_moves_no_weight():
    model = Tiny()
    before = [p.clone() for p in model.parameters()]
    optimizers = Optimizers(model, OptimizerSettings(kind="muon"))
    optimizers.fill_state()
    assert "matrix.weight/momentum_buffer" in optimizers.state_tensors()
    assert "head.weight/exp_avg_sq" in optimizers.state_tensors()
    for now, then in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0)


def test_a_state_of_other_parameters_is_refused():
    model = Tiny()
    optimizers = Optimizers(model, OptimizerSettings())
    optimizers.fill_state()
    state = {
        name: value
        for name, value in optimizers.state_tensors().items()
        if not name.startswith("norm")
    }
    with pytest.raises(StateError, match=r"norm\.weight is in the model only"):
        optimizers.load_state_tensors(state)


def test_half_precision_weights_are_refused():
    with pytest.raises(ConfigError, match=r"embedding\.weight.*bfloat16.*float32"):
        Optimizers(Tiny().bfloat16(), OptimizerSettings())


def test_a_frozen_model_is_refused():
    with pytest.raises(ConfigError, match=r"parameter.*requires"):
        Optimizers(Tiny().requires_grad_(False), OptimizerSettings())


@pytest.mark.parametrize(
    "wrong", [{"kind": "sgd"}, {"learning_rate": 0.0}, {"betas": (0.9, 1.0)}, {"clip_norm": 0.0}]
)
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ConfigError, match=f"optimizer.{next(iter(wrong))}"):
        OptimizerSettings(**wrong)


def test_a_parameter_that_no_row_reaches_is_resumed_too():
    """One process treats it as several do: as having a gradient of zeros."""
    model = Tiny()
    model.spare = torch.nn.Linear(3, 3)
    optimizers = Optimizers(model, OptimizerSettings())
    for name, p in model.named_parameters():
        p.grad = None if name.startswith("spare") else torch.ones_like(p)
    GradientSums(model.parameters(), several=False).finish()
    optimizers.step(0.1)
    state = optimizers.state_tensors()
    assert "spare.weight/exp_avg" in state
    Optimizers(model, OptimizerSettings()).load_state_tensors(state)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_some_weights_learn_at_another_rate(kind):
    settings = {"kind": kind, "weight_decay": 0.1, "clip_norm": None, "fused": False}
    factors = {"matrix.*": 0.25, "*bias": 9.0, "head.*": 4.0}
    plain, other = Tiny(), Tiny()
    before = {name: p.clone() for name, p in plain.named_parameters()}
    train(plain, Optimizers(plain, OptimizerSettings(**settings)), range(1))
    optimizers = Optimizers(other, OptimizerSettings(**settings, learning_rate_factors=factors))
    train(other, optimizers, range(1))
    # The first pattern that fits counts, so the bias of the matrix has its factor.
    due = {"matrix.weight": 0.25, "matrix.bias": 0.25, "head.weight": 4.0}
    for (name, mine), its in zip(other.named_parameters(), plain.parameters(), strict=True):
        factor = due.get(name, 1.0)
        torch.testing.assert_close(
            mine - before[name], (its - before[name]) * factor, rtol=1e-3, atol=1e-7
        )
    state = {name: p.clone() for name, p in optimizers.state_tensors().items()}
    resumed = Optimizers(other, OptimizerSettings(**settings, learning_rate_factors=factors))
    resumed.load_state_tensors(state)
    assert {id(p): v["step"] for m in resumed.members for p, v in m.state.items() if "step" in v}
    with pytest.raises(ConfigError, match=r"'\*visual\*'.*are.*matrix\.weight"):
        Optimizers(other, OptimizerSettings(learning_rate_factors={"*visual*": 0.1}))
    with pytest.raises(ConfigError, match=r"'a' has 0, which must be above 0.*frozen"):
        OptimizerSettings(learning_rate_factors={"a": 0})
