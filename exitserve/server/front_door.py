"""What every request passes before its route, ours or vLLM's, and every error on its way out.

- With an API key, whatever may cost the engine work needs it (`KeyForEveryPost`).
- A server that finishes what runs takes no more (`FrontDoor`).
- A body may not be nested so deeply that a later step fails: Python's own limits differ from step
  to step, and the last one is the engine's (`FrontDoor`).
- Exit fields are checked whatever the route (`FrontDoor`): a stream of vLLM's would break off, as
  it begins before the engine looks at them.
- An error is one short line (`FrontDoor`), and of our routes names the field (`JsonRoute`).
"""

import json
import re
from argparse import Namespace
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from exitserve.engine.recorder import NOT_A_TRACE
from exitserve.errors import ExitServeError, one_line, shown
from exitserve.policy import FIELDS, ExitRules

MOST_NESTED = 100
"""Arrays and objects that a body may nest; vLLM's engine dies of a few hundred."""
TOO_DEEP = (
    f"the request body nests more than {MOST_NESTED} arrays and objects in each other; make it "
    "flatter."
)
TOO_DEEP_INSIDE = (
    "JSON inside a text of the request, such as the arguments of a tool call, is nested too "
    "deeply; make it flatter."
)
STOPS = "the server stops, and takes no more requests; ask again, or another server."
NOT_UTF8 = "the request body is not valid JSON in UTF-8."

# Strings (an unfinished one ends with the body), and all else that opens and closes nothing.
_FLAT = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[^"\[\]{}]+', re.DOTALL)
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
MOST_REASONS = 50
"""What is looked at of pydantic's errors, of which there may be thousands."""
_LONG_NUMBER = re.compile(rb"\d{19}")
ALTERNATIVES = 4
"""Types that an error lists for a field that may have one of several."""


def bad_request(message: str, param: str = "vllm_xargs") -> JSONResponse:
    """An answer with status 400, in OpenAI's form."""
    return error_response(message, 400, "BadRequestError", param)


def error_response(message: str, status: int, kind: str, param: str | None = None) -> JSONResponse:
    """An error in OpenAI's form."""
    error = {"message": one_line(message), "type": kind, "param": param, "code": status}
    return JSONResponse({"error": error}, status_code=status)


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


def nesting(body: bytes) -> int:
    """Depth of the arrays and objects of a JSON text, found without recursion.

    Only an upper bound where it is clear that the text cannot be too deep.
    """
    opened = body.count(b"[") + body.count(b"{")
    if opened <= MOST_NESTED:
        return opened
    return max(accumulate(_STEP[mark] for mark in _FLAT.sub(b"", body)), default=0)


def api_keys(args: Namespace) -> list[str]:
    """The keys of which a request must carry one, as vLLM finds them; none: it needs no key."""
    return [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]


class KeyForEveryPost(AuthenticationMiddleware):
    """ASGI middleware: asks for the API key wherever a request may cost something.

    vLLM's own asks for paths that begin with /v1, /v2 and a few others, and leaves open, for
    example, /invocations and /generative_scoring, which generate.
    """

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serves one connection."""
        reads = scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS")
        if reads or self.verify_token(Headers(scope=scope)):
            app: ASGIApp = self.app
            return app(scope, receive, send)
        return JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)


def check_fields(body: bytes, rules: ExitRules) -> None:
    """Checks the exit fields of a request.

    Raises:
        ExitServeError: a field is invalid or in the wrong place.
    """
    try:
        request = json.loads(body)
    except ValueError:  # its route says so
        return
    if not isinstance(request, dict):
        return
    for name in request:
        if name.startswith("exit_"):
            known = name if name in FIELDS else "exit_threshold"
            raise ExitServeError(
                f'{shown(name)} must be inside vllm_xargs: {{"vllm_xargs": {{"{known}": ...}}}}.'
            )
    fields = request.get("vllm_xargs")
    if not isinstance(fields, dict):
        return
    for name, value in fields.items():
        if name.startswith("exit_") and value is None:
            raise ExitServeError(f"{shown(name)} must not be null; leave it out.")
    rules.policy_for(fields)
    trace = fields.get("exit_trace", False)
    if not isinstance(trace, bool):
        raise ExitServeError(NOT_A_TRACE.format(shown(trace)))


class FrontDoor:
    """ASGI middleware: refuses bad exit fields and deep nesting, and shortens errors."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "POST":
            server = getattr(scope["app"].state, "exitserve", None)
            if server is not None and server.stops:
                await error_response(STOPS, 503, "ServiceUnavailableError")(scope, receive, send)
                return
            body, receive = await _read(receive)
            # Only UTF-16 and UTF-32 have zeros, and brackets cannot be told from others there.
            refused = NOT_UTF8 if b"\0" in body else TOO_DEEP if nesting(body) > MOST_NESTED else ""
            if refused:
                await bad_request(refused, param="body")(scope, receive, send)
                return
            try:
                if server is not None and b"exit_" in body:
                    check_fields(body, server.rules)
            except ExitServeError as error:
                await bad_request(str(error))(scope, receive, send)
                return
        shortened = ShortErrors(send)
        try:
            await self._app(scope, receive, shortened)
        except RecursionError:
            if shortened.started:
                raise
            await bad_request(TOO_DEEP_INSIDE, param="body")(scope, receive, send)


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    """The body of a request, and what it is received from once more."""
    parts: list[bytes] = []
    messages: list[Message] = []
    while not messages:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] != "http.request":  # the client has gone
            messages.append(message)
        elif not message.get("more_body", False):
            messages.append({"type": "http.request", "body": b"".join(parts), "more_body": False})

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return b"".join(parts), again


class ShortErrors:
    """Sends an answer on; of an error in JSON, each text as one short line."""

    def __init__(self, send: Send) -> None:
        self.started = False
        """Whether an answer has begun."""
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        """Takes one message of the answer."""
        self.started = True
        if message["type"] == "http.response.start" and _is_error(message):
            self._start = message
            return
        if self._start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        body = _shortened(self._body)
        MutableHeaders(raw=self._start["headers"])["content-length"] = str(len(body))
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": body})


def _is_error(start: Message) -> bool:
    """Whether the answer that starts like this is an error in JSON."""
    kind = MutableHeaders(raw=start["headers"]).get("content-type", "")
    return start["status"] >= 400 and "json" in kind


def _shortened(body: bytes) -> bytes:
    answer = json.loads(body)
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        return body
    short = {
        name: one_line(text) if isinstance(text, str) else text for name, text in error.items()
    }
    return json.dumps(answer | {"error": short}, ensure_ascii=False).encode()
