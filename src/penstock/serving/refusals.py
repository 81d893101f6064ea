"""What a client is told when it does not get what it asked for, in OpenAI's shape.

    {"error": {"message": …, "type": …, "param": the field to blame or null, "code": …}}

A refusal is an answer, not an error of ours: nothing is logged. Anything else that is raised is a 500.
"""

from collections.abc import Mapping
from typing import Any, final

from starlette.responses import Response

from penstock.serving.json_bytes import json_bytes

KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""Status → OpenAI's word for it; other 4xx are invalid_request_error, 5xx server_error."""


@final
class Refusal(Exception):  # noqa: N818
    """A request is answered by this instead.

    Args:
        status: The HTTP status.
        message: Where, what was found, what was due, the cure.
        param: The field to blame.
        code: A word for programs.
        retry_after: Seconds after which it may be tried again.
        close: The connection is not used again, as the rest of the request was not read.
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
    def body(self) -> Mapping[str, Any]:
        """What is sent."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer."""
        return JsonResponse(self.body, self.status, self.headers)


@final
class ClientLeft(Exception):  # noqa: N818
    """The client closed its connection: nobody is there to be answered."""


def internal_error() -> Refusal:
    """What a client is told of a fault of ours: nothing about our insides."""
    return Refusal(500, "the server failed at this request; its log says why", code="internal_error")


@final
class JsonResponse(Response):
    """A JSON answer, whatever is in its texts."""

    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(json_bytes(content), status, headers)
