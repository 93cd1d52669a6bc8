"""One server of two engines and two API processes: `exitserve serve --data-parallel-size 2`."""

import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from exitserve.policy import ExitPolicy
from exitserve.reference import load_reference

from ..forks import LocalServer
from .engines import held_still, probe, started_by

pytestmark = pytest.mark.nightly

OPTIONS = ("--dtype", "float32", "--enforce-eager", "--served-model-name", "m")
PROMPTS = [f"def f{number}(x):" for number in range(8)]
TOKENS = 24
ENDLESS = 20_000
"""Tokens of a request that something comes in between of."""
SOON = 30.0
"""Seconds; two or three, on machines that do nothing else."""


@pytest.fixture(scope="module")
def model(make_checkpoint: Any) -> Path:
    path: Path = make_checkpoint("llama", max_position_embeddings=2 * ENDLESS)
    return path


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    log = tmp_path_factory.mktemp("parallel") / "server.log"
    # No fork: prometheus-client finds out that there are several processes as it is imported.
    one = LocalServer(model, *OPTIONS, "--data-parallel-size", "2", log=log)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        environment.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        one.start()
    yield one
    one.stop()


def _complete(server: LocalServer, prompt: str, samples: int = 1) -> list[dict[str, Any]]:
    """The choices; each client connects anew, so that either API process answers."""
    body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "n": samples}
    body |= {"temperature": float(samples > 1), "return_token_ids": True}
    body |= {"vllm_xargs": {"exit_threshold": 0.1, "exit_trace": True}}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    choices: list[dict[str, Any]] = answer["choices"]
    return choices


def _exported(server: LocalServer) -> dict[str, Counter[int]]:
    """By engine, tokens by depth."""
    page = httpx.get(f"{server.url}/metrics", timeout=10).text
    found: dict[str, Counter[int]] = {"0": Counter(), "1": Counter()}
    for family in text_string_to_metric_families(page):
        for one in family.samples:
            if one.name == "exitserve_tokens_total":
                found[one.labels["engine"]][int(one.labels["exit_layer"])] += int(one.value)
    return found


def _until(true: Any) -> None:
    end = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_both_engines_answer_and_all_is_counted_once(server: LocalServer, model: Path) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: _complete(server, prompt)[0], PROMPTS))
    samples = _complete(server, PROMPTS[0], samples=4)
    seen = Counter(depth for one in (*answers, *samples) for depth in one["exit_layers"])
    assert len(seen) > 1, "no token exits"
    _until(lambda: sum(_exported(server).values(), Counter()) == seen)
    assert all(sum(own.values()) > TOKENS for own in _exported(server).values())
    for _ in range(6):  # of either process
        page = httpx.get(f"{server.url}/exitserve/stats", timeout=10).json()["since_start"]
        assert Counter({int(k): n for k, n in page["tokens_by_exit_layer"].items() if n}) == seen
    reference, policy = load_reference(str(model)), ExitPolicy.confidence(0.1)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        found = reference.decode(list(prompt.encode()), TOKENS, policy, ignore_eos=True)
        assert answer["token_ids"] == found.token_ids
        assert answer["exit_layers"] == found.exit_layers


def _second_engine(server: LocalServer) -> list[psutil.Process]:
    """Its core, and what that started."""
    (core,) = (one for one in started_by(server) if "EngineCore_DP1" in " ".join(one.cmdline()))
    return [core, *core.children(recursive=True)]


def test_the_liveness_probe_names_the_engine_that_hangs(server: LocalServer) -> None:
    assert probe(server, 60).returncode == 0
    with held_still(_second_engine(server)):
        hung = probe(server, 2)
    assert hung.returncode == 1
    assert "engine 1 hangs" in hung.stderr
    assert probe(server, 60).returncode == 0


def _failure(server: LocalServer, engine: int) -> str:
    """How a stream of an engine that is longer than the server lives ends."""
    body = {"model": "m", "prompt": "def", "max_tokens": ENDLESS, "ignore_eos": True}
    rank = {"X-data-parallel-rank": str(engine)}
    request = {"json": body | {"stream": True}, "headers": rank, "timeout": 300}
    try:
        with httpx.stream("POST", f"{server.url}/v1/completions", **request) as answer:
            return [line for line in answer.iter_lines() if line][-2]
    except httpx.HTTPError as error:
        return repr(error)


def test_the_server_ends_with_either_engine(server: LocalServer) -> None:
    """Under load: clients of both engines are told, by an error or that their answer was aborted.
    Its exit code says so, in one line; whoever supervises it starts all of it anew."""
    before = {engine: sum(own.values()) for engine, own in _exported(server).items()}
    group = started_by(server)
    with ThreadPoolExecutor(4) as pool:
        ends = [pool.submit(_failure, server, number % 2) for number in range(4)]
        _until(lambda: all(sum(own.values()) > before[e] for e, own in _exported(server).items()))
        _second_engine(server)[0].send_signal(signal.SIGKILL)
        assert server.wait(SOON) == 1
        said = [end.result(SOON) for end in ends]
    assert all("rror" in one or '"finish_reason":"abort"' in one for one in said), said
    last = server.log.read_text()
    assert "exitserve: Engine core process EngineCore_DP1 died unexpectedly." in last
    assert "Traceback" not in last[last.rindex("exitserve: Engine core") :]
    _until(lambda: not any(one.is_running() for one in group))
