"""The families' markers against the templates that models ship, rendered, tokenized and scanned.

Every word says whose it is, so a wrong mask shows: the trained text must be the assistant's words,
all of them, and stop tokens; nobody else's.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from makers.tokenizers import tiny_tokenizer
from penstock import load_tokenizer
from penstock.chat.masks.families import Family, detect_family, family
from penstock.chat.masks.scanning import scan
from penstock.chat.render.template import Template, load_template
from penstock.core.errors import RecordError
from penstock.tokenizers import Tokenizer

EXPECTED = {
    "alpaca": None,
    "chatml": "chatml",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "gemma3": "gemma3",
    "gemma3n": "gemma3n",
    "llama3": "llama3",
    "llama3_2_vision": "llama3_2_vision",
    "llama4": "llama4",
    "llava": "llava",
    "mistral_v1": "mistral_v1",
    "mistral_v2v3": "mistral_v3",
    "phi_3": "phi_3",
    "phi_4": "phi_4",
    "mistral_v7_tekken": "mistral_v7_tekken",
    "pixtral": "pixtral",
    "qwen2_vl": "qwen2_vl",
    "qwen3": "chatml",
    "llama-2-chat": "llama2",
    "mistral-instruct": "mistral_v1",
    "openchat-3.5": None,
    "vicuna": None,
    "zephyr": "zephyr",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "command_r",
    "GLM-4.6": "glm4",
    "HuggingFaceTB-SmolLM3-3B": "chatml",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral3",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "chatml",
    "Qwen-QwQ-32B": "chatml",
    "Qwen-Qwen2.5-7B-Instruct": "chatml",
    "Qwen-Qwen3-0.6B": "chatml",
    "Qwen3.5-4B": "qwen3_5",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek",
    "google-gemma-2-2b-it": "gemma",
    "google-gemma-4-31B-it": "gemma4",
    "llama-cpp-rwkv-world": None,
    "meta-llama-Llama-3.1-8B-Instruct": "llama3",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3",
    "microsoft-Phi-3.5-mini-instruct": "phi_3",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral_v3",
    "openai-gpt-oss-120b": "gpt_oss",
    "unsloth-mistral-Devstral-Small-2507": "mistral3",
    "deepseekv3_training": "deepseek",
    "gptoss_training": "gpt_oss",
    "llama3_training": "llama3",
    "phi3_training": "phi_3",
    "qwen2_5_training": "chatml",
    "qwen3_training": "chatml",
    "qwen3_vl_training": "qwen2_vl",
    "template_baichuan": None,
    "template_chatglm2": None,
    "template_falcon_180b": None,
    "tool_chat_template_hermes": "chatml",
    "tool_chat_template_llama3.2_pythonic": "llama3",
    "tool_chat_template_mistral_parallel": "mistral_v3",
    "tool_chat_template_phi4_mini": "phi_4_mini",
    "tool_chat_template_toolace": "llama3",
}
"""By the file's name without `.jinja`."""

KNOWN = sorted(name for name, found in EXPECTED.items() if found)


def path_of(real_data: Path, name: str) -> Path:
    return next(iter(sorted(real_data.joinpath("chat_templates").glob(f"*/{name}.jinja"))))


@pytest.mark.real_data
def test_every_template_is_recognised_or_not_as_it_should_be(real_data):
    paths = sorted(real_data.joinpath("chat_templates").glob("*/*.jinja"))
    found = {path.stem: detect_family(path.read_text()) for path in paths}
    assert {name: found[name] and found[name].name for name in EXPECTED} == EXPECTED
    assert set(found) == set(EXPECTED)


def message(role: str, number: int, before: str = "", after: str = "") -> dict:
    text = " ".join(f"{role}{number}{letter}" for letter in "abc")
    return {"role": role, "content": before + text + after}


def call(number: int) -> dict:
    arguments = {"q": f"assistant{number}x"}
    function = {"name": "lookup", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abc123def", "type": "function", "function": function}],
    }


def tool(number: int) -> dict:
    return message("tool", number) | {"tool_call_id": "abc123def", "name": "f"}


CONVERSATIONS: dict[str, list[dict]] = {
    "one turn": [message("user", 1), message("assistant", 1)],
    "several turns": [message(role, n) for n in (1, 2, 3) for role in ("user", "assistant")],
    "a system message": [message("system", 1), message("user", 1), message("assistant", 1)],
    "newlines around": [
        *(message("user", 1, "\n\n", "\n"), message("assistant", 1, "\n", "\n")),
        *(message("user", 2, "\n"), message("assistant", 2, "\n\n\n")),
    ],
    "spaces around": [message("user", 1, "  ", " "), message("assistant", 1, "  ", " \n")],
    "a tool": [message("user", 1), call(1), tool(1), message("assistant", 2)],
    "two results": [message("user", 1), call(1), tool(1), tool(2), message("assistant", 2)],
    "a tool, then more": [
        *(message("user", 1), call(1), tool(1), message("assistant", 2)),
        *(message("user", 2), message("assistant", 3)),
    ],
}

PARAMETERS = {"type": "object", "properties": {"q": {"type": "string", "description": "what"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "lookup", "description": "look", "parameters": PARAMETERS},
    }
]

NO_HEADER_BEHIND_TOOLS = {"phi_3"}
"""axolotl's template writes the assistant's header behind a user's turn only."""

ENDS_NOT_WRITTEN: dict[str, Callable[[list[dict]], int]] = {
    # The last turn ends where the next one would begin.
    "GLM-4.6": lambda messages: 1,
    "llava": lambda messages: sum(m["role"] == "assistant" for m in messages),
    # A call with empty content becomes two turns, the second of them empty.
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": lambda messages: (
        -sum("tool_calls" in m for m in messages)
    ),
}
"""How many turns of the assistant the template leaves without an end."""


def words(text: str, role: str) -> list[str]:
    return re.findall(rf"{role}\d[a-z]", text)


def rendered(template: Template, messages: list[dict], eos: str) -> str:
    """The text, with what this template needs beside the messages: tools, or arguments that are
    text.
    """
    as_text = json.loads(json.dumps(messages))
    for m in as_text:
        for entry in m.get("tool_calls", ()):
            entry["function"]["arguments"] = json.dumps(entry["function"]["arguments"])
    reasons = []
    for given, tools in ((messages, None), (messages, TOOLS), (as_text, None)):
        try:
            return template.render_plain(given, tools=tools, eos_token=eos)
        except RecordError as error:
            reasons.append(str(error))
    return pytest.skip(f"the template refuses it: {reasons[0]}")


@pytest.fixture(scope="session")
def family_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    """A byte-level tokenizer with the control tokens of a family, whose newlines merge."""
    made: dict[str, Tokenizer] = {}
    texts = ["\n\n one\n two\n\n\n three  four", "\n\n x\n\n\n y\n\n", ":\n\n a"] * 30

    def make(name: str) -> Tokenizer:
        if name not in made:
            entry = family(name)
            controls = [
                text
                for text in dict.fromkeys(
                    (*entry.control, *entry.optional, *entry.media, *entry.stop)
                )
                if text != "eos_token"
            ]
            made[name] = tiny_tokenizer(tmp_path_factory.mktemp(name), texts, 330, controls)
        return made[name]

    return make


def check(tokenizer: Tokenizer, entry: Family, path: Path, messages: list[dict]) -> None:
    """Render, tokenize and scan; every word and every end must be where it belongs."""
    if path.stem in NO_HEADER_BEHIND_TOOLS and any(m["role"] == "tool" for m in messages):
        pytest.skip("nothing in the text says that the assistant speaks")
    eos = next(
        text for text, i in tokenizer.special_tokens.items() if i == entry.stop_ids(tokenizer)[0]
    )
    text = rendered(load_template(path, tokenizer=tokenizer), messages, eos)
    ids, boundaries = tokenizer.encode(text, allow_control=True), entry.resolve(tokenizer)
    weights = scan(ids, boundaries)
    pieces = [
        tokenizer.decode(part) for part in np.split(ids, np.flatnonzero(np.diff(weights)) + 1)
    ]
    trained = "".join(pieces[0 if weights[0] else 1 :: 2])
    assert words(trained, "assistant") == words(text, "assistant"), trained
    for other in ("user", "system", "tool"):
        assert not words(trained, other), trained
    ends = {marker.ids[0] for b in boundaries if b.role == "assistant" for marker in b.ends}
    written = sum(m["role"] == "assistant" for m in messages)
    written -= ENDS_NOT_WRITTEN.get(path.stem, lambda messages: 0)(messages)
    assert np.isin(ids[weights > 0], list(ends)).sum() == written, trained


@pytest.mark.real_data
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", KNOWN)
def test_the_assistants_words_are_trained_and_no_others(
    real_data, family_tokenizer, name, conversation
):
    entry = family(EXPECTED[name])
    check(
        family_tokenizer(entry.name), entry, path_of(real_data, name), CONVERSATIONS[conversation]
    )


QWEN, LLAMA, MISTRAL = "hf_derived/qwen2.5", "hf/phi-3-mini", "spm/mistral-v3.model"
TEKKEN = "tekken/tekken_240911.json.gz"
PAIRS = [
    *[(QWEN, name) for name in KNOWN if EXPECTED[name] in ("chatml", "qwen2_vl", "qwen3_5")],
    *[
        (LLAMA, name)
        for name in KNOWN
        if EXPECTED[name] in ("phi_3", "llama2", "mistral_v1", "zephyr")
    ],
    *[
        (MISTRAL, name)
        for name in KNOWN
        if EXPECTED[name] in ("mistral_v1", "mistral_v3", "llama2")
    ],
    *[
        (TEKKEN, name)
        for name in KNOWN
        if EXPECTED[name] in ("mistral_v3", "pixtral", "mistral_v7_tekken", "mistral3")
    ],
]


@pytest.fixture(scope="session")
def real_tokenizer(real_data: Path) -> Callable[[str], Tokenizer]:
    return cache(lambda name: load_tokenizer(real_data / "tokenizers" / name))


@pytest.mark.real_data
@pytest.mark.parametrize(("vocabulary", "name"), PAIRS)
def test_with_real_tokenizers(real_data, real_tokenizer, vocabulary, name):
    entry, tokenizer = family(EXPECTED[name]), real_tokenizer(vocabulary)
    refused = 0
    for messages in CONVERSATIONS.values():
        try:
            check(tokenizer, entry, path_of(real_data, name), messages)
        except pytest.skip.Exception:
            refused += 1
    assert refused <= 4
