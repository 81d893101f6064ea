"""How records become documents: one recipe for texts, one for chats, with the same interface."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, final

from penstock.chat import ChatEncoder
from penstock.data.prepare.chat_settings import ChatSettings
from penstock.data.prepare.chats import encode_chats
from penstock.data.prepare.documents import Encoded, Framing, encode_block
from penstock.data.prepare.settings import PrepareSettings
from penstock.data.prepare.transform import Transform, apply_transform, transform_objects
from penstock.data.sources import ObjectBlock, OnDamage, Part, RecordBlock
from penstock.data.sources.objects import texts_of
from penstock.tokenizers import Tokenizer

Block = RecordBlock | ObjectBlock

COLLECT_AFTER = 100_000
"""Number of new objects after which Python collects cyclic garbage, while chats are encoded."""
SAMPLE_BYTES, SAMPLE_TEXT = 50_000, 4_000
"""The sample of a block for checking the encoder: characters of all texts, and of each."""


class Recipe(Protocol):
    """How the records of a part are processed, block by block."""

    def blocks(self, part: Part, damaged: OnDamage) -> Iterator[Block]:
        """The records of a part; `damaged` is called if a file cannot be read further."""

    def transform(self, function: Transform, block: Block, files: tuple[str, ...]) -> Block:
        """Apply the user's function to the records."""

    def encode(self, block: Block, files: tuple[str, ...], addresses: tuple[str, ...]) -> Encoded:
        """Make documents from the records; `addresses` open the files."""

    def sample(self, block: Block) -> list[str]:
        """Beginnings of some texts of the records, for checking the encoder."""


@contextmanager
def _rare_collection() -> Iterator[None]:
    """Collect cyclic garbage rarely: decoded records and rendered text are many small objects
    without cycles.

    At Python's default rate, collection took a fifth of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@final
@dataclass(frozen=True, slots=True)
class TextRecipe:
    """A record is a text and becomes one document."""

    tokenizer: Tokenizer
    framing: Framing
    settings: PrepareSettings

    def blocks(self, part: Part, damaged: OnDamage) -> Iterator[RecordBlock]:
        """The records of a part."""
        return part.blocks(damaged)

    def transform(self, function: Transform, block: Block, files: tuple[str, ...]) -> RecordBlock:
        """Apply the user's function to the records."""
        assert isinstance(block, RecordBlock)
        return apply_transform(function, block, files, self.settings.fields)

    def encode(self, block: Block, files: tuple[str, ...], addresses: tuple[str, ...]) -> Encoded:
        """Make documents from the records."""
        assert isinstance(block, RecordBlock)
        return encode_block(block, files, self.tokenizer, self.framing, self.settings)

    def sample(self, block: Block) -> list[str]:
        """Beginnings of some texts of the records, for checking the encoder."""
        assert isinstance(block, RecordBlock)
        return _sampled([text.as_py()] for text in block.texts)


@final
@dataclass(frozen=True, slots=True)
class ChatRecipe:
    """A record is one or several conversations and becomes documents with loss weights."""

    encoder: ChatEncoder
    chat: ChatSettings
    settings: PrepareSettings

    def blocks(self, part: Part, damaged: OnDamage) -> Iterator[ObjectBlock]:
        """The whole records of a part."""
        with _rare_collection():
            yield from part.objects(damaged)

    def transform(self, function: Transform, block: Block, files: tuple[str, ...]) -> ObjectBlock:
        """Apply the user's function to the records."""
        assert isinstance(block, ObjectBlock)
        return transform_objects(function, block, files)

    def encode(self, block: Block, files: tuple[str, ...], addresses: tuple[str, ...]) -> Encoded:
        """Make documents from the records."""
        assert isinstance(block, ObjectBlock)
        return encode_chats(block, files, addresses, self.encoder, self.chat, self.settings)

    def sample(self, block: Block) -> list[str]:
        """Beginnings of some texts of the records, for checking the encoder."""
        assert isinstance(block, ObjectBlock)
        return _sampled(map(texts_of, block.objects))


def _sampled(records: Iterable[list[str]]) -> list[str]:
    sample: list[str] = []
    size = 0
    for texts in records:
        for text in texts:
            sample.append(text[:SAMPLE_TEXT])
            size += len(sample[-1])
            if size >= SAMPLE_BYTES:
                return sample
    return sample
