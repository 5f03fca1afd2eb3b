"""Collectives that users write inside their own shard_maps. They are bound as they are: what is left to split
there, over the axes that are not manual, they send and cut shard by shard.

Our shard_map does not check which values vary over which axes, so primitives that only declare that are
identities here.
"""

from jax import lax

from shardax.graph.graph import Node
from shardax.spmd_rules.registry import Local, register_rule, replicated_rule

_SENT = "pbroadcast pbroadcast_dynamic pmax pmin ppermute psum psum_invariant unreduced_psum".split()
_CUT = """
    all_gather all_gather_invariant all_gather_reduced all_to_all reduce_scatter unreduced_reduce_scatter
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


def _sent_rule(node: Node) -> str:
    """Every operand as it is, to other devices."""
    sides = [[" ".join(f"k{i}_{d}" for d in range(len(shape))) for i, shape in enumerate(node.in_shapes)]] * 2
    return " -> ".join(map(", ".join, sides))


def _cut_rule(node: Node) -> str:
    """The dims that it cuts or joins are unsplit, the others kept."""
    p = node.params
    if "split_axis" in p:
        cut = joined = {p["split_axis"], p["concat_axis"]}
    else:
        dim = p["all_gather_dimension"] if "all_gather_dimension" in p else p["scatter_dimension"]
        gathers = "all_gather_dimension" in p
        cut, joined = ({dim} if p["tiled"] or gathers is not has else set() for has in (True, False))
    kept = [f"k{d}" for d in range(len(node.in_shapes[0])) if d not in cut]
    return " -> ".join(
        " ".join(f"{side}{d}!" if d in own else next(left) for d in range(len(shape)))
        for side, own, shape, left in (
            ("a", cut, node.in_shapes[0], iter(kept)),
            ("b", joined, node.out_shapes[0], iter(kept)),
        )
    )


register_rule("axis_index", replicated_rule, _index_local, reads="none")
_LOWERINGS = {
    "all_gather_invariant": _gather_local,
    "all_gather_reduced": _gather_local,
    "psum_invariant": _psum_local,
    "unreduced_psum": _psum_local,
    "unreduced_reduce_scatter": _scatter_local,
}
for _name in _SENT:
    register_rule(_name, _sent_rule, _LOWERINGS.get(_name))
for _name in _CUT:
    register_rule(_name, _cut_rule, _LOWERINGS.get(_name))
for _name in _IDENTITIES:
    register_rule(_name, _sent_rule, _identity_local)
register_rule("ragged_all_to_all", replicated_rule)
