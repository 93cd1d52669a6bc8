"""The engine on the bundled model in float32: same tokens and exit layers as the oracle."""

import pytest

from .conftest import since

PROMPTS = (
    "def add(a, b):\n    return",
    "import os\nimport sys\n\n\ndef main(argv=None):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "try:\n    import json\nexcept ImportError:\n    ",
    "for index, item in enumerate(items):\n    if item is None:\n        ",
    "x",
    'def read(path):\n    """Return the text."""\n    with open(path, encoding=',
    "    def test_empty(self):\n        self.assertEqual(",
)
FIELDS = (
    {"exit_threshold": 0.4},
    {"exit_threshold": 0.6},
    {"exit_threshold": 0.85},
    {"exit_layer": 6},
    {"exit_layer": 12},
    {"exit_layer": 18},
    {"exit_threshold": 1.0},
    {},
)


@pytest.fixture(scope="module")
def harness(start_shared, bundled):
    # Prefix caching is tested on its own: here every run must start from an empty cache.
    return start_shared(bundled, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def jobs(job, bundled):
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(bundled).encode
    return [
        job(encode(prompt), fields, max_tokens=32)
        for prompt, fields in zip(PROMPTS, FIELDS, strict=True)
    ]


@pytest.fixture(scope="module")
def expected(oracle, expect, bundled, jobs):
    reference = oracle(bundled)
    return [expect(reference, one) for one in jobs]


def test_exits_fire_at_every_layer(expected) -> None:
    """Else the comparisons below would show nothing."""
    used = {depth for _, depths in expected for depth in depths}
    assert used == {6, 12, 18, 24}


@pytest.mark.parametrize("index", range(len(FIELDS)), ids=[str(fields) for fields in FIELDS])
def test_alone(harness, jobs, expected, index: int) -> None:
    assert harness.run([jobs[index]]) == [expected[index]]


def test_eight_at_once(harness, jobs, expected) -> None:
    assert harness.run(jobs) == expected


def test_arriving_one_by_one(harness, jobs, expected) -> None:
    """Prompts are then computed in the same pass as other rows' decode tokens."""
    assert harness.run(jobs, every=3) == expected


def test_counts_reconcile(harness, jobs) -> None:
    before = harness.stats()
    depths = [depth for _, layers in harness.run(jobs) for depth in layers]
    counts = since(before, harness.stats())
    by_depth = counts["tokens_by_depth"]
    assert by_depth == {depth: depths.count(depth) for depth in by_depth}
    exited = sum(depth < 24 for depth in depths)
    assert counts["frozen_tokens"] == sum(counts["passed"].values()) == exited
