"""Chooses the form of an operation: Triton on a GPU, PyTorch elsewhere, unless asked otherwise."""

import functools
import logging
import os
from typing import Literal, get_args

import torch

Form = Literal["triton", "torch"]
Asked = Literal["auto", "triton", "torch"]

VARIABLE = "EXITSERVE_KERNELS"
"""Environment variable that overrides `auto` everywhere: auto, triton or torch."""

_log = logging.getLogger("exitserve.kernels")
_chosen: dict[str, Form] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's
def choose(operation: str, device: torch.device, asked: Asked = "auto") -> Form:
    """Returns the form of an operation for tensors on a device; logs each choice once.

    Args:
        operation: its name, for the log.
        device: of its tensors.
        asked: the caller's choice; `auto` uses the environment's, then the device's.

    Raises:
        ValueError: the choice is unknown, or Triton cannot run on this device.
    """
    if asked == "auto":
        asked = _of_environment()
    _check(asked, "implementation")
    if asked == "auto":
        form: Form = "triton" if device.type == "cuda" and _has_triton() else "torch"
    else:
        form = asked
    if form == "triton" and not can_run_triton(device):
        raise ValueError(
            f"{operation} cannot run in Triton on {device.type}: it needs a CUDA device and the "
            f"package triton (or TRITON_INTERPRET=1, for tests); use {VARIABLE}=torch."
        )
    _log_choice(operation, device.type, form)
    return form


def chosen() -> dict[str, Form]:
    """The form in which each operation last ran in this process."""
    return dict(_chosen)


def can_run_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on a device: on GPUs, and in the interpreter on any device."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == "cuda" or interpreted) and _has_triton()


def _of_environment() -> Asked:
    asked = os.environ.get(VARIABLE, "auto")
    _check(asked, VARIABLE)
    return asked  # type: ignore[return-value]  # checked


def _check(asked: str, name: str) -> None:
    if asked not in get_args(Asked):
        raise ValueError(f"{name} {asked!r} is unknown; allowed: {', '.join(get_args(Asked))}.")


@functools.cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def _log_choice(operation: str, device: str, form: Form) -> None:
    if _chosen.get(operation) != form:
        _chosen[operation] = form
        _log.info("%s on %s: %s", operation, device, form)
