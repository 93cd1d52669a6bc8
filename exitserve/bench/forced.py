"""Engines of random weights whose checks and drafts succeed by lot.

Random weights are never confident, and drafts from a lower layer are never what full depth says.
To time the modes all the same, an engine may be told how often checks pass and drafts are
accepted. All work is done as ever; only its outcome is replaced. The engine itself knows nothing
of this: it is started with another model class (`exitserve.bench.forced_model`). Where the first
layers draft (modes "verify" and "defer"), vLLM's rejection sampler accepts by lot instead, which it
does in runner V2 only.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exitserve.engine.hooks.plugin import register_model
from exitserve.engine.launch import prepare_environment, runs_on_v2, start_engine
from exitserve.errors import ExitServeError
from exitserve.policy import EXACT, NUM_DRAFTS

KEY = "exitserve_forced"
"""Names the shares in vLLM's `additional_config`, and the plugin that registers the class."""
LOCATION = "exitserve.bench.forced_model:ForcedLlamaForCausalLM"


def start_forced_engine(
    model_dir: Path | str,
    shares: Mapping[str, float],
    *,
    exits: Mapping[str, Any] | None = None,
    **llm: Any,
) -> Any:
    """Starts an engine as `start_engine` does, with the outcome of checks drawn by lot.

    Args:
        model_dir: a Llama shape of random weights.
        shares: `confidence` of checks that pass, `acceptance` of drafts that are accepted.
        exits: see `start_engine`.
        llm: see `start_engine`.

    Raises:
        ExitServeError: see `check_forced`.
    """
    check_forced((exits or {}).get("mode"))
    plugins = os.environ.get("VLLM_PLUGINS", "").split(",")
    # Naming a plugin there turns the variable into an allow list, which `start_engine` extends.
    os.environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*filter(None, plugins), KEY]))
    register()  # vLLM loads plugins once a process, and another engine may have started in this one
    forced: dict[str, Any] = {
        "hf_overrides": {"architectures": [LOCATION.rpartition(":")[2]]},
        "additional_config": {KEY: dict(shares)},
    }
    prepare_environment()
    if (exits or {}).get("mode") in EXACT:
        drafts = (exits or {}).get("num_drafts") or NUM_DRAFTS
        exits = {**(exits or {}), "num_drafts": drafts}
        accepted = [shares["acceptance"] ** (count + 1) for count in range(drafts)]
        forced["speculative_config"] = {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": accepted,
            "num_speculative_tokens_per_batch_size": None,
        }
    return start_engine(model_dir, exits=exits, **forced, **llm)


def check_forced(*modes: str | None) -> None:
    """Raises `ExitServeError` if drafts cannot be accepted by lot on this machine."""
    if not runs_on_v2() and (drafting := [one for one in modes if one in EXACT]):
        raise ExitServeError(
            f"mode {drafting[0]!r} cannot be forced on a CPU, where vLLM accepts no drafts by lot; "
            "allowed: confidence and fixed. Measure drafts on a trained checkpoint, or on a GPU."
        )


def register() -> None:
    """Registers the class; vLLM calls this in its processes where the plugin is named."""
    register_model(LOCATION)
