"""How fast is decoding? Tokens a second at 1, 8 and 64 sequences, against transformers.

    python benchmarks/gpu/11_decoding.py --output results

The same model, exported: ours by an engine whose cache has slots of equal room, pages, and pages
with recorded steps (CUDA graphs; only on CUDA); transformers by `generate` with its static cache
(compiled where it chooses to) and without. `recorded` says how many steps were recorded, `gathers`
why pages are gathered where FlashAttention does not read them in place. Last: eight samples of one
long prompt, whose pages are shared.
"""

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import penstock as ps
from common import Data, Figures, Report, folder, need, own_model, peak_gb, wait
from penstock.learn.generation import Engine, Sampling
from penstock.models import key_caches
from penstock.models.cache import Cache
from penstock.models.paged_cache import PagedCache
from penstock.models.static_steps import VARIABLE


def trained(report: Report, place: Path) -> Any:
    """A run of two steps, and its export."""
    data = Data(place, 300, 20.0 if report.toy else 400.0)
    slots = 64 if report.toy else 2048
    run = ps.train(
        own_model(report),
        ps.Loader(ps.Source(data.web), sequence_length=slots, rows_per_step=2),
        output=place / "run",
        steps=2,
        warmup_steps=0,
        progress=False,
    )
    run.export(place / "exported")
    return run


def ours(
    place: Path, report: Report, sequences: int, tokens: int, way: str, prompt: int = 8
) -> Figures:
    """An engine; the first call warms up and records, the second is timed."""
    cuda = report.device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    model: Any = ps.load_model(place / "run", device=report.device, dtype=dtype).eval()
    kind: Any = Cache if way == "slots" else PagedCache
    with (
        mock.patch.object(key_caches, "Cache", kind),
        mock.patch.object(key_caches, "PagedCache", kind),
        mock.patch.dict(os.environ, {VARIABLE: "1" if way == "pages, graphs" else "0"}),
    ):
        engine = Engine(
            model,
            ps.load_tokenizer(ps.open_run(place / "run").tokenizer),
            context_length=max(prompt + tokens, 2048 if cuda else 0),
            forbidden_ids=(),
            slots=sequences,
        )
    settings = Sampling(temperature=1.0, max_tokens=tokens)
    for turn in range(2):
        # Another beginning each time, so that none is found in the cache.
        prompts = [[5 + turn] * prompt] * sequences
        wait()
        begun = time.perf_counter()
        texts = engine.generate_all(prompts, settings)
        wait()
        took = time.perf_counter() - begun
    count = sum(len(one.tokens) for one in texts)
    cache: Any = engine._cache
    found: Figures = {"tokens_per_second": count / took, "peak_gb": peak_gb()}
    if isinstance(cache, PagedCache):
        found |= {"pages": cache.pages.total, "gathers": cache.gathers}
        if cache.steps is not None:
            found |= {"recorded": cache.steps.recorded, "reason": cache.steps.reason}
    return found


def theirs(report: Report, place: Path, sequences: int, tokens: int, cache: str) -> Figures:
    """transformers' `generate`."""
    transformers = need("transformers")
    cuda = report.device.type == "cuda"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        place / "exported", dtype=torch.bfloat16 if cuda else torch.float32
    ).to(report.device)
    prompts = torch.full((sequences, 8), 5, device=report.device)
    options = {
        "max_new_tokens": tokens,
        "min_new_tokens": tokens,
        "do_sample": True,
        "attention_mask": torch.ones_like(prompts),
        "pad_token_id": 0,
        **({} if cache == "dynamic" else {"cache_implementation": cache}),
    }
    for _ in range(2):
        wait()
        begun = time.perf_counter()
        model.generate(prompts, **options)
        wait()
        took = time.perf_counter() - begun
    return {"tokens_per_second": sequences * tokens / took, "peak_gb": peak_gb()}


def main() -> None:
    report = Report(__file__, __doc__)
    tokens = 5 if report.toy else 256
    with folder() as place:
        kept: dict[str, Any] = {}

        def make() -> Figures:
            kept["run"] = trained(report, place)
            return {"step": kept["run"].step}

        report.part("a model", make)
        ways = ["slots", "pages"] + ["pages, graphs"] * (report.device.type == "cuda")
        for sequences in (1, 2) if report.toy else (1, 8, 64):
            for way in ways:
                report.part(
                    f"ours, {way}, {sequences}", ours, place, report, sequences, tokens, way
                )
            for cache in ("dynamic",) if report.toy else ("dynamic", "static"):
                name = f"transformers, {cache} cache, {sequences}"
                report.part(name, theirs, report, place, sequences, tokens, cache)
        for way in ways:
            long = 40 if report.toy else 1024
            report.part(
                f"ours, {way}, 8 samples of {long}", ours, place, report, 8, tokens, way, long
            )
    report.done()


if __name__ == "__main__":
    main()
