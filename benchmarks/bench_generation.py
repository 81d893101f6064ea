"""The engine against transformers on the same weights, on the CPU: whole calls, steps at any
context, shared prompts.

    python benchmarks/bench_generation.py [--model FOLDER [--only-model]] [--repeats 5]

First a real model, such as SmolLM2-135M-Instruct in the Hugging Face layout: whole calls of
`generate`, greedily, 64 tokens after prompts of 64 and 512, for 1 and 8 sequences at once, with
their prompts read in the call; and the prompts alone (one token). Texts of both sides must be
equal. The prompts are parts of the standard library's sources.

Then a Llama of 12 million parameters in float32 (6 layers, width 384, vocabulary of 4,096). CPU
time; rivals take turns, medians.

Whole calls of `generate`: 64 tokens after 64, for 1, 8 and 32 sequences at once, greedily, and with
temperature 0.8 and top-p 0.95. Neither has a token that ends a sequence, so both write all; prompts
are read in the call. `step` is the time of the call over the tokens of a sequence, and `ours` how
much of it is not the model but choosing, text and events.

Steps: one token for each sequence, at a context of 128, 1,024 and 4,096 tokens, whose keys and
values are made up on both sides (`extend` and argmax against `forward` with a `DynamicCache` and
argmax). `mixed`: one sequence of 2,000 tokens and seven of 16; transformers pads these to 2,000.
Its fair share is the step of eight of 16, and what the step of one sequence of 2,000 takes more
than that of one of 16.

Shared prompts: eight samples of 16 tokens after one prompt of 1,024. Memory: the process' resident
bytes over those of the stored keys and values, for a cache of 8 x 4,096 that holds one sequence of
2,000 and seven of 16.
"""

import cProfile
import gc
import pstats
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from common import Work, against, arguments, cpu_seconds, standard_library, table, take_turns
from penstock import train_tokenizer
from penstock.learn.generation import Engine, Sampling
from penstock.models import ModelSettings
from penstock.models.building import build_model
from penstock.models.exporting import export
from penstock.use.runs.opening import load_opened

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
    """How much of the engine's time is not spent in the model; by a profile, which makes Python
    look slower.
    """
    profile = cProfile.Profile()
    profile.runcall(work)
    spent = {name[2]: total for name, (*_, total, _) in pstats.Stats(profile).stats.items()}  # type: ignore[attr-defined]
    return 1 - spent["extend"] / spent["step"]


STEPS = 8
"""Tokens of each sequence in a measured turn."""


def filled(model: Any, lengths: list[int]) -> Any:
    """A cache with made-up keys and values of sequences of these lengths."""
    cache = model.new_cache(len(lengths), max(lengths) + STEPS)
    cache.reserve(max(lengths) + STEPS)
    for slot, length in enumerate(lengths):
        for held in (cache._keys, cache._values):
            held[:, slot, :, :length] = torch.randn_like(held[:, slot, :, :length])
    cache.lengths[:] = torch.tensor(lengths)
    return cache


def our_steps(model: Any, lengths: list[int]) -> Work:
    cache, before = filled(model, lengths), torch.tensor(lengths)
    ones, slots = torch.ones(len(lengths), dtype=torch.int64), torch.arange(len(lengths))

    def work() -> None:
        tokens = slots
        with torch.inference_mode():
            for _ in range(STEPS):
                tokens = model.extend(tokens[:, None], ones, cache, slots).argmax(-1)
        cache.lengths[:] = before

    return work


def their_steps(peer: Any, lengths: list[int]) -> Callable[[], float]:
    """Seconds of the steps; the cache is filled before they are counted."""
    from transformers import DynamicCache

    count, longest, settings = len(lengths), max(lengths), SETTINGS
    shape = (count, settings.key_heads, longest, settings.each_head)
    layers = [(torch.randn(shape), torch.randn(shape)) for _ in range(settings.layers)]
    # Left padding, as generate takes prompts of different lengths.
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
    padded = len({*lengths}) > 1

    def steps(cache: Any) -> None:
        tokens, seen = torch.arange(count), mask
        with torch.inference_mode():
            for _ in range(STEPS):
                seen = torch.cat([seen, torch.ones(count, 1, dtype=torch.int64)], 1)
                given = (
                    {"attention_mask": seen, "position_ids": seen.sum(1, keepdim=True) - 1}
                    if padded
                    else {}
                )
                tokens = (
                    peer(tokens[:, None], past_key_values=cache, use_cache=True, **given)
                    .logits[:, -1]
                    .argmax(-1)
                )

    def seconds() -> float:
        cache = DynamicCache()
        for number, (keys, values) in enumerate(layers):
            cache.update(keys, values, number)
        return cpu_seconds(partial(steps, cache))

    return seconds


def step_lines(model: Any, peer: Any, repeats: int) -> list[tuple[str, str, str]]:
    """Steps at several batches and contexts, and with mixed lengths."""
    lines = []
    mixed = [2000] + [16] * 7
    cases = {
        f"{count} at {context:,}": [context] * count
        for context in (128, 1024, 4096)
        for count in (1, 8, 32)
    }
    for name, lengths in {**cases, "1 at 2,000 and 7 at 16": mixed}.items():
        rivals = {
            "ours": partial(cpu_seconds, our_steps(model, lengths)),
            "theirs": their_steps(peer, lengths),
        }
        seconds = take_turns(rivals, repeats)
        mine, other = (1e3 * seconds[who] / STEPS for who in rivals)
        lines.append(
            (f"a step, {name}", f"{other / mine:.2f} ×", f"{mine:.1f} against {other:.1f} ms")
        )
        against("Generation", f"a decoding step, {name}", "transformers", ours=mine, theirs=other)
        del rivals
        gc.collect()
    shares = {"mixed": mixed, "short": [16] * 8, "one": [16], "long": [2000]}
    works = {name: our_steps(model, lengths) for name, lengths in shares.items()}
    spent = take_turns(
        {name: partial(cpu_seconds, work) for name, work in works.items()}, 3 * repeats
    )
    fair = spent["short"] + spent["long"] - spent["one"]
    lines.append(
        ("the mixed step over its fair share", f"{spent['mixed'] / fair:.2f}", "goal: ≤ 1.3")
    )
    return lines


def shared_lines(model: Any, peer: Any, tokenizer: Any, repeats: int) -> list[tuple[str, str, str]]:
    """Eight samples of one long prompt."""
    prompt = torch.randint(0, tokenizer.vocab_size, (1024,)).tolist()
    sampling = Sampling(temperature=1.0, max_tokens=16)

    def ours() -> None:
        engine = Engine(model, tokenizer, context_length=1100, forbidden_ids=(), slots=8)
        engine.generate_all([prompt] * 8, sampling)

    def theirs() -> None:
        ids = torch.tensor([prompt])
        peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            min_new_tokens=16,
            do_sample=True,
            top_k=0,
            num_return_sequences=8,
            eos_token_id=None,
            pad_token_id=0,
        )

    seconds = take_turns(
        {"ours": partial(cpu_seconds, ours), "theirs": partial(cpu_seconds, theirs)}, repeats
    )
    note = f"{seconds['ours']:.2f} against {seconds['theirs']:.2f} s"
    against("Generation", "8 samples after one prompt of 1,024 tokens", "transformers", **seconds)
    return [
        (
            "8 samples of 16 after one prompt of 1,024",
            f"{seconds['theirs'] / seconds['ours']:.2f} ×",
            note,
        )
    ]


def memory_line(model: Any) -> tuple[str, str, str]:
    """Resident bytes of a cache over those that it stores."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    lengths = [2000] + [16] * 7
    gc.collect()
    before = resident()
    cache = model.new_cache(8, 4096)
    for slot, length in enumerate(lengths):
        for held in (cache._keys, cache._values):
            held[:, slot, :, :length] = 1.0
    taken = resident() - before
    stored = cache._keys[:, 0, :, 0].nbytes * 2 * sum(lengths)
    everything = cache._keys.nbytes * 2
    note = f"{stored / 1e6:.0f} MB stored; allocated at once: {everything / 1e6:.0f} MB"
    return "memory of a cache of 8 × 4,096, mixed", f"{taken / 1e6:.0f} MB", note


def real_lines(folder: Path, most: int, repeats: int) -> list[tuple[str, str, str]]:
    """Whole calls with a real model; its texts are compared, too."""
    from transformers import AutoModelForCausalLM

    found = load_opened(folder)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    source = max(standard_library(2_000_000), key=len)[:200_000]
    ids = [int(one) for one in found.tokenizer.encode(source)]
    lines = []
    for length, count, written in product((64, 512), (1, 8), (1, most)):
        rivals = real_rivals(found, peer, ids, length, count, written)
        seconds = take_turns(rivals, repeats)
        mine, other = seconds["ours"], seconds["theirs"]
        what = f"{written} after {length}, {count} at once"
        lines.append((what, f"{other / mine:.2f} ×", f"{mine:.2f} against {other:.2f} s"))
        against("Generation", f"{folder.name}: {what}", "transformers", **seconds)
    return lines


def real_rivals(
    found: Any, peer: Any, ids: list[int], length: int, count: int, written: int
) -> dict[str, Callable[[], float]]:
    """Both sides of a whole call; theirs comes second, and compares the texts."""
    engine = Engine(
        found.model, found.tokenizer, context_length=length + written, forbidden_ids=(), slots=count
    )
    turns: list[list[list[int]]] = []
    texts: list[list[int]] = []

    def ours() -> None:
        done = engine.generate_all(turns[-1], Sampling(temperature=0, max_tokens=written))
        texts[:] = [list(one.tokens) for one in done]

    def theirs() -> torch.Tensor:
        prompts = torch.tensor(turns[-1])
        done: torch.Tensor = peer.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=written,
            min_new_tokens=written,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[:, length:]
        return done

    def our_seconds() -> float:
        # Other prompts each turn, so that none is found in the cache.
        begins = [(97 * len(turns) + 1500 * row) % (len(ids) - length) for row in range(count)]
        turns.append([ids[begin : begin + length] for begin in begins])
        return cpu_seconds(ours)

    def their_seconds() -> float:
        done: list[torch.Tensor] = []
        spent = cpu_seconds(lambda: done.append(theirs()))
        if done[0].tolist() != texts:
            print(f"  turn {len(turns)} of {written} after {length}: the texts differ")
        return spent

    return {"ours": our_seconds, "theirs": their_seconds}


def main() -> None:
    from transformers import AutoModelForCausalLM

    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a real model, measured first")
    parser.add_argument("--written", type=int, default=WRITTEN, help="tokens of its texts")
    parser.add_argument("--only-model", action="store_true", help="measure nothing else")
    parser.add_argument("--threads", type=int, default=1)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    warnings.filterwarnings("ignore")
    if flags.model is not None:
        lines = real_lines(flags.model, flags.written, flags.repeats)
        table(f"penstock against transformers.generate, {flags.model.name}, greedily", lines)
    if flags.only_model:
        return
    model = build_model(SETTINGS, vocab_size=VOCABULARY, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        texts = standard_library(2_000_000)
        tokenizer = train_tokenizer(
            texts, vocab_size=VOCABULARY, output=f"{folder}/tokenizer", progress=False
        )
        export(model, f"{folder}/model")
        peer = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32).eval()
    rows = [memory_line(model)]
    for way, (sampling, options) in WAYS.items():
        for count in (1, 8, 32):
            prompts = torch.randint(
                0,
                tokenizer.vocab_size,
                (count, PROMPT),
                generator=torch.Generator().manual_seed(count),
            )
            engine = Engine(
                model, tokenizer, context_length=PROMPT + WRITTEN, forbidden_ids=(), slots=count
            )
            listed = prompts.tolist()

            def ours(
                engine: Engine = engine, listed: Any = listed, sampling: Sampling = sampling
            ) -> None:
                # Each repeat begins with other tokens, so that no prompt is found in the cache.
                for prompt in listed:
                    prompt[0] = (prompt[0] + 1) % tokenizer.vocab_size
                engine.generate_all(listed, sampling)

            def theirs(prompts: torch.Tensor = prompts, options: Any = options) -> None:
                peer.generate(
                    prompts,
                    attention_mask=torch.ones_like(prompts),
                    max_new_tokens=WRITTEN,
                    min_new_tokens=WRITTEN,
                    eos_token_id=None,
                    pad_token_id=0,
                    **options,
                )

            seconds = take_turns(
                {"ours": partial(cpu_seconds, ours), "theirs": partial(cpu_seconds, theirs)},
                flags.repeats,
            )
            mine, other = (count * WRITTEN / seconds[name] for name in ("ours", "theirs"))
            step, own = 1e3 * seconds["ours"] / WRITTEN, share_of_ours(ours)
            note = (
                f"{mine:.0f} against {other:.0f} tokens/s; step {step:.1f} ms, ours "
                f"{100 * own:.0f} %"
            )
            rows.append((f"{way}, {count} at once", f"{mine / other:.2f} ×", note))
            against(
                "Generation",
                f"whole calls of generate, {way}, {count} at once",
                "transformers",
                **seconds,
            )
    rows += step_lines(model, peer, flags.repeats)
    rows += shared_lines(model, peer, tokenizer, flags.repeats)
    table(
        f"penstock against transformers.generate, 12 M parameters, {flags.threads} thread(s)", rows
    )


if __name__ == "__main__":
    main()
