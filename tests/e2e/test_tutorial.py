"""docs/tutorial.md: every command, as written but for the port.

The model is the bundled one in the form of a chat model such as SmolLM2 or Llama 3: with a chat
template, whose marks it has to learn, and without a padding token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from exitserve.checkpoint.block import read_multi_exit

from ..forks import free_port, is_healthy, stop
from ..written import ROOT, Checkout, blocks

pytestmark = pytest.mark.nightly

RECIPE, TRAIN, CALIBRATE, SERVE, ASK, ASK_FULL_DEPTH, STATS, METRICS, CUT = range(9)
DEPTHS = {6, 12, 18, 24}


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, shipped: Path) -> Checkout:
    found = Checkout(tmp_path_factory.mktemp("tutorial"))
    models = found.folder / "models"
    models.unlink()
    save_chat_model(shipped, models / shipped.name)
    return found


def save_chat_model(source: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.pad_token = None
    tokenizer.chat_template = CHATML
    model: Any = AutoModelForCausalLM.from_pretrained(source)
    assert model.config.tie_word_embeddings
    model.resize_token_embeddings(len(tokenizer))
    model.config.pad_token_id = model.generation_config.pad_token_id = None
    for part in (tokenizer, model):
        part.save_pretrained(folder)


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def commands(port: int) -> list[str]:
    found = blocks(ROOT / "docs" / "tutorial.md", "bash")
    assert len(found) == 9
    return [block.replace("8000", str(port)) for block in found]


@pytest.fixture(scope="module")
def model(checkout: Checkout, commands: list[str]) -> Path:
    """Trained and calibrated."""
    for step in (RECIPE, TRAIN, CALIBRATE):
        checkout.run(commands[step])
    return checkout.folder / "runs" / "tutorial" / "model"


@pytest.fixture(scope="module")
def served(checkout: Checkout, commands: list[str], port: int, model: Path) -> Iterator[None]:
    server = checkout.start(commands[SERVE])
    deadline = time.monotonic() + 300
    while not is_healthy(f"http://localhost:{port}"):
        assert server.poll() is None and time.monotonic() < deadline, checkout.output[-3000:]
        time.sleep(0.3)
    yield
    stop(server)


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def test_training_helps_at_every_depth(model: Path) -> None:
    report = read(model / "report.json")
    assert report["steps"] == 20
    for depth, before in report["initial_layers"].items():
        assert report["layers"][depth]["perplexity"] < before["perplexity"]


def test_calibration_promises_what_the_page_says(model: Path) -> None:
    block = read_multi_exit(model)
    assert block is not None and block.calibration is not None
    assert (block.calibration.mode, block.calibration.chosen.agreement) == ("defer", 0.9)
    assert (model / "calibration" / "report.md").is_file()


def test_the_server_answers_and_counts(
    checkout: Checkout, commands: list[str], served: None, port: int
) -> None:
    early = json.loads(checkout.run(commands[ASK]))
    depths = early["choices"][0]["exit_layers"]
    assert set(depths) <= DEPTHS and min(depths) < 24
    assert early["exit_metrics"]["depth_speedup"] > 1
    asked = {"messages": [{"role": "user", "content": "Read lines."}], "max_tokens": 8}
    url = f"http://localhost:{port}/v1/chat/completions"
    sent = {"model": early["model"], "vllm_xargs": {"exit_trace": True}, **asked}
    chat = httpx.post(url, json=sent, timeout=60).json()
    assert chat["choices"][0]["exit_layers"] and chat["usage"]["prompt_tokens"] > 8
    full = json.loads(checkout.run(commands[ASK_FULL_DEPTH]))
    assert set(full["choices"][0]["exit_layers"]) == {24}
    counts = json.loads(checkout.run(commands[STATS]))
    assert counts["since_start"]["tokens"] >= 64
    assert {"checks", "checks_passed"} <= set(counts["since_start"]["exits"]["6"])
    metrics = checkout.run(commands[METRICS])
    assert "exitserve_calibrated_agreement" in metrics and "} 0.9\n" in metrics
    assert "exitserve_shadow_agreed_total" in metrics


def test_the_first_layers_are_a_model(checkout: Checkout, commands: list[str], model: Path) -> None:
    checkout.run(commands[CUT])
    assert read(model.parent / "twelve-layers" / "config.json")["num_hidden_layers"] == 12
