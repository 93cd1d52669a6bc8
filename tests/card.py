"""A device that is not the CPU, on a machine that has no other: it computes there, and mixes as
little as a GPU does.

Tensors on it say that they are on "meta", and hold a tensor of the CPU. Those of both devices may
meet where a GPU allows it: in copies, and in indices of the host into tensors of the card.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CARD = torch.device("meta")
ATEN = torch.ops.aten
COPIES = (ATEN._to_copy.default, ATEN.copy_.default)
INDEXED = (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default)


class OnCard(Tensor):
    """A tensor on the card."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnCard:
        made: OnCard = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CARD,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Factories(TorchDispatchMode):
    """Makes tensors on the card where its device is asked for."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and Dynamo need not be imported

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Lists(TorchFunctionMode):
    """From lists and to lists PyTorch goes past its dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") == CARD:
            return OnCard(torch.tensor(*args, **kwargs | {"device": "cpu"}))
        if func is Tensor.tolist and isinstance(args[0], OnCard):
            return args[0].inner.tolist()
        return func(*args, **kwargs)


@contextmanager
def card() -> Iterator[torch.device]:
    """While active, the device can be used."""
    with _Factories(), _Lists():
        yield CARD


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    held = {id(one.inner): one for one in given if isinstance(one, OnCard)}
    # A number of the host is no trouble.
    hosts = [one for one in given if not isinstance(one, OnCard) and one.dim()]
    allowed = func in COPIES or (func in INDEXED and isinstance(args[0], OnCard))
    if held and hosts and not allowed:
        raise RuntimeError(f"{func}: tensors of the card and of the host")
    device = kwargs.get("device")
    if device is not None:
        kwargs = kwargs | {"device": "cpu"}
    plain_args, plain_kwargs = tree_map_only(OnCard, lambda one: one.inner, (args, kwargs))
    found = func(*plain_args, **plain_kwargs)
    if not (held if device is None else torch.device(device) == CARD):
        return found
    return tree_map_only(
        Tensor, lambda one: held[id(one)] if id(one) in held else OnCard(one), found
    )
