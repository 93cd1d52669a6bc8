"""Where a decode step of the engine with exits spends its time.

    python benchmarks/profile_step.py --synthetic llama-350m --exit-layer 6 --batch-size 1
    python benchmarks/profile_step.py --model DIR --server '{"mode": "defer"}' \
        --fields '{"exit_target": 0.95}' --batch-size 8

Starts one engine in this process, decodes after the bundled prompts (SYNTHETIC weights: after
random tokens), and prints the milliseconds of a step by part. A part's time is its own: what it
calls and is named in the table below is counted there, so the lines add up to the step. Without
--exit-layer, --exit-threshold and --fields every token runs all layers.

Rounds of these steps take turns with as many at full depth, since one process differs from the
next by more than a check costs. With a threshold that nothing reaches, the difference is what
failed checks cost; on a server that drafts, it is told what drafted tokens cost beside layers:

    python benchmarks/profile_step.py --model models/exit-py-19m --exit-threshold 0.9999 \
        --server '{"exit_checks": "all"}'
    python benchmarks/profile_step.py --model models/exit-py-19m --exit-threshold 0.4 --steps 32 \
        --server '{"exit_checks": "all", "mode": "defer", "num_drafts": 8}'

The numbers are for finding what to improve, not for quoting. In one process there are no
messages between scheduler and worker, which serving and `exitserve bench` have. On a CPU one
core is left to others, as vLLM does there (OMP_NUM_THREADS overrides), but threads are not bound
to cores. Timing costs about a microsecond a call. On a GPU kernels run behind the calls, so the
times are those of launching them.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from exitserve import synthetic_shapes
from exitserve.bench.prompts import encode_prompts, first_prompts, load_prompts
from exitserve.checkpoint import read_config
from exitserve.engine.launch import greedy_params, prepare_environment, start_engine
from exitserve.errors import ExitServeError


@dataclass(frozen=True)
class Probe:
    """A method whose time is counted under `part`."""

    part: str
    owner: str
    """`module:Class`, or `model.NAME` for the classes of what the served model keeps there."""
    method: str


MODEL = "exitserve.engine.model:MultiExitMixin"
REQUESTS = "exitserve.engine.host.requests:HostRequests"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

LAYERS = "segments: the layers run"
PLAIN = "vLLM's own forward, where nobody may exit"
HEAD = "LM head, where no check reads it"
CHECK = "exit checks, with the head"
TURN = "turns of drafts: what is left of them"

PROBES = (
    Probe(LAYERS, "model._segments", "__call__"),
    Probe(PLAIN, "model.model", "__call__"),
    Probe(HEAD, "model.logits_processor", "forward"),
    Probe(CHECK, "exitserve.engine.host.checks:Checks", "check"),
    Probe(TURN, "exitserve.engine.host.drafts:Drafting", "_turn"),
    Probe("drafts: around their turns", "exitserve.engine.host.drafts:Drafting", "run"),
    Probe("late checks, head aside", "exitserve.engine.host.late_checks:LateChecks", "settle"),
    Probe("propagation", "exitserve.engine.layers.propagation:Propagation", "fill"),
    Probe("requests: rows, depths, counts", REQUESTS, "next_step"),
    Probe("requests: rows, depths, counts", REQUESTS, "record"),
    Probe("requests: rows, depths, counts", "exitserve.engine.requests:Batch", "update"),
    Probe("exits: the rest of the loop", MODEL, "forward"),
    Probe("exits: whose logits to sample from", MODEL, "compute_logits"),
    Probe("vLLM: prepare the batch", RUNNER, "_update_states"),
    Probe("vLLM: prepare the batch", RUNNER, "_prepare_inputs"),
    Probe("vLLM: rest of execute_model", RUNNER, "execute_model"),
    Probe("vLLM: sample", RUNNER, "sample_tokens"),
    Probe("vLLM: schedule", SCHEDULER, "schedule"),
    Probe("vLLM: schedule", SCHEDULER, "update_from_output"),
    Probe("vLLM: rest of the engine core", "vllm.v1.engine.core:EngineCore", "step"),
    Probe("vLLM: front end", "vllm.v1.engine.llm_engine:LLMEngine", "step"),
)
"""What is timed. A name that is not there is left out with a note: its time is its caller's."""


class Stopwatch:
    """Own time and calls of each part; nested parts are taken out of the outer one."""

    def __init__(self) -> None:
        self.clear()
        self._inner: list[float] = []  # of each running part: the time of those it called

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self.seconds.values())

    def taken(self, tokens: int) -> Stopwatch:
        """What was timed so far, by itself, while `tokens` tokens were generated."""
        found = Stopwatch()
        found.tokens = tokens
        found.seconds.update(self.seconds)
        found.calls.update(self.calls)
        return found

    def clear(self) -> None:
        """Starts again; the parts stay timed."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.tokens = 0
        """Generated by the steps of a round."""

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its time counted under `part`."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                total = time.perf_counter() - start
                self.seconds[part] += total - self._inner.pop()
                self.calls[part] += 1
                if self._inner:
                    self._inner[-1] += total

        return run


def install(watch: Stopwatch, probes: Iterable[Probe], model: Any = None) -> list[str]:
    """Puts the stopwatch around the probes' methods.

    Args:
        watch: gets the times.
        probes: what to time.
        model: the served model, where probes name parts of it.

    Returns:
        A line for each probe that names nothing.
    """
    missing = []
    for probe in probes:
        classes = _classes(probe.owner, model)
        known = [owner for owner in classes if callable(getattr(owner, probe.method, None))]
        if not known:
            missing.append(f"{probe.owner}.{probe.method} is not there ({probe.part})")
        for owner in known:
            setattr(owner, probe.method, watch.timed(probe.part, getattr(owner, probe.method)))
    return missing


def _classes(owner: str, model: Any) -> set[type]:
    """The classes that a probe's owner names; empty if it names none."""
    if owner.startswith("model."):
        found = getattr(model, owner.removeprefix("model."), None)
        kept = found if isinstance(found, list | tuple) else [found]
        return {type(item) for item in kept if item is not None}
    module, _, name = owner.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError:
        return set()
    return set() if found is None else {found}


def table(watch: Stopwatch, full: Stopwatch, parts: Iterable[str], steps: int) -> list[str]:
    """The lines to print, for `steps` steps, and as many at full depth."""
    lines = [f"{'part of a step':<42}{'ms':>8}{'share':>8}{'calls':>8}{'at full depth':>15}"]
    for part in dict.fromkeys(parts):
        if (calls := watch.calls[part]) + full.calls[part]:
            seconds = watch.seconds[part]
            lines.append(
                f"{part:<42}{1e3 * seconds / steps:>8.3f}{seconds / watch.total:>8.1%}"
                f"{calls / steps:>8.1f}{1e3 * full.seconds[part] / steps:>15.3f}"
            )
    total, whole = 1e3 * watch.total / steps, 1e3 * full.total / steps
    return [*lines, f"{'total':<42}{total:>8.3f}{1:>8.1%}{'':>8}{whole:>15.3f}"]


def turns(rounds: Sequence[Stopwatch], full: Sequence[Stopwatch], steps: int) -> str:
    """How much of that is in the turns themselves, with their checks."""
    counts = [one.calls[TURN] for one in rounds]
    seconds = [
        one.seconds[TURN] + one.seconds[CHECK] + one.seconds[HEAD] - other.seconds[HEAD]
        for one, other in zip(rounds, full, strict=True)
    ]
    each = [1e3 * spent / count for spent, count in zip(seconds, counts, strict=True)]
    return (
        f"of that, checks included, {median(each):.3f} ms in each of {median(counts) / steps:.2f} "
        f"turns; what remains is the step's: judging, sampling, and preparing more tokens"
    )


def comparison(rounds: Sequence[Stopwatch], full: Sequence[Stopwatch], steps: int) -> list[str]:
    """What rounds of `steps` steps take beside those at full depth, in milliseconds."""

    def middle(values: Sequence[float]) -> str:
        return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    own, plain = ([1e3 * one.total / steps for one in part] for part in (rounds, full))
    more = [after - before for after, before in zip(own, plain, strict=True)]
    lines = [
        f"a step {middle(own)} ms, at full depth {middle(plain)}: {middle(more)} ms more",
    ]
    checks = [one.calls[CHECK] / steps for one in rounds]
    drafted = [(one.tokens - other.tokens) / steps for one, other in zip(rounds, full, strict=True)]
    if all(drafted):
        layers = [
            1e3 * (one.seconds[LAYERS] - other.seconds[PLAIN]) / steps
            for one, other in zip(rounds, full, strict=True)
        ]
        beside = [(a - b) / c for a, b, c in zip(more, layers, drafted, strict=True)]
        lines.append(
            f"beside layers {middle(beside)} ms for each of {median(drafted):.2f} drafted tokens"
        )
        if all(one.calls[TURN] for one in rounds):
            lines.append(turns(rounds, full, steps))
    elif all(checks):
        each = [one / count for one, count in zip(more, checks, strict=True)]
        lines.append(f"{middle(each)} ms for each of {median(checks):.1f} checks")
    return lines


def profile(args: argparse.Namespace, model_dir: Path) -> tuple[list[Stopwatch], list[Stopwatch]]:
    """Decodes; returns what the timed steps of each round took, and those at full depth."""
    # Read when vLLM is first imported: one process, so that all of it can be timed from here.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    config = read_config(model_dir)
    length = args.prompt_tokens + _answer_tokens(args)
    if length > (longest := config.get("max_position_embeddings", length)):
        raise ExitServeError(
            f"--steps {args.steps} may take {length} tokens of a request, with its prompt; the "
            f"model's context is {longest}: lower --steps or num_drafts."
        )
    # Read when torch is first imported. A thread for each core, on a core that something else
    # uses too, makes all of them wait.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) - 1)))
    prepare_environment()
    watch = Stopwatch()
    on_model = [probe for probe in PROBES if probe.owner.startswith("model.")]
    # Before the engine keeps bound methods of its own.
    missing = install(watch, [probe for probe in PROBES if probe not in on_model])
    options: dict[str, Any] = {"exit_checks": "screened", **args.server}
    if args.exit_layer is not None:
        options["exit_layers"] = [args.exit_layer]
    if args.exit_threshold < 1:  # some modes want one of the server
        options.setdefault("exit_threshold", args.exit_threshold)
    llm = start_engine(
        model_dir,
        exits=options,
        enforce_eager=args.enforce_eager,
        max_num_seqs=args.batch_size,
        max_model_len=length,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        load_format="dummy" if args.synthetic else "auto",
    )
    missing += install(watch, on_model, llm.apply_model(lambda model: model)[0])
    for line in missing:
        print(f"note: {line}", file=sys.stderr)
    fields: dict[str, Any] = args.fields or {"exit_threshold": args.exit_threshold}
    if args.exit_layer is not None:
        fields = {"exit_layer": args.exit_layer}
    ways = (fields, {"exit_threshold": 1.0})
    found: tuple[list[Stopwatch], list[Stopwatch]] = [], []
    prompts = _prompts(args, config["vocab_size"])
    for _ in range(args.rounds):
        for way, rounds in zip(ways, found, strict=True):
            watch.clear()
            tokens = _decode(llm.llm_engine, args, prompts, way, watch.clear)
            rounds.append(watch.taken(tokens))
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()
    return found


def _answer_tokens(args: argparse.Namespace) -> int:
    """Tokens to ask for, so that no request ends in a timed step."""
    most = 1 + args.server.get("num_drafts", 0)
    # Long prompts are processed over several steps, in which early requests decode already.
    ahead = 1 + args.batch_size * args.prompt_tokens // 1024
    return int((args.warm_up + args.steps + 1 + ahead) * most)


def _prompts(args: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    if args.synthetic:
        return synthetic_shapes.random_prompts(vocabulary, args.batch_size, args.prompt_tokens)
    encoded = encode_prompts(load_prompts(None), args.model)
    return [list(ids[: args.prompt_tokens]) for ids in first_prompts(encoded, args.batch_size)]


def _decode(
    engine: Any,
    args: argparse.Namespace,
    prompts: Sequence[list[int]],
    fields: dict[str, Any],
    warmed_up: Callable[[], None],
) -> int:
    """Decodes after each prompt until all timed steps were made; returns their tokens."""
    params = greedy_params(_answer_tokens(args), fields)
    for index, prompt in enumerate(prompts):
        engine.add_request(f"profile-{index}", {"prompt_token_ids": prompt}, params)
    produced = dict.fromkeys((f"profile-{index}" for index in range(args.batch_size)), 0)

    def step() -> None:
        for output in engine.step():
            produced[output.request_id] = len(output.outputs[0].token_ids)

    while min(produced.values()) < args.warm_up:
        step()
    before = sum(produced.values())
    warmed_up()
    for _ in range(args.steps):
        step()
    return sum(produced.values()) - before


@contextmanager
def checkpoint(args: argparse.Namespace) -> Iterator[Path]:
    """The directory to serve; a synthetic one lasts as long as the context."""
    if args.model is not None:
        yield args.model
        return
    with tempfile.TemporaryDirectory(prefix="exitserve-") as directory:
        synthetic_shapes.write_checkpoint(args.synthetic, Path(directory))
        yield Path(directory)


def main() -> int:
    """Runs the script; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--synthetic", metavar="NAME", help="|".join(synthetic_shapes.SHAPES))
    what.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint directory")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--exit-layer", type=int, metavar="N", help="of every token")
    where.add_argument(
        "--exit-threshold",
        type=float,
        default=1.0,
        metavar="P",
        help="of all requests, at the checkpoint's own exit layers; default 1: full depth",
    )
    for flag, default, about in (
        ("--batch-size", 1, "requests decoding together"),
        ("--prompt-tokens", 32, "length of their random prompts"),
        ("--steps", 64, "steps of a round"),
        ("--rounds", 5, "rounds timed, and as many at full depth; the table is the middle one's"),
        ("--warm-up", 8, "tokens of every request before that"),
    ):
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{about}, default {default}"
        )
    for flag, about in (
        ("--server", "options of the server, as JSON"),
        ("--fields", "fields of every request, as JSON"),
    ):
        parser.add_argument(flag, type=json.loads, default={}, metavar="JSON", help=about)
    parser.add_argument("--enforce-eager", action="store_true", help="do not compile")
    args = parser.parse_args()
    if min(args.batch_size, args.prompt_tokens, args.steps, args.warm_up, args.rounds) < 1:
        parser.error("sizes and counts must be at least 1.")
    try:
        with checkpoint(args) as directory:
            rounds, full = profile(args, directory)
    except ExitServeError as error:
        parser.error(str(error))
    middle = sorted(range(args.rounds), key=lambda one: rounds[one].total)[args.rounds // 2]
    parts = [probe.part for probe in PROBES]
    print("\n".join(table(rounds[middle], full[middle], parts, args.steps)))
    print("\n".join(comparison(rounds, full, args.steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
