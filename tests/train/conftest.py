"""Small models, texts, chats and recipes."""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from exitserve_training.commands import add_commands
from exitserve_training.models import build_config, build_model

from ..shapes import LLAMA

MakeCheckpoint = Callable[..., Path]

NO_DROPOUT = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that marks turns, as most do."""
CHARACTERS = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
"""One for a tokenizer of characters, with a start and an end."""


@pytest.fixture(scope="session")
def train() -> Callable[..., int]:
    """`exitserve train RECIPE key=value ...`, in this process; errors are raised."""

    def run(recipe: Path, *overrides: str) -> int:
        parser = argparse.ArgumentParser()
        add_commands(parser.add_subparsers())
        args = parser.parse_args(["train", str(recipe), *overrides])
        return int(args.run(args))

    return run


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text with something to learn: lines of a few words in a fixed order."""
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    generator = torch.Generator().manual_seed(0)
    words = ["alpha", "beta", "gamma", "delta", "return", "self", "value", "name"]
    lines = []
    for _ in range(3000):
        start = int(torch.randint(len(words), (), generator=generator))
        lines.append(" ".join(words[(start + i) % len(words)] for i in range(6)))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def make_recipe(tmp_path: Path, text_file: Path) -> Callable[..., Path]:
    """Writes a recipe of a run of seconds; keyword arguments replace its keys."""

    def make(**keys: Any) -> Path:
        tree: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"),
            "config": LLAMA,
            "tokenizer": {"train_bpe": {"vocab_size": 300}},
            "data": {"files": [str(text_file)], "sequence_length": 32, "validation_blocks": 8},
            "exit_layers": [1, 2],
            "training": {
                "max_steps": 4,
                "per_device_train_batch_size": 4,
                "learning_rate": 1e-3,
                "logging_steps": 2,
                "disable_tqdm": True,
            },
        }
        tree.update(keys)
        tree = {key: value for key, value in tree.items() if value is not None}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return path

    return make


# --- runs that are resumed -----------------------------------------------------------------------

TIMES = {"train_runtime", "train_tokens_per_second", "eval_runtime", "mfu"}
STOPPED = {
    "max_steps": 9,
    "save_steps": 5,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "disable_tqdm": True,
}
"""Of runs that stop after 5 of 9 steps: 5 is odd, so whatever alternates has to go on with its
second half, and the 3 steps of an epoch do not divide it, so the order of the data goes on too."""


@pytest.fixture
def short_text(tmp_path: Path, text_file: Path) -> Path:
    """A text of three optimizer steps, so that runs stop inside their second epoch."""
    path = tmp_path / "short.txt"
    lines = text_file.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(lines[:140]), encoding="utf-8")
    return path


@pytest.fixture
def stopped(
    make_recipe: Callable[..., Path], short_text: Path, tmp_path: Path, train: Callable[..., int]
) -> Callable[..., tuple[Path, Path]]:
    """Runs a recipe to its end; returns the recipe, and the run's folder as stopped after step 5.

    The whole run is kept beside it, as `whole`.
    """

    def run(**keys: Any) -> tuple[Path, Path]:
        data = {"files": [str(short_text)], "sequence_length": 32, "validation_fraction": 0.2}
        recipe = make_recipe(**{"data": data, "training": STOPPED, **keys})
        out = tmp_path / "out"
        assert train(recipe) == 0
        shutil.copytree(out, tmp_path / "whole")
        shutil.rmtree(out / "checkpoint-9")
        (out / "model.safetensors").unlink()
        (out / "report.json").unlink()
        return recipe, out

    return run


def history(folder: Path) -> list[dict[str, Any]]:
    """What was logged, but for how long it took."""
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    entries: list[dict[str, Any]] = state["log_history"]
    return [{k: v for k, v in entry.items() if k not in TIMES} for entry in entries]


def logged(out: Path) -> list[dict[str, Any]]:
    """What the newest checkpoint's history has of each step."""
    newest = max(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    return [entry for entry in history(newest) if "loss" in entry]


@pytest.fixture
def resumes(
    stopped: Callable[..., tuple[Path, Path]], tmp_path: Path, train: Callable[..., int]
) -> Callable[..., None]:
    """A run that was stopped makes the steps that it would have made.

    Bit for bit: the same operations on the same numbers, by as many threads.
    """

    def check(**keys: Any) -> None:
        recipe, out = stopped(**keys)
        whole = tmp_path / "whole"
        assert train(recipe, "resume=true") == 0
        expected, found = history(whole / "checkpoint-9"), history(out / "checkpoint-9")
        steps = [entry["step"] for entry in expected if "loss" in entry]
        assert steps == list(range(1, 10))
        assert max(entry["epoch"] for entry in expected) == 3
        # The first entry is the evaluation before training, which a checkpoint has too.
        assert found == expected
        files = [
            Path("model.safetensors"),
            *(p.relative_to(whole) for p in whole.glob("c*-9/*.saf*")),
        ]
        assert len(files) == 2 + (whole / "checkpoint-9" / "objectives.safetensors").is_file()
        for file in files:
            saved, again = load_file(whole / file), load_file(out / file)
            assert saved.keys() == again.keys()
            assert all(torch.equal(again[key], tensor) for key, tensor in saved.items()), file
        reports = [json.loads((folder / "report.json").read_text()) for folder in (whole, out)]
        for key in ("layers", "metrics", "tokens_seen", "steps", "parameters"):
            assert reports[1][key] == reports[0][key]

    return check


# --- chats ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def plain_chat_model(tmp_path_factory: pytest.TempPathFactory, bundled: Path) -> Path:
    """A small model with the bundled tokenizer, whose template joins contents."""
    return _save_chat_model(tmp_path_factory.mktemp("plain"), bundled, None)


@pytest.fixture(scope="session")
def marked_chat_model(tmp_path_factory: pytest.TempPathFactory, bundled: Path) -> Path:
    """The same with a template that marks turns."""
    return _save_chat_model(tmp_path_factory.mktemp("marked"), bundled, TURNS)


def _save_chat_model(folder: Path, bundled: Path, template: str | None) -> Path:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundled)
    if template is not None:
        tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    sizes = LLAMA | {"max_position_embeddings": 128, "tie_word_embeddings": True}
    torch.manual_seed(0)
    build_model(build_config(sizes, tokenizer)).save_pretrained(folder)
    return folder


@pytest.fixture
def with_template(tmp_path: Path) -> Callable[[Path], Path]:
    """Gives a checkpoint of `make_checkpoint` a chat template, and takes its padding token."""

    def make(checkpoint: Path) -> Path:
        from transformers import AutoTokenizer

        folder = tmp_path / "chat-model"
        shutil.copytree(checkpoint, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.pad_token = None
        tokenizer.chat_template = CHARACTERS
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def chat_row() -> Callable[..., dict[str, Any]]:
    """`chat_row(3, "texts")`: a question, and an answer of a length of its own, in a form."""

    def make(number: int, form: str = "messages") -> dict[str, Any]:
        terms = " + ".join("abcdefgh"[: 1 + number % 8])
        question = f"Write function number {number}."
        answer = f"def f{number}(x):\n    return {terms}"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return {
            "messages": {"messages": messages},
            "texts": {"prompt": question, "completion": answer},
            "message lists": {"prompt": messages[:1], "completion": messages[1:]},
            "sharegpt": {
                "conversations": [
                    {"from": "human", "value": question},
                    {"from": "gpt", "value": answer, "role": None},
                ],
                "id": number,
            },
            "alpaca": {"instruction": question, "input": "", "output": answer, "messages": None},
        }[form]

    return make


@pytest.fixture(scope="session")
def write_rows() -> Callable[[Path, list[dict[str, Any]]], Path]:
    """Writes rows as JSON Lines."""

    def write(path: Path, rows: list[dict[str, Any]]) -> Path:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def chat_recipe(
    make_recipe: Callable[..., Path],
    tmp_path: Path,
    plain_chat_model: Path,
    chat_row: Callable[..., dict[str, Any]],
    write_rows: Callable[[Path, list[dict[str, Any]]], Path],
) -> Callable[..., Path]:
    """A recipe of a run of seconds on 26 chats, 2 of them held out."""

    def make(rows: list[dict[str, Any]] | None = None, **keys: Any) -> Path:
        given = [chat_row(number) for number in range(26)] if rows is None else rows
        data = {
            "format": "chat",
            "files": [str(write_rows(tmp_path / "chats.jsonl", given))],
            "validation_fraction": 0.08,
            "sequence_length": 64,
            **keys.pop("data", {}),
        }
        base = {"config": None, "tokenizer": None, "model": str(plain_chat_model), "data": data}
        return make_recipe(**{**base, **keys})

    return make


@pytest.fixture(scope="session")
def load(make_checkpoint: MakeCheckpoint) -> Callable[[str], Any]:
    """A tiny random model whose confidences spread, in training mode but without dropout."""

    def make(family: str) -> Any:
        from transformers import AutoModelForCausalLM

        folder = make_checkpoint(family, **NO_DROPOUT.get(family, {}))
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()

    return make
