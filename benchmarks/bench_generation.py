"""Tokens a second of the engine against transformers' `generate`, on the same exported weights, on the CPU.

    python benchmarks/bench_generation.py [--threads 1] [--repeats 5]

A Llama of 12 million parameters in float32 (6 layers, width 384, vocabulary of 4,096) writes 64 tokens after 64, for 1,
8 and 32 sequences at once: greedily, and with temperature 0.8 and top-p 0.95. Neither has a token that ends a sequence,
so both write all. Processor time of the whole call, prompts included, because a shared machine lengthens waiting and
not work; rivals take turns, medians. `step` is the time of the call over the tokens of a sequence, and `ours` how much
of it is not the model but choosing, text and events.
"""

import cProfile
import pstats
import tempfile
import warnings
from functools import partial
from typing import Any

import torch

from common import Work, arguments, cpu_seconds, standard_library, table, take_turns
from penstock import train_tokenizer
from penstock.generation import Engine, Sampling
from penstock.models import ModelSettings
from penstock.models.exporting import export
from penstock.models.transformer import build_model

VOCABULARY, PROMPT, WRITTEN = 4096, 64, 64
SETTINGS = ModelSettings(layers=6, width=384, heads=6, mlp_width=1024)
WAYS = {
    "greedy": (Sampling(temperature=0, max_tokens=WRITTEN), {"do_sample": False}),
    "top-p 0.95": (
        Sampling(temperature=0.8, top_p=0.95, max_tokens=WRITTEN),
        {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0},
    ),
}


def share_of_ours(work: Work) -> float:
    """How much of the engine's time is not spent in the model; by a profile, which makes Python look slower."""
    profile = cProfile.Profile()
    profile.runcall(work)
    spent = {name[2]: total for name, (*_, total, _) in pstats.Stats(profile).stats.items()}  # type: ignore[attr-defined]
    return 1 - spent["extend"] / spent["step"]


def main() -> None:
    from transformers import AutoModelForCausalLM

    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    warnings.filterwarnings("ignore")
    model = build_model(SETTINGS, vocab_size=VOCABULARY, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        texts = standard_library(2_000_000)
        tokenizer = train_tokenizer(texts, vocab_size=VOCABULARY, output=folder, progress=False, overwrite=True)
        export(model, folder)
        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for way, (sampling, options) in WAYS.items():
        for count in (1, 8, 32):
            prompts = torch.randint(
                0, tokenizer.vocab_size, (count, PROMPT), generator=torch.Generator().manual_seed(count)
            )
            engine = Engine(model, tokenizer, context_length=PROMPT + WRITTEN, forbidden_ids=(), slots=count)
            listed = prompts.tolist()

            def ours(engine: Engine = engine, listed: Any = listed, sampling: Sampling = sampling) -> None:
                # Each repeat begins with other tokens, so that no prompt is found in the cache.
                for prompt in listed:
                    prompt[0] = (prompt[0] + 1) % tokenizer.vocab_size
                engine.generate_all(listed, sampling)

            def theirs(prompts: torch.Tensor = prompts, options: Any = options) -> None:
                peer.generate(
                    prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=WRITTEN, min_new_tokens=WRITTEN,
                    eos_token_id=None, pad_token_id=0, **options,
                )  # fmt: skip

            seconds = take_turns(
                {"ours": partial(cpu_seconds, ours), "theirs": partial(cpu_seconds, theirs)}, flags.repeats
            )
            mine, other = (count * WRITTEN / seconds[name] for name in ("ours", "theirs"))
            step, own = 1e3 * seconds["ours"] / WRITTEN, share_of_ours(ours)
            note = f"{mine:.0f} against {other:.0f} tokens/s; step {step:.1f} ms, ours {100 * own:.0f} %"
            rows.append((f"{way}, {count} at once", f"{mine / other:.2f} ×", note))
    table(f"penstock against transformers.generate, 12 M parameters, {flags.threads} thread(s)", rows)


if __name__ == "__main__":
    main()
