"""Where the text behind a sampled reply begins, in the text that a template writes for the whole
conversation.

The next prompt is the last one, the sampled tokens, and this tail. Nothing before it is looked at,
so a template may rewrite its history. The tail is found by provenance: the reply's turn ends
somewhere, and behind it the template writes nothing but what comes next.

Which end, by the last sampled token if it is a control token:

1. the turn ends with it: the end of the turn;
2. the text behind the turn begins with it, after white space: behind it. So it is with terminators
   that are written with the *next* message, and in GLM, whose stop tokens open it;
3. it is another stop id, or the engine says that it stopped there and the turn has no such token
   (gpt-oss samples `<|return|>` where the history has `<|end|>`): the end of the turn;
4. otherwise the reply was cut. If the turn begins with its text and no words follow, the tail
   begins behind that text, so the template closes what it opened (`</tool_call>`). If it is written
   otherwise, the template's terminator follows, with white space that belongs to it.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import final

import numpy as np

from penstock.chat.render.excerpts import find_turns
from penstock.chat.render.template import Rendered, Template, is_label
from penstock.chat.render.traced_text import GIVEN, LITERAL
from penstock.chat.render.turns import RenderedConversation, Turn
from penstock.chat.trajectories.replies import Said
from penstock.core.arrays import Bool
from penstock.core.errors import ConversationError, RecordError
from penstock.core.json_values import JsonMapping

_NAMES_ONLY = ("tool_call_id", "id")
"""Fields that a template may write with what follows a reply: the id of an answered call."""
_SHORT = 3
"""Characters of tools that may stand behind a reply by chance, such as a bracket."""


def literal_of(rendered: Rendered) -> Bool:
    """Which characters the template wrote, bool [characters]; roles may be markers."""
    flags = [run[1] == LITERAL or run[2] == "role" for run in rendered.runs]
    return np.repeat(np.array(flags, np.bool_), [run[0] for run in rendered.runs])


@final
@dataclass(slots=True)
class Tails:
    """Finds tails for one template.

    Args:
        template: The template.
        names: Names of the control tokens.
        stops: Names of those that end a generation.
        variables: Variables of the template.
    """

    template: Template
    names: Collection[str]
    stops: Collection[str]
    variables: JsonMapping
    _usual: str | None = field(default=None, init=False)

    def turn(self, whole: RenderedConversation, message: int) -> Turn:
        """The turn of the last reply.

        Raises:
            ConversationError: The template writes nothing for it.
        """
        turn = find_turns(whole, [message]).get(message)
        if turn is None:
            raise ConversationError(
                f"chat template {self.template.name}: writes nothing for message {message}, the "
                "last reply, so it is unknown where the next prompt goes on; give "
                "history='template'"
            )
        return turn

    def begin(self, turn: Turn, said: Said, text: str, literal: Bool) -> int:
        """First character of the tail behind a reply, in the text of the whole conversation."""
        end = turn.end
        if said.ended:
            if text.endswith(said.ended, turn.begin, end):
                return end
            at = end + len(text[end:]) - len(text[end:].lstrip())
            if text.startswith(said.ended, at) and literal[at]:
                return at + len(said.ended)
            closes = said.stopped and said.ended not in text[turn.begin : end]
            if said.ended in self.stops or closes:
                return end
        for words in (said.text, said.text.strip()):
            at = turn.begin + len(words)
            if words and text.startswith(words, turn.begin) and turn.words_end <= at <= end:
                return at
        control = self._control_before(text, literal, end)
        if control < end and self._closes(text[control:end]):
            return end
        while (
            turn.words_end < control < end and text[control - 1].isspace() and literal[control - 1]
        ):
            control -= 1
        return control

    def check(self, rendered: Rendered, begin: int, message: int) -> None:
        """Refuse a tail that holds words from before it: sent so, they would be there twice.

        Raises:
            ConversationError: It has some; names them.
        """
        at = 0
        for length, origin, path, _, _, _ in rendered.runs:
            at += length
            if at <= begin:
                continue
            what = ""
            if 0 <= origin <= message and not _is_name(path):
                what = f"{path} of message {origin}"
            elif origin == GIVEN and path.startswith("tools") and length > _SHORT:
                what = "the tools"
            if what:
                raise ConversationError(
                    f"chat template {self.template.name}: writes {what} again behind message "
                    f"{message}, a sampled reply; give history='template', which begins a new path "
                    "there"
                )

    def _control_before(self, text: str, literal: Bool, end: int) -> int:
        """First character of the control text of the template that ends at `end`; `end`: none."""
        found = [
            end - len(name)
            for name in self.names
            if name and text.endswith(name, 0, end) and literal[end - len(name) : end].all()
        ]
        return min(found, default=end)

    def _closes(self, control: str) -> bool:
        """Whether control text at the end of a turn closes something inside it, as `</think>` does,
        and is no terminator.
        """
        if control in self.stops:
            return False
        usual = self._usual_end()
        return not usual.strip() or (control.startswith("</") and not usual.endswith(control))

    def _usual_end(self) -> str:
        """What the template writes behind the words of a plain reply, in its turn."""
        if self._usual is None:
            self._usual = ""
            for content in ("A", [{"type": "text", "text": "A"}]):
                roles = ("user", "assistant", "user")
                asked = [{"role": role, "content": content} for role in roles]
                try:
                    rendered = self.template.render(asked, **self.variables)
                except RecordError:
                    continue
                whole = RenderedConversation(self.template, rendered, asked, None, self.variables)
                turn = find_turns(whole, [1]).get(1)
                if turn is not None and turn.words_end > turn.begin:
                    self._usual = rendered.text[turn.words_end : turn.end]
                    break
        return self._usual


def _is_name(path: str) -> bool:
    return is_label(path) or path.rpartition(".")[2] in _NAMES_ONLY
