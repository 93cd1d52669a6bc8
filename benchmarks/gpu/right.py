"""The stages of "is it right": IF nodes by themselves, then answers that must be others' answers.

A small model with random weights, whose confidences spread, in float32: one pass in graphs with our
kernels, and the same requests without both, must give the same tokens at the same depths; and mode
`verify` must give plain vLLM's tokens. In bfloat16 rounding may decide between two tokens, so there
the share that is the same is shown.

Nothing is said of the size of the cache, so vLLM profiles: it binds small caches, captures graphs
to see what they need, lets both go, and does it again.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from child import Child, EngineSpec, Passed
from sessions import PASS_SECONDS, START_SECONDS
from shapes import Work
from stages import StageError, StageOutcome, StageRun, command, last_lines, say

from exitserve.arguments import verify_options
from exitserve.bench.settings import PLAIN, Fields, Setting
from exitserve.checkpoint import MultiExit, write_multi_exit
from exitserve.report import markdown_table

VOCABULARY = 512
EXIT_LAYERS = (2, 4)
SMALL = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    # Larger than usual, so that confidences of random weights spread out.
    "initializer_range": 0.12,
    "tie_word_embeddings": True,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
KINDS: tuple[Fields, ...] = (
    {"exit_threshold": 0.05},
    {"exit_layer": 2},
    {"exit_threshold": 0.1},
    {"exit_threshold": 1.0},
    {"exit_threshold": 0.2},
    {"exit_layer": 4},
)
WORKS = {
    "1": Work(batch=1, prompt_tokens=24, max_tokens=24),
    "3": Work(batch=3, prompt_tokens=24, max_tokens=24),
    "7": Work(batch=7, prompt_tokens=24, max_tokens=24),
    "31": Work(batch=31, prompt_tokens=24, max_tokens=24),
    "7, one every 3 steps": Work(batch=7, prompt_tokens=40, max_tokens=24, every=3),
    "31 in too small a cache": Work(batch=31, prompt_tokens=40, max_tokens=60),
}
LLM: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "use_tqdm_on_load": False,
    "seed": 0,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "max_model_len": 128,
    "max_num_seqs": 32,
    # Prompts are computed in parts, while other requests exit.
    "max_num_batched_tokens": 64,
    "block_size": 32,
    # Room for 20 requests of a hundred tokens.
    "num_gpu_blocks_override": 80,
    "gpu_memory_utilization": 0.5,
}
IN_TORCH = {"EXITSERVE_KERNELS": "torch"}


@dataclass(frozen=True, kw_only=True)
class EachOther(Setting):
    """Requests that exit by confidence, at a layer, or never, beside each other."""

    def fields(self, count: int) -> list[Fields]:
        """See `Setting`."""
        return [KINDS[index % len(KINDS)] for index in range(count)]


EXITS = EachOther(mode="mixed")
VERIFY = Setting(mode="verify", exit_threshold=0.5)


@dataclass(frozen=True)
class Pair:
    """Two engines whose answers must be the same."""

    name: str
    dtype: str
    setting: Setting
    reference: tuple[Setting, dict[str, Any] | None, dict[str, Any], dict[str, str]]
    """Its setting, exits, more arguments of `vllm.LLM`, and more of the environment."""
    options: dict[str, Any]
    """Of the engine with exits."""
    must_be_same: bool


_MADE = {"exit_layers": list(EXIT_LAYERS), "exit_checks": "all"}
_EAGER = (EXITS, _MADE, {"enforce_eager": True}, IN_TORCH)
PAIRS = (
    Pair("graphs and kernels", "float32", EXITS, _EAGER, _MADE, True),
    Pair(
        "verify beside plain vLLM",
        "float32",
        VERIFY,
        (PLAIN, None, {}, {}),
        {**verify_options(), "exit_layers": [EXIT_LAYERS[0]], "exit_checks": "all"},
        True,
    ),
    Pair("graphs and kernels", "bfloat16", EXITS, _EAGER, _MADE, False),
)


def branches(run: StageRun) -> StageOutcome:
    """A graph with IF nodes, in a process of its own."""
    out = run.folder / "branches.json"
    status, log = command(run, "branches", ["benchmarks/gpu/branches.py", str(out)], most=90)
    if not out.is_file():
        raise StageError(f"branches.py ended with status {status}. {last_lines(log)}")
    facts = json.loads(out.read_text(encoding="utf-8"))
    word = "right" if not facts["wrong"] else "WRONG"
    kind = "in a graph" if facts["if_nodes"] else "outside of graphs: this torch has no IF nodes"
    page = f"nested branches {kind}: {word}; torch {facts['torch']}, CUDA {facts['cuda']}"
    return StageOutcome(facts, page, list(facts["wrong"]), verdict=[page])


def answers(run: StageRun) -> StageOutcome:
    """Every pair, one engine after the other: a profile wants the card for itself."""
    outcome = StageOutcome({"pairs": []})
    rows: list[list[str]] = []
    for pair in PAIRS[: 1 if run.quick else None]:
        label = f"{pair.name}, {pair.dtype}"
        try:
            facts, found, truth = _both(run, pair)
        except StageError as failure:
            outcome.failures.append(f"{label}: {failure}")
            outcome.verdict.append(f"{label}: FAILED")
            continue
        shares = {work: same(found[work], truth[work], pair.setting) for work in found}
        own = [[label, work, f"{share:.2%}"] for work, share in shares.items()]
        rows += own
        least = min(shares.values())
        if pair.must_be_same and least < 1:
            outcome.failures.append(f"{label}: {1 - least:.2%} of the tokens differ")
        if not any(one.preemptions for one in found.values()) and pair.setting is EXITS:
            outcome.failures.append(f"{label}: no request was preempted")
        word = "the same" if least == 1 else f"at least {least:.2%} the same"
        outcome.verdict.append(f"{label}: {word}; {_engine_line(facts)}")
        outcome.data["pairs"].append({"pair": label, "same": shares, "engines": facts})
        outcome.page = markdown_table(["pair", "requests", "tokens and depths the same"], rows)
        run.publish("answers", outcome)
        say(label)
    return outcome


def _engine_line(facts: dict[str, dict[str, Any]]) -> str:
    """How the engine with exits ran, and its graphs' memory beside that of the other."""
    own, other = facts["exits"], facts["reference"]
    memory = " and ".join(f"{one.get('graph_gib', 0.0):.2f}" for one in (own, other))
    return f"{own.get('attention', '?')}, graphs {own['graphs']} ({memory} GiB)"


def _both(
    run: StageRun, pair: Pair
) -> tuple[dict[str, dict[str, Any]], dict[str, Passed], dict[str, Passed]]:
    """How both engines ran, and what each of them answered to each work."""
    folder = Path(tempfile.mkdtemp(prefix="right-", dir=run.folder))
    model = small_model(folder)
    setting, exits, llm, variables = pair.reference
    specs = {
        "exits": (pair.setting, pair.options, {}, {}),
        "reference": (setting, exits, llm, variables),
    }
    facts: dict[str, dict[str, Any]] = {}
    answered: dict[str, dict[str, Passed]] = {}
    for name, (chosen, options, more, environment) in specs.items():
        spec = EngineSpec(
            model_dir=model,
            exits=options,
            forced=None,
            llm=LLM | {"dtype": pair.dtype} | more | _of_a_cpu(run) | dict(run.llm),
            vocab_size=VOCABULARY,
            variables=environment,
        )
        child = Child(spec, folder / f"{name}.log")
        try:
            patience = 4 if run.tiny else 1
            facts[name] = child.ready(run.left(patience * START_SECONDS))
            answered[name] = {
                work: child.run(chosen, given, run.left(PASS_SECONDS), traced=chosen is EXITS)
                for work, given in WORKS.items()
            }
        finally:
            child.stop()
    return facts, answered["exits"], answered["reference"]


def _of_a_cpu(run: StageRun) -> dict[str, Any]:
    return {"enforce_eager": True} if run.tiny else {}


def same(own: Passed, other: Passed, setting: Setting) -> float:
    """Share of the tokens that are the other's, at its depths where both have depths."""

    def listed(passed: Passed) -> Iterator[tuple[int, int | None]]:
        depths: Sequence[Sequence[int | None]] = [[None] * len(one) for one in passed.tokens]
        if setting is EXITS:
            depths = passed.depths or depths
        for tokens, own_depths in zip(passed.tokens, depths, strict=True):
            yield from zip(tokens, own_depths, strict=True)

    pairs = list(zip(listed(own), listed(other), strict=True))
    return sum(one == another for one, another in pairs) / len(pairs)


def small_model(folder: Path) -> Path:
    """A checkpoint of random weights with two exits; always the same."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SMALL)
    target = folder / "small"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(target)
    write_multi_exit(target, MultiExit(exit_layers=EXIT_LAYERS))
    return target
