"""Token in, token out: a conversation with an engine, for any chat template.

    trajectory = ps.chat.Trajectory(tokenizer, template, tools=tools)
    ids = trajectory.prompt([{"role": "user", "content": "What is 6 × 7?"}])
    message = trajectory.reply(sampled, log_probabilities)         ids as the engine sampled them
    ids = trajectory.prompt([{"role": "tool", "content": "42"}])

What is trained must be what was sampled. Text that is decoded and encoded again has other ids, and
templates rewrite earlier turns. So sampled ids are kept bit for bit, and only what comes between
them is rendered. Three ways to go on after a reply:

- `sampled`: the next prompt is the last one, the sampled ids, and the text that the template writes
  behind the reply (`tails.py`). What the model saw stays; a template that writes something else of
  before there is refused.
- `template`: the next prompt says what the template writes for the whole conversation, as a server
  would send it. Where that begins with what was sent and sampled, the path goes on; otherwise a new
  path begins, in which replies keep their ids where they are written as they were sampled.
- `tool_cycle`: `sampled` until the next message of a user, where it is `template`.

Costs a render of the conversation a prompt, and one more for each other form of its messages that
is tried.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

from penstock.chat.records.conversation import DEFAULT_WEIGHTS, Conversation, Form
from penstock.chat.records.layout_settings import LayoutSettings
from penstock.chat.records.messages import read_messages
from penstock.chat.records.tools import read_tools
from penstock.chat.render.choosing import render_form
from penstock.chat.render.excerpts import find_turns
from penstock.chat.render.forms import forms_of
from penstock.chat.render.template import Rendered, Template, load_template, own_template
from penstock.chat.render.turns import RenderedConversation, Turn, difference
from penstock.chat.trajectories.finished import FinishedTrajectory
from penstock.chat.trajectories.notebook import tree_html
from penstock.chat.trajectories.paths import OpenPath, TokenPath
from penstock.chat.trajectories.proof import Proof, TrajectoryCertificate
from penstock.chat.trajectories.replies import (
    CUT,
    STOPPED,
    Said,
    TokenTexts,
    as_message,
    check_reply,
    message_of,
    without_end,
)
from penstock.chat.trajectories.seams import encode_behind
from penstock.chat.trajectories.tails import Tails, literal_of
from penstock.core.arrays import Bool
from penstock.core.errors import ConfigError, ConversationError, RecordError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.media.records import refuse_media
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.loading import load_tokenizer

History = Literal["sampled", "template", "tool_cycle"]
HISTORIES: tuple[History, ...] = ("sampled", "template", "tool_cycle")
_LAYOUT = LayoutSettings()


class Step(NamedTuple):
    """How a prompt continues those before it."""

    kind: Literal["first", "extends", "branch"]
    why: str = ""
    """Of a branch: what the template rewrote, and how many replies keep their ids. Of a prompt that
    extends: that the template would rewrite what is kept.
    """


class _Whole(NamedTuple):
    """The conversation so far as text, with the prompt for the next reply."""

    rendered: Rendered
    conversation: RenderedConversation
    literal: Bool

    @property
    def text(self) -> str:
        return self.rendered.text


@final
class Trajectory:
    """One conversation.

    Attributes:
        messages: All messages so far, with those of replies.
        steps: How each prompt continued those before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | str | Path,
        template: Template | str | Path | None = None,
        *,
        tools: Sequence[JsonMapping] | None = None,
        history: History = "sampled",
        stop_ids: Collection[int] = (),
        **variables: Any,
    ) -> None:
        """Begin a trajectory.

        Args:
            tokenizer: The engine's tokenizer, or where to load it from.
            template: The chat template, or where to load it from; None: the tokenizer's own.
            tools: JSON schemas of functions.
            history: How prompts go on after a reply: sampled, template or tool_cycle; see above.
            stop_ids: Ids besides EOS that end a generation.
            variables: Variables of the template, such as enable_thinking.

        Raises:
            ConfigError: `history` is unknown, or a stop id is no control token.
            TokenizerError: The vocabulary has no exact byte table.
        """
        if history not in HISTORIES:
            raise ConfigError(f"history must be one of {', '.join(HISTORIES)}, got {history!r}")
        self.tokenizer = (
            tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
        )
        if template is None:
            template = own_template(self.tokenizer)
        elif not isinstance(template, Template):
            template = load_template(template, tokenizer=self.tokenizer)
        self.template, self.history = template, history
        self.messages: list[JsonObject] = []
        self.steps: list[Step] = []
        self._tools = None if tools is None else read_tools(list(tools), "tools")
        self._variables = variables
        self._texts = TokenTexts(self.tokenizer)
        stops = {*stop_ids, *([] if self.tokenizer.eos_id is None else [self.tokenizer.eos_id])}
        self._check_stops(stops)
        names = self._texts.names
        self._tails = Tails(
            template, frozenset(names.values()), frozenset(names[one] for one in stops), variables
        )
        self._proof = Proof(self.tokenizer, self._texts, template.name)
        self._said: list[Said] = []
        self._prompts: list[tuple[int, int]] = []
        """Of each reply: number of its path, and tokens of its prompt."""
        self._done: list[TokenPath] = []
        self._path = OpenPath()
        self._form: tuple[Form, ...] = ()
        """Changes of messages that the template needed for the last prompt."""
        self._sent = ""
        """The text of all that was sent and sampled in this path."""
        self._awaits = False
        self._has_logs = True

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens of the current path: after `prompt`, what to send."""
        return tuple(self._path.ids)

    @property
    def has_log_probabilities(self) -> bool:
        """Whether all replies came with log-probabilities."""
        return self._has_logs

    def prompt(self, messages: Sequence[JsonMapping]) -> tuple[int, ...]:
        """The ids to send for the next reply.

        Args:
            messages: What is new since the last reply, in the OpenAI layout; of the first prompt,
                all that comes before the first reply.

        Raises:
            ConfigError: The last prompt has no reply yet, or there is no new message.
            ConversationError: A message cannot be read, or is a reply; the template refuses the
                conversation, or writes it so that the prompt would not be right. Nothing has
                changed then: another prompt may be tried.
        """
        if self._awaits:
            raise ConfigError("the last prompt has no reply yet; call reply() first")
        if not messages:
            raise ConfigError("prompt() needs at least one new message")
        whole = [*self.messages, *self._read(messages)]
        rendered = self._render(whole)
        if not self._said:
            step = self._begin(rendered)
        elif self._as_template(whole[len(self.messages) :]):
            step = self._follow(rendered)
        else:
            step = self._append(rendered)
        self.messages, self._awaits = whole, True
        self.steps.append(step)
        return self.ids

    def reply(
        self,
        ids: Sequence[int],
        log_probabilities: Sequence[float] | None = None,
        message: JsonMapping | None = None,
        *,
        finish_reason: str | None = None,
        weights: Sequence[float] | None = None,
    ) -> JsonObject:
        """Take what was sampled after the last prompt.

        Args:
            ids: The sampled tokens, with the one that ended the reply.
            log_probabilities: Of each, in nats, when it was sampled; None: unknown.
            message: What the reply says, for the template; None: read from its text.
            finish_reason: Why it ended, in the words of OpenAI's API: `length` if a limit cut it,
                then it makes no call; `stop` or `tool_calls` if it ended by itself.
            weights: Loss weight of each token; None: 1.

        Returns:
            The message.

        Raises:
            ConfigError: No prompt waits for a reply; lengths differ; an id is not in the
                vocabulary; a log-probability is no number up to 0; a weight is below 0.
        """
        if not self._awaits:
            raise ConfigError("there is no prompt that waits for a reply; call prompt() first")
        number = len(self._said)
        ids, logs, own = check_reply(
            f"reply {number}", ids, log_probabilities, weights, self.tokenizer.vocab_size
        )
        before = self._path.ids[-1] if self._path.ids else None
        text, is_text = self._texts.text(ids, before)
        cut = finish_reason == CUT
        ended = self._texts.names.get(ids[-1], "") if ids else ""
        if message is None:
            said, _ = self._texts.text(without_end(ids, self._texts.names), before)
            found = message_of(said, self.template, self._tools, number, cut=cut or not ended)
        else:
            found = as_message(message)
            if found["role"] != "assistant":
                raise ConfigError(
                    f"the message of a reply has the role {found['role']!r}; expected assistant"
                )
            [found] = self._read([found], replies=True)
        self._said.append(
            Said(
                message=len(self.messages),
                before=self._sent,
                ids=tuple(ids),
                text=text,
                is_text=is_text,
                ended=ended,
                stopped=finish_reason in STOPPED,
                cut=cut,
            )
        )
        self.messages.append(found)
        self._prompts.append((len(self._done), len(self._path.ids)))
        self._path.sampled(number, ids, logs, own)
        self._proof.sampled(ids, own)
        self._sent += text
        self._has_logs = self._has_logs and log_probabilities is not None
        self._awaits = False
        return found

    def paths(self) -> tuple[TokenPath, ...]:
        """The token sequences so far, in the order in which they began, each up to its last sampled
        token; those without a reply of their own are left out.
        """
        return tuple(path for path in (*self._done, self._path.done()) if path.replies)

    def record(self) -> JsonObject:
        """Its steps as a record that `TrajectoryReader` reads: ids that were sent and sampled, with
        log-probabilities and messages.
        """
        paths = [*(path.ids.tolist() for path in self._done), self._path.ids]
        logs = [*(path.log_probabilities.tolist() for path in self._done), self._path.logs]
        weights = [*(path.weights.tolist() for path in self._done), self._path.weights]
        steps = []
        for (path, begin), said in zip(self._prompts, self._said, strict=True):
            end = begin + len(said.ids)
            steps.append(
                {
                    "prompt_ids": list(paths[path][:begin]),
                    "response_ids": list(said.ids),
                    "log_probabilities": logs[path][begin:end] if self._has_logs else None,
                    "mask": weights[path][begin:end],
                    "message": self.messages[said.message],
                    "finish_reason": CUT if said.cut else STOPPED[0],
                }
            )
        return {"steps": steps}

    def finish(
        self,
        *,
        reward: float | None = None,
        advantage: float | None = None,
        group: str | None = None,
        temperature: float | None = None,
        version: int | None = None,
        step_rewards: Sequence[float] = (),
        step_advantages: Sequence[float] = (),
    ) -> FinishedTrajectory:
        """The trajectory with what it earned, for `ps.write_trajectories`; see
        `FinishedTrajectory`.

        Raises:
            ConfigError: There is no reply, a number is not finite, or there is not one for each
                reply.
            ConversationError: The certificate has a problem.
        """
        certificate = self.certificate
        if not certificate.ok:
            raise ConversationError(f"trajectory: {certificate.problems[0]}")
        for name, given in (("step_rewards", step_rewards), ("step_advantages", step_advantages)):
            if len(given) not in (0, len(self._said)):
                raise ConfigError(f"{name}: {len(given)} numbers for {len(self._said)} replies")
        return FinishedTrajectory(
            paths=self.paths(),
            reward=reward,
            advantage=advantage,
            group=group,
            truncated=bool(self._said) and self._said[-1].cut,
            temperature=temperature,
            version=version,
            has_log_probabilities=self._has_logs,
            step_rewards=tuple(step_rewards),
            step_advantages=tuple(step_advantages),
        )

    @property
    def certificate(self) -> TrajectoryCertificate:
        """What was proven of each prompt, and that each sampled token is trained once."""
        return self._proof.certificate(self.paths())

    def __repr__(self) -> str:
        """One line, however long it is: counts."""
        paths = self.paths()
        return (
            f"Trajectory({len(self.messages)} messages, {len(self._said)} replies, {len(paths)} "
            f"paths, {sum(int((path.weights > 0).sum()) for path in paths)} tokens trained)"
        )

    def _repr_html_(self) -> str:
        """Notebook view: its paths as a tree, and what was sampled, rendered and rewritten."""
        return tree_html(self)

    def _read(self, messages: Sequence[JsonMapping], *, replies: bool = False) -> list[JsonObject]:
        """Messages as templates see them."""
        where = f"trajectory, from message {len(self.messages)} on"
        found, _ = read_messages([dict(one) for one in messages], "messages", _LAYOUT, where)
        refuse_media(found, {}, where)
        if self._said and not replies:
            for place, one in enumerate(found):
                if one["role"] == "assistant":
                    raise ConversationError(
                        f"{where}: message {place} is a reply; after the first prompt, replies "
                        "come by reply()"
                    )
        return found

    def _as_template(self, new: Sequence[JsonMapping]) -> bool:
        if self.history == "tool_cycle":
            return any(message["role"] == "user" for message in new)
        return self.history == "template"

    def _render(self, whole: Sequence[JsonObject]) -> _Whole:
        """The conversation in the form that the template accepts, with the prompt at its end."""
        plain = tuple({"content": None, **message} for message in whole)
        conversation = Conversation(
            messages=plain,
            message_weights=(DEFAULT_WEIGHTS,) * len(plain),
            forms=forms_of(plain, True, True),
            tools=self._tools,
            variables=self._variables,
        )
        try:
            conversation, rendered = render_form(
                conversation, self.template, prompted=True, likely=self._form
            )
        except RecordError as error:
            raise ConversationError(
                f"trajectory of {len(whole)} messages, message {len(whole) - 1} the last: {error}"
            ) from error
        self._form = conversation.changed
        parts = RenderedConversation(
            self.template, rendered, conversation.messages, conversation.tools, self._variables
        )
        return _Whole(rendered, parts, literal_of(rendered))

    def _begin(self, whole: _Whole) -> Step:
        ids = self._encode(None, whole.text, whole.literal)
        self._proof.sent(ids, whole.text, None, self._said)
        self._path.read(ids)
        self._sent = whole.text
        return Step("first")

    def _append(self, whole: _Whole) -> Step:
        """The text behind the last reply."""
        last = self._said[-1]
        turn = self._tails.turn(whole.conversation, last.message)
        begin = self._tails.begin(turn, last, whole.text, whole.literal)
        self._tails.check(whole.rendered, begin, last.message)
        self._extend(whole, begin)
        before = whole.text[: turn.begin]
        if before == last.before and whole.text.startswith(last.text, turn.begin):
            return Step("extends")
        kept = last.before + last.text
        return Step("extends", f"the template would rewrite it: {difference(kept, whole.text)}")

    def _follow(self, whole: _Whole) -> Step:
        """The text of the whole, which may be another than was sent."""
        last = self._said[-1]
        if last.is_text and whole.text.startswith(self._sent):
            self._extend(whole, len(self._sent))
            return Step("extends")
        ids, kept = self._rewritten(whole)
        if ids[: len(self._path.ids)] == self._path.ids:
            # Another text (normalised), the same ids.
            new = ids[len(self._path.ids) :]
            mine = [self._said[one] for one in self._path.replies]
            self._proof.sent(ids, whole.text, None, mine)
            self._path.read(new)
            self._sent = whole.text
            return Step("extends")
        why = (
            f"{len(kept)} of {len(self._said)} replies keep their ids; the template writes "
            f"{difference(whole.text, self._sent)}"
        )
        self._proof.sent(ids, whole.text, None, [self._said[one] for one in kept])
        self._done.append(self._path.done())
        self._path, self._sent = self._path.branch(ids), whole.text
        return Step("branch", why)

    def _rewritten(self, whole: _Whole) -> tuple[list[int], list[int]]:
        """Ids of the whole text, in which replies that are written as they were sampled keep
        theirs; and the numbers of those.
        """
        numbers = [one.message for one in self._said]
        turns: Mapping[int, Turn] = find_turns(whole.conversation, numbers)
        ids: list[int] = []
        kept: list[int] = []
        at = 0
        text = whole.text
        for number, one in enumerate(self._said):
            turn = turns.get(one.message)
            if turn is None or not one.is_text or turn.begin < at or len(turn.produced) > 1:
                continue
            end = turn.begin + len(one.text)
            whole_turn = end == turn.end or one.text == text[turn.begin : turn.words_end]
            if not (text.startswith(one.text, turn.begin) and whole_turn):
                continue
            between = slice(at, turn.begin)
            ids += self._encode(_last(ids), text[between], whole.literal[between])
            ids += one.ids
            kept.append(number)
            at = end
        return ids + self._encode(_last(ids), text[at:], whole.literal[at:]), kept

    def _extend(self, whole: _Whole, begin: int) -> None:
        tail, before = whole.text[begin:], _last(self._path.ids)
        ids = self._encode(before, tail, whole.literal[begin:])
        self._proof.sent(ids, tail, before, ())
        self._path.read(ids)
        self._sent += tail

    def _encode(self, before: int | None, text: str, literal: Bool) -> list[int]:
        return encode_behind(self.tokenizer, self._texts.names, before, text, literal)

    def _check_stops(self, stops: Collection[int]) -> None:
        for one in stops:
            if one not in self._texts.names:
                raise ConfigError(
                    f"stop id {one} is no control token of {self.tokenizer.name}; replies end with "
                    "control tokens"
                )


def _last(ids: Sequence[int]) -> int | None:
    return ids[-1] if ids else None
