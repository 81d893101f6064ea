"""Rows as tensors and as model arguments, and the loss of a step in parts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import LENGTH, make_loader, make_model

import penstock as ps
from makers.processes import run_code
from penstock import InputRequirements, ModelInput
from penstock.core.errors import ConfigError


def some_rows(folder: Path, **settings: object) -> list[ModelInput]:
    return list(next(iter(make_loader(folder, **settings))))


def test_tensors_share_memory_where_dtypes_agree(counting: Path) -> None:
    row = some_rows(counting, requirements=InputRequirements(
        loss_weights=True, positions=True, cu_seqlens=True, document_ids=True, dtype="int64"
    ))[0]  # fmt: skip
    tensors = ps.to_torch(row)
    for name in ("tokens", "targets", "loss_weights", "positions", "document_ids", "cu_seqlens"):
        assert tensors[name].data_ptr() == getattr(row, name).ctypes.data, name
    assert tensors["max_seqlen"] == row.max_seqlen
    assert tensors["num_tokens"] == row.num_tokens


def test_int32_becomes_int64_where_torch_wants_it(counting: Path) -> None:
    row = some_rows(counting)[0]
    tensors = ps.to_torch(row)
    assert row.tokens.dtype == np.int32
    assert (
        tensors["tokens"].dtype
        == tensors["targets"].dtype
        == tensors["positions"].dtype
        == torch.int64
    )
    assert tensors["cu_seqlens"].dtype == torch.int32
    np.testing.assert_array_equal(tensors["tokens"].numpy(), row.tokens)


def test_arguments_of_a_row_keep_documents_apart(counting: Path) -> None:
    row = next(row for row in some_rows(counting) if row.num_documents > 2)
    found = ps.huggingface.model_inputs(row)
    assert found["input_ids"].shape == found["position_ids"].shape == (1, LENGTH)
    assert "attention_mask" not in found
    assert "labels" not in found
    assert found["use_cache"] is False
    assert (
        found["cu_seq_lens_q"].tolist()
        == found["cu_seq_lens_k"].tolist()
        == row.cu_seqlens.tolist()
    )
    assert found["max_length_q"] == found["max_length_k"] == row.max_seqlen
    assert type(found["max_length_q"]) is int


def test_several_rows_are_described_end_to_end(counting: Path) -> None:
    rows = [row for row in some_rows(counting, rows=16) if row.num_documents > 1][:3]
    found = ps.huggingface.model_inputs(rows)
    assert found["input_ids"].shape == (3, LENGTH)
    lengths = np.concatenate([np.diff(row.cu_seqlens) for row in rows])
    assert found["cu_seq_lens_q"].diff().tolist() == lengths.tolist()
    assert found["max_length_q"] == lengths.max()


def test_several_rows_give_the_logits_of_each(counting: Path) -> None:
    rows, model = some_rows(counting), make_model().eval()
    with torch.no_grad():
        together = model(**ps.huggingface.model_inputs(rows)).logits
        for logits, row in zip(together, rows, strict=True):
            torch.testing.assert_close(
                logits[None], model(**ps.huggingface.model_inputs(row)).logits
            )


def test_padding_of_a_row_with_one_document_is_counted_to_it(counting: Path) -> None:
    """So a model that cannot tell documents apart gets a plain row; the logits of the document are
    the same.
    """
    row = min(some_rows(counting, packing="none"), key=lambda row: row.num_tokens)
    assert row.num_tokens < LENGTH
    found, model = ps.huggingface.model_inputs(row), make_model().eval()
    assert found["position_ids"].tolist() == [list(range(LENGTH))]
    assert found["cu_seq_lens_q"].tolist() == [0, LENGTH, LENGTH]
    assert found["max_length_q"] == LENGTH
    with torch.no_grad():
        plain = model(**found).logits
        apart = model(
            **{**found, "position_ids": torch.from_numpy(row.positions)[None].long()}
        ).logits
    torch.testing.assert_close(plain[:, : row.num_tokens], apart[:, : row.num_tokens])


def test_labels_are_unshifted_and_stop_at_documents(counting: Path) -> None:
    row = some_rows(counting)[0]
    labels = ps.huggingface.model_inputs(row, labels=True)["labels"][0].numpy()
    expected = np.full(LENGTH, -100)
    for begin, end in zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True):
        if begin < row.num_tokens:
            expected[begin + 1 : end] = row.tokens[begin + 1 : end]
    np.testing.assert_array_equal(labels, expected)


def test_labels_give_transformers_own_mean_loss(counting: Path) -> None:
    """But for the target of a row's last slot, where a document was cut: labels have no place for
    it.
    """
    rows, model = some_rows(counting), make_model()
    theirs = model(**ps.huggingface.model_inputs(rows, labels=True)).loss
    assert any(row.targets[0, -1] != -100 for row in rows)
    for row in rows:
        row.targets[0, -1], row.loss_weights[0, -1] = -100, 0
    denominator = float(sum((row.targets != -100).sum() for row in rows))
    torch.testing.assert_close(theirs, ps.huggingface.loss(model, rows, denominator))


def test_labels_cannot_say_fractions(weighted: Path) -> None:
    rows = [row for row in some_rows(weighted, rows=8) if (row.loss_weights == 0.5).any()]
    with pytest.raises(ConfigError, match=r"labels=True.*rows.*weights.*0.*1"):
        ps.huggingface.model_inputs(rows, labels=True)


def test_rows_without_positions_are_refused(counting: Path) -> None:
    row = some_rows(counting, requirements=InputRequirements())[0]
    with pytest.raises(ConfigError, match=r"cu_seqlens.*requirements=penstock"):
        ps.huggingface.model_inputs(row)


def test_stated_requirements_are_enough(weighted: Path) -> None:
    lean = some_rows(weighted, requirements=ps.huggingface.REQUIREMENTS)[0]
    full, model = some_rows(weighted)[0], make_model()
    assert lean.document_ids is None
    assert ps.huggingface.loss(model, lean, 7.0) == ps.huggingface.loss(model, full, 7.0)


# -- the loss
# --------------------------------------------------------------------------------------------------


def test_weighted_loss_is_the_sum_over_targets() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator)
    targets = torch.tensor([[1, 2, -100, 3, 4], [6, -100, -100, 0, 5]])
    weights = torch.tensor([[1.0, 0.5, 0.0, 2.0, 0.0], [1.0, 0.0, 0.0, 0.25, 1.0]])
    expected = 0.0
    for b in range(2):
        for t in range(5):
            if targets[b, t] >= 0:
                expected -= float(weights[b, t] * logits[b, t].log_softmax(-1)[targets[b, t]])
    found = ps.huggingface.weighted_loss(logits, targets, weights, 3.0)
    assert float(found) == pytest.approx(expected / 3, rel=1e-6)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 10])
def test_chunks_change_neither_loss_nor_gradient(chunk_tokens: int) -> None:
    def both(chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.randn(10, 7, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
        loss = ps.huggingface.weighted_loss(
            logits, torch.arange(10) % 7, None, 2.5, chunk_tokens=chunk
        )
        return loss, torch.autograd.grad(loss, logits)[0]

    for found, expected in zip(both(chunk_tokens), both(4096), strict=True):
        torch.testing.assert_close(found, expected)


def test_loss_is_computed_in_float32() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(6)
    expected = ps.huggingface.weighted_loss(logits.float(), targets, None, 6.0)
    found = ps.huggingface.weighted_loss(logits, targets, None, 6.0)
    assert found.dtype == torch.float32
    assert found == expected


def test_nothing_to_train_is_a_loss_of_zero_with_gradients(counting: Path) -> None:
    row = some_rows(counting)[0]
    nothing = replace(
        row, targets=np.full_like(row.targets, -100), loss_weights=np.zeros_like(row.loss_weights)
    )
    model = make_model()
    loss = ps.huggingface.loss(model, nothing, 0.0)
    loss.backward()
    assert loss.item() == 0.0
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_microbatches_add_up_to_the_step(weighted: Path) -> None:
    step, model = next(iter(make_loader(weighted))), make_model()
    whole = ps.huggingface.loss(model, step, step.loss_denominator)
    parts = sum(ps.huggingface.loss(model, row, step.loss_denominator) for row in step)
    torch.testing.assert_close(whole, parts)


# -- importing
# --------------------------------------------------------------------------------------------------


def test_penstock_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, penstock; penstock.Loader; print('torch' in sys.modules, "
        "'transformers' in sys.modules)"
    )
    done = run_code(code, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_missing_packages_name_the_extra(missing: str) -> None:
    code = f"import sys; sys.modules['{missing}'] = None\nimport penstock\npenstock.huggingface"
    done = run_code(code)
    assert "MissingExtraError" in done.stderr
    assert "pip install 'penstock[huggingface]'" in done.stderr
