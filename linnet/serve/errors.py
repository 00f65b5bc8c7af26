"""Errors in the format of OpenAI's API: {"error": {"message", "type", "param", "code"}}."""

from collections.abc import Mapping

from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from linnet.config import ConfigError, Problem

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {404: "not_found", 405: "method_not_allowed", 500: "internal_error"}
_MOST_PROBLEMS, _LONGEST = 10, 400  # bound the length of the response to a body with many problems


class ApiError(Exception):
    """An error that is sent to the client.

    Args:
        status: the HTTP status.
        message: text that names the key, the value and the fix.
        param: the invalid key of the request, if the error concerns one.
        code: a word by which programs recognize the error.
        headers: headers of the response, for example Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = code or _CODES.get(status)
        self.headers = dict(headers or {})

    @classmethod
    def of_problems(cls, problems: list[str], code: str | None = None) -> "ApiError":
        """Returns a 400 that lists the problems, under the fields of a request; `param` is that of the first."""
        problems = [problem.replace("stop_tokens", "stop_token_ids") for problem in problems]
        key = Problem(problems[0]).key.partition("[")[0]
        lines = [line if len(line) <= _LONGEST else line[:_LONGEST] + " ..." for line in problems[:_MOST_PROBLEMS]]
        if len(problems) > _MOST_PROBLEMS:
            lines.append(f"and {len(problems) - _MOST_PROBLEMS} more")
        return cls(400, "; ".join(lines), param=key if key.isidentifier() else None, code=code or "invalid_value")

    def body(self) -> dict:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(to_json(self.body()), self.status, self.headers, media_type="application/json")


class Disconnected(Exception):
    """The client disconnected, so no response is sent."""


async def answer_api_error(request: Request, error: ApiError) -> Response:
    return error.response()


async def answer_config_error(request: Request, error: ConfigError) -> Response:
    return ApiError.of_problems(error.problems).response()


async def answer_http_exception(request: Request, error: HTTPException) -> Response:
    """Answers requests with unknown paths or methods."""
    headers = error.headers
    if error.status_code == 404:
        message = f"{request.url.path[:200]}: unknown path; GET /openapi.json lists the paths of this server"
    elif error.status_code == 405:
        message = f"{request.method} {request.url.path[:200]}: use {(headers or {}).get('Allow', 'another method')}"
    else:
        message = str(error.detail)
    return ApiError(error.status_code, message, headers=headers).response()


async def answer_exception(request: Request, error: Exception) -> Response:
    """Answers an unexpected error; the traceback goes to the server's log, not to the client."""
    return ApiError(500, "the server failed on this request; its log has the reason").response()
