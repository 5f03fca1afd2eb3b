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
    **dict.fromkeys("annotate reshard sharding_constraint".split(), "an annotation: says how its operand lies on the devices"),
    **dict.fromkeys("scaled_matmul scaled_matmul_wrapper".split(), "runs on GPUs alone"),
    "copy_p": "another name of copy",
    "random_gamma_grad": "lax.random_gamma_grad is made of other primitives",
    "partition_as": "its rule is that of a user's function",
    "xla_metadata_value": "is the identity: carries a note for the compiler",
    "platform_index": "says on which platform it runs",
    "select_and_scatter": "no public function makes it",
    **dict.fromkeys("empty empty2".split(), "its elements are arbitrary until they are written"),
    **dict.fromkeys("geqp3 geqrf ormqr philox2x32 philox4x32 threefry4x32".split(), _LOWERING),
}

_ALL_THE_WORK = "linear in it, but every device would do all of the work, most of it on zeros"
_REASONS = (  # pattern of primitives, kind, reason
    ("gather", "windowed", "a slice at a place that is known: jnp writes it as a slice, which has a halo"),
    ("random_gamma", "*", "one key makes all of its elements, in a loop that numbers them"),
    ("rng_uniform", "made", "the generator of the backend: which numbers it makes where is not defined"),
)


def reason(found: Missing) -> str:
    """Why a missing claim is meant, "" if it is not."""
    if found.passes:
        return _ALL_THE_WORK
    return next(
        (why for name, kind, why in _REASONS if fnmatchcase(found.primitive, name) and fnmatchcase(found.kind, kind)), ""
    )
