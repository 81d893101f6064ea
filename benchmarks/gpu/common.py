"""What the scripts of the first day on a GPU share: parts that may fail, a report, data, models, time.

Each script is run by itself, ends within nine minutes, and writes a JSON file into `--output`. A
part that fails is noted with its error, and the next one runs. Without CUDA, or with `--toy`, all
sizes are tiny, so that a test finds typing errors before the day comes; figures then mean nothing.
"""  # noqa: E501

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock as ps

MINUTES = 8.5
"""After these, no further part is begun."""
ROOT = Path(__file__).parents[2]
VOCABULARY = 50304
SIZES: dict[str, dict[str, Any]] = {
    "125M": {"layers": 12, "width": 768, "heads": 12},
    "1B": {"layers": 16, "width": 2048, "heads": 16, "kv_heads": 8},
}
TOY = {"layers": 2, "width": 64, "heads": 2}
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Floating-point operations a second in bfloat16, dense, by what a device's name contains."""

Figures = dict[str, Any]


class MissingError(Exception):
    """Something that a part compares with is not installed."""


def need(module: str) -> Any:
    """An optional package.

    Raises:
        MissingError: It is not installed.
    """
    try:
        return __import__(module, fromlist=["_"])
    except ImportError:
        raise MissingError(f"{module} is not installed") from None


class Report:
    """The parts of a script, and what they found.

    Args:
        name: Of the script's file.
        description: Its docstring.
    """

    def __init__(self, name: str, description: str | None) -> None:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--output", type=Path, required=True, help="folder for the JSON file")
        parser.add_argument("--toy", action="store_true", help="tiny sizes; always without CUDA")
        given = parser.parse_args()
        self.name, self._begun = Path(name).stem, time.monotonic()
        self.toy = given.toy or not torch.cuda.is_available()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        given.output.mkdir(parents=True, exist_ok=True)
        self._file = given.output / f"{self.name}.json"
        self.parts: dict[str, Figures] = {}
        self._write()

    def part(self, name: str, work: Callable[..., Figures], *given: Any, **more: Any) -> Figures:
        """Run a part; what it found, or an empty mapping if it failed or there is no time left."""
        begun = time.monotonic()
        print(f"-- {name}", flush=True)
        if begun - self._begun > MINUTES * 60:
            found: Figures = {"skipped": f"after {MINUTES} minutes"}
        else:
            found = self._attempt(work, *given, **more)
        found["part_seconds"] = round(time.monotonic() - begun, 1)
        self.parts[name] = found
        self._write()
        failed = {"error", "missing", "skipped"} & found.keys()
        return {} if failed else found

    def _attempt(self, work: Callable[..., Figures], *given: Any, **more: Any) -> Figures:
        try:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            return dict(work(*given, **more))
        except MissingError as error:
            return {"missing": str(error)}
        except Exception as error:
            traceback.print_exc()
            return {
                "error": f"{type(error).__name__}: {error}",
                "where": traceback.format_exc().splitlines()[-8:],
            }

    def _write(self) -> None:
        found = {"name": self.name, "toy": self.toy, **environment(), "parts": self.parts}
        self._file.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")

    def done(self) -> None:
        """Print the table."""
        print(f"\n{self.name}{' (toy sizes)' if self.toy else ''}: {self._file}")
        for name, found in self.parts.items():
            shown = [
                f"{what} {_short(value)}"
                for what, value in found.items()
                if not isinstance(value, list | dict) and what != "part_seconds"
            ]
            print(f"  {name:36} {' · '.join(shown)}")


def _short(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)[:100]


def environment() -> Figures:
    """Device, driver, versions and the date."""
    found: Figures = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": "cpu",
    }
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            found["driver"] = subprocess.run(
                query, capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            found["driver"] = "unknown"
    return found


def wait() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], repeats: int, warm: int = 3) -> float:
    """Median seconds of some work, the GPU waited for."""
    for _ in range(warm):
        work()
    found = []
    for _ in range(repeats):
        wait()
        begun = time.perf_counter()
        work()
        wait()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def peak_gb() -> float:
    """Most memory of the GPU that was allocated at once, since the part began; 0 on the CPU."""
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


@contextmanager
def folder() -> Iterator[Path]:
    """A folder for the time of a script."""
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as name:
        yield Path(name)


class Data:
    """Little datasets of random ids, with a tokenizer.

    Args:
        place: Folder.
        documents: Of `web`.
        mean: Their mean length, of a log-normal distribution.
    """

    def __init__(self, place: Path, documents: int, mean: float = 800.0) -> None:
        self.place = place
        words = "the quick brown fox jumps over a lazy dog while it rains on the plain".split()  # noqa: SIM905
        texts = [" ".join(words[n % 13 :] + words[: n % 7]) for n in range(400)]
        source = place / "texts.jsonl"
        source.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        self.tokenizer = ps.train_tokenizer(
            [str(source)], output=place / "tokenizer", vocab_size=320
        )
        self.ids = self.tokenizer.vocab_size
        generator = np.random.default_rng(0)
        lengths = np.exp(generator.normal(np.log(mean) - 0.5, 1.0, documents)).astype(int) + 2
        ids = [generator.integers(3, self.ids, min(int(n), 8 * int(mean))) for n in lengths]
        sizes = np.array([len(one) for one in ids], np.float64)
        self.attended = float((sizes**2).sum() / sizes.sum() / 2)
        """Mean number of keys that a query sees, where rows cut no document."""
        self.web = place / "web"
        ps.write_dataset(self.web, ids, tokenizer=self.tokenizer)

    def answers(self, groups: int, length: int) -> Path:
        """Prompts with two answers each: ranks, labels and rewards."""
        from penstock.data.shards import build_tree
        from penstock.data.shards.memory import weight_spans

        generator, trees = np.random.default_rng(1), []
        for _ in range(groups):
            prompt = generator.integers(3, self.ids, length // 4).tolist()
            answers = [
                [*prompt, *generator.integers(3, self.ids, length).tolist()] for _ in range(2)
            ]
            weights = [[0.0] * len(prompt) + [1.0] * length for _ in answers]
            values = {"rank": [0.0, 1.0], "label": [1.0, -1.0], "reward": [0.9, 0.1]}
            trees.append(build_tree(answers, weights, values=values))
        output = self.place / f"answers-{groups}-{length}"
        if output.exists():
            return output
        ps.write_dataset(
            output,
            [one.tokens for one in trees],
            trees=[one.tree for one in trees],
            tokenizer=self.tokenizer,
            spans=[weight_spans(one.loss_weights) for one in trees],
        )
        return output


def own_model(report: Report, size: str = "125M", **more: Any) -> Any:
    """A transformer of ours, with random weights in float32, on the device."""
    settings = {**(TOY if report.toy else SIZES[size]), **more}
    vocabulary = 400 if report.toy else VOCABULARY
    return ps.build_model(**settings, vocab_size=vocabulary, device=report.device)


def their_model(report: Report, place: Path, kind: str = "llama", **more: Any) -> Path:
    """A folder with a causal model of transformers with random weights; `hf:FOLDER` trains it."""
    transformers = need("transformers")
    small = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    large = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    # The data's tokenizer has 320 ids, and a model of that many takes any of them.
    shared = {"vocab_size": 320, "max_position_embeddings": 32768, "tie_word_embeddings": True}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    settings = {**(small if report.toy else large), **shared, **ids, **more}
    output = place / f"{kind}-{len(list(place.iterdir()))}"
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(output)
    return output


class Watch:
    """An `on_step` that keeps records, and calls something more after each step."""

    def __init__(self, more: Callable[[int], None] = lambda step: None) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.ends: list[float] = []
        self._more = more

    def __call__(self, model: Any, step: Any, record: Mapping[str, Any]) -> None:
        """Keep a step's record."""
        self.records.append(dict(record))
        self.ends.append(time.perf_counter())
        self._more(record["step"])


def train(
    report: Report,
    model: Any,
    loader: Any,
    *,
    steps: int,
    watch: Watch | None = None,
    **settings: Any,
) -> Figures:
    """Train by `ps.train`; its figures, without the first third of the steps."""
    watch = watch or Watch()
    with folder() as place:
        ps.train(
            model,
            loader,
            output=place / "run",
            steps=steps,
            on_step=watch,
            progress=False,
            **{"warmup_steps": 0, "learning_rate": 1e-4, "checkpoints": {"every": 10**6}}
            | ({"threads": 1} if report.toy else {})
            | settings,
        )
    first = max(1, steps // 3)
    records = watch.records
    lasted = [
        after - before
        for before, after in zip(watch.ends[first - 1 :], watch.ends[first:], strict=False)
    ]
    tokens = records[-1]["tokens"] - records[first - 1]["tokens"]
    return {
        "step_seconds": statistics.median(lasted),
        "tokens_per_second": tokens / sum(lasted),
        "loss_first": records[0]["loss"],
        "loss_last": records[-1]["loss"],
        "waiting": sum(one["wait_seconds"] for one in records[first:]) / sum(lasted),
        "peak_gb": peak_gb(),
    }


def operations_per_token(model: Any, attended: float) -> float:
    """Floating-point operations of training a token: 6 for each weight of a product, and attention.

    Args:
        model: Of ours.
        attended: Mean number of keys that a query sees.
    """
    products = sum(
        p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name
    )
    width = model.settings.width
    head = width * model.state_dict()["embedding.weight"].shape[0]
    return 6.0 * (products + head) + 12.0 * model.settings.layers * width * attended


def mfu(operations: float, tokens_per_second: float) -> float | None:
    """Share of the device's peak; None: unknown."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    peak = next((peak for part, peak in PEAK.items() if part in name), None)
    return None if peak is None else operations * tokens_per_second / peak


def python(*words: str, timeout: float) -> Figures:
    """Run a Python with these words in the repository; its exit status and last lines."""
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return {"status": ended.returncode, "lines": (ended.stdout + ended.stderr).splitlines()[-40:]}
