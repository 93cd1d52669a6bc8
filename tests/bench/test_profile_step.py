"""The profiling script's stopwatch and its table of names; no engine is started."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "profile_step.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("profile_step", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "profile_step", module)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_own_times_add_up_to_the_whole(script: ModuleType, clock: list[float]) -> None:
    watch = script.Stopwatch()

    def takes(seconds: float) -> None:
        clock[0] += seconds

    inner = watch.timed("inner", takes)

    def outer_work() -> None:
        takes(1.0)
        inner(2.0)
        inner(4.0)

    watch.timed("outer", outer_work)()
    assert dict(watch.seconds) == {"inner": 6.0, "outer": 1.0}
    assert dict(watch.calls) == {"inner": 2, "outer": 1}
    rounds = watch.taken(tokens=2)
    watch.clear()
    inner(3.0)
    full = watch.taken(tokens=2)
    inner(9.0)
    lines = script.table(rounds, full, ["outer", "inner", "outer", "never called"], steps=2)
    assert lines[1].split() == ["outer", "500.000", "14.3%", "0.5", "0.000"]
    assert lines[2].split() == ["inner", "3000.000", "85.7%", "1.0", "1500.000"]
    assert lines[3].split() == ["total", "3500.000", "100.0%", "1500.000"]


def test_a_drafted_token_costs_what_is_beside_the_layers(script: ModuleType) -> None:
    drafts, full = script.Stopwatch(), script.Stopwatch()
    drafts.tokens, full.tokens = 30, 10
    drafts.seconds.update({script.LAYERS: 0.05, script.CHECK: 0.01, script.TURN: 0.02})
    drafts.calls[script.TURN] = 25
    full.seconds.update({script.PLAIN: 0.04, "rest": 0.01})
    _, tokens, turns = script.comparison([drafts], [full], steps=10)
    assert tokens == "beside layers 1.000 (1.000 to 1.000) ms for each of 2.00 drafted tokens"
    assert turns.startswith("of that, checks included, 1.200 ms in each of 2.50 turns")


def test_a_check_costs_what_its_steps_take_more(script: ModuleType) -> None:
    """Of each pair of rounds, since both drift with the machine."""

    def taken(seconds: float, checks: int) -> object:
        watch = script.Stopwatch()
        watch.seconds["layers"], watch.calls[script.CHECK] = seconds, checks
        return watch

    rounds = [taken(0.05, 30), taken(0.09, 30), taken(0.06, 30)]
    full = [taken(0.02, 0), taken(0.07, 0), taken(0.02, 0)]
    first, second = script.comparison(rounds, full, steps=10)
    assert first.endswith("3.000 (2.000 to 4.000) ms more")
    assert second == "1.000 (0.667 to 1.333) ms for each of 3.0 checks"


def test_an_error_in_a_part_leaves_the_stopwatch_whole(
    script: ModuleType, clock: list[float]
) -> None:
    watch = script.Stopwatch()

    def fails() -> None:
        clock[0] += 1.0
        raise RuntimeError

    failing = watch.timed("inner", fails)

    def survives() -> None:
        with pytest.raises(RuntimeError):
            failing()
        clock[0] += 2.0

    watch.timed("outer", survives)()
    assert dict(watch.seconds) == {"inner": 1.0, "outer": 2.0}


def test_names_that_are_gone_are_left_out_with_a_note(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Segment:
        def __call__(self) -> str:
            return "ran"

    class Other(Segment):
        def __call__(self) -> str:
            return "ran too"

    engine = ModuleType("some_engine")
    engine.Rows = type("Rows", (), {"plan": lambda self: "planned"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_engine", engine)
    watch = script.Stopwatch()
    probes = (
        script.Probe("run", "model._segments", "__call__"),
        script.Probe("plan", "some_engine:Rows", "plan"),
        script.Probe("gone", "some_engine:Rows", "renamed"),
        script.Probe("gone", "some_engine:Columns", "plan"),
        script.Probe("gone", "no_such_engine:Rows", "plan"),
        script.Probe("gone", "model.head", "forward"),
    )
    model = SimpleNamespace(_segments=(Segment(), Other(), Segment()))
    missing = script.install(watch, probes, model)
    assert len(missing) == 4
    assert "some_engine:Rows.renamed" in missing[0]
    assert [segment() for segment in model._segments] == ["ran", "ran too", "ran"]
    assert engine.Rows().plan() == "planned"
    assert dict(watch.calls) == {"run": 3, "plan": 1}


def test_every_name_of_the_table_is_there_today(script: ModuleType) -> None:
    """A rename in the engine should show here, not as a line missing from a profile."""
    pytest.importorskip("vllm")
    gone = [
        f"{probe.owner}.{probe.method}"
        for probe in script.PROBES
        if not probe.owner.startswith("model.")
        and not any(hasattr(owner, probe.method) for owner in script._classes(probe.owner, None))
    ]
    assert gone == []


def test_steps_that_do_not_fit_the_context_are_refused(
    script: ModuleType,
    bundled: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["profile_step.py", f"--model={bundled}", "--steps=600"])
    with pytest.raises(SystemExit):
        script.main()
    assert "--steps 600" in capsys.readouterr().err
