"""Useful tokens per CPU second of training on conversations: penstock's trainer, a bare loop, Hugging Face's Trainer.

    python benchmarks/bench_training.py [--chats FILE] [--sizes 1,10] [--repeats 3] [--threads 1]

All train the same model from the same weights in float32, with fused AdamW and clipping, on the same conversations,
with loss on the assistant's words only. `bare`: our model, loader and loss in the shortest loop. `padded`: Trainer on
our model exported to LlamaForCausalLM, batches of 8 conversations padded to the longest; `grouped`: batches of about
the same length. Steps have about as many useful tokens for each. Useful tokens are all but padding; CPU time is of all
threads, the first step of each turn not counted. Rivals take turns; medians. At the end, where penstock's time goes.

`--chats`: conversations in any layout that `penstock prepare` reads, such as OASST trees; else they are made up, with
lengths as in OASST (log-normal, most under 500 tokens, a few far above).
"""

import cProfile
import json
import pstats
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock as ps
from common import arguments, standard_library, table
from penstock import open_dataset, prepare, train_tokenizer
from penstock.config import load_run
from penstock.config.run_file import resolved_text
from penstock.config.training import make_trainer
from penstock.models.exporting import export
from penstock.training import Trainer
from penstock.training.distributed import Ranks
from penstock.training.losses import loss

SLOTS, VOCABULARY = 1024, 2048
SIZES = {
    "1": ("1 M", "{layers: 4, width: 128, heads: 4}", 4, 4),
    "10": ("10 M", "{layers: 5, width: 384, heads: 6}", 4, 2),
}
"""Model, rows a step, steps a turn."""
RUN_FILE = """\
data:
  sources: [{{path: {data}, too_long: truncate}}]
  loader: {{sequence_length: {slots}, rows_per_step: {rows}, seed: 1}}
model: {model}
training:
  steps: 1000
  threads: {threads}
  deterministic: false
  optimizer: {{learning_rate: 0.001, fused: true}}
  schedule: {{shape: constant, warmup_steps: 0}}
  checkpoints: {{every: 1000}}
"""
Spent = tuple[int, float]
"""Useful tokens, CPU seconds."""


def made_up_chats(path: Path, count: int = 600) -> Path:
    """Conversations of Python sources, with turns as long as OASST's."""
    text = "".join(standard_library(3_000_000))
    chance = random.Random(0)

    def cut(mean: float) -> str:
        at = chance.randrange(len(text) - 20_000)
        return text[at : at + int(chance.lognormvariate(np.log(mean) - 0.5, 1.0)) + 1]

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            turns = chance.choice([1, 1, 2, 2, 3])
            messages = [m for _ in range(turns) for m in (("user", cut(150)), ("assistant", cut(700)))]
            file.write(json.dumps({"messages": [{"role": r, "content": c} for r, c in messages]}) + "\n")
    return path


def documents(data: Path) -> list[dict[str, list[int]]]:
    """Of each conversation what Trainer takes; its first SLOTS tokens."""
    dataset = open_dataset(data)
    found = []
    for number in range(len(dataset)):
        one = dataset[number]
        tokens, weights = one.tokens[:SLOTS].astype(np.int64), one.loss_weights[:SLOTS]
        found.append({"input_ids": tokens.tolist(), "labels": np.where(weights > 0, tokens, -100).tolist()})
    return found


def pad(items: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(item["input_ids"]) for item in items)
    batch = {
        name: torch.tensor([item[name] + [fill] * (longest - len(item[name])) for item in items])
        for name, fill in (("input_ids", 0), ("labels", -100))
    }
    lengths = torch.tensor([len(item["input_ids"]) for item in items])
    return {**batch, "attention_mask": (torch.arange(longest) < lengths[:, None]).long()}


def turn_of_steps(records: Iterator[int], steps: int) -> Spent:
    """Run a step for each token count that `records` gives; all but the first are measured."""
    next(records)
    begun, tokens = time.process_time(), 0
    for _ in range(steps):
        tokens += next(records)
    return tokens, time.process_time() - begun


def ours(trainer: Trainer) -> Iterator[int]:
    before = 0
    for record in trainer.train():
        yield record["tokens"] - before
        before = record["tokens"]


def bare(trainer: Trainer) -> Iterator[int]:
    model, weights = trainer.model, list(trainer.model.parameters())
    decayed = [{"params": [p for p in weights if p.ndim > 1]}, {"params": [p for p in weights if p.ndim < 2]}]
    optimizer = torch.optim.AdamW(decayed, lr=0.001, betas=(0.9, 0.95), fused=True)
    for step in trainer.loader:
        for row in step:
            loss(model, row, step.loss_denominator).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step.num_tokens


def huggingface(folder: Path, docs: list[Any], steps: int, tokens: int, grouped: bool, seed: int) -> Spent:
    """A run of Trainer: batches of 8, and as many a step as give about so many useful tokens."""
    import transformers

    seen: list[tuple[int, float]] = []
    now = [0]

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append((now[0], time.process_time()))

    def count(module: Any, args: Any, named: dict[str, Any]) -> None:
        now[0] += int(named["attention_mask"].sum())

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.register_forward_pre_hook(count, with_kwargs=True)
    mean = statistics.mean(len(one["input_ids"]) for one in docs)
    settings = transformers.TrainingArguments(
        str(folder / "out"), max_steps=steps + 1, per_device_train_batch_size=8, seed=seed, use_cpu=True, report_to=[],
        gradient_accumulation_steps=max(1, round(tokens / (8 * mean))), learning_rate=1e-3, max_grad_norm=1.0,
        optim="adamw_torch_fused", lr_scheduler_type="constant", logging_strategy="no", save_strategy="no",
        disable_tqdm=True, train_sampling_strategy="group_by_length" if grouped else "random",
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=settings, train_dataset=docs, data_collator=pad, callbacks=[Clock()]
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return seen[-1][0] - seen[0][0], seen[-1][1] - seen[0][1]


def measure(folder: Path, data: Path, size: str, repeats: int, threads: int) -> None:
    name, settings, rows, steps = SIZES[size]
    path = folder / f"run-{size}.yaml"
    path.write_text(RUN_FILE.format(data=data, slots=SLOTS, rows=rows, model=settings, threads=threads))

    def trainer() -> Trainer:
        ranks = Ranks(torch.device("cpu"))
        return make_trainer(
            load_run(path), run_file=str(path), text=resolved_text(path), output=None, resume=False, ranks=ranks,
            say=print,
        )  # fmt: skip

    first = trainer()
    parameters = sum(p.numel() for p in first.model.parameters())
    exported = folder / f"llama-{size}"
    export(first.model, exported, tokenizer=ps.load_tokenizer(folder / "tokenizer"), context_length=SLOTS)
    docs = documents(data)
    tokens = next(ours(first))
    rivals: dict[str, Callable[[int], Spent]] = {
        "penstock": lambda _: turn_of_steps(ours(trainer()), steps),
        "bare": lambda _: turn_of_steps(bare(trainer()), steps),
        "padded": lambda turn: huggingface(exported, docs, steps, tokens, False, turn),
        "grouped": lambda turn: huggingface(exported, docs, steps, tokens, True, turn),
    }
    rates: dict[str, list[float]] = {rival: [] for rival in rivals}
    for turn in range(repeats):
        for rival, run in rivals.items():
            useful, seconds = run(turn)
            rates[rival].append(useful / seconds)
    medians = {rival: statistics.median(found) for rival, found in rates.items()}
    due = {"padded": 1.5, "grouped": 1.0, "bare": 0.95}
    lines = [
        ("penstock", f"{medians['penstock']:.0f} tok/s", f"{min(rates['penstock']):.0f}–{max(rates['penstock']):.0f}")
    ]
    for rival, least in due.items():
        ratio = medians["penstock"] / medians[rival]
        spread = f"{min(rates[rival]):.0f}–{max(rates[rival]):.0f}"
        lines.append((f"against {rival}", f"{ratio:.2f} ×", f"{medians[rival]:.0f} tok/s ({spread}); due {least} ×"))
    table(f"{name}: {parameters:,} parameters, {threads} thread(s), useful tokens per CPU second", lines)
    where(lambda: turn_of_steps(ours(trainer()), 1))


def where(work: Callable[[], Any]) -> None:
    """The functions that take most time of their own."""
    profile = cProfile.Profile()
    profile.runcall(work)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total = sum(own for _, _, own, _, _ in stats.values())
    top = sorted(stats.items(), key=lambda item: -item[1][2])[:8]
    for (_, _, function), (calls, _, own, _, _) in top:
        print(f"    {100 * own / total:4.0f} %  {calls:5} calls  {function[:90]}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--chats", type=Path, help="conversations, in any layout that prepare reads")
    parser.add_argument("--sizes", default="1,10", help="millions of parameters: 1, 10")
    parser.add_argument("--threads", type=int, default=1)
    parser.set_defaults(repeats=3)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        chats = flags.chats or made_up_chats(folder / "chats.jsonl")
        train_tokenizer(
            chats.read_text(encoding="utf-8").splitlines()[:2000], vocab_size=VOCABULARY, output=folder / "tokenizer",
            special_tokens=["<|im_start|>", "<|im_end|>"], progress=False,
        )  # fmt: skip
        prepare(
            chats, tokenizer=folder / "tokenizer", output=folder / "data", template="chatml", processes=1,
            progress=False,
        )  # fmt: skip
        lengths = [len(one["input_ids"]) for one in documents(folder / "data")]
        mean, median = statistics.mean(lengths), statistics.median(lengths)
        print(f"{len(lengths)} conversations of {mean:.0f} tokens, median {median:.0f}")
        for size in flags.sizes.split(","):
            measure(folder, folder / "data", size, flags.repeats, flags.threads)


if __name__ == "__main__":
    main()
