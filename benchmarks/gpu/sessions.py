"""Timed passes of the cases of one phase, all engines in turn.

As many engines as fit on the card are alive together, and every round runs each setting once, so
that ratios are formed within seconds. Those that do not fit run afterwards, one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import environment
from child import Child, EngineSpec, Passed
from shapes import DRAFTERS, DRAFTS, ENGINES, SHARE, EngineCase, Shape, Work
from stages import StageError, StageRun, say

from exitserve.bench.engines import SETTLE_SECONDS
from exitserve.bench.measures import Timing, timing_of
from exitserve.bench.rivals import speculation_of
from exitserve.costs.byte_costs import DecoderShape, shape_of
from exitserve.errors import ExitServeError
from exitserve.settings import PLAIN, Setting

START_SECONDS = 240
PASS_SECONDS = 120
OVERHEAD_BYTES = 4 << 30
"""Of an engine, beside weights and cache: CUDA's context, graphs, workspaces, activations."""
USABLE = 0.95
"""Of the card's memory."""
BLOCK = 128
"""Tokens of a cache block, at most. Each request has room for one more than it needs, so that new
tokens take the place of nobody's cached prompt."""


@dataclass(frozen=True)
class Contender:
    """What a pass runs."""

    engine: str
    setting: Setting
    work: Work


@dataclass
class Seen:
    """The passes of a contender."""

    traced: Passed
    timings: list[Timing] = field(default_factory=list)


@dataclass
class Found:
    """What a phase gave."""

    seen: dict[Contender, Seen] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """How each engine runs."""
    failures: dict[str, str] = field(default_factory=dict)
    """By engine: why it has no more passes."""
    together: tuple[str, ...] = ()
    """The engines that were alive at the same time."""


def decoder(shape: Shape, engine: str) -> DecoderShape:
    """The sizes of an engine's model."""
    config = {**shape.config, "num_hidden_layers": shape.layers_of(engine)}
    drafter = DRAFTERS.get(engine)
    rows = None if drafter is None else drafter.rows
    return replace(shape_of(config, str(shape.config["dtype"])), exit_rows=rows)


def contenders(cases: Iterable[EngineCase]) -> list[Contender]:
    """Those of the cases, and plain vLLM at the same work before them; each once."""
    found: dict[Contender, None] = {}
    for case in sorted(cases, key=lambda case: case.work.batch):
        found[Contender("plain", PLAIN, case.work)] = None
        found[Contender(case.engine, case.setting, case.work)] = None
    return list(found)


def measure(run: StageRun, shape: Shape, cases: Sequence[EngineCase], folder: Path) -> Found:
    """All passes of a phase.

    Args:
        run: its options.
        shape: of the model.
        cases: of the phase.
        folder: for checkpoints and logs.
    """
    wanted = contenders(cases)
    used = {one.engine for one in wanted}
    specs = {
        name: _spec(run, shape, name, [one.work for one in wanted], folder)
        for name in ENGINES
        if name in used
    }
    found = Found(together=_fitting(shape, specs))
    alone = [(name,) for name in specs if name not in found.together]
    for group in filter(None, (found.together, *alone)):
        own = {name: specs[name] for name in group}
        with _alive(own, folder) as children:
            _wait(run, children, found)
            for work in dict.fromkeys(one.work for one in wanted):
                of_work = [one for one in wanted if one.work == work and one.engine in own]
                _rounds(run, children, of_work, found)
    return found


def _spec(
    run: StageRun, shape: Shape, engine: str, works: Sequence[Work], folder: Path
) -> EngineSpec:
    longest = max(work.prompt_tokens + work.max_tokens for work in works)
    many = max(work.batch for work in works)
    llm: dict[str, Any] = {
        "dtype": shape.config["dtype"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "max_num_seqs": many,
        "max_model_len": longest,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": any(work.keeps_prompts for work in works),
        "seed": 0,
        # Given in bytes, vLLM does not look at what other engines leave it.
        "kv_cache_memory_bytes": _cache_bytes(shape, engine, works),
        "gpu_memory_utilization": 0.1,
    }
    if run.tiny:
        llm["enforce_eager"] = True
    if engine == "ngram":
        llm["disable_log_stats"] = False  # drafts are counted
        llm["speculative_config"] = speculation_of("ngram", DRAFTS)
        if not run.tiny:  # vLLM's CPU judges no drafts by lot
            rates = [SHARE ** (count + 1) for count in range(DRAFTS)]
            by_lot = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
            llm["speculative_config"] |= by_lot
    acceptance = SHARE if engine == "verify" else 1.0
    if engine in DRAFTERS:
        acceptance = DRAFTERS[engine].acceptance
    forced = {"confidence": SHARE, "acceptance": acceptance}
    return EngineSpec(
        model_dir=shape.write(folder, engine),
        exits=shape.exits(engine, both=run.both_exits),
        forced=forced if engine in ("forced", "verify", *DRAFTERS) else None,
        llm=llm | dict(run.llm),
        vocab_size=int(shape.config["vocab_size"]),
    )


def _cache_bytes(shape: Shape, engine: str, works: Iterable[Work]) -> int:
    blocks = max(
        work.batch * (2 + (work.prompt_tokens + work.max_tokens - 1) // BLOCK) for work in works
    )
    sizes = decoder(shape, engine)
    # And the one that vLLM keeps for itself.
    return (blocks + 1) * BLOCK * sizes.kv_token_bytes * sizes.num_layers


def _fitting(shape: Shape, specs: Mapping[str, EngineSpec]) -> tuple[str, ...]:
    """The engines that fit on the card together, in their order; all, without a card."""
    card = environment.card()
    if card is None:
        return tuple(specs)
    room, found = USABLE * card["memory_bytes"], []
    for name, spec in specs.items():
        sizes = decoder(shape, name)
        matrices = 1 if shape.config["tie_word_embeddings"] else 2
        weights = sizes.num_layers * sizes.layer_bytes + matrices * sizes.head_bytes
        needed = weights + spec.llm["kv_cache_memory_bytes"] + OVERHEAD_BYTES
        if needed <= room:
            room -= needed
            found.append(name)
    return tuple(found)


@contextmanager
def _alive(specs: Mapping[str, EngineSpec], folder: Path) -> Iterator[dict[str, Child]]:
    """Starts engines all at once, and stops them at the end."""
    children: dict[str, Child] = {}
    try:
        for name, spec in specs.items():
            children[name] = Child(spec, folder / f"engine-{spec.model_dir.name}-{name}.log")
        say(f"starting {', '.join(specs)} ({next(iter(specs.values())).model_dir.name})")
        yield dict(children)
    finally:
        for child in children.values():
            child.ask_to_stop()
        for child in children.values():
            child.stop()


def _wait(run: StageRun, children: dict[str, Child], found: Found) -> None:
    """Waits for all engines; those that fail are taken out."""
    for name, child in list(children.items()):
        try:
            found.engines[name] = child.ready(run.left(START_SECONDS))
        except StageError as failure:
            found.failures[name] = f"did not start: {failure}"
            del children[name]


def _rounds(
    run: StageRun, children: dict[str, Child], wanted: Sequence[Contender], found: Found
) -> None:
    """One pass to warm up, one traced, then the timed ones, each time all contenders in turn."""
    last = None
    for turn in range(-2, run.rounds):
        for one in wanted:
            child = children.get(one.engine)
            if child is None:
                continue
            if run.tiny and last not in (None, one.engine):
                time.sleep(SETTLE_SECONDS)  # on a CPU idle engines poll for a while
            last = one.engine
            try:
                limit = run.left(PASS_SECONDS)
                passed = child.run(one.setting, one.work, limit, traced=turn == -1)
                if turn == -1:
                    found.seen[one] = Seen(passed)
                elif turn >= 0:
                    found.seen[one].timings.append(timing_of(passed.times))
            except (StageError, ExitServeError) as failure:
                found.failures[one.engine] = f"{one.setting.label}: {failure}"
                del children[one.engine]
    if wanted:
        say(f"measured {len(wanted)} settings at batch {wanted[0].work.batch}")
