"""Operations of a step, counted by rule, against those that torch counts while a model runs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from makers.models import tiny_huggingface
from makers.rows import random_row
from penstock.learn.training import utilisation
from penstock.learn.training.losses import row_loss
from penstock.learn.training.progress_line import note
from penstock.learn.training.utilisation import Operations, Utilisation, pairs, peak_of
from penstock.models.building import build_model
from penstock.models.settings import BlockSettings, ModelSettings
from penstock.models.theirs.model import HuggingFaceModel

LENGTHS = (20, 3, 9, 16)
PLAIN = ModelSettings(layers=3, width=32, heads=4, kv_heads=2, vocab_size=61)
MODELS = {
    "ours": lambda: build_model(PLAIN, vocab_size=61),
    "experts": lambda: build_model(
        ModelSettings(
            layers=2,
            width=32,
            heads=4,
            vocab_size=61,
            blocks={"sparse": BlockSettings(experts=4, experts_per_token=2, balance=0.1)},
            pattern=("sparse",),
        ),
        vocab_size=61,
    ),
    "llama": lambda: HuggingFaceModel(tiny_huggingface("llama").train()),
}


class Products(TorchDispatchMode):
    """Operations of the matrix products that run."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "mm":
            left, right = args
            self.operations += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
def test_products_of_tokens_are_those_that_run(name):
    """Attention is an operation that torch does not count, and padding is left out."""
    model = MODELS[name]()
    row = random_row(LENGTHS, padding=0)
    # Each slot has a target, so that all pass the head.
    row.targets[:] = row.tokens
    row.loss_weights[:] = 1
    model.begin_step(seed=0, number=0, tokens=row.num_tokens)
    tensors = model.tensors(row)
    with Products() as found:
        row_loss(model, tensors, 10.0).loss.backward()
    operations = Operations(model)
    # One more token passes the head before each loss, to learn its width; routers run in float32.
    assert operations.each_token * row.num_tokens == pytest.approx(found.operations, rel=0.03)


def test_frozen_weights_have_no_gradient_of_their_own():
    model = build_model(PLAIN, vocab_size=61)
    whole = Operations(model).each_token
    for weight in model.parameters():
        weight.requires_grad_(False)
    assert Operations(model).each_token == pytest.approx(whole * 4 / 6)


@given(
    st.lists(st.integers(0, 30), max_size=8),
    st.one_of(st.none(), st.integers(1, 40)),
)
def test_pairs_are_those_of_the_rule(lengths, window):
    expected = sum(
        query - key < (window or 99)
        for length in lengths
        for query in range(length)
        for key in range(query + 1)
    )
    assert pairs(np.array(lengths, np.int64), window) == expected


def test_padding_counts_for_nothing():
    operations = Operations(build_model(PLAIN, vocab_size=61))
    assert operations.of([random_row(LENGTHS, padding=0)]) == operations.of(
        [random_row(LENGTHS, padding=40)]
    )
    pair = 12 * 32 * 3 * sum(n * (n + 1) / 2 for n in LENGTHS)
    assert operations.of([random_row(LENGTHS)]) == operations.each_token * sum(LENGTHS) + pair


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("AMD Instinct MI300X", 1307e12),
        ("A device of 2031", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA GB200", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("GRID A100-10C", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_a_device_is_known_by_its_name(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_of(torch.device("cuda")) == peak


def test_on_a_cpu_the_peak_is_measured(monkeypatch):
    model, rows = build_model(PLAIN, vocab_size=61), [random_row(LENGTHS)]
    found = Utilisation(model, torch.device("cpu")).figures(rows, 0.5)
    peak = utilisation.measured_peak(torch.device("cpu"), torch.get_num_threads())
    assert found["mfu"] == round(Operations(model).of(rows) / 0.5 / peak, 4)
    assert peak > 1e8
    monkeypatch.setattr(utilisation, "measured_peak", lambda *device: 2 * peak)
    busy = Utilisation(model, torch.device("cpu"))
    done = Operations(model).of(rows)
    shares = [busy.figures(rows, done / peak / speed)["mfu"] for speed in (1, 4, 2)]
    assert shares == [0.5, 1, 0.5], "a step that is faster than the peak is the new peak"
    monkeypatch.setattr(utilisation, "peak_memory_bytes", lambda: 4_100_000_000)
    found = Utilisation(model, torch.device("cpu")).figures(rows, 0.5)
    assert found["peak_memory"] == 4_100_000_000
    record = {"seconds": 1.0, "wait_seconds": 0.0, "loss": 2.0, **found, "mfu": 0.43}
    assert note(record) == "loss 2.0000 · MFU 43% · 4.1 GB"


def test_a_step_says_how_well_its_gpu_is_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    monkeypatch.setattr(utilisation, "peak_of", lambda device: 1e9)
    model, rows = build_model(PLAIN, vocab_size=61), [random_row(LENGTHS)]
    found = Utilisation(model, torch.device("cuda"), share=2).figures(rows, 0.5)
    share = Operations(model).of(rows) / 2 / 0.5 / 1e9
    assert found == {"peak_memory": 7, "mfu": round(share, 4)}
    record = {"seconds": 1.0, "wait_seconds": 0.0, "loss": 2.0, "mfu": 0.431}
    assert note(record) == "loss 2.0000 · MFU 43%"
