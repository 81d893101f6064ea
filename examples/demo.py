"""From text to a small model that learns to answer, on two cores, in a few minutes: `make demo [SOURCE=path]`.

Text that every Python machine has (the standard library's functions and documentation strings), or your own, becomes
a tokenizer, datasets, packed rows, and a small Llama of transformers that trains on them. Half-way it stops; a new
model and a new loader go on from the checkpoint, and the batches are compared with those of an uninterrupted run.

Then chats about the standard library become a dataset in which only the assistant's words are trained, with a proof for
each; the model learns from them, answers a question, and a page shows what it saw, token by token.
"""

import argparse
import ast
import hashlib
import json
import math
import os
import shutil
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from demo_chats import CONTROL_TOKENS, conversations, modules_of

import penstock as ps
from penstock.inspection import Style, make_console, row_view, view_rows
from penstock.tokenizers import train_tokenizer

FOLDER = Path(".demo")
VOCAB_SIZE = 2048
SEQUENCE_LENGTH = 256
ROWS_PER_STEP = 8
SEED = 7
CODE_BYTES = 6_000_000
"""Of the standard library's sources, at most."""
TRAINING_SECONDS = 80.0
"""Aim; the number of steps follows from the speed of this machine."""
STEPS = (80, 600)
"""Least and most."""
CHAT_SECONDS = 25.0
"""The same for learning from chats."""
CHAT_STEPS = (30, 200)
CHAT_TEMPLATE = Path(__file__).with_name("chat.jinja")
CHAT_LENGTHS = {"max_tokens": SEQUENCE_LENGTH, "too_long": "drop"}
LINES = 20
"""Lines of the loss chart, about."""
BAR = 48
"""Characters of a bar that stands for the loss of guessing, ln(VOCAB_SIZE)."""
THREADS = 2


def main() -> None:
    """Run the demo from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="a text file, JSONL file or folder of your own")
    parser.add_argument("--seconds", type=float, default=TRAINING_SECONDS, help="aim for the time of training")
    arguments = parser.parse_args()
    began = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    mixture = prepare_own(arguments.source) if arguments.source else prepare_python()
    show_row(mixture)
    model = train(mixture, arguments.seconds, prompt="The " if arguments.source else "def ")
    chats = prepare_chats()
    fine_tune(model, chats, CHAT_SECONDS)
    page = write_page(chats)
    print(f"\nAll of it took {time.monotonic() - began:.0f} s. What was made is in {FOLDER}/: look at a dataset with")
    print(f"  {Path('.venv/bin/penstock')} inspect {mixture.sources[0].path}")
    print("and at the chats, token by token, with any browser:")
    print(f"  {page.resolve()}")


# -- text to datasets --------------------------------------------------------------------------------------------------


def prepare_python() -> Any:
    """The standard library: its functions are one dataset, their documentation strings another."""
    title("1  Text: the standard library of this Python")
    modules = list(standard_library())
    code, docs = FOLDER / "code.jsonl", FOLDER / "docs.jsonl"
    with code.open("w", encoding="utf-8") as code_file, docs.open("w", encoding="utf-8") as docs_file:
        for text in topics.values():
            docs_file.write(json.dumps({"text": text}) + "\n")
        for path in modules:
            for kind, text in definitions(path.read_text(encoding="utf-8")):
                file = code_file if kind == "code" else docs_file
                file.write(json.dumps({"text": text, "module": path.stem}) + "\n")
    print(f"{len(modules)} modules: {size(code)} of functions, {size(docs)} of documentation strings")
    title("2  A tokenizer, trained on both")
    make_tokenizer([json.loads(line)["text"] for path in (code, docs) for line in path.open(encoding="utf-8")])
    title("3  Two datasets")
    for path in (code, docs):
        ps.prepare(str(path), tokenizer=FOLDER / "tokenizer", output=FOLDER / path.stem)
    return ps.Mixture([ps.Source(FOLDER / "code", share=0.7), ps.Source(FOLDER / "docs", share=0.3)])


def prepare_own(source: Path) -> Any:
    """The user's text, whatever format it is in."""
    from penstock.sources import open_sources

    title(f"1  Text: {source}")
    separator = "\n\n" if source.suffix in {".txt", ".md"} else None
    texts: list[str] = []
    taken = 0
    for part in open_sources([str(source)], separator=separator):
        for block in part.blocks():
            texts += block.texts.to_pylist()
            taken += block.size_bytes
        if taken > CODE_BYTES:
            break
    title(f"2  A tokenizer, trained on {taken / 1e6:.1f} MB of it")
    make_tokenizer(texts)
    title("3  A dataset")
    ps.prepare(str(source), tokenizer=FOLDER / "tokenizer", output=FOLDER / "own", separator=separator)
    return ps.Mixture([ps.Source(FOLDER / "own")])


def standard_library() -> Iterator[Path]:
    """Modules of the standard library without its tests, in an order that depends on their names alone."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    paths = [path for path in root.rglob("*.py") if not left_out.intersection(path.relative_to(root).parts)]
    paths.sort(key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest())
    total = 0
    for path in paths:
        total += path.stat().st_size
        if total > CODE_BYTES:
            return
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if path.stat().st_size:
            yield path


def definitions(source: str) -> Iterator[tuple[str, str]]:
    """("code", text) of every function of a module, and ("docs", text) of documentation strings."""
    lines = source.splitlines(keepends=True)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and len(text := ast.get_docstring(node) or "") > 80:
            yield "docs", text
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (node.end_lineno or 0) - node.lineno >= 3:
            yield "code", textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))


def make_tokenizer(texts: list[str]) -> None:
    """Train a byte-level BPE and save it in a form that transformers loads."""
    tokenizer = train_tokenizer(
        texts, vocab_size=VOCAB_SIZE, output=FOLDER / "tokenizer", special_tokens=CONTROL_TOKENS
    )
    sample = texts[0][:60]
    ids = tokenizer.encode(sample)
    print(f"{tokenizer.vocab_size} tokens; {sample[:24]!r} becomes {tokenizer.encode(sample[:24]).tolist()[:8]} …")
    assert tokenizer.decode(ids) == sample


# -- datasets to rows --------------------------------------------------------------------------------------------------


def make_loader(mixture: Any) -> Any:
    """The loader of this demo: the same arguments give the same rows."""
    return ps.Loader(mixture, sequence_length=SEQUENCE_LENGTH, rows_per_step=ROWS_PER_STEP, seed=SEED)


def show_row(mixture: Any) -> None:
    """One packed row, as the model will get it."""
    title("4  A packed row, as it will be trained")
    console = make_console()
    style = Style(console)
    tokenizer = ps.load_tokenizer(FOLDER / "tokenizer")
    views = view_rows(make_loader(mixture), 0, list(range(ROWS_PER_STEP)), lambda dataset: tokenizer)
    console.print(row_view(max(views, key=lambda view: len(view.documents)), style, 50))
    console.print(style.legend())


def straight_digests(mixture: Any, steps: int) -> tuple[list[str], np.ndarray[Any, Any]]:
    """Digests of the batches of an uninterrupted run, and how often each token is a target in it."""
    digests, counts = [], np.zeros(VOCAB_SIZE, np.int64)
    for step in make_loader(mixture):
        if step.index == steps:
            break
        digests.append(digest(np.stack([row.tokens for row in step])))
        for row in step:
            targets = row.targets[0]
            counts += np.bincount(targets[targets >= 0], minlength=VOCAB_SIZE)
    return digests, counts


# -- rows to a model ---------------------------------------------------------------------------------------------------


def train(mixture: Any, seconds: float, *, prompt: str) -> Any:
    """Train a small Llama, stop half-way, go on, and show what came of it; the model."""
    # Threads that wait without spinning: on a machine that does other work besides, several times as fast.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    title("5  A small Llama of transformers learns")
    model = new_model()
    steps = affordable_steps(mixture, seconds, *STEPS)
    digests, counts = straight_digests(mixture, steps)
    unigram = unigram_loss(counts)
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {steps} steps, {counts.sum():,} targets"
    )
    print(f"Loss in nats per token; │ is a unigram model of these very targets: {unigram:.2f}\n")
    chart = Chart(steps, unigram)
    first = train_part(model, mixture, steps, steps // 2, chart, resume=False)
    print(f"      stopped after step {steps // 2}; a new model and a new loader go on from the checkpoint")
    model = new_model()
    second = train_part(model, mixture, steps, steps, chart, resume=True)
    print()
    same = first + second == digests
    around = f"{' '.join(first[-2:])} ✂ {' '.join(second[:2])}"
    print(f"Batches of the two parts and of an uninterrupted run: {'the same' if same else 'DIFFERENT'}")
    print(f"  {len(first)} + {len(second)} of {len(digests)} batches; digests around the stop: {around}")
    begin, end = chart.average(5, first=True), chart.average(LINES, first=False)
    print(f"Loss fell from {begin:.2f} to {end:.2f} nats per token; a unigram model has {unigram:.2f}")
    title("6  What it says")
    print(say(model, prompt, at_least=80))
    if not same:
        raise SystemExit("the batches after the restart are not those of an uninterrupted run")
    return model


def new_model() -> Any:
    """A Llama from a configuration, about a million parameters, the same weights every time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, vocab_size=VOCAB_SIZE, max_position_embeddings=SEQUENCE_LENGTH, tie_word_embeddings=True)
    )


def affordable_steps(mixture: Any, seconds: float, least: int, most: int) -> int:
    """Steps that this machine does in `seconds`, from the time of a few."""
    model, times = new_model(), []
    for step in make_loader(mixture):
        began = time.monotonic()
        ps.huggingface.loss(model, list(step), step.loss_denominator).backward()
        times.append(time.monotonic() - began)
        if len(times) == 6:
            break
    return min(most, max(least, int(seconds / sorted(times)[2])))


def train_part(model: Any, mixture: Any, steps: int, stop: int, chart: "Chart", *, resume: bool) -> list[str]:
    """Train up to step `stop` of `steps`, from the last checkpoint when resuming; digests of the batches trained."""
    from transformers import PrinterCallback, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                chart.add(state.global_step, logs["loss"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == stop < steps:
                control.should_save = control.should_training_stop = True

    arguments = TrainingArguments(
        str(FOLDER / "run"), max_steps=steps, learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=20,
        weight_decay=0.1, adam_beta2=0.95, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=True, seed=SEED,
    )  # fmt: skip
    trainer = ps.huggingface.Trainer(
        model, arguments, loader=make_loader(mixture), rows_per_microbatch=ROWS_PER_STEP, callbacks=[Watch()]
    )
    trainer.remove_callback(PrinterCallback)
    digests: list[str] = []
    hook = model.register_forward_pre_hook(
        lambda module, positional, named: digests.append(digest(named["input_ids"].numpy())), with_kwargs=True
    )
    trainer.train(resume_from_checkpoint=resume or None)
    hook.remove()
    return digests


class Chart:
    """Prints the loss as bars while it comes."""

    def __init__(self, steps: int, unigram: float | None = None) -> None:
        self.every, self.unigram = max(1, steps // LINES), unigram
        self.losses: list[float] = []

    def add(self, step: int, loss: float) -> None:
        """One step's loss; now and then a line with the average since the last."""
        self.losses.append(loss)
        if step % self.every == 0:
            recent = self.average(self.every, first=False)
            cells = [*("█" * round(BAR * recent / math.log(VOCAB_SIZE))).ljust(BAR)]
            if self.unigram is not None:
                cells[min(BAR - 1, round(BAR * self.unigram / math.log(VOCAB_SIZE)))] = "│"
            print(f"step {step:4}  {recent:5.2f}  {''.join(cells)}".rstrip(), flush=True)

    def average(self, count: int, *, first: bool) -> float:
        """Mean loss of the first or last `count` steps."""
        part = self.losses[:count] if first else self.losses[-count:]
        return sum(part) / len(part)


def say(model: Any, prompt: str, *, at_least: int = 0, at_most: int = 80, stop: str | None = None) -> str:
    """Some text in the model's words, up to the control token `stop` where one is given."""
    import torch

    tokenizer = ps.load_tokenizer(FOLDER / "tokenizer")
    # The prompt is ours, so control text in it means control tokens.
    ids = torch.tensor([tokenizer.encode(prompt, allow_control=True).tolist()])
    torch.manual_seed(SEED)
    model.eval()
    with torch.no_grad():
        said = model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=at_least, max_new_tokens=at_most, do_sample=True,
            temperature=0.7, top_k=40, pad_token_id=tokenizer.pad_id,
            eos_token_id=tokenizer.special_tokens[stop] if stop else tokenizer.eos_id,
        )  # fmt: skip
    return tokenizer.decode(said[0].tolist())


# -- chats -------------------------------------------------------------------------------------------------------------


def prepare_chats() -> Any:
    """Conversations about the standard library as a dataset that trains the assistant's words alone."""
    title("7  Chats: questions about the standard library, its documentation as the answers")
    raw = FOLDER / "chats.jsonl"
    with raw.open("w", encoding="utf-8") as file:
        for record in conversations(modules_of(standard_library())):
            file.write(json.dumps(record) + "\n")
    report = ps.prepare(
        str(raw), tokenizer=FOLDER / "tokenizer", template=CHAT_TEMPLATE, output=FOLDER / "chats", **CHAT_LENGTHS
    )
    print(report.as_text())
    return ps.Mixture([ps.Source(FOLDER / "chats")])


def fine_tune(model: Any, chats: Any, seconds: float) -> None:
    """Teach the model to answer; the loss is that of the assistant's words alone."""
    title("8  The model learns to answer")
    steps = affordable_steps(chats, seconds, *CHAT_STEPS)
    print(f"{steps} steps; loss in nats per token that is trained: the assistant's words, calls, and where it stops\n")
    chart = Chart(steps)
    train_part(model, chats, steps, steps, chart, resume=False)
    begin, end = chart.average(5, first=True), chart.average(5, first=False)
    print(f"\nLoss of the assistant's words fell from {begin:.2f} to {end:.2f} nats per token")
    template = ps.chat.load_template(CHAT_TEMPLATE)
    question = [{"role": "user", "content": "What does shutil.copy do?"}]
    print(say(model, template.render_plain(question, add_generation_prompt=True), at_most=60, stop="<|im_end|>"))


def write_page(chats: Any) -> Path:
    """A page of what the model saw: conversations with their proofs, and packed rows."""
    from penstock.inspection.conversation_views import page_of_conversations
    from penstock.inspection.conversations import show_conversations
    from penstock.inspection.html import write_html
    from penstock.inspection.samples import sample_records
    from penstock.prepare import ChatSettings

    title("9  What the model saw, as a page")
    tokenizer = ps.load_tokenizer(FOLDER / "tokenizer")
    shown = show_conversations(
        sample_records(str(FOLDER / "chats.jsonl"), 500),
        tokenizer,
        ChatSettings(template=CHAT_TEMPLATE).merge(CHAT_LENGTHS),
    )
    rows = view_rows(make_loader(chats), 0, list(range(ROWS_PER_STEP)), lambda dataset: tokenizer, lines=True)
    page = FOLDER / "chats.html"
    write_html(page, page_of_conversations("Chats about the standard library", shown, rows=rows))
    print(f"{len(shown.documents)} conversations and {len(rows)} packed rows, {size(page)}")
    return page


def digest(tokens: Any) -> str:
    """A short digest of token ids, whatever their integer type and shape."""
    return hashlib.sha256(np.ascontiguousarray(tokens, np.int64).tobytes()).hexdigest()[:12]


def unigram_loss(counts: np.ndarray[Any, Any]) -> float:
    """Nats per token of always predicting each token's frequency: what a model without context can reach at best."""
    rates = counts[counts > 0] / counts.sum()
    return float(-(rates * np.log(rates)).sum())


def size(path: Path) -> str:
    """Size of a file, in megabytes."""
    return f"{path.stat().st_size / 1e6:.1f} MB"


def title(text: str) -> None:
    """A heading."""
    print(f"\n── {text} ".ljust(min(100, shutil.get_terminal_size().columns), "─"), flush=True)


if __name__ == "__main__":
    main()
