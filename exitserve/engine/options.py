"""From vLLM's config to exit rules: the checkpoint's block and the server's own options."""

from __future__ import annotations

from typing import Any

from exitserve.checkpoint import check_exit_layers, parse_multi_exit
from exitserve.errors import ExitServeError, nearest
from exitserve.policy import ExitPolicy, ExitRules, check_threshold

KEY = "exitserve"
OPTIONS = ("exit_layers", "mode", "exit_threshold", "exit_layer", "eos_threshold")


def make_rules(
    num_layers: int, declared_layers: tuple[int, ...], options: dict[str, Any]
) -> ExitRules:
    """Checks server options against a model and returns its rules.

    Args:
        num_layers: L.
        declared_layers: the checkpoint's own exit layers.
        options: any of `OPTIONS`; `exit_layers` replaces the declared ones.

    Raises:
        ExitServeError: an option is unknown, malformed, or does not fit the model.
    """
    for name in options:
        if name not in OPTIONS:
            raise ExitServeError(f"unknown exitserve option {name!r}.{nearest(name, OPTIONS)}")
    layers = options.get("exit_layers")
    exit_layers = check_exit_layers(declared_layers if layers is None else layers, num_layers)
    eos = options.get("eos_threshold")
    eos_threshold = None if eos is None else check_threshold(eos, "eos_threshold")
    rules = ExitRules(num_layers=num_layers, exit_layers=exit_layers, eos_threshold=eos_threshold)
    return ExitRules(
        num_layers=num_layers,
        exit_layers=exit_layers,
        default=_default_policy(rules, options),
        eos_threshold=eos_threshold,
    )


def _default_policy(rules: ExitRules, options: dict[str, Any]) -> ExitPolicy:
    threshold, layer = options.get("exit_threshold"), options.get("exit_layer")
    mode = options.get("mode")
    if mode is None:
        mode = "fixed" if layer is not None else "confidence" if threshold is not None else "off"
    if mode == "off":
        return ExitPolicy.off()
    if mode == "confidence":
        if threshold is None:
            raise ExitServeError("mode 'confidence' needs an exit threshold: --exit-threshold T.")
        return rules.policy_for({"exit_threshold": threshold})
    if mode == "fixed":
        if layer is None:
            raise ExitServeError("mode 'fixed' needs an exit layer: --exit-layer N.")
        return rules.policy_for({"exit_layer": layer})
    raise ExitServeError(f"mode {mode!r} is unknown; allowed: off, confidence, fixed.")


def rules_from(vllm_config: Any) -> ExitRules:
    """The rules of the engine that `vllm_config` describes; raises like `make_rules`."""
    hf_config = vllm_config.model_config.hf_config
    block = parse_multi_exit({"multi_exit": getattr(hf_config, "multi_exit", None)})
    options = dict((vllm_config.additional_config or {}).get(KEY, {}))
    return make_rules(hf_config.num_hidden_layers, block.exit_layers if block else (), options)
