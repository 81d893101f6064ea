"""The tokens of a text for the eye: `Tokenizer.show`."""

from dataclasses import dataclass
from typing import final

from penstock.core.arrays import UInt32
from penstock.core.notebook import card, text_tokens
from penstock.core.terminal import visible
from penstock.tokenizers.byte_table import ByteTable


@final
@dataclass(frozen=True, slots=True, eq=False)
class ShownTokens:
    """A text in tokens; a notebook shows them in colours, with the id of each as a tooltip.

    Attributes:
        ids: uint32 [tokens], without BOS and EOS.
        texts: What each token stands for; `⟨f0 9f⟩` for bytes that are only a part of a character.
    """

    ids: UInt32
    texts: tuple[str, ...]

    def __repr__(self) -> str:
        """A line for each token: its id and its text."""
        width = len(str(int(self.ids.max()))) if len(self.ids) else 1
        return "\n".join(
            f"{int(token):>{width}}  {text!r}"
            for token, text in zip(self.ids, self.texts, strict=True)
        )

    def __len__(self) -> int:
        return len(self.ids)

    def _repr_html_(self) -> str:
        """What a notebook shows: how many tokens and bytes, and the text in coloured tokens."""
        pieces = [
            # A line end is marked, and ends the line all the same.
            (visible(text).replace("⏎", "⏎\n"), f"token {place}, id {token}: {text!r}")
            for place, (token, text) in enumerate(zip(self.ids.tolist(), self.texts, strict=True))
        ]
        return card(f"{len(self.ids):,} tokens", (), text_tokens(pieces))


def show_tokens(ids: UInt32, table: ByteTable, names: dict[int, str]) -> ShownTokens:
    """What ids stand for.

    Args:
        ids: Of a text.
        table: id → bytes.
        names: id → text of control entries.
    """
    return ShownTokens(
        ids,
        tuple(names.get(token) or _text_of(table[token]) for token in ids.tolist()),
    )


def _text_of(spelled: bytes) -> str:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return f"⟨{spelled.hex(' ')}⟩"
