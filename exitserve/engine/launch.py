"""How an engine with exits is started: the vLLM options that select our parts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from exitserve.checkpoint.block import read_config
from exitserve.checkpoint.weights import check_weights
from exitserve.engine.hooks.plugin import architectures, class_name
from exitserve.engine.options import KEY, PROCESSOR, drafts_of, make_rules, rules_from
from exitserve.errors import ExitServeError, install
from exitserve.policy import ExitRules

DEFAULT_CPU_CACHE_GIB = "1"
EXPERIMENTAL = (
    "exitserve: on GPUs this is experimental: it has run on one card for minutes. docs/gpu.md says "
    "what is known, and how to check it on yours."
)
DIED = (" died ", "See root cause above")
"""In vLLM's words: one of several processes did, and has written why (`vllm/v1/utils.py`)."""
IN_ENGINE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The executor that runs a worker in its engine's process; vLLM's name for it, "uni", it changes
on a CPU (`vllm/platforms/cpu.py`)."""
FEW_CPUS = 4
"""Two were measured."""
RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
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
    check_weights(Path(model_dir))
    if rules.rows_file is not None and rules.exit_layers:
        from exitserve.checkpoint.exit_rows import load_exit_rows

        load_exit_rows(model_dir, rules.rows_file, revision)
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
    check_rules(model_dir, given, revision)
    return {
        "hf_overrides": {"architectures": [architecture]},
        "logits_processors": [PROCESSOR],
        "worker_extension_cls": "exitserve.engine.hooks.worker_extension.ExitWorkerExtension",
        "scheduler_cls": "exitserve.engine.hooks.scheduler.ExitScheduler",
        "additional_config": {KEY: given},
    }


MISREAD = ("eagle-", "eagle3", "dflash", "dspark")
"""In the name of a draft model, vLLM takes these for another kind of drafts."""


def drafting_options(
    model_dir: Path | str, rules: ExitRules, given: int | None, revision: str | None
) -> dict[str, Any]:
    """vLLM engine arguments of a model whose first layers draft.

    To vLLM the checkpoint is its own draft model, which reserves cache slots and schedules drafts;
    our worker sees to it that no second model is loaded (`exitserve.engine.drafting.worker`).

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

    table = drafts_of(read_config(model_dir, revision), rules, given).by_batch()
    speculation: dict[str, Any] = {
        "method": "draft_model",
        "model": str(model_dir),
        "num_speculative_tokens": max(1, *(drafts for _, _, drafts in table)),
        "num_speculative_tokens_per_batch_size": table,
    }
    if revision is not None:
        speculation["revision"] = revision
    worker = "cpu_worker" if current_platform.is_cpu() else "gpu_worker"
    return {
        "worker_cls": f"exitserve.engine.hooks.{worker}.ExitWorker",
        "speculative_config": speculation,
    }


def prepare_environment() -> None:
    """Sets what vLLM reads from the environment, where the user has not.

    Raises:
        ExitServeError: vLLM is not installed, or kernels are asked for that cannot run here.
    """
    if find_spec("vllm") is None:
        raise ExitServeError(
            f"this command needs vLLM, which is not installed: {install('gpu')}, or on a CPU the "
            f"environment of requirements/cpu.txt (make setup)."
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


def executor_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM engine arguments that run a lone worker in its engine's process on a few CPU cores.

    vLLM would keep one core from the worker, for an engine that waits without sleeping. Of many
    cores that is a small share, and vLLM binds threads to them, so there its choice stands; also
    where the user has `given` an executor or ranks, or named cores in the environment.
    """
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import available_cpu_count

    chosen = given.get("distributed_executor_backend") is not None
    chosen |= max(given.get(name) or 1 for name in RANKS) > 1
    chosen |= "VLLM_CPU_NUM_OF_RESERVED_CPU" in os.environ
    chosen |= os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto") not in ("auto", "nobind")
    if chosen or not current_platform.is_cpu() or available_cpu_count() > FEW_CPUS:
        return {}
    return {"distributed_executor_backend": IN_ENGINE}


def runs_on_v2() -> bool:
    """Whether vLLM runs its runner V2: on GPUs, unless its switch says otherwise."""
    from vllm.platforms import current_platform

    return os.environ.get(RUNNER, "0" if current_platform.is_cpu() else "1") != "0"


def suit_runner(
    ours: dict[str, Any], model_dir: Path | str, revision: str | None = None
) -> dict[str, Any]:
    """Our engine options as the server's mode and vLLM's runner need them; after
    `prepare_environment`.

    Servers of the modes "verify" and "defer" draft with their first layers. On others the host
    decides who exits, or on a GPU, where vLLM runs its runner V2, the device. V2 schedules passes
    ahead, and checks requests by a class of its own kind.

    Raises:
        ExitServeError: the mode needs another runner.
    """
    from vllm.platforms import current_platform

    options, suited, on_v2 = ours["additional_config"][KEY], dict(ours), runs_on_v2()
    rules = check_rules(model_dir, options, revision)
    if on_v2:
        os.environ[RUNNER] = "1"
        suited["logits_processors"] = ["exitserve.engine.hooks.request_check:RequestCheck"]
        suited["scheduler_cls"] = "exitserve.engine.hooks.scheduler.AsyncExitScheduler"
        if not current_platform.is_cpu():
            print(EXPERIMENTAL, file=sys.stderr)
    if rules.num_drafts:
        if not on_v2 and not current_platform.is_cpu():
            raise ExitServeError(
                f"mode {rules.default.mode!r} needs vLLM's runner V2 on a GPU: unset {RUNNER}, or "
                "add --mode confidence."
            )
        return suited | drafting_options(model_dir, rules, options.get("num_drafts"), revision)
    if on_v2:
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
        llm: any argument of `vllm.LLM`; mappings are laid over ours key by key, and lists joined.

    Returns:
        The `vllm.LLM`. Per-request fields go into `SamplingParams.extra_args`; `exit_trace` is
        a list of strings there, keys for `ExitWorkerExtension.exit_take_traces`.
    """
    revision = llm.get("revision")
    arguments = engine_options(model_dir, exits or {}, revision)
    prepare_environment()
    arguments = suit_runner(arguments, model_dir, revision)
    from vllm import LLM

    engine = LLM(model=str(model_dir), **laid_over(arguments | executor_options(llm), llm))
    check_requests_by(engine)
    engine.collective_rpc("exit_attach")
    return engine


def check_requests_by(engine: Any) -> None:
    """Has this process check its requests by the rules of a `vllm.LLM` with exits."""
    from exitserve.engine.request import FieldCheck

    FieldCheck.rules = rules_from(engine.llm_engine.vllm_config)


def stop_engine(engine: Any) -> None:
    """Ends the processes of a `vllm.LLM`.

    vLLM kills those that take long, and raises if one ends by itself just then
    (`vllm/utils/system_utils.py`, `kill_process_tree`).
    """
    from psutil import NoSuchProcess

    with suppress(NoSuchProcess):
        engine.llm_engine.engine_core.shutdown()


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments `above` over those `below`; mappings and lists in both are joined."""
    joined = {**below, **above}
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            joined[name] = {**below[name], **value}
        if isinstance(value, list) and isinstance(below.get(name), list):
            joined[name] = [*value, *below[name]]
    return joined


def start_plain_engine(model_dir: Path | str, **llm: Any) -> Any:
    """Starts an in-process `vllm.LLM` with nothing of ours but `executor_options` and plugin, as
    comparisons need it: their baseline has the same cores, and as much room for frames."""
    from vllm import LLM

    return LLM(model=str(model_dir), **(executor_options(llm) | llm))


def greedy_params(max_tokens: int, fields: Mapping[str, Any] | None = None) -> Any:
    """`vllm.SamplingParams` for exactly `max_tokens` greedy tokens, with per-request fields."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args=dict(fields or {})
    )
