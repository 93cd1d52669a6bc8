"""Chats that a model writes itself: what its exits will meet when it is served.

Given its chat template up to where a user speaks, and nothing else, a chat model writes what users
ask; then it answers (Magpie, Xu et al. 2024, arXiv 2406.08464).
"""

import json
from collections.abc import Iterator
from itertools import count, cycle
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from exitserve.engine.writing import Writer
from exitserve.errors import ExitServeError
from exitserve.reporting.progress import counted
from exitserve_training.data_recipe import OwnChats
from exitserve_training.tokenization import special_ids

_QUESTION, _ANSWER = "QUESTION", "ANSWER"
_LONGEST_QUESTION = 128
"""In tokens; what goes on for longer is seldom a question."""
_TOP_P = 0.98
"""Of questions: the last two percent at temperature 1 are mostly no words."""
_TEMPERATURES = (0.0, 0.7)
"""Of answers, by turns: as drafts are taken most often, and as chat servers sample."""
_MOST_TRIES = 10
"""Questions for each chat wanted, before the model is given up."""

Message = dict[str, str]


class ChatTurns:
    """Where a chat template lets user and assistant speak, in tokens."""

    def __init__(self, tokenizer: Any, system: str | None, length: int) -> None:
        """Finds out by rendering a chat.

        Raises:
            ExitServeError: the template does not tell, or leaves no room for a chat.
        """
        self._tokenizer = tokenizer
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._special = special_ids(tokenizer)
        before, after = self._around(_QUESTION, self.messages(_QUESTION))
        answered = self._around(_ANSWER, self.messages(_QUESTION, _ANSWER))[1]
        end = self._first_mark(after)
        if end is None:
            raise _unclear("no special token stands behind what a user says")
        # A space at the end belongs to the first word.
        self.beginning: list[int] = self._ids(before.rstrip(" "))
        """Up to where a user speaks."""
        ends = {end, self._first_mark(answered), tokenizer.eos_token_id} - {None}
        self.ends: list[int] = sorted(ends)
        """Any of them ends what is said."""
        room = length - len(self.prompt(_QUESTION))
        self.longest_question = min(_LONGEST_QUESTION, room // 2)
        """In tokens."""
        if self.longest_question < 1:
            raise ExitServeError(
                f"data.sequence_length={length} leaves no room for a chat, of which the chat "
                f"template takes {length - room} tokens; raise it."
            )

    def messages(self, question: str, answer: str | None = None) -> list[Message]:
        """A chat of one question, and its answer if there is one."""
        messages = [*self._opening, {"role": "user", "content": question}]
        return messages if answer is None else [*messages, {"role": "assistant", "content": answer}]

    def prompt(self, question: str) -> list[int]:
        """The tokens up to the answer."""
        return self._ids(self._rendered(self.messages(question)))

    def text(self, tokens: list[int]) -> str:
        """What was said, without marks and the space around it."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    def is_plain(self, tokens: list[int]) -> bool:
        """Whether something was said, in whole characters and without marks in between."""
        text = self.text(tokens)
        return bool(text) and "\ufffd" not in text and self._special.isdisjoint(tokens)

    def _rendered(self, messages: list[Message]) -> str:
        unanswered = messages[-1]["role"] == "user"
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=unanswered
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise _unclear(f"it refuses them: {' '.join(str(error).split())}") from error

    def _around(self, words: str, messages: list[Message]) -> tuple[str, str]:
        """What stands before and behind the words."""
        parts = self._rendered(messages).split(words)
        if len(parts) != 2:
            raise _unclear(f"it shows what is said {len(parts) - 1} times")
        return parts[0], parts[1]

    def _first_mark(self, text: str) -> int | None:
        return next((number for number in self._ids(text) if number in self._special), None)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _unclear(why: str) -> ExitServeError:
    return ExitServeError(
        f"data.own_chats asks the model for a user's words and then for an answer, and this chat "
        f"template does not tell where they stand: {why}. Leave data.own_chats out, and give chats "
        f"as data.files."
    )


def write_own_chats(
    file: Path, own: OwnChats, turns: ChatTurns, *, model: str, length: int, seed: int
) -> None:
    """Writes chats to a file as they are done, rows of `messages`; those in it count, and what is
    longer than `length` tokens is cut.

    Raises:
        ExitServeError: most of the questions that the model writes are of no use.
    """
    known = _questions(file)
    missing = own.count - len(known)
    if missing <= 0:
        return
    # Another seed than before: the same would ask the same again.
    writer = Writer(model, length=length, count=missing, seed=seed + len(known))
    chats = _interview(writer, own, turns, known, missing)
    with writer, file.open("a", encoding="utf-8") as out:
        for messages in counted(chats, "own chats", own.count, len(known), lines=20):
            out.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
            out.flush()


def _questions(file: Path) -> set[str]:
    """The questions of the chats in the file, from which a line cut short is removed."""
    if not file.is_file():
        return set()
    whole = file.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if kept != whole:
        file.write_bytes(kept)
    return {json.loads(line)["messages"][-2]["content"] for line in kept.splitlines()}


def _interview(
    writer: Writer, own: OwnChats, turns: ChatTurns, known: set[str], missing: int
) -> Iterator[list[Message]]:
    """Asks for questions, and for the answers to those of use; yields chats as they are done.

    No more are begun than are missing, so that none is thrown away.
    """
    temperatures = cycle(_TEMPERATURES if own.temperature is None else (own.temperature,))
    numbers, tries, done = count(), 0, 0
    answering: dict[int, str] = {}  # the questions, by the numbers of their answers
    while done < missing:
        while writer.waiting < min(2 * writer.rows, missing - done):
            if tries == _MOST_TRIES * missing:
                raise ExitServeError(
                    f"of {tries:,} questions that the model wrote, {done:,} came to a chat; the "
                    f"others were empty, did not end within {_LONGEST_QUESTION} tokens, or were "
                    f"repeated. Give chats as data.files instead."
                )
            tries += 1
            writer.ask(
                next(numbers),
                turns.beginning,
                max_tokens=turns.longest_question,
                temperature=1.0,
                top_p=_TOP_P,
                stop_token_ids=turns.ends,
            )
        for said in writer.take():
            text = turns.text(said.tokens)
            if said.number in answering:
                question = answering.pop(said.number)
                if text:
                    done += 1
                    yield turns.messages(question, text)
            elif said.has_ended and text not in known and turns.is_plain(said.tokens):
                known.add(text)
                number = next(numbers)
                answering[number] = text
                writer.ask(
                    number,
                    turns.prompt(text),
                    max_tokens=None,  # up to the longest chat
                    temperature=next(temperatures),
                    stop_token_ids=turns.ends,
                )
