import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from verl_audit.measure.tokens.exact import LIMBS, MOST_ROWS, carried, joined, sums

ADDENDS = st.lists(st.floats(-(2.0**80), 2.0**80) | st.floats(-1, 1), min_size=1, max_size=50)


WHOLE = np.array([0])


def total(addends: list[float]) -> NDArray[np.int64]:
    return sums(np.array(addends), WHOLE)[0] if addends else np.zeros(LIMBS, np.int64)


@given(ADDENDS)
def test_sums_are_those_of_exact_arithmetic(addends: list[float]) -> None:
    exact = math.fsum(addends)
    assert abs(float(joined(total(addends)[None])[0]) - exact) <= 2.0**-56 * len(addends) + abs(exact) * 2**-51


@given(ADDENDS, st.data())
def test_order_and_grouping_change_no_bit(addends: list[float], data: st.DataObject) -> None:
    other = data.draw(st.permutations(addends))
    cut = data.draw(st.integers(0, len(addends)))
    assert (carried(total(other[:cut]) + total(other[cut:])) == total(addends)).all()


def test_one_addend_comes_back_whole() -> None:
    x = np.array([0.0, 1.0, -1.0, 0.1, -0.1, 1e-9, 2.35e17 * 1e6, -3.5e20, 2.0**100])
    assert np.allclose(joined(sums(x, np.arange(len(x)))), x, rtol=1e-15, atol=2.0**-56)


def test_more_rows_than_add_exactly_are_refused() -> None:
    with pytest.raises(ValueError, match="8193 rows at once"):
        sums(np.zeros(MOST_ROWS + 1), WHOLE)
