"""All that needs a GPU, in four calls of at most nine minutes, each of use alone.

    python benchmarks/gpu/run.py --call right --out DIR     answers are those that they must be
    python benchmarks/gpu/run.py --call fast --out DIR      engines beside plain vLLM, timed
    python benchmarks/gpu/run.py --call kernels --out DIR   kernels' tests, times and errors
    python benchmarks/gpu/run.py --call real --model M      the main job, on a chat model
    python benchmarks/gpu/run.py --plan                     what each call takes and carries

Works on a bare machine without a network too, with a vLLM that was packed for it (README.md).
Prints its tables, and its verdict last, and writes them to gpu.md in DIR, all numbers to gpu.json.
A stage that fails does not stop the others; it is shown with its last lines, and the exit status is
1. With --tiny a call shows on a CPU that it runs; its numbers say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import environment

if TYPE_CHECKING:
    from stages import MainJob, StageOutcome

CALLS = {
    "right": ("branches", "answers"),
    "fast": ("engines",),
    "kernels": ("tests", "kernels", "errors"),
    "real": ("model", "chats", "train", "calibrate", "request", "eval", "bench"),
}
"""The stages of each call. Those of `real` need what the ones before them made; of the others the
most telling one is first."""
AT_ONCE = (("calibrate",), ("request", "eval"), ("bench",))
"""Of `real`, behind training: each of these lanes runs beside the others. `bench` starts its
engines meanwhile, and measures once the others have ended."""
STAGES = tuple(stage for stages in CALLS.values() for stage in stages)
CARRIES = {
    "right": "the checkout and vLLM; it makes its model",
    "fast": "the checkout and vLLM; its models are shapes",
    "kernels": "the checkout and vLLM, with pytest and hypothesis",
    "real": "the checkout and vLLM, with what training needs, and a model",
}
SHAPE_NAMES = ("llama-3-8b", "llama-3-8b-drafts", "qwen3-4b")
MINUTES = 8.5
"""Of a call: the machine starts and stops within nine."""
ROUNDS = 5
VERDICT_LINES = 10


def main() -> int:
    """Runs the stages; returns the exit status."""
    options = _options()
    if options.plan:
        print(plan())
        return 0
    if not environment.is_ready():
        environment.start_again(sys.argv)
    # So that engines are stopped and folders removed then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # What a shell starts in the background ignores it, and so would the stages.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="exitserve-gpu-") as folder:
            try:
                outcomes = _run_stages(options, Path(folder))
            finally:
                _keep_logs(Path(folder), options.out)
    finally:
        environment.clean_up()
    print((options.out / "gpu.md").read_text(encoding="utf-8"))
    print(f"all numbers: {options.out / 'gpu.json'}\n")
    print("\n".join(verdict(outcomes)))
    return 1 if any(outcome.failures for outcome in outcomes.values()) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out = os.environ.get("OUT", "gpu-out")
    parser.add_argument("--out", type=Path, default=Path(out), metavar="DIR", help="default $OUT")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--call", choices=tuple(CALLS))
    what.add_argument(
        "--only", type=_names(STAGES), metavar="STAGE,STAGE", help=f"of {', '.join(STAGES)}"
    )
    what.add_argument("--plan", action="store_true", help="what each call takes and carries")
    parser.add_argument("--shapes", type=_names(SHAPE_NAMES), default=SHAPE_NAMES, metavar="S,S")
    parser.add_argument("--quick", action="store_true", help="two cases a shape, two rounds")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, a tiny shape")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"timed, default {ROUNDS}")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, metavar="M", help="for all, default %(default)s"
    )
    parser.add_argument(
        "--both-exits", action="store_true", help="keep both exit layers: two checks a token"
    )
    parser.add_argument(
        "--in-process", action="store_true", help="engine and scheduler in one process"
    )
    parser.add_argument(
        "--llm",
        type=_argument,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="one more argument of vllm.LLM for all engines, such as enforce_eager=true",
    )
    _add_main_job(parser)
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = 2 if options.quick else ROUNDS
    options.only = options.only or CALLS.get(options.call, ())
    return options


def _add_main_job(parser: argparse.ArgumentParser) -> None:
    real = parser.add_argument_group("--call real")
    base, recipe = "runs/smollm2/base", "training/recipes/smollm2-135m.yaml"
    real.add_argument(
        "--model", type=Path, metavar="M", help=f"checkpoint's folder or GGUF file, default {base}"
    )
    real.add_argument(
        "--recipe",
        type=Path,
        default=environment.ROOT / recipe,
        metavar="FILE",
        help=f"default {recipe}; model, output_dir and time are set here",
    )
    real.add_argument(
        "--chats", type=Path, metavar="FILE", help="rows of messages (.jsonl, .jsonl.gz): no own"
    )
    real.add_argument(
        "--continue-from", type=Path, metavar="DIR", help="with what an earlier call has left"
    )


def _main_job(options: argparse.Namespace) -> MainJob:
    from stages import MainJob

    base = None if options.tiny else environment.ROOT / "runs" / "smollm2" / "base"
    return MainJob(
        model=options.model or base,
        recipe=options.recipe,
        chats=options.chats,
        continue_from=options.continue_from,
        out=options.out,
    )


def plan() -> str:
    """What each call takes and carries."""
    lines = [
        f"--call {call:8} at most {MINUTES:g} minutes: {', '.join(stages)}; {CARRIES[call]}"
        for call, stages in CALLS.items()
    ]
    sizes = ", ".join(f"{name} {size / (1 << 20):.0f} MiB" for name, size in _sizes().items())
    return "\n".join([*lines, f"here: {sizes}; models/ and runs/ may stay behind."])


def _sizes() -> dict[str, int]:
    """Bytes of what travels: the files that git knows, and a vLLM that was packed."""
    listed = subprocess.run(
        ["git", "-C", str(environment.ROOT), "ls-files", "-z", ":!models", ":!runs"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split("\0")
    paths = [environment.ROOT / name for name in listed if name]
    packed = environment.UNPACK.parents[1]
    return {
        "the checkout": sum(path.stat().st_size for path in paths if path.is_file()),
        packed.name: sum(path.stat().st_size for path in packed.rglob("*") if path.is_file()),
    }


def verdict(outcomes: Mapping[str, StageOutcome]) -> list[str]:
    """All stages on ten lines: whether all is well, then what each of them found."""
    failed = [name for name, outcome in outcomes.items() if outcome.failures]
    words = f"FAILED: {', '.join(failed)}" if failed else "all is well"
    lines = [f"VERDICT: {words}"]
    for name, outcome in outcomes.items():
        told = outcome.verdict or [line for text in outcome.failures for line in text.splitlines()]
        lines += [f"{name}: {line}"[:160] for line in told]
    if len(lines) > VERDICT_LINES:
        left = len(lines) - VERDICT_LINES + 1
        lines[VERDICT_LINES - 1 :] = [f"and {left} lines more, above"]
    return lines


def _names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Reads names separated by commas; keeps the order in which they are known."""

    def read(text: str) -> tuple[str, ...]:
        given = [part.strip() for part in text.split(",")]
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)} unknown; there are {', '.join(known)}"
            )
        return tuple(name for name in known if name in given)

    return read


def _argument(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text}: the value is no JSON ({error})") from None


def _run_stages(options: argparse.Namespace, folder: Path) -> dict[str, StageOutcome]:
    """What each stage found; the files are written after each."""
    facts = environment.facts()
    from engine_table import engines
    from kernel_stages import errors, kernels, tests
    from real import bench, calibrate, chats, evaluate, model, request, train
    from right import answers, branches
    from stages import StageError, StageOutcome, StageRun, say

    outcomes: dict[str, StageOutcome] = {}
    begun: dict[str, float] = {}
    writing = Lock()

    def publish(name: str, outcome: StageOutcome) -> None:
        outcome.seconds = round(time.monotonic() - begun[name], 1)
        with writing:
            outcomes[name] = outcome
            _write(options.out, facts, _in_order(outcomes))

    run = StageRun(
        folder=folder,
        deadline=time.monotonic() + 60 * options.minutes,
        tiny=options.tiny,
        quick=options.quick,
        both_exits=options.both_exits,
        rounds=options.rounds,
        shapes=options.shapes,
        llm=dict(options.llm),
        publish=publish,
        job=_main_job(options),
    )
    # vLLM's default; packed ones are told otherwise.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if options.in_process else "1"
    main_job = (model, chats, train, calibrate, request, evaluate, bench)
    known = (branches, answers, engines, tests, kernels, errors, *main_job)
    stages = dict(zip(STAGES, known, strict=True))

    def run_stage(name: str) -> None:
        say(name)
        begun[name] = time.monotonic()
        try:
            outcome = stages[name](run)
        except StageError as failure:
            outcome = StageOutcome(failures=[str(failure)])
        except Exception:  # noqa: BLE001  # the other stages still run
            outcome = StageOutcome(failures=[traceback.format_exc(limit=-5)])
        publish(name, outcome)
        run.pending.remove(name)

    def run_lane(lane: Sequence[str]) -> None:
        for name in lane:
            run_stage(name)

    run.pending = list(options.only)
    for lanes in _lanes(options.only):
        with ThreadPoolExecutor(len(lanes)) as threads:
            list(threads.map(run_lane, lanes))
    return _in_order(outcomes)


def _lanes(names: Sequence[str]) -> list[list[list[str]]]:
    """Stages in groups, one group after the other; the lanes of a group run at the same time."""
    beside = {name for lane in AT_ONCE for name in lane}
    groups = [[[name]] for name in names if name not in beside]
    lanes = [[name for name in lane if name in names] for lane in AT_ONCE]
    found = [lane for lane in lanes if lane]
    return [*groups, found] if found else groups


def _in_order(outcomes: Mapping[str, StageOutcome]) -> dict[str, StageOutcome]:
    return {name: outcomes[name] for name in STAGES if name in outcomes}


def _write(out: Path, facts: dict[str, Any], outcomes: dict[str, StageOutcome]) -> None:
    """The tables, and all numbers."""
    from exitserve.report import write_json

    stages = {
        name: {"seconds": outcome.seconds, "failures": outcome.failures, **outcome.data}
        for name, outcome in outcomes.items()
    }
    report = {"facts": facts, "arguments": sys.argv[1:], "stages": stages}
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "gpu.json", report)
    (out / "gpu.md").write_text(_page(facts, outcomes) + "\n", encoding="utf-8")


def _keep_logs(folder: Path, out: Path) -> None:
    """All that stages and engines said, as one file."""
    logs = sorted(folder.rglob("*.log"))
    texts = [f"===== {log.stem}\n{log.read_text(errors='replace')}" for log in logs]
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.log").write_text("\n".join(texts), encoding="utf-8")


def _page(facts: dict[str, Any], outcomes: dict[str, StageOutcome]) -> str:
    """All tables, then what failed."""
    from exitserve.report import machine_line

    card = facts["card"] or {"name": "no GPU", "driver": "-"}
    parts = [
        f"{facts['date']}, commit {facts['commit']}: {machine_line(facts)}\n"
        f"{card['name']}, driver {card['driver']}, CUDA {facts['cuda']}"
    ]
    for name, outcome in outcomes.items():
        parts += [f"## {name} ({outcome.seconds:.0f} s)", outcome.page.strip() or "nothing found"]
    for name, outcome in outcomes.items():
        parts += [f"FAILED: {name}: {failure}" for failure in outcome.failures]
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
