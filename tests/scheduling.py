"""Which tests run at night, which share a worker, and in what order workers take them.

Hooks of pytest; `conftest.py` takes them from here.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
DURATIONS = TESTS / "durations.json"
"""Seconds by file, which `make durations` writes."""
UNKNOWN = 5.0
"""Seconds of a file that is not in it."""
EACH_RUN = {"llama", "gpt2", "gemma2", "mixtral"} | {
    f"{name}ForCausalLM" for name in ("Llama", "Gemma2", "Mixtral")
}
"""Families that are tried on each run: one of each kind. Others are tried at night."""
AT_NIGHT_ON_V2 = (
    "test_a_context_that_is_full",
    "test_fewer_rows_draft_less_and_lose_nothing",
    "test_every_architecture[LlamaForCausalLM]",
    "test_every_architecture[MixtralForCausalLM]",
    "test_quantised_weights_draft_for_themselves",
    "test_samples_have_full_depths_distribution",
)
"""Tests of drafts that each run has on runner V1 only: V2's kernels are interpreted, slowly."""
OWN_SERVERS = (
    "test_data_parallel.py",
    "test_demo.py",
    "test_kv_transfer.py",
    "test_server_ends.py",
    "test_tutorial.py",
    "test_walk.py",
)
"""Files of `tests/e2e` that use none of the servers which the others share."""
SHARED = {
    "test_crowded.py": "drafting",
    "test_verify.py": "drafting",
    "test_shadow.py": "judging",
    "test_structured.py": "judging",
}
"""By file, what its tests need more than the server that all share: a worker for each."""


def scope_of(nodeid: str) -> str:
    """Tests of a scope stay on one worker: those of a file, which share engines, or of a server."""
    file = Path(nodeid.partition("::")[0])
    if file.parent.name != "e2e" or file.name in OWN_SERVERS:
        return str(file)
    return f"e2e/{SHARED.get(file.name, 'server')}"


def is_nightly(item: pytest.Item) -> bool:
    """Whether others stand for it on each run: another family, or another runner."""
    if "runner_v2" in item.path.parts and item.name in AT_NIGHT_ON_V2:
        return True
    params = getattr(item, "callspec", None)
    names = params.params if params else {}
    family = names.get("family", names.get("architecture", "llama"))
    return family not in EACH_RUN


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest scopes first: a long one at the end would run alone."""
    known = json.loads(DURATIONS.read_text()) if DURATIONS.is_file() else {}
    seconds = Counter[str]()
    for file in {item.nodeid.partition("::")[0] for item in items}:
        seconds[scope_of(file)] += known.get(file, UNKNOWN)
    for item in items:
        if is_nightly(item):
            item.add_marker("nightly")
    items.sort(key=lambda item: (-seconds[scope_of(item.nodeid)], scope_of(item.nodeid)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives workers one scope after another."""
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False
    return ByScope(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--write-durations`: how long each file took goes to `durations.json`."""
    parser.addoption("--write-durations", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    """Only the process that has all reports writes them."""
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())


class Durations:
    """Adds up how long the tests of each file took."""

    def __init__(self) -> None:
        self.seconds = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = json.loads(DURATIONS.read_text()) if DURATIONS.is_file() else {}
        known |= {file: round(seconds, 1) for file, seconds in self.seconds.items()}
        kept = {file: known[file] for file in sorted(known) if (TESTS.parent / file).is_file()}
        DURATIONS.write_text(json.dumps(kept, indent=0) + "\n")
