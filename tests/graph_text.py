"""Graphs as text, for tests that need no devices: graph in, graph out."""

import jax

from shardax import _jax
from shardax.graph.graph import Graph
from shardax.graph.inline import from_jaxpr
from shardax.rewrites.driver import rewritten


def graph_of(f, *args) -> Graph:
    """The flat program of a function, before any rewrite."""
    return from_jaxpr(_jax.dce(jax.make_jaxpr(f)(*args)))


def after(rewrites, f, *args, shows=()) -> str:
    """What is left of a function after these rewrites, as text."""
    return rewritten(graph_of(f, *args), rewrites).text(*shows)
