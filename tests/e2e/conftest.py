"""Real servers over HTTP, one a session: ours and plain vLLM, on the bundled model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from exitserve.checkpoint.block import MultiExit, write_multi_exit
from exitserve.checkpoint.calibration import OperatingPoint
from exitserve.engine.launch import IN_ENGINE

from ..forks import ForkedServer, LocalServer, PythonProcess, free_port, is_healthy, stop
from ..scripts import ROOT, script
from ..shapes import calibration_of

NAME = "exit-py"
KEY = "none"
"""The API key that our clients send; one server asks for it."""
OPTIONS = ("--dtype", "float32", "--enforce-eager", "--served-model-name", NAME)

Serve = Callable[..., AbstractContextManager[LocalServer]]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """`with serve(model, ...)`: our server on one rank, or on two, of one core each.

    A fork (`tests/forks.py`); the installed command is started in `test_server_ends.py`.
    """

    @contextmanager
    def serve(model: Path, *options: object, ranks: int = 1) -> Iterator[LocalServer]:
        log = tmp_path_factory.mktemp("server") / "server.log"
        own = () if ranks == 1 else ("--tensor-parallel-size", str(ranks))
        server = ForkedServer(model, *OPTIONS, *own, *map(str, options), log=log)
        with pytest.MonkeyPatch.context() as environment:
            if ranks > 1:
                environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(ranks))))
            server.start()
        try:
            yield server
        finally:
            server.stop()

    return serve


@pytest.fixture(scope="session")
def server(bundled: Path, serve: Serve) -> Iterator[LocalServer]:
    """Our server, full depth by default."""
    with serve(bundled, "--playground") as running:
        yield running


@pytest.fixture(scope="session")
def client(server: LocalServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="session")
def plain_client(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """Plain vLLM on the same checkpoint."""
    port = free_port()
    log = tmp_path_factory.mktemp("plain") / "server.log"
    arguments = ["--model", str(bundled), "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--distributed-executor-backend", IN_ENGINE]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
    process = PythonProcess(
        "vllm.entrypoints.openai.api_server", [*arguments, *OPTIONS], log, environment
    )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 300
    while not is_healthy(url):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.5)
    yield OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    stop(process)


@pytest.fixture(scope="session")
def complete(client: OpenAI) -> Any:
    """`complete(prompt, exit_threshold=0.5, ...)`: a greedy completion with a trace, as a dict.

    `options` are any other fields of the request, OpenAI's or vLLM's.
    """

    def complete(prompt: Any, max_tokens: int = 24, *, options: Any = None, **fields: Any) -> Any:
        xargs = {"exit_trace": True, **fields}
        return _complete(client, prompt, max_tokens, (options or {}) | {"vllm_xargs": xargs})

    return complete


@pytest.fixture(scope="session")
def plain_complete(plain_client: OpenAI) -> Any:
    """`complete` of plain vLLM."""

    def complete(prompt: Any, max_tokens: int = 24, *, options: Any = None) -> Any:
        return _complete(plain_client, prompt, max_tokens, options or {})

    return complete


def _complete(client: OpenAI, prompt: Any, max_tokens: int, options: dict[str, Any]) -> Any:
    # Fields of vLLM's own are unknown to the official client, but may all stand in extra_body.
    answer = client.completions.create(
        model=NAME,
        prompt=prompt,
        max_tokens=max_tokens,
        extra_body={"temperature": 0, "return_token_ids": True, **options},
    )
    return answer.model_dump()


@pytest.fixture(scope="session")
def calibrated(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, with a calibration that promises something."""
    directory = tmp_path_factory.mktemp("calibrated")
    for path in bundled.iterdir():
        (directory / path.name).symlink_to(path)
    config = directory / "config.json"
    text = config.read_text()
    config.unlink()
    config.write_text(text)
    point = OperatingPoint(
        agreement=0.75,
        thresholds=dict.fromkeys((6, 12, 18), 0.4),
        eos_thresholds=dict.fromkeys((6, 12, 18), 0.7),
    )
    calibration = calibration_of(point, mode="confidence", num_layers=24)
    write_multi_exit(directory, MultiExit(exit_layers=(6, 12, 18), calibration=calibration))
    return directory


@pytest.fixture(scope="session")
def judging(calibrated: Path, serve: Serve) -> Iterator[LocalServer]:
    """A server that compares every answer with full depth, and whose requests may call tools.

    They exit unless they say otherwise: the checkpoint is calibrated. They need the API key.
    """
    options = ("--shadow-rate", 1, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    options += ("--playground", "--api-key", KEY)
    # A small model would go on with blanks for ever where the grammar lets it.
    grammar = (
        "--structured-outputs-config",
        '{"backend": "xgrammar", "disable_any_whitespace": true}',
    )
    with serve(calibrated, *options, *grammar) as running:
        yield running


@pytest.fixture(scope="session")
def early_client(judging: LocalServer) -> OpenAI:
    """Of the server whose requests exit unless they say otherwise."""
    return OpenAI(base_url=f"{judging.url}/v1", api_key=KEY, max_retries=0)


OpenPage = Callable[..., Any]


@pytest.fixture(scope="session")
def picture() -> Any:
    """The script that takes the playground's picture, as a module."""
    return script(ROOT / "docs" / "picture.py")


@pytest.fixture(scope="module")
def browser(picture: Any) -> Iterator[Any]:
    """A headless Chromium, where there is one.

    For a module: what drives it keeps an event loop running, and other tests start their own.
    """
    program = picture.find_browser()
    if program is None:
        pytest.skip(f"no browser: install one of {', '.join(picture.BROWSERS)}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Without its sandbox, which root may not use; it opens our own pages only.
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """`open_page(server, width=390, color_scheme="dark")`: its playground.

    At the end of the test, nothing may have failed in the page, and nothing may have been asked of
    anybody else.
    """
    contexts, faults = [], []

    def open_page(server: LocalServer, *, width: int = 1280, **options: Any) -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if is_fault(said) else None)
        page.on("request", lambda one: faults.append(one.url) if is_foreign(one, server) else None)
        page.goto(f"{server.url}/exitserve/playground")
        return page

    def is_fault(said: Any) -> bool:
        # The browser reports answers that are errors, which tests may want.
        return said.type == "error" and "Failed to load resource" not in said.text

    def is_foreign(request: Any, server: LocalServer) -> bool:
        return not request.url.startswith((f"{server.url}/", "blob:"))

    yield open_page
    for one in contexts:
        one.close()
    assert faults == []
