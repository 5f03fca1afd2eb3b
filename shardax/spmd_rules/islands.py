"""Collectives that users write inside their own shard_maps. They are bound as they are, because nothing is
left to split there.

Our shard_map does not check which values vary over which axes, so primitives that only declare that are
identities here.
"""

from jax import lax

from shardax.spmd_rules.registry import Local, register_rule, replicated_rule

_AS_THEY_ARE = """
    all_gather all_to_all pbroadcast pbroadcast_dynamic pmax pmin ppermute psum ragged_all_to_all
    reduce_scatter
""".split()
_IDENTITIES = (
    "preduced pvary reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p".split()
)


def _identity_local(local: Local, *shards):
    return shards


def _index_local(local: Local):
    """An axis of the user's may be several of the program's, and the primitive takes one."""
    return [lax.axis_index(local.params["axis_name"])]


def _gather_local(local: Local, shard):
    p = local.params
    return [lax.all_gather(shard, p["axis_name"], axis=p["all_gather_dimension"], tiled=p["tiled"])]


def _psum_local(local: Local, *shards):
    return [lax.psum(shard, local.params["axes"]) for shard in shards]


def _scatter_local(local: Local, shard):
    p = local.params
    return [
        lax.psum_scatter(shard, p["axis_name"], scatter_dimension=p["scatter_dimension"], tiled=p["tiled"])
    ]


register_rule("axis_index", replicated_rule, _index_local, reads="none")
for _name in _AS_THEY_ARE:
    register_rule(_name, replicated_rule)
for _name in _IDENTITIES:
    register_rule(_name, replicated_rule, _identity_local)
for _name in ("all_gather_invariant", "all_gather_reduced"):
    register_rule(_name, replicated_rule, _gather_local)
for _name in ("psum_invariant", "unreduced_psum"):
    register_rule(_name, replicated_rule, _psum_local)
register_rule("unreduced_reduce_scatter", replicated_rule, _scatter_local)
