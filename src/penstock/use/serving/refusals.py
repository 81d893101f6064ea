"""Refusals: error answers in OpenAI's format, as strict JSON.

    {"error": {"message": …, "type": …, "param": the field at fault or null, "code": …}}

A refusal is an answer, not an error of the server, so it is not logged. Any other exception becomes
a 500.
"""

import json
from collections.abc import Mapping
from typing import final

from starlette.responses import Response

KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""Status → OpenAI's error type; other 4xx are invalid_request_error, 5xx server_error."""


def json_bytes(value: object) -> bytes:
    """JSON in UTF-8; a lone surrogate, which UTF-8 cannot encode, becomes its JSON escape."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", "backslashreplace"
    )


@final
class Refusal(Exception):  # noqa: N818
    """Raised to answer a request with an error.

    Args:
        status: The HTTP status.
        message: Where, what was found, what was expected, and the cure.
        param: The field at fault.
        code: An identifier for programs.
        retry_after: Seconds after which the client may retry.
        close: Close the connection, because the rest of the request was not read.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {"connection": "close"} if close else {}
        if retry_after is not None:
            self.headers["retry-after"] = str(max(1, round(retry_after)))
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"

    @property
    def body(self) -> Mapping[str, object]:
        """The JSON body."""
        kind = KINDS.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    def response(self) -> Response:
        """The HTTP response."""
        return JsonResponse(self.body, self.status, self.headers)


def bad_request(message: str, param: str | None, code: str = "invalid_value") -> Refusal:
    """A 400 that names the field at fault."""
    return Refusal(400, message, param=param, code=code)


@final
class ClientLeft(Exception):  # noqa: N818
    """The client closed its connection, so there is nobody to answer."""


def internal_error() -> Refusal:
    """The answer to an error of the server; it reveals nothing about the cause."""
    return Refusal(
        500, "the server failed at this request; its log has the reason", code="internal_error"
    )


@final
class JsonResponse(Response):
    """A JSON response; its texts may hold any characters."""

    media_type = "application/json"

    def __init__(
        self, content: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(json_bytes(content), status, headers)


def json_kind(value: object) -> str:
    """JSON's word for the type of a value, for messages."""
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
