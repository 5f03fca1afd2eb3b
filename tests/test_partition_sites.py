"""Sites: a search has one for each thing that it decides, and a body's values are made and read by its ports."""

from collections import Counter

import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardax.partition.sites import Site, Way, sums_left
from shardax.sharding import Layout, Sharding
from tests.choices import chosen, laid_out, layout
from tests.graphs import graph, walk_values

pytestmark = pytest.mark.quick


def product(x, w):
    return jnp.sin(x @ w) + 1.0


def scan(x, w):
    return lax.scan(lambda c, r: (c + jnp.sin(c @ w), c.sum() * r), x, jnp.ones(6))


def loop(x, w):
    return lax.while_loop(lambda c: c.sum() < 3, lambda c: jnp.sin(c @ w), x)


def branch(x, w):
    return lax.cond(x.sum() < 3, lambda x: x @ w, lambda x: jnp.sin(x), x)


PROGRAMS = [product, scan, loop, branch]


def search_of(f):
    return laid_out(graph(f, (10, 16), (16, 16)), (P("x", "z"), P("y")))


@pytest.mark.parametrize("f", PROGRAMS)
def test_one_site_makes_each_value(f):
    search = search_of(f)
    makers = Counter(v for site in search.sites for v in site.makes)
    assert makers == Counter(walk_values(search.completion.graph)) + Counter(
        v for node in search.ports for body in node.bodies for v in body.inputs
    )
    assert all(search.maker[v][0].makes[search.maker[v][1]] is v for v in makers)


@pytest.mark.parametrize("f", PROGRAMS)
def test_a_way_lays_out_all_that_its_site_reads_and_makes(f):
    for site in search_of(f).sites:
        assert site.ways
        for way in site.ways:
            for values, layouts in ((site.reads, way.operands), (site.makes, way.results)):
                pairs = list(zip(values, layouts, strict=True))
                assert all(len(v.shape) == len(found.padded) for v, found in pairs)
                assert all(n >= size for v, x in pairs for n, size in zip(x.padded, v.shape, strict=True))
            assert way.price >= 0 and way.memory >= 0


@pytest.mark.parametrize("f", PROGRAMS)
def test_the_layouts_in_which_a_value_may_be_are_those_of_its_makers_ways(f):
    search = search_of(f)
    for site in search.sites:
        for i, value in enumerate(site.makes):
            assert {way.results[i] for way in site.ways} <= {*search.layouts[value]}


@pytest.mark.parametrize("f", PROGRAMS)
def test_of_each_site_one_of_its_ways_is_chosen(f):
    search = search_of(f)
    with pytest.raises(AttributeError):
        _ = search.sites[0].chosen  # before the search
    chosen(search)
    assert all(site.chosen in site.ways for site in search.sites)


@pytest.mark.parametrize("f", PROGRAMS)
def test_sites_run_as_often_as_the_body_that_they_are_in(f):
    search = search_of(f)
    inside = {v for node in search.ports for body in node.bodies for n in body.nodes for v in n.outputs}
    runs = {site.runs for site in search.sites if inside.intersection(site.makes) and site.reads}
    assert runs == {product: set(), scan: {6.0}, loop: {2.0}, branch: {0.5}}[f]


def test_a_carry_is_one_site_on_both_sides_of_its_body():
    search = search_of(scan)
    ((node, ports),) = search.ports.items()
    (body,), (carry,) = node.bodies, ports.carries
    read, made = {*carry.reads}, {*carry.makes}
    assert body.outputs[0] in read and body.inputs[1] in made and node.outputs[0] in made
    assert len(read) == len(made) == 2 and read.isdisjoint(made)


def test_sites_and_ways_are_themselves_whatever_they_hold():
    """Searches look them up, and two that look alike are two decisions."""
    some = Way((layout(P("x"), (8,)),), ())
    assert some != Way((layout(P("x"), (8,)),), ()) and Site([], [], [some]) != Site([], [], [some])
    assert len({Site([], [], [some]), Site([], [], [some])}) == 2


def test_sums_alone_are_left_pending():
    owed = (("x", "sum"), ("y", "max"), ("z", "sum"))
    assert sums_left(Layout(Sharding(((),)), (8,), owed)) == (("x", "sum"), ("z", "sum"))
    assert sums_left(layout(P("x"), (8,))) == ()
