"""Modules that vLLM compiles: making them, and calling them without gathering their weights again
for every pass.

TorchDynamo turns a forward into a call of one graph, which takes all weights as arguments. What it
generates looks each of them up in the module, and names each layer, at every call; for 24 layers
that takes 0.2 ms on a CPU, of 3 in a step of a small model. But nothing of it changes between
passes except the module's own arguments. So two calls are watched, and after them the graph is
called directly.

Read from `vllm/compilation/wrapper.py`. (On a GPU there is nothing to gain: CUDA graphs replay
kernels without any of this.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

GRAPH = "__compiled_fn"
"""How the names of TorchDynamo's graphs begin."""


@dataclass(frozen=True)
class _Given:
    """An argument of the module."""

    place: int


@dataclass(frozen=True)
class _Tokens:
    """The number of tokens."""


@dataclass(frozen=True)
class _Call:
    """What one call of a module handed to its graph."""

    tokens: int
    arguments: list[Any]
    """Of the graph: `_Given`, or as they were."""
    result: Any
    """Of the module: an index of the graph's results or None; or a tuple of these."""


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


def call_directly(modules: Iterable[nn.Module]) -> list[DirectCalls]:
    """Lets those of `modules` that vLLM compiles be called directly."""
    return [
        DirectCalls(one)
        for one in modules
        if isinstance(one, TorchCompileWithNoGuardsWrapper)
        and not getattr(one, "do_not_compile", True)
        and not one.layerwise_nvtx_tracing_enabled
    ]


class DirectCalls:
    """Stands between the callers of one compiled module and its graph."""

    def __init__(self, module: Any) -> None:
        """Takes calls of a module: its class becomes one of its own, which differs in that."""
        self._module, self._parent = module, type(module)
        self._seen: _Call | None = None
        self._plan: _Plan | None = None
        self._watches = True
        """Until it is known how to call the graph, or that it cannot be told."""
        methods = {"__call__": lambda _, *given, **named: self._call(given, named)}
        module.__class__ = type(self._parent.__name__, (self._parent,), methods)

    def forget(self) -> None:
        """To be called when weights are loaded: they may be other objects then."""
        self._seen, self._plan, self._watches = None, None, True

    def _call(self, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._plan is not None and not named and self._plan.fits(given):
            return self._plan.run(given)
        if named or not self._watches or self._bytecode is None:
            return self._compiled(*given, **named)
        return self._watched(given)

    @property
    def _bytecode(self) -> Any:
        """What TorchDynamo made of the forward; None until it did, or where vLLM keeps none."""
        return getattr(self._module, "_compiled_bytecode", None)

    def _compiled(self, *given: Any, **named: Any) -> Any:
        """Calls the module as vLLM does."""
        return self._parent.__call__(self._module, *given, **named)

    def _watched(self, given: Sequence[Any]) -> Any:
        """Calls the module, and looks at what it does with its arguments."""
        names = [n for n in self._bytecode.co_names if n.startswith(GRAPH)]
        variables: dict[str, Any] = self._parent.forward.__globals__
        if len(names) != 1 or names[0] not in variables:
            self._watches = False
            return self._compiled(*given)
        graph, calls = variables[names[0]], []

        def watched(*arguments: Any) -> Any:
            results = graph(*arguments)
            calls.append((arguments, results))
            return results

        variables[names[0]] = watched
        try:
            result = self._compiled(*given)
        finally:
            variables[names[0]] = graph
        call = _call(given, *calls[0], result) if len(calls) == 1 else None
        if call is None:
            self._watches = False
        elif self._seen is None:
            self._seen = call
        elif call.tokens != self._seen.tokens:
            self._plan, self._watches = _plan(graph, given, self._seen, call), False
            self._seen = None
        return result


@dataclass(frozen=True)
class _Plan:
    """How to call a graph."""

    graph: Callable[..., Sequence[Any]]
    arguments: list[Any]
    """Of the graph; those of the module and the number of tokens are to be put in."""
    given: list[tuple[int, int]]
    """Where in `arguments`, and which of the module's."""
    tokens: list[int]
    """Where in `arguments` the number of tokens is."""
    present: list[bool]
    """Which arguments of the module are not None."""
    result: Any
    """See `_Call`."""

    def fits(self, given: Sequence[Any]) -> bool:
        """Whether the module is called as it was."""
        return [one is not None for one in given] == self.present

    def run(self, given: Sequence[Any]) -> Any:
        """Calls the graph; returns what the module would."""
        arguments = self.arguments.copy()
        for place, which in self.given:
            arguments[place] = given[which]
        count = _num_tokens(given)
        for place in self.tokens:
            arguments[place] = count
        results = self.graph(*arguments)
        if isinstance(self.result, tuple):
            return tuple(None if one is None else results[one] for one in self.result)
        return results[self.result]


def _num_tokens(given: Sequence[Any]) -> int:
    return next(len(one) for one in given if one is not None)


def _call(
    given: Sequence[Any], arguments: Sequence[Any], results: Sequence[Any], result: Any
) -> _Call | None:
    """What a call did; None if it cannot be told."""
    tensors = [one for one in given if one is not None]
    places = {id(one): place for place, one in enumerate(given) if one is not None}
    plain = all(isinstance(one, Tensor) for one in tensors) and len(places) == len(tensors)
    if not plain or not tensors:
        return None
    indices = {id(one): index for index, one in enumerate(results)}
    parts = list(result) if type(result) is tuple else [result]
    if any(one is not None and id(one) not in indices for one in parts):
        return None
    found = [None if one is None else indices[id(one)] for one in parts]
    return _Call(
        _num_tokens(given),
        [_Given(places[id(one)]) if id(one) in places else one for one in arguments],
        tuple(found) if type(result) is tuple else found[0],
    )


def _plan(
    graph: Callable[..., Any], given: Sequence[Any], first: _Call, second: _Call
) -> _Plan | None:
    """How to call the graph, from two calls with different numbers of tokens; None if unclear."""
    if first.result != second.result or len(first.arguments) != len(second.arguments):
        return None
    arguments: list[Any] = []
    for one, other in zip(first.arguments, second.arguments, strict=True):
        if type(one) is int and (one, other) == (first.tokens, second.tokens):
            arguments.append(_Tokens())
        # Layers' names are made anew by each call; weights are the same objects.
        elif one is other or (not isinstance(one, Tensor) and one == other):
            arguments.append(other)
        else:
            return None
    return _Plan(
        graph,
        arguments,
        [(n, one.place) for n, one in enumerate(arguments) if isinstance(one, _Given)],
        [n for n, one in enumerate(arguments) if isinstance(one, _Tokens)],
        [one is not None for one in given],
        second.result,
    )
