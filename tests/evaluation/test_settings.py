"""Which settings an evaluation has: numbers in every mode, calibrated thresholds in their own."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from exitserve.arguments import any_mode, thresholds_of
from exitserve.checkpoint.block import read_multi_exit, write_multi_exit
from exitserve.checkpoint.calibration import OperatingPoint
from exitserve.engine.launch import check_rules
from exitserve.errors import ExitServeError
from exitserve.policy import NEVER
from exitserve.settings import make_settings

from ..shapes import calibration_of

POINT = OperatingPoint(
    agreement=0.98, thresholds={6: 0.8, 18: 0.6}, eos_thresholds={6: 0.9, 18: 0.9}
)


@pytest.fixture
def calibrated(bundled: Path, tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, tmp_path)
    block = read_multi_exit(bundled)
    assert block is not None
    found = calibration_of(
        POINT, replace(POINT, agreement=0.9, thresholds={18: 0.2}), num_layers=24
    )
    write_multi_exit(tmp_path, replace(block, calibration=found))
    return tmp_path


def test_numbers_in_every_mode_and_auto_in_its_own(calibrated: Path) -> None:
    rules = any_mode(check_rules(calibrated, {"mode": "off"}))
    settings = make_settings(rules, thresholds_of("0.5, auto,0.7"), ("confidence", "verify"))
    assert [setting.label for setting in settings] == [
        "exits off",
        "threshold 0.5",
        "threshold 0.7",
        "verify 0.5",
        "verify 0.7",
        "defer auto",
    ]
    full, *_, auto = settings
    assert full.fields == {"exit_threshold": 1.0} and full.policy(rules).mode == "off"
    assert auto.fields == {"exit_threshold": "auto", "exit_mode": "defer"}
    policy = auto.policy(rules).drafting(rules.exit_layers)
    thresholds = [policy.thresholds_at(layer)[0] for layer in (6, 18)]
    assert thresholds == [0.8, NEVER], "a server drafts at its first exit"


def test_auto_needs_a_calibration(bundled: Path) -> None:
    with pytest.raises(ExitServeError, match="run exitserve calibrate"):
        make_settings(check_rules(bundled, {}), ["auto"], ("confidence",))


def test_other_promises_are_asked_for_by_their_agreement(calibrated: Path) -> None:
    rules = check_rules(calibrated, {})
    settings = make_settings(rules, thresholds_of("auto:0.9,auto"), ("confidence",))
    assert [setting.label for setting in settings] == ["exits off", "defer auto:0.9", "defer auto"]
    assert settings[1].fields == {"exit_target": 0.9, "exit_mode": "defer"}
    assert settings[1].policy(rules).thresholds_at(18)[0] == 0.2


@pytest.mark.parametrize(
    ("thresholds", "message"),
    [
        ("auto:0.999", "'?auto:0.999'? .*full depth"),
        ("auto:2", "exit_target must be"),
        ("auto:", "exit_target must be"),
        ("auto:high", "must be numbers"),
        ("automatic", "must be numbers"),
    ],
)
def test_promises_that_cannot_be_are_refused(
    calibrated: Path, thresholds: str, message: str
) -> None:
    with pytest.raises(ExitServeError, match=message):
        make_settings(check_rules(calibrated, {}), thresholds_of(thresholds), ("confidence",))
