"""Rows of chats as data sets have them: messages, tools, calls and thinking, checked one by one."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from trl.data_utils import maybe_convert_to_chatml
from trl.trainer.utils import remove_none_values

from exitserve.errors import ExitServeError, shown
from exitserve_training.data_recipe import DataRecipe
from exitserve_training.sources import read_tables

_ROLES = ("system", "user", "assistant", "tool")
_OF_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}

Message = dict[str, Any]
"""`role` and `content`, and what else the chat template reads: `tool_calls`, `reasoning_content`.
"""


@dataclass(frozen=True)
class Chat:
    """One row."""

    name: str
    given: list[Message]
    """Context without loss: all but the last answer; empty where all of the chat is learnt."""
    learnt: list[Message]
    options: dict[str, Any] = field(default_factory=dict)
    """What else the chat template is given: `tools`, and the row's `chat_template_kwargs`."""

    @property
    def key(self) -> bytes:
        """Equal for equal chats."""
        text = json.dumps([self.given + self.learnt, self.options], default=str)
        return hashlib.sha256(text.encode()).digest()


def read_chats(recipe: DataRecipe, patterns: Sequence[str], split: str | None) -> list[Chat]:
    """The chats of some files and of a split of the data set, equal ones once.

    Names the columns that no chat uses on the terminal.
    """
    chats, unused = [], set[str]()
    for name, given in read_tables(recipe, patterns, split):
        # Some tables have every key in every row, with None for missing values.
        row = dict(remove_none_values(given))
        chats.append(_chat(row, name, recipe.loss_on))
        unused |= row.keys()
    if unused:
        print(f"Columns that chats do not use: {', '.join(sorted(unused))}")
    return list({chat.key: chat for chat in chats}.values())


def _chat(row: dict[str, Any], name: str, loss_on: str) -> Chat:
    """One row, checked; takes what it uses out of it. Also rows of ShareGPT and of Alpaca."""
    maybe_convert_to_chatml(row)
    system = row.pop("system", None)
    opening = [{"role": "system", "content": system}] if isinstance(system, str) else []
    if {"instruction", "output"} <= row.keys():
        asked = filter(None, (row.pop("instruction"), row.pop("input", None)))
        row.update(prompt="\n\n".join(asked), completion=row.pop("output"))
    if "messages" in row:
        messages = [*opening, *_messages(row.pop("messages"), f"{name}: messages")]
        given, learnt = messages[:-1], messages[-1:]
    elif {"prompt", "completion"} <= row.keys():
        given = [*opening, *_messages(row.pop("prompt"), f"{name}: prompt", "user")]
        learnt = _messages(row.pop("completion"), f"{name}: completion", "assistant")
    else:
        raise ExitServeError(
            f"{name} is not a chat: it has {', '.join(sorted(row)) or 'nothing'}; expected "
            f"`messages`, or `prompt` and `completion`, or those of ShareGPT or Alpaca."
        )
    if loss_on == "assistant" and not any(m["role"] == "assistant" for m in given + learnt):
        raise ExitServeError(
            f"{name}: the assistant says nothing, so with data.loss_on=assistant there is nothing "
            f"to learn; set data.loss_on=all, or leave the row out."
        )
    options = _options(row, name)
    if loss_on != "completion":
        return Chat(name, [], given + learnt, options)
    if learnt[-1]["role"] != "assistant":
        raise ExitServeError(
            f"{name}: the last message is from {learnt[-1]['role']!r}; with "
            f"data.loss_on=completion it must be the assistant's. Set data.loss_on=all, or leave "
            f"the row out."
        )
    if not given:
        raise ExitServeError(
            f"{name}: nothing stands before the answer; give a message of the user's, or set "
            f"data.loss_on=all."
        )
    return Chat(name, given, learnt, options)


def _messages(messages: Any, name: str, role_of_text: str | None = None) -> list[Message]:
    if isinstance(messages, str) and role_of_text is not None:
        return [{"role": role_of_text, "content": messages}]
    given = messages if isinstance(messages, list) else []
    problems = ((n, _problem(message)) for n, message in enumerate(given, start=1))
    none = f"; it is {shown(messages)}"
    bad = next((f"; message {n} has {what}" for n, what in problems if what), "" if given else none)
    if bad:
        text = "" if role_of_text is None else "text or "
        raise ExitServeError(
            f"{name} must be {text}a list of {{role, content}} with a role of "
            f"{', '.join(_ROLES)}, and text or parts of text as content (none beside tool_calls)"
            f"{bad}."
        )
    return [_message(message) for message in given]


def _problem(message: Any) -> str | None:
    """What is wrong with a message."""
    if not isinstance(message, dict):
        return "no keys"
    role: Any = message.get("role")
    message["role"] = role = _OF_SHAREGPT.get(str(role), role)
    content, calls = message.get("content"), message.get("tool_calls")
    if role not in _ROLES:
        return f"the role {shown(role)}"
    if calls and not _are_mappings(calls):
        return f"the tool_calls {shown(calls)}"
    if isinstance(content, list):
        bad = (p for p in content if not isinstance(p, dict) or not isinstance(p.get("text"), str))
        return next((f"the part {shown(part)}" for part in bad), None)
    if isinstance(content, str) or (content is None and calls):
        return None
    return f"the content {shown(content)}"


def _are_mappings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, dict) for value in values)


def _message(given: dict[str, Any]) -> Message:
    """The message as vLLM hands it to templates when it serves."""
    content = given.get("content", "")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    message = {**given, "content": content}
    for call in message.get("tool_calls", []):
        function = call.get("function", {})
        if isinstance(function.get("arguments"), str):
            with suppress(json.JSONDecodeError):
                function["arguments"] = json.loads(function["arguments"])
    return message


def _options(row: dict[str, Any], name: str) -> dict[str, Any]:
    tools = row.pop("tools", None)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ExitServeError(f"{name}: tools is not valid JSON: {error}.") from error
    options = row.pop("chat_template_kwargs", None) or {}
    if not isinstance(options, dict):
        raise ExitServeError(f"{name}: chat_template_kwargs must be keys with values.")
    if not tools:  # some templates would introduce an empty list
        return options
    if not _are_mappings(tools):
        raise ExitServeError(
            f"{name}: tools must be a list of JSON schemas, or one as JSON in a text."
        )
    return {**options, "tools": tools}
