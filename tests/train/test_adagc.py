"""AdaGC: each gradient clipped against the history of its own norm."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from exitserve.errors import ExitServeError
from exitserve_training.adagc import AdaGC


def parameter(*gradient: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    values = torch.tensor(gradient, dtype=dtype)
    leaf = nn.Parameter(torch.zeros_like(values))
    leaf.grad = values
    return leaf


def clip_norms(clipper: AdaGC, **norms: float) -> dict[str, float]:
    """One step with gradients of these norms; the norms that come out."""
    named = {name: parameter(0.6 * norm, 0.8 * norm) for name, norm in norms.items()}
    clipper.clip(named.items())
    return {name: float(leaf.grad.norm()) for name, leaf in named.items() if leaf.grad is not None}


def plain(history: list[dict[str, float]], warmup: int) -> list[dict[str, float]]:
    """The method on norms alone, as the module's header writes it; lambda 1.04, beta 0.99."""
    averages = dict.fromkeys(history[0], math.inf)
    clipped = []
    for step, norms in enumerate(history):
        total = math.sqrt(sum(norm**2 for norm in norms.values()))
        out = {}
        for name, norm in norms.items():
            if step < warmup:
                out[name] = norm * min(1.0, 1.0 / total)
                averages[name] = min(averages[name], out[name])
            else:
                out[name] = norm * min(1.0, 1.04 * averages[name] / norm)
                averages[name] = 0.99 * averages[name] + 0.01 * out[name]
        clipped.append(out)
    return clipped


def test_by_hand() -> None:
    clipper = AdaGC(warmup_steps=2)
    # Warm-up: global norm 5 becomes 1. Then 0.5 is below 1 and stays.
    assert clip_norms(clipper, a=3.0, b=4.0) == pytest.approx({"a": 0.6, "b": 0.8}, rel=1e-6)
    assert clip_norms(clipper, a=0.3, b=0.4) == pytest.approx({"a": 0.3, "b": 0.4}, rel=1e-6)
    assert clipper.state_dict()["averages"] == pytest.approx({"a": 0.3, "b": 0.4}, rel=1e-6)
    # Afterwards each by itself: a's spike is cut to 1.04 of its average and b does not notice.
    assert clip_norms(clipper, a=30.0, b=0.2) == pytest.approx({"a": 0.312, "b": 0.2}, rel=1e-6)
    expected = {"a": 0.99 * 0.3 + 0.01 * 0.312, "b": 0.99 * 0.4 + 0.01 * 0.2}
    assert clipper.state_dict()["averages"] == pytest.approx(expected, rel=1e-6)


@settings(deadline=None, max_examples=30)
@given(
    history=st.lists(
        st.fixed_dictionaries({name: st.floats(1e-6, 1e6) for name in "abc"}),
        min_size=1,
        max_size=12,
    ),
    warmup=st.integers(1, 6),
)
def test_any_history_equals_the_plain_method(history: list[dict[str, float]], warmup: int) -> None:
    clipper = AdaGC(warmup_steps=warmup)
    for norms, expected in zip(history, plain(history, warmup), strict=True):
        # Norms pass through float32 once a step, and averages carry that on: 12 steps at most.
        assert clip_norms(clipper, **norms) == pytest.approx(expected, rel=1e-5)


def test_gradients_that_are_none_or_zero_are_passed_over() -> None:
    clipper = AdaGC(warmup_steps=2)
    silent = nn.Parameter(torch.zeros(3))
    clipper.clip([])
    clipper.clip([("silent", silent), ("zero", parameter(0.0, 0.0))])
    assert clipper.state_dict() == {"steps": 2, "averages": {}}
    assert silent.grad is None
    # Neither tensor is frozen: the first real gradient passes, bounded by 1.
    assert clip_norms(clipper, zero=0.25, silent=50.0) == pytest.approx(
        {"zero": 0.25, "silent": 1.0}, rel=1e-6
    )
    before = clipper.state_dict()
    clip_norms(clipper, zero=0.0)
    assert clipper.state_dict()["averages"] == before["averages"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("warmup_steps", [0, 100])
def test_a_gradient_that_is_not_finite_is_named_and_nothing_changes(
    bad: float, warmup_steps: int
) -> None:
    clipper = AdaGC(warmup_steps=warmup_steps)
    clip_norms(clipper, good=2.0)
    before = clipper.state_dict()
    good = parameter(50.0, 1.0)
    with pytest.raises(ExitServeError, match=r"gradient of 'layers\.3\.bad' has the norm"):
        clipper.clip([("good", good), ("layers.3.bad", parameter(1.0, bad))])
    assert clipper.state_dict() == before
    assert good.grad is not None
    assert good.grad.tolist() == [50.0, 1.0]


def test_resumed_is_as_if_never_stopped() -> None:
    generator = torch.Generator().manual_seed(0)
    history = [
        {name: float(norm) for name, norm in zip("ab", row, strict=True)}
        for row in torch.rand(12, 2, generator=generator).tolist()
    ]
    through = AdaGC(warmup_steps=4)
    expected = [clip_norms(through, **norms) for norms in history]
    for stop in (2, 4, 7):
        first, second = AdaGC(warmup_steps=4), AdaGC(warmup_steps=4)
        found = [clip_norms(first, **norms) for norms in history[:stop]]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        found += [clip_norms(second, **norms) for norms in history[stop:]]
        assert found == expected
        assert second.state_dict() == through.state_dict()
