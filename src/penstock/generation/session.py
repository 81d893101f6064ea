"""A chat with a model: messages, replies that stream, and a window that rolls by whole turns.

Guarantees: what the model is given is what its template writes for the conversation, the system's message and the
newest turns always whole; how many tokens were left out is told; an empty reply leaves no trace in the conversation.
"""

from collections.abc import Iterator, Sequence
from typing import Any, final

from penstock.chat import Template
from penstock.errors import ConfigError
from penstock.generation.engine import Engine
from penstock.generation.events import Event, FinishReason
from penstock.generation.prompt import Prompt, fit_chat
from penstock.generation.settings import Sampling


def room_for(engine: Engine, sampling: Sampling) -> int:
    """Tokens that a prompt may have, so that a quarter of the context, or `max_tokens`, is left for the reply."""
    quarter = max(1, engine.context_length // 4)
    return engine.context_length - min(sampling.max_tokens or quarter, quarter)


@final
class Reply:
    """A reply while it is written: iterate over it for its text, piece by piece; `stop` ends it early.

    Attributes:
        prompt: What the model was given, and what was left out of it.
        text: So far.
        num_tokens: So far.
        finish_reason: None until it is complete, and where it was stopped.
    """

    def __init__(self, session: "ChatSession", asked: dict[str, Any], prompt: Prompt, events: Iterator[Event]) -> None:
        self.prompt = prompt
        self.text = ""
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._session, self._asked, self._events = session, asked, events

    def __iter__(self) -> Iterator[str]:
        for event in self._events:
            self.num_tokens += 1
            self.text += event.text
            self.finish_reason = event.finish_reason
            if event.text:
                yield event.text
        self._end()

    def stop(self) -> None:
        """Write no more; what there is becomes the reply. Nothing happens where it has ended."""
        self._end()

    def _end(self) -> None:
        self._events.close()  # type: ignore[attr-defined]
        self._session._keep(self, self._asked)


@final
class ChatSession:
    """One conversation with one engine, which it has for itself.

    Attributes:
        messages: So far, without the system's: a user's and the reply to it in turn.
        system: What the system says, or None.
    """

    def __init__(
        self,
        engine: Engine,
        template: Template,
        *,
        sampling: Sampling | None = None,
        system: str | None = None,
        tools: Sequence[Any] | None = None,
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.system = system
        self._engine, self._template, self._tools = engine, template, tools
        self._sampling = sampling or Sampling(min_tokens=1)
        self._current: Reply | None = None
        self._number = 0

    def reply(self, text: str) -> Reply:
        """Say something; the reply is written while it is iterated over.

        Each reply of a session draws other numbers: they are of the seed and of the reply's number.

        Raises:
            ConfigError: The reply before it is neither read to its end nor stopped.
            ConversationError: The message does not fit the context.
            RecordError: The template refuses the conversation.
        """
        if self._current is not None:
            raise ConfigError("the last reply is still being written; read it to its end, or stop() it")
        asked = {"role": "user", "content": text}
        prompt = fit_chat(
            [*self.whole(), asked],
            self._template,
            self._engine.tokenizer,
            room=room_for(self._engine, self._sampling),
            tools=self._tools,
        )
        events = self._engine.generate([prompt.ids], self._sampling, first_choice=self._number)
        self._current, self._number = Reply(self, asked, prompt, events), self._number + 1
        return self._current

    def whole(self) -> list[dict[str, Any]]:
        """The conversation with the system's message."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def clear(self) -> None:
        """Forget all turns; the system's message stays."""
        self.messages, self._number = [], 0

    def _keep(self, reply: Reply, asked: dict[str, Any]) -> None:
        """A turn has ended: it becomes part of the conversation, unless there is nothing in the reply."""
        if self._current is reply:
            self._current = None
            if reply.text.strip():
                self.messages += [asked, {"role": "assistant", "content": reply.text}]
