"""Trajectories of made-up conversations, with a model that writes what a template writes, and an
oracle that knows plain renders alone.

What is written behind a reply is found by a mark at its end: a word that no other message has. A
render that ends with the reply says how its turn ends; in a render that goes on, the tail is what
follows that end.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from chat_makers import TOOLS, call, result

from penstock.chat.render.template import Template
from penstock.chat.render.turns import common_length
from penstock.chat.trajectories.seams import encode_behind
from penstock.chat.trajectories.trajectory import Trajectory
from penstock.core.errors import ConversationError, RecordError
from penstock.tokenizers import Tokenizer

KINDS = ("plain", "tools", "single", "thinking", "thinking plain")
VARIANTS = ("clean", "cut", "ragged")
HISTORIES = ("sampled", "template", "tool_cycle")
MARK = re.compile(r"M\d+(?:K\d)?W")


class UntestableError(Exception):
    """The template cannot express this conversation, or its text cannot be followed by marks."""


class WrongError(AssertionError):
    """A prompt or a path is not right."""


@dataclass
class Walk:
    """What came of one trajectory."""

    trajectory: Trajectory
    judged: int = 0
    """Tails that the oracle knew."""
    unjudged: int = 0
    branches: int = 0
    replies: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Prompt and sampled ids of each."""


def conversation(random: Random, kind: str) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Two or three questions; with tools, calls and their results before an answer."""
    tools = TOOLS if kind in ("tools", "single", "thinking") else None
    messages: list[dict[str, Any]] = []
    if kind in ("plain", "tools"):
        messages.append({"role": "system", "content": "Be brief."})
    for _ in range(random.randint(2, 3)):
        place = len(messages)
        messages.append({"role": "user", "content": f"What about q{place}?"})
        for _ in range(random.randint(0, 2) if tools else 0):
            place = len(messages)
            count = random.randint(1, 2) if kind == "tools" else 1
            calls = [call(place=n, days=0, city=f"é M{place}K{n}W") for n in range(count)]
            content = random.choice(["", "Let me look."])
            messages.append(
                {"role": "assistant", "content": content, "tool_calls": calls, **thoughts(kind)}
            )
            messages += [result(f'{{"t": "r{place}{n}"}}', n) for n in range(count)]
        place = len(messages)
        messages.append(
            {"role": "assistant", "content": f"It is warm, M{place}W", **thoughts(kind)}
        )
    return messages, tools


def thoughts(kind: str) -> dict[str, str]:
    return {"reasoning_content": "I think so."} if kind.startswith("thinking") else {}


def single_bytes(tokenizer: Tokenizer) -> dict[int, int]:
    """Byte → id of the token that is this byte alone."""
    table = tokenizer.byte_table
    singles = np.flatnonzero(~table.is_control & (np.diff(table.offsets) == 1))
    return {int(table.data[table.offsets[one]]): int(one) for one in singles}


def split(tokenizer: Tokenizer, random: Random, ids: Sequence[int], share: float) -> list[int]:
    """Some tokens as their single bytes: the same text by other ids, as engines sample them."""
    table, singles = tokenizer.byte_table, single_bytes(tokenizer)
    found: list[int] = []
    for token in ids:
        data = table.data[table.offsets[token] : table.offsets[token + 1]].tolist()
        if random.random() < share and not table.is_control[token] and set(data) <= singles.keys():
            found += [singles[byte] for byte in data]
        else:
            found.append(token)
    return found


def walk(
    tokenizer: Tokenizer,
    template: Template,
    messages: Sequence[dict[str, Any]],
    tools: list[Any] | None,
    history: Any,
    variant: str,
    random: Random,
) -> Walk:
    """One trajectory, judged at each prompt and at its end.

    Raises:
        UntestableError: The template or the marks do not allow it.
        WrongError: Something is wrong.
        ConversationError: The trajectory refuses a prompt.
    """
    trajectory = Trajectory(tokenizer, template, tools=tools, history=history)
    found = Walk(trajectory)
    new: list[dict[str, Any]] = []
    last: dict[str, Any] | None = None
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            new.append(message)
            continue
        ids = [*trajectory.prompt(new)]
        form = _form(trajectory)
        server = _plain(template, form, prompt=True, tools=_tools(trajectory))
        as_template = history == "template" or (
            history == "tool_cycle" and any(one["role"] == "user" for one in new)
        )
        if last is None or as_template:
            _judge_text(trajectory, ids, server, last, found)
            text = server
        else:
            text = _judge_tail(trajectory, ids, form, server, last, found)
        following = _following(messages, place)
        sampled, given, cut = _sample(
            trajectory, form, server, message, ids, variant, random, following
        )
        new = []
        ends = sampled[-1] in trajectory._texts.names and not cut
        reason = random.choice([None, "stop"]) if ends else "length"
        logs = [-random.random() for _ in sampled]
        trajectory.reply(sampled, logs, given, finish_reason=reason)
        found.replies.append((ids, sampled))
        said, is_text = trajectory._texts.text(sampled, ids[-1])
        last = {
            "ids": [*ids, *sampled],
            "text": text + said,
            "server": server,
            "said": said,
            "is_text": is_text,
            "stopped": reason == "stop",
            "ended": trajectory._texts.names.get(sampled[-1], ""),
            "message": len(trajectory.messages) - 1,
        }
    _judge_paths(found)
    return found


# -- the model


def _sample(trajectory, form, server, message, ids, variant, random, following):
    """Ids of a reply, and the message for the template (None: read from the text)."""
    tokenizer, template = trajectory.tokenizer, trajectory.template
    alone = _plain(template, [*form, message], tools=_tools(trajectory))
    marks = MARK.findall(json.dumps(message))
    written = [one for one in MARK.findall(alone) if one in marks]
    if not written:
        raise UntestableError("the template writes nothing of the reply")
    mark = written[-1]
    if alone.startswith(server) and len(alone.rstrip()) > len(server):
        text = alone[len(server) :].rstrip()
    else:
        begin = alone.rfind(mark)
        starts = [message["content"][:6]] if message["content"] else ["get_weather"]
        at = alone.rfind(starts[0], common_length(alone, server), begin + 1)
        if at < 0:
            raise UntestableError("the template writes the reply in another place")
        text = alone[at:].rstrip()
        if server.rstrip().endswith("<think>"):
            text = "I think so.\n</think>\n\n" + text
    names = trajectory._texts.names
    sampled = encode_behind(tokenizer, names, ids[-1], text, np.ones(len(text), bool))
    ends = sampled[-1] in names
    given: dict[str, Any] | None = dict(message)
    cut = False
    if variant == "ragged":
        sampled = split(tokenizer, random, sampled, 0.3)
        if ends and random.random() < 0.5:
            # White space that the template would trim.
            space = tokenizer.encode("  \n").tolist()
            sampled = [*sampled[:-1], *space, sampled[-1]]
        if random.random() < 0.5:
            given = None
    elif variant == "cut" and random.random() < 0.6:
        sampled = split(tokenizer, random, sampled, 0.3)
        count = random.randint(1, len(sampled))
        if count < len(sampled) or not ends:
            sampled, given, cut = sampled[:count], None, True
    else:
        sampled = split(tokenizer, random, sampled, 0.15)
        if not ends and following and variant == "clean" and random.random() < 0.5:
            sampled += _opener(trajectory, [*form, message, *following], alone, mark)
    return sampled, given, cut


def _opener(trajectory, whole, alone, mark) -> list[int]:
    """The control token that opens the next message, which some engines stop at."""
    try:
        after = _plain(trajectory.template, whole, prompt=True, tools=_tools(trajectory))
    except UntestableError:
        return []
    if after.count(mark) != 1:
        return []
    tail = after[after.index(mark) + len(mark) :]
    closing = alone[alone.rfind(mark) + len(mark) :].rstrip()
    if not tail.startswith(closing):
        return []
    tail = tail[len(closing) :].lstrip()
    names = [
        (name, token) for token, name in trajectory._texts.names.items() if tail.startswith(name)
    ]
    return [max(names, key=lambda one: len(one[0]))[1]] if names else []


# -- the oracle


def _judge_text(trajectory, ids, server, last, found) -> None:
    """The prompt says what a server would send, and goes on where its text does."""
    spelled = _text(trajectory, ids)
    if not _alike(spelled, server):
        raise WrongError(f"the prompt says {spelled[-200:]!r}, a server {server[-200:]!r}")
    if last is None:
        return
    extends = ids[: len(last["ids"])] == last["ids"]
    must = last["is_text"] and server.startswith(last["text"])
    if must and not extends:
        raise WrongError("the server's text goes on, the ids do not")
    # Ids may be the same where texts differ in white space that tokens take, or in Unicode's forms.
    same = "".join(server.split()).startswith("".join(last["text"].split()))
    if extends and not (must or same or trajectory.tokenizer.normalization == "NFC"):
        raise WrongError("the ids go on, the server's text does not")
    found.branches += not extends
    if not extends and trajectory.steps[-1].kind != "branch":
        raise WrongError("a new path that is not said")


def _judge_tail(trajectory, ids, form, server, last, found) -> str:
    """The prompt is what was there, and what the template writes behind the reply; its text."""
    if ids[: len(last["ids"])] != last["ids"]:
        raise WrongError("sampled ids have changed")
    tails = _tails_behind(trajectory, form, server, last)
    if tails is None:
        found.unjudged += 1
        return str(trajectory._sent)
    found.judged += 1
    spelled = _text(trajectory, ids)
    for tail in sorted(tails):
        if _alike(spelled, last["text"] + tail):
            return str(last["text"] + tail)
    new = spelled[len(last["text"]) :]
    raise WrongError(f"behind the reply is {new!r}, expected {sorted(tails)!r:.300}")


def _tails_behind(trajectory, form, server, last) -> set[str] | None:
    """What may follow the last reply; None: unknown."""
    words = last["said"]
    for name in trajectory._texts.names.values():
        words = words.replace(name, "")
    if not words.strip():
        # Cut before any word: the template completes its own markup.
        return None
    marked, mark = _with_mark(form, last["message"])
    try:
        alone = _plain(trajectory.template, marked[: last["message"] + 1], tools=_tools(trajectory))
        after = _plain(trajectory.template, marked, prompt=True, tools=_tools(trajectory))
    except UntestableError:
        return None
    if isinstance(mark, list):
        written = [one for one in MARK.findall(alone) if one in mark]
        if not written:
            return None
        mark = written[-1]
    if alone.count(mark) != 1 or after.count(mark) != 1:
        return None
    closing = alone[alone.index(mark) + len(mark) :].rstrip()
    behind = after[after.index(mark) + len(mark) :]
    names = [name for name in trajectory._texts.names.values() if name.strip()]
    if not behind.startswith(closing):
        # A render that ends with a reply may have EOS, which one that goes on lacks.
        for end in ("<|return|>", "<|endoftext|>", *trajectory._tails.stops):
            if closing.endswith(end):
                short = closing.removesuffix(end).rstrip()
                if end in ("<|return|>", "<|call|>") and behind.startswith("<|end|>"):
                    behind, closing = behind[len("<|end|>") :], "<|end|>"
                    tail = behind
                    ended = last["ended"] in ("<|return|>", "<|call|>", "<|end|>")
                    return {tail} if ended else {"<|end|>" + tail}
                if behind.startswith(short):
                    closing = short
                    break
        else:
            return None
    ends = [name for name in names if closing.endswith(name)]
    terminator = max(ends, key=len) if ends else ""
    tail = behind[len(closing) :]
    before = closing.removesuffix(terminator)
    space = before[len(before.rstrip()) :]
    ended = last["ended"]
    if ended and tail.lstrip().startswith(ended) and ended != terminator:
        return {tail.lstrip()[len(ended) :]}
    if ended and (ended == terminator or ended in trajectory._tails.stops):
        return {tail}
    rest = server[len(last["text"]) :]
    # What was said may stand there again, where the template writes it in another place.
    said = last["said"].strip()[-6:]
    again = bool(said) and said in rest[: len(rest) - len(tail)]
    if server.startswith(last["text"]) and not again:
        return {rest}
    # An engine that stopped by itself has ended the turn, by whatever token.
    also = {tail} if last["stopped"] else set()
    return {terminator + tail, space + terminator + tail, *also}


def _with_mark(form, number):
    """The messages with a mark at the end of one; or the marks of its calls."""
    messages = [dict(one) for one in form]
    message = messages[number]
    if message.get("tool_calls"):
        return messages, MARK.findall(json.dumps(message["tool_calls"]))
    mark = f"M{number}ZZW"
    content = message["content"]
    if isinstance(content, list):
        text = (content[-1]["text"].rstrip() + " " if content else "") + mark
        message["content"] = [*content[:-1], {"type": "text", "text": text}]
    else:
        message["content"] = f"{(content or '').rstrip()} {mark}"
    return messages, mark


def _judge_paths(found: Walk) -> None:
    trajectory = found.trajectory
    paths = trajectory.paths()
    certificate = trajectory.certificate
    if not certificate.ok:
        raise WrongError(str(certificate))
    total = sum(len(sampled) for _, sampled in found.replies)
    if certificate.sampled != total or sum(path.weights.sum() for path in paths) != total:
        raise WrongError("not each sampled token is trained once")
    for number, (ids, sampled) in enumerate(found.replies):
        whole = [*ids, *sampled]
        holding = [path for path in paths if number in path.replies]
        if len(holding) != 1 or holding[0].ids[: len(whole)].tolist() != whole:
            raise WrongError(f"reply {number} is not behind its prompt")
        if not holding[0].weights[len(ids) : len(whole)].all():
            raise WrongError(f"reply {number} is not trained")


# -- parts


def _form(trajectory) -> list[dict[str, Any]]:
    return [dict(one) for one in trajectory._render(trajectory.messages).conversation.messages]


def _tools(trajectory) -> Any:
    return trajectory._tools


def _plain(template, messages, *, prompt=False, tools=None) -> str:
    try:
        return template.render_plain(messages, tools=tools, add_generation_prompt=prompt)
    except RecordError as error:
        raise UntestableError(str(error)) from None


def _following(messages, place) -> list[dict[str, Any]]:
    found = []
    for message in messages[place + 1 :]:
        if message["role"] == "assistant":
            break
        found.append(message)
    return found


def _text(trajectory, ids) -> str:
    text, _ = trajectory._texts.text(ids)
    return text.removeprefix(" ") if trajectory.tokenizer.adds_space else text


def _alike(one: str, other: str) -> bool:
    """Equal but for white space that control tokens take."""
    return one == other or "".join(one.split()) == "".join(other.split())


def outcomes(
    tokenizer: Tokenizer, template: Template, seeds: int, histories: Sequence[str] = HISTORIES
) -> Iterator[tuple[tuple[str, str, str], str]]:
    """((history, kind, variant), what came of it) of many walks."""
    for kind in KINDS:
        for seed in range(seeds):
            messages, tools = conversation(Random(f"{template.name} {kind} {seed}"), kind)
            for variant in VARIANTS:
                for history in histories:
                    random = Random(f"{seed} {variant} {history}")
                    key = (history, kind, variant)
                    try:
                        done = walk(tokenizer, template, messages, tools, history, variant, random)
                    except UntestableError:
                        yield key, "untestable"
                    except WrongError as error:
                        yield key, f"WRONG {error}"
                    except ConversationError as error:
                        refused = any(
                            said in str(error) for said in ("refuses the conversation", " fails: ")
                        )
                        yield key, "untestable" if refused else f"refused: {error}"
                    else:
                        part = " in part" if done.judged and done.unjudged else ""
                        known = done.judged or history == "template" or len(done.replies) < 2
                        yield key, (
                            "branches" if done.branches else
                            f"exact{part}" if known or done.trajectory.steps else "unjudged"
                        )  # fmt: skip
