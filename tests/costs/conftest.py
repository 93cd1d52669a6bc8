"""Measurements of a fraction of a second."""

import pytest


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exitserve.costs.timing.SECONDS", 0.05)
