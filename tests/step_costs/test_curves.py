"""Seconds by number of rows."""

from __future__ import annotations

import pytest

from exitserve.step_costs.curves import Curve


def test_a_curve_is_straight_between_points_and_zero_at_no_row() -> None:
    found = Curve(((1, 4.0), (2, 5.0), (8, 11.0)))
    assert [found(rows) for rows in (0, 1, 2, 4, 8)] == [0.0, 4.0, 5.0, 7.0, 11.0]
    with pytest.raises(ValueError, match=r"9 rows lie outside 1\.\.8"):
        found(9)
