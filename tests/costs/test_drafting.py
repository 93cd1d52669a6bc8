"""Wall speedup of several tokens a step, by bytes."""

from __future__ import annotations

import pytest

from exitserve.costs.devices import DEVICES, device_called
from exitserve.costs.drafting import (
    MOST_ROWS,
    Acceptance,
    Drafting,
    Drafts,
    best_drafts,
    best_text_drafts,
    drafting_speedup,
    price,
    text_drafts,
    tokens_of,
)
from exitserve.costs.sources import step_costs

LLAMA_3_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def costs():
    return step_costs(LLAMA_3_8B, batch_sizes=(512,), device="h200").costs


@pytest.mark.parametrize(
    ("layer", "drafts", "expected"),
    # By hand: layer 0.0909 ms, head 0.219 ms, rows of it 0.035 ms by launches, step 3.43 ms.
    [
        (2, 2, (1.95, 2.17, 2.41)),
        (4, 4, (1.89, 2.29, 2.80)),
        (8, 5, (1.39, 1.75, 2.22)),
    ],
)
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_where_weights_take_the_time_the_batch_does_not_matter(
    costs, batch: int, layer: int, drafts: int, expected: tuple[float, ...]
) -> None:
    way = Drafting(exit_layer=layer, drafts=drafts)
    found = [drafting_speedup(costs, batch, way, one) for one in (0.7, 0.8, 0.9)]
    assert found == pytest.approx(expected, abs=0.006)


def test_large_batches_draft_less_and_none_at_last(costs) -> None:
    way = Drafting(exit_layer=4, drafts=0)
    batches = 1, 8, 64, 128, 256, 512
    of_layers = [best_drafts(costs, batch, way, 0.8) for batch in batches]
    of_text = [best_text_drafts(costs, batch, way) for batch in batches]
    for drafts, most in (of_layers, 5), (of_text, 4):
        assert drafts == sorted(drafts, reverse=True)
        assert (drafts[0], drafts[-1]) == (most, 0), "arithmetic limits it"


def test_a_table_has_the_drafts_of_the_source_that_pays(costs) -> None:
    drafts = Drafts(Drafting(exit_layer=4, drafts=4), 0.8, costs)
    for first, last, most in (table := drafts.by_batch()):
        for batch in (first, last):
            assert most == max(*drafts.of_text(batch), drafts.of_layers(batch))
    assert (table[0][0], table[0][2], table[-1][1]) == (1, 4, MOST_ROWS)
    assert [first for first, _, _ in table[1:]] == [last + 1 for _, last, _ in table[:-1]]
    assert drafts.of_text(2 * MOST_ROWS) == drafts.of_text(MOST_ROWS)
    fixed = Drafts(Drafting(exit_layer=4, drafts=2), 0.8)
    assert fixed.by_batch() == [(1, MOST_ROWS, 2)] and fixed.of_layers(9, 0.1) == 2


def test_requests_whose_drafts_are_not_accepted_draft_less_and_none_at_last(costs) -> None:
    drafts, found = Drafts(Drafting(exit_layer=4, drafts=4), 0.8, costs), Acceptance()
    layers, text = [], []
    for _ in range(16):
        layers.append(drafts.of_layers(8, found.share))
        text.append(sum(drafts.of_text(256, found.share)))
        found.expected += 1
    assert layers == sorted(layers, reverse=True) and text == sorted(text, reverse=True)
    assert layers[0] > 0 == layers[-1] and text[0] > text[-1]
    found.accepted += 16
    assert drafts.of_layers(8, found.share) == layers[0], "more are accepted than were expected"


def test_few_rows_of_a_batch_draft_less_than_all_of_it(costs) -> None:
    drafts = Drafts(Drafting(exit_layer=4, drafts=4), 0.8, costs)
    for batch in (1, 8, 64):
        by_rows = [drafts.of_some(batch, [1.0] * rows) for rows in range(batch + 1)]
        assert by_rows[0] == 0 and by_rows[-1] == drafts.of_layers(batch)
        assert batch > 8 or by_rows == sorted(by_rows), "until arithmetic limits it"
        assert drafts.of_some(batch, [0.1] * batch) == 0
        beside_text = drafts.of_some(batch, [1.0] * batch, drafted=8, accepted=4.0 * batch)
        assert beside_text <= by_rows[-1], "a step that gives more tokens is worth more time"


def test_more_of_the_text_is_drafted_the_more_of_it_matches_and_the_less_a_row_costs(costs) -> None:
    prices = [price(costs, batch) for batch in (1, 8, 64, 512)]
    assert prices[0] == pytest.approx(0.0, abs=1e-3) and prices == sorted(prices)
    assert prices[-1] == pytest.approx(1.0, abs=0.2), "arithmetic limits it"
    for least in (0.1, 0.3, 0.7):
        counts = text_drafts(least, 4)
        assert counts == sorted(counts)
        assert sum(text_drafts(least + 0.1, 4)) < sum(counts)
    assert text_drafts(0.3, 4)[:5] == [0, 0, 1, 2, 3]
    assert max(text_drafts(0.3, 2)) == 2


def test_no_drafts_are_plain_decoding(costs) -> None:
    assert drafting_speedup(costs, 8, Drafting(exit_layer=4, drafts=0), 0.9) == 1.0
    assert tokens_of(0.5, Drafting(exit_layer=4, drafts=2)) == 1.75


def test_a_check_of_all_judged_tokens_costs_its_rows(costs) -> None:
    one = Drafting(exit_layer=4, drafts=4)
    both = [
        drafting_speedup(costs, 1, Drafting(exit_layer=4, drafts=4, checks=checks), 0.8)
        for checks in (False, True)
    ]
    assert both[0] == drafting_speedup(costs, 1, one, 0.8)
    assert 0.99 < both[1] / both[0] < 1.0


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Quadro K620", None),
    ],
)
def test_devices_are_found_by_what_their_driver_says(driver: str, name: str | None) -> None:
    assert device_called(driver) == name
    assert name is None or name in DEVICES
