"""What training says of an exit, on counts that are known by hand."""

import pytest
import torch

from exitserve.arguments import show_verdict
from exitserve.checkpoint.block import MultiExit, parse_multi_exit
from exitserve_training.losses.aligned import Predictions
from exitserve_training.verdicts import above, verdict

FULL_DEPTH = torch.arange(20)


def exit_that(agrees: int, sure: float) -> torch.Tensor:
    """Counts of 20 tokens of which the first are full depth's and `sure`, the others 0.3."""
    said = torch.where(agrees > FULL_DEPTH, FULL_DEPTH, -1)
    confidence = torch.where(agrees > FULL_DEPTH, sure, 0.3)
    return above(Predictions(confidence, said == 0, said, confidence, confidence), FULL_DEPTH)


def test_an_exit_is_usable_where_nine_of_ten_tokens_are_full_depths() -> None:
    found = verdict(exit_that(agrees=8, sure=0.72), None, tokens=1000)
    # Above 0.3 the others have gone; at 0.3 they are no longer above.
    assert (found.agreement, found.usable_from, found.share) == (0.4, 0.3, 0.4)
    # One token of 20 is too few.
    assert verdict(exit_that(agrees=1, sure=0.72), None, tokens=1000).usable_from is None


@pytest.mark.parametrize(
    ("before", "more"), [(2, 3_500_000), (4, None), (None, None)], ids=["pace", "none", "resumed"]
)
def test_one_that_is_not_is_told_how_long_to_train(
    before: int | None, more: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    start = None if before is None else exit_that(agrees=before, sure=0.2)
    # 0.1 in a million tokens, and 0.3 or more to go to a half.
    found = verdict(exit_that(agrees=3, sure=0.2), start, tokens=500_000)
    assert (found.usable_from, found.more_tokens) == (None, more)
    block = MultiExit(exit_layers=(2,), trained={2: found})
    config = {"multi_exit": block.to_json()}
    assert parse_multi_exit(config) == block
    show_verdict(config)
    said = capsys.readouterr().err
    assert said.startswith("exitserve: Exits: 2 agrees with full depth on 15% of held-out predict")
    assert "not usable: train longer" in said
    assert ("3,500,000 tokens or more" in said) == (more is not None)
