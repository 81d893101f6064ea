"""Layouts of other programs in which a record is no trajectory as it stands.

| program | what it writes | becomes |
|---|---|---|
| TRL | fields with a list for each answer (`rollout_func`) | a record for each |
| vLLM | an answer with several `choices` | a record for each |
| verifiers from 0.3, prime-rl | episodes (`traces`), and traces of message nodes (`nodes`) | a record for each trace of the policy; a step for each sampled node |
| verl | rows of tensors, padded (`attention_mask`) | without padding |
| prime-rl | samples: `token_ids` of prompt and answer with a `mask` as long | prompt and answer |

Fields that are none of these stay as they are.
"""  # noqa: E501

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.core.errors import ConversationError
from penstock.core.json_values import JsonMapping, JsonObject

PROMPT = ("prompt_ids", "prompt_token_ids", "prompts")
RESPONSE = (
    "response_ids",
    "token_ids",
    "completion_ids",
    "completion_token_ids",
    "response_token_ids",
    "responses",
)
TOKEN_SCORES = ("rm_scores", "token_level_scores", "token_level_rewards")
"""Rewards of verl, a number for each token of the answer."""
_ATTEMPT, _RESUMED = "compaction_attempt", "compaction"
"""Links of verifiers between nodes: a summary was tried; the agent went on from it."""


_LEAVE_OUT = "set on_error to skip to leave such out"


def first_of(record: JsonMapping, names: Sequence[str]) -> Any:
    """The value of the first of some fields that is there and not null."""
    return next((record[name] for name in names if record.get(name) is not None), None)


def unpacked(record: JsonMapping) -> Iterator[JsonMapping]:
    """The trajectories in a record: of a batch, an episode or an answer of a server, one by one;
    of another record, itself.

    Raises:
        ConversationError: An episode holds none, or several answers have one reward.
    """
    if isinstance(record.get("traces"), list | tuple):
        yield from _traces(record)
    elif _many(record.get("choices")):
        yield from _choices(record)
    elif _lists(first_of(record, RESPONSE)):
        yield from _rows(record)
    else:
        yield record


def plain(step: JsonMapping, name: str) -> JsonMapping:
    """A step without the padding of verl, and in two parts where prime-rl has one.

    Raises:
        ConversationError: A mask fits no tokens.
    """
    prompt, ids = first_of(step, PROMPT), first_of(step, RESPONSE)
    if _list(step.get("attention_mask")) and _list(prompt) and _list(ids):
        return _without_padding(step, prompt, ids, name)
    mask: Any = step.get("mask")
    rendered = prompt is not None or step.get("messages")
    if not rendered and _list(step.get("token_ids")) and _list(mask) and not any(mask[:1]):
        return _in_two(step, mask, name)
    return step


def with_steps(record: JsonMapping) -> JsonMapping:
    """A record in which a trace of verifiers 0.3 or newer is a list of steps: each node of its
    graph has the tokens that its message adds, and nodes that were sampled are steps.

    Raises:
        ConversationError: The rollout failed, or a sampled node has no tokens.
    """
    if isinstance(record.get("nodes"), list | tuple):
        return _trace_record(record, {})
    if isinstance(record.get("trace"), Mapping) and "episode" in record:
        return _trace_record(record["trace"], record["episode"])
    if record.get("error") and "trajectory" in record:
        said = _inside(record, "error", "error_chain_str") or record["error"]
        raise ConversationError(f"the rollout failed ({said!s:.200}); {_LEAVE_OUT}")
    return record


def _trace_record(trace: JsonMapping, episode: JsonMapping) -> JsonObject:
    if trace.get("ok") is False:
        raise ConversationError(f"the rollout failed ({_failure(trace)}); {_LEAVE_OUT}")
    nodes = trace["nodes"]
    calls = {call.get("node"): call for call in trace.get("calls") or ()}
    steps = [
        _node_step(nodes, place, calls.get(place) or {})
        for place in _trained(nodes)
        if nodes[place].get("sampled")
    ]
    if not steps:
        raise ConversationError("its nodes hold no sampled message")
    task = trace.get("task") or {}
    run = _inside(episode, "run", "work", "policy") or {}
    group = (
        _inside(episode, "group", "id")
        or _inside(trace, "info", "prime_rl", "group_id")
        or task.get("key")
        or task.get("hash")
    )
    return {
        "steps": steps,
        "group": group,
        "reward": _reward(trace.get("rewards") or {}),
        "policy_version": run.get("start"),
        "temperature": _one(_inside(call, "sampling", "temperature") for call in calls.values())
        or _inside(trace, "agent", "config", "sampling", "temperature"),
    }


def _traces(episode: JsonMapping) -> Iterator[JsonMapping]:
    """Records of the traces whose tokens train the policy: not those of judges."""
    mine = [
        trace
        for trace in episode["traces"]
        if (trace.get("agent") or {}).get("trainable") is not False
    ]
    if not mine:
        raise ConversationError(
            f"the episode holds no trace of an agent that is trained ({_failure(episode)}); "
            f"{_LEAVE_OUT}"
        )
    yield from ({"trace": trace, "episode": episode} for trace in mine)


def _choices(answer: JsonMapping) -> Iterator[JsonMapping]:
    if any(answer.get(name) is not None for name in ("reward", "advantage")):
        raise ConversationError(
            f"an answer with {len(answer['choices'])} choices has one reward or advantage; give "
            "each choice its own"
        )
    yield from ({**answer, "choices": [choice]} for choice in answer["choices"])


def _node_step(nodes: Sequence[Any], place: int, call: JsonMapping) -> JsonObject:
    node = nodes[place]
    before: list[int] = []
    for parent in _path(nodes, place)[:-1]:
        before += nodes[parent].get("token_ids") or []
    ids, mask = node.get("token_ids") or [], node.get("mask") or []
    if not ids or len(ids) != len(mask) or not any(mask):
        raise ConversationError(
            f"node {place} was sampled and has {len(ids)} token_ids with a mask of {len(mask)}; "
            "expected the tokens of the reply: sample with the client of type train, which "
            "records ids"
        )
    begin = mask.index(True)
    return {
        "prompt_ids": [*before, *ids[:begin]],
        "response_ids": ids[begin:],
        "mask": mask[begin:],
        "log_probabilities": _spread(node.get("logprobs") or None, mask[begin:], place),
        "advantage": _spread(node.get("advantages"), mask[begin:], place),
        "finish_reason": call.get("finish_reason"),
    }


def _spread(values: Any, mask: Sequence[bool], place: int) -> list[float] | None:
    """Numbers of sampled tokens, with 0 for all others."""
    if values is None:
        return None
    if len(values) != sum(mask):
        raise ConversationError(
            f"node {place} has {len(values)} numbers for {sum(mask)} sampled tokens"
        )
    left = iter(values)
    return [next(left) if sampled else 0.0 for sampled in mask]


def _trained(nodes: Sequence[Any]) -> list[int]:
    """Nodes on a path that is trained, in order: a summary that was tried, and from which the agent
    did not go on, is none.
    """
    links = [(place, one) for place, node in enumerate(nodes) for one in _links(node)]
    resumed = {one.get("node") for _, one in links if one.get("type") == _RESUMED}
    tried = {place for place, one in links if one.get("type") == _ATTEMPT}
    inner = {node.get("parent") for node in nodes}
    leaves = [place for place in range(len(nodes)) if place not in inner]
    kept = {
        one for leaf in leaves if leaf not in tried or leaf in resumed for one in _path(nodes, leaf)
    }
    return sorted(kept)


def _links(node: JsonMapping) -> Sequence[JsonMapping]:
    return node.get("semantic_parents") or ()


def _path(nodes: Sequence[Any], place: int) -> list[int]:
    """Nodes from the root to one.

    Raises:
        ConversationError: A parent does not come before its child.
    """
    found = [place]
    while (parent := nodes[found[-1]].get("parent")) is not None:
        if type(parent) is not int or not 0 <= parent < found[-1]:
            raise ConversationError(
                f"node {found[-1]} has the parent {parent!r:.40}; expected an earlier node"
            )
        found.append(parent)
    return found[::-1]


def _reward(rewards: JsonMapping) -> float | None:
    """The sum of score × weight; None: nothing was scored."""
    given = [one for one in rewards.values() if one is not None]
    return sum(one["score"] * one.get("weight", 1.0) for one in given) if given else None


def _failure(record: JsonMapping) -> str:
    errors = record.get("errors") or ()
    last = errors[-1] if errors else {}
    said = f"{last.get('type', '')}: {last.get('message', '')}" if last else "no error is recorded"
    return f"{said:.200}"


def _without_padding(
    step: JsonMapping, prompt: Sequence[Any], ids: Sequence[Any], name: str
) -> JsonObject:
    attended = step["attention_mask"]
    if len(attended) != len(prompt) + len(ids):
        raise ConversationError(
            f"{name}: its attention_mask has {len(attended)} entries for {len(prompt)} + "
            f"{len(ids)} tokens of prompts and responses"
        )
    sent, sampled = attended[: len(prompt)], attended[len(prompt) :]
    kept: JsonObject = {}
    for field, value in step.items():
        if field in PROMPT:
            kept[field] = _where(value, sent)
        elif field != "attention_mask" and _list(value) and len(value) == len(ids):
            kept[field] = _where(value, sampled)
        else:
            kept[field] = value
    return kept


def _in_two(step: JsonMapping, mask: Sequence[Any], name: str) -> JsonObject:
    ids = step["token_ids"]
    if len(mask) != len(ids) or not any(mask):
        raise ConversationError(
            f"{name}: its mask has {len(mask)} entries, {sum(map(bool, mask))} of them set, for "
            f"{len(ids)} token_ids; expected one for each token, set where it was sampled"
        )
    cut = next(place for place, one in enumerate(mask) if one)
    parts = {
        field: value[cut:] if _list(value) and len(value) == len(ids) else value
        for field, value in step.items()
    }
    return {
        **parts,
        "prompt_ids": ids[:cut],
        "temperature": _one(_where(step.get("temperatures") or (), mask)),
    }


def _where(values: Any, mask: Sequence[Any]) -> Any:
    if not _list(values) or len(values) != len(mask):
        return values
    return [value for value, one in zip(values, mask, strict=True) if one]


def _rows(batch: JsonMapping) -> Iterator[JsonMapping]:
    ids = first_of(batch, RESPONSE)
    for place in range(len(ids)):
        yield {
            name: value[place] if _list(value) and len(value) == len(ids) else value
            for name, value in batch.items()
        }


def _inside(record: Any, *names: str) -> Any:
    for name in names:
        record = record.get(name) if isinstance(record, Mapping) else None
    return record


def _one(values: Any) -> Any:
    """The value that all have; None: they differ, or some have none."""
    found = {*values}
    return found.pop() if len(found) == 1 else None


def _list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _lists(value: Any) -> bool:
    return _list(value) and bool(value) and _list(value[0])


def _many(value: Any) -> bool:
    return _list(value) and len(value) > 1
