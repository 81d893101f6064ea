"""The application: its routes, their shared state, and the chat page.

`/` the chat page · `/health` · `/metrics` · `/v1/models` · `/v1/completions` ·
`/v1/chat/completions` · `/v1/responses`

The chat page is one document with its style and script inside; it uses only `/v1`. Texts of models
and users become text nodes, never HTML. The page's content security policy allows only the script
with the given hash, and only requests to its own server.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from typing import TypeVar, final

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from penstock.chat.calls import FORCED, Family, family_of
from penstock.core.page_assets import asset, inline_hash
from penstock.use.serving.admission import Admission, Ask, Generating
from penstock.use.serving.bodies import read_object
from penstock.use.serving.guard import Guard
from penstock.use.serving.metrics import MEDIA_TYPE, Metrics
from penstock.use.serving.refusals import JsonResponse, Refusal, bad_request, internal_error
from penstock.use.serving.requests import ChatRequest, CompletionRequest, parse
from penstock.use.serving.response_answers import ResponsesWriter
from penstock.use.serving.response_requests import ResponsesRequest, parse_response, renamed
from penstock.use.serving.responses import (
    Answering,
    ChatWriter,
    CompletionWriter,
    Writer,
    unless_left,
)
from penstock.use.serving.served_model import ServedModel
from penstock.use.serving.settings import BYTES_OF_TOKEN, LEAST_BODY, ServeSettings
from penstock.use.serving.token_texts import TokenTexts
from penstock.use.serving.worker import EngineThread

Kind = TypeVar("Kind", CompletionRequest, ChatRequest, ResponsesRequest)
_log = logging.getLogger("penstock.serving")


@cache
def chat_page() -> tuple[str, str]:
    """The page, and its content security policy."""
    style, script = asset(__package__, "chat.css"), asset(__package__, "chat.js")
    policy = (
        f"default-src 'none'; style-src '{inline_hash(style)}'; "
        f"script-src '{inline_hash(script)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return asset(__package__, "chat.html").replace("{{style}}", style).replace(
        "{{script}}", script
    ), policy


@final
class Service:
    """A served model and the state that the routes share.

    Attributes:
        app: The ASGI application.
        engine: The thread that generates.
        admission: The queue before the engine.
        metrics: Counters.
    """

    def __init__(self, model: ServedModel, settings: ServeSettings) -> None:
        self.model, self.settings = model, settings
        self.engine, self.admission, self.metrics = (
            EngineThread(model.engine),
            Admission(settings),
            Metrics(),
        )
        self.metrics.watch(
            "sequences_running", "Sequences in the batch.", lambda: self.engine.running
        )
        self.metrics.watch(
            "requests_waiting", "Requests in the queue.", lambda: self.admission.waiting
        )
        self._names = TokenTexts(model.tokenizer)
        self._prompts = ThreadPoolExecutor(1, "penstock-prompts")
        self.app = self._routes(
            FastAPI(lifespan=self._lifespan, docs_url=None, redoc_url=None, openapi_url=None)
        )

    def drain(self) -> None:
        """Refuse new and waiting requests; cut running replies after the grace period."""
        self.admission.close()
        asyncio.get_running_loop().call_later(self.settings.grace_seconds, self.engine.cancel_all)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.engine.start()
        yield
        await self.engine.close()
        self._prompts.shutdown(wait=False)

    def _routes(self, app: FastAPI) -> FastAPI:
        app.add_api_route("/", self._page, methods=["GET"], response_model=None)
        app.add_api_route("/health", self._health, methods=["GET"], response_model=None)
        app.add_api_route("/metrics", self._metrics, methods=["GET"], response_model=None)
        app.add_api_route("/v1/models", self._models, methods=["GET"], response_model=None)
        app.add_api_route(
            "/v1/models/{name:path}", self._one_model, methods=["GET"], response_model=None
        )
        app.add_api_route("/v1/completions", self._complete, methods=["POST"], response_model=None)
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"], response_model=None)
        app.add_api_route("/v1/responses", self._respond, methods=["POST"], response_model=None)
        app.add_exception_handler(HTTPException, _no_route)
        app.add_exception_handler(Exception, _fault)
        app.add_middleware(Guard, settings=self.settings, metrics=self.metrics)
        return app

    async def _page(self) -> Response:
        text, policy = chat_page()
        return HTMLResponse(
            text, headers={"content-security-policy": policy, "cache-control": "no-cache"}
        )

    async def _health(self) -> Response:
        state = "stopping" if self.admission.closed else "ready" if self.engine.alive else "failed"
        return JsonResponse(
            {"status": state, "model": self.model.name}, 200 if state == "ready" else 503
        )

    async def _metrics(self) -> Response:
        return Response(self.metrics.text(), headers={"content-type": MEDIA_TYPE})

    async def _models(self) -> Response:
        return JsonResponse({"object": "list", "data": [self.model.described()]})

    async def _one_model(self, name: str) -> Response:
        self.model.check_name(name)
        return JsonResponse(self.model.described())

    async def _complete(self, request: Request) -> Response:
        def understand(body: dict[str, object]) -> tuple[CompletionRequest, Ask]:
            asked = parse(CompletionRequest, body, self.settings.messages)
            self.model.check_name(asked.model)
            return asked, self.model.completion(asked, self.settings)

        def writer(asked: CompletionRequest, ask: Ask) -> CompletionWriter:
            echo = self.model.echo(asked, ask) if asked.echo else ()
            prompts = ask.prompts if asked.return_token_ids else None
            return CompletionWriter(self.model.name, echo, asked.n, ask.writes, prompts)

        return await self._answer(request, understand, writer)

    async def _chat(self, request: Request) -> Response:
        def understand(body: dict[str, object]) -> tuple[ChatRequest, Ask]:
            asked = parse(ChatRequest, body, self.settings.messages)
            self.model.check_name(asked.model)
            return asked, self.model.chat(asked, self.settings)

        def writer(asked: ChatRequest, ask: Ask) -> ChatWriter:
            family = self._family(asked)
            most = None if asked.parallel_tool_calls else 1
            prompt = ask.prompts[0] if asked.return_token_ids else None
            return ChatWriter(
                self.model.name, ask.tokens_dropped, family, asked.offered, most, prompt
            )

        return await self._answer(request, understand, writer)

    async def _respond(self, request: Request) -> Response:
        def understand(body: dict[str, object]) -> tuple[ResponsesRequest, Ask]:
            asked = parse_response(body, self.settings)
            self.model.check_name(asked.model)
            try:
                ask = self.model.chat(asked.chat, self.settings)
            except Refusal as refusal:
                raise renamed(refusal) from None
            if ask.tokens_dropped and asked.truncation == "disabled":
                message = (
                    f"the input is {ask.tokens_dropped:,} tokens too long; shorten it, or set "
                    "truncation: auto"
                )
                raise bad_request(message, "input", "context_length_exceeded")
            return asked, ask

        def writer(asked: ResponsesRequest, ask: Ask) -> ResponsesWriter:
            return ResponsesWriter(
                self.model.name, asked, ask.sampling, ask.tokens_dropped, self._family(asked.chat)
            )

        return await self._answer(request, understand, writer)

    def _family(self, asked: ChatRequest) -> Family | None:
        """How the reply to a chat writes calls; None: it has none."""
        if not asked.offered or self.model.template is None:
            return None
        return FORCED if asked.callable else family_of(self.model.template.source)

    async def _answer(
        self,
        request: Request,
        understand: Callable[[dict[str, object]], tuple[Kind, Ask]],
        writer: Callable[[Kind, Ask], Writer],
    ) -> Response:
        most = self.settings.body_bytes
        if most is None:
            most = max(LEAST_BODY, BYTES_OF_TOKEN * self.model.context_length)
        more = 0 if self.model.images is None else self.settings.image_bytes
        body = await read_object(request, self.settings, most + more)
        self.admission.check()
        loop = asyncio.get_running_loop()
        asked, ask = await loop.run_in_executor(self._prompts, understand, body)
        if ask.sampling.json_schema is not None:
            compiled = await unless_left(
                request, self.model.compile(ask.sampling.json_schema, asked.schema_field)
            )
            ask = replace(ask, schema=compiled)
        generating = Generating(ask, self.engine, self.admission)
        answering = Answering(generating, writer(asked, ask), self._names, self.metrics)
        try:
            await unless_left(request, generating.enter())
        except BaseException:
            generating.close()
            raise
        if asked.stream:
            return answering.stream(include_usage=asked.include_usage)
        return await answering.whole(request)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        404: f"no such path: {request.url.path[:80]}",
        405: f"{request.method} is not allowed for this path",
    }
    refusal = Refusal(
        error.status_code,
        message.get(error.status_code, str(error.detail)),
        code="method_not_allowed" if error.status_code == 405 else "not_found",
    )
    refusal.headers |= dict(error.headers or {})
    return refusal.response()


async def _fault(request: Request, error: Exception) -> Response:
    """Answer with a 500; the log gets the traceback, because Starlette raises the error again."""
    return internal_error().response()
