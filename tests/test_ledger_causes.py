"""The name of a scope tells why a collective in it is there."""

from dataclasses import dataclass

import jax
import pytest
from jax import lax

from shardax.ledger import causes
from shardax.ledger.collectives import why
from tests.graphs import graph, the

pytestmark = pytest.mark.quick


@dataclass(frozen=True, slots=True, eq=False)
class Fact(causes.Cause):
    number: int


def stack_of(f):
    return the("sin", graph(f, (4,))).scope


def test_the_innermost_cause_around_an_equation():
    def f(x):
        with causes.scope("all_gather", "one", Fact(1)), causes.scope("ppermute", "two", Fact(2)):
            with jax.named_scope("layer"):
                return lax.sin(x)

    named = causes.of(stack_of(f))
    assert (str(named), named.reason, named.cause.number) == ("ppermute[two]", "two", 2)


def test_other_scopes_have_none():
    def f(x):
        with jax.named_scope("all_gather[one]"):
            return lax.sin(x)

    assert causes.of(stack_of(f)) is None


def test_the_innermost_scope_that_tells_gives_the_reason():
    def f(x):
        with causes.scope("all_gather", "one", Fact(1)), jax.named_scope("all_gather[two]"):
            with jax.named_scope("layer"):
                return lax.sin(x)

    assert why("all_gather", stack_of(f)) == ("two", None)
    assert why("psum", stack_of(f))[0] == "one"


def test_slashes_part_scopes_so_a_name_has_none():
    named = causes.named("all_gather", "state/w of sin", Fact(1))
    assert "/" not in named and named.reason == "state/w of sin"


def test_derivatives_keep_it():
    def f(x):
        with causes.scope("all_reduce", "why", Fact(3)):
            return lax.cos(x)

    derivative = lambda x: jax.jvp(f, (x,), (x,))[1]  # noqa: E731
    assert causes.of(stack_of(derivative)).cause.number == 3
