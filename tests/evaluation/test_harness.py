"""What becomes of a task whose server fails, or whose answers do not fit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from exitserve.errors import ExitServeError
from exitserve.evaluation.endpoint import Endpoint
from exitserve.evaluation.settings import EvalSetting, TaskJob
from exitserve.policy import ExitPolicy

pytest.importorskip("lm_eval", reason="tasks are lm-eval's (requirements/cpu.txt)")

TASKS = Path(__file__).parent / "tasks"
FULL = EvalSetting(fields={"exit_threshold": 1.0}, policy=ExitPolicy.off())


def job(*, path: Path = TASKS, concurrency: int = 1) -> TaskJob:
    return TaskJob(
        names=("complete_python",),
        path=path,
        limit=2,
        concurrency=concurrency,
        chat=False,
        endpoint=None,
        server_options=(),
    )


class Failing(BaseHTTPRequestHandler):
    """Answers every request with 500."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(500)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def failing() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_failing_server_ends_the_task(failing: str, bundled: Path, concurrency: int) -> None:
    from exitserve.evaluation.harness import load_tasks, run_tasks

    asked = job(concurrency=concurrency)
    endpoint = Endpoint(url=failing, name="model", context=512)
    with pytest.raises(ExitServeError, match=r"failed during task 'complete_python'.*500"):
        list(run_tasks(load_tasks(asked), [FULL], asked, endpoint, str(bundled)))


def test_answers_must_fit_the_context(bundled: Path) -> None:
    from exitserve.evaluation.harness import load_tasks, run_tasks

    endpoint = Endpoint(url="http://127.0.0.1:1", name="model", context=12)
    with pytest.raises(ExitServeError, match="asks for 12 tokens, but the server's context is 12"):
        list(run_tasks(load_tasks(job()), [FULL], job(), endpoint, str(bundled)))


def test_a_task_without_its_data(tmp_path: Path) -> None:
    from exitserve.evaluation.harness import load_tasks

    shutil.copy(TASKS / "complete_python.yaml", tmp_path)
    with pytest.raises(ExitServeError, match=r"cannot be loaded .*data files must be local") as e:
        load_tasks(job(path=tmp_path))
    assert "\n" not in str(e.value)
