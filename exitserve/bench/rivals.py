"""Other ways to be faster: what `--rivals` puts beside ours.

They are vLLM's ways to several tokens a step. Each runs on plain vLLM, with the same checkpoint and
arguments: n-grams (of 4 tokens, or of 2 to 4) and suffixes of the text so far as drafts, or a
separate draft model (for example the checkpoint cut to its first layers by `exitserve truncate`).
Their answers are full depth's.
"""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from exitserve.arguments import words
from exitserve.checkpoint.block import read_config
from exitserve.costs.byte_costs import serving_dtype, shape_of
from exitserve.errors import ExitServeError

DRAFTS = 4
"""Tokens that a rival drafts at a time, unless --num-drafts says otherwise."""
LONGEST_NGRAM = 4
NGRAMS = {"ngram": LONGEST_NGRAM, "ngram:2": 2}
"""By name, the least tokens that must have occurred before."""
KINDS = (*NGRAMS, "suffix", "draft:PATH")


def check_rivals(text: str, model_dir: Path) -> tuple[str, ...]:
    """Reads `ngram,suffix,draft:PATH`.

    Raises:
        ExitServeError: one is unknown, cannot run here, or has another vocabulary.
    """
    rivals = tuple(words(text))
    for one in rivals:
        kind, _, path = one.partition(":")
        if kind == "draft" and path:
            _check_draft(Path(path), model_dir)
        elif one not in (*NGRAMS, "suffix"):
            raise ExitServeError(f"--rivals {one!r} is unknown; allowed: {', '.join(KINDS)}.")
        elif one == "suffix" and find_spec("arctic_inference") is None:
            raise ExitServeError(
                "--rivals suffix needs the package that vLLM runs it with: "
                "pip install arctic-inference."
            )
    if len(set(rivals)) != len(rivals):
        raise ExitServeError(f"--rivals {text!r} names one twice; give each once.")
    return rivals


def _check_draft(path: Path, model_dir: Path) -> None:
    if not path.is_dir():
        raise ExitServeError(f"--rivals draft:{path}: there is no such checkpoint directory.")
    own, theirs = (read_config(one).get("vocab_size") for one in (model_dir, path))
    if own != theirs:
        raise ExitServeError(
            f"--rivals draft:{path} has a vocabulary of {theirs} tokens, the model one of {own}; "
            f"a draft model must have the same."
        )


def speculation_of(rival: str, drafts: int | None) -> dict[str, Any]:
    """vLLM's `speculative_config` of a rival."""
    count = DRAFTS if drafts is None else drafts
    if rival in NGRAMS:
        return {
            "method": "ngram",
            "num_speculative_tokens": count,
            "prompt_lookup_min": NGRAMS[rival],
            "prompt_lookup_max": LONGEST_NGRAM,
        }
    if rival == "suffix":
        # Repeats send the same prompts; drafts from earlier answers would be right every time.
        return {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
    return {
        "method": "draft_model",
        "model": rival.partition(":")[2],
        "num_speculative_tokens": count,
    }


def extra_memory(rival: str) -> dict[str, int]:
    """Bytes of weights, and of cache for each token, that a rival needs beside the model's."""
    kind, _, path = rival.partition(":")
    if kind != "draft":
        return {"weight_bytes": 0, "cache_bytes_per_token": 0}
    config = read_config(path)
    shape = shape_of(config, serving_dtype(config))
    weights = sum(one.stat().st_size for one in Path(path).glob("*.safetensors"))
    return {
        "weight_bytes": weights,
        "cache_bytes_per_token": shape.num_layers * shape.kv_token_bytes,
    }


class DraftCounts:
    """What an engine drafted, from the statistics of each of its steps.

    vLLM's own counters are those of the process: of several engines, the newest one's.
    """

    def __init__(self, engine: Any) -> None:
        """Listens to a `vllm.LLM` that keeps statistics, beside vLLM's own listeners."""
        self.counted = Counter[str]()
        engine.llm_engine.logger_manager.stat_loggers.append(self)

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        """Takes the statistics of a step."""
        step = scheduler_stats.spec_decoding_stats if scheduler_stats else None
        if step is not None:
            self.counted["drafted"] += step.num_draft_tokens
            self.counted["accepted"] += step.num_accepted_tokens

    def log(self) -> None:
        """Prints nothing; vLLM asks all listeners to."""
