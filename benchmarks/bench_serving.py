"""64 clients of `penstock serve` at once, for a minute: what they got, how fast, and the server's
memory.

    python benchmarks/bench_serving.py [--model FOLDER] [--seconds 60] [--clients 64]

With a real model, such as SmolLM2-135M-Instruct, first what a batch gains: tokens of chats of 48
tokens each, streamed to one client and to eight at once, a second and a CPU second of the server.

Then the load. Its model has 1 M parameters and random weights: 4 layers of width 128, a vocabulary
of 1,024, context 256. One client in eight leaves midway, one sends rubbish. Memory is read after a
tenth of the time and at the end.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch

from common import arguments, standard_library, table
from penstock import train_tokenizer
from penstock.chat import load_template
from penstock.models import ModelSettings
from penstock.models.building import build_model
from penstock.models.exporting import export
from serving_load import Load, resident_bytes

SERVE = (
    "import typer; from penstock.use.cli.serve import run; app = typer.Typer(); "
    "app.command()(run); app()"
)
CONTEXT = 256


def make_model(folder: Path) -> Path:
    """A model of random weights in the Hugging Face layout."""
    tokenizer = train_tokenizer(
        standard_library(300_000),
        vocab_size=1024,
        output=folder / "tokenizer",
        special_tokens=["<|im_start|>", "<|im_end|>"],
        progress=False,
    )
    model = build_model(
        ModelSettings(layers=4, width=128, heads=4),
        vocab_size=tokenizer.vocab_size,
        dtype=torch.float32,
        seed=0,
    )
    export(
        model,
        folder / "random",
        tokenizer=tokenizer,
        template=load_template("chatml", tokenizer=tokenizer),
        stop_ids=[tokenizer.special_tokens["<|im_end|>"]],
        context_length=CONTEXT,
    )
    return folder / "random"


@contextmanager
def serving(folder: Path, threads: int) -> Iterator[tuple[str, int]]:
    """(address, process id) of a server."""
    command = [
        sys.executable,
        "-c",
        SERVE,
        str(folder),
        "--port",
        "0",
        "--threads",
        str(threads),
        "--requests-per-second",
        "0",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], process.pid
        process.terminate()


def server_seconds(process: int) -> float:
    """CPU time of a process so far (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def chat(url: str, model: str, numbers: list[int], written: int) -> int:
    """Tokens of a streamed reply to each of several clients at once."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:

        async def client(number: int) -> int:
            said = f"Chat {number}: tell a long story of a river and its {number} mills."
            body = {
                "messages": [{"role": "user", "content": said}],
                "model": model,
                "temperature": 0,
                "max_tokens": written,
                "min_tokens": written,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            answer = await http.post("/v1/chat/completions", json=body)
            answer.raise_for_status()
            last = [line for line in answer.text.splitlines() if line][-2]
            return int(json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"])

        return sum(await asyncio.gather(*map(client, numbers)))


def batch_rows(folder: Path, threads: int, repeats: int) -> list[tuple[str, str, str]]:
    """What eight clients get together, over what one gets."""
    rates: dict[int, list[tuple[float, float]]] = {1: [], 8: []}
    with serving(folder, threads) as (url, process):
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        asyncio.run(chat(url, model, [0], 48))
        number = 0
        for _ in range(repeats):
            for clients, found in rates.items():
                numbers = list(range(number + 1, number + clients + 1))
                number += clients
                spent, begun = server_seconds(process), time.monotonic()
                tokens = asyncio.run(chat(url, model, numbers, 48))
                spent, wall = server_seconds(process) - spent, time.monotonic() - begun
                found.append((tokens / spent, tokens / wall))
    rows = []
    for place, unit in enumerate(("CPU second of the server", "second")):
        one, eight = (statistics.median(each[place] for each in rates[of]) for of in (1, 8))
        note = f"{eight:.1f} against {one:.1f}"
        rows.append((f"tokens a {unit}, 8 clients over 1", f"{eight / one:.1f} ×", note))
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a real model, measured first")
    parser.add_argument("--only-model", action="store_true", help="measure nothing else")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    flags = parser.parse_args()
    if flags.model is not None:
        rows = batch_rows(flags.model, flags.threads, flags.repeats)
        table(f"{flags.model.name} served, {flags.threads} thread(s)", rows)
    if flags.only_model:
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(make_model(Path(folder)), flags.threads) as (url, process),
    ):
        Load(url, "random", flags.clients, flags.seconds / 10).run()
        before = resident_bytes(process)
        report = Load(url, "random", flags.clients, flags.seconds).run()
        after = resident_bytes(process)
        metrics = httpx.get(f"{url}/metrics").text.splitlines()
    cuts = statistics.quantiles(report.first, n=20)
    gauges = [
        line
        for line in metrics
        if line.startswith(("penstock_sequences", "penstock_requests_waiting"))
    ]
    rows = [
        (
            "answers by code",
            ", ".join(f"{code}: {count:,}" for code, count in sorted(report.codes.items())),
            "",
        ),
        (
            "complete, left by the client, torn",
            f"{report.complete:,}, {report.left:,}, {len(report.torn):,}",
            "",
        ),
        ("tokens a second", f"{report.tokens / flags.seconds:,.0f}", "of complete replies"),
        (
            "first token",
            f"{statistics.median(report.first):.2f} s",
            f"95 %: {cuts[-1]:.2f} s, the queue included",
        ),
        (
            "memory",
            f"{before / 2**20:.1f} → {after / 2**20:.1f} MiB",
            f"{(after - before) / 2**10:+,.0f} KiB",
        ),
        ("left on the server", " ".join(line.split()[-1] for line in gauges), "running, waiting"),
    ]
    table(f"{flags.clients} clients for {flags.seconds:g} s, {flags.threads} thread(s)", rows)
    for line in report.torn[:5]:
        print(line)


if __name__ == "__main__":
    main()
