"""Packed scores against one forward pass a request, and what a subject cuts and refuses."""

import math

import numpy as np
import pytest
import torch
from evaluation_makers import make_subject

from makers.models import tiny_huggingface
from penstock.core.errors import ConfigError
from penstock.learn.evaluation import subject as subject_module
from penstock.learn.evaluation.bits_per_byte import BitsPerByte
from penstock.learn.evaluation.results import run_task
from penstock.learn.evaluation.subject import ONE_A_ROW, Subject, packed
from penstock.learn.evaluation.tasks import TaskSettings
from penstock.learn.generation import Sampling
from penstock.models.saving import load_model


def one_by_one(subject: Subject, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The obvious twin: a row for each request, all logits, a token at a time."""
    ids = [*context, *continuation]
    with torch.no_grad():
        hidden = subject.model(subject.model.tensors(packed([ids])))[0]
        logs = (
            subject.model.logits(hidden)[:, : subject.tokenizer.vocab_size].double().log_softmax(-1)
        )
    total, greedy = 0.0, True
    for place in range(len(context), len(ids)):
        total += float(logs[place - 1, ids[place]])
        greedy &= int(logs[place - 1].argmax()) == ids[place]
    return total, greedy


def random_requests(subject: Subject, count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    random = np.random.default_rng(seed)
    size = subject.tokenizer.vocab_size
    made = []
    for _ in range(count):
        before, after = random.integers(1, 20), random.integers(1, 6)
        made.append(
            (random.integers(0, size, before).tolist(), random.integers(0, size, after).tolist())
        )
    return made


def test_scores_are_those_of_one_pass_a_request(tokenizer):
    subject = make_subject(tokenizer, context_length=40, extra=7)
    requests = random_requests(subject, 60, 0)
    # The same tokens fed, with the border elsewhere, and several continuations of one context.
    context, continuation = requests[0]
    requests += [
        ([*context, *continuation[:-1]], continuation[-1:]),
        *((context, [letter]) for letter in range(8)),
    ]
    requests += [(context, [_greedy(subject, context)])]
    found = subject.log_likelihoods(requests)
    expected = [one_by_one(subject, *request) for request in requests]
    assert [one.log_probability for one in found] == pytest.approx(
        [total for total, _ in expected], abs=1e-4
    )
    assert [one.is_greedy for one in found] == [greedy for _, greedy in expected]
    assert found[-1].is_greedy
    assert subject.num_cut == 0


def test_a_common_beginning_is_computed_once(tokenizer, monkeypatch):
    """Few-shot questions: the same scores as one by one, in few slots."""
    subject = make_subject(tokenizer, context_length=120)
    random = np.random.default_rng(3)
    size = subject.tokenizer.vocab_size
    beginnings = [random.integers(0, size, 60).tolist() for _ in range(2)]
    requests = []
    for number in range(24):
        question = random.integers(0, size, 18).tolist()
        context = [*beginnings[number % 2], *question]
        requests += [(context, random.integers(0, size, count).tolist()) for count in (1, 1, 25)]
    # One that is the beginning of others.
    requests.append((beginnings[0][:-1], [beginnings[0][-1]]))
    slots = []
    tensors = type(subject.model).tensors

    def count(self, row, *more):
        slots.append(len(row.tokens))
        return tensors(self, row, *more)

    monkeypatch.setattr(type(subject.model), "tensors", count)
    found = subject.log_likelihoods(requests)
    assert sum(slots) < 0.3 * sum(
        map(len, {(*context, *continuation[:-1]) for context, continuation in requests})
    )
    expected = [one_by_one(subject, *request) for request in requests]
    assert [one.log_probability for one in found] == pytest.approx(
        [total for total, _ in expected], abs=1e-4
    )
    assert [one.is_greedy for one in found] == [greedy for _, greedy in expected]
    monkeypatch.setattr(
        "penstock.learn.evaluation.subject._may_share", lambda model, row_tokens: False
    )
    apart = subject.log_likelihoods(requests)
    assert [one.log_probability for one in apart] == pytest.approx(
        [one.log_probability for one in found], abs=1e-4
    )


@pytest.mark.parametrize(("kind", "extra"), [("llama", {}), ("gpt2", {"attn_pdrop": 0.0})])
def test_models_of_transformers_share_beginnings_too(tokenizer, tmp_path, kind, extra):
    pytest.importorskip("transformers")
    folder = tmp_path / "model"
    tiny_huggingface(kind, vocab_size=tokenizer.vocab_size, **extra).save_pretrained(folder)
    subject = Subject(load_model(folder).eval(), tokenizer, context_length=64)
    assert subject_module._may_share(subject.model, 64)
    requests = [([*range(40), number, *range(9)], [3, number]) for number in range(6)]
    expected = [one_by_one(subject, *request)[0] for request in requests]
    assert [one.log_probability for one in subject.log_likelihoods(requests)] == pytest.approx(
        expected, abs=1e-4
    )


def test_windows_are_read_again_for_each_context(tokenizer, monkeypatch):
    monkeypatch.setattr("penstock.learn.evaluation.subject.tree_rows", None)
    subject = make_subject(tokenizer, context_length=60, sliding_window=4)
    requests = [([*range(40), number], [3]) for number in range(4)]
    expected = [one_by_one(subject, *request)[0] for request in requests]
    assert [one.log_probability for one in subject.log_likelihoods(requests)] == pytest.approx(
        expected, abs=1e-4
    )


def _greedy(subject: Subject, context: list[int]) -> int:
    with torch.no_grad():
        hidden = subject.model(subject.model.tensors(packed([context])))[0, -1:]
        return int(subject.model.logits(hidden)[0, : subject.tokenizer.vocab_size].argmax())


def test_blocks_of_the_head_change_nothing(tokenizer, monkeypatch):
    subject = make_subject(tokenizer, context_length=64)
    requests = random_requests(subject, 20, 1)
    whole = subject.log_likelihoods(requests)
    monkeypatch.setattr("penstock.learn.evaluation.subject.ELEMENTS", 1)
    parts = subject.log_likelihoods(requests)
    assert [one.log_probability for one in parts] == pytest.approx(
        [one.log_probability for one in whole], abs=1e-5
    )


def test_all_continuations_have_probability_one_in_sum(tokenizer):
    """Rows of the embedding that are no tokens are left out of the softmax."""
    subject = make_subject(tokenizer, extra=50)
    found = subject.log_likelihoods([([1, 2, 3], [token]) for token in range(tokenizer.vocab_size)])
    assert math.fsum(math.exp(one.log_probability) for one in found) == pytest.approx(1, abs=1e-5)
    assert sum(one.is_greedy for one in found) == 1


def test_a_context_is_cut_from_the_left_and_counted(tokenizer):
    subject = make_subject(tokenizer, context_length=8)
    long = list(range(30))
    found = subject.log_likelihoods(
        [(long, [5, 6, 7]), (long[-6:], [5, 6, 7]), (long[-7:], [5, 6, 7])]
    )
    assert found[0].log_probability == pytest.approx(found[1].log_probability, abs=1e-5)
    assert subject.num_cut == 2
    assert found[0].log_probability == pytest.approx(
        one_by_one(subject, long[-6:], [5, 6, 7])[0], abs=1e-4
    )


def test_what_cannot_be_scored_is_refused(tokenizer):
    subject = make_subject(tokenizer, context_length=8)
    with pytest.raises(ConfigError, match="empty context; give at least one token"):
        subject.log_likelihoods([([], [1])])
    with pytest.raises(ConfigError, match="empty continuation"):
        subject.log_likelihoods([([1], [])])
    with pytest.raises(ConfigError, match=r"continuation.*9.*context.*8"):
        subject.log_likelihoods([([1], [2] * 9)])


def test_continuations_are_encoded_with_their_context(tokenizer):
    subject = make_subject(tokenizer)
    for text, after in (("Answer:", " A"), ("The qu", "ick"), ("", "dog"), ("The ", "fox")):
        before, rest = subject.continuation(text, after)
        assert before + rest == subject.prompt_ids(text + after)
        assert rest
        assert tokenizer.decode(rest).endswith(after)


def test_replies_do_not_depend_on_what_is_written_beside_them(tokenizer):
    subject = make_subject(tokenizer, context_length=48)
    prompts = [subject.prompt_ids(text) for text in ("The", "A quick", "fox fox fox fox", "12 +")]
    sampling = [Sampling(temperature=1.0, seed=seed, max_tokens=9) for seed in (3, 1, 4, 1)]
    together = subject.write(prompts, sampling)
    for prompt, drawn, found in zip(prompts, sampling, together, strict=True):
        assert subject.write([prompt], [drawn])[0].tokens == found.tokens
    subject.write([list(range(100))], Sampling(max_tokens=16))
    assert subject.num_cut == 1


def test_the_fingerprint_tells_weights_apart(tokenizer):
    one, same, other = (make_subject(tokenizer, seed=seed) for seed in (1, 1, 2))
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
    with torch.no_grad():
        next(iter(same.model.parameters())).view(-1)[0] += 1e-3
    assert one.fingerprint() != same.fingerprint()


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("bloom", {}),
        ("mamba", {"state_size": 4}),
    ],
)
@pytest.mark.parametrize(
    "ways", [("own",), ("own", "mixed", "borders", "batch", "equal")], ids=["mixing", "exact"]
)
def test_a_model_that_mixes_the_texts_of_a_row_scores_them_apart(
    tokenizer, tmp_path, kind, extra, ways, caplog, monkeypatch
):
    """Equal to transformers scoring each text alone; if they need a row each, the results carry a
    note.
    """
    pytest.importorskip("transformers")
    monkeypatch.setattr("penstock.models.theirs.packed_ways.TRIED", ways)
    one_a_row = len(ways) == 1
    inner = tiny_huggingface(
        kind, vocab_size=tokenizer.vocab_size, max_position_embeddings=256, **extra
    )
    inner.save_pretrained(tmp_path / "model")
    model = load_model(tmp_path / "model")
    model.eval()
    subject = Subject(model, tokenizer, context_length=256)
    requests = random_requests(subject, 12, 3)
    for _ in range(2):
        found = subject.log_likelihoods(requests)
    for (context, after), one in zip(requests, found, strict=True):
        with torch.no_grad():
            logits = inner(
                input_ids=torch.tensor([[*context, *after[:-1]]]), use_cache=False
            ).logits[0]
        logs = logits[len(context) - 1 :].double().log_softmax(-1)
        expected = float(logs.gather(1, torch.tensor(after)[:, None]).sum())
        assert one.log_probability == pytest.approx(expected, abs=1e-3)
    assert (
        sum("scores one document per row" in record.getMessage() for record in caplog.records)
        == one_a_row
    )
    assert subject.notes == ((ONE_A_ROW,) if one_a_row else ())
    (tmp_path / "texts.txt").write_text("The quick fox\n\nA lazy dog\n")
    task = BitsPerByte(TaskSettings(name="bits_per_byte", data=str(tmp_path / "texts.txt")))
    assert run_task(task, subject, progress=False).to_json()["notes"] == (
        [ONE_A_ROW] if one_a_row else []
    )
