"""A full trace: what each token met at each exit layer, and at full depth.

A server adds a `Tokens` to each choice of a response (`exit_trace: "full"`); `exitserve trace` and
the playground write a `Trace` to a file. `docs/playground.md` describes both, and
`docs/trace.schema.json` is the schema of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from exitserve.calibration_record import Criterion, Layer, Number
from exitserve.errors import ExitServeError

VERSION: Literal[2] = 2
"""Of what is written. Readers take version 1 too, which is the same without drafts."""

Version = Literal[1, 2]

Count = Annotated[int, Field(ge=0)]

Outcome = Literal["stopped", "went_on", "drafted", "screened", "unchecked", "not_reached"]
"""What became of a token at a layer. stopped: it was sent from there. went_on: it was checked, and
not confident enough. drafted: confident enough, so that in mode "verify" the layer's token was
drafted, unless it ends the answer. screened: a screen left the check out. unchecked: it passed by,
since its request has no threshold there, or nobody drafted there, or its position runs all layers.
not_reached: it stopped below."""

CheckNote = Sequence[Any]
"""(layer, token id, confidence, threshold), the last three possibly None: a `CheckNote` of
`exitserve.engine.recorder`, which transport may have turned into a list."""

Notes = Sequence[Sequence[Any]]
"""Of one token: its checks, and the drafts that were judged with it: `TokenNotes` there."""

TextOf = Callable[[int], str]
"""The text of a token by itself."""

PRIMING = 8
"""Tokens of the prompt behind which generated ones are decoded: enough for a character."""

STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LayerTrace:
    """What one token met at one layer; the last layer is full depth."""

    layer: Layer
    outcome: Outcome
    token_id: Count | None = None
    """The most likely token there; None where nobody looked."""
    text: str | None = None
    """Its text."""
    confidence: Number | None = None
    threshold: Number | None = None
    """That the confidence had to pass."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DraftTrace:
    """A draft that full depth judged (mode "verify")."""

    layer: Layer
    """The exit layer that proposed it."""
    token_id: Count
    text: str
    accepted: bool


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TokenTrace:
    """One generated token."""

    index: Count
    """Its place in the answer, from 0."""
    token_id: Count
    text: str
    """What it added to the text: nothing, if it is only a part of a character."""
    depth: Layer
    """The layer that it was sent from."""
    layers: tuple[LayerTrace, ...]
    """The exit layers, ascending, and full depth."""
    drafts: tuple[DraftTrace, ...] | None = None
    """Itself, if it was drafted and accepted. Or those rejected when full depth gave this token:
    the one in its place, and what had been drafted behind that. None where there were none."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Tokens:
    """Some tokens of an answer, in order: the `exit_trace` of a choice."""

    version: Version = VERSION
    tokens: tuple[TokenTrace, ...]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Trace:
    """One answer, with all that is needed to read it: a file."""

    version: Version = VERSION
    made_by: Literal["oracle", "server"]
    """The oracle tells every layer of every token, also of those that were not reached."""
    model: str
    num_layers: Layer
    exit_layers: tuple[Layer, ...]
    criterion: Criterion
    """What confidence is."""
    fields: Mapping[str, Any]
    """The `exit_*` fields of the request."""
    prompt: str
    tokens: tuple[TokenTrace, ...]


def layer_trace(
    layer: int,
    outcome: Outcome,
    text_of: TextOf,
    token_id: int | None = None,
    confidence: float | None = None,
    threshold: float | None = None,
) -> LayerTrace:
    """What a token met at a layer, with the text of that layer's own token."""
    return LayerTrace(
        layer=layer,
        outcome=outcome,
        token_id=token_id,
        text=None if token_id is None else text_of(token_id),
        confidence=None if confidence is None else round(confidence, 6),
        threshold=threshold,
    )


def noted_layers(
    depth: int, notes: Sequence[CheckNote], layers: Sequence[int], text_of: TextOf
) -> tuple[LayerTrace, ...]:
    """What a token met at each of `layers`, given what an engine noted of it.

    Args:
        depth: at which it stopped.
        notes: of the layers where a check was due, and of full depth if it got there.
        layers: the exit layers and full depth, ascending.
        text_of: gives the text of a token.
    """
    by_layer = {note[0]: note[1:] for note in notes}
    found = []
    for layer in layers:
        told = by_layer.get(layer, ())
        outcome: Outcome = "unchecked"
        if layer >= depth:
            outcome = "stopped" if layer == depth else "not_reached"
        elif told:
            outcome = _outcome(*told)
        found.append(layer_trace(layer, outcome, text_of, *told))
    return tuple(found)


def _outcome(token_id: int | None, confidence: float, threshold: float) -> Outcome:
    """What became of a token at a layer that a check was due at, and that it was not sent from."""
    if token_id is None:
        return "screened"
    return "drafted" if confidence > threshold else "went_on"


def draft_traces(
    drafts: Sequence[tuple[int, int, bool]], text_of: TextOf
) -> tuple[DraftTrace, ...] | None:
    """Drafts with their texts, given as (layer, token id, accepted); None if there are none."""
    return (
        tuple(
            DraftTrace(layer=layer, token_id=token, text=text_of(token), accepted=accepted)
            for layer, token, accepted in drafts
        )
        or None
    )


class TokenTexts:
    """What each token adds to a text, so that the parts joined are the whole.

    A token alone may be a part of a character, or lose the blank before it; so it is decoded behind
    the tokens before it.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> None:
        """Starts behind a prompt.

        Args:
            decode: gives the text of token ids, without special tokens.
            before: the prompt.
        """
        self._decode = decode
        self._ids = list(before[-PRIMING:])
        self._start, self._read = 0, len(self._ids)
        """Where the window begins that is decoded, and what of it has been given out."""

    def add(self, token_id: int) -> str:
        """What the next token adds; nothing while a character is incomplete."""
        self._ids.append(token_id)
        known = self._decode(self._ids[self._start : self._read])
        now = self._decode(self._ids[self._start :])
        if now.endswith("�") or len(now) <= len(known):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return now[len(known) :]


def to_json(record: Tokens | Trace) -> dict[str, Any]:
    """As JSON has it, without what is not known."""
    found: dict[str, Any] = TypeAdapter(type(record)).dump_python(
        record, mode="json", exclude_none=True
    )
    return found


def read_trace(path: Path) -> Trace:
    """A trace from a file.

    Raises:
        ExitServeError: it cannot be read, or is no trace of this version.
    """
    try:
        return TypeAdapter(Trace).validate_json(path.read_bytes())
    except OSError as error:
        raise ExitServeError(f"cannot read the trace '{path}': {error.strerror}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ExitServeError(
            f"'{path}' is no trace of version 1 or {VERSION}: {place}: {first['msg']}; write one "
            "with exitserve trace."
        ) from error


def schema() -> dict[str, Any]:
    """The JSON schema of a file."""
    return TypeAdapter(Trace).json_schema()
