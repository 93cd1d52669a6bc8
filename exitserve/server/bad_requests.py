"""Errors of requests: one short line each, which names the field."""

import json
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import islice
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from exitserve.errors import ExitServeError, one_line, shown

MOST_REASONS = 50
"""What is looked at of pydantic's errors, of which there may be thousands."""
_LONG_NUMBER = re.compile(rb"\d{19}")
ALTERNATIVES = 4
"""Types that an error lists for a field that may have one of several."""


def bad_request(message: str, param: str = "vllm_xargs") -> JSONResponse:
    """An answer with status 400, in OpenAI's form."""
    error = {"message": one_line(message), "type": "BadRequestError", "param": param, "code": 400}
    return JSONResponse({"error": error}, status_code=400)


class JsonRoute(APIRoute):
    """A route whose errors about its body are one line.

    Its endpoint sets `request.state.is_read`: from there on, errors are not about the body's form.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wraps FastAPI's handler, whose errors are lists that repeat the values."""
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            try:
                body = await request.json()
                check_numbers(await request.body())
            except ExitServeError as error:
                return bad_request(str(error), param="body")
            except ValueError as error:
                return bad_request(f"the request body is not valid JSON: {error}", param="body")
            try:
                return await handle(request)
            except RequestValidationError as error:
                field, reason = explain(body, error.errors())
                return bad_request(f"{field}: {reason}.", param=field)
            except ExitServeError as error:
                return bad_request(str(error))
            except (AttributeError, KeyError, IndexError) as error:
                if getattr(request.state, "is_read", False):
                    raise
                # vLLM's checks of some fields fail at values of other types.
                reason = f"a field has a value of the wrong type ({shown(str(error))})"
                return bad_request(f"the request body cannot be read: {reason}.", param="body")

        return checked


def check_numbers(body: bytes) -> None:
    """Raises `ExitServeError` for a whole number that vLLM could not send to its engine.

    vLLM checks this of some fields; of the others, the request would fail on its way.
    """
    if _LONG_NUMBER.search(body):  # perhaps in a text
        json.loads(body, parse_int=_of_64_bits)


def _of_64_bits(digits: str) -> int:
    number = int(digits)
    if not -(2**63) <= number < 2**63:
        raise ExitServeError(f"the number {shown(number)} is too large: send one of 64 bits.")
    return number


def explain(body: Any, errors: Sequence[Any]) -> tuple[str, str]:
    """The field that pydantic's first error is about, and what is wrong with it.

    A field of several allowed types has an error for each of them.
    """
    found = [_place_and_reason(body, one) for one in islice(errors, MOST_REASONS)]
    field, value, _ = found[0]
    reasons = dict.fromkeys(reason for place, _, reason in found if place == field)
    return field, f"{', or '.join(islice(reasons, ALTERNATIVES))}{value}"


def _place_and_reason(body: Any, error: Any) -> tuple[str, str, str]:
    """Where an error is, the value there as the message ends with it, and the reason."""
    if not isinstance(error, Mapping):  # vLLM's check of the content type
        return "body", "", str(error)
    path, value = [], body
    # Between the names, pydantic puts those of the types that it tried.
    for part in error["loc"][1:]:
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_index or (isinstance(value, dict) and part in value):
            value = value[part]
            path.append(str(part))
    reason = str(error["msg"])
    if error["type"] == "missing":
        return ".".join([*path, str(error["loc"][-1])]), "", reason
    return ".".join(path) or "body", f"; got {shown(value)}", reason
