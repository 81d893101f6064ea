"""Chats: the scan for role boundaries, nanoseconds a token, against axolotl's scanners on the same rows.

One core, CPU time, 8 rows of 4,096 tokens as in axolotl's own test. Three mixes of turns: as in ordinary conversations
(questions of 60 tokens, answers of 250, about), very short ones, and padded rows with media. Both sides give one value
a token: ours float32 weights, axolotl's a bool mask; they must train the same number of tokens.

    python benchmarks/bench_chat.py [--peers PYTHON]     # a Python with axolotl (pip install --no-deps axolotl), torch
                                                         # and transformers
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from common import Peer, arguments, cpu_seconds, table, take_turns
from penstock.chat.boundaries import Boundary, resolve
from penstock.chat.scanning import scan

ROWS, SLOTS, VOCABULARY = 8, 4096, 150_000
START, END, NEWLINE, IMAGE = 151_644, 151_645, 198, 151_655
HEADERS = {"user": [START, 872, NEWLINE], "assistant": [START, 77091, NEWLINE]}
CALLS = 20
"""Calls that one of our repeats times, because one call is too short for the clock."""


def conversations(question: float, answer: float) -> np.ndarray:
    """Rows of turns with lengths about those, int64 [ROWS, SLOTS]; ids as Qwen's, without its control tokens."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(ROWS):
        row: list[int] = []
        while len(row) < SLOTS:
            for role, mean in (("user", question), ("assistant", answer)):
                content = random.integers(1000, VOCABULARY, 1 + random.poisson(mean)).tolist()
                row += [*HEADERS[role], *content, END, NEWLINE]
        rows.append(row[:SLOTS])
    return np.array(rows, np.int64)


def scan_seconds(ids: np.ndarray, boundaries: object, **more: object) -> float:
    def work() -> None:
        for _ in range(CALLS):
            scan(ids, boundaries, **more)

    return cpu_seconds(work) / CALLS


def bench_scan(repeats: int, peers: str | None) -> None:
    boundaries = resolve([Boundary(role, start, [END]) for role, start in HEADERS.items()])
    mixes = {"ordinary turns": conversations(60, 250), "turns of 8 tokens": conversations(8, 8)}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        declared = Path(folder) / "boundaries.json"
        declared.write_text(json.dumps([(role, start, [END]) for role, start in HEADERS.items()]))
        for name, ids in mixes.items():
            path = Path(folder) / f"{name.replace(' ', '_')}.npy"
            np.save(path, ids)
            stored = ids.astype(np.uint32)
            mask = np.arange(SLOTS) < np.linspace(SLOTS // 2, SLOTS, ROWS, dtype=int)[:, None]
            rivals = {
                "penstock, int64": lambda ids=ids: scan_seconds(ids, boundaries),
                "penstock, uint32": lambda ids=stored: scan_seconds(ids, boundaries),
                "penstock, padding and media": lambda ids=ids, mask=mask: scan_seconds(
                    ids, boundaries, attention_mask=mask, masked_ids=[IMAGE]
                ),
            }
            others = {}
            if peers:
                others = {
                    f"axolotl, {kind}": Peer(peers, "axolotl_scan.py", str(path), str(declared), kind)
                    for kind in ("reference", "vectorized")
                }
            seconds = take_turns(rivals | others, repeats)
            trained = int(scan(ids, boundaries).sum())
            for kind, other in others.items():
                assert other.last["trained"] == trained, (kind, other.last, trained)
            ours = seconds["penstock, int64"]
            for rival, spent in seconds.items():
                against = "" if rival.startswith("penstock") else f"{spent / ours:.0f} × ours"
                rows.append((f"{name}: {rival}", f"{spent / ids.size * 1e9:.2f} ns", against))
    table(f"Role boundaries: a token of {ROWS} × {SLOTS}", rows)


if __name__ == "__main__":
    options = arguments(__doc__).parse_args()
    bench_scan(options.repeats, options.peers)
