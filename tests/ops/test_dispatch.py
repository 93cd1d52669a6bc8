"""Which form runs is explicit, logged once, and can be overridden."""

import logging

import pytest
import torch

from exitserve_kernels import dispatch

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_auto_is_triton_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    assert dispatch.choose("an operation", CPU) == "torch"
    assert dispatch.choose("an operation", GPU) == "triton"
    assert dispatch.choose("an operation", GPU, "torch") == "torch"
    with pytest.raises(ValueError, match="implementation 'cuda' is unknown; allowed: auto, triton"):
        dispatch.choose("an operation", GPU, "cuda")  # type: ignore[arg-type]


def test_the_environment_overrides_auto_and_not_what_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    assert dispatch.choose("an operation", GPU) == "torch"
    assert dispatch.choose("an operation", GPU, "triton") == "triton"
    monkeypatch.setenv(dispatch.VARIABLE, "fast")
    with pytest.raises(ValueError, match="EXITSERVE_KERNELS 'fast' is unknown"):
        dispatch.choose("an operation", CPU)


def test_triton_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="cannot run in Triton on cpu"):
        dispatch.choose("an operation", CPU, "triton")


def test_each_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="exitserve.kernels"):
        for _ in range(3):
            dispatch.choose("an operation of this test", CPU, "torch")
    # Other libraries, and engines of earlier tests that are collected now, may log meanwhile; with
    # vLLM's handlers, which the engine takes over, a record may come twice.
    records = {id(one): one for one in caplog.records if one.name == "exitserve.kernels"}
    ours = [record.message for record in records.values()]
    assert ours == ["an operation of this test on cpu: torch"]
