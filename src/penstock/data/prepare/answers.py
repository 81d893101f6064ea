"""Sets of answers become documents: prefix trees of encoded conversations, with ranks and labels as
values of paths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from penstock.chat import Conversation, EncodedChat
from penstock.chat.records.answers import AnswerSet
from penstock.core.errors import ConfigError
from penstock.data.shards.format.images import stored_image
from penstock.data.shards.format.tree_building import TreeDocument, build_tree
from penstock.data.shards.format.trees import LABEL, RANK, Tree

Columns = Callable[[Sequence[EncodedChat]], dict[str, list[Any]]]
"""(paths) → name → a number for each token of each path."""
PATH_VALUES = (RANK, LABEL)
"""Values of paths that prepared datasets have; NaN: the record says nothing of it."""


@final
@dataclass(slots=True)
class Answers:
    """One set while it is processed."""

    given: AnswerSet
    partner: Conversation | None = None
    """The prompt with the answer of another record, where answers are labelled."""
    chats: list[EncodedChat] = field(default_factory=list)
    """The paths of its document."""
    document: TreeDocument | None = None
    tree: Tree | None = None
    """Of the document; None: it is an ordinary one."""

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        """All that must be encoded."""
        return (*self.given.conversations, *([] if self.partner is None else [self.partner]))

    def plant(
        self,
        encoded: Sequence[list[EncodedChat]],
        columns: Columns,
        *,
        share: bool,
        shared_weights: str,
        image_storage: str,
    ) -> None:
        """Make the document.

        Args:
            encoded: Of each conversation: one, or several where a template rewrites earlier turns.
            columns: Gives the columns of the paths.
            share: Store what paths begin with in common once.
            shared_weights: sum or once.
            image_storage: copy or reference.

        Raises:
            ConfigError: Two answers of different rank are the same tokens.
        """
        given = self.given
        if not given.compared:
            self.chats = [chat for chats in encoded for chat in chats]
            values: dict[str, list[float]] = {
                name: [np.nan] * len(self.chats) for name in PATH_VALUES
            }
        else:
            # Only the last reply is an answer.
            self.chats = [chats[-1] for chats in encoded]
            count = len(self.chats)
            labels = (
                [np.nan] * count if given.label is None else [given.label, *[-1.0] * (count - 1)]
            )
            values = {RANK: list(given.ranks or [np.nan] * count), LABEL: labels}
            self._refuse_equal(values[RANK])
        self.document = build_tree(
            [chat.tokens for chat in self.chats],
            [chat.loss_weights for chat in self.chats],
            values=values,
            columns=columns(self.chats),
            shared_weights="once" if shared_weights == "once" else "sum",
            share=share,
            trained_alike=given.compared,
            images=[
                [stored_image(image, place, image_storage) for image, place in chat.images]
                for chat in self.chats
            ],
        )
        self.tree = self.document.tree if given.compared or len(self.chats) > 1 else None

    def _refuse_equal(self, ranks: Sequence[float]) -> None:
        for one, chat in enumerate(self.chats):
            for other in range(one):
                rival = self.chats[other]
                alike = [image.digest for image, _ in chat.images] == [
                    image.digest for image, _ in rival.images
                ]
                if (
                    ranks[one] != ranks[other]
                    and alike
                    and np.array_equal(chat.tokens, rival.tokens)
                ):
                    raise ConfigError(
                        f"answers {other} and {one} are the same tokens, so neither is better"
                    )

    def count(self, totals: dict[str, int], *, shared: bool) -> None:
        """Add its document to the totals of a summary; `shared`: beginnings are stored once where
        there are any.
        """
        assert self.document is not None
        tree = self.tree
        found = {
            "documents": 1,
            "paths": len(self.chats),
            "pairs": 0 if tree is None else tree.num_pairs,
            "examples": 0 if tree is None else tree.num_examples,
            "stored": len(self.document.tokens),
            "tokens": sum(len(chat.tokens) for chat in self.chats),
            "apart": int(shared and tree is not None and tree.num_roots > 1),
        }
        for name, number in found.items():
            totals[name] = totals.get(name, 0) + number


def add_mismatched(answers: Sequence[Answers]) -> None:
    """Give each labelled answer the answer of another record as a partner: that of the one before
    it, in turn.

    As TRL does with its batches: the divergence that KTO compares with is estimated on answers to
    other prompts.
    """
    labelled = [one for one in answers if one.given.label is not None]
    if len(labelled) < 2:
        return
    for number, one in enumerate(labelled):
        other = labelled[number - 1].given
        if one.given.conversations[0].messages != other.conversations[0].messages:
            one.partner = one.given.mismatched(other)
