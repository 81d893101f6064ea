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

With a processor, messages may hold images, sounds or videos: `ids` have their tokens, and `images`
says where each stands. What stands before a reply stays there.

Costs a render of the conversation a prompt, and one more for each other form of its messages that
is tried.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

from penstock.chat.records.conversation import Form
from penstock.chat.records.layout_settings import LayoutSettings
from penstock.chat.records.messages import read_messages
from penstock.chat.records.tools import read_tools
from penstock.chat.render.excerpts import find_turns
from penstock.chat.render.template import Template, load_template
from penstock.chat.render.turns import Turn, difference
from penstock.chat.trajectories.finished import FinishedTrajectory
from penstock.chat.trajectories.notebook import tree_html
from penstock.chat.trajectories.paths import OpenPath, PathImage, TokenPath, keyed, moved
from penstock.chat.trajectories.prompt_images import (
    Placed,
    TrajectoryImages,
    as_plain,
    has_images,
    template_of,
)
from penstock.chat.trajectories.proof import Proof, TrajectoryCertificate
from penstock.chat.trajectories.replies import (
    CUT,
    STOPPED,
    Said,
    TokenTexts,
    as_message,
    check_reply,
    check_stops,
    message_of,
    without_end,
)
from penstock.chat.trajectories.seams import Stretch, encode_behind
from penstock.chat.trajectories.tails import Tails
from penstock.chat.trajectories.wholes import Whole, render_whole
from penstock.core.errors import ConfigError, ConversationError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.media.images import ImageSettings
from penstock.media.processor import Processor, load_processor
from penstock.media.prompts import PromptImages
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


@final
class Trajectory:
    """One conversation.

    Attributes:
        messages: All messages so far, with those of replies.
        steps: How each prompt continued those before it.
        pictures: Reads and finds its images; None: it has no processor.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | str | Path,
        template: Template | str | Path | None = None,
        *,
        tools: Sequence[JsonMapping] | None = None,
        history: History = "sampled",
        stop_ids: Collection[int] = (),
        processor: Processor | str | Path | None = None,
        image_settings: ImageSettings | None = None,
        **variables: Any,
    ) -> None:
        """Begin a trajectory.

        Args:
            tokenizer: The engine's tokenizer, or where to load it from.
            template: The chat template, or where to load it from; None: the processor's, or the
                tokenizer's own.
            tools: JSON schemas of functions, also to read calls; the template may write none.
            history: How prompts go on after a reply: sampled, template or tool_cycle; see above.
            stop_ids: Ids besides EOS that end a generation.
            processor: Of the model, or where to load it from: messages may then have images, or
                sounds. None: they are refused.
            image_settings: Which images are accepted, and where relative paths begin
                (`image_folder`); None: as for conversations that are prepared.
            variables: Variables of the template, such as enable_thinking.

        Raises:
            ConfigError: `history` is unknown, a stop id no control token, or a processor missing.
            TokenizerError: The vocabulary has no exact byte table.
        """
        if history not in HISTORIES:
            raise ConfigError(f"history must be one of {', '.join(HISTORIES)}, got {history!r}")
        self.tokenizer = (
            tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
        )
        if image_settings is not None and processor is None:
            raise ConfigError("image_settings are for a processor; give it, or leave them out")
        if isinstance(processor, str | Path):
            processor = load_processor(processor)
        if template is None:
            template = template_of(self.tokenizer, processor)
        elif not isinstance(template, Template):
            template = load_template(template, tokenizer=self.tokenizer)
        self.template, self.history = template, history
        self.messages: list[JsonObject] = []
        self.steps: list[Step] = []
        given = tools if tools is None or isinstance(tools, str | Mapping) else list(tools)
        self._tools = read_tools(given, "tools")
        self._variables = variables
        self._texts = TokenTexts(self.tokenizer)
        stops = {*stop_ids, *([] if self.tokenizer.eos_id is None else [self.tokenizer.eos_id])}
        check_stops(stops, self._texts.names, self.tokenizer.name)
        names = self._texts.names
        self._tails = Tails(
            template, frozenset(names.values()), frozenset(names[one] for one in stops), variables
        )
        self.pictures = None
        if processor is not None:
            settings = image_settings or ImageSettings()
            self.pictures = TrajectoryImages(processor, settings, self.tokenizer, template.name)
        slot = None if processor is None else processor.slot_id
        self._proof = Proof(self.tokenizer, self._texts, template.name, slot)
        self._asked: list[int] = []  # first message of each prompt
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
    def images(self) -> tuple[PathImage, ...]:
        """The images of `ids` in order, or sounds, or frames of videos, each with its tokens."""
        return tuple(self._path.images)

    def prompt_images(self) -> PromptImages | None:
        """The images of `ids` as our engine takes them; None: there are none.

        Raises:
            RecordError: An image is damaged, or the processor refuses it.
        """
        found = self.pictures if self._path.images else None
        return None if found is None else found.of_prompt(self.ids, self.images)

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
        self._form = rendered.form
        self._asked.append(len(self.messages))
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
        if self.pictures is not None:
            self.pictures.refuse_slots(f"reply {number}", ids)
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
        self._proof.sampled(ids, own, self.images)
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
        log-probabilities and messages; where there are images, with the new messages of each step.
        """
        paths = [*(path.ids.tolist() for path in self._done), self._path.ids]
        logs = [*(path.log_probabilities.tolist() for path in self._done), self._path.logs]
        weights = [*(path.weights.tolist() for path in self._done), self._path.weights]
        steps = []
        pictured = has_images(self.messages)
        for (path, begin), said, asked in zip(self._prompts, self._said, self._asked, strict=False):
            end = begin + len(said.ids)
            new = self.messages[asked : said.message]
            steps.append(
                {
                    **({"messages": as_plain(new)} if pictured else {}),
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
        if self.pictures is None or replies:
            refuse_media(found, {}, where)
        else:
            found = self.pictures.read(found, where)
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

    def _render(self, messages: Sequence[JsonObject]) -> Whole:
        return render_whole(messages, self.template, self._tools, self._variables, self._form)

    def _begin(self, whole: Whole) -> Step:
        made = self._encode(None, whole, 0, len(whole.text), self._placed(whole))
        self._proof.sent(made, None, self._said)
        self._path.read(made.ids, made.images)
        self._sent = whole.text
        return Step("first")

    def _append(self, whole: Whole) -> Step:
        """The text behind the last reply."""
        last = self._said[-1]
        turn = self._tails.turn(whole.conversation, last.message)
        begin = self._tails.begin(turn, last, whole.text, whole.literal)
        self._tails.check(whole.rendered, begin, last.message)
        self._extend(whole, begin, self._placed(whole, begin, last.message))
        before = whole.text[: turn.begin]
        if before == last.before and whole.text.startswith(last.text, turn.begin):
            return Step("extends")
        kept = last.before + last.text
        return Step("extends", f"the template would rewrite it: {difference(kept, whole.text)}")

    def _follow(self, whole: Whole) -> Step:
        """The text of the whole, which may be another than was sent."""
        last, placed = self._said[-1], self._placed(whole)
        seen = sum(one.at < len(self._sent) for one in placed)
        if last.is_text and whole.text.startswith(self._sent) and seen == len(self._path.images):
            self._extend(whole, len(self._sent), placed)
            return Step("extends")
        made, kept = self._rewritten(whole, placed)
        path = self._path
        if keyed(made.ids, made.images)[: len(path.ids)] == path.keys:
            # Another text (normalised), the same ids.
            mine = [self._said[one] for one in path.replies]
            self._proof.sent(made, None, mine)
            new = [one for one in made.images if one[1].begin >= len(path.ids)]
            path.read(made.ids[len(path.ids) :], moved(new, -len(path.ids)))
            self._sent = whole.text
            return Step("extends")
        why = (
            f"{len(kept)} of {len(self._said)} replies keep their ids; the template writes "
            f"{difference(whole.text, self._sent)}"
        )
        self._proof.sent(made, None, [self._said[one] for one in kept])
        self._done.append(path.done())
        self._path, self._sent = path.branch(made.ids, made.images), whole.text
        return Step("branch", why)

    def _rewritten(self, whole: Whole, placed: Sequence[Placed]) -> tuple[Stretch, list[int]]:
        """The whole text, in which replies that are written as they were sampled keep their ids;
        and the numbers of those.
        """
        numbers = [one.message for one in self._said]
        turns: Mapping[int, Turn] = find_turns(whole.conversation, numbers)
        made = Stretch([], [], "")
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
            between = self._encode(_last(made.ids), whole, at, turn.begin, placed)
            made = made.joined(between).joined(Stretch([*one.ids], [], one.text))
            kept.append(number)
            at = end
        return made.joined(self._encode(_last(made.ids), whole, at, len(text), placed)), kept

    def _extend(self, whole: Whole, begin: int, placed: Sequence[Placed]) -> None:
        before = _last(self._path.ids)
        made = self._encode(before, whole, begin, len(whole.text), placed)
        self._proof.sent(made, before, ())
        self._path.read(made.ids, made.images)
        self._sent += whole.text[begin:]

    def _placed(self, whole: Whole, begin: int = 0, after: int = -1) -> Sequence[Placed]:
        """The images in a text, from a character on, which belong to messages after one."""
        return () if self.pictures is None else self.pictures.find(whole, begin, after)

    def _encode(
        self, before: int | None, whole: Whole, begin: int, end: int, placed: Sequence[Placed]
    ) -> Stretch:
        """The tokens of a part of a text."""
        text, literal, names = whole.text[begin:end], whole.literal[begin:end], self._texts.names
        if self.pictures is None:
            return Stretch(encode_behind(self.tokenizer, names, before, text, literal), [], text)
        images = [one.image for one in placed if begin <= one.at < end]
        return self.pictures.encode(names, before, text, literal, images)


def _last(ids: Sequence[int]) -> int | None:
    return ids[-1] if ids else None
