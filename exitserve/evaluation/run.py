"""Runs an evaluation: tasks against a server, then the oracle on held-out text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exitserve.engine.launch import runs_on_v2
from exitserve.errors import ExitServeError
from exitserve.evaluation.acceptance import measure_drafts
from exitserve.evaluation.endpoint import Endpoint, check_fields, find_endpoint
from exitserve.evaluation.oracle import SettingQuality, depth_entries, measure_quality, rounded
from exitserve.evaluation.settings import EvalJob, TaskJob
from exitserve.policy import EXACT
from exitserve.progress import ShareProgress
from exitserve.reference import load_reference
from exitserve.report import machine, versions
from exitserve.server.local_server import LocalServer
from exitserve.windows import Window

if TYPE_CHECKING:
    # lm-eval, which it needs, may not be installed.
    from exitserve.evaluation.harness import TaskScore

NOT_TIMED: dict[str, Any] = {
    "batch_size": None,
    "tokens_per_second": None,
    "tpot_ms": None,
    "tokens_at_once": None,
    "wall_speedup": None,
    "load_wall_speedup": None,
    "limit_speedup": None,
    "efficiency": None,
}
"""Keys of a case of `exitserve bench` that need timed passes beside plain vLLM."""


def evaluate(
    job: EvalJob,
    windows: Sequence[Window],
    tasks: Mapping[str, Any],
    out: Path,
    progress: ShareProgress,
) -> dict[str, Any]:
    """Runs an evaluation.

    Args:
        job: what to evaluate.
        windows: of the job's documents.
        tasks: lm-eval's, by name; empty without `job.tasks`.
        out: for the log of a server that is started.
        progress: see `ShareProgress`.

    Returns:
        The report without its `schema_version`; see docs/eval.md for the keys.

    Raises:
        ExitServeError: the server is not the right one, or it or a task fails.
    """
    steps = len(tasks) * len(job.settings) + 2 * len(windows)
    done = 0

    def passed(doing: str) -> None:
        nonlocal done
        done += 1
        progress(doing, done / steps)

    scores: dict[str, list[TaskScore]] = {setting.label: [] for setting in job.settings}
    if job.tasks is not None:
        from exitserve.evaluation.harness import run_tasks

        progress("asking the server" if job.tasks.endpoint else "starting a server", 0.0)
        with _server(job, job.tasks, out) as endpoint:
            for setting, score in run_tasks(
                tasks, job.settings, job.tasks, endpoint, str(job.directory)
            ):
                scores[setting.label].append(score)
                passed(f"{score.task}: {setting.label}")
    progress("loading the model in float32", done / steps)
    reference = load_reference(str(job.directory), exit_checks=job.exit_checks, device="auto")
    found = measure_quality(
        reference,
        windows,
        job.prompt_tokens,
        job.settings,
        lambda: passed("held-out text, every setting"),
    )
    drafting = measure_drafts(
        reference, windows, job.prompt_tokens, lambda: passed("held-out text, drafts")
    )
    return _report(job, windows, found, scores) | {"drafting": drafting}


def _report(
    job: EvalJob,
    windows: Sequence[Window],
    found: Sequence[SettingQuality],
    scores: Mapping[str, Sequence[TaskScore]],
) -> dict[str, Any]:
    full = found[0].whole.perplexity
    cases = [
        case_of(quality, scores[quality.setting.label], full, job.rules.exit_layers)
        for quality in found
    ]
    for case in cases:
        add_retention(case, cases[0])
    return {
        "kind": "evaluation",
        "model": job.model,
        "synthetic": False,
        "machine": machine(),
        "versions": versions(),
        "settings": _settings_block(job, windows),
        "minimum_retention": least_retained(cases),
        "notes": notes_on(cases),
        "cases": cases,
    }


def check_server(job: EvalJob) -> None:
    """Checks the server of `--endpoint`, or of one to be started its modes.

    Raises:
        ExitServeError: it is not the right one, or refuses a setting.
    """
    if job.tasks is None:
        return
    if job.tasks.endpoint is None:
        _mode_options(job)
    else:
        endpoint = find_endpoint(job.tasks.endpoint, job.model, job.rules)
        check_fields(endpoint, (setting.fields for setting in job.settings))


@contextmanager
def _server(job: EvalJob, tasks: TaskJob, out: Path) -> Iterator[Endpoint]:
    """The server of `--endpoint`, or one that is started and runs as long as the context."""
    if tasks.endpoint is not None:
        yield find_endpoint(tasks.endpoint, job.model, job.rules)
        return
    # Quality is that of the exits, whether they pay on this machine or not.
    options = [*tasks.server_options, "--exit-checks", job.exit_checks, *_mode_options(job)]
    with LocalServer(job.directory, *options, log=out / "server.log") as server:
        yield find_endpoint(server.url, str(job.directory), job.rules)


def _mode_options(job: EvalJob) -> list[str]:
    """Options of a server that has the modes of all settings.

    Raises:
        ExitServeError: none has: on a GPU it drafts with its first layers, or tokens exit.
    """
    wanted = {setting.policy.mode for setting in job.settings}
    starts = [mode for mode in EXACT if mode in wanted and (mode == "verify" or runs_on_v2())]
    if not starts:
        return []
    if runs_on_v2() and "confidence" in wanted:
        raise ExitServeError(
            "on a GPU a server has mode confidence, or the modes defer and verify: with --tasks "
            "give --modes of one kind, and run the command once for each."
        )
    # The threshold is only its default; every request sends its own.
    return ["--mode", starts[-1], "--exit-threshold", "0.5"]


def case_of(
    quality: SettingQuality,
    scores: Sequence[TaskScore],
    full_perplexity: float | None,
    exit_layers: Sequence[int],
) -> dict[str, Any]:
    """One entry of the report's `cases`: the keys of `exitserve bench`, then further ones."""
    whole, full = quality.whole, max(quality.by_depth)
    policy = quality.setting.policy
    verifies = policy.mode == "verify"
    perplexity = whole.perplexity
    return {
        **NOT_TIMED,
        "mode": policy.mode,
        "rival": None,
        "exit_threshold": quality.setting.exit_threshold,
        "exit_layer": None,
        "exit_share": None,
        "actual_exit_share": None,
        "mean_depth": rounded(quality.mean_depth),
        # Only a server can count the layers that it runs for rejected drafts.
        "mean_layers_run": None
        if verifies
        else rounded(float(full) if policy.mode == "defer" else quality.mean_depth),
        "depth_speedup": rounded(full / quality.mean_depth),
        "agreement": rounded(whole.agreement),
        "perplexity": rounded(perplexity),
        "drafted": quality.drafted if verifies else None,
        "accepted": quality.accepted if verifies else None,
        "exit_layers": {str(depth): tally.tokens for depth, tally in quality.by_depth.items()},
        "perplexity_retention": None
        if perplexity is None or full_perplexity is None
        else rounded(full_perplexity / perplexity),
        "thresholds": {str(layer): _finite(policy.thresholds_at(layer)[0]) for layer in exit_layers}
        if policy.mode != "off"
        else {},
        "by_depth": depth_entries(quality),
        "tasks": {score.task: _task_of(score, full) for score in scores},
    }


def _finite(value: float) -> float | None:
    return None if value == float("inf") else value


def _task_of(score: TaskScore, full: int) -> dict[str, Any]:
    """A task under one setting; its first metric is the score."""
    name, first = next(iter(score.metrics.items()))
    depths = score.depths
    mean = sum(depths) / len(depths) if depths else None
    return {
        "metric": name,
        "score": rounded(first["value"]),
        "stderr": rounded(first["stderr"]),
        "higher_is_better": first["higher_is_better"],
        "retention": None,
        "samples": score.samples,
        "tokens": len(depths),
        "mean_depth": rounded(mean),
        "depth_speedup": None if mean is None else rounded(full / mean),
        "exit_layers": {str(depth): depths.count(depth) for depth in sorted(set(depths))},
        "metrics": {
            key: {**metric, "value": rounded(metric["value"]), "stderr": rounded(metric["stderr"])}
            for key, metric in score.metrics.items()
        },
    }


def retention(score: float, full: float, *, higher_is_better: bool) -> float | None:
    """A score as a share of full depth's; None where that would divide by zero."""
    part, whole = (score, full) if higher_is_better else (full, score)
    return rounded(part / whole) if whole else None


def add_retention(case: dict[str, Any], full: Mapping[str, Any]) -> None:
    """Fills in `retention` of a case's tasks."""
    for name, task in case["tasks"].items():
        task["retention"] = retention(
            task["score"], full["tasks"][name]["score"], higher_is_better=task["higher_is_better"]
        )


def least_retained(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The least retention over tasks and settings; None where no task has one."""
    found = [
        {
            "retention": task["retention"],
            "task": name,
            "mode": case["mode"],
            "exit_threshold": case["exit_threshold"],
        }
        for case in cases[1:]
        for name, task in case["tasks"].items()
        if task["retention"] is not None
    ]
    return min(found, key=lambda one: one["retention"], default=None)


def _settings_block(job: EvalJob, windows: Sequence[Window]) -> dict[str, Any]:
    tasks = job.tasks
    return {
        "num_layers": job.rules.num_layers,
        "exit_layers": list(job.rules.exit_layers),
        "exit_checks": job.exit_checks,
        "criterion": job.rules.criterion,
        "data": job.documents.provenance(),
        "windows": len(windows),
        "window_tokens": job.window,
        "prompt_tokens": job.prompt_tokens,
        "decode_tokens": len(windows) * (job.window - job.prompt_tokens - 1),
        "seed": job.seed,
        "tasks": None
        if tasks is None
        else {
            "lm_eval": version("lm_eval"),
            "names": list(tasks.names),
            "limit": tasks.limit,
            "concurrency": tasks.concurrency,
            "chat_template": tasks.chat,
            "server": "started here" if tasks.endpoint is None else tasks.endpoint,
            "server_options": list(tasks.server_options),
        },
    }


def notes_on(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Warnings about scores that a reader should not take at face value."""
    notes = []
    for name, full in cases[0]["tasks"].items():
        others = [case["tasks"][name] for case in cases[1:]]
        if not full["tokens"]:
            notes.append(
                f"{name}: answers of one token come from the prompt pass, at full depth. Nothing "
                f"of this task can exit."
            )
        if not full["score"]:
            notes.append(f"{name}: full depth's score is 0, so there is nothing to retain.")
        moved = max((abs(one["score"] - full["score"]) for one in others), default=0.0)
        if full["stderr"] is not None and 0 < moved < 2 * full["stderr"]:
            notes.append(
                f"{name}: scores differ by at most {moved:.3f}, less than two standard errors "
                f"({2 * full['stderr']:.3f}) of a score by itself: too few samples "
                f"({full['samples']}) to tell what exits cost."
            )
    return notes
