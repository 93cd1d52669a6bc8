"""Modules that vLLM compiles."""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile


def compiled_module(
    vllm_config: Any,
    name: str,
    parent: type[nn.Module],
    forward: Callable[..., Any],
    arguments: Sequence[str],
    **parts: Any,
) -> Any:
    """A module that is compiled as one unit where vLLM compiles.

    vLLM's cache of compiled code knows a module by its forward's qualified name
    (`vllm/compilation/decorators.py`, `_model_hash_key`), so each gets a class and a name of its
    own: with a common one, a module could be handed another's code.

    Args:
        vllm_config: vLLM's.
        name: differs where what is compiled differs.
        parent: takes `vllm_config`, `prefix` and `parts`.
        forward: the module's, a plain function.
        arguments: of `forward`, those that are tensors of the same number of tokens, or None.
        **parts: what the module is made of.
    """
    method = FunctionType(forward.__code__, forward.__globals__)  # with a name of its own
    method.__name__, method.__qualname__ = "forward", f"{name}.forward"
    decorate = support_torch_compile(dynamic_arg_dims={one: {0: "t"} for one in arguments})
    own_class: Any = decorate(type(name, (parent,), {"forward": method}))
    with set_model_tag(name):
        return own_class(vllm_config=vllm_config, prefix=name, **parts)
