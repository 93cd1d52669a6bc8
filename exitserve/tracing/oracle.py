"""The full trace of one greedy answer, by the oracle: every layer of every token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from exitserve.policy import ExitPolicy
from exitserve.reference import Look, Looks, Reference
from exitserve.tracing.format import (
    Outcome,
    TokenTexts,
    TokenTrace,
    draft_traces,
    layer_trace,
)


def traced_tokens(
    reference: Reference, tokenizer: Any, prompt: str, max_tokens: int, policy: ExitPolicy
) -> Iterator[TokenTrace]:
    """Answers a prompt, token by token.

    Args:
        reference: the checkpoint.
        tokenizer: its Hugging Face tokenizer.
        prompt: the text to continue.
        max_tokens: most tokens to generate.
        policy: when tokens exit.
    """

    def text_of(token_id: int) -> str:
        return str(tokenizer.decode([token_id]))

    prompt_ids = tokenizer.encode(prompt)
    texts = TokenTexts(lambda ids: tokenizer.decode(ids, skip_special_tokens=True), prompt_ids)
    found = reference.watch(prompt_ids, max_tokens, policy)
    for index, looks in enumerate(found):
        yield TokenTrace(
            index=index,
            token_id=looks.token_id,
            text=texts.add(looks.token_id),
            depth=looks.depth,
            layers=tuple(
                layer_trace(
                    look.layer,
                    _outcome(look, looks),
                    text_of,
                    look.token_id,
                    look.confidence,
                    look.threshold,
                )
                for look in looks.by_layer
            ),
            drafts=draft_traces(looks.drafts, text_of),
        )


def _outcome(look: Look, looks: Looks) -> Outcome:
    if look.layer >= looks.depth:
        return "stopped" if look.layer == looks.depth else "not_reached"
    if look.is_checked:
        return "drafted" if look.passes else "went_on"
    return "unchecked" if look.threshold is None else "screened"
