"""The comparison: the same requests through plain vLLM and through every exit setting.

For each batch size, an untimed pass of every setting warms the engine up and is traced (depths,
tokens); tracing therefore costs the timed passes nothing. Then every repeat runs all settings
one after the other, starting at another one each time, so that slow drifts of the machine affect
all of them alike. Wall speedup compares a setting with plain vLLM in the same repeat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, cat, tensor

from exitserve.agreement import run_full_depth
from exitserve.bench.engines import BatchRequest, Engines, engine_names, gpu_share, running_engines
from exitserve.bench.measures import (
    DRAFTS,
    READS,
    Measurements,
    Timing,
    case_of,
    joined_timing,
    notes_on,
    steps_of,
    timing_of,
)
from exitserve.bench.rivals import extra_memory
from exitserve.bench.settings import BenchJob, rotated
from exitserve.checkpoint.block import read_config
from exitserve.costs.byte_costs import shape_of
from exitserve.errors import ExitServeError
from exitserve.reference import load_reference
from exitserve.reporting.progress import ShareProgress
from exitserve.reporting.report import machine, versions
from exitserve.settings import PLAIN, Setting

STARTED, MEASURED = 0.25, 0.9
"""Shares of the work, roughly, that are done when the engines run and when all passes are made."""


def compare(job: BenchJob, progress: ShareProgress) -> dict[str, Any]:
    """Runs the comparison; after `exitserve.bench.engines.prepare`.

    Returns:
        The report without its `schema_version`; see docs/benchmarks.md for the keys.

    Raises:
        ExitServeError: a prompt with its answer is longer than the model's context.
    """
    progress("starting plain vLLM and exitserve", 0.0)
    with running_engines(job) as engines:
        dtype, max_model_len = engines.dtype, engines.max_model_len
        _check_lengths(job, max_model_len)
        measurements = _measure(
            job, engines, lambda doing, done: progress(doing, STARTED + done * (MEASURED - STARTED))
        )
    if not job.synthetic:
        progress("agreement with full depth, in float32", MEASURED)
        _add_agreement(job, measurements)
    shape = shape_of(read_config(job.model_dir), dtype)
    if job.rules.rows_file is None:
        shape = replace(shape, exit_rows=None)
    plain = {
        measured.batch_size: measured for measured in measurements if measured.setting == PLAIN
    }
    cases = [
        case_of(measured, plain[measured.batch_size], shape, job.rules.exit_layers)
        for measured in measurements
    ]
    return {
        "model": job.model_name,
        "synthetic": job.synthetic,
        "machine": machine(),
        "versions": versions(),
        "settings": _settings_block(job, dtype, max_model_len),
        "notes": notes_on(cases),
        "cases": cases,
    }


def _settings_block(job: BenchJob, dtype: str, max_model_len: int) -> dict[str, Any]:
    return {
        "num_layers": job.rules.num_layers,
        "exit_layers": list(job.rules.exit_layers),
        "requests": job.requests,
        "prompts": job.prompt_source,
        "max_tokens": job.max_tokens,
        "repeats": job.repeats,
        "seconds": job.seconds,
        "exit_rows": job.exit_rows,
        "forced": None if job.forced is None else dict(job.forced),
        "dtype": dtype,
        "compile": "eager" if job.enforce_eager else "compiled",
        "prefix_caching": False,
        "max_model_len": max_model_len,
        "max_num_seqs": max(job.batch_sizes),
        "gpu_memory": _gpu_memory(job),
        "rivals": {name: extra_memory(name) for name in job.rivals},
    }


def _gpu_memory(job: BenchJob) -> dict[str, Any] | None:
    """How the engines shared it; None on a CPU."""
    share, engines = gpu_share(job), len(engine_names(job))
    asked = {"engines": engines, "utilization": job.gpu_memory_utilization}
    return None if share is None else asked | {"each": round(share, 4)}


def _check_lengths(job: BenchJob, max_model_len: int) -> None:
    longest = max(len(prompt) for prompt in job.prompts)
    if longest + job.max_tokens > max_model_len:
        raise ExitServeError(
            f"the longest prompt has {longest} tokens; with --max-tokens {job.max_tokens} it "
            f"exceeds the context of {max_model_len}: lower --max-tokens, shorten the prompt, or "
            f"raise --max-model-len."
        )


def _measure(job: BenchJob, engines: Engines, progress: ShareProgress) -> list[Measurements]:
    """Makes all passes; one `Measurements` for each batch size and setting, in their order.

    Interrupted, it ends with the batch sizes that are complete, if there are any.
    """
    share, measurements = 1.0 / len(job.batch_sizes), list[Measurements]()
    for number, batch_size in enumerate(job.batch_sizes):
        begin = number * share

        def at(doing: str, done: float, begin: float = begin) -> None:
            progress(doing, begin + done * share)

        try:
            measurements += _measure_batches_of(batch_size, job, engines, at)
        except KeyboardInterrupt:
            if not measurements:
                raise
            progress(f"interrupted: without batch {batch_size}", 1.0)
            break
    return measurements


def _measure_batches_of(
    batch_size: int, job: BenchJob, engines: Engines, progress: ShareProgress
) -> list[Measurements]:
    requests = job.requests_in_pass(batch_size)
    # Repeat -1 is traced, and warms up.
    rounds = {-1: job.settings, **{n: rotated(job.settings, n) for n in range(job.repeats)}}
    total, done = sum(map(len, rounds.values())), 0
    by_setting = {
        setting: Measurements(setting=setting, batch_size=batch_size, requests=requests)
        for setting in job.settings
    }
    for repeat, settings in rounds.items():
        for setting in settings:
            phase = "warm-up" if repeat < 0 else f"repeat {repeat + 1} of {job.repeats}"
            progress(f"batch {batch_size}, {phase}: {setting.label}", done / total)
            batches = _batches(job, setting, batch_size)
            if repeat == -1:
                _traced_pass(job, engines, batches, by_setting[setting])
            else:
                timing, reads = _timed_pass(job, engines, setting, batches)
                by_setting[setting].repeats.append(timing)
                by_setting[setting].reads += reads
                by_setting[setting].loads += _load(job, engines, setting, batches)
            done += 1
    return list(by_setting.values())


def _batches(job: BenchJob, setting: Setting, batch_size: int) -> list[list[BatchRequest]]:
    """The requests in full batches: a last, smaller one would be another batch size."""
    count = job.requests_in_pass(batch_size)
    requests = [BatchRequest(prompt, setting.fields) for prompt in job.prompts[:count]]
    return [requests[start : start + batch_size] for start in range(0, count, batch_size)]


def _timed_pass(
    job: BenchJob, engines: Engines, setting: Setting, batches: Sequence[Sequence[BatchRequest]]
) -> tuple[Timing, list[dict[str, float]]]:
    """All batches, and all again until they have decoded for long enough; with what an engine that
    drafts read meanwhile, if it could be counted."""
    parts: list[Timing] = []
    counts, drafts = Counter[str](), engines.drafts(setting)
    while not parts or sum(part.seconds for part in parts) < job.seconds:
        for batch in batches:
            one = engines.run_batch(setting, batch, job.max_tokens, counted=drafts)
            parts.append(timing_of(one.times))
            counts += one.counts
    timing = joined_timing(parts)
    if not (steps := counts["tokens"] / len(batches[0])):
        return timing, []
    return timing, [{kind: counts[kind] / steps for kind in READS}]


def _load(
    job: BenchJob, engines: Engines, setting: Setting, batches: Sequence[Sequence[BatchRequest]]
) -> list[Timing]:
    """The same requests as a steady load; not with synthetic weights, whose prompts are random."""
    if job.synthetic:
        return []
    requests, at_once = [one for batch in batches for one in batch], len(batches[0])
    return [engines.run_load(setting, requests, at_once, job.max_tokens, job.seconds)]


def _traced_pass(
    job: BenchJob,
    engines: Engines,
    batches: Sequence[Sequence[BatchRequest]],
    measured: Measurements,
) -> None:
    """The untimed pass: records tokens, depths, steps and checks."""
    before = engines.counts(measured.setting)
    plain = measured.setting.mode in ("plain", "rival")
    for index, batch in enumerate(batches):
        key = f"bench:{measured.batch_size}:{measured.setting.label}:{index}"
        result = engines.run_batch(measured.setting, batch, job.max_tokens, None if plain else key)
        if plain:
            depths = [(job.rules.num_layers,) * job.max_tokens] * len(batch)
        else:
            depths = engines.depths(measured.setting, key)
        decoded = [request[1:] for request in depths]
        measured.depths += [depth for request in decoded for depth in request]
        measured.steps += steps_of(decoded, [len(request.prompt) for request in batch])
        prompts = (request.prompt for request in batch)
        measured.sequences += list(zip(prompts, result.tokens, strict=True))
    # Subtracting counters drops zeros, which read as 0 all the same.
    counts = engines.counts(measured.setting) - before
    measured.checks, measured.layers_later = counts["checks"], counts["layers_later"]
    drafts = measured.setting.mode in ("verify", "rival")
    if drafts or counts["drafted"]:
        measured.drafts = {name: counts[name] for name in DRAFTS}


def _add_agreement(job: BenchJob, measurements: list[Measurements]) -> None:
    """Adds agreement with full depth on the generated text, and its perplexity; without the first
    token of each answer."""
    reference = load_reference(str(job.model_dir), exit_layers=(), device="auto")
    known: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
    for measured in measurements:
        for prompt, generated in measured.sequences:
            text = (*prompt, *generated)
            if text not in known:  # settings and batch sizes often give the same text
                full = run_full_depth(reference, text, len(prompt))
                known[text] = full.token[:-1].cpu() == tensor(generated[1:]), full.nats.double()
        found = (known[prompt + generated] for prompt, generated in measured.sequences)
        agrees, nats = (cat(parts) for parts in zip(*found, strict=True))
        measured.agreement = float(agrees.double().mean())
        measured.perplexity = float(nats.mean().exp())
