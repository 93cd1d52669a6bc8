"""`data.own_chats`: chats that the model writes itself, by the turns of its chat template."""

import json
import os
import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from exitserve.errors import ExitServeError
from exitserve_training.chats import load_chats
from exitserve_training.own_chats import ChatTurns
from exitserve_training.recipe import load_recipe

from ..forks import PythonProcess

MakeRecipe = Callable[..., Path]
Train = Callable[..., int]

COUNT = 100
IGNORED = -100


@pytest.fixture
def writes_chats(
    make_checkpoint: Callable[..., Path],
    with_template: Callable[[Path], Path],
    make_recipe: MakeRecipe,
) -> Path:
    """A recipe on chats of a random model, whose 128 tokens are characters."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM writes the chats, and is not installed")
    return make_recipe(
        model=str(with_template(make_checkpoint("llama"))),
        config=None,
        tokenizer=None,
        data={
            "format": "chat",
            "own_chats": {"count": COUNT, "system": "Be brief."},
            "loss_on": "all",
            "packing": True,
            "sequence_length": 160,
            "validation_fraction": 0.1,
        },
        exit_layers=[2, 4],
    )


def lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def test_a_run_that_is_stopped_while_it_writes_goes_on_with_what_it_has(
    writes_chats: Path, tmp_path: Path, train: Train
) -> None:
    file, log = tmp_path / "out" / "data" / "own-chats.jsonl", tmp_path / "log"
    process = PythonProcess("exitserve", ["train", str(writes_chats)], log, os.environ)
    while len(lines(file)) < 2:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert "resume=true" in log.read_text(encoding="utf-8")
    before = lines(file)
    assert 2 <= len(before) < COUNT
    with file.open("a", encoding="utf-8") as chats:
        chats.write('{"messages": [{"role": "us')  # cut short, as by a kill

    assert train(writes_chats, "resume=true") == 0
    written = lines(file)
    assert written[: len(before)] == before
    rows = [json.loads(line)["messages"] for line in written]
    assert len({row[1]["content"] for row in rows}) == COUNT
    for row in rows:
        assert [m["role"] for m in row] == ["system", "user", "assistant"]
        assert row[0]["content"] == "Be brief."
        assert row[1]["content"].strip() and row[2]["content"].strip()
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["steps"] == 4
    held_out = lines(file.with_name("held-out.jsonl"))
    assert len(held_out) == COUNT // 10
    assert all('"text": "<s>system: Be brief.</s><s>user: ' in line for line in held_out)

    # The file serves other runs as any other of chats does.
    again = load_recipe(writes_chats, ["data.own_chats=null", f"data.files=[{file}]"])
    sides = load_chats(again.data, AutoTokenizer.from_pretrained(str(again.model)), again.seed)
    learnt = sum(label != IGNORED for row in sides["train"]["labels"] for label in row[1:])
    assert learnt == report["train_tokens"]


CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "{% for m in messages %}<|head|>{{ m['role'] }}<|/head|>\n\n{{ m['content'] | trim }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
MARKS = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|end|>", "[INST]", "[/INST]"]
BEGINNINGS = {
    "ChatML, which adds a system prompt": (
        CHATML,
        None,
        "<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\n",
        {"<|im_end|>", "<|endoftext|>"},
    ),
    "ChatML with another": (
        CHATML,
        "Hm.",
        "<|im_start|>system\nHm.<|im_end|>\n<|im_start|>user\n",
        {"<|im_end|>", "<|endoftext|>"},
    ),
    "headers": (HEADERS, None, "<|head|>user<|/head|>\n\n", {"<|end|>", "<|endoftext|>"}),
    "brackets": (BRACKETS, None, "[INST]", {"[/INST]", "<|endoftext|>"}),
}


@pytest.fixture(scope="module")
def tokenizer(bundled: Path) -> Any:
    """Of which no two tests may run at once: they change its template."""
    loaded: Any = AutoTokenizer.from_pretrained(bundled)
    loaded.add_special_tokens({"extra_special_tokens": MARKS})
    return loaded


@pytest.mark.parametrize("case", BEGINNINGS)
def test_turns_are_found_in_the_template(tokenizer: Any, case: str) -> None:
    tokenizer.chat_template, system, beginning, ends = BEGINNINGS[case]
    turns = ChatTurns(tokenizer, system, 200)
    assert tokenizer.decode(turns.beginning) == beginning
    assert {tokenizer.decode([end]) for end in turns.ends} == ends
    prompt = tokenizer.decode(turns.prompt("Why?"))
    assert prompt.startswith(beginning) and "Why?" in prompt


@pytest.mark.parametrize(
    ("template", "length", "message"),
    [
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", 200, "no special token stands"),
        (CHATML.replace("<|im_start|>{{", "{{ m['content'] }}{{"), 200, "is said 2 times"),
        ("{{ raise_exception('no') }}", 200, "it refuses them: no"),
        (CHATML, 20, "data.sequence_length=20 leaves no room for a chat"),
    ],
)
def test_templates_that_do_not_tell_are_refused(
    tokenizer: Any, template: str, length: int, message: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ExitServeError, match=message) as error:
        ChatTurns(tokenizer, None, length)
    assert "\n" not in str(error.value)
