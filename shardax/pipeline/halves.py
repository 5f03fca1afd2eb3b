"""A virtual stage as two programs, its forward and its backward pass, and what the one keeps for the other.

Kept is what `jax.vjp` saves, with what `jax.checkpoint` in it says. What a stage has anyway, its pieces of
the parameters and the microbatch, is not kept; what is made of neither, as a mask is, is made again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params

from shardax import _jax
from shardax.graph.evaluate import evaluate
from shardax.pipeline.cut import Stage

Type = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Halves:
    """The two passes of a stage.

    forward(pieces, microbatch, rest, received) -> (results, kept)
    backward(pieces, microbatch, rest, kept, cotangents) -> (of pieces, of what was received): cotangents of
      what is inexact among them. `cotangents` are those of inexact results; of the last stage, that of the
      loss alone.

    Attributes:
      kept: the types.
      alike: equal for stages whose passes are the same programs.
    """

    forward: Callable[..., tuple[list[Any], list[Any]]]
    backward: Callable[..., tuple[list[Any], list[Any]]]
    kept: tuple[Type, ...]
    alike: Any


def is_inexact(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def halves(
    stage: Stage, pieces: Sequence[Type], microbatch: Sequence[Type], rest: Sequence[Type], last: bool
) -> Halves:
    """The two passes, on arguments of these types. Of the last stage the first result is the loss, and the
    others have no cotangents."""
    inputs = [*pieces, *microbatch, *rest, *stage.received]
    ends = [len(pieces), len(pieces) + len(microbatch), len(inputs) - len(stage.received)]
    movable = [i for i, x in enumerate(inputs) if (i < ends[0] or i >= ends[2]) and is_inexact(x)]
    differentiable = [i for i, x in enumerate(stage.sent) if is_inexact(x)][: 1 if last else None]
    trees: list[Any] = []

    def run(*values):
        def of_movable(*moved):
            full = list(values)
            for i, x in zip(movable, moved, strict=True):
                full[i] = x
            results = stage.program(
                full[: ends[0]], full[ends[0] : ends[1]], full[ends[1] : ends[2]], full[ends[2] :]
            )
            others = [x for i, x in enumerate(results) if i not in differentiable]
            return [results[i] for i in differentiable], others

        outs, pull, others = jax.vjp(of_movable, *(values[i] for i in movable), has_aux=True)
        saved, tree = jax.tree.flatten(pull)
        trees.append(tree)
        of_results, of_others = dict(zip(differentiable, outs, strict=True)), iter(others)
        results = [of_results[i] if i in of_results else next(of_others) for i in range(len(stage.sent))]
        return [*results, *saved]

    closed = _jax.dce(jax.make_jaxpr(run)(*inputs))
    tree, count = trees[-1], len(stage.sent)
    saved = closed.jaxpr.outvars[count:]
    invars = closed.jaxpr.invars
    again = _made_again(closed.jaxpr, saved, {*invars[ends[0] : ends[1]], *invars[ends[2] :]})
    anew, anew_reads = _jax.prune(closed, (False,) * count + tuple(_is_in(v, again) for v in saved))
    place = {v: i for i, v in enumerate(invars[: ends[2]])}
    kept = list(dict.fromkeys(v for v in saved if not (isinstance(v, Literal) or v in place or v in again)))
    first = {v: count + i for i, v in reversed(list(enumerate(saved))) if _is_in(v, {*kept})}

    kept_types = tuple(Type(v.aval.shape, v.aval.dtype) for v in kept)

    def forward(pieces, microbatch, rest, received):
        made = evaluate(closed, [*pieces, *microbatch, *rest, *received])
        return made[:count], [made[first[v]] for v in kept]

    def pulled(*args):
        here, held, cotangents = args[: ends[2]], args[ends[2] :][: len(kept)], args[ends[2] + len(kept) :]
        env: dict[Any, Any] = dict(zip(kept, held, strict=True))
        env.update((v, here[i]) for v, i in place.items())
        made = (
            evaluate(anew, [x for x, reads in zip(here, anew_reads, strict=False) if reads]) if again else []
        )
        env.update(zip((v for v in saved if _is_in(v, again)), made, strict=True))
        leaves = [v.val if isinstance(v, Literal) else env[v] for v in saved]
        return jax.tree.unflatten(tree, leaves)(list(cotangents))

    cotangents = [stage.sent[i] for i in differentiable]
    whole = _jax.dce(jax.make_jaxpr(pulled)(*inputs[: ends[2]], *kept_types, *cotangents))
    of_pieces = sum(i < ends[0] for i in movable)

    def backward(pieces, microbatch, rest, held, cotangents):
        made = evaluate(whole, [*pieces, *microbatch, *rest, *held, *cotangents])
        return made[:of_pieces], made[of_pieces:]

    return Halves(forward, backward, kept_types, (*_identity(closed), *_identity(whole), len(pieces)))


def forward_half(
    stage: Stage, pieces: Sequence[Type], microbatch: Sequence[Type], rest: Sequence[Type]
) -> Halves:
    """The forward pass alone, which keeps nothing."""
    inputs = [*pieces, *microbatch, *rest, *stage.received]
    ends = [len(pieces), len(pieces) + len(microbatch), len(inputs) - len(stage.received)]

    def run(*args):
        return stage.program(
            args[: ends[0]], args[ends[0] : ends[1]], args[ends[1] : ends[2]], args[ends[2] :]
        )

    closed = _jax.dce(jax.make_jaxpr(run)(*inputs))

    def forward(pieces, microbatch, rest, received):
        return evaluate(closed, [*pieces, *microbatch, *rest, *received]), []

    def backward(*_):
        raise AssertionError("a schedule without backward passes runs none")

    return Halves(forward, backward, (), (*_identity(closed), len(pieces)))


def _identity(closed) -> tuple[Any, ...]:
    """Equal for programs that are the same, text and constants."""
    return str(closed.jaxpr), tuple(map(id, closed.consts))


_RANDOM = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "random_gamma"})


def _made_again(jaxpr, saved: Sequence[Any], of_batch: set[Any]) -> set[Any]:
    """The saved variables that depend on neither the microbatch nor what was received, without a generator of
    random bits among what they are made of."""
    stays: set[Any] = set(of_batch)
    for eqn in jaxpr.eqns:
        names = {eqn.primitive.name, *_names_inside(eqn)}
        if names & _RANDOM or any(not isinstance(v, Literal) and v in stays for v in eqn.invars):
            stays.update(eqn.outvars)
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    return {v for v in saved if not isinstance(v, Literal) and v not in stays and v not in inputs}


def _is_in(atom, variables: set[Any]) -> bool:
    return not isinstance(atom, Literal) and atom in variables


def _names_inside(eqn):
    for body in jaxprs_in_params(eqn.params):
        for inner in body.eqns:
            yield inner.primitive.name
            yield from _names_inside(inner)
