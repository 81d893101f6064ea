"""What a teacher says about a row, against the plain formulas on all its logits at once."""

import math

import pytest
import torch
from teacher_makers import (
    PADDED_VOCABULARY,
    assert_same,
    make_teacher_row,
    tiny_teacher,
    word_tokenizer,
)

from makers.rows import random_tokens
from penstock.core.errors import ConfigError, IsolationError
from penstock.learn.distillation.outputs import Wanted, outputs_of
from penstock.learn.distillation.teachers import ModelTeacher, starts_boundary

VOCABULARY = 60
FULL = Wanted(boundary=True)
BOUNDARY = torch.from_numpy(starts_boundary(word_tokenizer()))


def all_logits(model: torch.nn.Module, row) -> torch.Tensor:
    """[T, VOCABULARY], of the tokenizer's ids."""
    with torch.no_grad():
        return model.logits(model(model.tensors(row)))[0][:, :VOCABULARY]


def test_plain_formulas() -> None:
    model, row = tiny_teacher(torch.float64), random_tokens()
    found = outputs_of(model, row, FULL, vocab_size=VOCABULARY, boundary=BOUNDARY)
    logs, used = torch.log_softmax(all_logits(model, row), -1), row.num_tokens
    assert found.log_probs is not None
    assert found.boundary_log_probs is not None
    assert found.log_probs.dtype == torch.float64
    torch.testing.assert_close(found.log_probs[:used], logs[:used], rtol=0, atol=1e-12)
    torch.testing.assert_close(
        found.entropy[:used], -(logs.exp() * logs).sum(-1)[:used], rtol=0, atol=1e-12
    )
    expected = logs[:, BOUNDARY].logsumexp(-1)
    torch.testing.assert_close(found.boundary_log_probs[:used], expected[:used], rtol=0, atol=1e-12)
    for slot in range(used):
        first = row.positions[slot] == 0
        expected = 0.0 if first else float(logs[slot - 1, row.tokens[slot]])
        assert float(found.token_log_probs[slot]) == pytest.approx(expected, abs=1e-12)
    for tensor in found.tensors().values():
        assert not tensor[used:].any()


def test_logits_beyond_the_tokenizer_count_for_nothing() -> None:
    model, row = tiny_teacher(), random_tokens()
    assert model.vocab_size == PADDED_VOCABULARY > VOCABULARY
    found = outputs_of(model, row, Wanted(), vocab_size=VOCABULARY)
    assert found.log_probs is not None
    assert found.log_probs.shape == (len(row.tokens), VOCABULARY)
    torch.testing.assert_close(
        found.log_probs[: row.num_tokens].exp().sum(-1), torch.ones(row.num_tokens)
    )


def test_temperature_is_of_the_distributions_alone() -> None:
    model, row = tiny_teacher(), random_tokens()
    warm = outputs_of(
        model, row, Wanted(temperature=3.0, boundary=True), vocab_size=VOCABULARY, boundary=BOUNDARY
    )
    plain = outputs_of(model, row, FULL, vocab_size=VOCABULARY, boundary=BOUNDARY)
    expected = torch.log_softmax(all_logits(model, row) / 3.0, -1)
    assert warm.log_probs is not None
    assert warm.boundary_log_probs is not None
    assert plain.boundary_log_probs is not None
    torch.testing.assert_close(warm.log_probs[: row.num_tokens], expected[: row.num_tokens])
    for one, other in (
        (warm.token_log_probs, plain.token_log_probs),
        (warm.entropy, plain.entropy),
        (warm.boundary_log_probs, plain.boundary_log_probs),
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("top_k", [1, 5, VOCABULARY, 1000])
def test_top_k_is_of_the_full_softmax(top_k: int) -> None:
    model, row = tiny_teacher(), random_tokens()
    wanted = Wanted(temperature=2.0, top_k=top_k)
    found = outputs_of(model, row, wanted, vocab_size=VOCABULARY)
    full = outputs_of(model, row, Wanted(temperature=2.0), vocab_size=VOCABULARY)
    assert found.log_probs is None
    assert found.top_ids is not None
    assert found.top_log_probs is not None
    assert full.log_probs is not None
    kept = min(top_k, VOCABULARY)
    assert found.top_ids.shape == (len(row.tokens), kept)
    expected = full.log_probs[: row.num_tokens].topk(kept)
    assert torch.equal(found.top_log_probs[: row.num_tokens], expected.values)
    assert torch.equal(full.log_probs.gather(1, found.top_ids)[: row.num_tokens], expected.values)


def test_blocks_change_nothing() -> None:
    model, row = tiny_teacher(torch.float64), random_tokens((40, 30), padding=5)
    whole = outputs_of(model, row, FULL, vocab_size=VOCABULARY, boundary=BOUNDARY)
    for block in (1, 7, 69, 70):
        cut = outputs_of(model, row, FULL, vocab_size=VOCABULARY, boundary=BOUNDARY, block=block)
        for name, tensor in cut.tensors().items():
            torch.testing.assert_close(tensor, getattr(whole, name), rtol=0, atol=1e-12)


def test_top_k_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, row = tiny_teacher(), random_tokens((400, 300), padding=0)
    seen = []
    head = type(model).narrow_logits
    monkeypatch.setattr(
        type(model),
        "narrow_logits",
        lambda self, hidden: seen.append(len(hidden)) or head(self, hidden),
    )
    outputs_of(model, row, Wanted(top_k=2), vocab_size=VOCABULARY, block=64)
    assert max(seen) <= 64
    assert sum(seen) == 700 + 1


def test_mode_and_gradients_stay_as_they_were() -> None:
    model, row = tiny_teacher(), random_tokens()
    model.train()
    modes = []
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    found = outputs_of(model, row, Wanted(), vocab_size=VOCABULARY)
    assert model.training
    assert modes == [False]
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(
        tensor.requires_grad or tensor.is_inference() for tensor in found.tensors().values()
    )


def test_targets_and_weights_of_the_row_do_not_matter() -> None:
    """A student's own row has targets only where it is trained; the teacher saw all of it."""
    model, row = tiny_teacher(), random_tokens()
    found = outputs_of(model, row, Wanted(top_k=3), vocab_size=VOCABULARY)
    assert (row.targets == -100).all()
    assert (found.token_log_probs[1:7] < 0).all()


def test_model_teacher_is_the_function() -> None:
    model, tokenizer, row = tiny_teacher(), word_tokenizer(), make_teacher_row()
    teacher = ModelTeacher(model, tokenizer, FULL)
    teacher.ask([row])
    assert_same(
        teacher.outputs(row),
        outputs_of(model, row.input, FULL, vocab_size=VOCABULARY, boundary=BOUNDARY),
    )
    teacher.close()


def test_refusals() -> None:
    row = random_tokens()
    with pytest.raises(ConfigError, match="embeddings for 32 ids, its tokenizer"):
        ModelTeacher(tiny_teacher(vocab_size=32), word_tokenizer(), Wanted())
    with pytest.raises(ConfigError, match="logits for 64 ids, its tokenizer has 65"):
        outputs_of(tiny_teacher(), row, Wanted(), vocab_size=65)
    with pytest.raises(ConfigError, match="a bool for each of the 60 ids, got none"):
        outputs_of(tiny_teacher(), row, FULL, vocab_size=VOCABULARY)
    for temperature in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="temperature must be above 0"):
            Wanted(temperature=temperature)
    with pytest.raises(ConfigError, match="top_k must be at least 1, got 0"):
        Wanted(top_k=0)


def test_a_model_of_transformers_that_sees_other_documents_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its positions are places in the row (ALiBi), whatever the documents are, as transformers runs
    it.
    """
    monkeypatch.setattr("penstock.models.theirs.packed_ways.TRIED", ("own",))
    from transformers import BloomConfig, BloomForCausalLM

    from penstock.models.theirs.model import HuggingFaceModel

    settings = BloomConfig(
        vocab_size=PADDED_VOCABULARY, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2
    )
    model = HuggingFaceModel(BloomForCausalLM(settings).eval())
    with pytest.raises(IsolationError, match="documents of one row see each other"):
        ModelTeacher(model, word_tokenizer(), Wanted())
    teacher = ModelTeacher(model, word_tokenizer(), Wanted(), packed=None)
    with pytest.raises(IsolationError, match="documents of one row see each other"):
        teacher.run(random_tokens())
    row = random_tokens((9,), padding=7)
    with torch.no_grad():
        logits = model.inner(
            input_ids=torch.from_numpy(row.tokens[:9].astype("int64"))[None], use_cache=False
        ).logits
    expected = logits[0, :, :VOCABULARY].log_softmax(-1)
    torch.testing.assert_close(teacher.run(row).log_probs[:9], expected, rtol=0, atol=1e-4)


def test_masked_logits_give_finite_outputs() -> None:
    """A head may rule ids out with −inf."""
    model, row = tiny_teacher(), random_tokens(below=30)
    head = model.logits
    model.logits = lambda hidden: head(hidden).index_fill(-1, torch.arange(30, 60), -math.inf)
    never = torch.arange(60) >= 30
    found = outputs_of(
        model, row, Wanted(top_k=4, boundary=True), vocab_size=VOCABULARY, boundary=never
    )
    for tensor in found.tensors().values():
        assert torch.isfinite(tensor).all()
