"""Compiles the kernels of the data path ahead of time, for images of containers and for clusters.

Numba compiles a kernel when it is first called with arguments of certain types. So this uses the
data path on a few made documents: ids of both widths, rows of both dtypes, every objective, packing
and kind of loss weights, text and chats.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.large_json import canonical_json
from penstock.core.terminal import Progress
from penstock.data.prepare.preparation import prepare
from penstock.data.shards import verify
from penstock.data.shards.memory import write_dataset
from penstock.data.sources import open_sources, read_texts
from penstock.plan.inputs.requirements import InputRequirements
from penstock.plan.loader.loader import Loader
from penstock.plan.loader.mixture import Source
from penstock.plan.objectives.denoise import Denoise
from penstock.plan.objectives.infill import Infill
from penstock.plan.objectives.objective import Causal
from penstock.tokenizers.encoder import load_encoder, windows_of
from penstock.tokenizers.merges import PieceCounts, learn_merges
from penstock.tokenizers.piece_encoder import piece_encoder
from penstock.tokenizers.spelling import spell_as_characters
from penstock.tokenizers.training import train_tokenizer
from penstock.tokenizers.written_merges import dump_tokenizer_json, parse_tokenizer_json

_TEXTS = [
    "one fish two fish red fish blue fish",
    "this one has a little star",
    "say what a lot of fish there are",
]
_CHATS = (
    '{"messages": [{"role": "user", "content": "one fish"}, {"role": "assistant", "content": '
    '"two fish"}]}\n{"messages": [{"role": "user", "content": "red fish"}, {"role": '
    '"assistant", "content": "blue fish"}]}\n'
)
_STEPS = 28


def compile_kernels(*, progress: bool = True) -> None:
    """Compile what the cache of kernels does not have yet. Takes about a minute from nothing.

    Args:
        progress: Show a bar on standard error.
    """
    bar = Progress("compiling kernels", total=_STEPS, unit="steps", enabled=progress)
    with tempfile.TemporaryDirectory(prefix="penstock-kernels-") as folder, bar:
        for _ in _use_data_path(Path(folder)):
            bar.advance(1)


def _use_data_path(folder: Path) -> Iterator[None]:
    """Use one part of it at a time."""
    documents = [np.arange(5, 5 + length) for length in (3, 9, 17, 40, 64, 5)]
    weights = {"whole": [(1, 3, 1.0)], "shares": [(1, 3, 0.5)]}
    datasets = {
        "narrow": write_dataset(folder / "narrow", documents, vocab_size=400),
        "wide": write_dataset(folder / "wide", documents, vocab_size=100_000),
    }
    for name, spans in weights.items():
        datasets[name] = write_dataset(
            folder / name, documents, spans=[spans, *[None] * 5], vocab_size=400
        )
    yield
    for dataset in datasets.values():
        verify(dataset.path)
        len(dataset[0].tokens)  # reads a document, and checks it
        yield
    # Documents with loss weights that are longer than a row.
    next(iter(Loader(datasets["whole"].path, sequence_length=16, rows_per_step=1)))
    yield
    for dtype in (None, "int64"):
        yield from _load(dtype, datasets)
    yield from _prepare(folder)


def _load(dtype: Any, datasets: Any) -> Iterator[None]:
    need = InputRequirements(
        dtype=dtype,
        loss_weights=True,
        positions=True,
        document_ids=True,
        cu_seqlens=True,
        prefix=True,
    )
    control = list(range(300, 400))
    modes = {"R": control[-1], "X": control[-2], "S": control[-3]}
    infill = Infill(tokens=control[:3])
    objectives: Sequence[Any] = [
        Causal(),
        Denoise.ul2r(modes=modes, sentinels=control[:96]),
        infill,
        Infill(rate=1, tokens=control[:4], separator=7),
    ]
    for objective in objectives:
        sources = [
            Source(dataset.path, objective=objective, name=name)
            for name, dataset in datasets.items()
        ]
        steps = iter(
            Loader(sources, sequence_length=128, rows_per_step=2, threads=0, requirements=need)
        )
        # Without a dtype: in int32, and in int64 for a consumer that takes tensors.
        next(steps)._rows.widen()
        next(steps)
        yield
    joined = InputRequirements(dtype=dtype, cu_seqlens=True, attention="row")
    for packing in ("best_fit_decreasing", "next_fit", "concat", "none"):
        loader = Loader(
            datasets["narrow"].path,
            sequence_length=128,
            rows_per_step=2,
            packing=packing,
            requirements=joined,
        )
        next(iter(loader))
        yield


def _read_vocabulary(content: bytes) -> None:
    """Read, write and search a vocabulary as large ones are."""
    parsed = parse_tokenizer_json(content, large=0)
    vocabulary, merges = parsed["model"]["vocab"], parsed["model"]["merges"]
    for _ in canonical_json(parsed):
        pass
    dump_tokenizer_json(parsed)
    merges.without([text for text in _TEXTS if text not in vocabulary])
    table = windows_of(_TEXTS)
    merges.of_windows(table)
    vocabulary.of_windows(table, _TEXTS)


def _prepare(folder: Path) -> Iterator[None]:
    pieces = PieceCounts()
    pieces.add([text.encode() for text in _TEXTS])
    learn_merges(pieces, [spell_as_characters(bytes([byte])) for byte in range(256)], 260)
    yield
    (folder / "chats.jsonl").write_text(_CHATS)
    (folder / "texts.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in _TEXTS))
    (folder / "texts.csv").write_text("".join(f'"{text}"\n' for text in ["text", *_TEXTS]))
    list(read_texts(open_sources(folder / "texts.csv")))
    control = ["<|im_start|>", "<|im_end|>"]
    train_tokenizer(
        _TEXTS, vocab_size=280, output=folder / "tokenizer", special_tokens=control, progress=False
    )
    yield
    _read_vocabulary((folder / "tokenizer" / "tokenizer.json").read_bytes())
    yield
    _encode_pieces(folder / "tokenizer" / "tokenizer.json")
    yield
    for kind, template in (("texts", None), ("chats", "chatml")):
        prepare(
            folder / f"{kind}.jsonl",
            tokenizer=folder / "tokenizer",
            template=template,
            output=folder / kind,
            progress=False,
        )
        yield


def _encode_pieces(path: Path) -> None:
    """Encode as without gigatoken: texts not in a normal form, a long piece, and so many that the
    table grows.
    """
    content = json.loads(path.read_bytes())
    content |= {"normalizer": {"type": "NFC"}, "added_tokens": []}
    encoder = piece_encoder(content, load_encoder(content), ())
    words = map("".join, product("abcdefghijklmnopqr", repeat=3))
    encoder.encode_batch(pa.array([" ".join(words), "e\u0301", "a" * 300], pa.large_string()))
