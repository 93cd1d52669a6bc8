"""Run by every Python that starts with this folder on its path: the engines' own processes.

Triton gets a backend for CPUs that looks active. vLLM asks for one before it lets runner V2 run on
a CPU (`vllm/triton_utils/importing.py`); the kernels run in Triton's interpreter.
"""

from types import SimpleNamespace

from triton.backends import backends


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
