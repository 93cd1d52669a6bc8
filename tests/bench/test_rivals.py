"""Other kinds of drafts: what is refused, and what vLLM is asked for."""

import json
from pathlib import Path

import pytest

from exitserve.bench.rivals import check_rivals, extra_memory, speculation_of
from exitserve.errors import ExitServeError

from ..shapes import TINY


def checkpoint(place: Path, **changes: int) -> Path:
    place.mkdir()
    (place / "config.json").write_text(json.dumps(TINY | changes))
    (place / "model.safetensors").write_bytes(b"x" * 1000)
    return place


def test_a_draft_model_has_costs_and_the_same_vocabulary(tmp_path: Path) -> None:
    model, draft = checkpoint(tmp_path / "model"), checkpoint(tmp_path / "draft")
    (rival,) = check_rivals(f"draft:{draft}", model)
    assert speculation_of(rival, 3) == {
        "method": "draft_model",
        "model": str(draft),
        "num_speculative_tokens": 3,
    }
    # Four layers, keys and values, 2 heads of 16 numbers of 2 bytes.
    assert extra_memory(rival) == {"weight_bytes": 1000, "cache_bytes_per_token": 512}
    assert extra_memory("ngram") == {"weight_bytes": 0, "cache_bytes_per_token": 0}
    other = checkpoint(tmp_path / "other", vocab_size=500)
    with pytest.raises(ExitServeError, match="a vocabulary of 500 tokens, the model one of 512"):
        check_rivals(f"draft:{other}", model)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("eagle", "'eagle' is unknown; allowed: ngram, ngram:2, suffix, draft:PATH"),
        ("draft:", "is unknown"),
        ("draft:/nowhere", "no such checkpoint directory"),
        ("ngram,ngram", "names one twice"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ExitServeError, match=words):
        check_rivals(text, checkpoint(tmp_path / "model"))
