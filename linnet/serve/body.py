"""Reads the body of a request, a JSON object, within limits of size and time."""

import asyncio
import re

from fastapi import Request
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from linnet.serve.errors import ApiError, Disconnected

_JSON = re.compile(r"application/(\w+\+)?json\s*(;|$)", re.IGNORECASE)
_SHOWN = 80
MOST_NESTED = 1 << 16  # lists and objects of a body: each takes many times its two bytes, and no request needs more
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


def too_large(most: int) -> ApiError:
    message = f"the request is larger than this server's limit of {most:,} bytes; send less, or raise --max-body"
    return ApiError(413, message, code="request_too_large")


async def read_body(request: Request, most: int, timeout: float) -> bytes:
    """Returns the body, of at most `most` bytes, which must arrive within `timeout` seconds.

    Raises:
        ApiError: 408 (time), 413 (size), or 415 if the content type is not JSON. Browsers let web pages send other
            content types to servers on the user's machine without permission.
        Disconnected: the client disconnected.
    """
    kind = request.headers.get("content-type", "")
    if not _JSON.match(kind):
        message = f"content-type: {kind[:_SHOWN]!r} is not supported; send JSON as application/json"
        raise ApiError(415, message, code="unsupported_media_type")
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large(most)
    except TimeoutError:
        message = f"the request did not arrive within {timeout:g} seconds; send it faster"
        raise ApiError(408, message, code="request_timeout") from None
    except ClientDisconnect:
        raise Disconnected from None
    return bytes(body)


def parse_json(body: bytes) -> dict:
    """Returns the JSON object in `body`.

    Raises:
        ApiError: it is not one, has NaN or invalid UTF-8, or more than `MOST_NESTED` lists and objects.
    """
    if body.count(b"[") + body.count(b"{") > MOST_NESTED:
        values = _STRING.sub(b"", body)  # a text may hold any number of brackets
        if (count := values.count(b"[") + values.count(b"{")) > MOST_NESTED:
            message = f"the body is JSON of {count:,} lists and objects; send at most {MOST_NESTED:,}"
            raise ApiError(400, message, code="invalid_json")
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        reason = "the body is not UTF-8" if not _is_utf8(body) else f"the body is not JSON: {error}"
        raise ApiError(400, f"{reason}; send one JSON object", code="invalid_json") from None
    if not isinstance(values, dict):
        message = f"the body is JSON of type {type(values).__name__}; send an object with the keys of the request"
        raise ApiError(400, message, code="invalid_json")
    return values


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True
