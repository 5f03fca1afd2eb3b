"""Elementwise primitives: each result element depends on the operands' elements at the same place."""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardax.graph.graph import Node
from shardax.spmd_rules.registry import LINEAR, MOVES, Local, Passes, register_rule


def same_shape(node: Node) -> str:
    """Every dim is kept. Operands may be scalars, or have dims of size one where the result does not; these
    are the same for all positions.
    """
    shape = node.outputs[0].shape

    def dims(operand: tuple[int, ...]) -> str:
        if operand == shape:
            return "..." if shape else ""
        return " ".join(
            "1" if n == 1 != size else f"_{d}"
            for d, (n, size) in enumerate(zip(operand, shape, strict=False))
        )

    sides = [", ".join(map(dims, shapes)) for shapes in (node.in_shapes, node.out_shapes)]
    return " -> ".join(sides)


_NONLINEAR = """
    abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex cos cosh
    digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le le_to lgamma log
    log1p log2 logistic lt lt_to ne nextafter not one_minus_square polygamma polynomial
    population_count pow rem round rsqrt shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient tan tanh zeta
""".split()
_LOOPS = (
    "igamma igamma_grad_a igammac random_gamma_grad regularized_incomplete_beta".split()
)  # XLA fuses nothing with a loop

_LINEAR = "conj imag neg real".split()
_MOVES = "copy copy_p name xla_metadata_value".split()


def _select_passes(node: Node) -> tuple[Passes, ...]:
    """A choice between pending values is pending, for any reduction, because the predicate is the same
    everywhere.
    """
    return (MOVES(*range(1, len(node.inputs))),)


def _convert_passes(node: Node) -> tuple[Passes, ...]:
    """Sums may wait while a float widens. Where it narrows, the parts would be rounded before they are
    added.
    """
    old, new = node.inputs[0].aval.dtype, node.outputs[0].aval.dtype
    if old == new:
        return (MOVES(0),)
    floats = all(d.kind in "fcV" for d in (old, new))
    return (LINEAR(0),) if floats and new.itemsize >= old.itemsize else ()


def _div_passes(node: Node) -> tuple[Passes, ...]:
    """Integer division may not wait, because it would round each part of a sum."""
    return (LINEAR(0),) if node.outputs[0].aval.dtype.kind not in "iu" else ()


def _mulhi_local(local: Local, a, b):
    """By halves, (a·2ⁿ + b)(c·2ⁿ + d): XLA does not know the primitive inside a shard_map."""
    n = a.dtype.itemsize * 4
    unsigned = jnp.dtype(f"uint{2 * n}")
    x, y = (lax.bitcast_convert_type(v, unsigned) for v in jnp.broadcast_arrays(a, b))
    half, mask = np.asarray(n, unsigned), np.asarray((1 << n) - 1, unsigned)
    crossed = (x >> half) * (y & mask) + ((x & mask) * (y & mask) >> half)
    high = (
        (x >> half) * (y >> half)
        + (crossed >> half)
        + (((x & mask) * (y >> half) + (crossed & mask)) >> half)
    )
    if a.dtype != unsigned:
        high = high - jnp.where(a < 0, y, jnp.zeros_like(y)) - jnp.where(b < 0, x, jnp.zeros_like(x))
    return [lax.bitcast_convert_type(high, a.dtype)]


_elementwise = partial(register_rule, fuses="all")
for _name in _NONLINEAR:
    _elementwise(_name, same_shape)
for _name in _LOOPS:
    register_rule(_name, same_shape, heavy=True)
for _name in _LINEAR:
    _elementwise(_name, same_shape, passes=(LINEAR(0),))
for _name in ("add", "add_any"):
    _elementwise(_name, same_shape, passes=(LINEAR(0, 1),), accumulates=("sum", (0, 1)), commutes=True)
for _name in ("and", "or", "xor"):
    _elementwise(_name, same_shape, commutes=True)
for _name in ("max", "min"):
    _elementwise(_name, same_shape, accumulates=(_name, (0, 1)), commutes=True)
for _name in _MOVES:
    _elementwise(_name, same_shape, passes=(MOVES(0),))
_elementwise("convert_element_type", same_shape, passes=_convert_passes, made_anywhere=True, casts=True)
register_rule("device_put", same_shape, passes=(MOVES(0),))
_elementwise("div", same_shape, passes=_div_passes)
register_rule("layout_constraint", same_shape, passes=(MOVES(0),))
_elementwise("mul", same_shape, passes=(LINEAR(0), LINEAR(1)), commutes=True)
_elementwise("mulhi", same_shape, _mulhi_local)
_elementwise("reduce_precision", same_shape, casts=True)
_elementwise("select_n", same_shape, passes=_select_passes)
_elementwise("sub", same_shape, passes=(LINEAR(0, 1),), accumulates=("sum", (0,)))
