"""Finds `jnp.searchsorted`, which JAX shows as steps of a search: of a split table each step would look
things up anew.
"""

import itertools
from collections.abc import Hashable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from shardax import _jax
from shardax.annotations.explicit import SHARDING_PARAMS

search_p = Primitive("search")
"""The places of queries in a sorted table of one dim: `side` and `method` are those of `jnp.searchsorted`."""
_TREES = ("ft_in", "ft_out")  # of a scan: the trees that its arrays were in, of which some are not kept
_SIDES, _METHODS = ("left", "right"), ("scan", "scan_unrolled", "sort", "compare_all")


def search_params(eqn) -> dict[str, str] | None:
    """The parameters of the search that a jit equation is; None where it is something else."""
    if eqn.params["name"] != "searchsorted" or len(eqn.invars) != 2 or len(eqn.invars[0].aval.shape) != 1:
        return None
    form = _form(eqn.params["jaxpr"])
    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    for side, method in itertools.product(_SIDES, _METHODS):
        if form == _expanded(*types, side, method):
            return {"side": side, "method": method}
    return None


@lru_cache(maxsize=256)
def _expanded(table, queries, side: str, method: str) -> Hashable:
    """What JAX makes of a search."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        shown = jax.make_jaxpr(partial(search, side=side, method=method))(table, queries)
    return _form(shown.jaxpr.eqns[-1].params.get("jaxpr", shown))


def _form(jaxpr) -> Hashable:
    """The equations of a jaxpr, whatever its variables are called and whatever mesh it was traced on."""
    open_jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    known: dict[Any, Hashable] = {v: i for i, v in enumerate(open_jaxpr.invars)}

    def read(atom) -> Hashable:
        return str(atom.val) if _jax.is_literal(atom) else known[atom]

    steps = []
    for eqn in open_jaxpr.eqns:
        inputs = tuple(map(read, eqn.invars))
        known.update({v: (len(steps), i) for i, v in enumerate(eqn.outvars)})
        if eqn.primitive.name == "reshard":
            known[eqn.outvars[0]] = inputs[0]
        else:
            steps.append((eqn.primitive.name, inputs, tuple(str(v.aval) for v in eqn.outvars), _params(eqn)))
    return tuple(steps), tuple(map(read, open_jaxpr.outvars))


def _params(eqn) -> Hashable:
    if "jaxpr" in eqn.params and eqn.primitive.name in ("jit", "pjit"):
        return _form(eqn.params["jaxpr"])
    params = ((name, p) for name, p in sorted(eqn.params.items()) if name not in (*SHARDING_PARAMS, *_TREES))
    return tuple(
        (name, _form(p) if hasattr(p, "eqns") or hasattr(p, "jaxpr") else str(p)) for name, p in params
    )


def search(table, queries, side: str, method: str) -> Any:
    return jnp.searchsorted(table, queries, side=side, method=method)


search_p.def_impl(jax.jit(search, static_argnames=("side", "method")))
