"""How many layers fit: the arithmetic against real models, and its invariants."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitserve.checkpoint.block import read_config
from exitserve.checkpoint.weights import read_weights
from exitserve.costs.byte_costs import serving_dtype
from exitserve.errors import ExitServeError
from exitserve.truncation.fit import USABLE, Load, Sizes, deepest_fit, parse_size, sizes_of

SIZES = st.builds(
    Sizes,
    outside=st.integers(0, 10**9),
    layers=st.lists(st.integers(1, 10**9), min_size=1, max_size=40).map(tuple),
    kv_token=st.integers(1, 10**5),
)
LOADS = st.builds(Load, requests=st.integers(1, 64), context=st.integers(1, 10**5))


@given(SIZES, LOADS, st.integers(1, 10**12))
def test_what_fits_is_the_deepest_that_holds_its_load(sizes: Sizes, load: Load, budget: int):
    depths = range(1, len(sizes.layers) + 1)
    try:
        found = deepest_fit(sizes, depths, budget, load)
    except ExitServeError:
        assert sizes.budget(1, load) > budget
        return
    wanted = load.requests * load.context
    assert sizes.kv_tokens(found, budget) >= wanted
    assert sizes.weights(found) <= USABLE * budget
    if found < len(sizes.layers):
        assert sizes.kv_tokens(found + 1, budget) < wanted


@pytest.mark.parametrize(
    ("text", "count"),
    [("8GiB", 8 * 2**30), ("500MB", 500 * 10**6), ("1.5 gib", 3 * 2**29), ("7B", 7)],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["8", "GiB", "8 XiB", "-1GiB", "0GiB", "", "8GiBs", "1e3MB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ExitServeError, match="such as 8GiB"):
        parse_size(text)


def test_floats_are_counted_as_served_and_the_rest_as_stored(quantised: Path, bundled: Path):
    """int8 weights stay, their float32 scales and everything else become bfloat16."""
    config = read_config(quantised)
    assert serving_dtype(config) == "bfloat16"
    whole = sizes_of(config, read_weights(bundled).tensors, "bfloat16")
    eight = sizes_of(config, read_weights(quantised).tensors, "bfloat16")
    assert eight.outside == whole.outside
    assert 0.5 < eight.weights(12) / whole.weights(12) < 0.7


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_the_models_parameters(make_checkpoint, family: str, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    model_dir = make_checkpoint(family, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    config = read_config(model_dir)
    sizes = sizes_of(config, read_weights(model_dir).tensors, "float32")
    assert sizes.weights(6) == sum(p.nbytes for p in model.parameters())
    assert len(set(sizes.layers)) == 1
    heads = 4 if family == "gpt2" else 2
    assert sizes.kv_token == 2 * heads * 32 * 4
