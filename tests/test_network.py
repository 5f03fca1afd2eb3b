"""Prices: what they are made of, that more to send never costs less, and which links the places of devices
mean.
"""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

import shardax as sx
from shardax.cost import chips
from shardax.cost.network import Line, Network, Way, assumed, network_of, network_of_mesh, reaches_far
from shardax.reshard import paths
from shardax.sharding import Layout, Sharding

pytestmark = pytest.mark.quick

KINDS = ("all_gather", "all_reduce", "all_to_all", "ppermute", "reduce_scatter")
SIZES = {"x": 16, "y": 2, "z": 8}
COPIED = 5 * 2 * 0.1 / 0.819  # microseconds to read and write 100,000 bytes five times on v5e
EVERY = (chips.NOMINAL, *chips.CHIPS.values())


def test_nominal_prices():
    """A nominal collective is 128 bytes and what it sends, at 20 ps each, whatever its kind and its axes; an
    all_to_all also a copy of that, read and written at 1 ps each."""
    network = network_of(SIZES)
    for kind in KINDS:
        prices = {network.collective(kind, axes, 1000) for axes in (("x",), ("y", "z"))}
        assert prices == {20 * 1128.0 + 2 * 1000 * (kind == "all_to_all")}
    assert network.compute(0, 1000) == 1000.0 and network.compute(4000, 1) == 20.0
    assert network_of(network) is network


@pytest.mark.parametrize(
    "kind, axes, nbytes, microseconds",
    [
        ("all_gather", ("x",), 0, 8),  # half way around a ring of 16
        ("all_gather", ("x",), 100_000, 8 + 1),
        ("reduce_scatter", ("x", "z"), 100_000, 8 + 4 + 1),
        ("all_reduce", ("x",), 200_000, 2 * 8 + 2),
        ("all_to_all", ("y",), 100_000, 1 + 1 + COPIED),
        ("all_to_all", ("x",), 100_000, 8 + 4 + COPIED),  # four links on average
        ("ppermute", ("x",), 100_000, 1 + 1),
        ("ppermute far", ("x",), 100_000, 8 + 4),  # as far as an all_to_all, and nothing is rearranged
        ("ppermute far", ("x", "y"), 100_000, 8 + 1 + 4),
    ],
)
def test_prices_on_a_torus(kind, axes, nbytes, microseconds):
    """To start any collective takes a tenth of a hop more."""
    price = Network(SIZES, chips.V5E).collective(kind.split()[0], axes, nbytes, far=kind.endswith("far"))
    assert price == round((0.1 + microseconds) * 1e6)


def test_to_neighbours_or_further():
    ring = [(i, (i + 1) % 8) for i in range(8)]
    assert not reaches_far(ring, (8,)) and not reaches_far(ring, (2, 4)) and not reaches_far([], ())
    assert reaches_far([(i, 7 - i) for i in range(8)], (8,))
    swapped = [(4 * i + j, 4 * j + i) for i in range(4) for j in range(4)]
    assert reaches_far(swapped, (4, 4)) and not reaches_far(swapped, (16 // 8, 2, 2, 2))


def test_short_reduce_scatter():
    network, axes = Network(SIZES, chips.V5E), ("x",)
    assert network.collective("reduce_scatter", axes, 1000, minor=129) == network.collective(
        "reduce_scatter", axes, 1000
    )
    assert network.collective("reduce_scatter", axes, 1000, minor=128) == network.collective(
        "all_reduce", axes, 2000
    )
    assert Network(SIZES, chips.H200).collective("reduce_scatter", axes, 1000, minor=1) == 15e6 + 20000


def test_few_images():
    """Of convolutions: TPUs compute eight images at once, pad the last ones, and cut fewer than eight."""
    v4, v3, nominal = (Network(SIZES, chip) for chip in (chips.V4, chips.V3, chips.NOMINAL))
    assert [v4.batched(100.0, n) for n in (None, 1, 7, 8, 12, 16)] == [100, 350, 350, 100, 134, 100]
    assert [v3.batched(100.0, n) for n in (4, 8)] == [150, 100]
    assert [nominal.batched(100.0, n) for n in (None, 1, 8)] == [100] * 3


def test_narrow_all_gather():
    """Pieces that do not fill the lanes are copied: so many bytes again, through HBM, as two and a half copies
    read and write.
    """
    network, axes, nbytes = Network(SIZES, chips.V5E), ("x",), 10**6
    wide = network.collective("all_gather", axes, nbytes)
    assert network.collective("all_gather", axes, nbytes, minor=128) == wide
    copied = network.collective("all_gather", axes, nbytes, minor=127) - wide
    assert copied == pytest.approx(1e12 * 2.4 * 2 * nbytes / 819e9, abs=1)
    gpus = Network(SIZES, chips.H200)
    assert gpus.collective("all_gather", axes, nbytes, minor=1) == gpus.collective("all_gather", axes, nbytes)


@pytest.mark.parametrize("chip", EVERY, ids=lambda chip: chip.name)
def test_more_is_never_cheaper(chip):
    """More bytes, and longer axes: of the same bytes from each device, not more hosts, each with its cards."""
    rng, network = random.Random(0), Network(SIZES, chip)
    for kind, k in itertools.product(KINDS, (1, 2)):
        for axes in itertools.combinations(SIZES, k):
            nbytes = rng.randrange(10**6)
            price = network.collective(kind, axes, nbytes)
            assert price == int(price) >= network.least(tuple(SIZES), nbytes)
            assert price <= network.collective(kind, axes, nbytes + rng.randrange(10**6))
            longer = Network({a: n * (2 if a in axes else 1) for a, n in SIZES.items()}, chip)
            assert price <= longer.collective(kind, axes, nbytes)
            if not chip.host:
                more = {network.collective(kind, (*axes, more), nbytes) for more in SIZES if more not in axes}
                assert price <= min(more)


def test_networks_are_keys():
    same, other = Network(SIZES, chips.V5E), Network(SIZES, chips.V6E)
    assert (
        Network(SIZES, chips.V5E) == same and hash(Network(SIZES, chips.V5E)) == hash(same) and same == SIZES
    )
    assert same != other and same != Network(dict(reversed(SIZES.items())), chips.V5E)
    assert same != Network(SIZES, chips.V5E, assumed(SIZES, chips.V5E, [("y", "z")]))
    assert tuple(same) == ("x", "y", "z") and str(same) == "Network({'x': 16, 'y': 2, 'z': 8}, v5e)"


def test_assumed_hosts():
    """Eight H200 of a host follow one another in mesh order: z is within a host, y and x have one on each."""
    network = Network({"x": 4, "y": 2, "z": 8}, chips.H200)
    assert [network.line([axis]).rate for axis in network] == [50e9, 50e9, 450e9]
    assert Network({"x": 16}, chips.H200).line(["x"]).rate == 400e9  # each of the eight has its card
    assert network.line(["y", "z"]).rate == 400e9  # and so where these sixteen are two axes


# Where the devices are


def device(kind, coords=None, **places):
    return SimpleNamespace(
        device_kind=kind, platform="tpu" if "TPU" in kind else "gpu", coords=coords, **places
    )


def mesh_of(devices, names):
    """A mesh whose devices JAX does not know."""
    mesh = object.__new__(FakeMesh)
    mesh.__dict__.update(devices=devices, names=names)
    return mesh


class FakeMesh(Mesh):
    """Has places alone."""

    def __new__(cls):
        return object.__new__(cls)

    @property
    def shape(self):
        return dict(zip(self.__dict__["names"], self.__dict__["devices"].shape, strict=True))


def torus(kind, extents, **places):
    devices = [device(kind, coords, **places) for coords in itertools.product(*map(range, extents))]
    return np.array(devices, object).reshape(extents)


def lines_of(network):
    return {axis: network.line([axis]) for axis in network}


def test_places_on_a_torus():
    """A whole ring of 16 sends both ways; a line of 8 one way; and every second device of a ring shares its
    links.
    """
    network = network_of_mesh(mesh_of(torus("TPU v5 lite", (16, 8)), ("x", "y")))
    assert network.chip is chips.V5E
    assert lines_of(network) == {"x": Line(100e9, 8e-6, 4.0), "y": Line(50e9, 7e-6, 2.0)}
    network = network_of_mesh(
        mesh_of(torus("TPU v5 lite", (16, 8)), ("x", "y")), chips.V5E, {"a": 8, "b": 2, "y": 8}
    )
    parts = {"a": Line(50e9, 8e-6, 2.0), "b": Line(50e9, 1e-6), "y": Line(50e9, 7e-6, 2.0)}
    assert lines_of(network) == parts


CUTS = [
    {"x.0": 4, "x.1": 4, "y": 8},
    {"x.0": 2, "x.1": 2, "x.2": 4, "y.0": 4, "y.1": 2},
    {"x.0": 8, "x.1": 2, "y.0": 2, "y.1": 4},
]


@pytest.mark.parametrize("sizes", CUTS, ids=lambda sizes: "x".join(map(str, sizes.values())))
@pytest.mark.parametrize("kind", ["TPU v3", "TPU v4", "TPU v5 lite", "NVIDIA H200", "nothing known"])
def test_a_cut_axis_costs_what_it_did(kind, sizes):
    """Whatever is sent over all of it, and over others beside it; whether the places of devices are known, or
    assumed of a chip."""
    devices = torus(kind, (16, 8)) if "TPU" in kind else hosts_of(8, (16, 8))
    mesh = mesh_of(devices, ("x", "y")) if kind != "nothing known" else AbstractMesh((16, 8), ("x", "y"))
    for chip in (None, chips.V5P, chips.H100):
        whole, cut = network_of_mesh(mesh, chip), network_of_mesh(mesh, chip, sizes)
        parts = {a: tuple(p for p in sizes if p[0] == a) for a in "xy"}
        for axes, one, nbytes in itertools.product((("x",), ("y",), ("x", "y")), KINDS, (0, 10**6)):
            each = tuple(p for a in axes for p in parts[a])
            now, before = cut.collective(one, each, nbytes), whole.collective(one, axes, nbytes)
            assert now <= before * (1 + 1e-9), f"{one} over {axes} of {chip}"
            if nbytes:  # hops may be fewer, one part after the other
                assert cut.line(each).rate == whole.line(axes).rate


def hosts_of(count, shape):
    devices = [device("NVIDIA H200", process_index=i // count) for i in range(np.prod(shape))]
    return np.array(devices, object).reshape(shape)


def test_axes_that_stand_for_each_other():
    """Whatever others they come with: the halves of two rings are alike, but not with the other half of
    another.
    """
    assert Network({"x": 4, "y": 4, "z": 2}, chips.V5P).alike == {"x": ("x", "y"), "y": ("x", "y")}
    parts = {"x.0": 8, "x.1": 4, "y.0": 8, "y.1": 4}
    assert not Network(parts, chips.V5P, assumed(parts, chips.V5P, [("x.0", "x.1"), ("y.0", "y.1")])).alike
    assert set(Network(parts, chips.NOMINAL).alike) == set(parts)


def test_an_axis_along_two_dims():
    network = network_of_mesh(mesh_of(torus("TPU v4", (4, 8)).reshape(32), ("x",)))
    assert network.line(["x"]) == Line(90e9, 6e-6, 2.0)
    cores = [device("TPU v3", (16 * i, 2 * j)) for i in range(2) for j in range(16)]
    others = [device("TPU v3", (i, j)) for i, j in itertools.product(range(32), range(32))]
    mesh = np.array([cores, others[:32], others[-32:]], object)
    line = network_of_mesh(mesh_of(mesh, ("y", "x"))).line(["x"])
    far, near = Line(164e9 / 16, 16e-6, 1.0), Line(164e9 / 2, 16e-6, 4.0)
    # 1/32 of what is gathered comes from the other side of the torus first, the rest along the nearer ring.
    assert 31 / line.rate == pytest.approx(1 / far.rate + 30 / near.rate)
    assert line.latency == far.latency + near.latency
    assert line.detour / line.rate == pytest.approx(1 / far.rate)


def test_slices_and_cores():
    slices = np.stack([torus("TPU v5p", (4, 4), slice_index=i) for i in range(2)])
    network = network_of_mesh(mesh_of(slices, ("slice", "x", "y")))
    assert [line.rate for line in lines_of(network).values()] == [6.25e9, 180e9, 180e9]
    cores = np.array([device("TPU v3", (0, 0), core_on_chip=i) for i in range(2)], object)
    assert network_of_mesh(mesh_of(cores, ("core",))).line(["core"]) == Line(164e9, 1e-6)


def test_hosts():
    gpus = np.array([device("NVIDIA H200", process_index=i // 8) for i in range(16)], object)
    network = network_of_mesh(mesh_of(gpus.reshape(2, 8), ("x", "y")))
    assert lines_of(network) == {"x": Line(50e9, 1e-6), "y": Line(450e9, 7e-6)}


@pytest.mark.parametrize("kind, chip", [("NVIDIA H100 80GB HBM3", chips.H100), ("NVIDIA X", chips.GPU)])
def test_gpus_have_no_tiles_whatever_the_prices(kind, chip):
    mesh = mesh_of(np.array([device(kind, process_index=0) for _ in range(4)], object), ("x",))
    assert network_of_mesh(mesh).chip == chip
    assert not network_of_mesh(mesh).tiles and not network_of_mesh(mesh, chips.NOMINAL).tiles
    assert network_of_mesh(None, chips.NOMINAL).tiles


@pytest.mark.not_quick
def test_other_chips_and_no_devices():
    """CPUs are nobody's chip; a chip that the devices are not is assumed, as on an abstract mesh."""
    cpus, abstract = (
        jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2),
        AbstractMesh((4, 2), ("x", "y")),
    )
    for mesh in (cpus, abstract):
        assert network_of_mesh(mesh) == Network({"x": 4, "y": 2})
        assert network_of_mesh(mesh, chips.V5P) == Network({"x": 4, "y": 2}, chips.V5P)


# What follows


def test_a_slow_axis_is_gathered_while_little_is_there():
    """Of two axes that are gathered from two dims, the one between hosts comes first, where all cards of a
    host together are slower than its links.
    """
    network = Network({"host": 2, "gpu": 8}, replace(chips.H200, network_rate=5e9))
    src = Layout(Sharding((("gpu",), ("host",))), (1 << 12, 1 << 12))
    path = paths.plan(src, Layout(Sharding(((), ())), (1 << 12, 1 << 12)), (1 << 12, 1 << 12), 4, network)
    assert [step.axes for step in path.steps] == [("host",), ("gpu",)]


def test_a_short_dim_is_not_scattered():
    """What the TPU compiler makes of a reduce-scatter to 128 lanes costs more than one along another dim and
    an all_to_all.
    """
    shape, network = (1 << 14, 1 << 13), Network({"x": 64}, replace(chips.V3, latency=0.0))
    pending = Layout(Sharding(((), ())), shape, (("x", "sum"),))
    path = paths.plan(pending, Layout(Sharding(((), ("x",))), shape), shape, 2, network)
    assert [(step.kind, step.to) for step in path.steps] == [("reduce_scatter", 0), ("all_to_all", 1)]


def test_options():
    """The chip goes all the way: what is built carries its prices, and the plan's estimate has the same."""
    mesh = AbstractMesh((4, 2), ("x", "y"))
    spec = PartitionSpec("x")
    for chip, wanted in (
        (None, chips.NOMINAL),
        ("v5p", chips.V5P),
        (chips.V3, chips.V3),
        ("devices", chips.NOMINAL),
    ):
        step = sx.shard_jit(lambda v: v.sum(0), mesh=mesh, in_shardings=spec, options=sx.Options(chip=chip))
        plan = step.plan(jax.ShapeDtypeStruct((64, 64), "float32"))
        assert plan.refinement.sizes == Network({"x": 4, "y": 2}, wanted)
        (sum_,) = plan.collectives
        price = plan.refinement.sizes.collective(sum_.kind, sum_.axes, sum_.nbytes)
        assert plan.estimate(wanted).links == pytest.approx(price / 1e12)


@pytest.mark.parametrize("chip", ["v7", "nominal", 5, ("v3",)])
def test_options_refuse(chip):
    with pytest.raises(
        ValueError, match=r'must be one of "v3", "v4", .*, "devices", a shardax.cost.chips.Chip, or None'
    ):
        sx.Options(chip=chip)


@pytest.mark.parametrize("chip", EVERY, ids=lambda chip: chip.name)
def test_many_collectives_cost_what_each_does(chip):
    network, rng = Network({"x": 4, "y": 2, "z": 3}, chip), np.random.RandomState(0)
    axes = [("x",), ("y", "z"), ("x", "y", "z")]
    ways = tuple(Way(*each) for each in itertools.product(KINDS, axes, (False, True)))
    way, nbytes = rng.randint(len(ways), size=400), rng.randint(1 << 40, size=400)
    minor = rng.choice([-1, 16, 127, 128, 129, 4096], size=400)
    each = zip([ways[w] for w in way], nbytes.tolist(), minor.tolist(), strict=True)
    wanted = [
        network.collective(kind, axes, n, None if m < 0 else m, far) for (kind, axes, far), n, m in each
    ]
    assert network.collectives(ways, way, nbytes, minor).tolist() == wanted


def test_to_owe_costs_the_writing_and_the_reading_of_the_shard():
    network, way = Network({"x": 4}, chips.V3), np.array([0, 0])
    prices = network.collectives((Way("owe", ("x",)),), way, np.array([1000, 1 << 30]), np.array([-1, -1]))
    assert prices.tolist() == [network.compute(0, 2000), network.compute(0, 2 << 30)]
