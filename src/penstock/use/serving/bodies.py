"""The body of a request, read within limits of size and time.

A body is refused if it has another content type, is too large or too slow, is not a JSON object, or
holds invalid UTF-8, NaN or infinities, lone surrogates, nesting deeper than 200, numbers with
thousands of digits, or anything after the object.
"""

import asyncio

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from penstock.use.serving.refusals import ClientLeft, Refusal, json_kind
from penstock.use.serving.settings import ServeSettings


async def read_object(request: Request, settings: ServeSettings, most: int) -> dict[str, object]:
    """The JSON object in the body of a request, of at most `most` bytes.

    Raises:
        Refusal: 400, 408, 413 or 415.
        ClientLeft: The connection ended before the body did.
    """
    _check_headers(request)
    try:
        async with asyncio.timeout(settings.body_seconds):
            body = await _read(request, most)
    except TimeoutError:
        raise Refusal(
            408,
            f"the body did not arrive within {settings.body_seconds:g} s",
            code="body_too_slow",
            close=True,
        ) from None
    except ClientDisconnect:
        raise ClientLeft from None
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise Refusal(
            400, f"the body is a JSON {json_kind(value)}, expected an object", code="invalid_json"
        )
    return value


def _check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "")
    media, _, parameters = kind.partition(";")
    charset = parameters.partition("charset=")[2].strip().strip('"').lower()
    if media.strip().lower() != "application/json" or charset not in ("", "utf-8"):
        raise Refusal(
            415,
            f"content-type is {kind!r}, expected application/json in UTF-8",
            param="content-type",
            code="unsupported_media_type",
            close=True,
        )
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refusal(
            415,
            "send the body uncompressed",
            param="content-encoding",
            code="unsupported_media_type",
            close=True,
        )


async def _read(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced[:20]) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> Refusal:
    return Refusal(
        413,
        f"the body is larger than {limit:,} bytes; send less",
        code="body_too_large",
        close=True,
    )
