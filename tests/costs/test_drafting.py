"""Wall speedup of several tokens a step, by bytes."""

from __future__ import annotations

import pytest

from exitserve.costs.devices import DEVICES, device_called
from exitserve.costs.drafting import (
    MOST_ROWS,
    Acceptance,
    Drafting,
    Drafts,
    assumed_acceptance,
    best_drafts,
    best_text_drafts,
    drafting_speedup,
    price,
    text_drafts,
    tokens_of,
)
from exitserve.costs.sources import step_costs

from ..shapes import LLAMA_3_8B


@pytest.fixture(scope="module")
def costs():
    return step_costs(LLAMA_3_8B, batch_sizes=(512,), device="h200").costs


@pytest.mark.parametrize(
    ("layer", "drafts", "expected"),
    # By hand: layer 0.0909 ms, head 0.219 ms, rows of it 0.035 ms by launches, step 3.43 ms.
    [(2, 2, (1.95, 2.17, 2.41)), (4, 4, (1.89, 2.29, 2.80)), (8, 5, (1.39, 1.75, 2.22))],
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


def test_deeper_drafts_are_assumed_to_be_accepted_more_often() -> None:
    assumed = [assumed_acceptance(layer, 30) for layer in (0, 3, 6, 12, 20, 30)]
    assert assumed == sorted(assumed)
    assert assumed[2:5] == pytest.approx([0.49, 0.55, 0.78], abs=0.01)


CALLED = {
    "NVIDIA A10, NVIDIA A10G, NVIDIA A30, NVIDIA A40, NVIDIA B200, NVIDIA H20, NVIDIA H20-3e, "
    "NVIDIA H200, NVIDIA L20, NVIDIA L4, NVIDIA L40, NVIDIA L40S": "a10 a10g a30 a40 b200 h20 "
    "h20-3e h200 l20 l4 l40 l40s",
    "NVIDIA A100-SXM4-80GB, NVIDIA A100 80GB PCIe, NVIDIA A800-SXM4-80GB": "a100-80g",
    "NVIDIA A100-SXM4-40GB, NVIDIA A100-PCIE-40GB, A100-SXM4-40GB": "a100-40g",
    "NVIDIA B300 SXM6 AC, NVIDIA GB300": "b300",
    "NVIDIA GB200": "b200",
    "NVIDIA GH200 480GB, NVIDIA GH200 120GB": "gh200",
    "NVIDIA GH200 144G HBM3e": "gh200-144g",
    "NVIDIA H100, NVIDIA H100 80GB HBM3, NVIDIA H800": "h100",
    "NVIDIA H100 NVL, NVIDIA H800 NVL": "h100-nvl",
    "NVIDIA H100 PCIe, NVIDIA H800 PCIe": "h100-pcie",
    "NVIDIA H200 NVL": "h200-nvl",
    "NVIDIA RTX A6000": "a6000",
    "NVIDIA RTX 6000 Ada Generation": "rtx6000-ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition, "
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "rtxpro6000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtxpro6000-server",
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB, Tesla V100-SXM2-32GB, Tesla V100-PCIE-16GB": "v100",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "AMD_Instinct_MI300X, AMD Instinct MI300X OAM, AMD_Instinct_MI300X_HF": "mi300x",
    "AMD_Instinct_MI325X, AMD Instinct MI325 OAM": "mi325x",
}
"""Names that drivers have, and the table's: one for each, or one for all."""
UNKNOWN = (
    "NVIDIA A2, NVIDIA A16, NVIDIA A10M, NVIDIA L2, NVIDIA L20Y, NVIDIA GB10, NVIDIA T400, "
    "NVIDIA RTX A4000, NVIDIA RTX A5000, NVIDIA RTX 4000 Ada Generation, Quadro RTX 6000, "
    "NVIDIA RTX 5000 Ada Generation, NVIDIA RTX PRO 5000 Blackwell, NVIDIA RTX 6000D, "
    "NVIDIA GeForce RTX 3090 Ti, NVIDIA GeForce RTX 4090 D, NVIDIA GeForce RTX 4090 Laptop GPU, "
    "NVIDIA GeForce RTX 5090 D, NVIDIA GeForce RTX 5090 Laptop GPU, NVIDIA GeForce RTX 5080, "
    "NVIDIA H20 NVL16, NVIDIA H100 80GB HBM3 MIG 1g.10gb, NVIDIA A100-SXM-64GB, Quadro K620, "
    "AMD_Instinct_MI308X, AMD_Instinct_MI300A"
)


def test_devices_are_found_by_exactly_what_their_driver_says() -> None:
    for drivers, names in CALLED.items():
        found = [device_called(one) for one in drivers.split(", ")]
        expected = names.split() if " " in names else [names] * len(found)
        assert found == expected
    assert {device_called(one) for one in UNKNOWN.split(", ")} == {None}
    assert DEVICES.keys() == {name for names in CALLED.values() for name in names.split()}
