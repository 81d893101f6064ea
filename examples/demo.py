"""From text to a small model that you can chat with, on two cores, in a few minutes: `make demo
[SOURCE=path]`.

Text that every Python machine has (the standard library's functions and documentation strings), or
your own, becomes a tokenizer, datasets, packed rows, and a transformer that trains on them.
Half-way it is given up, as by a kill; a new trainer goes on from the checkpoint, and what it does
is compared with an uninterrupted run, to the last bit.

Then chats about the standard library become a dataset in which only the assistant's words are
trained, with a proof for each. A second run starts with the weights of the first and learns to
answer; it is exported, answers a few questions, and a page shows what it saw, token by token.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import time
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean, median
from typing import Any

import numpy as np
import yaml
from demo_chats import CONTROL_TOKENS, conversations, modules_of
from demo_text import CODE_BYTES, definitions, standard_library

import penstock as ps
from penstock import train_tokenizer
from penstock.use.config import load_run, make_loader
from penstock.use.inspection import Style, make_console, row_view, view_rows

FOLDER = Path(".demo")
VOCAB_SIZE = 2048
LOADER = {"sequence_length": 256, "rows_per_step": 4, "seed": 7}
MODEL = {"layers": 4, "width": 128, "heads": 4}
TRAINING_SECONDS = 80.0
"""Aim; the number of steps follows from the speed of this machine."""
STEPS = (100, 1000)
"""Least and most."""
CHAT_SECONDS = 50.0
"""The same for learning from chats."""
CHAT_STEPS = (60, 500)
REPEATED = 3
"""Steps after the checkpoint that are lost, and done again."""
CHAT_TEMPLATE = Path(__file__).with_name("chat.jinja")
CHAT_LENGTHS = {"max_tokens": LOADER["sequence_length"], "too_long": "drop"}
QUESTIONS = (("What does shutil.copy do?", "And its arguments?"), ("What does json.dumps do?",))
"""Of two chats; it has not seen longer ones."""
LINES = 16
"""Lines of a loss chart, about."""
BAR = 48
"""Characters of a bar that stands for the loss of guessing, ln(VOCAB_SIZE)."""


def main() -> None:
    """Run the demo from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="a text file, JSONL file or folder of your own")
    parser.add_argument(
        "--seconds", type=float, default=TRAINING_SECONDS, help="aim for the time of training"
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    # Threads that wait without spinning: on a machine that does other work besides, several times
    # as fast.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    sources = prepare_own(arguments.source) if arguments.source else prepare_python()
    show_row(sources)
    step_seconds, threads = train(sources, arguments.seconds)
    write_some("The " if arguments.source else "def ")
    prepare_chats()
    fine_tune(step_seconds, threads)
    answer(threads)
    page = write_page()
    print(
        f"\nAll of it took {time.monotonic() - began:.0f} s; what was made is in {FOLDER}/. "
        "To go on:\n"
    )
    command = Path(".venv/bin/penstock")
    print(f"  {command} chat {FOLDER / 'chat'}            chat with the model yourself")
    print(f"  {command} plot {FOLDER / 'run'} {FOLDER / 'chat'}  draw both runs' curves")
    print(f"  {command} inspect {sources[0]['path']}         look at a dataset")
    print(f"\nThe chats, token by token, with any browser: {page.resolve()}")


# -- text to datasets
# --------------------------------------------------------------------------------------------------


def prepare_python() -> list[dict[str, Any]]:
    """The standard library: its functions are one dataset, their documentation strings another."""
    title("Text: the standard library of this Python")
    modules = list(standard_library())
    code, docs = FOLDER / "code.jsonl", FOLDER / "docs.jsonl"
    with (
        code.open("w", encoding="utf-8") as code_file,
        docs.open("w", encoding="utf-8") as docs_file,
    ):
        for text in topics.values():
            docs_file.write(json.dumps({"text": text}) + "\n")
        for path in modules:
            for kind, text in definitions(path.read_text(encoding="utf-8")):
                file = code_file if kind == "code" else docs_file
                file.write(json.dumps({"text": text, "module": path.stem}) + "\n")
    print(
        f"{len(modules)} modules: {size(code)} of functions, {size(docs)} of documentation strings"
    )
    title("A tokenizer, trained on both")
    make_tokenizer(
        [json.loads(line)["text"] for path in (code, docs) for line in path.open(encoding="utf-8")]
    )
    title("Two datasets")
    for path in (code, docs):
        ps.prepare(str(path), tokenizer=FOLDER / "tokenizer", output=FOLDER / path.stem)
    return [
        {"path": str(FOLDER / "code"), "share": 0.7},
        {"path": str(FOLDER / "docs"), "share": 0.3},
    ]


def prepare_own(source: Path) -> list[dict[str, Any]]:
    """The user's text, whatever format it is in."""
    from penstock.data.sources import open_sources

    title(f"Text: {source}")
    separator = "\n\n" if source.suffix in {".txt", ".md"} else None
    texts: list[str] = []
    taken = 0
    for part in open_sources([str(source)], separator=separator):
        for block in part.blocks():
            texts += block.texts.to_pylist()
            taken += block.size_bytes
        if taken > CODE_BYTES:
            break
    title(f"A tokenizer, trained on {taken / 1e6:.1f} MB of it")
    make_tokenizer(texts)
    title("A dataset")
    ps.prepare(
        str(source), tokenizer=FOLDER / "tokenizer", output=FOLDER / "own", separator=separator
    )
    return [{"path": str(FOLDER / "own")}]


def make_tokenizer(texts: list[str]) -> None:
    """Train a byte-level BPE and save it in a form that transformers loads."""
    tokenizer = train_tokenizer(
        texts, vocab_size=VOCAB_SIZE, output=FOLDER / "tokenizer", special_tokens=CONTROL_TOKENS
    )
    sample = texts[0][:60]
    ids = tokenizer.encode(sample)
    print(
        f"{tokenizer.vocab_size} tokens; {sample[:24]!r} becomes "
        f"{tokenizer.encode(sample[:24]).tolist()[:8]} …"
    )
    assert tokenizer.decode(ids) == sample


# -- run files
# --------------------------------------------------------------------------------------------------


def write_run_file(name: str, sources: list[dict[str, Any]], **sections: Any) -> Path:
    """A run file as one writes it by hand; the same file always gives the same rows."""
    path = FOLDER / f"{name}.yaml"
    sections = {"data": {"sources": sources, "loader": LOADER}, **sections}
    path.write_text(yaml.safe_dump(sections, sort_keys=False), encoding="utf-8")
    return path


def training(steps: int, threads: int, *, learning_rate: float, every: int) -> dict[str, Any]:
    """The section `training` of a run file."""
    return {
        "steps": steps,
        "threads": threads,
        "device": "cpu",
        "optimizer": {"learning_rate": learning_rate},
        "schedule": {"shape": "cosine", "warmup_steps": 20},
        "checkpoints": {"every": every},
    }


def show_row(sources: list[dict[str, Any]]) -> None:
    """One packed row, as the model will get it."""
    title("A packed row, as it will be trained")
    console = make_console()
    style = Style(console)
    views = view_rows(
        make_loader(load_run(write_run_file("run", sources)).data),
        0,
        list(range(LOADER["rows_per_step"])),
        lambda dataset: ps.load_tokenizer(FOLDER / "tokenizer"),
    )
    console.print(row_view(max(views, key=lambda view: len(view.documents)), style, 50))
    console.print(style.legend())


# -- rows to a model
# --------------------------------------------------------------------------------------------------


def train(sources: list[dict[str, Any]], seconds: float) -> tuple[float, int]:
    """Train a small transformer, give it up half-way, go on, and compare; (seconds of a step,
    threads).
    """
    title("A small transformer learns")
    step_seconds, threads = measure(write_run_file("run", sources))
    steps = min(STEPS[1], max(STEPS[0], int(seconds / step_seconds)))
    half = steps // 2
    run_file = write_run_file(
        "run",
        sources,
        model=MODEL,
        training=training(steps, threads, learning_rate=4e-3, every=half),
    )
    digests, counts = uninterrupted(run_file, steps)
    unigram = unigram_loss(counts)
    print(
        f"as by `penstock train {run_file} --output {FOLDER / 'run'}`: {steps} steps, "
        f"{counts.sum():,} targets"
    )
    print(f"Loss in nats per token; │ is a unigram model of these very targets: {unigram:.2f}\n")
    chart = Chart(steps, unigram)
    first = train_part(run_file, chart, until=half + REPEATED)
    print(
        f"           given up after step {half + REPEATED}; a new trainer goes on from the "
        f"checkpoint of step {half}"
    )
    second = train_part(run_file, chart, resume=True)
    lost, again = first.figures[half:], second.figures[:REPEATED]
    rows = half * LOADER["rows_per_step"]
    same = lost == again and first.digests[:rows] + second.digests == digests
    begin, end = fmean(chart.losses[:5]), fmean(chart.losses[-20:])
    print(
        f"\nLoss fell from {begin:.2f} to {end:.2f} nats per token; a unigram model has "
        f"{unigram:.2f}"
    )
    print(
        "Rows, and losses of the steps that were done twice: "
        f"{'the same to the last bit' if same else 'DIFFERENT'}"
    )
    print(f"  step {half + 1}: {lost[0][0]!r} before, {again[0][0]!r} after")
    if not same:
        raise SystemExit(
            "what was trained after the restart is not what an uninterrupted run trains"
        )
    return second.step_seconds, threads


def measure(run_file: Path) -> tuple[float, int]:
    """(seconds of a step, threads) on this machine: two, or one where other work leaves no second
    core.
    """
    import torch

    from penstock.learn.training import row_loss
    from penstock.models import ModelSettings
    from penstock.models.building import build_model

    model = build_model(ModelSettings(**MODEL), vocab_size=VOCAB_SIZE)
    steps = iter(make_loader(load_run(run_file).data, requirements=model.requirements()))
    found: list[tuple[float, int]] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        times: list[float] = []
        for step in islice(steps, 6):
            began = time.monotonic()
            for row in step:
                row_loss(model, row, step.loss_denominators).loss.backward()
            times.append(time.monotonic() - began)
        found.append((median(times), threads))
    return min(found)


def uninterrupted(run_file: Path, steps: int) -> tuple[list[str], np.ndarray[Any, Any]]:
    """Digests of the rows of a run that nothing stops, and how often each token is a target in
    it.
    """
    digests, counts = [], np.zeros(VOCAB_SIZE, np.int64)
    for step in make_loader(load_run(run_file).data):
        if step.index == steps:
            break
        for row in step:
            digests.append(digest(row.tokens))
            targets = row.targets[0]
            counts += np.bincount(targets[targets >= 0], minlength=VOCAB_SIZE)
    return digests, counts


class Part:
    """What a trainer did: digests of its rows, (loss, gradient norm) of its steps, and the usual
    seconds of one.
    """

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.figures: list[tuple[float, float]] = []
        self.seconds: list[float] = []

    @property
    def step_seconds(self) -> float:
        """Of the step in the middle."""
        return median(self.seconds)


def train_part(
    run_file: Path, chart: "Chart", *, resume: bool = False, until: int | None = None
) -> Part:
    """Train as the run file says, from the newest checkpoint when resuming; given up after step
    `until`.
    """
    import torch

    from penstock.learn.training.distributed import Ranks
    from penstock.learn.training.metrics import Metrics
    from penstock.use.config.run_file import resolved_text
    from penstock.use.config.training import make_trainer

    output = FOLDER / run_file.stem
    trainer = make_trainer(
        load_run(run_file),
        run_file=str(run_file),
        text=resolved_text(run_file),
        output=output,
        resume=resume,
        ranks=Ranks(torch.device("cpu")),
        say=lambda sentence: None,
    )
    part, done = Part(), trainer.loader.step
    trainer.model.register_forward_pre_hook(
        lambda model, given: part.digests.extend(row_digests(given[0].tokens))
    )
    with Metrics(output, total_steps=trainer.steps, done=done) as metrics:
        for record in trainer.train():
            metrics.see(record)
            chart.add(record["step"], record["loss"])
            part.figures.append((record["loss"], record["gradient_norm"]))
            part.seconds.append(record["seconds"])
            if record["step"] == until:
                break
    return part


class Chart:
    """Prints the loss as bars while it comes."""

    def __init__(self, steps: int, unigram: float | None = None) -> None:
        self.every, self.unigram = max(1, steps // LINES), unigram
        self.losses: list[float] = []

    def add(self, step: int, loss: float) -> None:
        """One step's loss, in place of what it had before it was lost; now and then a line with the
        average.
        """
        again = step <= len(self.losses)
        self.losses[step - 1 :] = [loss]
        if step % self.every == 0 and not again:
            recent = fmean(self.losses[-self.every :])
            cells = [*("█" * round(BAR * recent / math.log(VOCAB_SIZE))).ljust(BAR)]
            if self.unigram is not None:
                cells[min(BAR - 1, round(BAR * self.unigram / math.log(VOCAB_SIZE)))] = "│"
            print(f"step {step:4}  {recent:5.2f}  {''.join(cells)}".rstrip(), flush=True)


def write_some(prompt: str) -> None:
    """Some text in the model's words."""
    title("What it writes")
    written = ps.open_run(FOLDER / "run").stream(
        prompt, temperature=0.7, top_k=40, min_tokens=60, max_tokens=60
    )
    print(prompt, end="")
    for piece in written:
        print(piece, end="", flush=True)
    print()


# -- chats
# --------------------------------------------------------------------------------------------------


def prepare_chats() -> None:
    """Conversations about the standard library as a dataset that trains the assistant's words
    alone.
    """
    title("Chats: questions about the standard library, its documentation as the answers")
    raw = FOLDER / "chats.jsonl"
    with raw.open("w", encoding="utf-8") as file:
        for record in conversations(modules_of(standard_library())):
            file.write(json.dumps(record) + "\n")
    chats = ps.prepare(
        str(raw),
        tokenizer=FOLDER / "tokenizer",
        template=CHAT_TEMPLATE,
        output=FOLDER / "chats",
        **CHAT_LENGTHS,
    )
    print(chats.report)


def fine_tune(step_seconds: float, threads: int) -> None:
    """A second run starts with the weights of the first; its loss is that of the assistant's words
    alone.
    """
    title("The model learns to answer")
    steps = min(CHAT_STEPS[1], max(CHAT_STEPS[0], int(CHAT_SECONDS / step_seconds)))
    run_file = write_run_file(
        "chat",
        [{"path": str(FOLDER / "chats")}],
        model=f"from:{FOLDER / 'run'}",
        training=training(steps, threads, learning_rate=2e-3, every=steps),
    )
    print(
        f"as by `penstock train {run_file} --output {FOLDER / 'chat'}`, from the weights of "
        f"{FOLDER / 'run'}"
    )
    print(
        "Loss in nats per token that is trained: the assistant's words, calls, and where it stops\n"
    )
    chart = Chart(steps)
    train_part(run_file, chart)
    print(
        f"\nLoss of the assistant's words fell from {fmean(chart.losses[:5]):.2f} to "
        f"{fmean(chart.losses[-5:]):.2f}"
    )


def answer(threads: int) -> None:
    """Export the model, load what was exported, and ask it."""
    from penstock.use.cli.chat import Wrapping

    title("It is exported for transformers, vLLM and llama.cpp, and answers")
    ps.open_run(FOLDER / "chat").export(FOLDER / "exported")
    exported = ps.open_run(FOLDER / "exported")
    for questions in QUESTIONS:
        session = exported.session(
            temperature=0.2, top_k=40, max_tokens=48, device="cpu", threads=threads
        )
        for question in questions:
            print(f"\n  you › {question}\nmodel › ", end="", flush=True)
            wrapping = Wrapping(shutil.get_terminal_size().columns, len("model › "))
            for piece in session.reply(question):
                print(wrapping.push(piece), end="", flush=True)
            print(wrapping.finish())


def write_page() -> Path:
    """A page of what the model saw: conversations with their proofs, and packed rows."""
    from penstock.data.prepare import ChatSettings
    from penstock.use.inspection.conversation_views import page_of_conversations
    from penstock.use.inspection.conversations import sample_records, show_conversations
    from penstock.use.inspection.page import write_html

    title("What it saw, as a page")
    tokenizer = ps.load_tokenizer(FOLDER / "tokenizer")
    shown = show_conversations(
        sample_records(str(FOLDER / "chats.jsonl"), 500),
        tokenizer,
        ChatSettings(template=CHAT_TEMPLATE).merge(CHAT_LENGTHS),
    )
    loader = make_loader(load_run(FOLDER / "chat.yaml").data)
    rows = view_rows(
        loader, 0, list(range(LOADER["rows_per_step"])), lambda dataset: tokenizer, lines=True
    )
    page = FOLDER / "chats.html"
    write_html(page, page_of_conversations("Chats about the standard library", shown, rows=rows))
    print(f"{len(shown.documents)} conversations and {len(rows)} packed rows, {size(page)}")
    return page


def digest(tokens: Any) -> str:
    """A short digest of token ids, whatever their integer type and shape."""
    return hashlib.sha256(np.ascontiguousarray(tokens, np.int64).tobytes()).hexdigest()[:12]


def row_digests(tokens: Any) -> list[str]:
    """Of one pass of the model, which takes several rows, one after another."""
    return [digest(row) for row in tokens.numpy().reshape(-1, LOADER["sequence_length"])]


def unigram_loss(counts: np.ndarray[Any, Any]) -> float:
    """Nats per token of always predicting each token's frequency: what a model without context can
    reach at best.
    """
    rates = counts[counts > 0] / counts.sum()
    return float(-(rates * np.log(rates)).sum())


def size(path: Path) -> str:
    """Size of a file, in megabytes."""
    return f"{path.stat().st_size / 1e6:.1f} MB"


def title(text: str) -> None:
    """A heading with the next number."""
    print(
        f"\n── {next(NUMBERS)}  {text} ".ljust(min(100, shutil.get_terminal_size().columns), "─"),
        flush=True,
    )


NUMBERS = iter(range(1, 100))

if __name__ == "__main__":
    main()
