"""Tokens per CPU second of training: penstock's trainer against loops and trainers that users
choose.

    python benchmarks/bench_training.py [--tables loops,chats] [--sizes 1,10,30] [--lengths
    256,1024,2048]
        [--chats FILE] [--repeats 3] [--threads 1] [--peers PYTHON]        # a Python with trl
    python benchmarks/bench_training.py --model FOLDER --chats FILE [--repeats 5] [--threads 1]

All train the same model from the same weights in float32, with fused AdamW and clipping. CPU time
is of all threads; first steps are not counted. Rivals take turns; medians.

`loops`: text, 8 rows a step, all of `ps.train` (packing, documents kept apart, checks, metrics)
against a plain loop of the same module: rows cut anywhere, in one batch [8, T], causal attention
over the whole row, all logits at once. Both also with `torch.compile`. `of the peak`:
floating-point operations of the linear layers and the head (6 for each weight and slot; attention
is not counted) over those of a product of two 1,024 x 1,024 matrices in the same time, then the
functions in which penstock spends its time. `one row a pass`: penstock with `rows_per_pass=1`.
Tokens are slots, padding among them (under 1 % with best fit).

`chats`: conversations with loss on the assistant's words only; useful tokens, which are all but
padding. `bare`: our model, loader and loss in the shortest loop. The others train our model
exported to LlamaForCausalLM with Hugging Face's Trainer. `padded`: batches of 8 conversations
padded to the longest; `grouped`: batches of about the same length; `flattened`: 8 conversations end
to end by DataCollatorWithFlattening; `trl`: SFTTrainer with packing (bfd). Steps have about as many
useful tokens for each. At the end, where penstock's time goes.

`--chats`: conversations in any layout that `penstock prepare` reads, such as OASST trees; else they
are made up, with lengths as in OASST (log-normal, most under 500 tokens, a few far above).

`--model`: only the table `real`: a pretrained model of transformers, such as SmolLM2-135M, with its
own tokenizer and template, 2 rows of 512 a step. Besides Trainer with padding (batches of 4) and
with DataCollatorWithFlattening, `loop` is the shortest loop around transformers' model on our rows,
where documents of a row see each other. Each turn is a process of its own, whose peak memory is
shown, too.
"""

import cProfile
import json
import multiprocessing
import pstats
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from penstock.models.trained_products import product
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import penstock as ps
from common import Peer, against, arguments, standard_library, table
from penstock import open_dataset, prepare, train_tokenizer
from penstock.learn.training import Trainer
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.losses import loss
from penstock.models import ModelSettings
from penstock.models.building import build_model
from penstock.models.exporting import export
from penstock.use.config import load_run
from penstock.use.config.run_file import resolved_text
from penstock.use.config.training import make_trainer

SLOTS, VOCABULARY = 1024, 2048
SIZES = {
    "1": {"layers": 4, "width": 128, "heads": 4},
    "10": {"layers": 5, "width": 384, "heads": 6},
    "30": {"layers": 9, "width": 512, "heads": 8},
}
"""Models by millions of parameters."""
LOOP_ROWS, LOOP_VOCABULARY = 8, 4096
CHAT_ROWS, CHAT_STEPS = 4, {"1": 4, "10": 2, "30": 1}
"""Rows of a step; steps of a turn."""
REAL_SLOTS, REAL_ROWS, REAL_BATCH, REAL_STEPS = 512, 2, 4, 2
"""Slots of a row and rows of a step with a pretrained model; conversations of Trainer's batch;
steps of a turn.
"""
RUN_FILE = """\
data:
  sources: [{{path: {data}, too_long: {too_long}}}]
  loader: {{sequence_length: {slots}, rows_per_step: {rows}, seed: 1}}
model: {model}
training:
  steps: 1000
  threads: {threads}
  rows_per_pass: {rows_per_pass}
  compile: {compile}
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
            messages = [
                m for _ in range(turns) for m in (("user", cut(150)), ("assistant", cut(700)))
            ]
            file.write(
                json.dumps({"messages": [{"role": r, "content": c} for r, c in messages]}) + "\n"
            )
    return path


def documents(data: Path, slots: int = SLOTS) -> list[dict[str, list[int]]]:
    """Of each conversation what Trainer takes; its first tokens."""
    dataset = open_dataset(data)
    found = []
    for number in range(len(dataset)):
        one = dataset[number]
        tokens, weights = one.tokens[:slots].astype(np.int64), one.loss_weights[:slots]
        found.append(
            {"input_ids": tokens.tolist(), "labels": np.where(weights > 0, tokens, -100).tolist()}
        )
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


def one_step(run: Iterator[int]) -> Spent:
    """Tokens and CPU seconds of the next step of a run that goes on."""
    begun = time.process_time()
    tokens = next(run)
    return tokens, time.process_time() - begun


def ours(trainer: Trainer) -> Iterator[int]:
    before = 0
    for record in trainer.train():
        yield record["tokens"] - before
        before = record["tokens"]


def bare(trainer: Trainer) -> Iterator[int]:
    model, weights = trainer.model, list(trainer.model.parameters())
    decayed = [
        {"params": [p for p in weights if p.ndim > 1]},
        {"params": [p for p in weights if p.ndim < 2]},
    ]
    optimizer = torch.optim.AdamW(decayed, lr=0.001, betas=(0.9, 0.95), fused=True)
    for step in trainer.loader:
        for row in step:
            loss(model, row, step.loss_denominator).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step.num_tokens


def make(folder: Path, data: Path, size: str, threads: int, **options: Any) -> Trainer:
    """A trainer as `penstock train` makes it; options are those of `RUN_FILE`."""
    given = {
        "model": json.dumps(SIZES.get(size, f"hf:{size}")),
        "slots": SLOTS,
        "rows": CHAT_ROWS,
        "too_long": "truncate",
        "rows_per_pass": "null",
        "compile": "false",
        **options,
    }
    path = folder / "run.yaml"
    path.write_text(RUN_FILE.format(data=data, threads=threads, **given))
    return make_trainer(
        load_run(path), run_file=str(path), text=resolved_text(path), output=None, resume=False,
        ranks=Ranks(torch.device("cpu")), say=lambda _: None,
    )  # fmt: skip


def plain_loop(tokens: np.ndarray, size: str, slots: int, compiled: bool) -> Iterator[int]:
    """What a first script does: a batch of rows cut anywhere, causal attention, the mean of all
    cross entropies.
    """
    model = build_model(ModelSettings(**SIZES[size]), vocab_size=LOOP_VOCABULARY)
    for block in model.blocks if compiled else ():
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, betas=(0.9, 0.95), fused=True)
    chance, positions = np.random.default_rng(1), torch.arange(slots).expand(LOOP_ROWS, slots)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    while True:
        starts = chance.integers(0, len(tokens) - slots - 1, LOOP_ROWS)
        inputs, targets = (
            torch.stack(
                [
                    torch.from_numpy(tokens[i + shift : i + shift + slots].astype(np.int64))
                    for i in starts
                ]
            )
            for shift in (0, 1)
        )
        logits = model.logits(model.run(inputs, positions, attend)[0])
        cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield LOOP_ROWS * slots


def slots_of(trainer: Trainer) -> Iterator[int]:
    """The steps of a run, each with its slots."""
    for _ in trainer.train():
        yield trainer.loader.settings.rows_per_step * trainer.loader.settings.sequence_length


def loops(folder: Path, sizes: list[str], lengths: list[int], repeats: int, threads: int) -> None:
    """The table `loops`."""
    texts = cut(standard_library(12_000_000))
    lines = folder / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    train_tokenizer(
        texts[:400], vocab_size=LOOP_VOCABULARY, output=folder / "tokenizer", progress=False
    )
    prepare(
        lines, tokenizer=folder / "tokenizer", output=folder / "data", processes=1, progress=False
    )
    dataset = open_dataset(folder / "data")
    tokens = np.concatenate([dataset[number].tokens for number in range(len(dataset))])
    for size in sizes:
        for slots in lengths:
            options = {"slots": slots, "rows": LOOP_ROWS, "too_long": "split"}

            def run(
                options: dict[str, Any] = options, size: str = size, **more: Any
            ) -> Iterator[int]:
                return slots_of(make(folder, folder / "data", size, threads, **options, **more))

            runs = {
                "penstock": run(),
                "one row a pass": run(rows_per_pass=1),
                "plain loop": plain_loop(tokens, size, slots, compiled=False),
                "penstock, compiled": run(compile="true"),
                "plain loop, compiled": plain_loop(tokens, size, slots, compiled=True),
            }
            for each in (*runs.values(), *runs.values()):
                next(each)
            rates = rates_of(
                {name: lambda run=run: one_step(run) for name, run in runs.items()}, repeats
            )
            for each in runs.values():
                each.close()  # type: ignore[attr-defined]
            title = (
                f"{size} M parameters, rows of {slots}, {threads} thread(s): slots per CPU second"
            )
            report(title, rates, LOOP_GOALS)
            peak, needed = peak_operations(), 6 * linear_weights(size)
            for name in ("penstock", "plain loop"):
                print(
                    f"    {name}: {100 * needed * statistics.median(rates[name]) / peak:.0f} "
                    "% of the peak"
                )
            where(lambda run=run: turn_of_steps(run(), 1))


LOOP_GOALS = {
    "one row a pass": ("penstock", 1.0),
    "plain loop": ("penstock", 1.0),
    "plain loop, compiled": ("penstock, compiled", 1.0),
}
CHAT_GOALS = {
    "bare": ("penstock", 0.95), "padded": ("penstock", 1.5), "grouped": ("penstock", 1.0),
    "flattened": ("penstock", 1.0), "trl": ("penstock", 1.0),
}  # fmt: skip
REAL_GOALS = {
    "penstock": ("penstock", 0.0), "loop": ("penstock", 1.0),
    "padded": ("penstock", 1.5), "flattened": ("penstock", 1.5),
}  # fmt: skip
"""Rival → which of ours it is compared with, and the ratio that we want."""


def peak_operations() -> float:
    """Floating-point operations a CPU second of a large matrix product, by the faster of torch and
    what training takes.
    """
    one, best = torch.rand(1024, 1024), 0.0
    for multiply in (torch.mm, product):
        found = []
        for _ in range(9):
            begun = time.process_time()
            multiply(one, one)
            found.append(2 * 1024**3 / (time.process_time() - begun))
        best = max(best, statistics.median(found))
    return best


def linear_weights(size: str) -> int:
    """Weights of the linear layers and of the head, which is the embedding."""
    model = build_model(ModelSettings(**SIZES[size]), vocab_size=LOOP_VOCABULARY)
    return sum(weight.numel() for weight in model.parameters() if weight.ndim == 2)


def cut(texts: list[str]) -> list[str]:
    """The texts end to end, cut into documents whose lengths are log-normal, about 775 tokens on
    average.
    """
    whole, chance, found = "".join(texts), random.Random(0), []
    at = 0
    while at < len(whole):
        size = min(int(chance.lognormvariate(np.log(2600) - 0.5, 1.0)), 60_000) + 2
        found.append(whole[at : at + size])
        at += size
    return found


def rates_of(rivals: dict[str, Callable[[], Spent]], repeats: int) -> dict[str, list[float]]:
    """Tokens a CPU second of each rival in each turn."""
    rates: dict[str, list[float]] = {rival: [] for rival in rivals}
    for _ in range(repeats):
        for rival, run in rivals.items():
            useful, seconds = run()
            rates[rival].append(useful / seconds)
    return rates


def report(title: str, rates: dict[str, list[float]], goals: dict[str, tuple[str, float]]) -> None:
    """A line for each rival: its rate, and ours over it."""
    medians = {rival: statistics.median(found) for rival, found in rates.items()}
    lines = []
    for rival, found in rates.items():
        ours, goal = goals.get(rival, (rival, 0.0))
        note = f"{min(found):.0f} to {max(found):.0f}"
        if goal:
            note += f"; {ours} is {medians[ours] / medians[rival]:.2f} × this (goal: {goal})"
            against(
                "Training",
                f"{title}, {ours}",
                rival,
                ours=1 / medians[ours],
                theirs=1 / medians[rival],
            )
        lines.append((rival, f"{medians[rival]:.0f} tok/s", note))
    table(title, lines)


def huggingface(
    folder: Path, docs: list[Any], steps: int, tokens: int, kind: str, batch: int = 8
) -> Spent:
    """A run of Trainer, with as many batches a step as give about so many useful tokens."""
    import transformers

    seen: list[tuple[int, float]] = []
    now = [0]

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append((now[0], time.process_time()))

    def count(module: Any, args: Any, named: dict[str, Any]) -> None:
        mask = named.get("attention_mask")
        now[0] += int(named["input_ids"].numel() if mask is None else mask.sum())

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.register_forward_pre_hook(count, with_kwargs=True)
    mean = statistics.mean(len(one["input_ids"]) for one in docs)
    settings = transformers.TrainingArguments(
        str(Path(tempfile.gettempdir()) / "penstock-bench-trainer"),
        max_steps=steps + 1,
        per_device_train_batch_size=batch,
        use_cpu=True,
        report_to=[],
        seed=random.randrange(1000),
        gradient_accumulation_steps=max(1, round(tokens / (batch * mean))),
        learning_rate=1e-3,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="group_by_length" if kind == "grouped" else "random",
    )
    collator = transformers.DataCollatorWithFlattening() if kind == "flattened" else pad
    trainer = transformers.Trainer(
        model=model, args=settings, train_dataset=docs, data_collator=collator, callbacks=[Clock()]
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return seen[-1][0] - seen[0][0], seen[-1][1] - seen[0][1]


def chats(
    folder: Path,
    given: Path | None,
    sizes: list[str],
    repeats: int,
    threads: int,
    peers: str | None,
) -> None:
    """The table `chats`."""
    path = given or made_up_chats(folder / "chats.jsonl")
    train_tokenizer(
        path.read_text(encoding="utf-8").splitlines()[:2000],
        vocab_size=VOCABULARY,
        output=folder / "tokenizer",
        special_tokens=["<|im_start|>", "<|im_end|>"],
        progress=False,
    )
    data = folder / "data"
    prepare(
        path,
        tokenizer=folder / "tokenizer",
        output=data,
        template="chatml",
        processes=1,
        progress=False,
    )
    docs = documents(data)
    lengths = [len(one["input_ids"]) for one in docs]
    mean, median = statistics.mean(lengths), statistics.median(lengths)
    print(f"{len(lengths)} conversations of {mean:.0f} tokens, median {median:.0f}")
    (folder / "docs.json").write_text(json.dumps(docs))
    for size in sizes:
        steps = CHAT_STEPS[size]
        first = make(folder, data, size, threads)
        exported = folder / f"llama-{size}"
        export(
            first.model,
            exported,
            tokenizer=ps.load_tokenizer(folder / "tokenizer"),
            context_length=SLOTS,
        )
        tokens = next(ours(first))

        def trainer(size: str = size) -> Trainer:
            return make(folder, data, size, threads)

        rivals: dict[str, Callable[[], Spent]] = {
            "penstock": lambda steps=steps: turn_of_steps(ours(trainer()), steps),
            "bare": lambda steps=steps: turn_of_steps(bare(trainer()), steps),
        }
        for kind in ("padded", "grouped", "flattened"):
            rivals[kind] = lambda kind=kind, tokens=tokens, exported=exported, steps=steps: (
                huggingface(exported, docs, steps, tokens, kind)
            )
        if peers:
            peer = Peer(
                peers,
                "trl_training.py",
                str(exported),
                str(folder / "docs.json"),
                str(SLOTS),
                str(CHAT_ROWS),
                str(steps),
                str(threads),
            )
            rivals["trl"] = lambda peer=peer: _spent(peer)
        rates = rates_of(rivals, repeats)
        report(
            f"{size} M parameters, {threads} thread(s), useful tokens per CPU second",
            rates,
            CHAT_GOALS,
        )
        where(lambda: turn_of_steps(ours(trainer()), 1))


def real(folder: Path, model: Path, given: Path, repeats: int, threads: int) -> None:
    """The table `real`."""
    data = folder / "data"
    prepare(
        given,
        tokenizer=model,
        output=data,
        template="auto",
        on_error="skip",
        processes=1,
        progress=False,
    )
    rates: dict[str, list[float]] = {}
    peaks: dict[str, list[float]] = {}
    for _ in range(repeats):
        for kind in REAL_GOALS:
            # A process of its own for each turn: nothing is left of another's memory.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                found = pool.submit(turn_of_real, kind, folder, data, model, threads).result()
            print(f"  {kind}: {found[0] / found[1]:.1f} tok/s", flush=True)
            rates.setdefault(kind, []).append(found[0] / found[1])
            peaks.setdefault(kind, []).append(found[2])
    title = f"{model.name}, {threads} thread(s), useful tokens per CPU second"
    report(title, rates, {kind: goal for kind, goal in REAL_GOALS.items() if goal[1]})
    lines = [
        (kind, f"{statistics.median(found) / 1e9:.2f} GB", "") for kind, found in peaks.items()
    ]
    table("Peak memory", lines)


def turn_of_real(
    kind: str, folder: Path, data: Path, model: Path, threads: int
) -> tuple[int, float, int]:
    """Useful tokens, CPU seconds and the process's peak memory in bytes, of one turn."""
    torch.set_num_threads(threads)
    options = {"slots": REAL_SLOTS, "rows": REAL_ROWS}
    if kind in ("padded", "flattened"):
        docs, tokens = documents(data, REAL_SLOTS), REAL_ROWS * REAL_SLOTS
        tokens, seconds = huggingface(model, docs, REAL_STEPS, tokens, kind, batch=REAL_BATCH)
    else:
        trainer = make(folder, data, str(model), threads, **options)
        run = ours(trainer) if kind == "penstock" else their_loop(trainer, model)
        tokens, seconds = turn_of_steps(run, REAL_STEPS)
        run.close()  # type: ignore[attr-defined]
    return tokens, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def their_loop(trainer: Trainer, model: Path) -> Iterator[int]:
    """Rows of our loader through transformers' model, without borders between documents; all
    logits, and the mean of all cross entropies.
    """
    import transformers

    loader = trainer.loader
    del trainer
    inner = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=0.001, betas=(0.9, 0.95), fused=True)
    for step in loader:
        fields = step.torch()
        logits = inner(fields["tokens"], use_cache=False).logits
        cross_entropy(logits.flatten(0, 1), fields["targets"].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(inner.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step.num_tokens


def _spent(peer: Peer) -> Spent:
    seconds = peer()
    return int(peer.last["tokens"]), seconds


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
    parser.add_argument("--tables", default="loops,chats")
    parser.add_argument("--sizes", default="1,10,30", help="millions of parameters")
    parser.add_argument("--lengths", default="256,1024,2048", help="loops: slots of a row")
    parser.add_argument(
        "--chats", type=Path, help="conversations, in any layout that prepare reads"
    )
    parser.add_argument("--model", type=Path, help="a folder of transformers: the table `real`")
    parser.add_argument("--threads", type=int, default=1)
    parser.set_defaults(repeats=3)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    sizes = flags.sizes.split(",")
    if flags.model is not None:
        with tempfile.TemporaryDirectory() as scratch:
            chats_of = flags.chats or made_up_chats(Path(scratch) / "chats.jsonl")
            real(Path(scratch), flags.model, chats_of, flags.repeats, flags.threads)
        return
    for name in flags.tables.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            if name == "loops":
                loops(
                    Path(scratch),
                    sizes,
                    [int(n) for n in flags.lengths.split(",")],
                    flags.repeats,
                    flags.threads,
                )
            else:
                chats(Path(scratch), flags.chats, sizes, flags.repeats, flags.threads, flags.peers)


if __name__ == "__main__":
    main()
