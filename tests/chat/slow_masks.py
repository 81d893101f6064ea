"""What must be trained, found by plain renders alone: what each prompt lacks of the text with its
reply.

For the reply at place i, the prompt is the render of the messages before it with the generation
prompt, and the answer the render up to it. Where the whole text begins with both, the characters
between them are what the model must produce; whitespace after the answer is not its, nor what the
template writes at the end of every text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.chat.encoded_chat import EncodedChat
from penstock.chat.render.template import Template
from penstock.core.errors import RecordError

ALWAYS_PROMPTS = {
    "tool_chat_template_phi4_mini": "<|assistant|>",
    "tool_chat_template_toolace": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": (
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>"
    ),
}
"""Templates that end every text as if they were asked for a generation prompt, and how."""


@dataclass(frozen=True)
class Slow:
    """Characters to train of each reply for which the method works, and why it does not for the
    others.
    """

    spans: dict[int, tuple[int, int]]
    failures: dict[int, str]


def slow_spans(
    template: Template, messages: Sequence[Mapping[str, Any]], tools: Any = None
) -> Slow:
    whole = template.render_plain(messages, tools=tools)
    found = {
        place: _find(template, list(messages), place, tools, whole)
        for place, message in enumerate(messages)
        if message["role"] == "assistant"
    }
    return Slow(
        {place: span for place, span in found.items() if isinstance(span, tuple)},
        {place: why for place, why in found.items() if isinstance(why, str)},
    )


def _find(template, messages, place, tools, whole) -> tuple[int, int] | str:
    before = messages[:place]
    try:
        prompt = template.render_plain(before, tools=tools, add_generation_prompt=True)
        unprompted = template.render_plain(before, tools=tools)
        answer = template.render_plain(messages[: place + 1], tools=tools)
        if "add_generation_prompt" not in template.source and template.name not in ALWAYS_PROMPTS:
            prompt += _header(template, messages, place, tools, prompt)
    except RecordError:
        return "refused"
    always = ALWAYS_PROMPTS.get(template.name)
    answer = answer.removesuffix(always) if always else _without_tail(answer, prompt, unprompted)
    words = messages[place].get("content")
    words = words if isinstance(words, str) else ""
    end = len(answer.rstrip())
    blank = words[len(words.rstrip()) :]
    if words.strip() and answer.startswith(blank, end) and answer[:end].endswith(words.strip()):
        end += len(blank)
    begin = common_length(prompt, answer)
    if prompt[begin:].strip() or not whole.startswith(prompt[:begin]):
        return "opening"
    return (begin, end) if whole.startswith(answer[:end]) else "rewritten"


def _header(template, messages, place, tools, prompt) -> str:
    """What a template that knows no generation prompt writes before the words of any reply."""
    words = (
        [{"type": "text", "text": "QZ"}] if isinstance(messages[place]["content"], list) else "QZ"
    )
    told = template.render_plain(
        [*messages[:place], {"role": "assistant", "content": words}], tools=tools
    )
    header = told[len(prompt) :].partition("QZ")[0]
    return header if told.startswith(prompt) and header.strip() else ""


def _without_tail(answer: str, prompt: str, unprompted: str) -> str:
    """`answer` without what the template writes at the end of every text that it does not continue
    (Phi-3: EOS).
    """
    tail = unprompted[common_length(prompt, unprompted) :]
    # Both may go on with a marker, of which the first characters are the same.
    while tail and not tail[0].isspace() and tail[0] != "<" and len(tail) < len(unprompted):
        tail = unprompted[-len(tail) - 1 :]
    return answer.removesuffix(tail)


def common_length(one: str, other: str) -> int:
    """How many characters both begin with."""
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
                min(len(one), len(other)))  # fmt: skip


def slow_tokens(chat: EncodedChat, spans: Mapping[int, tuple[int, int]]) -> Any:
    """Which tokens are trained: those whose last character is, bool [tokens]."""
    wanted = np.zeros(len(chat.text), np.bool_)
    for begin, end in spans.values():
        wanted[begin:end] = True
    # A control token may take the whitespace after it along.
    ends = [
        begin + len(chat.text[begin:end].rstrip()) if control else end
        for begin, end, control in zip(chat.begins, chat.ends, chat.is_control, strict=True)
    ]
    return np.array(
        [end > begin and wanted[end - 1] for begin, end in zip(chat.begins, ends, strict=True)]
    )


def with_next_control(
    chat: EncodedChat, spans: Mapping[int, tuple[int, int]]
) -> dict[int, tuple[int, int]]:
    """The spans with the control token that follows each: in some families a model stops by
    beginning the next turn.
    """
    longer = {}
    for place, (begin, end) in spans.items():
        after = [
            last
            for first, last, control in zip(chat.begins, chat.ends, chat.is_control, strict=True)
            if control and first == end
        ]
        longer[place] = (begin, int(after[0]) if after else end)
    return longer
