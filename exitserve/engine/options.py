"""From vLLM's config to exit rules: the checkpoint's block and the server's own options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exitserve.checkpoint import check_exit_layers, parse_multi_exit
from exitserve.costs import break_even_rates
from exitserve.errors import ExitServeError, nearest
from exitserve.policy import (
    BY_CONFIDENCE,
    MODES,
    NOT_ON_GPUS,
    NUM_DRAFTS,
    ExitPolicy,
    ExitRules,
    check_threshold,
)

KEY = "exitserve"
OPTIONS = (
    "exit_layers",
    "mode",
    "exit_threshold",
    "exit_layer",
    "eos_threshold",
    "exit_checks",
    "exit_path",
    "num_drafts",
    "forced",
)
EXIT_CHECKS = ("paying", "all")
"""Whether checks that do not pay are left out (`exitserve.schedule`)."""
QUANTISED = ("compressed-tensors",)
"""Quantisation methods that exits were tried with."""
PROPOSER = "exitserve.engine.drafting.Drafter"
"""How vLLM's configuration names what drafts in mode "verify"."""
MOST_DRAFTS = 64
"""vLLM's rejection sampler takes 128."""
EXIT_PATHS = ("compact", "masked", "resident")
"""How a batch of mixed depths runs: active rows alone; all of them, as a plain yardstick; or all
of them with exits that the device decides, which is how a GPU runs (and a CPU in tests)."""


def make_rules(
    config: Mapping[str, Any], declared_layers: tuple[int, ...], options: Mapping[str, Any]
) -> ExitRules:
    """Checks server options against a model and returns its rules.

    Args:
        config: the checkpoint's `config.json`.
        declared_layers: the checkpoint's own exit layers.
        options: any of `OPTIONS`; `exit_layers` replaces the declared ones.

    Raises:
        ExitServeError: an option is unknown, malformed, or does not fit the model.
    """
    for name in options:
        if name not in OPTIONS:
            raise ExitServeError(f"unknown exitserve option {name!r}.{nearest(name, OPTIONS)}")
    num_layers = config.get("num_hidden_layers", config.get("n_layer"))
    if not isinstance(num_layers, int):
        raise ExitServeError("the checkpoint's config.json names no num_hidden_layers.")
    layers = options.get("exit_layers")
    exit_layers = check_exit_layers(declared_layers if layers is None else layers, num_layers)
    eos = options.get("eos_threshold")
    path = choose(options, "exit_path", EXIT_PATHS)
    every = choose(options, "exit_checks", EXIT_CHECKS) == "all"
    rules = ExitRules(
        num_drafts=_num_drafts(options, exit_layers),
        tokens_may_wait=path != "resident",
        num_layers=num_layers,
        exit_layers=exit_layers,
        eos_threshold=None if eos is None else check_threshold(eos, "eos_threshold"),
        break_even={} if every else break_even_rates(config, exit_layers),
    )
    return replace(rules, default=_default_policy(rules, options))


def _num_drafts(options: Mapping[str, Any], exit_layers: tuple[int, ...]) -> int:
    """How many tokens requests may draft at a time: any only on servers of mode "verify"."""
    given = options.get("num_drafts")
    if options.get("mode") == "verify" and options.get("exit_path") == "resident":
        raise ExitServeError(NOT_ON_GPUS.format(mode="verify"))
    if options.get("mode") != "verify":
        if given is not None:
            raise ExitServeError("num_drafts belongs to mode 'verify'; add --mode verify.")
        return 0
    if not exit_layers:
        raise ExitServeError(
            "mode 'verify' drafts at exit layers, and this model declares none; "
            "name some, for example --exit-layers 4,8."
        )
    count = NUM_DRAFTS if given is None else given
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= MOST_DRAFTS:
        raise ExitServeError(
            f"num_drafts must be a whole number from 1 to {MOST_DRAFTS}, not {count!r}."
        )
    return count


def choose(options: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> str:
    """Returns option `name`, by default the first allowed value.

    Raises:
        ExitServeError: it has another value.
    """
    value = options.get(name, allowed[0])
    if value not in allowed:
        raise ExitServeError(f"{name} {value!r} is unknown; allowed: {', '.join(allowed)}.")
    return str(value)


def _default_policy(rules: ExitRules, options: Mapping[str, Any]) -> ExitPolicy:
    threshold, layer = options.get("exit_threshold"), options.get("exit_layer")
    mode = options.get("mode")
    if mode is None:
        mode = "fixed" if layer is not None else "confidence" if threshold is not None else "off"
    if mode == "off":
        return ExitPolicy.off()
    if mode in BY_CONFIDENCE:
        if threshold is None:
            raise ExitServeError(f"mode {mode!r} needs an exit threshold: --exit-threshold T.")
        return rules.policy_for({"exit_threshold": threshold, "exit_mode": mode})
    if mode == "fixed":
        if layer is None:
            raise ExitServeError("mode 'fixed' needs an exit layer: --exit-layer N.")
        return rules.policy_for({"exit_layer": layer})
    raise ExitServeError(f"mode {mode!r} is unknown; allowed: {', '.join(MODES)}.")


def options_of(vllm_config: Any) -> dict[str, Any]:
    """The server's own options, as they were given at the start."""
    return dict((vllm_config.additional_config or {}).get(KEY, {}))


def rules_from(vllm_config: Any) -> ExitRules:
    """The rules of the engine that `vllm_config` describes; raises like `make_rules`."""
    config = vllm_config.model_config.hf_config.to_dict()
    block = parse_multi_exit(config)
    return make_rules(config, block.exit_layers if block else (), options_of(vllm_config))
