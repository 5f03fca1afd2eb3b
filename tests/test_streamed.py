"""The pass by which updates of arrays at the host go block by block: results are the same, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from models.devices import make_mesh
from shardax import _jax
from shardax.passes.blocks import tiled_dims
from shardax.passes.segments import in_order, segments, topological_order
from shardax.passes.streamed import streamed
from shardax.zero.offload import at_host

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host


ROUNDED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
"""XLA 0.12 without optimization, as tests compile, leaves out roundings of bfloat16 in loops, on processors that
have instructions for it."""


def momentum(m, w, g):
    m = 0.9 * jax.device_put(m, DEVICE) + g
    return jax.device_put(m, HOST), w - 0.1 * m


def adam(m, v, w, g):
    m = 0.9 * jax.device_put(m, DEVICE) + 0.1 * g
    v = 0.99 * jax.device_put(v, DEVICE) + 0.01 * g * g
    return jax.device_put(m, HOST), jax.device_put(v, HOST), w - 0.1 * m / (jnp.sqrt(v) + 1e-3)


def program(function, *types):
    """The jaxpr of arrays of these (shape, dtype, whether at the host)."""
    with jax.sharding.use_abstract_mesh(make_mesh({"data": 1}).abstract_mesh):
        avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in types]
        return jax.make_jaxpr(function)(
            *(at_host(x) if host else x for x, (_, _, host) in zip(avals, types, strict=True))
        )


def in_blocks(function, *types, gradient=None, tiles=True):
    """The equations of such a program in blocks, after a comparison of what it gives; the gradient, the third
    argument, may be of one number.
    """
    closed = program(function, *types)
    with jax.sharding.use_abstract_mesh(make_mesh({"data": 1}).abstract_mesh):
        new = streamed(closed, tiles)
    rng, device = np.random.default_rng(0), jax.devices()[0]
    kinds = ("pinned_host" if host else "device" for _, _, host in types)
    places = [jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in kinds]
    args = [
        jax.device_put(rng.uniform(0.5, 1.5, size=shape).astype(dtype), place)
        for (shape, dtype, _), place in zip(types, places, strict=True)
    ]
    if gradient is not None:
        args[2] = jnp.full_like(args[2], gradient)
    how = ROUNDED if all(dtype == "bfloat16" for _, dtype, _ in types) else None
    got, wanted = (jax.jit(jaxpr_as_fun(x), compiler_options=how)(*args) for x in (new, closed))
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.sharding.memory_kind == other.sharding.memory_kind
    return new.jaxpr.eqns


def scans(eqns):
    return [eqn for eqn in eqns if eqn.primitive.name == "scan"]


def blocks_of(scan) -> set[tuple[int, ...]]:
    """The shapes of what a loop brings."""
    body = _jax.closed(scan.params["jaxpr"]).jaxpr
    return {eqn.outvars[0].aval.shape for eqn in body.eqns if eqn.primitive.name == "device_put"}


@pytest.mark.parametrize(
    "shape, dtype, block",
    [
        ((24, 16, 256), "float32", (8, 256)),  # dims that are one; a tile
        ((6, 13, 256), "float32", (1, 13, 256)),  # rows of no whole tiles
        ((3, 101, 256), "float32", (3, 8, 256)),  # of all layers; the last one begins earlier
        ((100, 256), "bfloat16", (16, 256)),
        ((1000, 96), "float32", (1000, 8)),  # TPUs tile it the other way round
    ],
)
def test_blocks(shape, dtype, block):
    array = shape, dtype, False
    (scan, *_) = scans(in_blocks(momentum, (shape, dtype, True), array, array))
    assert blocks_of(scan) == {block}


@pytest.mark.parametrize(
    "shape, block",
    [
        ((24, 16, 256), (1, 256)),
        ((6, 13, 256), (1, 256)),
        ((1000, 96), (1, 96)),
        ((101, 7, 3), (1, 3)),
        ((4099,), (4,)),  # the last one begins earlier
    ],
)
def test_blocks_where_there_are_no_tiles(shape, block):
    """What lies together, row by row: a GPU copies that at the rate of its link, and nothing else."""
    array = shape, "float32", False
    (scan, *_) = scans(in_blocks(momentum, (shape, "float32", True), array, array, tiles=False))
    assert blocks_of(scan) == {block}


def test_arrays_share_a_loop():
    def update(m, w, g, n, x, h):
        return *momentum(m, w, g), *momentum(n, x, h)

    one, other = ((64, 256), "float32"), ((200, 512), "float32")
    types = [(*each, host) for each in (one, other) for host in (True, False, False)]
    first, second, *_ = scans(in_blocks(update, *types))
    assert (first.params["length"], second.params["length"]) == (8, 17)
    assert (blocks_of(first), blocks_of(second)) == ({(8, 256), (8, 512)}, {(8, 512)})


def test_new_state_takes_the_place_of_the_old():
    """At the host of its own, not of another array of its shape; on the device of an argument that nothing reads
    later."""
    x = (64, 256), "float32"
    (scan,) = scans(in_blocks(adam, (*x, True), (*x, True), (*x, False), (*x, False)))
    consts, carries = _jax.scan_counts(scan.params)
    assert carries == 4  # the number of the block, both moments and the parameter
    closed = program(adam, (*x, True), (*x, True), (*x, False), (*x, False))
    with jax.sharding.use_abstract_mesh(make_mesh({"data": 1}).abstract_mesh):
        new = streamed(closed)
    (scan,) = scans(new.jaxpr.eqns)
    m, v, w, _ = new.jaxpr.invars
    assert [x for x in scan.invars[consts : consts + carries] if not _jax.is_literal(x)] == [m, v, w]
    results = dict(zip(scan.outvars, scan.invars[consts:], strict=True))
    assert [results[r] for r in new.jaxpr.outvars] == [m, v, w]


def test_what_is_read_later_stays():
    def update(m, w, g):
        return *momentum(m, w, g), jnp.sin(w), jnp.cos(g)

    x = (64, 256), "float32"
    (scan,) = scans(in_blocks(update, (*x, True), (*x, False), (*x, False)))
    consts, carries = _jax.scan_counts(scan.params)
    assert carries == 3 and sum(v.aval.shape == x[0] for v in scan.invars[:consts]) == 2


def test_norms_divide_updates():
    """What is scaled by a norm of it all comes in a loop after the one that makes it."""

    def update(m, w, g):
        m = 0.9 * jax.device_put(m, DEVICE) + g
        scale = jax.device_put(jnp.float32(0.1), DEVICE) / jnp.linalg.norm(m)
        return jax.device_put(m, HOST), w - scale * m

    x = (64, 256), "float32"
    assert len(scans(in_blocks(update, (*x, True), (*x, False), (*x, False)))) == 1


def test_gradients_stay_narrow():
    """Blocks are cast, though a sum reads all of the wider array before."""

    def update(m, w, g):
        g = g.astype("float32")
        return momentum(m, w, lax.min(g, lax.broadcast(jnp.sum(g), g.shape)))

    x = (64, 256), "float32"
    (scan,) = scans(in_blocks(update, (*x, True), (*x, False), (x[0], "bfloat16", False)))
    consts, _ = _jax.scan_counts(scan.params)
    assert [v.aval.dtype for v in scan.invars[:consts] if v.aval.shape == x[0]] == ["bfloat16"]


def test_what_is_sent_in_another_dtype_has_no_place():
    def update(m, g):
        return jax.device_put((jax.device_put(m, DEVICE) + g).astype("bfloat16"), HOST)

    x = (64, 256), "float32"
    assert len(scans(in_blocks(update, (*x, True), (*x, False)))) == 1


def test_places_of_elements():
    """A mask of the tail of what rests padded, along a dim that is cut, or is one with others that are."""

    def update(m, g):
        x = jax.device_put(m, DEVICE) + g
        masked = (lax.broadcasted_iota("int32", x.shape, dim) < x.shape[dim] - 3 for dim in range(x.ndim))
        for mask in masked:
            x = lax.select(mask, x, lax.full_like(x, 0))
        return jax.device_put(x, HOST)

    for shape in (24, 16, 128), (3, 13, 256), (100, 256):
        assert scans(in_blocks(update, (shape, "float32", True), (shape, "float32", False)))


def test_a_part_of_an_array_is_cut_out_late():
    """Not before the gradient is there, which may be no number, or infinite: then it is the same part."""

    def update(m, w, g, i):
        return momentum(m, lax.dynamic_slice(w, (i, 0), g.shape), g)

    x = (64, 256), "float32"
    types = (*x, True), ((256, 256), "float32", False), (*x, False), ((), "int32", False)
    for gradient in np.nan, np.inf, -np.inf:
        in_blocks(update, *types, gradient=gradient)
    eqns = in_blocks(update, *types)
    (cut,) = (eqn for eqn in eqns if eqn.primitive.name == "dynamic_slice")
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    assert makers[cut.invars[1]].primitive.name == "add"


@pytest.mark.parametrize(
    "whole, dim, shape, block",
    [
        ((256, 256), 0, (64, 256), (8, 256)),  # along its dim
        ((64, 1024), 1, (64, 256), (8, 1024)),  # along columns, of whole rows
        ((2, 8192, 128), 1, (2, 2048, 128), (2, 8, 128)),  # of all layers
        ((24, 64, 256), 1, (24, 16, 256), (1, 64, 256)),  # or of whole ones, where that would be half of it
        ((24, 64, 256), 1, (24, 8, 256), (1, 64, 256)),  # and where there is but one tile of rows
        ((250, 256), 0, (64, 256), None),  # padded to 256: there is no other dim that could be cut
        ((64, 1021), 1, (64, 256), (8, 1021)),
        ((6, 253, 256), 1, (6, 64, 256), (1, 253, 256)),
    ],
)
def test_the_host_cuts_out_no_part(whole, dim, shape, block):
    """What is read of an array that rests whole at the host, padded or not, each block brings its rows of."""

    def update(m, g, w, i):
        tail = 4 * shape[dim] - whole[dim]
        w = lax.pad(w, jnp.float32(0), [(0, tail * (d == dim), 0) for d in range(len(whole))])
        starts = [(i + 2) * shape[dim] if d == dim else 0 for d in range(len(whole))]
        w = lax.dynamic_slice(w, starts, shape)
        return momentum(m, jax.device_put(w, DEVICE), g)

    array = shape, "float32"
    eqns = in_blocks(update, (*array, True), (*array, False), (whole, "float32", True), ((), "int32", False))
    cuts = [eqn for eqn in eqns if eqn.primitive in (lax.pad_p, lax.dynamic_slice_p)]
    if block is None:
        assert cuts
    else:
        assert not cuts and block in set().union(*map(blocks_of, scans(eqns)))


@pytest.mark.quick
@pytest.mark.parametrize(
    "update, types",
    [
        (lambda m: (jax.device_put(m, DEVICE) ** 2).sum(), [((64, 256), "float32", True)]),
        (lambda m: jax.device_put(m, DEVICE).astype("bfloat16"), [((64, 256), "float32", True)]),
        (momentum, [((4096,), "float32", True), *[((4096,), "float32", False)] * 2]),
        (momentum, [((8, 128), "float32", True), *[((8, 128), "float32", False)] * 2]),
    ],
)
def test_what_stays_whole(update, types):
    """What does not go back, and what cannot be cut: arrays of one dim, and of one tile."""
    mesh = jax.sharding.AbstractMesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in types]
        args = [at_host(x) if host else x for x, (_, _, host) in zip(avals, types, strict=True)]
        eqns = streamed(jax.make_jaxpr(update)(*args)).jaxpr.eqns
    assert eqns and not scans(eqns)


@pytest.mark.quick
def test_tiles():
    shapes = (2048, 8192), (8181, 2043), (2043, 8181), (50257, 96), (24, 3, 1000), (64, 4096, 64), (5,)
    assert [tiled_dims(x) for x in shapes] == [(0, 1), (0, 1), (1, 0), (1, 0), (0, 2), (2, 1), (-1, 0)]


@pytest.mark.quick
def test_segments_are_divided_by_what_reads_all():
    """A norm of the update comes between what makes it and what it scales; the gradient's part is made with
    the first."""

    def update(m, g, w):
        g = 2 * g
        m = 0.9 * m + g
        return m, w - m * jnp.sqrt(jnp.sum(m * m)), jnp.cos(g.T)

    x = jax.ShapeDtypeStruct((4, 4), "float32")
    jaxpr = jax.make_jaxpr(update)(x, x, x).jaxpr
    found = segments(jaxpr.eqns, {jaxpr.invars[0], jaxpr.invars[2]}, jaxpr.outvars)
    assert [[eqn.primitive.name for eqn in s.eqns] for s in found] == [["mul", "add", "mul"], ["mul", "sub"]]
    g = jaxpr.eqns[0].outvars[0]
    assert g in found[0].reads() and g not in found[1].reads()
    assert found[0].depth < found[1].depth


@pytest.mark.quick
def test_what_is_made_of_roots_is_made_where_it_is_read():
    """The decay of a weight belongs to its update, not to the forward pass, which reads the weight too."""

    def step(w, x):
        g = x.T @ (x @ w.astype("bfloat16").astype("float32"))
        return w - 0.1 * (g + 0.01 * w)

    x = jax.ShapeDtypeStruct((4, 4), "float32")
    jaxpr = jax.make_jaxpr(step)(x, x).jaxpr
    found = segments(jaxpr.eqns, {jaxpr.invars[0]}, jaxpr.outvars)
    names = [[eqn.primitive.name for eqn in s.eqns] for s in found]
    assert names == [["convert_element_type"] * 2, ["mul", "add", "mul", "sub"]]


@pytest.mark.quick
def test_order():
    assert topological_order([(0, ["b"], ["a"]), (1, [], ["c"]), (2, ["c"], ["b"])]) == [1, 2, 0]
    x = jax.ShapeDtypeStruct((4,), "float32")
    jaxpr = jax.make_jaxpr(lambda a: (jnp.sin(a), jnp.cos(a)))(x).jaxpr
    assert in_order(jaxpr.eqns, []) == list(jaxpr.eqns)


def test_a_shift_is_no_padding_by_nothing():
    """What is cut off at one end and padded at the other has the shape that it had."""

    def shifted(m, w, g):
        m, w = momentum(m, w, g)
        return m, lax.pad(w, jnp.float32(0), [(1, -1, 0), (0, 0, 0)])

    assert scans(in_blocks(shifted, *[((64, 256), "float32", host) for host in (True, False, False)]))
