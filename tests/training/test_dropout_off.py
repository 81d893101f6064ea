"""Where log-probabilities are compared, nothing in the model is random: equal weights are equal, in
every kind.
"""

import copy
import math
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from training_makers import figures_of, make, train

import penstock as ps
from makers.models import tiny_huggingface, tiny_model
from makers.trees import tree_dataset
from penstock.data.shards import extend_dataset
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.path_settings import (
    LABEL_KINDS,
    OLD_COLUMN,
    PAIR_KINDS,
    REFERENCE_COLUMN,
    WITHOUT_REFERENCE,
    PolicySettings,
    PreferenceSettings,
)
from penstock.learn.training.path_training import PathTraining
from penstock.learn.training.settings import TrainSettings
from penstock.models.building import as_language_model
from penstock.models.settings import BlockSettings
from penstock.models.without_dropout import random_parts, without_dropout
from penstock.use.runs.reference import score_documents

transformers = pytest.importorskip("transformers")
VOCAB, BETA = 90, 0.3
RATES = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
AT_EQUAL = {
    "hinge": 1.0,
    "ipo": (0.5 / BETA) ** 2,
    "ipo_sum": (0.5 / BETA) ** 2,
    "kto": 0.5,
    "apo_zero_unpaired": 0.5,
}
"""What a kind gives if policy and reference are the same; the others give ln 2."""


class Noisy(nn.Module):
    """A module of one's own: dropout as a function, with a rate that nothing but its code knows,
    and in a GRU.
    """

    vocab_size = VOCAB

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.gru = nn.GRU(16, 16, num_layers=2, dropout=0.4)

    def forward(self, row):
        borders = row.rule.cu_seqlens.tolist()
        parts = [row.tokens[begin:end] for begin, end in pairwise(borders)]
        hidden = torch.cat([self.gru(self.embedding(tokens))[0] for tokens in parts])
        return nn.functional.dropout(hidden, 0.3, self.training)

    def logits(self, hidden):
        return self.head(hidden)


def checkpointed():
    model = tiny_huggingface(
        "opt",
        dropout=0.3,
        layerdrop=0.5,
        word_embed_proj_dim=32,
        vocab_size=VOCAB,
        max_position_embeddings=256,
    )
    # The name before transformers 5.24.
    (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )()
    return model


BLOCKS = {
    "blocks": {
        "full": BlockSettings(),
        "near": BlockSettings(sliding_window=4),
        "either": BlockSettings(
            mixer="stochastic", choices=("full", "near"), main="full", experts=3, balance=0.3
        ),
    },
    "pattern": ("either", "full"),
}
MODELS = {
    "ours": lambda: tiny_model(VOCAB),
    "drawn": lambda: tiny_model(VOCAB, **BLOCKS),
    "gpt2": lambda: tiny_huggingface(
        "gpt2", **RATES, vocab_size=VOCAB, max_position_embeddings=256
    ),
    "llama": lambda: tiny_huggingface("llama", attention_dropout=0.5, vocab_size=VOCAB),
    "jitter": lambda: tiny_huggingface(
        "mixtral", router_jitter_noise=0.4, vocab_size=VOCAB, num_local_experts=3
    ),
    "checkpointed": checkpointed,
    "own": Noisy,
}


@cache
def made(name):
    torch.manual_seed(0)
    return as_language_model(MODELS[name]())


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Of each model: answers with its log-probabilities in evaluation mode, as its reference and as
    its sampler.
    """
    folder = tmp_path_factory.mktemp("answers")
    plain, _ = tree_dataset(folder / "plain", share=False, chains=0.0, documents=10, prompt=8)

    @cache
    def of(name):
        scores = [list(score_documents(made(name).eval(), plain)) for _ in range(2)]
        columns = dict(zip((REFERENCE_COLUMN, OLD_COLUMN), scores, strict=True))
        return extend_dataset(plain, folder / name, columns)

    return of


def first_step(name, dataset, seed, **chosen):
    """Figures and gradients of the first step of a model in training mode."""
    model = made(name).train()
    model.zero_grad()
    loader = ps.Loader(
        ps.Source(dataset, shuffle="none", name="x", max_epochs=1),
        sequence_length=256,
        rows_per_step=4,
        requirements=model.requirements(),
        packing="none",
        threads=0,
    )
    training = PathTraining(model, loader, TrainSettings(**chosen), torch.device("cpu"))
    loss, figures = 0.0, {}
    step = next(iter(loader))
    torch.manual_seed(seed)
    model.begin_step(seed=seed, number=step.index, tokens=step.num_tokens)
    training.begin(list(step), step, Ranks(torch.device("cpu")))
    loss = sum(float(training.backward(row)) for row in step)
    figures = figures_of(training, step)
    return (
        loss,
        figures,
        torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]),
    )


anything = settings(
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
KINDS = [kind for kind in (*PAIR_KINDS, *LABEL_KINDS) if kind not in WITHOUT_REFERENCE]


@anything
@given(
    name=st.sampled_from(list(MODELS)), kind=st.sampled_from(KINDS), seed=st.integers(0, 2**30),
    reference=st.sampled_from(["initial", "cached"]),
)  # fmt: skip
def test_a_policy_that_is_its_reference_is_not_preferred_to_it(
    datasets, name, kind, seed, reference
):
    smoothing = 0.2 if kind in ("cdpo", "robust") else 0.0
    preference = PreferenceSettings(
        kind=kind, beta=BETA, label_smoothing=smoothing, reference=reference
    )
    loss, figures, _ = first_step(name, datasets(name), seed, preference=preference)
    assert loss == pytest.approx(AT_EQUAL.get(kind, math.log(2)), rel=1e-5)
    assert figures.get("preference.margin", 0) == pytest.approx(0, abs=1e-5)


@anything
@given(
    name=st.sampled_from(list(MODELS)),
    kind=st.sampled_from(["clip", "cispo"]),
    seed=st.integers(0, 2**30),
    importance=st.sampled_from(["token", "sequence"]),
    cap=st.sampled_from([None, 2.0]),
    reference=st.sampled_from(["initial", "cached"]),
)
def test_a_policy_that_sampled_has_ratios_of_1(
    datasets, name, kind, seed, importance, cap, reference
):
    chosen = PolicySettings(
        kind=kind, importance=importance, kl=0.1, importance_cap=cap, reference=reference
    )
    _, figures, _ = first_step(name, datasets(name), seed, policy=chosen)
    gap = figures["policy.log_ratio"] if cap is None else figures["policy.sampler_gap"]
    assert gap == pytest.approx(0, abs=1e-5)
    assert figures["policy.clipped"] == 0
    assert figures["policy.kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["simpo", "dpo"])
def test_the_gradient_does_not_depend_on_the_seed(datasets, name, kind):
    found = [
        first_step(name, datasets(name), seed, preference=PreferenceSettings(kind=kind))
        for seed in (1, 2)
    ]
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][2], found[1][2], rtol=0, atol=0)
    assert found[0][2].norm() > 1e-3


def test_what_training_mode_does_besides_stays(datasets):
    drawn, calls = made("drawn"), []
    first_step("drawn", datasets("drawn"), 0, preference=PreferenceSettings())
    assert (
        drawn.end_step({k: float(v) for k, v in drawn.pending_sums().items()})["experts.evenness"]
        > 0
    ), "the balance loss of experts is gone"
    opt = made("checkpointed").train()
    layers = [one for one in opt.modules() if getattr(one, "gradient_checkpointing", False)]
    theirs = [one._gradient_checkpointing_func for one in layers]
    for layer, function in zip(layers, theirs, strict=True):
        layer._gradient_checkpointing_func = lambda *a, function=function, **k: (
            calls.append(1) or function(*a, **k)
        )
    first_step("checkpointed", datasets("checkpointed"), 0, preference=PreferenceSettings())
    made.cache_clear()
    assert calls, "activations are not kept"


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_as_before_afterwards(name):
    model = made(name).train()
    next(model.children()).eval()

    def state():
        rates = [
            {k: v for k, v in vars(m).items() if isinstance(v, float | bool)}
            for m in model.modules()
        ]
        return copy.deepcopy(rates)

    before = state()
    with pytest.raises(RuntimeError, match="in between"), without_dropout(model):
        raise RuntimeError("in between")
    assert state() == before
    model.train()


def test_it_is_said_with_the_rates():
    assert random_parts(made("ours")) == []
    assert random_parts(made("drawn")) == ["drawn mixers"]
    assert random_parts(made("gpt2")) == [
        "attn_dropout 0.3",
        "drop 0.3",
        "dropout 0.3",
        "resid_dropout 0.3",
    ]
    assert random_parts(made("llama")) == ["attention_dropout 0.5"]
    assert "layerdrop 0.5" in random_parts(made("checkpointed"))
    assert random_parts(made("jitter")) == [
        "jitter_noise 0.4",
        "router_jitter_noise 0.4",
    ] or random_parts(made("jitter")) == ["jitter_noise 0.4"]


@pytest.fixture(scope="module")
def student(data, tmp_path_factory):
    """A folder of GPT-2 with dropout, of the tests' tokenizer."""
    folder = tmp_path_factory.mktemp("student") / "gpt2"
    tiny_huggingface("gpt2", **RATES, vocab_size=400).save_pretrained(folder)
    ps.open_dataset(data / "data" / "train").loaded_tokenizer.save(folder)
    return folder


def test_a_student_with_dropout_that_is_its_teacher_has_nothing_to_learn(data, tmp_path, student):
    said = []
    begin = (
        f"model=from:{student}",
        "training.steps=2",
        "training.schedule.warmup_steps=1",
        "training.threads=1",
    )
    teacher = (
        f'teacher={{"teachers": [{{"model": "{student}", "loss": {{"kind": "kl"}}}}], '
        '"cross_entropy": 0}'
    )
    found = train(data, tmp_path / "run", *begin, teacher, say=said.append)
    assert found[0]["distillation"] == pytest.approx(0, abs=1e-6)
    assert any(
        "teacher compares log-probabilities" in one and "attn_dropout 0.3" in one for one in said
    )
    # Where nothing is compared, it stays.
    trainer = make(data, tmp_path / "plain", *begin, say=said.append)
    next(iter(trainer.train()))
    assert sum("compares" in one for one in said) == 1
    row = next(iter(ps.Loader(data / "data" / "train", sequence_length=64, rows_per_step=1)))[0]
    tensors = trainer.model.tensors(row)
    assert not np.allclose(*(trainer.model(tensors).detach().numpy() for _ in range(2)))
