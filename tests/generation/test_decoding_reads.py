"""A step of decoding reads the device once: the sampled ids, with log-probabilities where they are
asked for. And it sends twice: what the model must know, what the choice must know.
"""

import json
from collections import Counter

import pytest
import torch

from makers.architectures import make_small
from makers.models import tiny_model
from makers.pretended_device import pretended
from makers.tokenizers import byte_tokenizer
from penstock.learn.generation import Engine, Sampling
from penstock.models.theirs.model import HuggingFaceModel

TOKENIZER = byte_tokenizer("<bos>", "<end>")
WAYS: dict[str, Sampling] = {
    "greedy": Sampling(temperature=0, max_tokens=9),
    "sampled": Sampling(temperature=0.7, top_p=0.9, top_k=50, min_p=0.01, max_tokens=9),
    "log-probabilities": Sampling(max_tokens=9, logprobs=3),
    "tempered": Sampling(temperature=0.5, max_tokens=9, logprobs=1, tempered_logprobs=True),
    "penalties": Sampling(
        max_tokens=9, frequency_penalty=0.3, presence_penalty=0.1, repetition_penalty=1.2,
        logit_bias={7: 1.5},
    ),
    "no end yet": Sampling(max_tokens=9, min_tokens=9),
    "JSON": Sampling(max_tokens=9, json_schema=json.dumps({"type": "string", "maxLength": 50})),
}  # fmt: skip


def ours():
    return tiny_model(TOKENIZER.vocab_size, seed=3, init_std=0.3).eval()


def windowed():
    return tiny_model(TOKENIZER.vocab_size, seed=3, sliding_window=5).eval()


def theirs():
    return HuggingFaceModel(make_small("llama", vocab_size=TOKENIZER.vocab_size).eval())


@pytest.fixture(scope="module", params=[ours, windowed, theirs], ids=lambda make: make.__name__)
def model(request):
    return request.param()


def steps(engine, way, prompts=(b"once upon", b"a time", b"of all")):
    """An engine whose prompts are read, and which knows what may come next."""
    for prompt in prompts:
        engine.submit(list(prompt), way)
    for _ in range(3):
        assert engine.step()
    for each in engine._running.values():
        if each.constraint is not None:
            each.constraint._bits.result()


@pytest.mark.parametrize("name", WAYS)
def test_a_step_reads_once(name, model, monkeypatch):
    engine = Engine(model, TOKENIZER, context_length=64, stop_ids=[257], slots=4)
    steps(engine, WAYS[name])
    module = model.inner if isinstance(model, HuggingFaceModel) else model
    with pretended(monkeypatch, module) as device:
        device.mark(engine._cache._keys), device.mark(engine._cache._values)
        mark_settings(device, engine)
        events = engine.step()
    assert len(events) >= 2
    assert len(device.reads) == 1, Counter(device.reads)
    assert "choosing.py" in device.reads[0]
    assert not device.blocking, Counter(device.blocking)
    nothing_to_send = name in ("greedy",)
    assert len(device.copies) == 2 - nothing_to_send, device.copies


def mark_settings(device, engine):
    """What was sent in earlier steps."""
    device.mark(engine._chooser._forbidden)
    for x in vars(engine._chooser._samplers[1]).values():
        if isinstance(x, torch.Tensor):
            device.mark(x)


def test_the_counter_counts(monkeypatch):
    model = ours()
    with pretended(monkeypatch, model) as device:
        x = model.embedding.weight * 2
        x[0, 0].item(), bool((x > 0).all()), x[x > 0], x[torch.tensor([1, 2])], x[[1]]
        x + torch.ones(len(x), 1), torch.ones(3).tolist(), torch.tensor(1.0, device="cpu")
    assert len(device.reads) == 3
    assert len(device.blocking) == 4
