"""Samples replies by a server with an OpenAI-compatible API that takes and returns ids of tokens,
such as vLLM or `penstock serve`; no weights are loaded here.

Each reply is proven at the wire: the server read the prompt that was sent, gave ids of the
vocabulary, a log-probability for each, and the token that ended the reply. A server that returns no
ids is refused at its first answer.

Settings that a request leaves out are the server's, and those of vLLM are the model's own
(`generation_config.json`), so each one is sent.

Source: vLLM's documentation of its OpenAI-compatible server (`return_token_ids`, `logprobs`,
`stop_token_ids`, `logprobs_mode`); `choices[].token_ids` there holds the id that ends a reply.
"""

import math
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, cast, final, get_args

from penstock.chat.trajectories.paths import common
from penstock.chat.trajectories.replies import ROUNDING
from penstock.core.errors import ConfigError, require_above_zero
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.learn.generation.settings import FinishReason, Generated, LogProbabilities, Sampling
from penstock.tokenizers import Tokenizer
from penstock.use.runs.daemon_threads import DaemonThreads
from penstock.use.runs.engine_client import EngineClient
from penstock.use.runs.samplers import Outcome

LogProbabilityKind = Literal["raw", "processed"]
_ABORTS = 5
"""How often a reply is asked for that the server gave up."""
_LENGTHS = ("max_model_len", "context_length")
"""What servers call the context of a model: vLLM, penstock."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteEngine:
    """A server that samples.

    Raises:
        ConfigError: A setting is out of range.
    """

    engine: str
    """With an environment: URL of a server with an OpenAI-compatible API that returns ids of tokens
    (vLLM, penstock serve), such as http://localhost:8000/v1. It samples in place of the run's
    weights, which are not loaded. A key is taken from the environment variable PENSTOCK_API_KEY.
    """
    engine_model: str | None = None
    """Name of the model there; None: the only one."""
    engine_logprobs: LogProbabilityKind = "raw"
    """What the server's log-probabilities are: the model's own (raw), as by default, or those of
    what was sampled, after temperature and filters (processed), as vLLM gives in its mode
    processed_logprobs. Raw ones need temperature 1 and no filters.
    """
    engine_seconds: float = 600.0
    """Maximum time for a reply, and for trying again while the server is away or busy."""

    def __post_init__(self) -> None:
        require_above_zero("rollouts", self, "engine_seconds")
        if self.engine_logprobs not in (kinds := get_args(LogProbabilityKind)):
            raise ConfigError(
                f"engine_logprobs must be {' or '.join(kinds)}, got {self.engine_logprobs!r}"
            )

    @classmethod
    def of(
        cls, engine: str | None, model: str | None, logprobs: LogProbabilityKind, seconds: float
    ) -> "RemoteEngine | None":
        """The server that arguments name; None: none.

        Raises:
            ConfigError: There are settings of it, but no server.
        """
        if engine is None:
            if model is not None or logprobs != "raw":
                raise ConfigError(
                    "engine_model and engine_logprobs are for a server; set engine to its address, "
                    "or leave them out"
                )
            return None
        return cls(
            engine=engine, engine_model=model, engine_logprobs=logprobs, engine_seconds=seconds
        )

    def check(self, sampling: Sampling) -> None:
        """Refuse sampling of which the server would not report what a policy needs.

        Raises:
            ConfigError: Log-probabilities would not be those of what was sampled; or the server's
                API has no such setting.
        """
        if sampling.json_schema is not None:
            raise ConfigError("json_schema is not sent to an engine; leave it out")
        changed = [*sampling.filters()]
        if sampling.temperature != 1:
            changed.insert(0, "temperature")
        if changed and self.engine_logprobs == "raw":
            raise ConfigError(
                f"engine {self.engine}: {', '.join(changed)} would change what is sampled, but not "
                "the log-probabilities that a server reports by default, and a policy compares "
                "these: keep temperature 1 and use no filter; or start the server so that it "
                "reports those of what was sampled (processed_logprobs is the mode of vLLM), and "
                "set engine_logprobs to processed"
            )


@final
class RemoteSampler:
    """Replies of a server; see `Sampler`.

    Args:
        engine: The server.
        tokenizer: Of the model there.
        stop_ids: Ids that end a reply.
        context_length: Maximum tokens of a prompt and its reply; the server's if that is less.
        at_once: Requests at the same time.

    Raises:
        ConfigError: The server cannot be reached, or serves several models and none is named.
    """

    def __init__(
        self,
        engine: RemoteEngine,
        tokenizer: Tokenizer,
        *,
        stop_ids: Collection[int],
        context_length: int,
        at_once: int,
    ) -> None:
        self._client = EngineClient(engine.engine, engine.engine_seconds)
        self.model, length = served_model(self._client, engine.engine_model)
        self.context_length = min(context_length, length or context_length)
        self._stop_ids = tuple(sorted(stop_ids))
        self._proof = ReplyProof(self._client.url, tokenizer, stop_ids)
        self._threads = DaemonThreads(at_once, "penstock-request")
        self._replies: dict[Future[Generated], int] = {}
        self._submitted = 0

    def submit(self, ids: Sequence[int], sampling: Sampling) -> int:
        """See `Sampler`."""
        if len(ids) >= self.context_length:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens, but the context of {self.context_length} must "
                "hold it and at least one more token; shorten it"
            )
        number, self._submitted = self._submitted, self._submitted + 1
        self._replies[self._threads.submit(self._reply, list(ids), sampling)] = number
        return number

    def done(self) -> list[tuple[int, Outcome]]:
        """See `Sampler`."""
        ready = [future for future in self._replies if future.done()]
        return [
            (self._replies.pop(future), future.exception() or future.result()) for future in ready
        ]

    def pending(self) -> Collection[Future[Any]]:
        """See `Sampler`."""
        return self._replies.keys()

    def close(self) -> None:
        """See `Sampler`."""
        self._client.close()
        self._threads.close()

    def _reply(self, ids: list[int], sampling: Sampling) -> Generated:
        room = self.context_length - len(ids)
        body = completion_body(ids, sampling, self.model, self._stop_ids, room)
        for _ in range(_ABORTS):
            answer = self._client.post("/completions", body)
            if (found := self._proof.generated(answer, ids, sampling)) is not None:
                return found
        raise ConfigError(
            f"engine {self._client.url}: gave up a reply {_ABORTS} times (finish_reason abort); "
            "see its log, then call again: what is over is kept"
        )


def served_model(client: EngineClient, named: str | None) -> tuple[str, int | None]:
    """Name of the model that a server is asked for, and the tokens that it reads, if it says so.

    Raises:
        ConfigError: The server has several, or does not say which, and none is named.
    """
    listed = (client.get("/models") or {}).get("data")
    models = {
        one["id"]: one
        for one in (listed if isinstance(listed, list) else [])
        if isinstance(one, dict) and isinstance(one.get("id"), str)
    }
    if named is None and len(models) != 1:
        raise ConfigError(
            f"engine {client.url}: serves {', '.join(models) or 'no model that it lists'}; set "
            "engine_model to the one that samples"
        )
    name = next(iter(models)) if named is None else named
    lengths = [models.get(name, {}).get(key) for key in _LENGTHS]
    return name, next((one for one in lengths if type(one) is int and one > 1), None)


def completion_body(
    ids: Sequence[int], sampling: Sampling, model: str, stop_ids: Sequence[int], room: int
) -> JsonObject:
    """A request to `/v1/completions` for one reply.

    Args:
        ids: The prompt.
        sampling: How tokens are chosen; all of it is sent, since servers have defaults of their
            own.
        model: Its name.
        stop_ids: Ids that end the reply.
        room: Tokens that the context has room for.
    """
    most = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    body: JsonObject = {
        "model": model,
        "prompt": list(ids),
        "max_tokens": most,
        "min_tokens": min(sampling.min_tokens, most),
        "seed": sampling.seed,
        "stop_token_ids": list(stop_ids),
        "return_token_ids": True,
        # That of the sampled token comes without being counted.
        "logprobs": 0,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        # −1: all, in every version of vLLM.
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return body


@final
class ReplyProof:
    """Checks a server's answers.

    Args:
        url: The server, for errors.
        tokenizer: Of the model there.
        stop_ids: Ids that end a reply.
    """

    def __init__(self, url: str, tokenizer: Tokenizer, stop_ids: Collection[int]) -> None:
        self._url, self._size = url, tokenizer.vocab_size
        self._ends = {*stop_ids, *tokenizer.special_tokens.values()}

    def generated(
        self, answer: JsonMapping, asked: list[int], sampling: Sampling
    ) -> Generated | None:
        """The reply in an answer; None: the server gave it up, as when new weights come.

        Raises:
            ConfigError: Something is missing or does not fit; says what.
        """
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise self._error("gave no single choice; expected the answer to one completion")
        choice: JsonObject = choices[0]
        reason = choice.get("finish_reason")
        if reason == "abort":
            return None
        if reason not in get_args(FinishReason):
            raise self._error(
                f"ended a reply with finish_reason {reason!r}; expected stop or length"
            )
        ids = self._ids(choice)
        self._check_prompt(answer, choice, asked)
        if reason == "stop" and not sampling.stop and ids[-1] not in self._ends:
            raise self._error(
                f"says that a reply ended by itself, but its last id {ids[-1]} ends none; expected "
                "the id that ended it in token_ids"
            )
        logs = self._logs(choice, len(ids))
        return Generated(
            tokens=tuple(ids),
            text=str(choice.get("text", "")),
            finish_reason=cast(FinishReason, reason),
            logprobs=tuple(LogProbabilities(one, ()) for one in logs),
        )

    def _ids(self, choice: JsonMapping) -> list[int]:
        ids = choice.get("token_ids")
        if ids is None:
            raise self._error(
                "gave no ids of tokens (choices[].token_ids): it does not know return_token_ids; "
                "take vLLM, penstock serve, or another server that has it"
            )
        if not _are_ids(ids) or not ids:
            raise self._error(f"gave the ids {ids!r:.60}; expected a list of at least one")
        if wrong := [one for one in ids if not 0 <= one < self._size]:
            raise self._error(
                f"gave id {wrong[0]}, which is not in the vocabulary of {self._size}; name the run "
                "or folder whose model it serves"
            )
        return list(ids)

    def _check_prompt(self, answer: JsonMapping, choice: JsonMapping, asked: list[int]) -> None:
        read = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
        usage = answer.get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if read is not None and read != asked:
            place = common(read, asked) if _are_ids(read) else 0
            raise self._error(
                f"read another prompt than the {len(asked)} tokens that it was sent, from token "
                f"{place} on; it must take ids as they are"
            )
        if type(count) is int and count != len(asked):
            raise self._error(
                f"read a prompt of {count} tokens, and was sent {len(asked)}; it must take ids as "
                "they are"
            )

    def _logs(self, choice: JsonMapping, count: int) -> list[float]:
        given = choice.get("logprobs")
        logs = given.get("token_logprobs") if isinstance(given, dict) else None
        if not isinstance(logs, list) or len(logs) != count:
            found = "no" if not isinstance(logs, list) else str(len(logs))
            raise self._error(
                f"gave {found} log-probabilities (logprobs.token_logprobs) for {count} tokens; "
                "expected one for each"
            )
        for place, one in enumerate(logs):
            fine = isinstance(one, int | float) and not isinstance(one, bool)
            if not (fine and math.isfinite(one) and one <= ROUNDING):
                raise self._error(
                    f"gave the log-probability {one!r:.40} for token {place} of a reply; expected "
                    "nats, 0 at most"
                )
        return [min(float(one), 0.0) for one in logs]

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"engine {self._url}: {what}")


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)
