"""What the checker does not ask for, with why: primitives that cannot be tried alone, and missing claims that are meant."""

from fnmatch import fnmatchcase

from shardax.check.missing import Missing

_ISLAND = "lives inside a shard_map alone, whose axes are split already"
_EFFECT = "its callback is called once, on the global value: one call cannot be split"
_LOWERING = "JAX makes it in the lowering of another primitive, so programs do not have it"

UNCHECKED = {
    **dict.fromkeys("debug_callback debug_print inspect_sharding io_callback pure_callback".split(), _EFFECT),
    **dict.fromkeys(
        """
        all_gather all_gather_invariant all_gather_reduced all_to_all axis_index pbroadcast pbroadcast_dynamic pmax pmin
        ppermute preduced psum psum_invariant pvary ragged_all_to_all reduce_scatter reduced_vary_cast reduced_vary_cast_p
        unreduced_psum unreduced_reduce_scatter vary_unreduced_cast vary_unreduced_cast_p
        """.split(),
        _ISLAND,
    ),
    **dict.fromkeys("eq_to le_to lt_to".split(), "compares elementwise in total order, in the comparators of sort alone"),
    "layout_constraint": "is the identity: says how its operand lies in one device's memory",
    **dict.fromkeys("empty empty2".split(), "its elements are arbitrary until they are written"),
    **dict.fromkeys("geqp3 geqrf ormqr philox2x32 philox4x32 threefry4x32".split(), _LOWERING),
}

_ALL_THE_WORK = "linear in it, but every device would do all of the work on zeros"
_REASONS: tuple[tuple[str, str, str], ...] = ()  # (pattern of primitives, kind, reason)


def reason(found: Missing) -> str:
    """Why a missing claim is meant, "" if it is not."""
    return next((why for name, kind, why in _REASONS if fnmatchcase(found.primitive, name) and kind == found.kind), "")
