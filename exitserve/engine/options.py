"""From vLLM's config to exit rules: the checkpoint's block and the server's own options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from exitserve.checkpoint.block import MultiExit, check_exit_layers, num_layers_of, parse_multi_exit
from exitserve.checkpoint.calibration import ALL, EXIT_ROWS, FREQUENT, Calibration, ModeCalibration
from exitserve.costs.drafting import Drafting, Drafts, assumed_acceptance, drafts_here
from exitserve.errors import ExitServeError, nearest
from exitserve.policy import (
    AUTO,
    BY_CONFIDENCE,
    EXACT,
    MODES,
    NEVER,
    NUM_DRAFTS,
    TRANSFERABLE,
    ExitPolicy,
    ExitRules,
    Mode,
    check_threshold,
)

KEY = "exitserve"
OPTIONS = (
    "exit_layers",
    "mode",
    "exit_threshold",
    "exit_layer",
    "eos_threshold",
    "exit_rows",
    "exits_up_to",
    "num_drafts",
)
QUANTISED = ("compressed-tensors", "gptq", "auto_gptq", "awq", "auto_awq")
"""Quantisation methods that exits were tried with."""
FIXED_SCALES = "activations quantised by scales that were fixed beforehand"
PROCESSOR = "exitserve.engine.hooks.rows_processor:RowsProcessor"
"""How vLLM's configuration names what follows the batch of runner V1."""
OWN_PROCESSORS = "exitserve.engine.hooks."
"""How the names begin of those that are ours, and change no logits."""
MOST_DRAFTS = 64
"""vLLM's rejection sampler takes 128."""
EARLY_EXIT: tuple[Mode, ...] = ("off", "confidence", "fixed")
DRAFTING: tuple[Mode, ...] = ("off", *EXACT)
"""The modes that requests may ask for, by how the server's passes run: rows leave early, or the
first layers draft. The server's own mode decides it."""


def has_fixed_activation_scales(quantisation: Any) -> bool:
    """Whether a checkpoint's `quantization_config` (compressed-tensors) brings scales along.

    Weights of keys and values are read by projecting identity matrices, and these scales would
    round them.
    """
    groups = quantisation.get("config_groups") if isinstance(quantisation, Mapping) else None
    inputs = [group.get("input_activations") for group in (groups or {}).values()]
    return any(one is not None and not one.get("dynamic") for one in inputs)


def make_rules(
    config: Mapping[str, Any], options: Mapping[str, Any], *, transfers: bool = False
) -> ExitRules:
    """Checks server options against a model and returns its rules.

    Args:
        config: the checkpoint's `config.json`.
        options: any of `OPTIONS`; `exit_layers` replaces those that the checkpoint declares.
        transfers: whether a KV connector carries keys and values from and to other servers.

    Raises:
        ExitServeError: an option is unknown, malformed, or does not fit the model.
    """
    for name in options:
        if name not in OPTIONS:
            raise ExitServeError(f"unknown exitserve option {name!r}.{nearest(name, OPTIONS)}")
    block = parse_multi_exit(config) or MultiExit(exit_layers=())
    num_layers = num_layers_of(config)
    layers = options.get("exit_layers")
    exit_layers = check_exit_layers(block.exit_layers if layers is None else layers, num_layers)
    rules, promised = _rules_at(exit_layers, config, options, block)
    default = _default_policy(rules, options, promised)
    mode = options.get("mode") or default.mode
    num_drafts, exits_up_to = _num_drafts(options, mode, exit_layers), _exits_up_to(options, mode)
    if num_drafts:  # by the layers up to the first exit that has a threshold
        used = [one for one in exit_layers if default.thresholds_at(one)[0] < NEVER]
        rules, _ = _rules_at(tuple(used[:1]) or exit_layers[:1], config, options, block)
    rules = replace(
        rules,
        default=default,
        modes=DRAFTING if num_drafts else EARLY_EXIT,
        num_drafts=num_drafts,
        exits_up_to=exits_up_to,
    )
    return _transferring(rules) if transfers else rules


def _rules_at(
    exit_layers: tuple[int, ...],
    config: Mapping[str, Any],
    options: Mapping[str, Any],
    block: MultiExit,
) -> tuple[ExitRules, list[str]]:
    """Rules with these exit layers, by which every mode could be served, and the modes whose
    calibration holds."""
    eos, num_layers = options.get("eos_threshold"), num_layers_of(config)
    wanted = options.get("exit_rows", FREQUENT)
    if wanted not in EXIT_ROWS:
        raise ExitServeError(f"exit_rows must be {' or '.join(EXIT_ROWS)}, not {wanted!r}.")
    rows_file = None if wanted == ALL else block.rows_file
    found = block.calibration
    other_rows = found is not None and found.exit_rows != (ALL if rows_file is None else FREQUENT)
    calibration, promised = _as_served(
        found, exit_layers, num_layers, void=eos is not None or other_rows
    )
    rules = ExitRules(
        modes=MODES,
        num_layers=num_layers,
        exit_layers=exit_layers,
        eos_threshold=None if eos is None else check_threshold(eos, "eos_threshold"),
        criterion=block.criterion,
        rows_file=rows_file,
        calibration=calibration,
    )
    return rules, promised


def _transferring(rules: ExitRules) -> ExitRules:
    """The rules beside a KV connector."""
    if rules.default.mode not in TRANSFERABLE:
        mode = f"--mode {rules.default.mode}" if rules.default.mode != "fixed" else "--exit-layer"
        raise ExitServeError(
            "KV transfer (--kv-transfer-config, --kv-offloading-size) is not supported where "
            f"tokens exit ({mode}): other servers would take approximate keys and values, or those "
            "still to be computed, for full depth's. To go on, add --mode off or --mode verify."
        )
    return replace(
        rules, modes=tuple(one for one in rules.modes if one in TRANSFERABLE), transfers=True
    )


def _num_drafts(options: Mapping[str, Any], mode: str, exit_layers: tuple[int, ...]) -> int:
    """How many tokens requests may draft at a time: any only on servers that draft."""
    given = options.get("num_drafts")
    if mode not in EXACT:
        if given is not None:
            raise ExitServeError(
                f"num_drafts belongs to modes 'verify' and 'defer', not {mode!r}; add --mode "
                "verify or --mode defer."
            )
        return 0
    if not exit_layers:
        raise ExitServeError(
            f"mode '{mode}' drafts at exit layers, and this model declares none; "
            "name some, for example --exit-layers 4,8."
        )
    count = NUM_DRAFTS if given is None else given
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= MOST_DRAFTS:
        raise ExitServeError(
            f"num_drafts must be a whole number from 1 to {MOST_DRAFTS}, not {count!r}."
        )
    return count


def _exits_up_to(options: Mapping[str, Any], mode: str) -> int | None:
    most = options.get("exits_up_to")
    if most is None:
        return None
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ExitServeError(f"exits_up_to must be a whole number of at least 1, not {most!r}.")
    if mode in EXACT:
        raise ExitServeError(
            f"exits_up_to belongs to exits that skip layers, not to mode {mode!r}, which drafts as "
            "many tokens as pay for the size of the batch; leave it out, or add --mode confidence."
        )
    return most


def _default_policy(
    rules: ExitRules, options: Mapping[str, Any], promised: Sequence[str]
) -> ExitPolicy:
    """What requests get that ask for nothing; `promised`: modes whose calibration holds."""
    threshold, layer = options.get("exit_threshold"), options.get("exit_layer")
    mode = options.get("mode")
    if threshold is None and layer is None and promised:
        served = [one for one in promised if one in rules.modes]
        if mode is None and served:
            mode, threshold = served[0], AUTO
        elif mode == "verify" or mode in promised:
            threshold = AUTO
    if mode is None:
        mode = "fixed" if layer is not None else "confidence" if threshold is not None else "off"
        if threshold == AUTO and rules.calibrated is not None:
            mode = rules.calibrated.mode
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


def _as_served(
    found: Calibration | None, exit_layers: tuple[int, ...], num_layers: int, *, void: bool
) -> tuple[Calibration | None, list[str]]:
    """The calibration under the server's options, and the modes whose promise holds; `void` where
    options change who exits, other than by thresholds."""
    if found is None:
        return None, []
    void = void or found.num_layers != num_layers
    promised = [] if void else [m for m, one in found.by_mode().items() if _fits(one, exit_layers)]
    own = found if found.mode in promised else found.void(exit_layers)
    others = tuple(
        one if one.mode in promised else one.void(exit_layers) for one in found.other_modes
    )
    return replace(own, other_modes=others), promised


def _fits(found: ModeCalibration, exit_layers: tuple[int, ...]) -> bool:
    """Whether the same tokens exit where only these exit layers are served.

    Where keys and values are exact, the deepest exits may be left out: those below see the same
    states, and the same tokens exit there. Without a lower one, others would exit further up.
    """
    used = sorted({one for point in (*found.points, found.chosen) for one in point.thresholds})
    kept = [layer for layer in used if layer in exit_layers]
    return kept == used or (found.mode in EXACT and bool(kept) and kept == used[: len(kept)])


class Gpu(NamedTuple):
    """The GPU that vLLM uses, by NVML: PyTorch would initialise CUDA in the process that asks,
    which starts those of engines."""

    name: str
    memory_bytes: int


def gpu() -> Gpu | None:
    """None on a CPU."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return None
    return Gpu(current_platform.get_device_name(), current_platform.get_device_total_memory())


def drafts_of(config: Mapping[str, Any], rules: ExitRules, given: int | None) -> Drafts:
    """How many tokens are drafted at a time: as many as the user said, else as many as pay, where
    costs are known."""
    (layer,) = rules.exit_layers
    known = {} if rules.calibration is None else rules.calibration.agreement_at
    acceptance = known.get(layer, assumed_acceptance(layer, rules.num_layers))
    way = Drafting(exit_layer=layer, drafts=rules.num_drafts, checks=rules.default.mode == "defer")
    if given is not None:
        return Drafts(way, acceptance)
    card = gpu()
    return drafts_here(config, way, acceptance, None if card is None else card.name)


def drafts_from(vllm_config: Any) -> Drafts:
    """`drafts_of` the engine that `vllm_config` describes."""
    given = options_of(vllm_config).get("num_drafts")
    config = vllm_config.model_config.hf_config.to_dict()
    return drafts_of(config, rules_from(vllm_config), given)


def options_of(vllm_config: Any) -> dict[str, Any]:
    """The server's own options, as they were given at the start."""
    return dict((vllm_config.additional_config or {}).get(KEY, {}))


def rules_from(vllm_config: Any) -> ExitRules:
    """The rules of the engine that `vllm_config` describes; raises like `make_rules`."""
    rules = make_rules(
        vllm_config.model_config.hf_config.to_dict(),
        options_of(vllm_config),
        transfers=vllm_config.kv_transfer_config is not None,
    )
    processors = vllm_config.model_config.logits_processors or []
    others = [one for one in processors if not str(one).startswith(OWN_PROCESSORS)]
    return replace(rules, logits_processors=bool(others))
