"""Run by every Python that starts with this folder on its path: the engines' own processes.

Triton gets a backend for CPUs that looks active. vLLM asks for one before it lets runner V2 run on
a CPU (`vllm/triton_utils/importing.py`); the kernels run in Triton's interpreter. That loads and
stores under a mask of bits only; vLLM's kernels of grammars and n-grams make some of numbers.
"""

from types import SimpleNamespace
from typing import Any

from triton.backends import backends
from triton.runtime.interpreter import InterpreterBuilder


class Driver:
    """What Triton and Inductor ask a driver for, where nothing is compiled by Triton."""

    @staticmethod
    def is_active() -> bool:
        """The only one that is."""
        return True

    @staticmethod
    def get_current_target() -> SimpleNamespace:
        """No GPU."""
        return SimpleNamespace(backend="cpu", arch=None, warp_size=1)


backends["cpu"] = SimpleNamespace(driver=Driver, compiler=backends["nvidia"].compiler)

load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store


def create_masked_load(builder: Any, places: Any, mask: Any, *others: Any) -> Any:
    """Triton's, of any mask."""
    mask.data = mask.data.astype(bool)
    return load(builder, places, mask, *others)


def create_masked_store(builder: Any, places: Any, values: Any, mask: Any, *others: Any) -> Any:
    """Triton's, of any mask."""
    mask.data = mask.data.astype(bool)
    return store(builder, places, values, mask, *others)


InterpreterBuilder.create_masked_load = create_masked_load
InterpreterBuilder.create_masked_store = create_masked_store
