"""Every causal architecture of transformers that can be made small: what it gives here is what
transformers gives for one document alone, or a `PenstockError`; never a number that is wrong, and
never an error of somebody else's code.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from makers.architectures import KINDS, LENGTH, make_small
from makers.tokenizers import byte_tokenizer
from penstock.core.errors import PenstockError
from penstock.learn.evaluation.subject import Subject, packed
from penstock.learn.generation import Sampling
from penstock.models.saving import load_model

TOKENIZER = byte_tokenizer("<bos>", "<end>")
FAST = (
    "bamba",
    "bert",
    "diffllama",
    "falcon-alibi",
    "falcon_h1",
    "gemma3-dynamic",
    "gpt2",
    "gpt_oss",
    "llama",
    "llama-dynamic",
    "llama-longrope",
    "llama4_text",
    "mamba",
    "qwen3_next",
    "recurrent_gemma",
)
"""One of each kind of trouble; the others take two minutes."""
BOTH_WAYS = {
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "prophetnet",
    "prophetnet-decoder",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roformer",
    "xlm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xlnet",
}
"""Models that read in both directions, by default or at all."""
ROUNDING = 1e-3
"""In standard deviations of the logits."""


def documents(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(len(lengths))
    return [random.integers(0, 256, length).tolist() for length in lengths]


def alone(inner: Any, ids: list[int]) -> torch.Tensor:
    """[n, vocabulary]: logits of a document, in a model that never read another."""
    with torch.no_grad():
        return copy.deepcopy(inner)(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def close(found: torch.Tensor, truth: torch.Tensor) -> bool:
    return bool((found - truth).abs().max() <= ROUNDING * truth.std())


def or_refused(what: Callable[[], None]) -> str | None:
    """What it is refused with; None where it went through, and was right."""
    refused = None
    try:
        what()
    except PenstockError as error:
        refused = str(error)
    assert refused is None or "\n" not in refused
    return refused


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity(50)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in FAST else pytest.mark.slow) for kind in KINDS]
)
def test_a_number_is_right_or_refused(kind: str, tmp_path: Path) -> None:
    try:
        inner = make_small(kind)
        with torch.no_grad():
            inner(input_ids=torch.arange(9)[None], use_cache=False)
        inner.save_pretrained(tmp_path)
    except Exception as error:  # transformers' own, before we come in
        assert kind not in FAST
        pytest.skip(f"transformers makes no small one: {error!r}"[:200])
    model: Any = None

    def load() -> None:
        nonlocal model
        model = load_model(tmp_path)
        model.eval()

    refused = or_refused(load)
    assert (refused is not None) == (kind in BOTH_WAYS), refused
    if refused is not None:
        assert "is not a causal language model" in refused
        return
    subject = Subject(model, TOKENIZER, context_length=LENGTH)
    assert or_refused(lambda: scores(subject, inner)) is None
    assert or_refused(lambda: texts(subject, inner)) is None
    mixed = or_refused(lambda: rows(model, inner))
    assert (
        mixed is None
        or "documents of one row see each other" in mixed
        or "a row of several documents" in mixed
    )


def scores(subject: Subject, inner: Any) -> None:
    """Log-probabilities of continuations; two of the texts are longer than the rotary embedding's
    first length.
    """
    requests = [(ids[: len(ids) // 2], ids[len(ids) // 2 :]) for ids in documents(6, 40, 2, 31, 9)]
    for (context, after), found in zip(requests, subject.log_likelihoods(requests), strict=True):
        truth = alone(inner, [*context, *after[:-1]])
        logs = truth[len(context) - 1 :].log_softmax(-1)
        expected = float(logs.gather(1, torch.tensor(after)[:, None]).sum())
        assert abs(found.log_probability - expected) <= ROUNDING * float(truth.std()) * len(after)


def texts(subject: Subject, inner: Any) -> None:
    """Log-probabilities of what is written after prompts of several lengths; one grows beyond that
    length.
    """
    prompts = documents(5, 17, 2)
    for prompt, found in zip(
        prompts, subject.write(prompts, Sampling(max_tokens=12, logprobs=0)), strict=True
    ):
        for number, (token, reported) in enumerate(zip(found.tokens, found.logprobs, strict=True)):
            # Not all at once: frequencies of some depend on how long the text is at that moment.
            truth = alone(inner, [*prompt, *found.tokens[:number]])
            assert abs(
                reported.token - float(truth[-1].log_softmax(-1)[token])
            ) <= ROUNDING * float(truth.std())


def rows(model: Any, inner: Any) -> None:
    """Logits of a row as it is trained on."""
    each = documents(13, 1, 30)
    with torch.no_grad():
        found = model.logits(model(model.tensors(packed(each))))[0]
    for ids, logits in zip(each, found.split([len(ids) for ids in each]), strict=True):
        assert close(logits, alone(inner, ids))
