"""Records that are trees of messages (OASST): their paths, and trees made from flat messages."""

from collections.abc import Iterable, Iterator, Mapping

from penstock.core.errors import ConversationError
from penstock.core.json_values import JsonMapping, JsonObject

Node = JsonMapping
"""A message of a tree, with its replies."""


def root_of(record: JsonMapping) -> Node | None:
    """First message of a record that is a tree or a message with its replies; None for other
    records.
    """
    prompt = record.get("prompt")
    if isinstance(prompt, Mapping) and "text" in prompt and "role" in prompt:
        return prompt
    if (
        isinstance(record.get("text"), str)
        and isinstance(record.get("role"), str)
        and "message_id" in record
    ):
        return record
    return None


def read_paths(root: Node, which: str, origin: str) -> list[list[JsonObject]]:
    """Paths of a tree, each a list of messages with `role` and `text`, without deleted messages and
    their replies.

    Args:
        root: First message of the tree.
        which: "best" or "all".
        origin: `file:line`, for errors.

    Raises:
        ConversationError: The record is a flat message that replies to one in another record.
    """
    if root.get("parent_id") is not None:
        raise ConversationError(
            f"{origin}: message {root.get('message_id')} replies to {root['parent_id']}, "
            "which is another record; expected whole trees; gather_trees() builds them from "
            "flat messages"
        )
    paths = [_best_path(root)] if which == "best" else list(_all_paths(root))
    return [
        [{"role": node.get("role"), "text": node.get("text")} for node in path] for path in paths
    ]


def replies_of(node: Node) -> list[Node]:
    """Replies that were not deleted: best rank first, unranked last; among equals, those with
    replies first.
    """
    kept = [reply for reply in node.get("replies") or () if not reply.get("deleted")]

    def order(reply: Node) -> tuple[bool, float, bool]:
        rank = reply.get("rank")
        return rank is None, 0 if rank is None else rank, not reply.get("replies")

    return sorted(kept, key=order)


def _best_path(root: Node) -> list[Node]:
    path = [root]
    while replies := replies_of(path[-1]):
        path.append(replies[0])
    return path


def _all_paths(root: Node) -> Iterator[list[Node]]:
    """Paths to each last assistant message; the root alone if no assistant speaks."""
    found = False
    stack = [[root]]
    while stack:
        path = stack.pop()
        replies = replies_of(path[-1])
        onward = [reply for reply in replies if _holds_reply(reply)]
        if path[-1].get("role") == "assistant" and not onward:
            found = True
            yield path
        stack += [[*path, reply] for reply in reversed(onward)]
    if not found:
        yield [root]


def _holds_reply(node: Node) -> bool:
    """Whether an assistant speaks in this branch."""
    return node.get("role") == "assistant" or any(_holds_reply(reply) for reply in replies_of(node))


def gather_trees(messages: Iterable[JsonMapping]) -> Iterator[JsonObject]:
    """Build trees from flat OASST messages; those of one tree must follow one another. Holds one
    tree in memory.

    Raises:
        ConversationError: The parent of a message is not in its tree, or a tree does not have
            exactly one root.
    """
    batch: list[JsonMapping] = []
    for message in messages:
        if batch and message.get("message_tree_id") != batch[0].get("message_tree_id"):
            yield _tree(batch)
            batch = []
        batch.append(message)
    if batch:
        yield _tree(batch)


def _tree(messages: list[JsonMapping]) -> JsonObject:
    name = messages[0].get("message_tree_id")
    nodes = {message["message_id"]: {**message, "replies": []} for message in messages}
    roots = [node for node in nodes.values() if node.get("parent_id") is None]
    if len(roots) != 1:
        raise ConversationError(
            f"tree {name} has {len(roots)} messages without a parent; expected one, with its "
            "messages in a row"
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
