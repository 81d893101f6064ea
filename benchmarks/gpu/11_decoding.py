"""How fast is decoding? Tokens a second at 1, 8 and 64 sequences, against transformers.

    python benchmarks/gpu/11_decoding.py --output results

The same model, exported: ours by `run.sample`, transformers by `generate` with its static cache
(compiled where it chooses to) and without. CUDA graphs of ours come when there are any.
"""

import time
from pathlib import Path
from typing import Any

import torch

import penstock as ps
from common import Data, Figures, Report, folder, need, own_model, peak_gb, wait


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


def ours(run: Any, sequences: int, tokens: int) -> Figures:
    """`run.sample`; the first call opens the model, the second is timed."""
    prompts = ["the quick brown fox"] * sequences
    for _ in range(2):
        wait()
        begun = time.perf_counter()
        texts = run.sample(prompts, max_tokens=tokens, min_tokens=tokens)
        wait()
        took = time.perf_counter() - begun
    count = sum(len(one.tokens) for one in texts)
    return {"tokens": count, "tokens_per_second": count / took, "peak_gb": peak_gb()}


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
        for sequences in (1, 2) if report.toy else (1, 8, 64):
            report.part(f"ours, {sequences}", lambda n=sequences: ours(kept["run"], n, tokens))
            for cache in ("dynamic",) if report.toy else ("dynamic", "static"):
                name = f"transformers, {cache} cache, {sequences}"
                report.part(name, theirs, report, place, sequences, tokens, cache)
    report.done()


if __name__ == "__main__":
    main()
