"""The prompts of a comparison: bundled, or from the user's file."""

from pathlib import Path
from typing import Any

from exitserve.errors import ExitServeError
from exitserve.windows import json_rows, load_tokenizer, read_text

BUNDLED = (
    'def read_lines(path):\n    """Return the lines of a text file without newlines."""\n',
    'def is_palindrome(text):\n    """Tell whether text reads the same backwards."""\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    'def merge_sorted(left, right):\n    """Merge two sorted lists into one."""\n    result = []\n',
    "import os\nimport sys\n\n\ndef main(argv=None):\n    if argv is None:\n",
    'def count_words(text):\n    """Count how often each word occurs."""\n    counts = {}\n',
    "def __repr__(self):\n    return ",
    "    def __eq__(self, other):\n        if not isinstance(other, type(self)):\n",
    'def fibonacci(n):\n    """Return the first n Fibonacci numbers."""\n    numbers = [0, 1]\n',
    "try:\n    import json\nexcept ImportError:\n",
    'def flatten(nested):\n    """Flatten a list of lists."""\n    return [',
    "    def test_empty(self):\n        self.assertEqual(",
)
"""Heads of short Python functions, written for this purpose."""

Prompt = str | tuple[int, ...]
"""Text, or token ids."""


def load_prompts(path: Path | None) -> tuple[Prompt, ...]:
    r"""Reads prompts: one for each line of text, or of JSONL.

    Args:
        path: None for the bundled ones. A `.jsonl` line is an object with `prompt` (text) or
            `prompt_token_ids` (whole numbers). In a text file the two characters
            `\n` within a line stay as they are.

    Raises:
        ExitServeError: the file is missing, empty, or a line is malformed.
    """
    if path is None:
        return BUNDLED
    content = read_text(path)
    prompts: tuple[Prompt, ...]
    if path.suffix == ".jsonl":
        prompts = tuple(_from_json(row, where) for where, row in json_rows(content, path))
    else:
        prompts = tuple(line for line in content.split("\n") if line.strip())
    if not prompts:
        raise ExitServeError(f"'{path}' holds no prompts; write one on each line.")
    return prompts


def _from_json(row: Any, where: str) -> Prompt:
    if isinstance(row, dict):
        text, ids = row.get("prompt"), row.get("prompt_token_ids")
        if isinstance(text, str) and text:
            return text
        if isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids):
            return tuple(ids)
    raise ExitServeError(
        f"{where} has no usable prompt; write a JSON object such as "
        f'{{"prompt": "def f(x):"}} or {{"prompt_token_ids": [1, 2]}}.'
    )


def encode_prompts(prompts: tuple[Prompt, ...], model_dir: Path) -> list[tuple[int, ...]]:
    """Turns prompts into token ids with the checkpoint's tokenizer, as vLLM would.

    Raises:
        ExitServeError: text is given but the checkpoint has no tokenizer, or a prompt is empty
            once encoded.
    """
    if all(isinstance(prompt, tuple) for prompt in prompts):
        return [tuple(prompt) for prompt in prompts if not isinstance(prompt, str)]
    tokenizer = load_tokenizer(model_dir, fix="give --prompts as .jsonl with prompt_token_ids")
    encoded = []
    for prompt in prompts:
        ids = tuple(tokenizer(prompt).input_ids) if isinstance(prompt, str) else prompt
        if not ids:
            raise ExitServeError(f"prompt {prompt!r} has no tokens; remove it.")
        encoded.append(ids)
    return encoded


def first_prompts(prompts: list[tuple[int, ...]], count: int) -> tuple[tuple[int, ...], ...]:
    """The first `count` prompts, repeated from the start where there are too few."""
    return tuple(prompts[index % len(prompts)] for index in range(count))
