"""Drops from a local program what nothing reads, such as a layout that an annotation requested and that no
reader took.
"""

from shardax import _jax


def dropped(jaxpr):
    """The same ClosedJaxpr, dead equations left out of the body of its `shard_map`, whose inputs and results
    stay.
    """
    eqns = [
        eqn.replace(params={**eqn.params, "jaxpr": _jax.dce_open(eqn.params["jaxpr"])})
        if eqn.primitive.name == "shard_map"
        else eqn
        for eqn in jaxpr.jaxpr.eqns
    ]
    return _jax.replaced_eqns(jaxpr, eqns)
