"""The full traces of one HTTP request: from what the engine noted to `exit_trace` in a choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from exitserve.tracing.format import (
    Notes,
    Tokens,
    TokenTexts,
    TokenTrace,
    draft_traces,
    noted_layers,
    to_json,
)

NotesByIndex = dict[int, Notes]
"""Index of a generated token to what it met."""


class FullTrace:
    """What is known of the tokens of one request's choices, and what of it was sent."""

    def __init__(
        self, tokenizer: Any, layers: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        """Knows no tokens yet.

        Args:
            tokenizer: vLLM's; None where the server has none, and texts are empty.
            layers: the exit layers and full depth, ascending.
            skip_special_tokens: whether the text of the response leaves them out.
        """
        self._tokenizer, self._layers = tokenizer, layers
        self._skips = skip_special_tokens
        self._choices: dict[int, _Choice] = {}

    def start(self, index: int, prompt_ids: Sequence[int]) -> None:
        """Starts a choice behind its prompt."""
        if index not in self._choices:
            texts = TokenTexts(self._text_of_many, prompt_ids)
            self._choices[index] = _Choice(texts)

    def add_tokens(self, index: int, token_ids: Sequence[int]) -> None:
        """Takes tokens of a choice that are sent to the client."""
        self.start(index, ())
        self._choices[index].token_ids += token_ids

    def add_notes(self, index: int, notes: NotesByIndex) -> None:
        """Takes what the engine noted of a choice's tokens."""
        self.start(index, ())
        self._choices[index].notes.update(notes)

    def take(self, index: int, depths: Mapping[int, int]) -> dict[str, Any]:
        """The `exit_trace` of a choice: its tokens that were sent and are known, each once.

        Args:
            index: of the choice.
            depths: by index of a generated token, as far as they are known.
        """
        self.start(index, ())
        choice, found = self._choices[index], []
        while choice.taken < len(choice.token_ids) and choice.taken in depths:
            number, depth = choice.taken, depths[choice.taken]
            choice.taken += 1
            token_id = choice.token_ids[number]
            checks, drafts = choice.notes.pop(number, ((), ()))
            found.append(
                TokenTrace(
                    index=number,
                    token_id=token_id,
                    text=choice.texts.add(token_id),
                    depth=depth,
                    layers=noted_layers(depth, checks, self._layers, self._text_of),
                    drafts=draft_traces(drafts, self._text_of),
                )
            )
        return to_json(Tokens(tokens=tuple(found)))

    def _text_of(self, token_id: int) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode([token_id]))

    def _text_of_many(self, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skips))


class _Choice:
    """The tokens of one choice."""

    def __init__(self, texts: TokenTexts) -> None:
        self.texts = texts
        self.token_ids: list[int] = []
        self.notes: NotesByIndex = {}
        self.taken = 0
        """How many were sent as `exit_trace`."""
