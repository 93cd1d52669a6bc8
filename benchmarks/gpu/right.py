"""The stages of "is it right": IF nodes by themselves, then answers that must be others' answers.

A small model with random weights, whose confidences spread, in float32: one pass in graphs with our
kernels, and the same requests without both, must give the same tokens at the same depths; and mode
`verify` must give plain vLLM's tokens. In bfloat16, and between compiled code and code that is not,
rounding may decide between two tokens, so there the share that is the same is shown.

The last engine is not told the size of its cache, so vLLM profiles: it binds small caches, captures
graphs to see what they need, lets both go, and does it again.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from child import Child, EachOther, EngineSpec, Passed
from sessions import PASS_SECONDS, START_SECONDS
from shapes import Work, random_prompts
from stages import StageError, StageOutcome, StageRun, command, ended, last_lines, say

from exitserve.arguments import drafting_options
from exitserve.checkpoint.block import MultiExit, write_multi_exit
from exitserve.engine.launch import check_rules
from exitserve.reference import load_reference
from exitserve.settings import PLAIN, Setting

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
KINDS: tuple[dict[str, Any], ...] = (
    # By confidence, at a layer, or never.
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


EXITS = EachOther(mode="fixed", kinds=KINDS)
VERIFY = Setting(mode="verify", exit_threshold=0.5)
DEFER = Setting(mode="defer", exit_threshold=0.1)


@dataclass(frozen=True, kw_only=True)
class Answering:
    """An engine, and what it is asked for."""

    setting: Setting
    exits: Mapping[str, Any] | None
    """None for plain vLLM."""
    llm: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of `vllm.LLM`."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """More of the environment."""


_EXITS = {"exit_layers": list(EXIT_LAYERS), "exit_rows": "all"}
_DRAFTS = {"exit_layers": [EXIT_LAYERS[0]], "exit_rows": "all"}
_VERIFY = {**drafting_options(), **_DRAFTS}
_DEFER = {"mode": "defer", "exit_threshold": DEFER.exit_threshold, **_DRAFTS}
_IN_TORCH = {"EXITSERVE_KERNELS": "torch"}
_EAGER = {"enforce_eager": True}
_ROOMY = {"max_num_batched_tokens": 256}
"""For drafts of all rows."""


def _compilation(mode: int, graphs: str) -> dict[str, Any]:
    return {"compilation_config": {"mode": mode, "cudagraph_mode": graphs}}


_GRAPHS = _compilation(0, "FULL_DECODE_ONLY")
ENGINES = {
    "simple": Answering(setting=EXITS, exits=_EXITS, llm=_EAGER, variables=_IN_TORCH),
    "graphs": Answering(setting=EXITS, exits=_EXITS, llm=_GRAPHS),
    "compiled": Answering(
        setting=EXITS, exits=_EXITS, llm=_compilation(3, "NONE"), variables=_IN_TORCH
    ),
    "compiled graphs": Answering(setting=EXITS, exits=_EXITS),
    "compiled pieces": Answering(setting=EXITS, exits=_EXITS, llm=_compilation(3, "PIECEWISE")),
    "plain": Answering(setting=PLAIN, exits=None, llm=_ROOMY | _EAGER),
    "verify": Answering(setting=VERIFY, exits=_VERIFY, llm=_ROOMY | _GRAPHS),
    "compiled verify": Answering(setting=VERIFY, exits=_VERIFY, llm=_ROOMY),
    "simple defer": Answering(
        setting=DEFER, exits=_DEFER, llm=_ROOMY | _EAGER, variables=_IN_TORCH
    ),
    "defer": Answering(setting=DEFER, exits=_DEFER, llm=_ROOMY | _GRAPHS),
    "compiled defer": Answering(setting=DEFER, exits=_DEFER, llm=_ROOMY),
}
"""Simple ones have neither graphs nor kernels of ours."""
PAIRS = (
    ("graphs", "simple"),
    ("compiled graphs", "compiled"),
    ("compiled pieces", "compiled"),
    ("verify", "plain"),
    ("defer", "simple defer"),
    ("compiled", "simple"),
    ("compiled verify", "plain"),
    ("compiled defer", "simple defer"),
)
"""Engines, each with the one whose answers it must give in float32."""
COMPILERS_OWN = PAIRS[-3:]
"""Compiled code adds in another order: a near tie may fall otherwise, so the share is shown."""
LEAST_OF_THE_ORACLE = 0.9
"""Share of the tokens that must be the oracle's. A CPU adds in another order, too; behind a near
tie that falls otherwise, all tokens of a request may be others."""
LEAST_WITH_TIES = 0.1
"""Share of the tokens where rounding may decide between two. Right answers of 60 tokens, which are
others from the first such tie on, have shared 0.26 and more; wrong ones share next to none."""
DTYPES = ("float32", "bfloat16")
EXACT_SUMS = {"TRITON_F32_DEFAULT": "ieee"}
"""Of the environment: products of float32 in Triton's attention are float32's, not tf32's, whose
rounding depends on how many tokens a row has in a pass."""
CACHE_BYTES = 64 << 20
"""More than `num_gpu_blocks_override` takes. vLLM does not profile where it is told."""


def branches(run: StageRun) -> StageOutcome:
    """A graph with IF nodes, in a process of its own."""
    out = run.folder / "branches.json"
    status, log = command(run, "branches", ["benchmarks/gpu/branches.py", str(out)], most=90)
    if not out.is_file():
        raise StageError(f"branches.py {ended(status)}. {last_lines(log)}")
    facts = json.loads(out.read_text(encoding="utf-8"))
    word = "right" if not facts["wrong"] else "WRONG"
    kind = "in a graph" if facts["if_nodes"] else "outside of graphs, which a CPU has none of"
    page = f"nested branches {kind}: {word}; IF nodes of {facts['from']}"
    page += f", torch {facts['torch']}, CUDA {facts['cuda']}; the first graph took "
    page += f"{facts['graph_bytes'] >> 20} MiB, 40 more {facts['more_graphs_bytes'] >> 20}"
    return StageOutcome(facts, page, list(facts["wrong"]), verdict=[page])


def answers(run: StageRun) -> StageOutcome:
    """All engines of a type at once; then one by itself, which profiles."""
    outcome = StageOutcome({"pairs": []})
    folder = Path(tempfile.mkdtemp(prefix="right-", dir=run.folder))
    model = small_model(folder)
    names = ("simple", "graphs") if run.quick else tuple(ENGINES)

    def found(name: str, dtype: str, *, profiles: bool = False) -> Answered | StageError:
        try:
            return _answered(run, model, name, dtype, profiles=profiles)
        except StageError as failure:
            return failure

    def compare(pair: tuple[str, str], own: Any, truth: Any, dtype: str, more: str = "") -> None:
        must = dtype == DTYPES[0] and pair not in COMPILERS_OWN
        label = f"{' and '.join(pair)}, {dtype}{more}"
        _compare(outcome, label, own, truth, least=1.0 if must else LEAST_WITH_TIES)

    truth: Answered | StageError | None = None
    for dtype in DTYPES[: 1 if run.quick else None]:
        with ThreadPoolExecutor(1 if run.tiny else len(names)) as threads:
            given = threads.map(lambda name, dtype=dtype: found(name, dtype), names)
            every = dict(zip(names, given, strict=True))
        if truth is None:
            truth = every["simple"]
            label = f"simple and the oracle on the CPU, {dtype}"
            _compare(outcome, label, truth, oracles(model), least=LEAST_OF_THE_ORACLE)
        for pair in PAIRS:
            if pair[0] in every:
                compare(pair, every[pair[0]], every[pair[1]], dtype)
        run.publish("answers", outcome)
    own = found("graphs", DTYPES[0], profiles=True)
    compare(("graphs", "simple"), own, truth, DTYPES[0], ", sized by vLLM")
    return outcome


@dataclass(frozen=True)
class Answered:
    """What an engine gave."""

    facts: dict[str, Any]
    """How it runs."""
    passed: dict[str, Passed]
    """By work."""


def _compare(
    outcome: StageOutcome,
    label: str,
    own: Answered | StageError,
    truth: Answered | StageError,
    *,
    least: float,
) -> None:
    """Adds a pair to the outcome; `least` is the share of the tokens that must be the same."""
    for one in (own, truth):
        if isinstance(one, StageError):
            outcome.failures.append(f"{label}: {one}")
            outcome.verdict.append(f"{label}: FAILED")
            return
    assert isinstance(own, Answered)
    assert isinstance(truth, Answered)
    shares = {work: same(own.passed[work], truth.passed[work]) for work in WORKS}
    found = min(shares.values())
    if found < least:
        outcome.failures.append(f"{label}: {1 - found:.2%} of the tokens differ")
    if not any(one.preemptions for one in own.passed.values()):
        outcome.failures.append(f"{label}: no request was preempted")
    word = "the same" if found == 1 else f"at least {found:.2%} the same"
    outcome.verdict.append(f"{label}: {word}; {_engine_line(own.facts)}")
    depths = Counter(
        depth for one in own.passed.values() for ids in one.depths or [] for depth in ids
    )
    outcome.data["pairs"].append(
        {"pair": label, "same": shares, "depths": depths, "engines": [own.facts, truth.facts]}
    )
    rows = "".join(f"| {label} | {work} | {share:.2%} |\n" for work, share in shares.items())
    header = "| pair | requests | tokens and depths the same |\n| --- | --- | --- |\n"
    outcome.page = (outcome.page or header) + rows
    say(label)


def _engine_line(facts: Mapping[str, Any]) -> str:
    """How an engine ran, and its graphs' memory."""
    memory = f"{facts.get('graph_gib', 0.0):.2f} GiB"
    return f"{facts.get('attention', '?')}, graphs {facts['graphs']} ({memory})"


def _answered(run: StageRun, model: Path, name: str, dtype: str, *, profiles: bool) -> Answered:
    """Starts an engine and asks it for all works; raises `StageError`."""
    engine = ENGINES[name]
    llm = {**LLM, "dtype": dtype, **engine.llm, **dict(run.llm)}
    if run.tiny:
        llm["enforce_eager"] = True
    if not profiles:
        llm["kv_cache_memory_bytes"] = CACHE_BYTES
    spec = EngineSpec(
        model_dir=model,
        exits=engine.exits,
        forced=None,
        llm=llm,
        vocab_size=VOCABULARY,
        variables=EXACT_SUMS | dict(engine.variables),
    )
    child = Child(spec, model.parent / f"{name}-{dtype}-{profiles}.log")
    try:
        facts = child.ready(run.left((4 if run.tiny else 1) * START_SECONDS))
        passed = {
            work: child.run(engine.setting, given, run.left(PASS_SECONDS), traced=True)
            for work, given in WORKS.items()
        }
    finally:
        child.stop()
    say(f"{name}, {dtype}")
    return Answered(facts, passed)


def oracles(model: Path) -> Answered:
    """What the oracle says to all works of `EXITS`, in float32 on the CPU."""
    oracle, rules = load_reference(str(model), exit_rows="all"), check_rules(model, {})
    passed = {}
    for prompt_tokens in {work.prompt_tokens for work in WORKS.values()}:
        works = {k: work for k, work in WORKS.items() if work.prompt_tokens == prompt_tokens}
        most, longest = (
            max(getattr(work, name) for work in works.values()) for name in ("batch", "max_tokens")
        )
        prompts = random_prompts(VOCABULARY, most, prompt_tokens)
        found = [
            oracle.decode(prompt, longest, rules.policy_for(own), ignore_eos=True)
            for prompt, own in zip(prompts, cycle(KINDS), strict=False)
        ]
        for name, work in works.items():  # the first requests of a work are always the same
            own = found[: work.batch]
            passed[name] = Passed(
                tokens=tuple(tuple(one.token_ids[: work.max_tokens]) for one in own),
                times=(),
                depths=[tuple(one.exit_layers[: work.max_tokens]) for one in own],
            )
    return Answered({}, passed)


def same(own: Passed, other: Passed) -> float:
    """Share of the tokens that are the other's, at its depths where both have depths."""
    both = own.depths is not None and other.depths is not None

    def listed(passed: Passed) -> Iterator[tuple[int, int | None]]:
        depths: Sequence[Sequence[int | None]] = [[None] * len(one) for one in passed.tokens]
        if both:
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
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.save_pretrained(target)
    write_multi_exit(target, MultiExit(exit_layers=EXIT_LAYERS))
    return target
