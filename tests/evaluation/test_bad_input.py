"""Mistakes are told in one line, before anything slow starts and before a folder is made."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from exitserve.cli import main
from exitserve.server.local_server import free_port

TASKS = Path(__file__).parent / "tasks"
OWN = ("--task-path", str(TASKS))


@pytest.fixture
def fails(bundled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = tmp_path / "held-out.txt"
    data.write_text("for index in range(10):\n    print(index)\n" * 30, encoding="utf-8")

    def fails(*options: str, model: Path | str = bundled) -> str:
        given = ["--data", str(data)] if "--data" not in options else []
        out = tmp_path / "out"
        assert main(["eval", str(model), *given, "--out", str(out), *options]) == 2
        # pytest's error stream is not the process's, whose progress bars go to a log.
        *bars, error = capsys.readouterr().err.splitlines()
        assert error.startswith("exitserve: ")
        assert all("examples/s" in line for line in bars if line), bars
        assert not out.exists()
        return error

    return fails


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--thresholds", "high"), "--thresholds 'high' must be numbers"),
        (("--thresholds", "0"), "--thresholds must be a finite number above 0"),
        (("--thresholds", "nan"), "--thresholds must be a finite number above 0"),
        (("--thresholds", "0.5,1"), "threshold 1.0 never exits"),
        (("--thresholds", "0.5,0.5"), "given twice"),
        (("--thresholds", ","), "names none"),
        (("--modes", "fixed"), "--modes 'fixed' is unknown"),
        (("--data", "none.txt"), "cannot read the text file 'none.txt'"),
        (("--prompt-tokens", "0"), "--prompt-tokens must be at least 1"),
        (("--window", "33"), "--window must be at least 34"),
        (("--window", "513"), "longer than the model's context of 512"),
        (("--window", "512", "--data", str(TASKS / "complete_python.yaml")), "needs 512 tokens"),
        (("--endpoint", "http://127.0.0.1:1"), "--endpoint goes with --tasks"),
    ],
)
def test_options(fails, options: tuple[str, ...], message: str) -> None:
    assert message in fails(*options)


def test_without_exits_there_is_a_plan(fails, bundled: Path, tmp_path: Path) -> None:
    model = tmp_path / "plain"
    shutil.copytree(bundled, model)
    config = json.loads((model / "config.json").read_text())
    del config["multi_exit"]
    (model / "config.json").write_text(json.dumps(config))
    assert "exitserve plan" in fails(model=model)
    assert "no config.json" in fails(model=tmp_path)


def test_a_folder_with_something_in_it(bundled: Path, tmp_path: Path, capsys) -> None:
    data = TASKS / "complete_python.jsonl"
    (tmp_path / "report.md").write_text("precious")
    held_out = tmp_path / "held-out.txt"
    held_out.write_text("word " * 400)
    arguments = ["eval", str(bundled), "--data", str(held_out), "--window", "40"]
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert main([*arguments[:3], str(data), "--out", str(tmp_path / "new")]) == 2
    assert "has no text" in capsys.readouterr().err


def test_tasks_need_lm_eval(fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exitserve.evaluation.command.find_spec", lambda name: None)
    assert "pip install 'exitserve[eval]'" in fails("--tasks", "complete_python")


def test_unknown_tasks_and_tasks_that_generate_nothing(fails) -> None:
    pytest.importorskip("lm_eval", reason="tasks are lm-eval's (requirements/cpu.txt)")
    error = fails("--tasks", "complete_pyton", *OWN)
    assert "'complete_pyton' is unknown" in error and "Did you mean 'complete_python'?" in error
    assert "multiple_choice" in fails("--tasks", "choose_python", *OWN)
    assert "is not a folder" in fails("--tasks", "complete_python", "--task-path", "none")


class Strange(BaseHTTPRequestHandler):
    """Answers as its server was told to: `answers` maps paths to JSON, others are not found."""

    def do_GET(self) -> None:
        answer = self.server.answers.get(self.path)  # type: ignore[attr-defined]
        self.send_response(200 if answer is not None else 404)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def strange() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Strange)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_endpoints_that_are_not_ours(fails, bundled: Path, strange: ThreadingHTTPServer) -> None:
    pytest.importorskip("lm_eval", reason="tasks are lm-eval's (requirements/cpu.txt)")

    def tried(url: str) -> str:
        return fails("--tasks", "complete_python", *OWN, "--endpoint", url)

    assert "is not a URL" in tried("localhost:8000")
    assert "does not answer" in tried(f"http://127.0.0.1:{free_port()}")
    url = f"http://127.0.0.1:{strange.server_port}"
    strange.answers = {}
    assert "does not answer (Not Found)" in tried(url)
    strange.answers = {"/v1/models": ["nothing"]}
    assert "does not list its models" in tried(url)
    card = {"id": "other", "root": "/models/other", "max_model_len": 512}
    strange.answers = {"/v1/models": {"data": [card]}}
    assert "is not an exitserve server" in tried(url)
    strange.answers["/exitserve/stats"] = {"num_layers": 12, "exit_layers": [3, 6]}
    assert "serves '/models/other', not" in tried(url)
    card["root"] = f"/elsewhere/{bundled.name}"
    assert "that is another checkpoint" in tried(f"{url}/v1/")
