"""Constants that one equation makes are made by it; others stay constants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardax.rewrites.constants import with_made_constants
from tests.graph_text import graph_of

IOTA = np.arange(8)
CLOSED = {  # what is closed over, and what is left of it
    "counts": (IOTA, ["b:i32[8] = iota"]),
    "counts along a dim": (np.broadcast_to(IOTA[:, None], (8, 3)), ["b:i32[8,3] = iota"]),
    "the same everywhere": (np.full((8, 2), 7), ["b:i32[8,2] = broadcast_in_dim 7"]),
    "booleans": (IOTA < 0, ["b:bool[8] = broadcast_in_dim False"]),
    "of jax": (jnp.arange(8), ["b:i32[8] = iota"]),
    "counts from one": (IOTA + 1, []),
    "counts down": (IOTA[::-1], []),
    "every second number": (2 * IOTA, []),
    "both": ((IOTA > 3), []),
    "floats": (np.zeros(8, "float32"), []),
    "nothing": (np.zeros((0, 3), int), []),
}


@pytest.mark.parametrize("name", CLOSED)
def test_made(name):
    constant, made = CLOSED[name]
    constant = constant.astype("int32") if constant.dtype == "int64" else constant
    jaxpr = with_made_constants(jax.make_jaxpr(lambda x: (x, jnp.asarray(constant)))(0.0))
    assert len(jaxpr.consts) == (0 if made else 1)
    graph = graph_of(jax.extend.core.jaxpr_as_fun(jaxpr), np.float32(0))
    assert [line for line in str(graph).split("\n") if " = " in line] == made
