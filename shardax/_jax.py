"""The only file that knows JAX's internals or looks at its version.

Each entry says why the public API does not do. Generations covered: 0.10 (Python 3.11), 0.11 and 0.12 (Python >= 3.12).
"""

from typing import Any

import jax
from jax._src import core, source_info_util  # source lines of equations: jax.extend has no reader for them
from jax._src.interpreters import partial_eval as pe  # dce_jaxpr keeps effects and prunes inside scan, while and remat

Primitive = jax.extend.core.Primitive if hasattr(jax, "extend") else core.Primitive
Literal = core.Literal
optimization_barrier_p = jax.lax.optimization_barrier_p
EMPTY_NAME_STACK = source_info_util.NameStack()


def is_literal(atom) -> bool:
    return isinstance(atom, Literal)


def closed(jaxpr) -> Any:
    """A jaxpr with its constants; open jaxprs (remat2's, shard_map's) have none. One type in 0.12, two before."""
    return jaxpr if hasattr(jaxpr, "consts") else core.ClosedJaxpr(jaxpr, ())


def expand_hi_primitive(eqn) -> Any:
    """The jaxpr of 0.12's call_hi_primitive (searchsorted, nonzero): its expansion, traced."""
    prim = eqn.params["_prim"] if "_prim" in eqn.params else eqn.params["prim"]
    return jax.make_jaxpr(prim.expand)(*(v.aval for v in eqn.invars))


def dce(jaxpr) -> Any:
    """Drops what no result needs, inside loops too; keeps inputs and effects."""
    open_jaxpr, _ = pe.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), instantiate=True)
    if open_jaxpr is jaxpr.jaxpr:
        return jaxpr
    return (
        core.ClosedJaxpr(open_jaxpr, jaxpr.consts) if hasattr(core, "ClosedJaxpr") else open_jaxpr.replace(consts=jaxpr.consts)
    )


def scan_counts(params) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan equation: parameters in 0.10, a tree of them in 0.12."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = map(len, params["ft_in"].unpack())
    return consts, carry


def user_line(source_info) -> str:
    """ "file.py:12" of the user's frame that made an equation, or "" where it is not known."""
    frame = source_info_util.user_frame(source_info.traceback)
    return f"{frame.file_name}:{frame.start_line}" if frame else ""


def with_user_frame(eqn, callers) -> Any:
    """The source info of an equation, or of the innermost of its callers where its own has no user frame (jax.nn's jits)."""
    for e in (eqn, *callers) if callers else ():
        if source_info_util.user_frame(e.source_info.traceback) is not None:
            return e.source_info
    return eqn.source_info
