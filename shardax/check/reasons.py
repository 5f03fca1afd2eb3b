"""What the checker leaves out, and why: primitives that cannot be tried alone, and claims that are missing on
purpose.
"""

from fnmatch import fnmatchcase

from shardax.check.missing import Missing

_ISLAND = "lives inside a shard_map alone, whose axes are split already"
_EFFECT = "a callback is called once, on the global value: one call cannot be split"
_LOWERING = "JAX makes it in the lowering of another primitive, so programs do not have it"

UNCHECKED = {
    **dict.fromkeys("debug_callback debug_print inspect_sharding io_callback pure_callback".split(), _EFFECT),
    **dict.fromkeys(
        """
        all_gather all_gather_invariant all_gather_reduced all_to_all axis_index pbroadcast pbroadcast_dynamic
        pmax pmin ppermute preduced psum psum_invariant pvary ragged_all_to_all reduce_scatter
        reduced_vary_cast reduced_vary_cast_p unreduced_psum unreduced_reduce_scatter vary_unreduced_cast
        vary_unreduced_cast_p
        """.split(),
        _ISLAND,
    ),
    **dict.fromkeys(
        "eq_to le_to lt_to".split(), "compares elementwise in total order, in the comparators of sort alone"
    ),
    "layout_constraint": "is the identity: fixes its operand's layout in one device's memory",
    "device_put": "is the identity: names the memory of its operand",
    **dict.fromkeys(
        "annotate reshard sharding_constraint".split(),
        "an annotation: gives the sharding of its operand",
    ),
    "held": "is an update's loop or branch while shardax.pipeline partitions a step: nothing in it is split",
    "kept": "packs or unpacks weights at rest while shardax.pipeline partitions a step: nothing is split",
    "noted": "is the identity: carries an annotation while shardax.pipeline partitions a step",
    **dict.fromkeys("scaled_matmul scaled_matmul_wrapper".split(), "runs on GPUs alone"),
    "associative_scan": "shardax finds it in what jax.lax.associative_scan expands into",
    "associative_scan_vjp": "shardax finds it in the gradient of what jax.lax.associative_scan expands into",
    "copy_p": "another name of copy",
    **dict.fromkeys(
        "rotate rotate_by".split(), "shardax makes it of the slices and the concatenation of a roll"
    ),
    "random_gamma_grad": "lax.random_gamma_grad is made of other primitives",
    "custom_partitioning": "its rule is the sharding_rule that it brings",
    "partition_as": "its rule is that of a user's function",
    "xla_metadata_value": "is the identity: carries a note for the compiler",
    "platform_index": "says on which platform it runs",
    "search": "shardax finds it in what jnp.searchsorted expands into",
    "select_and_scatter": "no public function makes it",
    **dict.fromkeys("empty empty2".split(), "its elements are arbitrary until they are written"),
    **dict.fromkeys("geqp3 geqrf ormqr philox2x32 philox4x32 threefry4x32".split(), _LOWERING),
}

_ALL_THE_WORK = "linear in it, but every device would do all of the work, most of it on zeros"
_REASONS = (  # pattern of primitives, kind, reason
    ("gather", "windowed", "a slice at a place that is known: jnp writes it as a slice, which has a halo"),
    ("random_gamma", "*", "one key makes all of its elements, in a loop that numbers them"),
    ("symmetric_product", "sum", "no public function makes it: dot_general is what splits contractions"),
    ("tridiagonal_solve", "kept", "its rows are solved together, which one diagonal alone does not show"),
    ("rng_uniform", "made", "the generator of the backend: which numbers it makes where is not defined"),
)


def reason(missing: Missing) -> str:
    """Why a missing claim is meant, "" if it is not."""
    if missing.passes:
        return _ALL_THE_WORK
    return next(
        (
            why
            for name, claim, why in _REASONS
            if fnmatchcase(missing.primitive, name) and fnmatchcase(missing.claim, claim)
        ),
        "",
    )


_MATRIX = "a matrix is factored as one"
UNSPLIT_BECAUSE = {
    **dict.fromkeys(
        """
        cholesky cholesky_update eig eigh hessenberg householder_product lu lu_pivots_to_permutation qr schur
        svd symmetric_product triangular_solve tridiagonal tridiagonal_solve
        """.split(),
        _MATRIX,
    ),
    "approx_top_k": "few, picked from the same candidates everywhere",
    "bitcast_convert_type": "the bytes of one element",
    "conv_general_dilated": "the window: every device needs all of it",
    "ragged_dot_general": "the sizes of the groups say where each begins",
    "reshape": "lies inside another dim on the other side",
    "scatter": "of updates of one place the last one counts",
    "scatter-mul": "products of updates are not owed",
    "stack": "one operand each",
    "unstack": "one result each",
    "dynamic_slice": "of another size than what it is cut from",
    "dynamic_update_slice": "put somewhere along the operand",
    "fft": "each result depends on every element",
    **dict.fromkeys(
        "gather scatter-add scatter-max scatter-min scatter-sub".split(), "the words of one index"
    ),
    "random_gamma": "one key makes them, in a loop that numbers them",
    "random_unwrap": "the words of one key",
    "random_wrap": "the words of one key",
    "rng_bit_generator": "the generator of the backend: which numbers it makes where is not defined",
    "rng_uniform": "the generator of the backend: which numbers it makes where is not defined",
    "sort": "each place depends on every element; the blocks of an array without other dims are merged",
    "top_k": "few, picked from the same candidates everywhere",
}

_ASYNC = "half of an asynchronous collective, inside shard_maps alone"
_GPU = "a kernel for GPUs: put the function that calls it under partition_as"
_KERNEL = "a kernel: put the function that calls it under partition_as"
_EXPORT = "of exported programs of unknown sizes"
_INSIDE = "internal to JAX; programs that are differentiated and traced whole do not have it"
NO_RULE = {
    "compute_on": "of compute_on2; under the context manager equations keep their rules",
    **dict.fromkeys(
        """
        all_gather_done all_gather_reduced_start all_gather_start all_to_all_done all_to_all_start
        pbroadcast_done pbroadcast_start ppermute_done ppermute_start precv psend psum_done
        psum_invariant_start psum_start reduce_scatter_done reduce_scatter_start unreduced_pmax unreduced_pmin
        unreduced_psum_start unreduced_reduce_scatter_start
        """.split(),
        _ASYNC,
    ),
    **dict.fromkeys(
        """
        cudnn_fusion dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd
        dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd
        dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd dot_product_attention_fwd_wrapper
        scaled_dot
        """.split(),
        _GPU,
    ),
    **dict.fromkeys("core_map ffi_call pallas_call run_state".split(), _KERNEL),
    **dict.fromkeys("call_exported dim_as_value dimension_size shape_assertion".split(), _EXPORT),
    **dict.fromkeys(
        """
        after_all broadcast_to check create_linear create_token custom_lin dce_sink from_edtype
        global_array_to_host_local_array host_local_array_to_global_array pin relayout stage tie to_edtype
        unpin unreachable with_memory_space_constraint
        """.split(),
        _INSIDE,
    ),
    **dict.fromkeys(
        "addupdate get swap".split(), "reads and writes of mutable arrays are made values before"
    ),
}
