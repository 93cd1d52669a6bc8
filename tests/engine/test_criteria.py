"""Calibrated thresholds, and other criteria: the engine exits where the oracle does."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from exitserve.checkpoint.block import read_multi_exit, write_multi_exit
from exitserve.checkpoint.calibration import OperatingPoint
from exitserve.engine.launch import check_rules
from exitserve.errors import ExitServeError
from exitserve.policy import ExitPolicy
from exitserve.reference import load_reference

from ..shapes import calibration_of

THRESHOLDS = {
    # Of each criterion, such that a random model's tokens leave at every exit layer.
    "max_prob": ({2: 0.15, 4: 0.12}, {2: 0.1, 4: 0.09}),
    "margin": ({2: 0.05, 4: 0.04}, {2: 0.03, 4: 0.02}),
    "entropy": ({2: 0.2, 4: 0.18}, {2: 0.17, 4: 0.16}),
}


@dataclass(frozen=True)
class Asked:
    """A request for the harness, and the policy that it means."""

    prompt: list[int]
    fields: dict[str, Any]
    policy: ExitPolicy
    max_tokens: int = 40
    sampling: Mapping[str, Any] = field(default_factory=dict)


def calibrated(make_checkpoint, tmp_path, criterion: str, mode: str = "confidence"):
    """A checkpoint with a calibration made up: thresholds by layer, and one more point."""
    directory = tmp_path / criterion
    shutil.copytree(make_checkpoint("llama"), directory)
    strict, loose = THRESHOLDS[criterion]
    never = dict.fromkeys(strict, 1.0)
    calibration = calibration_of(
        OperatingPoint(agreement=0.99, thresholds=strict, eos_thresholds=never),
        OperatingPoint(agreement=0.9, thresholds=loose, eos_thresholds=loose),
        mode=mode,
        criterion=criterion,
        num_layers=6,
        exit_rows="frequent",
    )
    block = replace(read_multi_exit(directory), criterion=criterion, calibration=calibration)
    write_multi_exit(directory, block)
    return directory


def requests(directory) -> list[Asked]:
    rules = check_rules(directory, {})
    kinds = [{}, {"exit_threshold": "auto"}, {"exit_target": 0.9}, {"exit_target": 0.999}]
    drawn = torch.Generator().manual_seed(1)
    return [
        Asked(
            torch.randint(2, 128, (5 + 3 * index,), generator=drawn).tolist(),
            kinds[index % len(kinds)],
            rules.policy_for(kinds[index % len(kinds)]),
        )
        for index in range(8)
    ]


@pytest.mark.parametrize("criterion", ["max_prob", "margin", "entropy"])
def test_the_engine_is_the_oracle(
    request, start, expect, make_checkpoint, tmp_path, criterion: str
) -> None:
    if criterion == "entropy":
        request.getfixturevalue("masked")
    directory = calibrated(make_checkpoint, tmp_path, criterion)
    asked = requests(directory)
    reference = load_reference(str(directory))
    expected = [expect(reference, one) for one in asked]
    depths = [depth for _, found in expected for depth in found[1:]]
    assert set(depths) == {2, 4, 6}, "else nothing is compared"
    assert all(set(expected[index][1]) == {6} for index in (3, 7)), "none promises 0.999"
    harness = start(directory, enable_prefix_caching=False)
    assert harness.run(asked) == expected


def test_deferred_tokens_pass_by_the_same_rows(start, expect, make_checkpoint, tmp_path) -> None:
    directory = calibrated(make_checkpoint, tmp_path, "margin", mode="defer")
    asked = requests(directory)
    reference = load_reference(str(directory), [2])  # where the server drafts
    expected = [expect(reference, one) for one in asked]
    assert {depth for _, found in expected for depth in found} == {2, 6}
    harness = start(directory, enable_prefix_caching=False)
    assert harness.run(asked) == expected


def test_rows_that_were_left_behind_are_missed_before_anything_starts(
    make_checkpoint, tmp_path
) -> None:
    directory = calibrated(make_checkpoint, tmp_path, "margin")
    shutil.rmtree(directory / "exit_rows")
    with pytest.raises(ExitServeError, match="copy that folder along"):
        check_rules(directory, {})
    assert check_rules(directory, {"exit_rows": "all"}).rows_file is None
