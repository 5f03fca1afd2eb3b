"""Small programs run by NumPy: their values, where nothing is compiled and there are no devices."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from shardax import _jax


def evaluate(closed, args: Sequence[Any]) -> list[Any]:
    """The results of a closed jaxpr."""
    return _run(closed.jaxpr, closed.consts, args)


def _run(jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        made = RULES[eqn.primitive.name](eqn.params, *map(read, eqn.invars))
        made = made if isinstance(made, list) else [made]
        for v, x in zip(eqn.outvars, made, strict=True):
            env[v] = np.asarray(x, v.aval.dtype)
            assert env[v].shape == v.aval.shape, eqn
    return list(map(read, jaxpr.outvars))


def _call(params, *args):
    return evaluate(params["jaxpr" if "jaxpr" in params else "call_jaxpr"], args)


def _scan(params, *args):
    consts, carries = _jax.scan_counts(params)
    fixed, carry, rows = args[:consts], list(args[consts : consts + carries]), args[consts + carries :]
    trips = range(params["length"])[:: -1 if params["reverse"] else 1]
    stacked = {}
    for trip in trips:
        made = evaluate(params["jaxpr"], [*fixed, *carry, *(x[trip] for x in rows)])
        carry, stacked[trip] = made[:carries], made[carries:]
    return [*carry, *map(np.stack, zip(*(stacked[trip] for trip in sorted(stacked)), strict=True))]


def _dot_general(params, x, y):
    (contracted, batch) = params["dimension_numbers"]
    assert batch == ((), ())
    return np.tensordot(x, y, contracted)


def _broadcast_in_dim(params, x):
    shape, dims = params["shape"], params["broadcast_dimensions"]
    ones = [x.shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))]
    return np.broadcast_to(np.reshape(x, ones), shape)


def _iota(params):
    shape, d = params["shape"], params["dimension"]
    return np.moveaxis(np.broadcast_to(np.arange(shape[d]), (*shape[:d], *shape[d + 1 :], shape[d])), -1, d)


def _dynamic_slice(params, x, *starts):
    assert all(0 <= s <= n - size for s, n, size in zip(starts, x.shape, params["slice_sizes"], strict=True))
    return x[tuple(slice(s, s + size) for s, size in zip(starts, params["slice_sizes"], strict=True))]


def _dynamic_update_slice(params, x, update, *starts):
    place = tuple(slice(s, s + size) for s, size in zip(starts, update.shape, strict=True))
    assert x[place].shape == update.shape
    updated = np.array(x)
    updated[place] = update
    return updated


def _pad(params, x, value):
    assert all(low >= 0 and high >= 0 and not inner for low, high, inner in params["padding_config"])
    return np.pad(x, [each[:2] for each in params["padding_config"]], constant_values=value)


def _slice(params, x):
    strides = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


RULES = {
    "add": lambda _, x, y: x + y,
    "add_any": lambda _, x, y: x + y,
    "annotate": lambda _, x: x,
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": lambda params, *args: np.concatenate(args, params["dimension"]),
    "convert_element_type": lambda _, x: x,
    "copy": lambda _, x: x,
    "custom_vjp_call": _call,
    "div": lambda _, x, y: x / y,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "expand_dims": lambda params, x: np.expand_dims(x, params["dimensions"]),
    "iota": _iota,
    "jit": _call,
    "lt": lambda _, x, y: x < y,
    "mul": lambda _, x, y: x * y,
    "neg": lambda _, x: -x,
    "one_minus_square": lambda _, x: 1 - x * x,
    "pad": _pad,
    "reduce_sum": lambda params, x: x.sum(params["axes"]),
    "reshape": lambda params, x: np.reshape(x, params["new_sizes"]),
    "scan": _scan,
    "select_n": lambda _, which, x, y: np.where(which, y, x),
    "slice": _slice,
    "squeeze": lambda params, x: np.squeeze(x, params["dimensions"]),
    "stack": lambda params, *args: np.stack(args, params["axis"]),
    "sub": lambda _, x, y: x - y,
    "tanh": lambda _, x: np.tanh(x),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
}
