"""The stages without engines: the kernels' tests, times and errors, each a command of its own."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

from stages import StageError, StageOutcome, StageRun, command, ended, last_lines

ENGINE_TEST = "test_in_the_engine"
"""Runs a whole engine: the kernels may be timed though it fails."""
WORKERS = 8
"""Most tests at a time: they wait for Triton's compiler, not for the GPU."""


def tests(run: StageRun) -> StageOutcome:
    """The tests marked gpu, as machine code; with --tiny a few, in Triton's interpreter."""
    report = run.folder / "tests.xml"
    where = "tests/ops/test_propagate_kv.py" if run.tiny else "tests/ops"
    arguments = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", where]
    # Our tests take warnings for errors; those of the libraries on this machine are no concern.
    arguments += ["-W", "default", "-p", "no:benchmark"]
    if find_spec("xdist"):
        arguments += ["-n", str(min(WORKERS, len(os.sched_getaffinity(0))))]
    variables = {"TRITON_INTERPRET": "1"} if run.tiny else None
    status, log = command(
        run, "tests", [*arguments, f"--junitxml={report}"], most=180, variables=variables
    )
    if not report.is_file():
        raise StageError(f"pytest {ended(status)}. {last_lines(log)}")
    outcome = _outcome_of_tests(run, report, log)
    if status is None:
        outcome.failures.append("not all tests had time to run.")
    return outcome


def _outcome_of_tests(run: StageRun, report: Path, log: Path) -> StageOutcome:
    failed, skipped, passed = list[str](), 0, 0
    suites = ElementTree.parse(report).getroot()
    for case in suites.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    seconds = sum(float(suite.get("time", 0)) for suite in suites.iter("testsuite"))
    run.kernels_tested = passed > 0 and all(ENGINE_TEST in name for name in failed)
    page = f"{passed} passed, {len(failed)} failed, {skipped} skipped in {seconds:.0f} s"
    if run.tiny:
        page += ", in Triton's interpreter"
    found = {"passed": passed, "failed": failed, "skipped": skipped}
    outcome = StageOutcome(found, page, verdict=[page])
    if failed:
        outcome.failures.append(f"{len(failed)} tests fail. {last_lines(log)}")
    elif not passed:
        outcome.failures.append(f"no test ran. {last_lines(log)}")
    return outcome


def kernels(run: StageRun) -> StageOutcome:
    """Times beside PyTorch, and Liger-Kernel where it is installed."""
    arguments = ["--small"] if run.tiny else []
    if run.tiny or run.kernels_tested:  # else that script tests first
        arguments.append("--skip-tests")
    return _table(run, "kernels", "benchmarks/ops/run.py", arguments)


def errors(run: StageRun) -> StageOutcome:
    """Distances from float64."""
    return _table(run, "errors", "benchmarks/ops/errors.py", [])


def _table(run: StageRun, name: str, script: str, arguments: list[str]) -> StageOutcome:
    """Runs a script that prints a table and writes it as JSON."""
    out = run.folder / f"{name}.json"
    status, log = command(run, name, [script, *arguments, "--out", str(out)], most=150)
    if status != 0:
        raise StageError(f"{script} {ended(status)}. {last_lines(log)}")
    printed = log.read_text(encoding="utf-8").splitlines()
    # Without what compilers say before: the first line of the table, and what explains it.
    start = next(index for index, line in enumerate(printed) if line.startswith("| "))
    told = [line for line in printed[:start] if line.startswith(("liger", "copy: "))]
    table = [line for line in printed[start:] if line.startswith("|")]
    return StageOutcome(json.loads(out.read_text(encoding="utf-8")), "\n".join([*told, "", *table]))
