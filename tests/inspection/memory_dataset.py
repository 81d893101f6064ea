"""A dataset in memory, with all that the loader and the views ask of one: no files, so tests say exactly what is in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from penstock.compiled import address_of

Span = tuple[int, int, float]


@dataclass
class MemoryDataset:
    """Documents as lists of ids; `spans` of (begin, end, weight) for each, or None for all ones."""

    name: str
    documents: Sequence[Sequence[int]]
    tokenizer: Any = None
    spans: Sequence[list[Span] | None] | None = None

    def __post_init__(self) -> None:
        self.fingerprint = f"memory-{self.name}-{len(self.documents)}"
        self._weights = [self._document_weights(number) for number in range(len(self.documents))]
        self.table = self._build_table()

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, number: int) -> Any:
        tokens = np.array(self.documents[number], np.uint32)
        return SimpleNamespace(
            tokens=tokens, loss_weights=self._weights[number], origin=f"{self.name}.jsonl:{number + 1}", text=None
        )

    def _document_weights(self, number: int) -> np.ndarray[Any, Any]:
        weights = np.ones(len(self.documents[number]), np.float32)
        spans = self.spans[number] if self.spans else None
        if spans is not None:
            weights[:] = 0
            for begin, end, weight in spans:
                weights[begin:end] = weight
        return weights

    def _build_table(self) -> Any:
        count = len(self.documents)
        lengths = [[len(d), int(np.count_nonzero(w[1:]))] for d, w in zip(self.documents, self._weights, strict=True)]
        sums = np.array([float(weights[1:].sum()) for weights in self._weights])
        self._arrays = arrays = {
            "offsets": np.concatenate([[0], np.cumsum([len(d) for d in self.documents])]).astype(np.int64),
            "tokens": np.concatenate([np.array(d, np.uint32) for d in self.documents]),
        }
        places = np.zeros((1, 9), np.uint64)
        places[0, :2] = [address_of(arrays["offsets"]), address_of(arrays["tokens"])]
        if self.spans is not None:
            given = [spans or [] for spans in self.spans]
            flat = [span for spans in given for span in spans]
            valid = np.array([spans is not None for spans in self.spans])
            arrays["valid"] = np.packbits(valid, bitorder="little")
            arrays["span_offsets"] = np.concatenate([[0], np.cumsum([len(s) for s in given])]).astype(np.int64)
            arrays["begin"], arrays["end"] = (np.array([s[i] for s in flat] + [0], np.uint32) for i in (0, 1))
            arrays["weight"] = np.array([s[2] for s in flat] + [0], np.float32)
            places[0, 4:] = [address_of(arrays[n]) for n in ("valid", "span_offsets", "begin", "end", "weight")]
        fractional = any(((w != 0) & (w != 1)).any() for w in self._weights)
        return SimpleNamespace(
            num_documents=count,
            lengths=np.array(lengths, np.uint32).reshape(count, 2),
            weight_sums=sums if fractional else None,
            token_bytes=4,
            documents_per_batch=max(1, count),
            shard_starts=np.array([0, count], np.int64),
            shard_first_batch=np.array([0, 1], np.int64),
            shard_addresses=np.zeros(1, np.uint64),
            shard_bytes=np.full(1, 1 << 62, np.uint64),
            batches=places,
            offset_bytes=4,
            has_checksums=False,
            has_spans=self.spans is not None,
        )
