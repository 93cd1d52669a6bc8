"""Rows of chats: every form comes to the same tokens and labels, and bad ones are named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from exitserve.errors import ExitServeError
from exitserve_training.chats import load_chats
from exitserve_training.recipe import load_recipe

Train = Callable[..., int]
MakeRecipe = Callable[..., Path]
ChatRow = Callable[..., dict[str, Any]]

IGNORED = -100
FORMS = ("messages", "texts", "message lists", "sharegpt", "alpaca")


AGENT = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}\n{% if m.reasoning_content and loop.index0 > ns.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m['content'] }}"
    "{% for c in m.tool_calls %}<call>{{ c.function.name }}: {{ c.function.arguments | tojson }}"
    "</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if no_thinking %}<think></think>"
    "{% endif %}{% endif %}"
)
"""Tools, calls, and thinking, which is shown behind the last user message alone."""
WEATHER = {"name": "weather", "parameters": {"city": {"type": "string", "default": None}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
THINKS = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]}
USES_TOOLS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "?"}],
    },
    THINKS,
    {"role": "tool", "content": "sun"},
    {"role": "assistant", "content": "Sun.", "reasoning_content": "So."},
]
ASKED = (
    '<|im_start|>tools\n{"name": "weather", "parameters": {"city": {"type": "string"DEFAULT}}}\n'
    "<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWeather\n?<|im_end|>\n"
    '<|im_start|>assistant\n<think>Hm.</think><call>weather: {"city": "Rome"}</call><|im_end|>\n'
    "<|im_start|>tool\nsun<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.parametrize("loss_on", ["completion", "assistant", "all"])
@pytest.mark.parametrize("tools", [[WEATHER], json.dumps([WEATHER])], ids=["list", "text"])
def test_system_prompts_tools_and_thinking_reach_the_template(
    chat_recipe: MakeRecipe, marked_chat_model: Path, loss_on: str, tools: Any
) -> None:
    chats = [[*USES_TOOLS[:-1], {**USES_TOOLS[-1], "content": f"Sun{end}"}] for end in ".!"]
    rows = [{"messages": chat, "tools": tools} for chat in chats]
    recipe = load_recipe(chat_recipe(rows, data={"loss_on": loss_on, "sequence_length": 256}))
    tokenizer: Any = AutoTokenizer.from_pretrained(marked_chat_model)
    tokenizer.chat_template = AGENT
    row = load_chats(recipe.data, tokenizer, 0)["train"][0]
    # What a table leaves empty is as if it were missing; in a text, null is meant.
    asked = ASKED.replace("DEFAULT", ', "default": null' if isinstance(tools, str) else "")
    whole = tokenizer.decode(row["input_ids"])
    answers = [f"<think>So.</think>Sun{end}<|im_end|>\n" for end in ".!"]
    assert whole in [asked + answer for answer in answers]
    learnt = tokenizer.decode([label for label in row["labels"] if label != IGNORED])
    call = '<think>Hm.</think><call>weather: {"city": "Rome"}</call><|im_end|>\n'
    before = {"completion": "", "assistant": call, "all": asked}[loss_on]
    assert learnt in [before + answer for answer in answers]


@pytest.mark.parametrize("loss_on", ["completion", "assistant", "all"])
def test_every_form_of_row_gives_the_same(
    chat_recipe: MakeRecipe,
    marked_chat_model: Path,
    loss_on: str,
    chat_row: ChatRow,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(marked_chat_model)
    found = []
    for form in FORMS:
        rows = [chat_row(number, form) for number in range(26)]
        recipe = load_recipe(chat_recipe(rows, data={"loss_on": loss_on}))
        split = load_chats(recipe.data, tokenizer, recipe.seed)
        found.append([split[side].to_dict() for side in ("train", "validation")])
    assert all(other == found[0] for other in found)
    assert capsys.readouterr().out.count("Columns that chats do not use: id\n") == 1
    rows = [{**chat_row(number, "sharegpt"), "system": "Be brief."} for number in range(9)]
    split = load_chats(load_recipe(chat_recipe(rows)).data, tokenizer, 0)
    opening = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert tokenizer.decode(split["train"][0]["input_ids"]).startswith(opening)


@pytest.mark.parametrize("first", [0, 2])
def test_of_several_turns_all_answers_are_learnt(
    chat_recipe: MakeRecipe, marked_chat_model: Path, first: int
) -> None:
    turns = [("system", "Be brief."), ("user", "One?"), ("assistant", "1"), ("user", "Two?")]
    rows = [messages(*turns[first:], ("assistant", f"2 {end}"), ("user", "Thanks")) for end in "ab"]
    recipe = load_recipe(chat_recipe(rows, data={"loss_on": "assistant"}))
    tokenizer: Any = AutoTokenizer.from_pretrained(marked_chat_model)
    row = load_chats(recipe.data, tokenizer, 0)["train"][0]
    learnt = [token for token in row["labels"] if token != IGNORED]
    assert tokenizer.decode(learnt) in [f"1<|im_end|>\n2 {end}<|im_end|>\n" for end in "ab"]
    at = [i for i, label in enumerate(row["labels"]) if label != IGNORED]
    assert [row["input_ids"][i] for i in at] == learnt
    # Qwen3's way: what is thought is shown for the last answer alone.
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{% if loop.last and m['role'] == 'assistant' %}"
        "<think>{% endif %}{{ m['content'] }}\n{% endfor %}"
    )
    with pytest.raises(
        ExitServeError, match=r"renders message [13] otherwise .* data.loss_on=completion, or all"
    ):
        load_chats(recipe.data, tokenizer, 0)


def test_what_does_not_fit_at_all_ends_before_anything_is_written(
    chat_recipe: MakeRecipe, tmp_path: Path, train: Train
) -> None:
    with pytest.raises(ExitServeError, match=r"data.sequence_length=4 leaves nothing .*; raise"):
        train(chat_recipe(data={"sequence_length": 4}))
    assert not (tmp_path / "out").exists()


def messages(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


USER, ANSWER = ("user", "Say a."), ("assistant", "a")
BAD_ROWS = {
    "text": ({"text": "x"}, r"row 2 is not a chat: it has text; expected `messages`, or `prompt`"),
    "half": ({"prompt": "x"}, r"row 2 is not a chat: it has prompt"),
    "answer first": (messages(ANSWER), r"row 2: nothing stands before the answer"),
    "no answer": (messages(USER), r"row 2: the last message is from 'user'.*data.loss_on=all"),
    "bad role": (messages(("bot", "x"), ANSWER), r"of system, .*; message 1 has the role 'bot'"),
    "no content": (
        messages(USER, ("assistant", None)),
        r"row 2: messages must .*; message 2 has the content None",
    ),
    "empty": ({"messages": []}, r"row 2: messages must be a list of"),
    "an image": (
        messages(("user", [{"type": "image"}]), ANSWER),
        r"message 1 has the part {'type': 'image'}",
    ),
    "no tools": ({**messages(USER, ANSWER), "tools": "{"}, "tools is not valid"),
    "no schemas": ({**messages(USER, ANSWER), "tools": '["x"]'}, "list of JSON"),
    "no keys": ({**messages(USER, ANSWER), "chat_template_kwargs": "x"}, "keys with values"),
    "no list": ({"prompt": 3, "completion": "x"}, r"row 2: prompt must be text or a list of"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_rows_that_are_no_chats_are_named(
    chat_recipe: MakeRecipe, tmp_path: Path, train: Train, case: str, chat_row: ChatRow
) -> None:
    row, message = BAD_ROWS[case]
    good = chat_row(1, "texts") if "prompt" in row and case == "half" else chat_row(1)
    with pytest.raises(ExitServeError, match=message) as error:
        train(chat_recipe([good, row]))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_without_a_template_is_refused(
    chat_recipe: MakeRecipe, tmp_path: Path, plain_chat_model: Path, train: Train
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(plain_chat_model, bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ExitServeError, match="needs a tokenizer with a chat template"):
        train(chat_recipe(model=str(bare)))
    scratch = chat_recipe(
        model=None,
        config={"architecture": "llama", "num_hidden_layers": 2, "hidden_size": 32},
        tokenizer={"train_bpe": {"vocab_size": 300}},
        exit_layers=[1],
    )
    with pytest.raises(ExitServeError, match=r"needs tokenizer\.path"):
        train(scratch)
