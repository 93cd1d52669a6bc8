"""Full traces: what every exit layer, and full depth, says to each token of an answer.

`exitserve eval --prompt` writes them, by the oracle, for the playground to open.
`docs/playground.md` describes a file, and `docs/trace.schema.json` is its schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from exitserve.checkpoint.calibration import Criterion, Layer, Number
from exitserve.policy import ExitPolicy
from exitserve.reference import Look, Looks, Reference

VERSION: Literal[2] = 2

Count = Annotated[int, Field(ge=0)]

Outcome = Literal["stopped", "went_on", "drafted", "unchecked", "not_reached"]
"""What became of a token at a layer. stopped: it was sent from there. went_on: it was checked, and
not confident enough. drafted: in mode "verify" the layer's token is drafted, and full
depth judges it. unchecked: it passed by,
since its request has no threshold there, or nobody drafted there, or its position runs all layers.
not_reached: it stopped below."""

STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LayerTrace:
    """What one token met at one layer; the last layer is full depth."""

    layer: Layer
    outcome: Outcome
    token_id: Count
    """The most likely token there."""
    text: str
    """Its text."""
    confidence: Number
    threshold: Number | None = None
    """That the confidence had to pass."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DraftTrace:
    """A draft that full depth judges (mode "verify")."""

    layer: Layer
    """The exit layer that proposes it."""
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
    """What is drafted for its place, behind the text before it. None where nothing is."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Trace:
    """One answer, with all that is needed to read it: a file."""

    version: Literal[2] = VERSION
    model: str
    num_layers: Layer
    exit_layers: tuple[Layer, ...]
    criterion: Criterion
    """What confidence is."""
    fields: Mapping[str, Any]
    """The `exit_*` fields of the request."""
    prompt: str
    tokens: tuple[TokenTrace, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON has it, without what is not known."""
        found: dict[str, Any] = TypeAdapter(Trace).dump_python(self, mode="json", exclude_none=True)
        return found


def schema() -> dict[str, Any]:
    """The JSON schema of a file."""
    return TypeAdapter(Trace).json_schema()


def traced_tokens(
    reference: Reference, tokenizer: Any, prompt: str, max_tokens: int, policy: ExitPolicy
) -> Iterator[TokenTrace]:
    """Answers a prompt greedily, token by token."""

    def text_of(token_id: int) -> str:
        return str(tokenizer.decode([token_id]))

    def layer(look: Look, looks: Looks, draft: Look | None) -> LayerTrace:
        return LayerTrace(
            layer=look.layer,
            outcome="drafted" if look is draft else _outcome(look, looks),
            token_id=look.token_id,
            text=text_of(look.token_id),
            confidence=round(look.confidence, 6),
            threshold=look.threshold,
        )

    drafts_at = policy.first_exit(reference.exit_layers) if policy.mode == "verify" else None
    prompt_ids = tokenizer.encode(prompt)
    whole = list(prompt_ids)
    known = str(tokenizer.decode(whole, skip_special_tokens=True))
    for index, looks in enumerate(reference.watch(prompt_ids, max_tokens, policy)):
        made = (look for look in looks.by_layer if index and look.layer == drafts_at)
        draft, drafts = next(made, None), None
        if draft is not None:
            token = draft.token_id
            accepted = token == looks.token_id
            drafts = (
                DraftTrace(
                    layer=draft.layer, token_id=token, text=text_of(token), accepted=accepted
                ),
            )
        whole.append(looks.token_id)
        added = text_added(known, str(tokenizer.decode(whole, skip_special_tokens=True)))
        known += added
        yield TokenTrace(
            index=index,
            token_id=looks.token_id,
            text=added,
            depth=looks.depth,
            layers=tuple(layer(look, looks, draft) for look in looks.by_layer),
            drafts=drafts,
        )


def _outcome(look: Look, looks: Looks) -> Outcome:
    if look.layer >= looks.depth:
        return "stopped" if look.layer == looks.depth else "not_reached"
    return "went_on" if look.is_checked else "unchecked"


def text_added(known: str, now: str) -> str:
    """What the last tokens of a text add to what is known of it: nothing while a character is
    incomplete. (A token alone may lose the blank before it.)"""
    return "" if now.endswith("\ufffd") else now[len(known) :]
