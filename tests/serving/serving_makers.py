"""An engine without a model, and servers on free ports."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import httpx
from openai import OpenAI

from makers.tokenizers import tiny_tokenizer
from patience import PATIENCE_SECONDS
from penstock.chat import load_template
from penstock.learn.generation import Event, LogProbabilities, Sampling
from penstock.tokenizers import Tokenizer
from penstock.use.serving import ServedModel, Server, ServeSettings

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' and not "
    "loop.first %}{{ raise_exception('the system message comes first') }}{% endif %}<|{{ "
    "message.role }}|>{{ message.content }}<|end|>{% endfor %}{% if add_generation_prompt "
    "%}<|assistant|>{% endif %}"
)
CONTROLS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
HTML = "<img src=x onerror=alert(1)>"


@final
class FakeEngine:
    """Says the same text to everyone, a token a step; remembers what was asked and who left.

    A prompt that holds `fail` makes the step fail, one that holds `forever` is answered until
    `max_tokens`. With `at_once` all text comes with the last token, as where it may be the
    beginning of a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        text: str = "Hello wörld 🙂!",
        seconds: float = 0.0,
        at_once: bool = False,
    ) -> None:
        self.tokenizer, self.seconds, self.at_once = tokenizer, seconds, at_once
        self.tokens = tokenizer.encode(text).tolist()
        self.running: dict[int, list[Any]] = {}
        self.asked: list[tuple[list[int], Sampling, int]] = []
        self.images: list[Any] = []
        self.cancelled: list[int] = []
        self.most = self.steps = 0

    def submit(
        self, prompt: Sequence[int], sampling: Sampling, *, choice: int, images: Any = None
    ) -> int:
        number = len(self.asked)
        self.images.append(images)
        self.asked.append((list(prompt), sampling, choice))
        self.running[number] = [0, self.tokenizer.decode(prompt), sampling, ""]
        self.most = max(self.most, len(self.running))
        return number

    def cancel(self, sequence: int) -> None:
        if self.running.pop(sequence, None) is not None:
            self.cancelled.append(sequence)

    def score(self, prompt: Sequence[int], most: int) -> list[LogProbabilities]:
        if "fail" in self.tokenizer.decode(prompt):
            raise RuntimeError("the secret of the engine")
        return [
            LogProbabilities(-token / 100, ((token, -token / 100), (1, -9.0))[:most])
            for token in prompt[1:]
        ]

    def step(self) -> list[Event]:
        self.steps += 1
        time.sleep(self.seconds)
        if any("fail" in state[1] for state in self.running.values()):
            raise RuntimeError("the secret of the engine")
        return [event for number in list(self.running) for event in self._one(number)]

    def _one(self, number: int) -> Iterator[Event]:
        state = self.running[number]
        at, prompt, sampling, said = state
        token = self.tokens[at % len(self.tokens)]
        whole = self.tokenizer.decode([self.tokens[i % len(self.tokens)] for i in range(at + 1)])
        ended = at + 1 == len(self.tokens) and "forever" not in prompt
        text = (
            "" if whole.endswith("\ufffd") or (self.at_once and not ended) else whole[len(said) :]
        )
        state[0], state[3] = at + 1, said + text
        reason = "stop" if ended else "length" if at + 1 == sampling.max_tokens else None
        if any(stop in state[3] for stop in sampling.stop):
            reason = "stop"
        reported = (
            None
            if sampling.logprobs is None
            else LogProbabilities(-0.5, ((token, -0.5), (1, -2.0))[: sampling.logprobs])
        )
        if reason:
            del self.running[number]
        yield Event(number, token, text, reason, reported)


def make_tokenizer(folder: Path) -> Tokenizer:
    return tiny_tokenizer(folder, ["some words"], 270, CONTROLS)


def make_model(
    tokenizer: Tokenizer,
    *,
    context_length: int = 256,
    chat: bool = True,
    images: Any = None,
    parameters: int | None = None,
    **engine: Any,
) -> ServedModel:
    return ServedModel(
        name="tiny",
        engine=FakeEngine(tokenizer, **engine),
        tokenizer=tokenizer,
        template=load_template(TEMPLATE, tokenizer=tokenizer) if chat else None,
        context_length=context_length,
        images=images,
        parameters=parameters,
    )


@final
class Running:
    """A server in a thread."""

    def __init__(self, model: ServedModel, **settings: Any) -> None:
        ready = threading.Event()
        self.model, self.engine = model, model.engine
        self.settings = ServeSettings(
            **{"port": 0, "requests_per_second": 0, "grace_seconds": 0.5, **settings}
        )
        self.server = Server(model, self.settings, on_ready=lambda _: ready.set())
        self.url, self.service = self.server.address, self.server.service
        self._thread = threading.Thread(target=self.server.serve_until_stopped)
        self._thread.start()
        assert ready.wait(PATIENCE_SECONDS)
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_SECONDS)

    def openai(self, **options: Any) -> OpenAI:
        return OpenAI(
            base_url=f"{self.url}/v1",
            **{"api_key": "none", "max_retries": 0, "timeout": PATIENCE_SECONDS, **options},
        )

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return self.http.post(path, json={"model": "tiny", **body})

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"penstock_{name}"))

    def stop(self) -> None:
        self.http.close()
        self.ask_to_stop()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()

    def ask_to_stop(self) -> None:
        self.server.should_exit = True


@contextmanager
def running(model: ServedModel, **settings: Any) -> Iterator[Running]:
    server = Running(model, **settings)
    try:
        yield server
    finally:
        server.stop()
