"""Where fused kernels run in tests: on a GPU, or in Triton's interpreter.

    TRITON_INTERPRET=1 pytest tests/ops

The interpreter must be chosen before Triton is first imported, so these tests are a session of
their own on a machine without a GPU; `make test` runs both.
"""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the fused form runs here."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    pytest.skip("no GPU: set TRITON_INTERPRET=1 before pytest starts (make test does)")
