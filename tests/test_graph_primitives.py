"""A rotation, as the slices that it stands for."""

import jax
import numpy as np
import pytest

from shardax.graph.primitives import rotated

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("dim, first", [(0, 0), (0, 2), (1, 3), (1, 4)])
def test_row_r_is_row_r_plus_first(dim, first):
    x = np.arange(20, dtype="float32").reshape(5, 4)
    jaxpr = jax.make_jaxpr(lambda x: rotated(x, dim=dim, first=first))(x).jaxpr
    *slices, whole = jaxpr.eqns
    parts = [x[tuple(map(slice, eqn.params["start_indices"], eqn.params["limit_indices"]))] for eqn in slices]
    assert whole.params["dimension"] == dim
    np.testing.assert_array_equal(np.concatenate(parts, dim), np.roll(x, -first, dim))
