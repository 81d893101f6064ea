"""A conversation with everything that was computed from it, for checks and reasons."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import final

from penstock.chat.masks.authors import Authors
from penstock.chat.masks.mask_settings import MaskSettings
from penstock.chat.masks.masks import Mask
from penstock.chat.records.conversation import Conversation
from penstock.chat.render.template import Rendered
from penstock.chat.render.turns import Turn
from penstock.chat.tokens.encoding import EncodedText
from penstock.core.arrays import Bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One conversation with everything that was computed from it."""

    conversation: Conversation
    rendered: Rendered
    turns: Mapping[int, Turn]
    encoded: EncodedText
    authors: Authors
    mask: Mask
    settings: MaskSettings
    scanned: Bool | None = None
    """Tokens that the role boundaries of the template's family train, bool [tokens]; None: no
    boundaries are known.
    """
    family: str = ""
    """Name of that family."""
    merged: Collection[int] = ()
    """Messages whose prompt has other ids than the document has up to them."""
    unread: tuple[str, ...] = ()
    """Fields of the record and its messages that nothing reads."""
    appended: str | None = None
    """Text of the EOS that is appended to the last turn; None: nothing is appended."""
