"""Graphs as text, for tests that need no devices: graph in, graph out."""

import string
from textwrap import indent

import jax
import numpy as np

from shardax import _jax
from shardax.graph.graph import Graph, Value
from shardax.graph.inline import from_jaxpr
from shardax.rewrites.driver import rewritten


def graph_of(f, *args) -> Graph:
    """The flat program of a function, before any rewrite."""
    return from_jaxpr(_jax.dce(jax.make_jaxpr(f)(*args)))


def after(rewrites, f, *args, shows=()) -> str:
    """What is left of a function after these rewrites, as text."""
    return text(rewritten(graph_of(f, *args), rewrites), *shows)


def text(graph: Graph, *shows: str) -> str:
    """The nodes of a graph and its bodies, with the parameters that are named.

    >>> print(text(graph_of(lambda x: -x[1:], np.zeros(3)), "start_indices"))
    (a:f32[3])
    b:f32[2] = slice[start_indices=(1,)] a
    c:f32[2] = neg b
    -> c
    """
    return _text(graph, shows, {})


def _text(graph: Graph, shows: tuple[str, ...], names: dict[Value, str]) -> str:
    lines = ["(" + " ".join(_typed(v, names) for v in graph.inputs) + ")"]
    for node in graph.nodes:
        params = " ".join(f"{name}={node.params[name]}" for name in shows if name in node.params)
        operands = " ".join(_named(v, names) for v in node.inputs)
        results = " ".join(_typed(v, names) for v in node.outputs)
        lines.append(f"{results} = {node.name}{params and f'[{params}]'} {operands}".rstrip())
        lines += [indent(_text(body, shows, names), "    ") for body in node.bodies]
    return "\n".join([*lines, "-> " + " ".join(_named(v, names) for v in graph.outputs)])


def _typed(value: Value, names: dict[Value, str]) -> str:
    return f"{_named(value, names)}:{value.aval.str_short(short_dtypes=True)}"


def _named(value: Value, names: dict[Value, str]) -> str:
    if value.is_literal:
        return str(np.asarray(value.literal).tolist()).replace(" ", "")
    if value not in names:
        letters = string.ascii_lowercase
        i = len(names)
        names[value] = (letters[i // 26 - 1] if i >= 26 else "") + letters[i % 26]
    return names[value]
