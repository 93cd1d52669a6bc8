"""The endpoint plugin: request fields, response fields, `/exitserve/stats` and metrics.

The two completion routes wrap vLLM's handlers, which do everything else.
"""

import json
import re
import sys
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion.api_router import (
    create_chat_completion as vllm_chat_completion,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.completion.api_router import create_completion as vllm_completion
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import GenerationError

from exitserve.errors import ExitServeError, shown
from exitserve.policy import ExitRules, finite
from exitserve.server.api_description import STATS, described
from exitserve.server.exit_server import PATIENCE_SECONDS, ExitServer
from exitserve.server.front_door import FrontDoor, JsonRoute, KeyForEveryPost, api_keys, bad_request
from exitserve.server.playground.routes import add_playground, address
from exitserve.server.response_fields import ExitFields, RequestTrace
from exitserve.server.unsupported_features import (
    NO_POOLING,
    NO_SCALING,
    POOLING_ROUTES,
    SCALING_ROUTE,
)

BANS = ("allowed_token_ids", "bad_words", "logit_bias", "stop_token_ids")
"""Fields that may leave none of the tokens that a grammar allows."""
FAULT = re.compile(rf'data: {{"error": ?{{"message": ?"{re.escape(str(GenerationError()))}"')
"""How the event begins by which vLLM ends a stream whose tokens it could not generate; that of a
chat has no spaces since vLLM 0.33."""
MOST_PENALTY = 50
"""Beyond, vLLM's beam search divides by a length to a power that is no number any more."""


async def create_completion(request: CompletionRequest, raw_request: Request) -> Any:
    """`POST /v1/completions` with exit fields."""
    return await _complete(vllm_completion, request, raw_request, chat=False)


async def create_chat_completion(request: ChatCompletionRequest, raw_request: Request) -> Any:
    """`POST /v1/chat/completions` with exit fields."""
    return await _complete(vllm_chat_completion, request, raw_request, chat=True)


async def _complete(handler: Any, request: Any, raw_request: Request, *, chat: bool) -> Any:
    server: ExitServer = raw_request.app.state.exitserve
    raw_request.state.is_read = True
    # The raw body, because vLLM's parsing turns booleans into numbers.
    fields = (await raw_request.json()).get("vllm_xargs") or {}
    policy = server.rules.policy_for(fields)
    _check_combinations(request, fields, may_exit=policy.mode != "off")
    if fields.get("exit_trace") is False:
        del request.vllm_xargs["exit_trace"]
    trace: RequestTrace | None = None
    if fields.get("exit_trace"):
        trace = RequestTrace.of(request, server.worker, server.rules.num_layers, chat=chat)
    contradiction = _contradiction(request)
    try:
        response = await handler(request, raw_request)
    except GenerationError:
        if contradiction is None:
            raise
        return contradiction
    streamed = isinstance(response, StreamingResponse)
    if streamed and contradiction is not None:
        response.body_iterator = _explained(response.body_iterator, contradiction)
    if not streamed and not (isinstance(response, JSONResponse) and response.status_code == 200):
        return response  # an error, or the client has disconnected
    labelled = _has_logprobs(request) and _may_exit(server, request)
    if trace is None and not labelled:
        return response
    added = ExitFields(trace, logprobs_from_exits=labelled)
    if streamed:
        response.body_iterator = added.stream(aiter(response.body_iterator))
        return response
    # The same response, because vLLM has attached headers and a task to it.
    response.body = response.render(await added.response(json.loads(bytes(response.body))))
    response.headers["content-length"] = str(len(response.body))
    return response


def _contradiction(request: Any) -> JSONResponse | None:
    """The error of a request if its grammar and other fields leave no token; None if they cannot.

    vLLM notices when it has sampled a token that the grammar does not allow, and calls that a fault
    of the server.
    """
    bans = [name for name in BANS if getattr(request, name, None)]
    if not bans or request.extract_structured_outputs() is None:
        return None
    return bad_request(
        f"the grammar of the answer and {' and '.join(bans)} leave no token; drop one of them.",
        param=bans[0],
    )


async def _explained(events: Any, contradiction: JSONResponse) -> AsyncIterator[str]:
    """The events of a stream, with `contradiction` in the place of a fault of the server."""
    async for event in events:
        is_fault = FAULT.match(event)
        yield f"data: {bytes(contradiction.body).decode()}\n\n" if is_fault else event


def _has_logprobs(request: Any) -> bool:
    # A number in completions, where 0 asks for the chosen token's; true or false in chat.
    return request.logprobs is not None and request.logprobs is not False


def _may_exit(server: ExitServer, request: Any) -> bool:
    """Whether tokens of the request may come from an exit layer.

    Called after vLLM's handler, which turns tool choices and response formats into grammars.
    """
    limit = getattr(request, "max_completion_tokens", None) or request.max_tokens
    first_token_only = limit is not None and limit <= 1
    if first_token_only or getattr(request, "use_beam_search", False):
        return False
    structured = request.extract_structured_outputs() is not None
    policy = server.rules.policy_or_off(request.vllm_xargs, structured=structured)
    return policy.mode not in ("off", "verify")


def _check_combinations(request: Any, fields: dict[str, Any], *, may_exit: bool) -> None:
    """Raises `ExitServeError` for combinations that would fail, or in which exits do nothing."""
    if fields.get("exit_trace") and getattr(request, "echo", False):
        # A trace counts token ids, and when vLLM returns these it leaves the echoed text out.
        raise ExitServeError("exit_trace cannot be combined with echo; drop one of them.")
    if not getattr(request, "use_beam_search", False):
        return
    if not -MOST_PENALTY <= request.length_penalty <= MOST_PENALTY:
        raise ExitServeError(
            f"length_penalty must be from {-MOST_PENALTY} to {MOST_PENALTY}, not "
            f"{shown(request.length_penalty)}."
        )
    given = ["exit_trace"] if fields.get("exit_trace") else []
    if may_exit:
        choices = ("exit_threshold", "exit_target", "exit_layer", "exit_mode")
        given += [name for name in choices if name in fields]
    if given:
        raise ExitServeError(
            f"{given[0]} cannot be combined with beam search, which runs at full depth; drop one "
            "of them."
        )


async def reject_pooling() -> JSONResponse:
    """The routes of pooling models, which vLLM does not register for text generation."""
    return bad_request(NO_POOLING, param="model")


async def reject_scaling() -> JSONResponse:
    """The route that would change how many engines there are."""
    return bad_request(NO_SCALING, param="new_data_parallel_size")


async def stats(raw_request: Request) -> JSONResponse:
    """`GET /exitserve/stats`: counts since the start and over the last minute."""
    server: ExitServer = raw_request.app.state.exitserve
    await server.counts.refresh(PATIENCE_SECONDS)
    rules = server.rules
    return JSONResponse(
        {
            "num_layers": rules.num_layers,
            "exit_layers": list(rules.exit_layers),
            "default": {
                "mode": rules.default.mode,
                "exit_threshold": finite(rules.default.threshold),
                "eos_threshold": finite(rules.default.eos_threshold),
                "exit_layer": rules.default.exit_layer,
                "by_layer": {
                    layer: {"exit_threshold": threshold, "eos_threshold": finite(ends)}
                    for layer, threshold, ends in rules.default.by_layer
                    if layer in rules.exit_layers
                },
            },
            "offers": _offers(rules, chats=server.chats),
            **server.counts.report(),
        }
    )


def _offers(rules: ExitRules, *, chats: bool) -> dict[str, Any]:
    """What requests may ask for: modes, criterion, what the calibration promises, ascending by
    agreement; and whether the model has a chat template (`chats`)."""
    found = rules.calibrated
    points = () if found is None else (*found.points, found.chosen)
    promising = {one.agreement: one for one in points if one.agreement is not None}
    layers = rules.exit_layers
    return {
        "modes": list(rules.modes),
        "criterion": rules.criterion,
        "chat": chats,
        "calibrated_mode": None if found is None else found.mode,
        "promises": [
            {
                "agreement": agreement,
                "thresholds": dict(promising[agreement].at(layers).thresholds),
                "found": dict(promising[agreement].found),
            }
            for agreement in sorted(promising)
        ],
    }


class Traffic:
    """ASGI middleware: counts requests in progress, and updates /metrics when it is read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        server = getattr(scope["app"].state, "exitserve", None) if "app" in scope else None
        if server is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith("/metrics"):
            await server.counts.refresh(PATIENCE_SECONDS)
        serving = scope["method"] == "POST"
        server.open_requests += serving
        try:
            await self._app(scope, receive, send)
        finally:
            server.open_requests -= serving
            server.unsampled |= serving


class ExitServePlugin:
    """vLLM's endpoint-plugin protocol (`vllm/plugins/endpoint_plugins/interface.py`)."""

    name = "exitserve"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Adds our routes to the app; for existing paths they replace vLLM's."""
        app.add_middleware(Traffic)
        app.add_middleware(FrontDoor)
        if keys := api_keys(app.state.args):
            app.add_middleware(KeyForEveryPost, tokens=keys)
        for path, endpoint in (
            ("/v1/completions", create_completion),
            ("/v1/chat/completions", create_chat_completion),
        ):
            app.router.add_api_route(
                path,
                endpoint,
                methods=["POST"],
                dependencies=[Depends(validate_json_request)],
                route_class_override=JsonRoute,
                response_model=None,
            )
        for path in POOLING_ROUTES:
            app.post(path, include_in_schema=False)(reject_pooling)
        app.post(SCALING_ROUTE, include_in_schema=False)(reject_scaling)
        app.get(STATS)(stats)
        answers: dict[str, Any] = {
            "/v1/completions": CompletionResponse,
            "/v1/chat/completions": ChatCompletionResponse,
        }
        app.openapi = described(app.openapi, answers)  # type: ignore[method-assign]
        if getattr(app.state.args, "playground", False):  # unknown to plain `vllm serve`
            add_playground(app)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Called when the engine is ready."""
        names = args.served_model_name or [args.model]
        rate = getattr(args, "shadow_rate", 0.0)  # unknown to plain `vllm serve`
        # One that never looks at roles joins texts, and makes no chat.
        own = str(getattr(engine_client.tokenizer, "chat_template", None))
        chats = bool(args.chat_template) or "role" in own
        state.exitserve = ExitServer(engine_client, names[0], rate, chats=chats)
        if (end := getattr(args, "engine_end", None)) is not None:
            end.watch(engine_client, state)
        await state.exitserve.start()
        if getattr(args, "playground", False) and engine_client.engine_core.client_index == 0:
            print(f"exitserve: playground at {address(args)}", file=sys.stderr, flush=True)
