"""Which tokens run, as rows leave and pending tokens come along: against a list of what should."""

from __future__ import annotations

from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st

from exitserve.engine.host.active_tokens import ActiveTokens
from exitserve.engine.pending_tokens import PENDING, Bounds, PendingTokens, Tokens

WIDTH = 3


def _tokens(positions: list[int], row: int) -> Tokens:
    """Tokens whose state and slots tell row and position."""
    return Tokens(_state(positions, row), positions, _slots(positions, row))


def _slots(positions: list[int], row: int) -> tuple[list[int], ...]:
    return tuple([one + size * row for one in positions] for size in (1000, 5000))


def _state(positions: list[int], row: int) -> torch.Tensor:
    return torch.tensor([[row, position, 1.0] for position in positions])


@given(st.data(), st.booleans())
def test_tokens_follow_their_rows(data: st.DataObject, paired: bool) -> None:
    lengths = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    rows = {row: list(range(20, 20 + length)) for row, length in enumerate(lengths)}
    states = torch.cat([_state(positions, row) for row, positions in rows.items()])
    flat = [position for positions in rows.values() for position in positions]
    slots = zip(*(_slots(positions, row) for row, positions in rows.items()), strict=True)
    # A pair's parts sum up to the stream; neither is it alone.
    stream = (states - 7.0, torch.full_like(states, 7.0)) if paired else (states, None)
    active = ActiveTokens(lengths, flat, stream, [[*chain.from_iterable(group)] for group in slots])
    waiting = dict.fromkeys(rows, 20)  # the first position that is there
    for _ in range(data.draw(st.integers(1, 4))):
        gone = data.draw(st.sets(st.sampled_from(sorted(rows)), max_size=len(rows) - 1))
        rows = {row: positions for row, positions in rows.items() if row not in gone}
        taken = {}
        for row in data.draw(st.sets(st.sampled_from(sorted(rows)))):
            more = list(range(waiting[row] - data.draw(st.integers(1, 3)), waiting[row]))
            waiting[row] = more[0]
            taken[row] = _tokens(more, row)
            rows[row] = more + rows[row]
        active.change(gone, taken)
        _check(active, rows)
        if len(rows) == 1:
            break


def _check(active: ActiveTokens, rows: dict[int, list[int]]) -> None:
    assert active.rows == sorted(rows)
    assert active.lengths == [len(rows[row]) for row in active.rows]
    total, start = active.total(), 0
    for row in active.rows:
        expected = _tokens(rows[row], row)
        found = active.tokens_of(row, total)
        assert torch.equal(found.state, expected.state)
        assert found.positions == expected.positions and found.slots == expected.slots
        start += len(rows[row])
        assert active.last_tokens([row]) == [start - 1]
    assert active.positions.tolist() == [*chain.from_iterable(rows[row] for row in active.rows)]
    assert active.num_pending == sum(p < 20 for positions in rows.values() for p in positions)


def test_states_go_back_to_their_tokens() -> None:
    positions = [4, 9, 10]
    active = ActiveTokens([1, 2], positions, (torch.zeros(3, WIDTH), None), (positions,))
    left = torch.zeros(3, WIDTH)
    normed = torch.ones(3, WIDTH)
    active.normed = normed
    assert active.hand_over(left) is normed, "nothing changed"
    active.change({0}, {1: Tokens(torch.zeros(2, WIDTH), [7, 8], ([7, 8],))})
    active.normed = torch.arange(4.0)[:, None].expand(4, WIDTH)
    found = active.hand_over(left)
    assert found[:, 0].tolist() == [0.0, 2.0, 3.0]


def test_who_waits_goes_on_together() -> None:
    pending = PendingTokens(Bounds(most=3, block=8))
    assert not pending and pending.take(2) is None
    pending.wait(2, _tokens([4], 0))
    pending.wait(2, _tokens([5, 6], 0))
    assert len(pending) == 3
    assert pending.must_run(7, 1), "as many as may wait do"
    pending.expect(7, 7, number=9)
    taken = pending.take(2)
    assert taken is not None and taken.positions == [4, 5, 6]
    assert not pending


def test_a_full_block_is_complete() -> None:
    pending = PendingTokens(Bounds(block=8))
    assert [last for last in range(20) if pending.must_run(last, 1)] == [7, 15]
    assert not any(PendingTokens(Bounds()).must_run(last, 1) for last in range(20))
    assert pending.must_run(8, 2) and not pending.must_run(9, 2), "tokens that came along"
    pending.wait(4, _tokens([7], 0))
    assert pending.must_run(8, 1), "one further up ends a block"


def test_a_preempted_request_has_nothing_waiting() -> None:
    pending = PendingTokens(Bounds())
    pending.wait(2, _tokens([4], 0))
    pending.expect(0, 4, number=1)
    assert not pending and pending.take(2) is None


def _drafted(since: int) -> PendingTokens:
    """Four tokens that wait since a pass, the first two of them one exit further up."""
    pending = PendingTokens(Bounds())
    pending.wait(4, _tokens([4, 5], 0), since)
    pending.wait(2, _tokens([6], 0), since)
    pending.wait(2, _tokens([7], 0), since)
    return pending


def test_the_next_pass_takes_up_drafts_where_they_wait() -> None:
    pending = _drafted(since=3)
    pending.expect(4, 8, number=4)  # one more token, which never ran
    assert pending.count_from(4) == 4
    taken = pending.take(2)
    assert taken is not None
    assert taken.indices(first=4, start=10) == [12, 13]
    assert taken.indices(first=8, start=10) == [PENDING, PENDING]


def test_drafts_that_are_not_scheduled_are_forgotten() -> None:
    """A grammar, or the end of the context, may leave only the first of them."""
    pending = _drafted(since=3)
    pending.expect(4, 5, number=4)
    assert pending.take(2) is None
    taken = pending.take(4)
    assert taken is not None and taken.positions == [4, 5]


def test_only_the_very_next_pass_takes_up_drafts() -> None:
    """Later ones may find other tokens in the blocks of a request that was preempted."""
    pending = _drafted(since=3)
    pending.expect(4, 7, number=5)
    assert not pending


def _frozen(since: int) -> PendingTokens:
    """Three tokens that froze at two exits while drafted, and one that waits, as it did not."""
    pending = PendingTokens(Bounds(), freezes=True)
    pending.freeze(2, _tokens([4], 0), since)
    pending.freeze(4, _tokens([5], 0), since)
    pending.freeze(2, _tokens([6], 0), since)
    pending.wait(4, _tokens([7], 0), since)
    return pending


def test_frozen_tokens_are_filled_together_and_count_until_their_pass() -> None:
    pending = _frozen(since=3)
    filled = [pending.take_frozen(layer) for layer in (2, 4, 2)]
    assert [one and one.positions for one in filled] == [[4, 6], [5], None]
    pending.expect(4, 7, number=4)
    assert (pending.count_from(4), pending.complete, len(pending), pending.last_layer) == (
        4,
        3,
        1,
        4,
    )
    pending.take(4)
    pending.expect(8, 8, number=5)
    assert (pending.count_from(8), pending.complete) == (0, 0)


def test_of_frozen_tokens_some_may_not_be_scheduled_or_all_are_computed_anew() -> None:
    pending = _frozen(since=3)
    pending.expect(4, 5, number=4)
    assert (pending.count_from(4), pending.complete, len(pending)) == (2, 2, 0)
    pending = _frozen(since=3)
    pending.expect(0, 7, number=4)
    assert (pending.count_from(0), pending.complete, len(pending)) == (0, 0, 0)
    assert pending.take_frozen(2) is None


def test_tokens_that_ran_all_layers_count_until_their_pass() -> None:
    """Three of which the first two waited for the third, and a fourth that waits."""
    pending = PendingTokens(Bounds())
    pending.wait(2, _tokens([4], 0), 3)
    pending.wait(2, _tokens([5], 0), 3)
    pending.take(2)
    pending.finish(6, complete=3, since=3)
    assert (pending.count_from(4), pending.complete, len(pending)) == (3, 3, 0)
    pending.wait(2, _tokens([7], 0), 3)
    pending.expect(4, 7, number=4)
    assert (pending.count_from(4), pending.complete, len(pending)) == (4, 3, 1)
    pending.take(2)
    pending.pass_over()
    assert pending.is_empty and pending.count_from(4) == 0


def test_of_complete_tokens_some_may_not_be_scheduled_or_all_are_computed_anew() -> None:
    pending = PendingTokens(Bounds())
    for last, number, expected in ((5, 4, (2, 2)), (6, 5, (0, 0))):
        pending.clear()
        pending.finish(6, complete=3, since=3)
        pending.expect(4, last, number=number)
        assert (pending.count_from(4), pending.complete) == expected


def test_own_tokens_join_where_they_wait() -> None:
    """Two rows whose first tokens wait, one of them wholly: the pass's order comes back."""
    parts = _tokens([4, 5, 6], 0), _tokens([8, 9], 1)
    positions = [*parts[0].positions, *parts[1].positions]
    state = torch.cat([one.state for one in parts])
    slots = [[*a, *b] for a, b in zip(*(one.slots for one in parts), strict=True)]
    active = ActiveTokens([3, 2], positions, (state, None), slots)
    active.put_off({0: 2, 1: 2}, {})
    assert active.rows == [0] and active.positions.tolist() == [6]
    active.change((), {1: _tokens([9], 1)})
    active.change((), {0: _tokens([4, 5], 0), 1: _tokens([8], 1)})
    assert active.positions.tolist() == positions and active.slots == slots
    assert torch.equal(active.total(), state)
    assert active.tokens == [0, 1, 2, 3, 4] and not active.num_pending
    normed = active.normed = torch.ones(5, WIDTH)
    assert active.hand_over(torch.zeros(5, WIDTH)) is normed


def test_own_tokens_that_nobody_wants_come_along() -> None:
    """Of three that wait, what follows the first two is decided."""
    own = _tokens([4, 5, 6], 0)
    active = ActiveTokens([3], own.positions, (own.state, None), own.slots)
    active.put_off({0: 3}, {0: 2})
    active.change((), {0: own})
    assert active.tokens == [PENDING, PENDING, 2] and active.num_pending == 2
