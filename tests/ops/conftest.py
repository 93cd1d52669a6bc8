"""Where fused kernels run in tests: on a GPU, or in Triton's interpreter.

    TRITON_INTERPRET=1 pytest tests/ops

The interpreter must be chosen before Triton is first imported, so these tests are a session of
their own on a machine without a GPU; `make test` runs both.
"""

import os

import pytest
import torch

# The interpreter computes by numpy, which warns where a GPU silently gives inf or NaN.
INTERPRETED = pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks gpu what asks for a device: without a GPU, only the interpreter runs it."""
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
            item.add_marker(INTERPRETED)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the fused form runs here."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    pytest.skip("no GPU: set TRITON_INTERPRET=1 before pytest starts (make test does)")
