"""The stages of `--call real`: the main job on a pretrained chat model, by the commands of users.

    model      a base, with what an earlier call trained added to it
    chats      the base writes questions and answers
    train      exits, for as long as the stages that follow leave time; what changed goes into files
    calibrate  thresholds, on its own greedy text
    request    one over HTTP with its trace, and greedy answers at full depth to our questions
    eval       agreement with full depth at each exit, on those answers
    bench      beside plain vLLM and its n-grams

What is measured is the model that the files give, not the one that training left.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import differences
from real_tables import bench_page, calibration_page, eval_page, training_page
from stages import StageError, StageOutcome, StageRun, command, ended, last_lines, say
from starting_points import base_checkpoint

QUESTIONS = Path(__file__).with_name("questions.txt")
SECONDS = {"model": 55, "chats": 90, "calibrate": 60, "request": 90, "eval": 30, "bench": 180}
"""Planned for each stage. Training gets what the others leave; those after it run side by side."""
AROUND_TRAINING = 60
"""Seconds: libraries, data, two evaluations, and files with what changed."""
LEAST_TRAINING = 5
SLACK, TINY_SLACK = 2, 20
"""Times what is planned, a stage may take if there is time."""
HELD_OUT = {"data.validation_fraction": "0.1", "data.validation_blocks": "128"}
"""Of the recipe: chats for the evaluations, and for the calibration's prompts."""
NEVER = 1_000_000
"""Steps: the clock ends training."""
TINY = {
    "exit_layers": "[1, 2, 3]",
    "bf16": "false",
    "compile_layers": "false",
    "attn_implementation": "null",
    "data.sequence_length": "128",
    "data.validation_fraction": "0.5",
    "training.per_device_train_batch_size": "4",
    "training.per_device_eval_batch_size": "4",
    "training.gradient_accumulation_steps": "1",
    "training.warmup_steps": "1",
    "training.logging_steps": "2",
    "training.max_steps": "4",
}
"""Of the recipe, on a CPU."""
MOST_CHATS, TINY_CHATS = 4096, 100
EXIT_THRESHOLD = "0.5"
BASE, START, RUN, MODEL = "base", "start", "run", "model"
"""Folders of a call: what training is compared with, what it begins from, its `output_dir`, and the
checkpoint that is measured."""
CHATS = "chats.jsonl"


def model(run: StageRun) -> StageOutcome:
    """Makes the base, and what training begins from."""
    job, base = run.job, run.folder / BASE
    base_checkpoint(job.model, QUESTIONS, base)
    page = f"base: {job.model or 'tiny, random weights'}"
    if job.continue_from is not None:
        _take_up(job.continue_from, base, run.folder / START)
        page += f", with what was trained in {job.continue_from}"
    return StageOutcome({"base": str(job.model)}, page, verdict=[page])


def _take_up(earlier: Path, base: Path, out: Path) -> None:
    """Puts together what an earlier call began from and what it left."""
    if not list(earlier.glob("adapter.0")):
        differences.take_up(base, earlier, out)
        return
    from exitserve.checkpoint.adapters import merged_checkpoint

    adapter = out.with_name(f"{out.name}-adapter")
    differences.unpack_adapter(earlier, adapter)
    out.symlink_to(merged_checkpoint(str(base), str(adapter)))


def chats(run: StageRun) -> StageOutcome:
    """Those that were given, or those that the base has time to write."""
    given = run.job.chats
    rows = _lines(given) if given is not None else _written_chats(run)
    if given is None:
        run.job.out.mkdir(parents=True, exist_ok=True)
        packed = gzip.compress("\n".join([*rows, ""]).encode())
        (run.job.out / "chats.jsonl.gz").write_bytes(packed)
    _write(run.folder / CHATS, rows)
    page = f"{len(rows):,} chats {'read' if given else 'written'}"
    return StageOutcome({"chats": len(rows)}, page, verdict=[page])


def _written_chats(run: StageRun) -> list[str]:
    """Rows that the base writes itself, as many as it has time for."""
    own = _recipe(run).data.own_chats
    if own is None:
        raise StageError(f"'{run.job.recipe}' has no data.own_chats; give --chats.")
    count = TINY_CHATS if run.tiny else min(MOST_CHATS, own.count)
    folder = run.folder / "own-chats"
    file = folder / "data" / "own-chats.jsonl"
    arguments = _training(run, model=_base(run), output_dir=folder)
    arguments.append(f"data.own_chats.count={count}")
    # The run that writes them would go on to train.
    _, log = command(
        run,
        "chats",
        arguments,
        most=_most(run, "chats"),
        until=lambda: file.is_file() and len(_lines(file)) >= count,
    )
    rows = _lines(file) if file.is_file() else []
    if len(rows) < 2:
        raise StageError(f"no chats were written. {last_lines(log)}")
    return rows


def train(run: StageRun) -> StageOutcome:
    """Trains by the clock, then leaves what changed in files."""
    start, folder = _start(run), run.folder / RUN
    reserved = max((SECONDS[stage] for stage in run.pending if stage != "train"), default=0)
    left = run.left(float("inf")) - reserved
    seconds = left - (0 if run.tiny else AROUND_TRAINING)
    if seconds < LEAST_TRAINING:
        raise StageError(
            f"{seconds:.0f} s are left for training: give more --minutes, or fewer stages (--only)."
        )
    arguments = _training(run, model=start, output_dir=folder)
    arguments += [
        f"data.files=[{_chats(run)}]",
        "data.own_chats=null",
        f"max_minutes={seconds / 60:.4f}",
        'training.save_strategy="no"',
    ]
    if start != _base(run):
        arguments.append(f"objectives={json.dumps(_objectives(run))}")
    status, log = command(run, "train", arguments, most=left)
    if status != 0:
        raise StageError(f"training {ended(status)}. {last_lines(log)}")
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    said = [line for line in log.read_text(errors="replace").splitlines() if " tokens/s" in line]
    earlier = _earlier(run)
    knows_base = bool(earlier) or start == _base(run)
    whose = "the base's" if knows_base else "the beginning's"
    outcome = training_page(report, earlier, said[-1] if said else "", whose)
    run.publish("train", outcome)
    outcome.data["left"] = left_behind = _leave(run, start)
    told = f"{left_behind['bytes'] / 1e6:.1f} MB left as {left_behind['what']}"
    outcome.page += f"\n\n{told}"
    outcome.verdict.append(told)
    return outcome


def _training(run: StageRun, **keys: object) -> list[str]:
    """The command, without what is to be trained on."""
    given = TINY if run.tiny else HELD_OUT | {"training.max_steps": str(NEVER)}
    found = {**given, **keys}
    overrides = [f"{key}={value}" for key, value in found.items()]
    return ["-m", "exitserve", "train", str(run.job.recipe.resolve()), *overrides]


def _recipe(run: StageRun) -> Any:
    from exitserve_training.recipe import load_recipe

    return load_recipe(run.job.recipe)


def _objectives(run: StageRun) -> list[dict[str, Any]]:
    """The recipe's, whose teacher stays the base where training begins from another model."""
    found = []
    for objective in _recipe(run).objectives:
        options = objective.model_dump(mode="json", exclude_unset=True) | {"name": objective.name}
        if options.get("teacher") == "initial":
            options["teacher"] = str(_base(run))
        found.append(options)
    return found


def _earlier(run: StageRun) -> dict[str, Any]:
    """What the call that is continued says of its training, if its gpu.json is there."""
    file = (run.job.continue_from or run.folder) / "gpu.json"
    if not file.is_file():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["stages"].get("train", {})
    return found


def _leave(run: StageRun, start: Path) -> dict[str, Any]:
    """Files with what was trained; puts what they give into `MODEL`.

    A LoRA run leaves its adapter, unless that was trained on more than the base, or is too large.
    """
    trained, out, base = run.folder / RUN, run.job.out, _base(run)
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("delta.*"), *out.glob("adapter.*")):
        old.unlink()
    adapter = b""
    if (trained / "adapter").is_dir() and start == base:
        adapter = differences.packed_adapter(trained / "adapter", run.folder / "adapter")
    if 0 < len(adapter) <= differences.MOST_BYTES:
        found = {"what": "an adapter", "bytes": differences.cut(adapter, out, "adapter")}
    else:
        found = {"what": "differences from the base", **differences.leave(base, trained, out)}
    _take_up(out, base, run.folder / MODEL)
    return found


def calibrate(run: StageRun) -> StageOutcome:
    """Thresholds for mode defer, with every check, as on servers of a GPU. They are not written
    down: the stages beside this one read the same checkpoint.

    The text is what training held out; in a call without training it is all chats, for their
    beginnings.
    """
    windows, window, prompt = (45, 24, 16) if run.tiny else (400, 192, 48)
    held_out = run.folder / RUN / "data" / "held-out.jsonl"
    if not held_out.is_file():  # no training in this call
        held_out = run.folder / "all-chats.jsonl"
        rows = _lines(_chats(run))
        texts = [_rendered(run, json.loads(row)["messages"]) for row in rows]
        _write(held_out, [json.dumps({"text": text}) for text in texts])
    arguments = ["calibrate", str(_model(run)), "--data", str(held_out), "--dry-run"]
    arguments += ["--mode", "defer", "--exit-rows", "all", "--target-agreement", "0.9"]
    # Random weights write texts that are too short to count.
    arguments += ["--temperature", "0", "--windows", str(windows), "--window", str(window)]
    research = {"generated_share": 0 if run.tiny else 1, "prompt_tokens": prompt}
    return calibration_page(_report(run, "calibrate", arguments, research))


def request(run: StageRun) -> StageOutcome:
    """Starts a server and asks it."""
    out, asked = run.folder / "answers.json", run.folder / "asked.txt"
    questions = QUESTIONS.read_text(encoding="utf-8").splitlines()[: 8 if run.tiny else None]
    _write(asked, questions)
    arguments = [str(_model(run)), str(asked), str(out), "24" if run.tiny else "200"]
    arguments += ["--mode", "defer", "--exit-threshold", EXIT_THRESHOLD]
    # Not about speed: one that is not compiled starts a minute sooner.
    arguments += ["--max-model-len", "128" if run.tiny else "2048", "--enforce-eager"]
    if not run.tiny:  # beside the engines of the stage `bench`
        arguments += ["--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(4 << 30)]
    status, log = command(
        run, "request", ["benchmarks/gpu/asking.py", *arguments], most=_most(run, "request")
    )
    served = last_lines(out.with_suffix(".server.log"))
    if not out.is_file():
        raise StageError(f"no answer came; asking {ended(status)}. {last_lines(log)}\n{served}")
    found = json.loads(out.read_text(encoding="utf-8"))
    choice, metrics = found["traced"]["choices"][0], found["traced"].get("exit_metrics")
    said = str(choice["message"]["content"])
    page = f"{questions[0]}\n\n{said}\n\nDepths: {choice.get('exit_layers')}; {metrics}"
    outcome = StageOutcome({"traced": found["traced"]}, page)
    if not metrics or "chats" not in found:
        outcome.failures.append(f"no depths, or not all answers, came back. {served}")
        return outcome
    outcome.verdict.append(
        f"{metrics['tokens']} tokens over HTTP, depth speedup {metrics['depth_speedup']}; "
        f"{len(found['chats'])} answers at full depth"
    )
    return outcome


def evaluate(run: StageRun) -> StageOutcome:
    """Agreement by depth on the model's own greedy answers."""
    file = run.folder / "answers.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if "chats" not in found:
        raise StageError("there are no answers of the model: the stage `request` asks for them.")
    tokenizer = _tokenizer(_base(run))
    data = run.folder / "answers.jsonl"
    texts = [_rendered(run, messages) for messages in found["chats"]]
    _write(data, [json.dumps({"text": text}) for text in texts])
    # Behind the longest question, so that what is compared are answers.
    asked = [_rendered(run, messages[:1]) for messages in found["chats"]]
    prompt = max(len(tokenizer(text, add_special_tokens=False).input_ids) for text in asked)
    arguments = ["eval", str(_model(run)), "--data", str(data)]
    arguments += ["--window", str(prompt + (8 if run.tiny else 64))]
    arguments += ["--thresholds", EXIT_THRESHOLD, "--modes", "defer"]
    return eval_page(_report(run, "eval", arguments, {"prompt_tokens": prompt}))


def bench(run: StageRun) -> StageOutcome:
    """Beside plain vLLM and its n-grams."""
    prompts = run.folder / "prompts.jsonl"
    asked = QUESTIONS.read_text(encoding="utf-8").splitlines()
    texts = [_rendered(run, [{"role": "user", "content": question}]) for question in asked]
    _write(prompts, [json.dumps({"prompt": text}) for text in texts])
    arguments = ["bench", str(_model(run)), "--prompts", str(prompts)]
    arguments += ["--thresholds", EXIT_THRESHOLD]
    if run.tiny:
        arguments += ["--modes", "defer", "--batch-sizes", "1", "--requests", "1"]
        arguments += ["--max-tokens", "4", "--repeats", "1", "--seconds", "0"]
        arguments += ["--max-model-len", "128", "--enforce-eager"]
    else:
        arguments += ["--modes", "defer,verify", "--rivals", "ngram", "--batch-sizes", "1,8,32"]
        arguments += ["--max-tokens", "64", "--repeats", "2", "--seconds", "0.5"]
        arguments += ["--max-model-len", "2048", "--gpu-memory-utilization", "0.6"]
    return bench_page(_report(run, "bench", arguments, wait=lambda log: _disturbed(run, log)))


def _disturbed(run: StageRun, log: Path) -> bool:
    """Whether the engines have started, but other stages still run."""
    return run.pending != ["bench"] and "warm-up" in log.read_text(errors="replace")


def _report(
    run: StageRun,
    name: str,
    arguments: Sequence[str],
    research: Mapping[str, Any] | None = None,
    wait: Callable[[Path], bool] = lambda _: False,
) -> dict[str, Any]:
    """Runs a command that leaves report.json, and reads it; raises `StageError` without one.

    `research`: options that have no flag (`exitserve.cli.main`).
    """
    out = run.folder / f"{name}-report"
    code = f"import sys; from exitserve.cli import main; sys.exit(main(**{dict(research or {})!r}))"
    status, log = command(
        run,
        name,
        ["-c", code, *arguments, "--out", str(out)],
        most=_most(run, name),
        wait=wait,
    )
    file = out / "report.json"
    if status != 0 or not file.is_file():
        raise StageError(f"exitserve {name} {ended(status)}. {last_lines(log)}")
    say(f"{name}: its report is there")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _most(run: StageRun, stage: str) -> float:
    return SECONDS[stage] * (TINY_SLACK if run.tiny else SLACK)


def _base(run: StageRun) -> Path:
    """The base's folder; raises `StageError` if the stage `model` has not made it."""
    if not (run.folder / BASE / "config.json").is_file():
        raise StageError("there is no base: the stage `model` makes it.")
    return run.folder / BASE


def _start(run: StageRun) -> Path:
    """What training begins from."""
    base, start = _base(run), run.folder / START
    return start if start.is_dir() else base


def _model(run: StageRun) -> Path:
    """What is measured: what training left, or a model with exits that was given.

    Raises:
        StageError: there is none.
    """
    for folder in (run.folder / MODEL, run.folder / RUN, _start(run)):
        file = folder / "config.json"
        if file.is_file() and "multi_exit" in json.loads(file.read_text(encoding="utf-8")):
            return folder
    raise StageError("there is no model with exits: the stage `train` makes one.")


def _chats(run: StageRun) -> Path:
    """The chats' file; raises `StageError` if the stage `chats` has not made it."""
    if not (run.folder / CHATS).is_file():
        raise StageError("there are no chats: the stage `chats` reads or writes them.")
    return run.folder / CHATS


@cache
def _tokenizer(checkpoint: Path) -> Any:
    from exitserve.windows import load_tokenizer

    return load_tokenizer(checkpoint)


def _rendered(run: StageRun, messages: list[dict[str, str]]) -> str:
    """A chat as the model sees it, up to its turn where it is the assistant's."""
    asks = messages[-1]["role"] == "user"
    template = _tokenizer(_base(run)).apply_chat_template
    return str(template(messages, tokenize=False, add_generation_prompt=asks))


def _lines(file: Path) -> list[str]:
    """All lines but one that was cut short."""
    raw = file.read_bytes()
    return (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode().split("\n")[:-1]


def _write(file: Path, lines: Iterable[str]) -> None:
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
