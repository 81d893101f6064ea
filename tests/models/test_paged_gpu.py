"""Pages and CUDA graphs on a CUDA device, against the slot cache in float32 on the CPU."""

import pytest
import torch

from makers.architectures import make_small
from makers.models import tiny_model
from penstock.models.paged_cache import PagedCache
from penstock.models.static_steps import WARM
from penstock.models.theirs.model import HuggingFaceModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_steps_are_those_of_the_cpu(rows, window, dtype):
    models = [tiny_model(60, width=64, sliding_window=window) for _ in range(2)]
    models[1].to("cuda", dtype)
    check(models, rows, 1e-3 if dtype == torch.float32 else 0.1, in_place=dtype != torch.float32)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "gemma2"])
def test_models_of_transformers(kind):
    inner = make_small(kind)
    models = [HuggingFaceModel(inner), HuggingFaceModel(make_small(kind).cuda())]
    models[1].inner.load_state_dict(inner.state_dict())
    check(models, 2, 1e-3, in_place=False)


def check(models, rows, far, *, in_place):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 60, (rows, 320), generator=generator)
    caches = [model.eval().new_cache(rows, 400) for model in models]
    assert isinstance(caches[1], PagedCache)
    assert (caches[1].gathers == "") == in_place
    counts = torch.arange(rows) * 7 + 240
    ends = [(0, int(counts.max()), counts)] + [(250 + n, 251 + n, torch.ones_like(counts))
                                               for n in range(30)]  # fmt: skip
    for begin, end, lengths in ends:
        due, found = (
            model.extend(tokens[:, begin:end], lengths, cache)
            for model, cache in zip(models, caches, strict=True)
        )
        assert float((found.cpu() - due).abs().max() / due.std()) < far
    assert not caches[1].steps.reason
    assert caches[1].steps.recorded
    assert WARM < 30
