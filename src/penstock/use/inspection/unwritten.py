"""Trajectories that no dataset holds yet, as documents to show."""

from dataclasses import replace
from typing import Any

import numpy as np

from penstock.chat.trajectories.finished import FinishedTrajectory
from penstock.chat.trajectories.trajectory import Trajectory
from penstock.core.errors import ConfigError
from penstock.data.prepare.trajectories import in_groups, trees_of
from penstock.data.shards.format.tree_building import TreeDocument
from penstock.data.shards.tables.corpus import Corpus, is_corpus
from penstock.data.shards.tables.document import Document, Origin
from penstock.tokenizers import Tokenizer
from penstock.use.inspection.datasets import DocumentView, view_of

Unwritten = (
    Trajectory | FinishedTrajectory | list[FinishedTrajectory] | tuple[FinishedTrajectory, ...]
)
"""A trajectory, or some that are finished."""

_INSTEAD = {
    **dict.fromkeys(
        ("Step", "ModelInput"), "; ps.inspect(loader, step=…) shows the rows of a step"
    ),
    **dict.fromkeys(("Source", "Mixture"), "; make a ps.Loader of it"),
    "Tokenizer": "; tokenizer.show(text) shows the tokens of a text",
    "EncodedChat": "; print(chat.text) and chat.trained_text show it, and so does a notebook",
}
"""Type → what shows an object of it."""


def views_of_trajectories(
    target: Unwritten, tokenizer: Tokenizer | None, *, lines: bool = False
) -> list[DocumentView]:
    """A document for each group of trajectories, as it would be written.

    Args:
        target: The trajectories. Of one that is not finished, what is there up to its last reply.
        tokenizer: Decodes them; None: that of the trajectory, or ids are shown.
        lines: Keep line ends and tabs in texts.

    Raises:
        ConfigError: A trajectory has no reply yet, something in the list is no finished one, or
            some have a number that others lack.
    """
    why: dict[int, str] = {}
    if isinstance(target, Trajectory):
        if not target.paths():
            raise ConfigError("the trajectory has no reply yet; show it after reply()")
        tokenizer, why = tokenizer or target.tokenizer, _why(target)
        target = FinishedTrajectory(
            paths=target.paths(), has_log_probabilities=target.has_log_probabilities
        )
    several: list[Any] = [target] if isinstance(target, FinishedTrajectory) else [*target]
    if isinstance(several[0] if several else None, dict):
        raise ConfigError(
            "found records; ps.chat.encode(record, tokenizer=…, template=…) shows a conversation, "
            "and ps.inspect shows files of them, or what ps.prepare made of them"
        )
    if wrong := [one for one in several if not isinstance(one, FinishedTrajectory)]:
        raise ConfigError(
            f"found a {type(wrong[0]).__name__} in a list of trajectories; expected what finish() "
            "gives"
        )
    documents = map(_document, trees_of(in_groups(several)))
    return [
        replace(view_of(one, number, tokenizer, lines=lines, why=why), origin="not written yet")
        for number, one in enumerate(documents)
    ]


def _document(made: TreeDocument) -> Document:
    return Document(
        tokens=made.tokens.astype(np.uint32),
        loss_weights=made.loss_weights,
        origin=Origin(file="", line=0),
        columns=made.columns,
        tree=made.tree,
    )


def _why(trajectory: Trajectory) -> dict[int, str]:
    """Path → why it began. A prompt and its reply have the same number."""
    begun = ((path, one.replies[0]) for path, one in enumerate(trajectory.paths()))
    steps = trajectory.steps
    return {path: steps[first].why for path, first in begun if steps[first].kind == "branch"}


def corpus_of(target: object) -> Corpus:
    """A target that must be a corpus.

    Raises:
        ConfigError: It is something else; the message says what shows it.
    """
    if is_corpus(target):
        return target
    kind = type(target).__name__
    raise ConfigError(
        f"ps.inspect: found {'None' if target is None else f'a {kind}'}; expected a dataset, a "
        "loader, a run, a run file, files of conversations or trajectories"
        f"{_INSTEAD.get(kind, '')}"
    )
