"""Runs an evaluation: the oracle on held-out text, and on a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from exitserve.checkpoint.files import replace_file
from exitserve.evaluation.acceptance import measure_drafts
from exitserve.evaluation.oracle import SettingQuality, depth_entries, measure_quality
from exitserve.evaluation.settings import SEED, TRACED_TOKENS, EvalJob
from exitserve.evaluation.trace import Trace, traced_tokens
from exitserve.policy import finite
from exitserve.reference import Reference
from exitserve.reporting.report import machine, rounded, versions
from exitserve.settings import Setting
from exitserve.windows import Window


def evaluate(
    job: EvalJob,
    reference: Reference,
    windows: Sequence[Window],
    progress: Callable[[str, float], None],
) -> dict[str, Any]:
    """Measures quality on held-out text.

    Returns:
        The report without its `schema_version`; see docs/eval.md for the keys.
    """
    done = 0

    def passed(doing: str) -> None:
        nonlocal done
        done += 1
        progress(doing, done / (2 * len(windows)))

    found = measure_quality(
        reference,
        windows,
        job.prompt_tokens,
        job.policies,
        lambda: passed("held-out text, every setting"),
    )
    drafting = measure_drafts(
        reference, windows, job.prompt_tokens, lambda: passed("held-out text, drafts")
    )
    return _report(job, windows, found) | {"drafting": drafting}


def _report(
    job: EvalJob, windows: Sequence[Window], found: Sequence[SettingQuality]
) -> dict[str, Any]:
    full = found[0].whole.perplexity
    return {
        "kind": "evaluation",
        "model": job.model,
        "synthetic": False,
        "machine": machine(),
        "versions": versions(),
        "settings": _settings_block(job, windows),
        "cases": [
            case_of(setting, quality, full, job.rules.exit_layers)
            for setting, quality in zip(job.settings, found, strict=True)
        ],
    }


def write_traces(job: EvalJob, reference: Reference, tokenizer: Any, out: Path) -> Iterator[Path]:
    """Answers the job's prompt at every setting; yields the file of each trace."""
    assert job.prompt is not None
    for setting, policy in list(zip(job.settings, job.policies, strict=True))[1:]:
        tokens = traced_tokens(reference, tokenizer, job.prompt, TRACED_TOKENS, policy)
        trace = Trace(
            model=job.model,
            num_layers=job.rules.num_layers,
            exit_layers=job.rules.exit_layers,
            criterion=job.rules.criterion,
            fields=setting.fields,
            prompt=job.prompt,
            tokens=tuple(tokens),
        )
        file = out / f"trace-{setting.label.replace(' ', '-').replace(':', '-')}.json"
        replace_file(
            file, f"{json.dumps(trace.to_json(), ensure_ascii=False, indent=1)}\n".encode()
        )
        yield file


def case_of(
    setting: Setting,
    quality: SettingQuality,
    full_perplexity: float | None,
    exit_layers: Sequence[int],
) -> dict[str, Any]:
    """One entry of the report's `cases`: keys of `exitserve bench`, then further ones."""
    whole, full = quality.whole, max(quality.by_depth)
    policy = quality.policy
    perplexity = whole.perplexity
    return {
        "mode": policy.mode,
        "exit_threshold": setting.exit_threshold,
        "mean_depth": rounded(quality.mean_depth),
        # Only a server can count the layers that it runs for rejected drafts.
        "mean_layers_run": None
        if policy.mode == "verify"
        else rounded(float(full) if policy.mode == "defer" else quality.mean_depth),
        "depth_speedup": rounded(full / quality.mean_depth),
        "agreement": rounded(whole.agreement),
        "perplexity": rounded(perplexity),
        "exit_layers": {str(depth): tally.tokens for depth, tally in quality.by_depth.items()},
        "perplexity_retention": None
        if perplexity is None or full_perplexity is None
        else rounded(full_perplexity / perplexity),
        "thresholds": {str(layer): finite(policy.thresholds_at(layer)[0]) for layer in exit_layers}
        if policy.mode != "off"
        else {},
        "by_depth": depth_entries(quality),
    }


def _settings_block(job: EvalJob, windows: Sequence[Window]) -> dict[str, Any]:
    assert job.documents is not None
    return {
        "num_layers": job.rules.num_layers,
        "exit_layers": list(job.rules.exit_layers),
        "exit_rows": job.exit_rows,
        "criterion": job.rules.criterion,
        "data": job.documents.provenance(),
        "windows": len(windows),
        "window_tokens": job.window,
        "prompt_tokens": job.prompt_tokens,
        "decode_tokens": len(windows) * (job.window - job.prompt_tokens - 1),
        "seed": SEED,
    }
