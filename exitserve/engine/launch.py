"""How an engine with exits is started: the vLLM options that select our parts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from exitserve.checkpoint import read_config
from exitserve.engine.hooks.plugin import architectures, class_name
from exitserve.engine.options import KEY, PROPOSER, RAILS, make_rules, rules_from
from exitserve.errors import ExitServeError
from exitserve.first_layers import config_overrides, cut_config
from exitserve.policy import EXACT, ExitRules
from exitserve.step_costs.drafting import Drafting, drafts_by_batch
from exitserve.step_costs.sources import step_costs

DEFAULT_CPU_CACHE_GIB = "1"
EXPERIMENTAL = (
    "exitserve: on GPUs this is experimental: it has run on one card for minutes. docs/gpu.md says "
    "what is known, and how to check it on yours."
)
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's switch between its model runners."""


def served_architecture(model_dir: Path | str, revision: str | None = None) -> str:
    """The class of ours that serves the checkpoint, of a hub id at a revision.

    Raises:
        ExitServeError: the directory is no checkpoint, or of an unsupported architecture.
    """
    config = read_config(model_dir, revision)
    names = config.get("architectures") or ["none named"]
    known = architectures()
    if names[0] not in known:
        raise ExitServeError(
            f"architecture {names[0]} of '{model_dir}' is not supported with exits; "
            f"supported: {', '.join(known)}. docs/adding-an-architecture.md adds another."
        )
    return class_name(known[names[0]])


def check_rules(
    model_dir: Path | str,
    options: Mapping[str, Any],
    revision: str | None = None,
    *,
    transfers: bool = False,
) -> ExitRules:
    """Checks the checkpoint's exits and server options before anything slow starts; see
    `make_rules`."""
    rules = make_rules(read_config(model_dir, revision), options, transfers=transfers)
    if rules.screens_file is not None and rules.exit_layers:
        from exitserve.screens import load_screens

        load_screens(model_dir, rules.screens_file, rules.exit_layers, revision)
    return rules


def engine_options(
    model_dir: Path | str, options: Mapping[str, Any], revision: str | None = None
) -> dict[str, Any]:
    """vLLM engine arguments that serve `model_dir` with exits.

    Args:
        model_dir: the checkpoint.
        options: server defaults, see `exitserve.engine.options.OPTIONS`; None means not given.
        revision: of a hub id; it is not among the arguments returned.

    Raises:
        ExitServeError: the checkpoint or an option does not fit.
    """
    given = {name: value for name, value in options.items() if value is not None}
    architecture = served_architecture(model_dir, revision)
    rules = check_rules(model_dir, given, revision)
    depth = config_overrides(read_config(model_dir, revision), rules.num_layers)
    arguments: dict[str, Any] = {
        "hf_overrides": {"architectures": [architecture], **depth},
        "logits_processors": ["exitserve.engine.hooks.rows_processor:RowsProcessor"],
        "worker_extension_cls": "exitserve.engine.hooks.worker_extension.ExitWorkerExtension",
        "scheduler_cls": "exitserve.engine.hooks.scheduler.ExitScheduler",
        "additional_config": {KEY: given},
    }
    if rules.num_drafts:
        arguments["speculative_config"] = {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": rules.num_drafts,
        }
    return arguments


MISREAD = ("eagle-", "eagle3", "dflash", "dspark")
"""In the name of a draft model, vLLM takes these for another kind of drafts."""


def rails_options(
    model_dir: Path | str, rules: ExitRules, given: int | None, revision: str | None
) -> dict[str, Any]:
    """vLLM engine arguments of a model whose first layers draft, beside those of runner V2.

    To vLLM the checkpoint is its own draft model, which reserves cache slots and schedules drafts;
    our worker sees to it that no second model is loaded (`exitserve.engine.rails.worker`).

    Args:
        model_dir: the checkpoint.
        rules: the server's.
        given: drafts a step, if the user said so; else as many as pay, by the size of the batch.
        revision: of a hub id.

    Raises:
        ExitServeError: vLLM would read something else into the checkpoint's name.
    """
    from vllm.platforms import current_platform

    for word in MISREAD:
        if word in str(model_dir).lower():
            raise ExitServeError(
                f"'{model_dir}' has {word!r} in its name, by which vLLM takes it for another kind "
                f"of draft model; serve it from a folder of another name."
            )

    speculation: dict[str, Any] = {
        "method": "draft_model",
        "model": str(model_dir),
        "num_speculative_tokens": rules.num_drafts,
    }
    if revision is not None:
        speculation["revision"] = revision
    config = cut_config(read_config(model_dir, revision), rules.num_layers)
    if given is None and (by_batch := paying_drafts(config, rules)):
        speculation["num_speculative_tokens_per_batch_size"] = by_batch
    worker = "cpu_worker" if current_platform.is_cpu() else "gpu_worker"
    return {
        "worker_cls": f"exitserve.engine.hooks.{worker}.ExitWorker",
        "speculative_config": speculation,
    }


MOST_ROWS = 1024
"""Of a batch, for which drafts are planned."""
ASSUMED_ACCEPTANCE = 0.7
"""Of a draft, where no calibration has counted it."""


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


def paying_drafts(config: Mapping[str, Any], rules: ExitRules) -> list[tuple[int, int, int]] | None:
    """How many drafts pay on this GPU, by batch size; None where its figures are not known."""
    from exitserve.step_costs.devices import device_called

    found = gpu()
    device = None if found is None else device_called(found.name)
    if device is None:
        return None
    try:
        costs = step_costs(config, dtype="bfloat16", batch_sizes=(MOST_ROWS,), device=device).costs
    except ExitServeError:  # of a shape that is not planned, such as a mixture of experts
        return None
    (layer,) = rules.exit_layers
    known = {} if rules.calibration is None else rules.calibration.agreement_at
    acceptance = known.get(layer, ASSUMED_ACCEPTANCE)
    way = Drafting(exit_layer=layer, drafts=0, checks=rules.default.mode == "defer")
    return drafts_by_batch(costs, MOST_ROWS, way, acceptance, rules.num_drafts)


def prepare_environment() -> None:
    """Sets what vLLM reads from the environment, where the user has not.

    Raises:
        ExitServeError: vLLM is not installed, or kernels are asked for that cannot run here.
    """
    if find_spec("vllm") is None:
        raise ExitServeError(
            "this command needs vLLM, which is not installed: pip install 'exitserve[gpu]', "
            "or on a CPU the environment of requirements/cpu.txt (make setup)."
        )
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", DEFAULT_CPU_CACHE_GIB)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    plugins = os.environ.get("VLLM_PLUGINS")
    # Naming a plugin in VLLM_PLUGINS turns that variable into an allow list.
    names = plugins.split(",") if plugins else []
    if "exitserve" not in names:
        os.environ["VLLM_PLUGINS"] = ",".join([*names, "exitserve"])
    import torch
    from vllm.platforms import current_platform  # reads the variables above

    from exitserve_kernels import dispatch

    try:
        dispatch.choose("exit_check", torch.device(current_platform.device_type))
    except ValueError as error:
        raise ExitServeError(str(error)) from None
    if current_platform.is_cpu():
        # vLLM 0.32 saves ahead-of-time compiled code on a CPU, but fails to load it ("no attribute
        # 'finalize_loading'") and compiles anew. Without it, a start finds Inductor's own cache.
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")


def runs_on_v2() -> bool:
    """Whether vLLM runs its runner V2: on GPUs, unless its switch says otherwise."""
    from vllm.platforms import current_platform

    return os.environ.get(RUNNER, "0" if current_platform.is_cpu() else "1") != "0"


EXECUTOR = "exitserve.engine.hooks.executor.ExitExecutor"


def executor_option() -> dict[str, Any]:
    """vLLM's engine argument that names our executor, where vLLM would use the one behind it."""
    from vllm import envs
    from vllm.platforms import current_platform

    in_processes = current_platform.is_cpu() and envs.VLLM_ENABLE_V1_MULTIPROCESSING
    return {"distributed_executor_backend": EXECUTOR} if in_processes else {}


def suit_runner(
    ours: dict[str, Any], model_dir: Path | str, revision: str | None = None
) -> dict[str, Any]:
    """Our engine options as vLLM's runner needs them; after `prepare_environment`.

    On a GPU vLLM runs its runner V2, which schedules passes ahead, and requests are checked by a
    class of V2's kind. Servers of the modes "verify" and "defer" draft with their first layers;
    on others the device decides who exits.

    Args:
        ours: from `engine_options`.
        model_dir: the checkpoint.
        revision: of a hub id.
    """
    options = ours["additional_config"][KEY]
    if not runs_on_v2():
        return ours | executor_option()
    os.environ[RUNNER] = "1"
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        print(EXPERIMENTAL, file=sys.stderr)
    wanted = check_rules(model_dir, options, revision).default.mode
    options = {**options, "exit_path": RAILS if wanted in EXACT else "device"}
    suited = {
        **ours,
        "additional_config": {KEY: options},
        "logits_processors": ["exitserve.engine.hooks.request_check:RequestCheck"],
        "scheduler_cls": "exitserve.engine.hooks.scheduler.AsyncExitScheduler",
    }
    suited.pop("speculative_config", None)
    if wanted in EXACT:
        rules = check_rules(model_dir, options, revision)
        return suited | rails_options(model_dir, rules, options.get("num_drafts"), revision)
    from exitserve.engine.layers.branches import can_branch_in_graphs

    if not can_branch_in_graphs():
        # Only pieces of a pass are captured then, and the host takes the branches.
        suited["compilation_config"] = {"cudagraph_mode": "PIECEWISE"}
    return suited


def start_engine(
    model_dir: Path | str, *, exits: Mapping[str, Any] | None = None, **llm: Any
) -> Any:
    """Starts an in-process `vllm.LLM` with exits.

    Args:
        model_dir: the checkpoint.
        exits: server defaults, see `exitserve.engine.options.OPTIONS`.
        llm: any argument of `vllm.LLM`; mappings are laid over ours key by key.

    Returns:
        The `vllm.LLM`. Per-request fields go into `SamplingParams.extra_args`; `exit_trace` is
        a list of strings there, keys for `take_traces`.
    """
    revision = llm.get("revision")
    arguments = engine_options(model_dir, exits or {}, revision)
    prepare_environment()
    arguments = suit_runner(arguments, model_dir, revision)
    from vllm import LLM

    from exitserve.engine.compat.config import accept_sampling_fields

    engine = LLM(model=str(model_dir), **laid_over(arguments, llm))
    check_requests_by(engine)
    accept_sampling_fields(engine.llm_engine.input_processor)
    engine.collective_rpc("exit_attach")
    return engine


def check_requests_by(engine: Any) -> None:
    """Has this process check its requests by the rules of a `vllm.LLM` with exits."""
    from exitserve.engine.hooks.rows_processor import RowsProcessor

    RowsProcessor.rules = rules_from(engine.llm_engine.vllm_config)


def stop_engine(engine: Any) -> None:
    """Ends the processes of a `vllm.LLM`.

    vLLM kills those that take long, and raises if one ends by itself just then
    (`vllm/utils/system_utils.py`, `kill_process_tree`).
    """
    from psutil import NoSuchProcess

    with suppress(NoSuchProcess):
        engine.llm_engine.engine_core.shutdown()


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments `above` over those `below`; mappings in both are joined."""
    joined = {**below, **above}
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            joined[name] = {**below[name], **value}
    return joined


def start_plain_engine(model_dir: Path | str, **llm: Any) -> Any:
    """Starts an in-process `vllm.LLM` without anything of ours: the baseline of comparisons."""
    from vllm import LLM

    return LLM(model=str(model_dir), **llm)


def greedy_params(max_tokens: int, fields: Mapping[str, Any] | None = None) -> Any:
    """`vllm.SamplingParams` for exactly `max_tokens` greedy tokens, with per-request fields."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        extra_args=dict(fields) if fields else None,
    )


def take_traces(engine: Any, key: str) -> dict[str, list[int]]:
    """Depth per generated token of the requests traced under `key`, by request id."""
    traces: dict[str, dict[int, int]] = engine.collective_rpc("exit_take_traces", args=(key,))[0]
    return {
        request_id: [depths[index] for index in sorted(depths)]
        for request_id, depths in traces.items()
    }
