"""Clients of a server, many at once: some read to the end, some leave midway, some send rubbish;
and what they saw.
"""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

JSON = {"content-type": "application/json"}
WORDS = [
    "the",
    "water",
    "comes",
    "down",
    "from",
    "a",
    "reservoir",
    "and",
    "turns",
    "wheels",
    "of",
    "turbines",
]
RUBBISH = (
    b"",
    b"{",
    b"\xff\xfe\x00",
    b"[" * 50_000,
    b'{"model": 5}',
    b'{"model": "%s", "prompt": "a", "temperature": NaN}',
    b'{"model": "%s", "prompt": "\\ud800"}',
    b'{"model": "%s", "prompt": "a", "n": 99999999999999999999999}',
    b'{"model": "%s", "messages": [{"role": "user"}]}',
    b"x" * 300_000,
)


@dataclass
class Report:
    """What clients saw."""

    codes: Counter[int] = field(default_factory=Counter)
    complete: int = 0
    left: int = 0
    torn: list[str] = field(default_factory=list)
    """Replies that were neither complete nor left by the client."""
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    """Seconds to the first token of each stream."""


@dataclass
class Load:
    """`clients` of which one in eight leaves and one in eight sends rubbish."""

    url: str
    model: str
    clients: int
    seconds: float
    max_tokens: int = 48

    def run(self) -> Report:
        """Ask until the time is over; each client's last reply is read to its end."""
        return asyncio.run(self._run())

    async def _run(self) -> Report:
        report, end = Report(), time.monotonic() + self.seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=600, limits=limits) as http:
            await asyncio.gather(
                *(self._client(number, http, end, report) for number in range(self.clients))
            )
        return report

    async def _client(
        self, number: int, http: httpx.AsyncClient, end: float, report: Report
    ) -> None:
        kinds = {0: self._leave, 1: self._send_rubbish, 2: self._read_whole}
        act, chance = kinds.get(number % 8, self._read_stream), random.Random(number)
        while time.monotonic() < end:
            try:
                await act(http, chance, report)
            except httpx.HTTPError as error:
                report.torn.append(repr(error))

    def _body(self, chance: random.Random, *, stream: bool) -> tuple[str, dict[str, object]]:
        text = " ".join(chance.choices(WORDS, k=chance.randint(1, 12)))
        wishes = {
            "model": self.model,
            "max_tokens": chance.randint(4, self.max_tokens),
            "stream": stream,
        }
        if chance.random() < 0.5:
            return "/v1/completions", {"prompt": text, **wishes}
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **wishes}

    async def _read_whole(
        self, http: httpx.AsyncClient, chance: random.Random, report: Report
    ) -> None:
        path, body = self._body(chance, stream=False)
        answer = await http.post(path, json=body)
        report.codes[answer.status_code] += 1
        if answer.status_code == 200:
            report.complete += 1
            report.tokens += answer.json()["usage"]["completion_tokens"]

    async def _read_stream(
        self, http: httpx.AsyncClient, chance: random.Random, report: Report
    ) -> None:
        path, body = self._body(chance, stream=True)
        begun, lines = time.perf_counter(), []
        async with http.stream(
            "POST", path, json={**body, "stream_options": {"include_usage": True}}
        ) as answer:
            report.codes[answer.status_code] += 1
            async for line in answer.aiter_lines():
                if line and not lines:
                    report.first.append(time.perf_counter() - begun)
                lines += [line] if line else []
        if answer.status_code != 200:
            await asyncio.sleep(0.1)
        elif lines[-1:] == ["data: [DONE]"]:
            report.complete += 1
            report.tokens += json.loads(lines[-2].removeprefix("data: "))["usage"][
                "completion_tokens"
            ]
        else:
            report.torn.append(lines[-1] if lines else "nothing")

    async def _leave(self, http: httpx.AsyncClient, chance: random.Random, report: Report) -> None:
        path, body = self._body(chance, stream=chance.random() < 0.7)
        try:
            async with (
                asyncio.timeout(chance.uniform(0.01, 0.4)),
                http.stream("POST", path, json=body) as answer,
            ):
                report.codes[answer.status_code] += 1
                async for _ in answer.aiter_lines():
                    pass
            report.complete += answer.status_code == 200
        except TimeoutError:
            report.left += 1

    async def _send_rubbish(
        self, http: httpx.AsyncClient, chance: random.Random, report: Report
    ) -> None:
        path, _ = self._body(chance, stream=False)
        answer = await http.post(
            path, content=chance.choice(RUBBISH).replace(b"%s", self.model.encode()), headers=JSON
        )
        report.codes[answer.status_code] += 1
        await asyncio.sleep(0.05)


def resident_bytes(process: int) -> int:
    """Memory of a process that is in use now (Linux)."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096
