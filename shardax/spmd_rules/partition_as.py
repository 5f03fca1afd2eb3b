"""`partition_as`: a rule for a whole function, which then runs on shards as it is.

Inside `shard_jit` the call is one equation that carries the function. Completion and partition read its rule
as they read a primitive's, and its local lowering calls the function on shards. Differentiation looks inside:
what is differentiated is the function itself, as plain JAX, its `custom_vjp` included, and the equations of
that are partitioned each by its own rule. So a kernel's forward and backward functions, given to `defvjp`,
may each be under a `partition_as` of their own. vmap keeps the rule, with one factor more.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from shardax import _jax
from shardax.cost.network import Message
from shardax.reshard.run import identity
from shardax.spmd_rules.claims import noting
from shardax.spmd_rules.registry import RULES, Local, Shapes, mask_padding, register_rule
from shardax.spmd_rules.rule import Factors, Rule, bind, parse
from shardax.spmd_rules.sends import all_gather
from shardax.validation import require, require_array, require_function

FlopsOf = Callable[[Shapes, Shapes], float]


@_jax.boundary
def partition_as(
    rule: str, *, flops: FlopsOf | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for a function of pytrees of arrays that may be split as `rule` says. Outside `shard_jit`
    it changes nothing.

    The leaves of the arguments, in order, are the operands of the rule; the leaves of the result are its
    results. Arguments that are not arrays have to be bound before, by a `functools.partial`. The marks are
    those of `register_rule`, with two differences:

    - A factor without a mark that is missing in some result, or in every operand, is unsplit, as if marked
      `!`. So the dim over which a softmax runs needs no mark where the result does not have it.
    - Windowed factors (`h~`) are refused, because the function sees only its own shard.

    A factor without a mark that a result has is a promise: each place along it depends only on the same place
    of the operands. Where its size is uneven, the function sees zeros past the end, and what it makes of them
    is dropped. Along a reduced factor (`k+`) zeros might count (exp(0) is 1), so an uneven dim is gathered
    there, and the first device computes the whole reduction.

    `flops(in_shapes, out_shapes)` gives the FLOPs that the function does on shards of these shapes, those of
    the leaves, in the order of the rule. A kernel needs it: nobody can look into it, so without it the
    planner takes it for one that only moves memory. What has FLOPs is split as far as may be, and they count
    in `Plan.estimate`. Without it, the products in functions of plain JAX count in `Plan.estimate` alone.

    Raises ValueError, which quotes the rule and the offending word: here if it does not parse, at the call if
    it does not fit.

    >>> double = partition_as("... d -> ... d")(lambda x: 2 * x)
    >>> double(jax.numpy.ones((2, 2))).sum()
    Array(8., dtype=float32)
    """
    require(isinstance(rule, str), "rule of partition_as", rule, "text, such as 'b s d! -> b s d!'")
    require_function(
        flops, "flops of partition_as", "a function of the shapes of operands and results", or_none=True
    )
    text = _closed(rule)

    @_jax.boundary
    def decorate(fn):
        require_function(fn, f"what partition_as({rule!r}) is given")

        @functools.wraps(fn)
        @_jax.boundary
        def call(*args, **kwargs):
            types = jax.sharding.get_abstract_mesh().axis_types or ()
            if any(type_ is not AxisType.Auto for type_ in types):  # such axes are not shard_jit's to split
                return fn(*args, **kwargs)
            leaves, structure = jax.tree.flatten((args, kwargs))
            function = _Flat(fn, structure)
            shapes, avals = _trace(function, leaves, text)
            return jax.tree.structure(shapes).unflatten(
                _bind(leaves, fun=function, rule=text, avals=avals, flops=flops)
            )

        return call

    return decorate


partition_as_p = Primitive("partition_as")
partition_as_p.multiple_results = True
"""partition_as *args: the results, of `avals`, of the function `fun` of flat arrays, which may be split as
`rule` says. `flops`: a function of the shapes of operands and results, or None."""


@dataclass(frozen=True)
class _Flat:
    """A function of pytrees as one of their leaves."""

    fn: Callable[..., Any]
    structure: Any

    def __call__(self, *leaves):
        return list(map(jax.numpy.asarray, jax.tree.leaves(self.tree(*leaves))))

    def tree(self, *leaves):
        args, kwargs = self.structure.unflatten(leaves)
        return self.fn(*args, **kwargs)

    def __str__(self):
        return getattr(self.fn, "__name__", "a function")


@dataclass(frozen=True)
class _Mapped:
    """The same function for each place of a new dim: of some of the operands, the first of every result."""

    fun: Any
    dims: tuple[int | None, ...]

    def __call__(self, *leaves):
        return jax.vmap(self.fun, self.dims)(*leaves)

    def __str__(self):
        return str(self.fun)


@dataclass(frozen=True)
class _MappedFlops:
    """The FLOPs of the same function for each place of a new dim, the first of those operands that have it
    and of results.
    """

    flops: FlopsOf
    mapped: tuple[bool, ...]

    def __call__(self, in_shapes: Shapes, out_shapes: Shapes) -> float:
        operands = tuple(shape[has:] for shape, has in zip(in_shapes, self.mapped, strict=True))
        return out_shapes[0][0] * self.flops(operands, tuple(shape[1:] for shape in out_shapes))


def _closed(text: str) -> str:
    """The rule, unmarked factors unsplit that some result or every operand lacks."""
    rule = parse(text)
    for side in (rule.operands, rule.results):
        for factor in (f for tensor in side for f in _factors_of(tensor)):
            if factor.endswith("~"):
                raise _refused(
                    text, factor, "a function sees its own shard alone, so no factor can be windowed"
                )
    types = dict(rule.types)
    on_all_results = set(_all(rule)).intersection(*map(_factors_of, rule.results))
    kept = on_all_results.intersection(f for tensor in rule.operands for f in _factors_of(tensor))
    lacking = {f for f in _all(rule) if f not in types and f not in kept}
    if "..." in lacking:
        raise _refused(
            text, "...", "it must be on every result and on an operand: what it stands for is kept"
        )
    return re.sub(r"([A-Za-z_]\w*)(\+|!|:max|:min)?", lambda m: m[0] + "!" * (m[0] in lacking), text)


def _all(rule: Rule) -> set[str]:
    return {f for tensor in rule.operands + rule.results for f in _factors_of(tensor)}


def _factors_of(tensor) -> list[str]:
    """The factors of a parsed tensor, `...` among them."""
    return [f for dim in tensor for f in (["..."] if dim == "..." else dim)]


def _refused(text: str, word: str, why: str) -> ValueError:
    return ValueError(f"rule {text!r}: at {word!r}: {why}")


def _trace(fun: _Flat, leaves, rule: str) -> tuple[Any, tuple[Any, ...]]:
    """The tree of the function's results, and their avals."""
    what = f"partition_as({rule!r})({fun})"
    for i, leaf in enumerate(leaves):
        require_array(
            leaf, f"operand {i} of {what}", "an array: bind what is none below with functools.partial"
        )
    jaxpr, shapes = jax.make_jaxpr(lambda *xs: _arrays(fun.tree(*xs), what), return_shape=True)(*leaves)
    if any(isinstance(const, Tracer) for const in jaxpr.consts):
        raise ValueError(
            f"{what} closes over a traced value, which would not be split: pass it as an argument, with a "
            "rule"
        )
    if jaxpr.effects:
        raise ValueError(
            f"{what} has side effects, which would happen on every device: move them out of the function"
        )
    bind(parse(rule), tuple(map(jax.numpy.shape, leaves)), tuple(aval.shape for aval in jaxpr.out_avals))
    return shapes, tuple(jaxpr.out_avals)


def _arrays(results, what: str):
    for leaf in jax.tree.leaves(results):
        require_array(leaf, f"a result of {what}")
    return results


def _bind(args, **params) -> list[Any]:
    return partition_as_p.bind(*map(jax.numpy.asarray, args), **params)


def _local(local: Local, *shards):
    """The function on shards, zeros in their tails; along uneven reduced dims on all of them, the first
    device's counts.
    """
    factors, uneven = _uneven(local)
    shards = [_gathered(local, factors, uneven, i, shard) for i, shard in enumerate(shards)]
    with noting(lambda: f"partition_as({local.params['rule']!r})({local.params['fun']})"):
        outs = local.params["fun"](*shards)
    for factor in uneven:
        first = local.index(local.splits[factor].axes) == 0
        outs = [
            lax.select(
                lax.broadcast(first, x.shape), x, lax.full_like(x, identity(factors.type_of(factor), x.dtype))
            )
            for x in outs
        ]
    return outs


def _uneven(local: Local) -> tuple[Factors, list[str]]:
    """The factors, and those that are reduced and split unevenly."""
    factors = RULES[partition_as_p.name].factors(local.node)
    return factors, [
        f for f in factors.reduced if f in local.splits and local.splits[f].padded != factors.sizes[f]
    ]


def _gathered(local: Local, factors: Factors, uneven: list[str], i: int, shard):
    shape, layout = local.node.in_shapes[i], local.operands[i]
    if not jax.numpy.issubdtype(shard.dtype, jax.dtypes.extended):
        kept = [d for d, dim in enumerate(factors.operands[i]) if not set(dim) & set(factors.reduced)]
        shard = mask_padding(shard, layout, shape, 0, local.sizes, kept)
    for d in _gathered_dims(factors, uneven, i):
        shard = all_gather(local, "operand", shard, layout.dims[d], d)
        shard = lax.slice_in_dim(shard, 0, shape[d], axis=d)
    return shard


def _gathered_dims(factors: Factors, uneven: list[str], i: int) -> list[int]:
    return [d for d, dim in enumerate(factors.operands[i]) if set(dim) & set(uneven)]


def _sends(local: Local) -> Iterator[Message]:
    factors, uneven = _uneven(local)
    for i, value in enumerate(local.node.inputs):
        for d in _gathered_dims(factors, uneven, i):
            axes = local.operands[i].dims[d]
            nbytes = math.prod(local.in_shape(i)) * value.itemsize * (local.count(axes) - 1)
            yield Message("all_gather", axes, nbytes)


def _flops(params, in_shapes: Shapes, out_shapes: Shapes) -> float | None:
    return params["flops"] and params["flops"](in_shapes, out_shapes)


def _jvp(primals, tangents, *, fun, **params):
    """Of the function itself, in those arguments that move."""
    has_tangent = [type(t) is not ad.Zero for t in tangents]

    def moving(*xs):
        new = iter(xs)
        return fun(*(next(new) if m else x for m, x in zip(has_tangent, primals, strict=True)))

    outs, out_tangents = jax.jvp(
        moving, tuple(_where(has_tangent, primals)), tuple(_where(has_tangent, tangents))
    )
    return outs, [
        ad.Zero(jax.typeof(x).to_tangent_aval()) if tangent.dtype == jax.dtypes.float0 else tangent
        for x, tangent in zip(outs, out_tangents, strict=True)
    ]


def _transpose(cts, *args, fun, avals, **params):
    linear = [ad.is_undefined_primal(x) for x in args]

    def forward(*xs):
        new = iter(xs)
        return fun(*(next(new) if is_linear else x for is_linear, x in zip(linear, args, strict=True)))

    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in _where(linear, args)]
    cotangents = iter(jax.linear_transpose(forward, *shapes)(list(map(ad.instantiate_zeros, cts))))
    return [next(cotangents) if is_linear else None for is_linear in linear]


def _where(mask, xs) -> list[Any]:
    return [x for keep, x in zip(mask, xs, strict=True) if keep]


def _batch(args, dims, *, fun, rule, avals, flops):
    """The new dim is a kept factor: in front of every result, and of those operands that have it."""
    name = next(n for n in ("mapped" + "_" * i for i in range(len(rule))) if n not in _all(parse(rule)))
    left, _, right = rule.partition("->")
    mapped = [d is not None for d in dims]
    operands = [f"{name} {t}" if m else t for t, m in zip(left.split(","), mapped, strict=True)]
    rule = f"{','.join(operands)}->{','.join(f'{name} {t}' for t in right.split(','))}"
    args = [jax.numpy.moveaxis(x, d, 0) if m else x for x, d, m in zip(args, dims, mapped, strict=True)]
    fun = _Mapped(fun, tuple(0 if m else None for m in mapped))
    avals = tuple(jax.make_jaxpr(fun)(*args).out_avals)
    flops = flops and _MappedFlops(flops, tuple(mapped))
    return _bind(args, fun=fun, rule=rule, avals=avals, flops=flops), [0] * len(avals)


partition_as_p.def_impl(lambda *args, fun, **params: fun(*args))
partition_as_p.def_abstract_eval(lambda *_, avals, **params: list(avals))
ad.primitive_jvps[partition_as_p] = _jvp
ad.primitive_transposes[partition_as_p] = _transpose
batching.primitive_batchers[partition_as_p] = _batch
mlir.register_lowering(
    partition_as_p, mlir.lower_fun(lambda *args, fun, **params: fun(*args), multiple_results=True)
)
register_rule(partition_as_p, lambda node: node.params["rule"], _local, sends=_sends, flops=_flops)
