"""Which tokens run as rows leave: against a list of what should."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from exitserve.engine.early_exit.active_rows import ActiveRows


@given(st.data(), st.booleans())
def test_tokens_follow_their_rows(data: st.DataObject, paired: bool) -> None:
    lengths = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    pass_rows = [row for row, length in enumerate(lengths) for _ in range(length)]
    positions = torch.tensor([20 + token for token in range(len(pass_rows))])
    states = positions[:, None] * torch.ones(3)
    active = ActiveRows(lengths, positions, states)
    if paired:
        active.stream = (states - 7.0, torch.full_like(states, 7.0))
    rows = list(range(len(lengths)))
    for _ in range(data.draw(st.integers(1, 4))):
        gone = data.draw(st.sets(st.sampled_from(rows), max_size=len(rows) - 1))
        rows = [row for row in rows if row not in gone]
        active.leave(gone)
        kept = [token for token, row in enumerate(pass_rows) if row in rows]
        assert active.rows == rows and active.lengths == [lengths[row] for row in rows]
        assert active.tokens.tolist() == kept
        assert torch.equal(active.positions, positions[kept])
        hidden, residual = active.stream
        total = hidden if residual is None else hidden + residual
        assert torch.equal(total, states[kept])
        ends = [max(place for place, one in enumerate(kept) if pass_rows[one] == r) for r in rows]
        assert active.last_tokens(rows) == ends
