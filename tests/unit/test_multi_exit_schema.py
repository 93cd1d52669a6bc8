"""Whatever stands in a `multi_exit` block, it is read as it was written or refused in one line."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitserve.checkpoint.block import parse_multi_exit, read_multi_exit
from exitserve.engine.options import make_rules
from exitserve.errors import ExitServeError

POINT = {
    "agreement": 0.9,
    "thresholds": {"2": 0.5, "4": 0.4},
    "eos_thresholds": {"2": 1.0, "4": 1.0},
    "found": {"mean_depth": 4.5, "cost": 0.8},
}
BLOCK: dict[str, Any] = {
    "version": 1,
    "exit_layers": [2, 4],
    "objective": "aligned",
    "criterion": "entropy",
    "rows": "0" * 64,
    "calibration": {
        "target": "agreement>=0.99",
        "mode": "confidence",
        "criterion": "entropy",
        "confidence_level": 0.95,
        "num_layers": 6,
        **copy.deepcopy(POINT),
        "points": [copy.deepcopy(POINT), copy.deepcopy(POINT)],
        "provenance": {"data": {"name": "a.txt"}},
        "other_modes": [
            {
                "target": "agreement>=0.9",
                "mode": "defer",
                **copy.deepcopy(POINT),
                "points": [copy.deepcopy(POINT)],
            }
        ],
    },
}
SHAPE = {
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
    "model_type": "llama",
}

Path_ = tuple[str | int, ...]


def paths(tree: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Where values are, from the outside in."""
    yield at
    if not isinstance(tree, dict | list):
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from paths(value, (*at, key))


def changed(path: Path_, value: Any) -> Any:
    """The block with another value there."""
    block = copy.deepcopy(BLOCK)
    if not path:
        return value
    node = block
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return block


def written(path: Path_) -> str:
    """A path as messages have it."""
    return "multi_exit" + "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=60),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=60), inner),
    max_leaves=12,
)
NUMBERS = st.integers(-3, 9) | st.sampled_from([math.nan, math.inf, -math.inf, 1e308, 10**400, 0.5])
LAYERS = st.dictionaries(st.integers(-2, 9).map(str) | st.text(max_size=3), NUMBERS, max_size=3)
WORDS = st.sampled_from(["margin", "entropy", "defer", "verify", "0.5", "2"])


@given(
    path=st.sampled_from(list(paths(BLOCK))),
    value=JSON | NUMBERS | LAYERS | WORDS | st.lists(NUMBERS, max_size=4),
)
def test_any_value_anywhere_is_read_or_named(path: Path_, value: Any) -> None:
    block = changed(path, value)
    try:
        found = parse_multi_exit({"multi_exit": block})
    except ExitServeError as error:
        message = str(error)
        assert len(message.splitlines()) == 1 and len(message) < 500
        problem = message.partition(" Correct it")[0]
        # A layer may fit its list, and the list nothing else.
        named = path[:1] if path[:1] == ("exit_layers",) else path
        assert written(named) in problem or "is of version" in problem
        return
    if found is None:
        assert block is None
        return
    again = parse_multi_exit({"multi_exit": json.loads(json.dumps(found.to_json()))})
    assert again is not None and again.to_json() == found.to_json()
    points = [*found.calibration.by_name().values()] if found.calibration else []
    for point in points:
        assert all(
            0 <= threshold < math.inf and layer in found.exit_layers
            for own in point.by_name().values()
            for layer, threshold in own.items()
        )
        assert point.agreement is None or 0 < point.agreement < 1
        assert all(map(math.isfinite, point.found.values()))
    make_rules(SHAPE | {"multi_exit": block}, {"exit_layers": [2, 4]})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("calibration.points[1].thresholds.4", -1.0, "is -1.0; it should be greater than or equal"),
        ("calibration.thresholds.2", math.nan, "is nan; it should be a finite number"),
        ("calibration.thresholds.2", math.inf, "is inf; it should be a finite number"),
        ("calibration.thresholds.2", "0.9", "is '0.9'; it should be a valid number"),
        ("calibration.thresholds.2", True, "is True; it should be a valid number"),
        ("calibration.thresholds", "0.9", "is '0.9'; it should be an object"),
        ("calibration.thresholds.two", 0.5, "must be named by a layer, a whole number"),
        ("calibration.agreement", 7, "is 7; it should be less than 1"),
        ("calibration.confidence_level", 95, "is 95; it should be less than 1"),
        ("calibration.num_layers", math.inf, "is inf; it should be a valid integer"),
        ("calibration.num_layers", 0, "is 0; it should be greater than or equal to 1"),
        ("calibration.mode", "verify", "is 'verify'; allowed: confidence, defer"),
        ("calibration.criterion", "luck", "is 'luck'; allowed: max_prob, margin, entropy"),
        ("calibration.criterion", "margin", "is 'margin', but .* multi_exit.criterion, 'entropy'"),
        ("calibration.found.cost", math.nan, "is nan; it should be a finite number"),
        ("calibration.points", {}, "it should be a list"),
        ("calibration.provenance", [], "it should be an object"),
        ("calibration.mode", "defer", r"and .*other_modes\[0\]\.mode are both 'defer'"),
        ("calibration.other_modes[0].thresholds.2", -1, "is -1; it should be greater than"),
        ("calibration", [1], "it should be an object"),
        ("criterion", "luck", "is 'luck'; allowed: max_prob, margin, entropy"),
        ("rows", "../../secret", "is '../../secret'; it should match pattern"),
        ("exit_layers", [4, 2], r"is \[4, 2\]; it must ascend without repeats"),
        ("exit_layers", [2, 2, 4], "it must ascend without repeats"),
        ("exit_layers[0]", 0, "is 0; it should be greater than or equal to 1"),
        ("exit_layers[1]", 4.5, "is 4.5; it should be a valid integer"),
        ("exit_layers", "2,4", "is '2,4'; it should be a list"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: Any, message: str) -> None:
    steps = path.replace("[", ".[").split(".")
    keys = tuple(int(one[1:-1]) if one.startswith("[") else one for one in steps)
    with pytest.raises(ExitServeError, match=message) as error:
        parse_multi_exit({"multi_exit": changed(keys, value)})
    assert str(error.value).startswith(f"multi_exit.{path} ")
    assert "config.json" in str(error.value), "how to mend it"


@pytest.mark.parametrize("where", ["thresholds", "eos_thresholds"])
@pytest.mark.parametrize("mode", [(), ("other_modes", 0)])
def test_thresholds_belong_to_exit_layers(where: str, mode: Path_) -> None:
    path = ("calibration", *mode, "points", 0, where)
    block = changed(path, {"3": 0.5})
    named = re.escape(written(path)) + " names layer 3, which is none of"
    with pytest.raises(ExitServeError, match=named):
        parse_multi_exit({"multi_exit": block})


def test_keys_of_a_later_release_are_ignored() -> None:
    later = copy.deepcopy(BLOCK)
    for node in (later, later["calibration"], later["calibration"]["points"][0]):
        node["chosen"] = node["added_later"] = {"a": 1}
    assert parse_multi_exit({"multi_exit": later}) == parse_multi_exit({"multi_exit": BLOCK})


def test_exit_layers_beyond_the_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 4, "multi_exit": BLOCK}))
    with pytest.raises(ExitServeError, match=r"exit layer 4 is out of range.* lie in 1\.\.3"):
        read_multi_exit(tmp_path)
