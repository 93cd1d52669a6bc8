"""Request fields to policies: what is allowed, what is refused, and what the salt separates."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy import float64

from exitserve.checkpoint.calibration import ModeCalibration, OperatingPoint
from exitserve.errors import LONGEST_LINE, ExitServeError
from exitserve.policy import FIELDS, NEVER, ExitPolicy, ExitRules

from ..shapes import calibration_of

RULES = ExitRules(num_layers=12, exit_layers=(3, 6, 9))
CALIBRATED = replace(
    RULES,
    calibration=calibration_of(
        OperatingPoint(agreement=0.98, thresholds={3: 0.9, 6: 0.8}, eos_thresholds={3: 0.95}),
        OperatingPoint(agreement=0.9, thresholds={6: 0.4}, eos_thresholds={6: 1.0}),
        OperatingPoint(agreement=0.999, thresholds={6: 1.5}, eos_thresholds={6: 2.0}),
        mode="confidence",
        num_layers=12,
    ),
)


@given(st.floats(min_value=1e-6, max_value=0.999999))
def test_end_of_sequence_needs_more_confidence(threshold: float) -> None:
    policy = ExitPolicy.confidence(threshold)
    assert policy.thresholds_at(3) == policy.thresholds_at(9) == (threshold, policy.eos_threshold)
    assert threshold < policy.eos_threshold < 1


@given(st.floats(min_value=1.0, max_value=1e300))
def test_a_threshold_of_one_or_more_is_full_depth(threshold: float) -> None:
    policy = RULES.policy_for({"exit_threshold": threshold})
    assert policy == ExitPolicy.off()
    assert policy.thresholds_at(3) == (NEVER, NEVER)
    assert policy.cache_salt() is None


@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_salts_are_equal_exactly_when_policies_are(a: float, b: float) -> None:
    first, second = ExitPolicy.confidence(a), ExitPolicy.confidence(b)
    assert (first.cache_salt() == second.cache_salt()) == (first == second)
    assert first.cache_salt() != ExitPolicy.fixed(3).cache_salt()


@pytest.mark.parametrize(
    "value",
    ["0.5", "x", -0.5, 0, 0.0, math.nan, math.inf, -math.inf, True, False, [0.5], {}, float64(0.5)],
)
def test_bad_thresholds_are_named(value: object) -> None:
    with pytest.raises(ExitServeError, match="exit_threshold must be a finite number above 0"):
        RULES.policy_for({"exit_threshold": value})


@pytest.mark.parametrize("value", [0, 1, 5, 12, 99, -3])
def test_layers_that_are_no_exits_are_refused_with_the_list(value: int) -> None:
    with pytest.raises(ExitServeError, match=r"exit_layer .* \(3, 6, 9\)"):
        RULES.policy_for({"exit_layer": value})


def test_both_fields_exclude_each_other() -> None:
    with pytest.raises(ExitServeError, match="exclude each other"):
        RULES.policy_for({"exit_threshold": 0.5, "exit_layer": 6})


def test_unknown_fields_are_refused_with_the_nearest() -> None:
    with pytest.raises(ExitServeError, match="Did you mean 'exit_threshold'"):
        RULES.policy_for({"exit_treshold": 0.5})


@pytest.mark.parametrize("value", ["none", "text", "layers", "both"])
def test_where_drafts_come_from_changes_no_policy(value: str) -> None:
    drafting = replace(RULES, num_drafts=4, modes=("off", "verify", "defer"))
    assert drafting.policy_for({"exit_drafts": value}) == drafting.policy_for({})
    with pytest.raises(ExitServeError, match="exit_drafts needs a server that drafts"):
        RULES.policy_for({"exit_drafts": value})
    with pytest.raises(ExitServeError, match="must be one of both, text, layers, none, not 'all'"):
        drafting.policy_for({"exit_drafts": "all"})


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - {"exit_trace"}))
@pytest.mark.parametrize("value", ["x" * 100_000, [["y" * 1000] * 1000] * 3, {"z" * 9999: 1}])
def test_errors_show_only_the_start_of_a_long_value(name: str, value: object) -> None:
    with pytest.raises(ExitServeError) as caught:
        RULES.policy_for({name: value})
    assert name in str(caught.value) and len(str(caught.value)) <= LONGEST_LINE


def test_grammars_run_at_full_depth_unless_asked() -> None:
    rules = ExitRules(num_layers=12, exit_layers=(3,), default=ExitPolicy.confidence(0.5))
    assert rules.policy_for({}) == ExitPolicy.confidence(0.5)
    assert rules.policy_for({}, structured=True) == ExitPolicy.off()
    asked = rules.policy_for({"exit_threshold": 0.7}, structured=True)
    assert asked == ExitPolicy.confidence(0.7)


def test_behind_the_front_door_bad_fields_mean_full_depth() -> None:
    assert RULES.policy_or_off({"exit_layer": 5}, structured=False) == ExitPolicy.off()


def test_the_server_may_set_the_end_of_sequence_threshold() -> None:
    rules = ExitRules(num_layers=12, exit_layers=(3,), eos_threshold=0.99)
    assert rules.policy_for({"exit_threshold": 0.5}).eos_threshold == 0.99
    # Never below the request's own.
    assert rules.policy_for({"exit_threshold": 0.995}).eos_threshold == 0.995


@pytest.mark.parametrize("mode", ["confidence", "defer"])
def test_a_request_names_its_mode(mode: str) -> None:
    policy = RULES.policy_for({"exit_mode": mode, "exit_threshold": 0.4})
    assert (policy.mode, policy.threshold) == (mode, 0.4)
    assert policy.thresholds_at(3) == ExitPolicy.confidence(0.4).thresholds_at(3)
    assert RULES.policy_for({"exit_mode": mode, "exit_threshold": 1}) == ExitPolicy.off()
    with pytest.raises(ExitServeError, match="send exit_threshold with it"):
        RULES.policy_for({"exit_mode": mode})


def test_mode_and_threshold_default_to_the_servers() -> None:
    rules = replace(RULES, default=ExitPolicy.confidence(0.6, mode="defer"))
    assert rules.policy_for({}) == rules.default
    assert rules.policy_for({"exit_threshold": 0.3}).mode == "defer"
    assert rules.policy_for({"exit_mode": "confidence"}) == ExitPolicy.confidence(0.6)
    assert rules.policy_for({"exit_mode": "off"}) == ExitPolicy.off()
    assert rules.policy_for({"exit_mode": "defer"}, structured=True).mode == "defer"
    assert rules.policy_for({}, structured=True).mode == "off"


def test_deferred_keys_and_values_are_exact_and_need_no_salt() -> None:
    assert ExitPolicy.confidence(0.5, mode="defer").cache_salt() is None


@pytest.mark.parametrize("mode", ["fast", "fixed", 3, "", ["defer"]])
def test_unknown_modes_are_refused_with_the_list(mode: object) -> None:
    with pytest.raises(ExitServeError, match="must be one of off, confidence, defer"):
        RULES.policy_for({"exit_mode": mode, "exit_threshold": 0.5})


def test_mode_and_layer_exclude_each_other() -> None:
    with pytest.raises(ExitServeError, match="exit_mode and exit_layer exclude each other"):
        RULES.policy_for({"exit_mode": "defer", "exit_layer": 6})


def test_auto_means_the_calibrated_thresholds_layer_by_layer() -> None:
    policy = CALIBRATED.policy_for({"exit_threshold": "auto"})
    assert policy.mode == "confidence"
    assert policy.thresholds_at(3) == (0.9, 0.95)
    assert policy.thresholds_at(6) == (0.8, NEVER), "ends of sequence that nobody calibrated"
    assert policy.thresholds_at(9) == (NEVER, NEVER), "a layer that was not chosen"
    salted = CALIBRATED.policy_for({"exit_target": 0.9})
    assert policy.cache_salt() != salted.cache_salt() != ExitPolicy.confidence(0.4).cache_salt()


def test_a_target_is_met_by_the_cheapest_promise_or_full_depth() -> None:
    assert CALIBRATED.policy_for({"exit_target": 0.85}).thresholds_at(6)[0] == 0.4
    assert CALIBRATED.policy_for({"exit_target": 0.95}).thresholds_at(6)[0] == 0.8
    assert CALIBRATED.policy_for({"exit_target": 0.99}) == ExitPolicy.off(), "a point that is off"
    assert CALIBRATED.policy_for({"exit_target": 0.9999}) == ExitPolicy.off(), "none promises it"


@pytest.mark.parametrize("value", [0, 1, 1.5, -0.1, "0.98", True, math.nan, [0.9]])
def test_bad_targets_are_named(value: object) -> None:
    with pytest.raises(ExitServeError, match="exit_target must be a number above 0 and below 1"):
        CALIBRATED.policy_for({"exit_target": value})


@pytest.mark.parametrize("fields", [{"exit_threshold": "auto"}, {"exit_target": 0.9}])
def test_what_was_not_calibrated_has_no_auto(fields: dict[str, object]) -> None:
    with pytest.raises(ExitServeError, match="exitserve calibrate"):
        RULES.policy_for(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exit_target": 0.9, "exit_threshold": 0.5}, "exclude each other"),
        ({"exit_target": 0.9, "exit_layer": 6}, "exclude each other"),
        ({"exit_target": 0.9, "exit_mode": "defer"}, "chosen in mode 'confidence'"),
    ],
)
def test_a_target_contradicts_other_choices(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ExitServeError, match=message):
        CALIBRATED.policy_for(fields)


def test_a_calibrated_default_serves_modes_that_name_no_threshold() -> None:
    rules = replace(CALIBRATED, default=CALIBRATED.policy_for({"exit_threshold": "auto"}))
    assert rules.policy_for({}) == rules.default
    assert rules.policy_for({"exit_mode": "confidence"}) == rules.default
    assert rules.policy_for({"exit_mode": "off"}) == ExitPolicy.off()
    with pytest.raises(ExitServeError, match="needs a threshold"):
        rules.policy_for({"exit_mode": "defer"})


BOTH = replace(
    CALIBRATED,
    calibration=replace(
        CALIBRATED.calibration,
        other_modes=(
            ModeCalibration(
                target="agreement>=0.97",
                mode="defer",
                chosen=OperatingPoint(agreement=0.97, thresholds={3: 0.6}, eos_thresholds={3: 1.0}),
            ),
        ),
    ),
)


def test_each_mode_has_the_thresholds_that_were_calibrated_for_it() -> None:
    deferring = {"exit_threshold": "auto", "exit_mode": "defer"}
    assert BOTH.policy_for({"exit_threshold": "auto"}).mode == "confidence", "the first"
    assert BOTH.policy_for(deferring).by_layer == ((3, 0.6, NEVER),)
    assert BOTH.policy_for({"exit_target": 0.97}).by_layer[0][1] == 0.9
    assert BOTH.policy_for({"exit_target": 0.97, "exit_mode": "defer"}).by_layer[0][1] == 0.6
    assert BOTH.policy_for({"exit_target": 0.98, "exit_mode": "defer"}) == ExitPolicy.off()


def test_drafts_go_by_what_was_calibrated_for_exact_keys_and_values() -> None:
    rules = replace(BOTH, num_drafts=4, modes=(*BOTH.modes, "verify"))
    policy = rules.policy_for({"exit_threshold": "auto", "exit_mode": "verify"})
    assert (policy.mode, policy.by_layer) == ("verify", ((3, 0.6, NEVER),))


def test_where_one_calibrated_mode_is_not_served_the_other_is_meant() -> None:
    rules = replace(BOTH, modes=("off", "defer", "verify"))
    assert rules.policy_for({"exit_threshold": "auto"}).mode == "defer"
    with pytest.raises(ExitServeError, match="needs a server that was started for it"):
        rules.policy_for({"exit_threshold": "auto", "exit_mode": "confidence"})
    with pytest.raises(ExitServeError, match="exitserve serve --mode verify"):
        BOTH.policy_for({"exit_threshold": 0.5, "exit_mode": "verify"})
