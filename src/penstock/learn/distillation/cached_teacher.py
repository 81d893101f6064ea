"""A teacher that is read from disk: training uses what `penstock distill cache` wrote, and needs no
model.

Guarantees: outputs are looked up by document and token range, so packing may differ. A piece that
is missing, that the teacher read as other tokens, or that was damaged is an error that names it.
Costs: a binary search a document, a copy from mapped files, and the checksums. Opening reads the
index once, 72 bytes a document.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import final

import numpy as np
import torch

from penstock.core.arrays import Array
from penstock.core.errors import ConfigError, CorruptionError
from penstock.data.stores.files import checksum, map_file
from penstock.learn.distillation import cache_format as layout
from penstock.learn.distillation.cache_format import CacheManifest, CacheSettings, piece_name
from penstock.learn.distillation.cache_writer import document_bounds, ids_checksum
from penstock.learn.distillation.outputs import TeacherOutputs, Wanted
from penstock.learn.distillation.teacher_rows import TeacherRow
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.loading import load_tokenizer


@final
class CachedTeacher:
    """A teacher with stored outputs, in a folder that `write_cache` wrote.

    Args:
        folder: The cache.
        tokenizer: The teacher's tokenizer, with which rows are made.
        wanted: What the loss needs.
        sources: Fingerprints of the datasets of the training mixture, in its order.
        device: Where outputs go.

    Raises:
        FormatError: The folder is not a finished cache.
        CorruptionError: A file is missing or damaged.
        ConfigError: The cache has another tokenizer or temperature, or fewer tokens, or lacks a
            dataset.
    """

    def __init__(
        self,
        folder: str | Path,
        tokenizer: Tokenizer,
        wanted: Wanted,
        sources: Sequence[str],
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self._folder, self._wanted, self._device = Path(folder), wanted, torch.device(device)
        self.manifest = CacheManifest.load(self._folder)
        settings = self._settings = self.manifest.settings
        if (
            settings.tokenizer != tokenizer.fingerprint
            or settings.vocab_size != tokenizer.vocab_size
        ):
            raise ConfigError(
                f"{folder}: the cache was made with tokenizer {settings.tokenizer[:8]}, the "
                f"rows with {tokenizer.name} ({tokenizer.fingerprint[:8]}); use the tokenizer "
                "in the cache's folder"
            )
        settings.check(self._folder, wanted)
        self._numbers = [self._number_of(fingerprint) for fingerprint in sources]
        self._index = layout.open_index(self._folder, self.manifest)

    @staticmethod
    def reading_of(folder: str | Path) -> tuple[Tokenizer, CacheSettings]:
        """How the teacher of a cache read text: its tokenizer, and the cache's settings.

        Raises:
            FormatError: The folder is not a finished cache.
        """
        manifest = CacheManifest.load(Path(folder))
        return load_tokenizer(Path(folder) / layout.TOKENIZER), manifest.settings

    def ask(self, rows: Sequence[TeacherRow]) -> None:
        """Do nothing: reading is quick."""

    def outputs(self, row: TeacherRow) -> TeacherOutputs:
        """What is stored about the documents of a row.

        Raises:
            ConfigError: A piece is not in the cache, or the teacher read it as other tokens.
            CorruptionError: A piece is damaged.
        """
        slots, k = len(row.input.tokens), min(self._wanted.top_k or 0, self._settings.top_k)
        lines = {name: np.zeros(slots, np.float32) for name in layout.LINES if name != "kept"}
        ids, log_probs = np.zeros((slots, k), np.int64), np.zeros((slots, k), np.float32)
        for piece, (begin, end) in zip(row.pieces.tolist(), document_bounds(row), strict=True):
            stored = self._read(piece, end - begin, ids_checksum(row, begin, end))
            for name, line in lines.items():
                line[begin:end] = stored[name]
            ids[begin:end] = stored["ids"][:, :k]
            log_probs[begin:end] = self._log_probs(stored)[:, :k]
        found = TeacherOutputs(
            top_ids=torch.from_numpy(ids),
            top_log_probs=torch.from_numpy(log_probs),
            token_log_probs=torch.from_numpy(lines["token_log_probs"]),
            boundary_log_probs=torch.from_numpy(lines["boundary_log_probs"])
            if self._wanted.boundary
            else None,
            entropy=torch.from_numpy(lines["entropy"]),
            temperature=self._wanted.temperature,
        )
        return found.to(self._device)

    def close(self) -> None:
        """Do nothing: the mappings end with the object."""

    def _number_of(self, fingerprint: str) -> int:
        if fingerprint not in self._settings.sources:
            held = ", ".join(
                f"{n} ({s[:8]})"
                for n, s in zip(self._settings.names, self._settings.sources, strict=True)
            )
            raise ConfigError(
                f"{self._folder}: holds nothing of dataset {fingerprint[:8]}; it was made "
                f"from {held}; make a cache of the datasets that you train on"
            )
        return self._settings.sources.index(fingerprint)

    @cached_property
    def _parts(self) -> list[Array]:
        """The parts, mapped."""
        return [
            map_file(self._folder / layout.part_name(n))
            for n in range(len(self.manifest.part_bytes))
        ]

    def _read(self, piece: list[int], expected_slots: int, ids_sum: int) -> dict[str, Array]:
        """The stored arrays of a piece [source, document, first token, tokens]."""
        source, document, begin, tokens = piece
        source = self._numbers[source]
        place = self._find(source, document, begin, tokens)
        name = piece_name(self._settings.names, source, document, begin, tokens)
        slots, part, offset, data_sum, stored_sum = (
            int(self._index[line, place]) for line in range(layout.SLOTS, 9)
        )
        if stored_sum != ids_sum or slots != expected_slots:
            raise ConfigError(
                f"{self._folder}: {name}: the teacher read other tokens when the cache was "
                "made; use the teacher's bos, max_tokens and documents of that time, and with an "
                "objective that rewrites documents also the seed"
            )
        data = self._parts[part][offset : offset + self._settings.bytes_of(slots)]
        stored = self._settings.views(data, slots)
        fault = None
        if checksum(data) != data_sum:
            fault = "differs from its checksum"
        elif stored["ids"].max(initial=0) >= self._settings.vocab_size:
            fault = f"has a token outside the vocabulary of {self._settings.vocab_size}"
        if fault is not None:
            raise CorruptionError(
                f"{self._folder / layout.part_name(part)}: {name}, at byte {offset}, {fault}; "
                "copy the file again, or make the cache again"
            )
        return stored

    def _find(self, source: int, document: int, begin: int, tokens: int) -> int:
        """Place of a piece in the index."""
        low, high = 0, self.manifest.pieces
        for column, value in (
            (layout.SOURCE, source),
            (layout.DOCUMENT, document),
            (layout.BEGIN, begin),
        ):
            found = self._index[column, low:high]
            low, high = (
                low + int(np.searchsorted(found, np.uint64(value), side))
                for side in ("left", "right")
            )
        if low == high or int(self._index[layout.TOKENS, low]) != tokens:
            name = piece_name(self._settings.names, source, document, begin, tokens)
            raise ConfigError(
                f"{self._folder}: holds nothing of {name}; it was made for rows of "
                f"{self._settings.sequence_length} tokens, with documents whole or cut at "
                "that length; train with the same sequence_length, max_document_tokens, "
                "too_long, drop_untrained and slice, and not with packing concat"
            )
        return low

    def _log_probs(self, stored: dict[str, Array]) -> Array:
        """The top-k log-probabilities, float32, shifted to the total that the teacher gave them."""
        if self._settings.precision == "float32":
            return stored["log_probs"]
        wide = stored["log_probs"].astype(np.float32)
        lost = stored["kept"] - np.log(np.exp(wide).sum(-1))
        shifted: Array = wide + lost[:, None]
        return shifted
