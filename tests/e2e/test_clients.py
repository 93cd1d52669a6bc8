"""docs/clients.md: every example, as written but for the port, against the shared server."""

import json
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..forks import LocalServer
from ..written import ROOT, Checkout, blocks

pytestmark = pytest.mark.nightly

PAGE = ROOT / "docs" / "clients.md"
SERVE, COMPLETION, CHAT, BENCH = range(4)
OPENAI, LANGCHAIN = range(2)


@pytest.fixture
def shell(server: LocalServer) -> list[str]:
    return [block.replace("8000", str(server.port)) for block in blocks(PAGE, "bash")]


@pytest.fixture
def python(server: LocalServer) -> list[str]:
    return [block.replace("8000", str(server.port)) for block in blocks(PAGE, "python")]


def early_tokens(server: LocalServer) -> int:
    """How many tokens of all requests have stopped early."""
    counts = httpx.get(f"{server.url}/exitserve/stats", timeout=60).json()["since_start"]
    *early, _ = counts["tokens_by_exit_layer"].values()
    return sum(early)


def test_the_page_has_no_other_examples(shell: list[str], python: list[str]) -> None:
    assert (len(shell), len(python)) == (4, 2)
    assert "--served-model-name exit-py" in shell[SERVE]


def test_curl(shell: list[str], tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    answer = json.loads(checkout.run(shell[COMPLETION]))
    assert len(answer["choices"][0]["exit_layers"]) == 16
    *_, last, done = checkout.run(shell[CHAT]).split("\n\n")[:-1]
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["exit_metrics"]["tokens"] == 16


def test_openai(python: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    exec(python[OPENAI], {})
    assert "depths: [24, " in (printed := capsys.readouterr().out)
    assert float(printed.rsplit(" ", 1)[1]) > 1


def test_langchain(
    python: list[str], server: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    early, full_depth = python[LANGCHAIN].split("full_depth = ")
    names: dict[str, Any] = {}
    before = early_tokens(server)
    exec(early, names)
    between = early_tokens(server)
    exec(f"full_depth = {full_depth}", names)
    assert before < between == early_tokens(server)
    assert capsys.readouterr().out.strip()


def test_vllm_bench(shell: list[str], server: LocalServer, monkeypatch: Any) -> None:
    """By what the command calls: the CPU build's command itself does not start."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = shlex.split(shell[BENCH].replace("\\\n", " "))
    assert words[:3] == ["vllm", "bench", "serve"]
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    monkeypatch.chdir(ROOT)
    result = main(parser.parse_args(words[3:]))
    assert (result["completed"], result["failed"]) == (4, 0)
