"""Answers of `/v1/responses`: whole, or as the named events of OpenAI's Responses API.

Source: OpenAI's API reference, "Responses" and "Streaming events". A stream ends with
`response.completed` or `response.incomplete`; if the server must cut it, with `error`.
`tokens_dropped` is our addition.
"""

import secrets
import time
from collections.abc import Sequence
from typing import final

from penstock.chat.calls import Call, Family, Splitter
from penstock.learn.generation import Event, Sampling
from penstock.use.serving.refusals import Refusal, json_bytes
from penstock.use.serving.response_requests import ResponsesRequest
from penstock.use.serving.responses import Choice, as_tool_call
from penstock.use.serving.token_texts import Json, as_chat


@final
class ResponsesWriter:
    """The answer to one request, which has one reply."""

    end = b""
    sends_all = False

    def __init__(
        self,
        model: str,
        asked: ResponsesRequest,
        sampling: Sampling,
        tokens_dropped: int,
        family: Family | None,
    ) -> None:
        """Args: `sampling`: with the model's defaults; `family`: how the model writes calls; None:
        nothing is taken for a call.
        """
        self._asked, self._sampling, self._dropped = asked, sampling, tokens_dropped
        self._splitter = Splitter(
            family, asked.chat.offered, None if asked.parallel_tool_calls else 1
        )
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
        }
        self._model, self._message_id = model, f"msg_{secrets.token_hex(12)}"
        self._sent, self._text, self._begun, self._reported = 0, "", False, 0
        self._output: list[Json] = []
        self._logprobs: list[Json] = []
        self._reason: str | None = None

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """A `response`."""
        [choice] = choices
        content = "".join(map(self._splitter.push, choice.texts))
        rest, calls = self._splitter.finish()
        self._reason, self._text, self._logprobs = (
            choice.finish_reason,
            content + rest,
            choice.logprobs,
        )
        if self._text or not calls:
            self._output.append(self._message(self._status()))
        self._output += [_call_item(call, self._status()) for call in calls]
        return self._response(self._status(), usage)

    def opening(self, index: int) -> list[Json]:
        """The events before the first token."""
        started = self._response("in_progress", None)
        return [
            self._event(f"response.{name}", response=started) for name in ("created", "in_progress")
        ]

    def chunk(self, index: int, event: Event, logprobs: Json | None) -> list[Json]:
        """The events of a piece of text; at the end also those of calls."""
        text, ends = self._splitter.push(event.text), event.finish_reason is not None
        calls: list[Call] = []
        if ends:
            rest, calls = self._splitter.finish()
            text, self._reason = text + rest, event.finish_reason
        events = self._said(text, [] if logprobs is None else [logprobs])
        if ends:
            if not calls and not self._begun:
                events += self._begin_message()
            events += self._end_message() if self._begun else []
            for call in calls:
                events += self._called(call)
        return events

    def closing(self, usage: Json) -> list[Json]:
        """The event with the whole answer and the usage."""
        status = self._status()
        return [self._event(f"response.{status}", response=self._response(status, usage))]

    def error(self, refusal: Refusal) -> Json:
        """The event of an error."""
        return self._event("error", code=refusal.code, message=str(refusal), param=refusal.param)

    def framed(self, chunk: Json) -> bytes:
        """An event with its name."""
        return b"event: " + str(chunk["type"]).encode() + b"\ndata: " + json_bytes(chunk) + b"\n\n"

    def _event(self, kind: str, **fields: object) -> Json:
        event = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        return event

    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _part(self) -> Json:
        return {
            "type": "output_text",
            "text": self._text,
            "annotations": [],
            "logprobs": as_chat(self._logprobs),
        }

    def _message(self, status: str) -> Json:
        content = [] if status == "in_progress" else [self._part()]
        return {
            "id": self._message_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _said(self, text: str, logprobs: list[Json]) -> list[Json]:
        """The events of a piece of text."""
        if not text:
            self._logprobs += logprobs
            return []
        events = [] if self._begun else self._begin_message()
        # Those of tokens that were held back come with the text.
        new, self._logprobs = (
            [*self._logprobs[self._reported :], *logprobs],
            [*self._logprobs, *logprobs],
        )
        self._reported = len(self._logprobs)
        self._text += text
        return [
            *events,
            self._event(
                "response.output_text.delta", **self._place, delta=text, logprobs=as_chat(new)
            ),
        ]

    @property
    def _place(self) -> Json:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _begin_message(self) -> list[Json]:
        self._begun = True
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            self._event(
                "response.output_item.added", output_index=0, item=self._message("in_progress")
            ),
            self._event("response.content_part.added", **self._place, part=part),
        ]

    def _end_message(self) -> list[Json]:
        item = self._message(self._status())
        self._output.append(item)
        logprobs = as_chat(self._logprobs)
        return [
            self._event(
                "response.output_text.done", **self._place, text=self._text, logprobs=logprobs
            ),
            self._event("response.content_part.done", **self._place, part=self._part()),
            self._event("response.output_item.done", output_index=0, item=item),
        ]

    def _called(self, call: Call) -> list[Json]:
        """The events of a call."""
        item, place = _call_item(call, self._status()), len(self._output)
        self._output.append(item)
        begun = {**item, "arguments": "", "status": "in_progress"}
        where = {"item_id": item["id"], "output_index": place}
        arguments, kind = item["arguments"], "response.function_call_arguments"
        return [
            self._event("response.output_item.added", output_index=place, item=begun),
            self._event(f"{kind}.delta", **where, delta=arguments),
            self._event(f"{kind}.done", **where, arguments=arguments, name=item["name"]),
            self._event("response.output_item.done", output_index=place, item=item),
        ]

    def _response(self, status: str, usage: Json | None) -> Json:
        asked = self._asked
        text = {"format": {"type": "text"}}
        if asked.text is not None and asked.text.format is not None:
            text = {"format": asked.text.format.model_dump(by_alias=True, exclude_none=True)}
        return {
            **self._head,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": {},
            "model": self._model,
            "output": list(self._output),
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": self._sampling.temperature,
            "text": text,
            "tool_choice": asked.tool_choice,
            "tools": [
                {"description": None, "parameters": None, **tool.model_dump()}
                for tool in asked.tools
            ],
            "top_p": self._sampling.top_p,
            "truncation": asked.truncation,
            "usage": None if usage is None else _usage(usage),
            "tokens_dropped": self._dropped,
        }


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _call_item(call: Call, status: str) -> Json:
    made = as_tool_call(call)
    function = made["function"]
    name = f"fc_{secrets.token_hex(12)}"
    return {
        "id": name,
        "type": "function_call",
        "call_id": made["id"],
        **function,
        "status": status,
    }
