"""Loads the first layers of a checkpoint only (`max_layers`).

The model is built from a config that was cut (`hf_overrides`), so weights of later layers have no
place in it: they are left out by name here. Whole files of them are not opened for reading, and
single tensors are not read, as vLLM's loaders map files and hand out tensors lazily.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from exitserve.engine.options import options_of
from exitserve.first_layers import beyond


class FirstLayers:
    """Lets a vLLM model load its first layers; put it before the vLLM class."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        parent: Any = super()  # the vLLM class, to which this is a mixin
        parent.__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        self._max_layers: int | None = options_of(vllm_config).get("max_layers")
        if self._max_layers is not None:
            # vLLM's loader asks a model that has this which files it can do without.
            self.is_unused_checkpoint_weight = self._is_unused

    def _is_unused(self, name: str) -> bool:
        return self._max_layers is not None and beyond(name, self._max_layers)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads named tensors, those of later layers left out; returns what was loaded."""
        parent: Any = super()
        kept = ((name, tensor) for name, tensor in weights if not self._is_unused(name))
        return parent.load_weights(kept)  # type: ignore[no-any-return]
