"""The engine table's rows: which shapes, which engines, which work, and what is hoped for."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitserve.arguments import drafting_options
from exitserve.checkpoint.block import MultiExit, write_multi_exit
from exitserve.checkpoint.exit_rows import save_exit_rows
from exitserve.settings import OFF, PLAIN, Setting

VERIFY = Setting(mode="verify", exit_threshold=0.5)
NGRAM = Setting(mode="rival", rival="ngram")
SHARE = 0.7
"""Of the tokens, that exit where depths are drawn by lot."""
NEVER = 0.99999
"""A threshold that random weights, whose confidence is near 1/V, never pass."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Requests that decode together. Of their tokens the first comes from the prompt."""

    batch: int
    prompt_tokens: int
    max_tokens: int
    keeps_prompts: bool = False
    """Whether all passes but the first find the prompts in the prefix cache. Prompts are not
    timed; long ones take their time."""
    every: int = 0
    """Steps of the engine between two requests, if they do not start together."""


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """One row: an engine and a setting, to be compared with plain vLLM at the same work."""

    label: str
    engine: str
    setting: Setting
    work: Work
    layers: float | None
    """Run for a token on average, if depths are as ordered; None where nobody ordered them."""
    target: float | None = None
    """Least speed over plain vLLM's."""
    same_tokens: bool = False
    """Whether the tokens must be plain vLLM's."""

    @property
    def drafts(self) -> bool:
        """Whether several tokens are judged at once."""
        return self.engine in ("verify", "ngram", *DRAFTERS)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model without weights, and the cases measured of it."""

    name: str
    config: Mapping[str, Any]
    exit_layers: tuple[int, int]
    """Declared by the checkpoint. Cases exit at the first."""
    phases: tuple[tuple[EngineCase, ...], ...]
    """Cases of a phase share their engines. Long contexts are a phase of their own: engines with
    caches for them may not fit on the card together."""

    def layers_of(self, engine: str) -> int:
        """How many layers an engine's model has."""
        if engine == "truncated":
            return self.exit_layers[0]
        return int(self.config["num_hidden_layers"])

    def write(self, directory: Path, engine: str) -> Path:
        """Makes the checkpoint of an engine: `config.json`, and its exit rows."""
        drafter = DRAFTERS.get(engine)
        rows = "" if drafter is None else f"-{drafter.rows}"
        target = directory / f"{self.name}-{self.layers_of(engine)}{rows}"
        target.mkdir(exist_ok=True)
        config = {**self.config, "num_hidden_layers": self.layers_of(engine)}
        (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        layers = tuple(layer for layer in self.exit_layers if layer < self.layers_of(engine))
        name = None
        if drafter is not None:
            tokens = list(range(min(drafter.rows, self.config["vocab_size"])))
            name = save_exit_rows(target, tokens)
        write_multi_exit(target, MultiExit(exit_layers=layers, rows=name))
        return target

    def exits(self, engine: str, *, both: bool) -> dict[str, Any] | None:
        """Options of an engine with exits; None for plain vLLM.

        Args:
            engine: of `ENGINES`.
            both: whether the engine "exits" keeps both exit layers, and so checks twice a token.
        """
        if engine in ("plain", "truncated", "ngram"):
            return None
        options: dict[str, Any] = {"exit_layers": [self.exit_layers[0]]}
        if engine == "verify" or engine in DRAFTERS:
            return options | drafting_options(DRAFTS)
        if both and engine != "forced":
            options["exit_layers"] = list(self.exit_layers)
        return options


Targets = Mapping[str, float]


@dataclass(frozen=True)
class Drafter:
    """An engine whose first layers draft with a part of the LM head."""

    acceptance: float
    """Probability by which each draft is accepted by lot."""
    rows: int
    """Of the LM head."""


DRAFTERS = {
    f"{rows // 1000}k-{share:g}": Drafter(share, rows)
    for rows in (8_000, 32_000)
    for share in (0.75, 0.9)
}
ENGINES = ("plain", "exits", "forced", "truncated", "verify", "ngram", *DRAFTERS)
"""In the order in which they get a place on the card. Depths are drawn by lot for all requests of
an engine or for none, so "forced" is one of its own."""
DRAFTS = 4
"""Of all that draft; those of "verify" and "ngram" are accepted with the probability `SHARE`."""


def _cases(
    shape: tuple[int, int], works: tuple[Work, Work, Work], long: Work, targets: Targets
) -> tuple[tuple[EngineCase, ...], ...]:
    """All phases.

    Args:
        shape: exit layer, layers.
        works: one request, a few, many.
        long: many with long prompts.
        targets: some of those that are looked up below.
    """
    exit_layer, layers = shape
    one, _, many = works
    where = f"{exit_layer} of {layers}"
    fixed = Setting(mode="fixed", exit_layer=exit_layer)
    never = Setting(mode="confidence", exit_threshold=NEVER)

    def case(
        label: str, engine: str, setting: Setting, work: Work, depth: float, key: str
    ) -> EngineCase:
        return EngineCase(
            label=label,
            engine=engine,
            setting=setting,
            work=work,
            layers=depth,
            target=targets.get(key),
            same_tokens=setting == OFF,
        )

    by_lot = SHARE * exit_layer + (1 - SHARE) * layers
    short = (
        case("exits off", "exits", OFF, one, layers, "off"),
        *(
            case(f"all exit at {where}", "exits", fixed, work, exit_layer, f"exit {work.batch}")
            for work in works
        ),
        case("exits off", "exits", OFF, many, layers, "off"),
        case("no exit, every token checked", "exits", never, one, layers, "check"),
        case(f"{SHARE:.0%} exit at {where}", "forced", never, one, by_lot, "share"),
        # What remains of a step when plain vLLM runs no more layers than those that exit.
        *(
            case(f"truncated to {where}", "truncated", PLAIN, work, exit_layer, "")
            for work in works
        ),
    )
    drafts = tuple(
        case(f"{name}, {DRAFTS} drafts, {SHARE:.0%} right", engine, setting, work, layers, "")
        for work in works
        for name, engine, setting in (
            (f"verify, drafts of {where}", "verify", VERIFY),
            ("vLLM's n-grams", "ngram", NGRAM),
        )
    )
    far = case(f"{SHARE:.0%} exit at {where}", "forced", never, long, by_lot, "long")
    return short, drafts, (far,)


def _drafting_cases(
    exit_layer: int, layers: int, works: tuple[Work, Work, Work]
) -> tuple[tuple[EngineCase, ...], ...]:
    """One phase: both modes that draft, at each `Drafter`."""
    modes = (VERIFY, Setting(mode="defer", exit_threshold=0.5))
    return (
        tuple(
            EngineCase(
                label=f"{setting.mode}, {DRAFTS} drafts of {exit_layer} of {layers}, "
                f"{drafter.acceptance:.0%} right, {drafter.rows:,} rows",
                engine=engine,
                setting=setting,
                work=work,
                layers=layers if setting == VERIFY else None,
            )
            for work in works
            for engine, drafter in DRAFTERS.items()
            for setting in modes
        ),
    )


def _works(prompt_tokens: int, max_tokens: int) -> tuple[Work, Work, Work]:
    one, few, many = (
        Work(batch=batch, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
        for batch in (1, 8, 32)
    )
    return one, few, many


_COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA: dict[str, Any] = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
_SHORT = _works(prompt_tokens=128, max_tokens=128)
_LONG = Work(batch=32, prompt_tokens=8192, max_tokens=49, keeps_prompts=True)
_TINY_LONG = Work(batch=8, prompt_tokens=512, max_tokens=9, keeps_prompts=True)

_LLAMA_8B: dict[str, Any] = {
    **_LLAMA,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}

SHAPES = {
    "llama-3-8b": Shape(
        name="llama-3-8b",
        config=_LLAMA_8B,
        exit_layers=(8, 16),
        phases=_cases(
            (8, 32),
            _SHORT,
            _LONG,
            {
                "off": 0.99,
                "exit 1": 2.4,
                "exit 8": 2.3,
                "exit 32": 2.2,
                "check": 0.93,
                "share": 1.7,
                "long": 1.3,
            },
        ),
    ),
    "llama-3-8b-drafts": Shape(
        name="llama-3-8b-drafts",
        config=_LLAMA_8B,
        exit_layers=(4, 8),
        phases=_drafting_cases(4, 32, _SHORT),
    ),
    "qwen3-4b": Shape(
        name="qwen3-4b",
        config={
            **_COMMON,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "num_hidden_layers": 36,
            "hidden_size": 2560,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 9728,
            "vocab_size": 151936,
        },
        exit_layers=(9, 18),
        phases=_cases((9, 36), _SHORT, _LONG, {}),
    ),
}
_TINY: dict[str, Any] = {
    **_LLAMA,
    "num_hidden_layers": 16,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "vocab_size": 8192,
}
_TINY_SHORT = _works(prompt_tokens=16, max_tokens=17)
TINY = Shape(
    name="tiny",
    config=_TINY,
    exit_layers=(4, 8),
    phases=_cases((4, 16), _TINY_SHORT, _TINY_LONG, {}),
)
"""For a CPU, to see that the script runs."""
TINY_DRAFTS = Shape(
    name="tiny-drafts",
    config=_TINY,
    exit_layers=(4, 8),
    phases=_drafting_cases(4, 16, _TINY_SHORT),
)
"""The same, of "llama-3-8b-drafts"."""


def random_prompts(
    vocab_size: int, count: int, prompt_tokens: int, seed: int = 0
) -> list[list[int]]:
    """`count` prompts of `prompt_tokens` random token ids, without the special ones (0 to 2)."""
    generator = random.Random(seed)
    return [
        [generator.randrange(3, vocab_size) for _ in range(prompt_tokens)] for _ in range(count)
    ]
