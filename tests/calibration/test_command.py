"""`exitserve calibrate` as a user runs it, on the bundled model and installed Python files."""

from __future__ import annotations

import json
import re
import shutil
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from exitserve.agreement import FullDepthPass
from exitserve.calibration import page, proposals
from exitserve.calibration import run as calibration_run
from exitserve.calibration.outcomes import Piece, measure_outcome, run_at_full_depth
from exitserve.checkpoint.block import read_config, read_multi_exit
from exitserve.checkpoint.calibration import Calibration
from exitserve.cli import main
from exitserve.engine.launch import check_rules
from exitserve.policy import ExitPolicy
from exitserve.reference import Reference, load_reference
from exitserve.windows import load_tokenizer, read_documents, windows_of

WINDOW, PROMPT = 64, 16


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> tuple[Path, Path]:
    """Two files of Python source: one to calibrate on, one for afterwards."""
    folder = tmp_path_factory.mktemp("corpora")
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    texts = [path.read_text(encoding="utf-8", errors="ignore")[2000:4500] for path in sources]
    texts = [text for text in texts if len(text) > 1500][::2]
    files = folder / "calibrate.jsonl", folder / "afterwards.jsonl"
    for file, part in zip(files, (texts[::2], texts[1::2]), strict=True):
        file.write_text("\n".join(json.dumps({"text": text}) for text in part), encoding="utf-8")
    return files


@pytest.fixture
def quick(monkeypatch) -> None:
    """Fewer choices on less text: every one is a pass of the oracle over many windows."""
    monkeypatch.setattr(calibration_run, "COMPARED", 10)
    monkeypatch.setattr(calibration_run, "PRICES", (60.0, 12.0, 4.0, 1.5))
    monkeypatch.setattr(proposals, "BETWEEN", 2)
    monkeypatch.setattr("exitserve.calibration.calibrate.AGREEMENTS", (0.6,))


@pytest.fixture
def passes(monkeypatch) -> Counter[Any]:
    """How often the oracle ran each piece with the same exits."""
    counted: Counter[Any] = Counter()

    def measure(reference: Reference, piece: Piece, full: FullDepthPass, policy: ExitPolicy):
        counted[reference.criterion, policy, piece] += 1
        return measure_outcome(reference, piece, full, policy)

    monkeypatch.setattr(calibration_run, "measure_outcome", measure)
    return counted


@pytest.fixture
def interrupted(monkeypatch) -> list[str]:
    """Somebody presses Ctrl-C, once in the midst of the reading and once of the measuring."""
    pressed: list[str] = []
    for name, after in (("read_exits", 15), ("measure_outcome", 40)):
        real, calls = getattr(calibration_run, name), Counter[str]()

        def stop(*args: Any, name=name, after=after, real=real, calls=calls) -> Any:
            calls[name] += 1
            if calls[name] == after:
                pressed.append(name)
                raise KeyboardInterrupt
            return real(*args)

        monkeypatch.setattr(calibration_run, name, stop)
    return pressed


@pytest.fixture
def model(bundled, tmp_path, hub) -> Path:
    """A snapshot in the cache of a hub, with an earlier report: what its links point to stays."""
    copy = Path(shutil.copytree(bundled, tmp_path / "copy"))
    (copy / "calibration").mkdir()
    for name in ("report.json", "report.md", "pareto.png", "reliability.png"):
        (copy / "calibration" / name).write_text(f"an earlier {name}")
    snapshot: Path = hub.publish(copy)
    return snapshot


def calibrate(model: Path, data: Path, *more: str, **research: Any) -> int:
    sizes = ["--window", str(WINDOW), "--windows", "120"]
    sizes += [] if "--dtype" in more else ["--dtype", "float32"]  # faster on many a CPU
    arguments = ["calibrate", str(model), "--data", str(data), *sizes, *more]
    return main(arguments, prompt_tokens=PROMPT, **research)


def agreement_afterwards(model: Path, data: Path, fields: dict[str, object]) -> float:
    """What text that the calibration never saw says of a policy."""
    reference = load_reference(str(model))
    options = {"mode": fields["exit_mode"]} if "exit_mode" in fields else {}
    policy = check_rules(model, options).policy_for(fields)
    windows = windows_of(read_documents(data), load_tokenizer(model), WINDOW, limit=80, seed=1)
    found = []
    for window in windows:
        piece = Piece(window.token_ids, PROMPT, "text")
        found.append(
            measure_outcome(reference, piece, run_at_full_depth(reference, piece), policy).agreement
        )
    return sum(found) / len(found)


@pytest.mark.parametrize("mode", ["confidence", pytest.param("defer", marks=pytest.mark.nightly)])
def test_a_calibrated_model_keeps_its_promise(
    quick, capsys, passes, interrupted, model: Path, corpora, mode: str
) -> None:
    asked = ["--target-agreement", "0.8", "--mode", mode]
    asked += ["--dtype", "auto"] if mode == "defer" else []
    while (result := calibrate(model, corpora[0], *asked, confidence_level=0.8)) == 130:
        assert "the same command goes on there" in capsys.readouterr().err
    assert result == 0
    assert interrupted == ["read_exits", "measure_outcome"][: 2 if mode == "confidence" else 1]
    assert not (model / "calibration" / "unfinished.sqlite").exists()
    said = capsys.readouterr().out
    assert "Going on with what an interrupted run left" in said
    assert "agreement>=0.8" in said
    assert "Written into" in said
    block = read_multi_exit(model)
    assert block is not None
    found = block.calibration
    assert found is not None
    assert (found.mode, found.num_layers, found.criterion) == (mode, 24, block.criterion)
    assert found.chosen.agreement == 0.8
    assert found.chosen.thresholds, "exits that pay nothing are no result"
    assert found.chosen.found["mean_depth"] < 23
    if mode == "defer":
        assert_drafts_at_one_layer(model, found)
    assert found.provenance["data"]["name"] == "calibrate.jsonl"
    assert agreement_afterwards(model, corpora[1], {"exit_threshold": "auto"}) >= 0.8
    once = {1} if mode == "confidence" else set()  # else one full-depth pass tells all
    assert set(passes.values()) == once, "nothing is measured twice, not after Ctrl-C either"
    report = json.loads((model / "calibration" / "report.json").read_text())
    assert set(report["curves"]) == {"max_prob", "margin", "entropy"}
    for name in ("report.md", "pareto.png", "reliability.png"):
        assert (model / "calibration" / name).stat().st_size > 0
    rules = check_rules(model, {})
    assert rules.default == rules.policy_for({"exit_threshold": "auto"}), "the server's default"
    assert check_rules(model, {"mode": "off"}).default.mode == "off"
    assert rules.policy_for({"exit_target": 0.55}).mode == mode


def assert_drafts_at_one_layer(model: Path, found: Calibration) -> None:
    """All targets at one, so that a server that drafts there keeps them all."""
    (layer,) = {one for point in (found.chosen, *found.points) for one in point.thresholds}
    own = found.chosen.found
    assert 1 <= own["drafts"] <= 4 and found.agreement_at[layer] < own["accepted"] <= 1
    assert own["cost"] < 1
    assert check_rules(model, {}).exit_layers == (layer,)


def test_two_modes_share_the_criterion(quick, capsys, model: Path, corpora) -> None:
    asked = ["--target-agreement", "0.8", "--windows", "100", "--mode", "defer,confidence"]
    research = {"confidence_level": 0.8, "generated_share": 0.0}
    assert calibrate(model, corpora[0], *asked, **research) == 0
    block = read_multi_exit(model)
    assert block is not None and block.calibration is not None
    found = block.calibration.by_mode()
    assert list(found) == ["defer", "confidence"]
    assert_drafts_at_one_layer(model, block.calibration)
    assert all(one.chosen.agreement == 0.8 for one in found.values())
    assert found["defer"].chosen.thresholds != found["confidence"].chosen.thresholds
    for folder, mode in (("", "defer"), ("confidence", "confidence")):
        report = json.loads((model / "calibration" / folder / "report.json").read_text())
        assert report["calibration"]["mode"] == mode
        assert report["calibration"]["criterion"] == block.criterion
    for mode in found:
        fields = {"exit_threshold": "auto", "exit_mode": mode}
        assert agreement_afterwards(model, corpora[1], fields) >= 0.8
    assert check_rules(model, {}).default.mode == "defer"
    assert check_rules(model, {"mode": "confidence"}).default.by_layer


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--target-agreement", "1"], "above 0 and below 1, such as 0.99, not 1"),
        (["--target-agreement", "0"], "above 0 and below 1"),
        ({"confidence_level": 1.0}, "from 0.5 to below 1"),
        ({"generated_share": 1.5}, "from 0 to 1"),
        (["--temperature", "3"], "--temperature must be from 0 to 2"),
        (["--windows", "3"], "--windows must be at least 10"),
        (["--window", "10"], "--window must be at least 24"),
        (["--exit-layers", "6,24"], r"1\.\.23"),
        (["--mode", "verify"], "confidence or defer, or both with a comma"),
        (["--mode", "defer,defer"], "not 'defer,defer'"),
        (["--window", "513"], "longer than the model's context of 512"),
    ],
)
def test_bad_arguments_are_named(
    capsys, bundled, corpora, tmp_path, more: list[str] | dict[str, Any], message: str
) -> None:
    given, research = ([], more) if isinstance(more, dict) else (more, {})
    arguments = ["--dry-run", "--out", str(tmp_path), *given]
    assert calibrate(Path(bundled), corpora[0], *arguments, **research) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert re.search(message, error)


def test_too_little_text_says_how_much_is_needed(capsys, bundled, corpora, tmp_path) -> None:
    """Too little for the easiest target."""
    more = ["--dry-run", "--out", str(tmp_path / "out"), "--windows", "30"]
    assert calibrate(Path(bundled), corpora[0], *more, generated_share=0.0) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    assert "held-out text: 21)" in said and "agreement>=0.9, which needs at least 3" in said


def test_a_model_without_exits_is_offered_a_plan(capsys, model: Path, corpora) -> None:
    config = read_config(model)
    del config["multi_exit"]
    (model / "config.json").unlink()  # a link
    (model / "config.json").write_text(json.dumps(config))
    assert calibrate(model, corpora[0]) == 2
    assert "exitserve plan" in capsys.readouterr().err


@pytest.mark.parametrize(("mode", "advised"), [("confidence", True), ("defer", False)])
def test_no_mode_is_advised_that_is_calibrated(mode: str, advised: bool) -> None:
    first = {"target": "agreement>=0.99", "kept": False, "pieces_needed": 1}
    windows = {"windows": {"test": {"text": 5}}}
    calibration = {"target": "full depth", "mode": mode, "provenance": windows}
    (line,) = page.warnings({"promised": [first], "calibration": calibration})
    assert "easier target allows more" in line
    assert ("--mode defer" in line) == advised
