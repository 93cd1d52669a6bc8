"""Seconds by number of rows."""

from exitserve.costs.curves import Curve


def test_a_curve_is_straight_between_points_and_zero_at_no_row() -> None:
    found = Curve(((1, 4.0), (2, 5.0), (8, 11.0)))
    assert [found(rows) for rows in (0, 1, 2, 4, 8)] == [0.0, 4.0, 5.0, 7.0, 11.0]


def test_beyond_its_points_a_curve_goes_on_as_before() -> None:
    """So many rows are bound by arithmetic, which grows with each."""
    assert Curve(((1, 4.0), (2, 5.0), (8, 11.0)))(20) == 23.0
    assert Curve(((2, 4.0),))(3) == 6.0
