"""OASST: trees of messages become conversations, and flat messages become trees.

A tree's path is one conversation. `best` follows the best-ranked reply at every turn; `all` gives one conversation for
each assistant message that no assistant message follows, so turns near the root are in several of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.errors import ConversationError

Node = Mapping[str, Any]


def root_of(record: Mapping[str, Any]) -> Node | None:
    """The first message of a record that is a tree, or a message with its replies; None where it is neither."""
    prompt = record.get("prompt")
    if isinstance(prompt, Mapping) and "text" in prompt and "role" in prompt:
        return prompt
    if isinstance(record.get("text"), str) and isinstance(record.get("role"), str) and "message_id" in record:
        return record
    return None


def read_paths(root: Node, which: str, origin: str) -> list[list[dict[str, Any]]]:
    """The paths of a tree, each a list of messages with `role` and `text`; deleted ones and what follows them are out.

    Raises:
        ConversationError: a flat message that is the reply to another, which its record does not hold.
    """
    if root.get("parent_id") is not None:
        raise ConversationError(
            f"{origin}: message {root.get('message_id')} replies to {root['parent_id']}, which is another record; "
            "due whole trees; gather_trees() makes them of flat messages"
        )
    paths = [_best_path(root)] if which == "best" else list(_all_paths(root))
    return [[{"role": node.get("role"), "text": node.get("text")} for node in path] for path in paths]


def _replies(node: Node) -> list[Node]:
    """Replies that were not deleted: best rank first, unranked ones last, and of equals those that go on."""
    kept = [reply for reply in node.get("replies") or () if not reply.get("deleted")]

    def order(reply: Node) -> tuple[bool, float, bool]:
        rank = reply.get("rank")
        return rank is None, 0 if rank is None else rank, not reply.get("replies")

    return sorted(kept, key=order)


def _best_path(root: Node) -> list[Node]:
    path = [root]
    while replies := _replies(path[-1]):
        path.append(replies[0])
    return path


def _all_paths(root: Node) -> Iterator[list[Node]]:
    """Paths to each last assistant message; the path of the root alone where there is no such message."""
    found = False
    stack = [[root]]
    while stack:
        path = stack.pop()
        replies = _replies(path[-1])
        onward = [reply for reply in replies if _holds_reply(reply)]
        if path[-1].get("role") == "assistant" and not onward:
            found = True
            yield path
        stack += [[*path, reply] for reply in reversed(onward)]
    if not found:
        yield [root]


def _holds_reply(node: Node) -> bool:
    """Whether an assistant speaks in this branch."""
    return node.get("role") == "assistant" or any(_holds_reply(reply) for reply in _replies(node))


def gather_trees(messages: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Trees from flat OASST messages, one a row, where the messages of a tree follow one another.

    Holds one tree in memory.

    Raises:
        ConversationError: a message's parent is not in its tree, or a tree has no root or several.
    """
    batch: list[Mapping[str, Any]] = []
    for message in messages:
        if batch and message.get("message_tree_id") != batch[0].get("message_tree_id"):
            yield _tree(batch)
            batch = []
        batch.append(message)
    if batch:
        yield _tree(batch)


def _tree(messages: list[Mapping[str, Any]]) -> dict[str, Any]:
    name = messages[0].get("message_tree_id")
    nodes = {message["message_id"]: {**message, "replies": []} for message in messages}
    roots = [node for node in nodes.values() if node.get("parent_id") is None]
    if len(roots) != 1:
        raise ConversationError(
            f"tree {name} has {len(roots)} messages without a parent; due one, and its messages in a row"
        )
    for node in nodes.values():
        parent = node.get("parent_id")
        if parent is None:
            continue
        if parent not in nodes:
            raise ConversationError(
                f"message {node['message_id']} replies to {parent}, which tree {name} does not hold"
            )
        nodes[parent]["replies"].append(node)
    return {"message_tree_id": name, "prompt": roots[0]}
