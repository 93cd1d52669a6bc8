"""Replays a production trace by its arrival times against running servers, one after the other.

    vllm serve MODEL --port 8001 &  exitserve serve MODEL --mode verify --port 8002 &
    python benchmarks/trace_replay.py TRACE --texts FILE --model MODEL --minutes 10 \
        --server plain=http://127.0.0.1:8001 --server verify=http://127.0.0.1:8002

TRACE is a table of a trace of Azure's (CSV: TIMESTAMP, ContextTokens, GeneratedTokens) or lines of
a Mooncake trace (JSON: timestamp in ms, input_length, output_length, hash_ids). Traces have no
text, so prompts are cut from FILE; requests that share blocks in a Mooncake trace share text. A
small machine replays a scaled trace: --rate 0.1 sends every tenth request, and --lengths 0.25 cuts
prompts and answers to a quarter.

A server may be several replicas: NAME=URL,URL sends each request to the replica with the fewest in
progress, in turn among equals. Or they are behind a router, whose URL is given.

vLLM's own benchmark client measures: time to first token, time per token after it, and goodput,
the requests that meet the --goal, a second. With --speeds 1,2,4 the trace is also replayed in half
and a quarter of its time; the last lines say which of these loads each server carries at the goal.
The table and report.json also say how many answers are the same as the first server's (in 16 bits,
batches round differently; use float32 to compare).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from exitserve.errors import ExitServeError

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK = 512
"""Tokens that an entry of `hash_ids` stands for."""
LEAST_PROMPT = 8
CARRIED = 0.9
"""The share of the requests that meet the goal under a load that a server carries."""


@dataclass(frozen=True)
class Arrival:
    """One request of a trace."""

    seconds: float
    """After the first."""
    prompt: int
    """Tokens."""
    answer: int
    """Tokens."""
    blocks: tuple[int, ...] = ()
    """Names of its blocks of `MOONCAKE_BLOCK` tokens; none where the trace does not tell."""


@dataclass(frozen=True)
class Scale:
    """What a smaller machine replays of a trace."""

    minutes: float
    rate: float
    """The share of the requests, evenly."""
    lengths: float
    """By which prompts and answers are cut."""
    context: int
    """Most tokens of a prompt and its answer."""


def read_trace(path: Path) -> Iterator[Arrival]:
    """Reads a trace in either format.

    Raises:
        ExitServeError: it is neither.
    """
    with path.open() as file:
        first = file.readline()
        file.seek(0)
        if first.startswith("{"):
            for line in file:
                one = json.loads(line)
                lengths = one["input_length"], one["output_length"]
                yield Arrival(one["timestamp"] / 1000, *lengths, tuple(one["hash_ids"]))
            return
        if tuple(first.strip().split(",")) != AZURE:
            raise ExitServeError(
                f"{path} is no trace: its first line is {first.strip()[:60]!r}; expected "
                f"{','.join(AZURE)}, or JSON lines with timestamp, input_length and output_length."
            )
        start: datetime | None = None
        for row in csv.DictReader(file):
            # Seven digits after the point, one more than Python reads.
            at = datetime.fromisoformat(row[AZURE[0]][:26])
            start = start or at
            yield Arrival((at - start).total_seconds(), int(row[AZURE[1]]), int(row[AZURE[2]]))


def scaled(arrivals: Iterator[Arrival], scale: Scale) -> list[Arrival]:
    """The requests that are replayed."""
    found, due = list[Arrival](), 0.0
    for one in arrivals:
        if one.seconds > scale.minutes * 60:
            break
        due += scale.rate
        if due < 1.0:
            continue
        due -= 1.0
        answer = max(1, min(round(one.answer * scale.lengths), scale.context // 2))
        most = scale.context - answer
        prompt = max(LEAST_PROMPT, min(round(one.prompt * scale.lengths), most))
        found.append(Arrival(one.seconds, prompt, answer, one.blocks))
    return found


def prompt_of(arrival: Arrival, number: int, tokens: Sequence[int], lengths: float) -> list[int]:
    """The prompt of a request, from the tokens of a text: the same blocks, the same tokens.

    Args:
        arrival: the request.
        number: its place in the trace.
        tokens: of the text, which is taken as a ring.
        lengths: as in `Scale`.
    """

    def cut(place: int, size: int) -> list[int]:
        # Far from each other, whatever the text's length: 7919 is prime.
        start = place * 7919 % len(tokens)
        return [tokens[(start + step) % len(tokens)] for step in range(size)]

    if not arrival.blocks:
        return cut(number, arrival.prompt)
    block = max(1, round(MOONCAKE_BLOCK * lengths))
    joined = [token for name in arrival.blocks for token in cut(name, block)]
    return joined[: arrival.prompt]


class Replicas:
    """Servers that share requests, each of which goes where the fewest are in progress."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Takes their addresses, without paths."""
        self._in_progress = dict.fromkeys(urls, 0)
        """In the order in which they got their last requests: equals take turns."""
        self.sent = dict.fromkeys(urls, 0)
        """Requests by address, those included that warm up."""

    async def send(self, request_func_input: Any, session: Any, pbar: Any = None) -> Any:
        """Sends a request as vLLM's benchmark client does, to one of them."""
        from vllm.benchmarks.lib.endpoint_request_func import async_request_openai_completions

        url = min(self._in_progress, key=self._in_progress.__getitem__)
        self._in_progress[url] = self._in_progress.pop(url) + 1
        self.sent[url] += 1
        request = replace(request_func_input, api_url=f"{url}/v1/completions")
        try:
            return await async_request_openai_completions(request, session, pbar)
        finally:
            self._in_progress[url] -= 1


async def replay(
    urls: Sequence[str],
    model: str,
    tokenizer: Any,
    requests: Sequence[Any],
    body: Mapping[str, Any],
    goal: Mapping[str, float],
) -> dict[str, Any]:
    """Sends requests to a server when they are due; returns vLLM's figures and the answers.

    Args:
        urls: of its replicas, without paths.
        model: its name there.
        tokenizer: counts tokens of answers.
        requests: see `requests_of`.
        body: more fields of each request.
        goal: most milliseconds, by vLLM's name of a time.
    """
    from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS
    from vllm.benchmarks.serve import TaskType, benchmark

    replicas = Replicas(urls)
    ASYNC_REQUEST_FUNCS["replicas"] = replicas.send
    with contextlib.redirect_stdout(sys.stderr):
        figures: dict[str, Any] = await benchmark(
            task_type=TaskType.GENERATION,
            endpoint_type="replicas",
            api_url=f"{urls[0]}/v1/completions",
            base_url=urls[0],
            model_id=model,
            model_name=model,
            tokenizer=tokenizer,
            input_requests=list(requests),
            logprobs=None,
            request_rate=float("inf"),
            burstiness=1.0,
            disable_tqdm=False,
            num_warmups=8,
            profile=False,
            selected_percentile_metrics=["ttft", "tpot"],
            selected_percentiles=[99.0],
            ignore_eos=True,
            goodput_config_dict=dict(goal),
            max_concurrency=None,
            lora_modules=None,
            extra_headers=None,
            extra_body={"temperature": 0.0, **body},
            self_timed=True,
        )
    good = round(figures["request_goodput"] * figures["duration"])  # requests: a rate was divided
    return figures | {"within_goal": good / len(requests), "sent": replicas.sent}


def requests_of(
    arrivals: Sequence[Arrival], tokens: Sequence[int], lengths: float, speed: float = 1.0
) -> list[Any]:
    """vLLM's requests, with their prompts; `speed`: how often the trace fits into its time."""
    from vllm.benchmarks.datasets import SampleRequest

    return [
        SampleRequest(
            prompt=prompt_of(one, number, tokens, lengths),
            prompt_len=one.prompt,
            expected_output_len=one.answer,
            request_id=str(number),
            timestamp=one.seconds / speed,
        )
        for number, one in enumerate(arrivals)
    ]


COLUMNS = {
    "requests": ("completed", 0),
    "failed": ("failed", 0),
    "requests/s": ("request_throughput", 2),
    "output tokens/s": ("output_throughput", 1),
    "first token, p50 ms": ("median_ttft_ms", 0),
    "p99": ("p99_ttft_ms", 0),
    "per token, p50 ms": ("median_tpot_ms", 2),
    "p99 ms": ("p99_tpot_ms", 2),
    "goodput, requests/s": ("request_goodput", 2),
    "within the goal": ("within_goal", 3),
    "same answers": ("same_answers", 3),
}
"""By heading, vLLM's name of a figure and its digits."""


def table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Markdown lines, a row for each server."""
    lines = [f"| server | {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * len(COLUMNS)]
    for name, found in results.items():
        cells = [
            "" if found.get(key) is None else f"{found[key]:.{digits}f}"
            for key, digits in COLUMNS.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def same_answers(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """By server, the share of its answers that are the first server's."""
    first = next(iter(results.values()))["generated_texts"]
    return {
        name: sum(a == b for a, b in zip(found["generated_texts"], first, strict=True)) / len(first)
        for name, found in results.items()
    }


def carried(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each server: the highest load of which `CARRIED` met the goal."""
    best: dict[str, tuple[float, str]] = {}
    for found in results.values():
        load = found["request_throughput"]
        said = f"{load:.2f} requests/s, {found['output_throughput']:.1f} output tokens/s"
        reached = (load, said) if found["within_goal"] >= CARRIED else (0.0, "none of these loads")
        best[found["server"]] = max(best.get(found["server"], reached), reached)
    return [f"{name}, {CARRIED:.0%} within the goal: {said}" for name, (_, said) in best.items()]


def _named(text: str) -> tuple[str, str]:
    name, mark, rest = text.partition("=")
    if not (name and mark and rest):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, rest


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument(
        "--server",
        type=_named,
        action="append",
        required=True,
        metavar="NAME=URL",
        help="several replicas: NAME=URL,URL",
    )
    parser.add_argument(
        "--fields",
        type=_named,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help='exit fields of a server\'s requests, for example ours={"exit_target": 0.98}',
    )
    parser.add_argument("--model", required=True, help="as served; its tokenizer is read")
    parser.add_argument("--served-model-name", help="its name on the servers, if it is another")
    parser.add_argument("--texts", type=Path, required=True, help="text that prompts are cut from")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the trace (default 10)")
    parser.add_argument("--rate", type=float, default=1.0, help="share of the requests (default 1)")
    parser.add_argument(
        "--speeds", default="1", metavar="S,S", help="replays the trace S times as fast (default 1)"
    )
    parser.add_argument("--lengths", type=float, default=1.0, help="of prompts and answers")
    parser.add_argument("--context", type=int, default=4096, help="most tokens (default 4096)")
    parser.add_argument(
        "--goal", default="ttft:1000,tpot:50", help="ms (default: ttft:1000,tpot:50)"
    )
    parser.add_argument("--out", type=Path, help="report.json")
    return parser


def main() -> int:
    """Replays, prints the table, and writes the report."""
    args = _parser().parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens = tokenizer(args.texts.read_text())["input_ids"]
    scale = Scale(args.minutes, args.rate, args.lengths, args.context)
    arrivals = scaled(read_trace(args.trace), scale)
    if not arrivals:
        raise SystemExit("nothing to replay: raise --minutes or --rate.")
    prompts, answers = sum(one.prompt for one in arrivals), sum(one.answer for one in arrivals)
    print(f"{len(arrivals)} requests, {prompts} prompt tokens, {answers} answer tokens", flush=True)
    goal = {name: float(ms) for name, ms in (one.split(":") for one in args.goal.split(","))}
    fields = {name: {"vllm_xargs": json.loads(text)} for name, text in args.fields}
    served = args.served_model_name or args.model
    results: dict[str, dict[str, Any]] = {}
    for speed in map(float, args.speeds.split(",")):
        requests = requests_of(arrivals, tokens, scale.lengths, speed)
        for name, urls in args.server:
            label = name if speed == 1 else f"{name} x{speed:g}"
            body = fields.get(name, {})
            run = replay(urls.split(","), served, tokenizer, requests, body, goal)
            results[label] = asyncio.run(run) | {"server": name}
    for name, share in same_answers(results).items():
        results[name]["same_answers"] = share
    print("\n".join([*table(results), "", *carried(results)]))
    if args.out is not None:
        kept = {"sent", *(key for key, _ in COLUMNS.values())}
        figures = {n: {k: v for k, v in one.items() if k in kept} for n, one in results.items()}
        report = {"scale": vars(scale), "goal_ms": goal, "servers": figures}
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
