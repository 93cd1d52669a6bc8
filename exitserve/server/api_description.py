"""What our request fields, response fields and routes look like, for `/openapi.json` and readers.

FastAPI describes vLLM's routes from their types. Ours pass JSON through, so these models say what
is in it. They describe only: `exitserve.policy` checks requests. Imports neither vLLM nor FastAPI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from exitserve import __version__
from exitserve.policy import FIELDS

STATS = "/exitserve/stats"
ABOUT = (
    "vLLM's OpenAI-compatible server, in which a token may stop at its own depth. Requests choose "
    "in `vllm_xargs`; `GET /exitserve/stats` tells what they did."
)


class RequestFields(BaseModel):
    """What a request may set in `vllm_xargs`: any of them, and none to null."""

    exit_threshold: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        description=FIELDS["exit_threshold"]
    )
    exit_target: float = Field(gt=0, lt=1, description=FIELDS["exit_target"])
    exit_layer: int = Field(ge=1, description=FIELDS["exit_layer"])
    exit_mode: Literal["off", "confidence", "defer", "verify"] = Field(
        description=FIELDS["exit_mode"]
    )
    exit_drafts: Literal["both", "text", "layers", "none"] = Field(
        description=FIELDS["exit_drafts"]
    )
    exit_trace: bool = Field(description=FIELDS["exit_trace"])


class ChoiceFields(BaseModel):
    """Each of `choices`, besides OpenAI's fields."""

    exit_layers: list[int] | None = Field(
        default=None,
        description="with exit_trace: the depth of each generated token; in a stream in the chunk "
        "that finishes the choice; null if a depth is missing",
    )


class ExitMetrics(BaseModel):
    """`exit_metrics`: the depths of all choices. Averages are null without tokens."""

    tokens: int = Field(description="generated tokens, of all choices")
    mean_depth: float | None = Field(description="the depth at which tokens stopped, on average")
    depth_speedup: float | None = Field(
        description="layers at full depth over layers run; a count, not a time"
    )
    accepted_drafts: dict[Literal["text", "layers"], int] = Field(
        description="tokens that were drafted, by where the drafts came from; sources without any "
        "are left out"
    )


class ResponseFields(BaseModel):
    """What a response has besides OpenAI's fields, and vLLM's."""

    choices: list[ChoiceFields] = Field(description="each with its own depths")
    exit_metrics: ExitMetrics | None = Field(
        default=None,
        description="with exit_trace; in a stream in the last chunk, and in the usage chunk; null "
        "if a depth is missing",
    )
    logprobs_from: Literal["exit_layer"] | None = Field(
        default=None,
        description="where log-probabilities were asked for and tokens may exit: each token's are "
        "those of the layer at which it stopped",
    )


class _Exact(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LayerThresholds(_Exact):
    """Each of `by_layer`: the thresholds of one exit layer."""

    exit_threshold: float = Field(description="a token exits above it")
    eos_threshold: float | None = Field(description="for ends of sequence; null: never passed")


class Default(_Exact):
    """`default`: what a request gets that asks for nothing."""

    mode: Literal["off", "confidence", "defer", "verify", "fixed"] = Field(
        description="fixed: every token exits at exit_layer"
    )
    exit_threshold: float | None = Field(description="of every exit layer; null: never passed")
    eos_threshold: float | None = Field(description="for ends of sequence; null: never passed")
    exit_layer: int | None = Field(description="of mode fixed")
    by_layer: dict[int, LayerThresholds] = Field(
        description="by exit layer, where each has thresholds of its own, as in a calibration"
    )


class Promise(_Exact):
    """Each of `promises`: what the calibration found for one agreement."""

    agreement: float = Field(description="for exit_target")
    thresholds: dict[int, float] = Field(description="by exit layer")
    found: dict[str, float] = Field(description="means over the calibration's test")


class Offers(_Exact):
    """`offers`: what requests may ask for."""

    modes: list[str] = Field(description="of exit_mode")
    criterion: str = Field(description="how confidence is computed")
    chat: bool = Field(description="whether the model has a chat template that tells who speaks")
    calibrated_mode: str | None = Field(
        description="of requests for a promise that name none; null without a calibration"
    )
    promises: list[Promise] = Field(description="of the calibration in that mode, by agreement")


class LayerChecks(_Exact):
    """Each of `exits`: the checks of one exit layer."""

    checks: int = Field(description="tokens checked")
    checks_passed: int = Field(description="tokens that stopped there, or were drafted")


class Period(_Exact):
    """`since_start` and `last_minute`: figures of a period. Averages are null without tokens."""

    tokens: int = Field(description="generated tokens")
    tokens_by_exit_layer: dict[int, int] = Field(
        description="the same by the depth at which they stopped; the last layer is full depth"
    )
    mean_depth: float | None = Field(description="the depth at which tokens stopped, on average")
    depth_speedup: float | None = Field(
        description="layers at full depth over mean_depth; a count, not a time"
    )
    mean_layers_run: float | None = Field(
        description="layers run per token, with those that mode defer runs above the depth at "
        "which it stopped, and those of rejected drafts"
    )
    checks: int = Field(description="tokens checked, summed over the exit layers")
    checks_passed: int = Field(description="of these, tokens that stopped (or were drafted)")
    drafted_tokens: int = Field(description="drafts that were judged (modes verify and defer)")
    accepted_tokens: int = Field(description="of these, drafts that were accepted")
    drafted_from_text: int = Field(description="of drafted_tokens, those of the requests' own text")
    accepted_from_text: int = Field(description="of these, drafts that were accepted")
    exits: dict[int, LayerChecks] = Field(description="by exit layer")


class Stats(_Exact):
    """What `GET /exitserve/stats` answers."""

    num_layers: int = Field(description="L, full depth")
    exit_layers: list[int] = Field(description="where a token may exit")
    default: Default = Field(description="what a request gets that asks for nothing")
    offers: Offers = Field(description="what requests may ask for")
    since_start: Period = Field(description="figures since the server's start")
    last_minute: Period = Field(description="figures of about the last minute")
    age_seconds: float = Field(
        description="how old these counts are: while the engine is busy with a long step, or has "
        "failed, the last ones are shown after 0.8 seconds"
    )


def describe(schema: dict[str, Any], responses: Mapping[str, type[BaseModel]]) -> None:
    """Completes FastAPI's description of the server in place.

    Args:
        schema: the OpenAPI document.
        responses: by path, what a route with our response fields answers without them.
    """
    schema["info"] |= {"title": "exitserve", "version": __version__, "description": ABOUT}
    parts = schema["components"]["schemas"]
    for one in parts.values():
        if "vllm_xargs" in one.get("properties", {}):
            _name_fields(one["properties"]["vllm_xargs"])
    models: tuple[type[BaseModel], ...] = (*responses.values(), ResponseFields, Stats)
    for model in models:
        # Their parts stay inside: some of vLLM's have names that its requests use otherwise.
        refs = f"{_ref(model)['$ref']}/$defs/{{model}}"
        parts[model.__name__] = model.model_json_schema(mode="serialization", ref_template=refs)
    for path, model in responses.items():
        operation = schema["paths"][path]["post"]["responses"]
        operation.pop("422", None)  # a bad body is answered with 400
        operation |= _answers({"allOf": [_ref(model), _ref(ResponseFields)]})
    schema["paths"][STATS]["get"]["responses"]["200"]["content"] = _json(_ref(Stats))


def _name_fields(xargs: dict[str, Any]) -> None:
    """Names our fields in the schema of `vllm_xargs`, whose other fields stay free."""
    (known,) = (kind for kind in xargs["anyOf"] if kind["type"] == "object")
    known["properties"] = RequestFields.model_json_schema()["properties"]


def _answers(response: dict[str, Any]) -> dict[str, Any]:
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    found = {"200": {"description": "The answer.", "content": _json(response) | events}}
    for code, meaning in (("400", "One line that names the field."), ("404", "No such model.")):
        error = {"$ref": "#/components/schemas/ErrorResponse"}
        found[code] = {"description": meaning, "content": _json(error)}
    return found


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def described(
    openapi: Callable[[], dict[str, Any]], responses: Mapping[str, type[BaseModel]]
) -> Callable[[], dict[str, Any]]:
    """An app's `openapi`, with `describe` applied once."""

    @cache
    def complete() -> dict[str, Any]:
        document = openapi()
        describe(document, responses)
        return document

    return complete
