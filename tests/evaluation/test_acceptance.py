"""How many drafts full depth would accept."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from exitserve.evaluation.acceptance import DRAFTS, DraftTally, accepted_runs, measure_drafts
from exitserve.reference import load_reference
from exitserve.windows import Window


def test_a_step_begins_behind_the_token_that_full_depth_gave() -> None:
    agrees = [True, True, False, True, True, True, True, False, True]
    assert accepted_runs(agrees, 2) == [2, 2, 1]
    assert accepted_runs(agrees, 3) == [2, 3]
    assert accepted_runs([False] * 4, 1) == [0, 0, 0]


@given(st.lists(st.booleans(), max_size=60), st.sampled_from(list(DRAFTS)))
def test_more_drafts_accept_no_less(agrees: list[bool], drafts: int) -> None:
    runs = accepted_runs(agrees, drafts)
    assert all(0 <= run <= drafts for run in runs)
    assert sum(run + 1 for run in runs) <= max(0, len(agrees))


def test_of_a_model(bundled) -> None:
    """The deepest exit is right most often, and tokens a step grow with the drafts."""
    reference = load_reference(str(bundled))
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 4000, (96,), generator=drawn).tolist()
    found = measure_drafts(reference, [Window(tuple(ids), 0)] * 2, 16, lambda: None)
    assert [one["exit_layer"] for one in found] == [6, 12, 18]
    rights = [one["agreement"] for one in found]
    assert rights == sorted(rights)
    tokens = [step["tokens_per_step"] for step in found[-1]["steps"]]
    assert tokens[0] > 1.0
    assert tokens == sorted(tokens)


def test_nothing_to_count() -> None:
    assert DraftTally().entries() == []
