"""CPU seconds until a new process is ready: imports, the first step, the command line, the first
step of training.

Each figure is the median of processes run one after another. "Cold" has no compiled kernels; "warm"
reads those of an earlier process. Where `make kernels` has put kernels next to the sources, as in a
wheel, cold reads these. Python's bytecode and the page cache are warm. torch's line is what anybody
pays: its import and its first fused AdamW.

    python benchmarks/bench_start.py [--repeats 5] [--tokenizer gemma-3/tokenizer.json]
"""

import json
import os
import pickle
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

from common import arguments, standard_library, table

ROOT = Path(__file__).parents[1]
LOADER = """
import sys
import penstock as ps
control = list(range(400, 800))
modes = {"R": control[-1], "X": control[-2], "S": control[-3]}
objectives = {
    "UL2R": ps.Denoise.ul2r(modes=modes, sentinels=control[:300], bidirectional=False, max_length=400),
}
source = ps.Source(sys.argv[1], objective=objectives.get(sys.argv[2], ps.Causal()))
need = ps.InputRequirements(
    loss_weights=sys.argv[2] == "weighted", dtype="int64" if sys.argv[2] == "int64" else None,
    positions=True, document_ids=True, cu_seqlens=True,
)
loader = ps.Loader(source, sequence_length=256, rows_per_step=4, requirements=need)
if sys.argv[3] == "step":
    next(iter(loader))
"""  # noqa: E501
TRAIN = """
import sys
import penstock as ps
model = ps.build_model(layers=2, width=64, heads=2, vocab_size=800)
loader = ps.Loader(sys.argv[1], sequence_length=256, rows_per_step=4)
ps.train(model, loader, steps=1, output=sys.argv[2], progress=False, threads=1)
"""
TORCH = """
import torch
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.AdamW([weight], fused=True)
weight.sum().backward()
optimizer.step()
"""
PREPARE = """
import sys
import penstock as ps
texts, tokenizer, output = sys.argv[1:]
ps.prepare(texts, tokenizer=tokenizer, output=output, processes=1, progress=False)
"""
WORKER = """
import pickle
import sys
from pathlib import Path
import pyarrow as pa
import penstock as ps
pickle.loads(Path(sys.argv[1]).read_bytes()).encode_batch(pa.array(["a text"]))
"""


NEW = "a new folder"
"""Stands for one in the words of a command."""


def cpu_seconds(*words: str, cache: Path) -> float:
    """CPU time of one process and its children, to its end."""
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = subprocess.run(
        [sys.executable, *words], env=environment, check=False, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def make_data(folder: Path) -> None:
    import penstock as ps

    texts = [text[:2000] for text in standard_library(400_000)]
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    special = [f"<extra_{number}>" for number in range(400)]
    ps.train_tokenizer(
        texts, vocab_size=800, output=folder / "tokenizer", special_tokens=special, progress=False
    )
    ps.prepare(
        folder / "texts.jsonl",
        tokenizer=folder / "tokenizer",
        output=folder / "data",
        progress=False,
    )


def main() -> None:
    import penstock as ps

    parser = arguments(__doc__)
    parser.add_argument("--tokenizer", help="measure only `prepare` of three documents with it")
    options = parser.parse_args()
    rows: list[tuple[str, str, str]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_data(folder)
        data, warm, fresh = str(folder / "data"), folder / "warm", iter(range(10**6))

        def measure(what: str, note: str, *words: str) -> None:
            def once() -> float:
                new = folder / f"new-{next(fresh)}"
                given = [str(new) if word == NEW else word for word in words]
                return cpu_seconds(*given, cache=new if note == "cold" else warm)

            once()  # writes bytecode and, unless cold, kernels
            rows.append(
                (what, f"{statistics.median(once() for _ in range(options.repeats)):.2f} s", note)
            )

        texts = folder / "texts.jsonl"
        if options.tokenizer is not None:
            with texts.open() as lines:
                (folder / "three.jsonl").write_text("".join(islice(lines, 3)))
            pickled = folder / "tokenizer.pickle"
            pickled.write_bytes(pickle.dumps(ps.load_tokenizer(options.tokenizer)))
            three = str(folder / "three.jsonl")
            measure("ps.prepare, 3 documents", "warm", "-c", PREPARE, three, options.tokenizer, NEW)
            measure("a tokenizer from its pickle, 1 text", "", "-c", WORKER, str(pickled))
            table(f"CPU seconds of a new process, {options.tokenizer}", rows)
            return
        measure("python -c pass", "", "-c", "pass")
        measure("import penstock", "", "-c", "import penstock")
        measure("import penstock, Loader(...)", "warm", "-c", LOADER, data, "causal", "open")
        for kind in ("causal", "weighted", "int64", "UL2R"):
            measure(f"first step, {kind}", "warm", "-c", LOADER, data, kind, "step")
        for kind in ("causal", "weighted", "int64", "UL2R"):
            measure(f"first step, {kind}", "cold", "-c", LOADER, data, kind, "step")
        if list((ROOT / "src" / "penstock" / "kernels").glob("*.kernel")):
            rows.append(("(kernels are shipped here: cold is shipped)", "", "make kernels"))
        measure("penstock --help", "", "-m", "penstock", "--help")
        measure("penstock train --help", "", "-m", "penstock", "train", "--help")
        measure(
            "ps.prepare, 0.4 MB", "warm", "-c", PREPARE, str(texts), str(folder / "tokenizer"), NEW
        )
        measure("torch, first fused AdamW", "", "-c", TORCH)
        measure("ps.train, 1 step, 0.1 M parameters", "warm", "-c", TRAIN, data, NEW)
    table(
        f"CPU seconds of a new process, Python {platform.python_version()}, {platform.machine()}",
        rows,
    )


if __name__ == "__main__":
    main()
