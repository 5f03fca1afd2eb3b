"""Inside: annotations on gradients, where they are made, and on parameters in the compute dtype, until they are used.

Prices alone would decide for what sends least. ZeRO also means to keep less, and so says where:

    gradient        of layers in a loop: each layer's is scattered as it is made, in the loop's own results;
                    of microbatches: what accumulates them is scattered
    parameter       cast for the layers: split until a layer reads it;
                    saved for the backward pass: split, and gathered there again
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax import lax

from shardax import _jax
from shardax.annotations.annotate import annotate_p, bind_annotation
from shardax.graph.equations import equations_like
from shardax.sharding import Sharding

Known = Sequence[Sharding | None]
"""For each of some variables: how a parameter, or a copy of it in another dtype, rests. None for anything else."""


@dataclass(frozen=True)
class Inside:
    """What is annotated in a program.

    gradients: by their shapes, those that are scattered.
    accumulators: the loops, by the `id` of their equations, and the carries there that accumulate gradients.
    again: whether parameters are gathered again for the backward pass.
    """

    gradients: Mapping[tuple[int, ...], Sharding] = field(default_factory=dict)
    accumulators: Mapping[int, Sequence[int]] = field(default_factory=dict)
    again: bool = True
    words: str = ""
    scope: str = ""
    in_loop: bool = False

    def __call__(self, jaxpr, known: Known) -> tuple[Any, Known]:
        """The annotated jaxpr, closed or open, and what is known of its results; `known` of its arguments."""
        opened = _jax.closed(jaxpr).jaxpr
        env = {v: s for v, s in zip(opened.invars, known, strict=True) if s is not None}
        eqns = [new for eqn in opened.eqns for new in self._changed(eqn, env)]
        found = [None if _jax.is_literal(v) else env.get(v) for v in opened.outvars]
        return _jax.replaced_eqns(jaxpr, eqns), found

    def _changed(self, eqn, env: dict[Any, Sharding]) -> Iterator[Any]:
        known = [None if _jax.is_literal(v) else env.get(v) for v in eqn.invars]
        name, inner = eqn.primitive.name, replace(self, scope=f"{self.scope}/{eqn.source_info.name_stack}")
        if name in ("jit", "pjit"):
            eqn, found = inner._into(eqn, known, inner)
            env.update((v, s) for v, s in zip(eqn.outvars, found, strict=True) if s is not None)
            yield eqn
        elif name == "scan":
            yield inner._scan(eqn, known, env)
        elif name == "annotate" and known[0] is not None:
            env[eqn.outvars[0]] = known[0]
            yield eqn
        elif name == "convert_element_type" and known[0] is not None:
            env[eqn.outvars[0]] = known[0]
            yield from self._annotated(eqn, [known[0]])
        elif inner._gathers_again(known):
            yield from inner._again(eqn, known)
        else:
            yield eqn

    def _into(self, eqn, known: Known, how: Callable[..., Any]) -> tuple[Any, Known]:
        """An equation that calls one jaxpr."""
        found: list[Known] = []

        def change(jaxpr):
            new, results = how(jaxpr, known)
            found.append(results)
            return new

        return _jax.with_bodies(eqn, change), found[-1]

    def _scan(self, eqn, known: Known, env: dict[Any, Sharding]):
        """What is known of what is scanned over is known of its rows; and of results that are rows."""
        consts, carries = _jax.scan_counts(eqn.params)
        rows = [s and _row(s) for s in known[consts + carries :]]
        inside = [*known[:consts], *[None] * carries, *rows]

        def how(jaxpr, known):
            new, found = replace(self, in_loop=True)(jaxpr, known)
            wanted = self._results(eqn, carries, found)
            found = [*[None] * carries, *(s and Sharding(((), *s.dims)) for s in found[carries:])]
            return _with_results(new, wanted, self.words), found

        new, found = self._into(eqn, inside, how)
        env.update((v, s) for v, s in zip(eqn.outvars, found, strict=True) if s is not None)
        return new

    def _results(self, eqn, carries: int, found: Known) -> Known:
        """How the results of a loop's body are annotated."""
        accumulated = self.accumulators.get(id(eqn), ())
        wanted = [self.gradients.get(v.aval.shape) if k in accumulated else None for k, v in enumerate(eqn.outvars[:carries])]
        for v, saved in zip(eqn.outvars[carries:], found[carries:], strict=True):
            made = self.gradients.get(v.aval.shape) if "transpose(" in self.scope else None
            wanted.append(made and _row(made) or (saved if self.again else None))
        return wanted

    def _gathers_again(self, known: Known) -> bool:
        return self.again and not self.in_loop and "transpose(" in self.scope and any(known)

    def _again(self, eqn, known: Known) -> list[Any]:
        """The equation of copies of its parameters that are not there before its other operands are."""

        def behind(*operands):
            operands = lax.optimization_barrier(operands)
            return [
                x if s is None else bind_annotation(x, s.dims, self.words, "inside")
                for x, s in zip(operands, known, strict=True)
            ]

        new, operands = equations_like(eqn, behind, eqn.invars)
        return [*new, eqn.replace(invars=operands)]

    def _annotated(self, eqn, shardings: Known) -> list[Any]:
        """The equation, its results annotated."""
        made = [_jax.new_variable(v.aval) for v in eqn.outvars]
        return [eqn.replace(outvars=made), *_annotations(eqn, made, eqn.outvars, shardings, self.words)]


def _row(sharding: Sharding) -> Sharding | None:
    """Of what a loop goes over; None where that is split."""
    return None if sharding.dims[0] else Sharding(sharding.dims[1:])


def _with_results(jaxpr, wanted: Known, words: str):
    """The body of a loop, some of its results annotated."""
    opened = _jax.closed(jaxpr).jaxpr
    outvars, eqns = list(opened.outvars), list(opened.eqns)
    for k, sharding in enumerate(wanted):
        if sharding is not None and sharding.axes and not _jax.is_literal(outvars[k]):
            maker = next((e for e in reversed(eqns) if outvars[k] in e.outvars), None)
            if maker is not None:
                new, (outvars[k],) = equations_like(
                    maker, lambda x, s=sharding: [bind_annotation(x, s.dims, words, "inside")], [outvars[k]]
                )
                eqns += new
    return _jax.with_eqns_and_results(jaxpr, eqns, outvars)


def _annotations(like, operands, results, shardings: Known, words: str) -> Iterator[Any]:
    for x, result, sharding in zip(operands, results, shardings, strict=True):
        new, _ = equations_like(like, lambda x, s=sharding: [bind_annotation(x, s.dims, words, "inside")], [x])
        assert new[-1].primitive is annotate_p
        yield new[-1].replace(outvars=[result])
