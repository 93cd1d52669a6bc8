"""What a server of a calibrated checkpoint does with requests that ask for nothing."""

from __future__ import annotations

from typing import Any

import pytest

from exitserve.checkpoint.calibration import OperatingPoint, json_of
from exitserve.engine.options import make_rules
from exitserve.errors import ExitServeError

from ..shapes import calibration_of


def config(mode: str = "confidence", layers: int = 12, criterion: str = "margin") -> dict[str, Any]:
    calibration = calibration_of(
        OperatingPoint(
            agreement=0.98, thresholds={6: 0.8, 9: 0.5}, eos_thresholds={6: 1.0, 9: 1.0}
        ),
        mode=mode,
        criterion=criterion,
        num_layers=12,
    )
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "multi_exit": {
            "version": 1,
            "exit_layers": [3, 6, 9],
            "criterion": criterion,
            "calibration": json_of(calibration),
        },
    }


@pytest.mark.parametrize(
    ("model", "options", "mode"),
    [
        (config(), {}, "confidence"),
        (config(), {"exit_threshold": "auto"}, "confidence"),
        (config(), {"mode": "confidence"}, "confidence"),
        (config("defer"), {}, "defer"),
        (config("defer"), {"mode": "defer"}, "defer"),
        (config(), {"mode": "verify"}, "verify"),
        (config(), {"exit_layers": [6, 9]}, "confidence"),
        (config(), {"mode": "off"}, "off"),
        (config(), {"exit_layer": 3}, "fixed"),
        # Not by itself where it would promise nothing, or cannot be served.
        (config(), {"exit_layers": [3, 6]}, "off"),
        (config(layers=10), {}, "off"),
    ],
)
def test_the_default(model: dict[str, Any], options: dict[str, Any], mode: str) -> None:
    default = make_rules(model, options).default
    assert default.mode == mode
    if mode in ("confidence", "defer", "verify"):
        assert [default.thresholds_at(layer)[0] for layer in (6, 9)] == [0.8, 0.5]


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"exit_layers": [3, 6]}, "defer"),
        ({"exit_layers": [6]}, "defer"),
        # Tokens that stopped at 6 would go on and stop at 9, which nobody measured.
        ({"exit_layers": [9]}, "off"),
        ({"exit_layers": [3]}, "off"),
    ],
)
def test_with_exact_keys_and_values_the_deepest_exits_may_be_left_out(
    options: dict[str, Any], mode: str
) -> None:
    rules = make_rules(config("defer"), options)
    assert rules.default.mode == mode
    if mode == "defer":
        assert rules.default.thresholds_at(6)[0] == 0.8
        assert rules.exit_layers == (6,), "the first that has a threshold drafts"


@pytest.mark.parametrize(
    ("options", "mode", "first"),
    [
        ({}, "defer", 0.8),
        ({"mode": "confidence"}, "confidence", 0.9),
        ({"mode": "verify"}, "verify", 0.8),
        ({"exit_threshold": "auto"}, "defer", 0.8),
        # Approximate keys and values of tokens that would have stopped at 9 are others.
        ({"exit_layers": [6]}, "defer", 0.8),
    ],
)
def test_a_server_serves_its_own_mode_of_those_calibrated(
    options: dict[str, Any], mode: str, first: float
) -> None:
    model, other = config("defer"), config("confidence")["multi_exit"]["calibration"]
    other["thresholds"]["6"] = 0.9
    model["multi_exit"]["calibration"]["other_modes"] = [other]
    rules = make_rules(model, options)
    assert (rules.default.mode, rules.default.thresholds_at(6)[0]) == (mode, first)
    if options.get("exit_layers") == [6]:
        with pytest.raises(ExitServeError, match="needs an exit threshold"):
            make_rules(model, {**options, "mode": "confidence"})


def test_a_promise_holds_for_the_rows_that_it_was_made_with() -> None:
    every, frequent = config("defer"), config("defer")
    frequent["multi_exit"]["calibration"]["exit_rows"] = "frequent"
    assert make_rules(frequent, {}).default.mode == "off", "its rows are gone"
    frequent["multi_exit"]["rows"] = "0" * 64
    assert make_rules(every, {}).default.mode == "defer"
    assert make_rules(frequent, {}).default.mode == "defer"
    assert make_rules(frequent, {"exit_rows": "all"}).default.mode == "off"


def test_a_threshold_of_ones_own_goes_before_it() -> None:
    assert make_rules(config(), {"exit_threshold": 0.7}).default.thresholds_at(3)[0] == 0.7


def test_another_mode_needs_a_threshold() -> None:
    with pytest.raises(ExitServeError, match="needs an exit threshold"):
        make_rules(config(), {"mode": "defer"})


@pytest.mark.parametrize(
    ("options", "modes"), [({"mode": "off"}, ("off",)), ({"mode": "verify"}, ("off", "verify"))]
)
def test_a_connector_carries_keys_and_values_of_full_depth_only(
    options: dict[str, Any], modes: tuple[str, ...]
) -> None:
    rules = make_rules(config(), options, transfers=True)
    assert rules.modes == modes
    for fields in ({"exit_threshold": 0.5, "exit_mode": "confidence"}, {"exit_layer": 3}):
        with pytest.raises(ExitServeError, match=f"KV transfer.*Modes here: {', '.join(modes)}"):
            rules.policy_for(fields)
    for mode in ("confidence", "defer"):
        with pytest.raises(ExitServeError, match=rf"tokens exit \(--mode {mode}\)"):
            make_rules(config(mode), {}, transfers=True)
