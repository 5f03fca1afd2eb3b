"""The shard_jit primitive. It carries the global jaxpr: JAX's transformations change that, and its lowering
partitions it.

So the derivative, or the batched form, of a global program is a global program again. Its shardings are
recorded inside it as `annotate` equations, so no rule here has to keep track of them. Every derived jaxpr is
memoized on the one that it comes from, so that nothing compiles twice.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, reshard

from shardax import _jax, program
from shardax.annotations.annotate import annotate_p, describe, renumbered
from shardax.annotations.explicit import auto_mesh, explicit_mesh, explicit_sharding, memory_of
from shardax.annotations.user_mesh import UserMesh, user_mesh
from shardax.graph.equations import map_equations
from shardax.meshes import sites
from shardax.meshes.crossing import Crossing
from shardax.meshes.refinement import Placement, refinement
from shardax.options import Options
from shardax.passes.table import lowered
from shardax.sharding import Owing, Sharding, at_rest, from_spec
from shardax.trace import abstract_mesh, is_explicit
from shardax.transform import residuals
from shardax.transform.processes import check_agreement
from shardax.validation import require_sizes

shard_jit_p = Primitive("shard_jit")
shard_jit_p.multiple_results = True
"""shard_jit *args: the results of the closed global jaxpr `jaxpr`, computed by the devices of `mesh`, a mesh
of Auto axes.

`witness` is a jaxpr over the same devices: `jax.jit` finds those of a program by looking for such in its
parameters. It is the first parameter, because `jax.jit` names results on the first mesh that it finds, and
this one has a spec for all. An abstract mesh has no devices: of one that is in context it is the mesh itself,
of one that the user gave None. With the first a program may turn out to run on one device (see `_lower`).
"""


def bind(args, jaxpr, mesh: Mesh | AbstractMesh, options: Options, of_context: bool = False) -> list[Any]:
    """The results of a global jaxpr on `args`, as one equation; one operation after the other where no jit is
    around. `of_context`: the mesh was not given, but is that of the context.
    """
    if _jax.is_eager(args):
        return _evaluated(jaxpr, args)
    auto = auto_mesh(mesh)
    for eqn in _jax.ordered_effects(jaxpr) if auto.size > 1 else ():
        raise ValueError(
            f"{eqn.primitive.name} at {_jax.user_line(eqn.source_info)} is ordered, and several devices "
            "have no common order: give it ordered=False (it is called once all the same), or run it "
            "outside of shard_jit"
        )
    refined = sites.refined_mesh(
        auto, refinement([sites.program_mesh(auto), *sites.others(jaxpr, auto)]), concrete=True
    )
    named = (
        mesh if auto_mesh(refined) == auto else refined
    )  # a gradient has no type that names the user's Explicit mesh
    witness = _witness(named) if isinstance(named, Mesh) or of_context or is_explicit(named) else None
    return shard_jit_p.bind(*args, witness=witness, jaxpr=jaxpr, mesh=auto, options=options)


def build(
    jaxpr, in_shardings: tuple[Sharding | Placement | None, ...], mesh: Mesh | AbstractMesh, options: Options
) -> program.Program:
    """The program of an equation of the primitive; see `shardax.program.build`, which memoizes it."""
    for i, aval in enumerate(jaxpr.in_avals):
        require_sizes(aval.shape, f"argument {i} of a shard_jit inside")
    auto, placed = auto_mesh(mesh), tuple(x.placed if isinstance(x, Sharding) else x for x in in_shardings)
    with _jax.without_mapped_axes(), jax.sharding.use_abstract_mesh(abstract_mesh(auto)):
        return program.build(jaxpr, placed, auto, options)


@functools.lru_cache
def _witness(mesh: Mesh | AbstractMesh):
    if isinstance(mesh, AbstractMesh):
        return mesh
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.make_jaxpr(jax.jit(lambda x: x, out_shardings=replicated))(jax.ShapeDtypeStruct((), "float32"))


def _names_explicit(witness) -> bool:
    """Of a call inside on another mesh it names none any more: what the program settles there is Auto."""
    if witness is None or isinstance(witness, AbstractMesh):
        return witness is not None and is_explicit(witness)
    named = [x for eqn in witness.eqns for x in eqn.params["out_shardings"] if isinstance(x, NamedSharding)]
    return any(AxisType.Explicit in sharding.mesh.axis_types for sharding in named)


def _rebind(args, params, jaxpr) -> list[Any]:
    return shard_jit_p.bind(*args, **{**params, "jaxpr": jaxpr})


def _impl(*args, jaxpr, mesh, **params):
    """Runs the program eagerly; under `jax.disable_jit`, one operation after the other.

    Where the program names several meshes, JAX is told on which one each result is, because it would guess.
    """
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return _evaluated(jaxpr, args)
    params |= {"jaxpr": jaxpr, "mesh": mesh}
    if not sites.others(jaxpr, mesh):
        return _jitted(None)(*args, **params)
    built = build(jaxpr, tuple(committed(x, mesh) for x in args), mesh, params["options"])
    return _jitted(built.left(mesh))(*args, **params)


@functools.lru_cache
def _jitted(out_shardings):
    static = ("jaxpr", "mesh", "options", "witness")
    named: dict[str, Any] = {} if out_shardings is None else {"out_shardings": list(out_shardings)}
    return jax.jit(_bound, static_argnames=static, **named)


def _bound(*args, jaxpr, **params):
    if args and _jax.is_concrete(args):  # jax.debug_nans looks for the operation that makes them
        return _evaluated(jaxpr, args)
    return shard_jit_p.bind(*args, jaxpr=jaxpr, **params)


def _evaluated(jaxpr, args) -> list[Any]:
    """The results, one operation after the other. jaxpr_as_fun would look away from what jax.debug_nans looks
    for.
    """
    return eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *map(_on_auto_mesh, args))


def _on_auto_mesh(x):
    """The same array without an Explicit type, which no operation of a global program takes; what it owes is
    settled."""
    typed = explicit_sharding(x)
    if typed is None:
        return x
    x = jax.device_put(x, NamedSharding(x.sharding.mesh, typed.settled.spec)) if typed.owing else x
    own = x.sharding
    return jax.device_put(x, NamedSharding(auto_mesh(own.mesh), own.spec, memory_kind=own.memory_kind))


def committed(x, mesh: Mesh | AbstractMesh) -> Placement | None:
    """The sharding in which an array is committed to the devices of the mesh, None where it is not."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not getattr(x, "committed", True):
        return None
    own = user_mesh(sharding.mesh, mesh)
    if own is None:
        return None
    return Placement(
        own, at_rest(from_spec(sharding.spec, len(x.shape)).placed, x.shape, own.sizes)
    )  # an abstract array may name any


def _abstract_eval(*avals, jaxpr, mesh, witness, **params):
    """The types of the results name a mesh. Where the program names several, it is one that has a spec for
    values on any of them. Where `jax.jit` will name them on an Explicit mesh, with types that only it knows,
    they name none: such is the type of any of them, which `jax_enable_checks` compares.
    """
    if _names_explicit(witness):
        return list(map(_jax.without_mesh, jaxpr.out_avals)), jaxpr.effects
    others = sites.others(jaxpr, mesh)
    if not others and all(
        a.sharding.mesh.empty or a.sharding.mesh == abstract_mesh(mesh) for a in jaxpr.out_avals
    ):
        return list(jaxpr.out_avals), jaxpr.effects
    refined = sites.refined_mesh(mesh, refinement([sites.program_mesh(mesh), *others]))
    typed = [
        a.update(sharding=NamedSharding(refined, PartitionSpec(*[None] * a.ndim))) for a in jaxpr.out_avals
    ]
    return typed, jaxpr.effects


def _lower(ctx, *operands, jaxpr, mesh, options, witness):
    """Partitioned; as it is where only an abstract mesh of Auto axes was in context, and no argument is
    committed to several devices: then `jax.jit` runs it on one.
    """
    if isinstance(witness, AbstractMesh) and not is_explicit(witness) and _jax.device_count(ctx) == 1:
        _check_unsharded(jaxpr, mesh)
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *operands)
    at_rest = tuple(_at_rest(x, aval.ndim, mesh) for x, aval in zip(operands, jaxpr.in_avals, strict=True))
    built = build(jaxpr, at_rest, mesh, options)
    if isinstance(mesh, Mesh):
        check_agreement(built, mesh)
    refined = sites.refined_mesh(mesh, built.refinement, concrete=True)
    local = lowered(built.jaxpr, options, tuple(ctx.module_context.platforms), refined)
    run = functools.partial(_run, built, local, mesh)
    if not _owes(built):  # the types of a mesh in context name its axes, which the program may have refined
        ctx = ctx.replace(avals_in=[_jax.without_mesh(a) for a in ctx.avals_in])
    with (
        program.timed(built.phases, "lower"),
        _jax.lowering_on(refined),
    ):
        return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _check_unsharded(jaxpr, mesh: AbstractMesh) -> None:
    for note in (eqn.params for eqn in jaxpr.eqns if eqn.primitive is annotate_p):
        if note["role"] in ("argument", "result") and any(note["dims"]):
            raise ValueError(
                f"{note['source']} names axes of the mesh ({describe(mesh)}), which is abstract and has no "
                "devices to run on: call it under jax.set_mesh(mesh), or place the arguments on a mesh"
            )


def _at_rest(operand, rank: int, mesh: Mesh | AbstractMesh) -> Placement | None:
    """The sharding in which an operand is committed. A random key has one dim more in memory than in the
    program.
    """
    committed_to = _jax.committed_dims(operand, mesh.size)
    if committed_to is None:
        return None
    axes, places, dims, unreduced, reduction = committed_to
    owing = Owing(unreduced, (), reduction)
    return Placement(UserMesh(axes, places), Sharding((dims + ((),) * rank)[:rank], owing))


def _run(built: program.Program, local, mesh: Mesh | AbstractMesh, *args):
    args = _crossed(args, built.entering, mesh)
    if _owes(built):
        results = _run_typed(built, local, args)
    else:
        with jax.sharding.use_abstract_mesh(built.mesh):
            results = jaxpr_as_fun(local)(*args)
    if isinstance(mesh, Mesh):
        refined = sites.refined_mesh(mesh, built.refinement, concrete=True)
        results = [_resting(x, s, refined) for x, s in zip(results, built.out_shardings, strict=True)]
    return results


def _owes(built: program.Program) -> bool:
    return any(sharding.owing for sharding in (*built.in_shardings, *built.out_shardings))


def _resting(x, sharding: Sharding, mesh: Mesh):
    """A result in its sharding. What is unreduced has that from the program, and from its type outside."""
    if sharding.owing.unreduced:
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, sharding.settled.spec))


def _run_typed(built: program.Program, local, args) -> list[Any]:
    """Where an argument or result owes a reduction, which JAX has in the types of values on Explicit axes
    alone. They are typed for as long as the program runs."""
    mesh: Any = explicit_mesh(built.mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        typed = [
            reshard(x, NamedSharding(mesh, s.spec)) for x, s in zip(args, built.in_shardings, strict=True)
        ]
        results = jaxpr_as_fun(local)(*typed)
    with jax.sharding.use_abstract_mesh(built.mesh):
        return list(map(_jax.moved_off_meshes, results))


def _crossed(xs: Sequence[Any], crossings: Sequence[Crossing], mesh: Mesh | AbstractMesh) -> list[Any]:
    crossed = {c.number: c for c in crossings}
    return [crossed[i].inside(x, mesh) if i in crossed else x for i, x in enumerate(xs)]


def _jvp(primals, tangents, *, jaxpr, **params):
    nonzero = [type(t) is not ad.Zero for t in tangents]
    derived, nonzero_out = _jax.jvp_jaxpr(jaxpr, nonzero, instantiate=False)
    outs = _rebind([*primals, *_where(nonzero, tangents)], params, derived)
    count = len(jaxpr.out_avals)
    moving = iter(outs[count:])
    zeros = [ad.Zero(aval.to_tangent_aval()) for aval in jaxpr.out_avals]
    return outs[:count], [
        next(moving) if moves else zero for moves, zero in zip(nonzero_out, zeros, strict=True)
    ]


def _transpose(cts, *args, jaxpr, **params):
    """The cotangents of the linear arguments, which are those that are undefined here."""
    linear = tuple(ad.is_undefined_primal(x) for x in args)
    nonzero = tuple(type(ct) is not ad.Zero for ct in cts)
    known = [x for x, is_linear in zip(args, linear, strict=True) if not is_linear]
    results = iter(
        _rebind([*known, *_where(nonzero, cts)], params, _transposed(jaxpr, linear, nonzero, params["mesh"]))
    )
    return [next(results) if is_linear else None for is_linear in linear]


@_jax.weakly_cached
def _transposed(jaxpr, linear: tuple[bool, ...], nonzero: tuple[bool, ...], mesh: Mesh | AbstractMesh):
    shapes, out_shapes = residuals.shapes(jaxpr.in_avals, mesh), residuals.shapes(jaxpr.out_avals, mesh)
    known_count = len(linear) - sum(linear)

    def backward(*known_and_cts):
        known, cts = known_and_cts[:known_count], iter(known_and_cts[known_count:])
        full = [next(cts) if nz else _zeros(aval) for nz, aval in zip(nonzero, jaxpr.out_avals, strict=True)]
        forward = lambda *moving: jaxpr_as_fun(jaxpr)(*_merge(linear, moving, known))  # noqa: E731
        return jax.linear_transpose(forward, *_where(linear, shapes))(full)

    fixed = [not is_linear for is_linear in linear]
    return jax.make_jaxpr(backward)(*_where(fixed, shapes), *_where(nonzero, out_shapes))


def _zeros(aval):
    zeros = jax.numpy.zeros(aval.shape, aval.dtype)
    return zeros if memory_of(aval) is jax.memory.Space.Device else jax.device_put(zeros, memory_of(aval))


def _batch(axis_data, args, dims, *, jaxpr, **params):
    batched, out_dims = _jax.batch_jaxpr(_without_idle_types(jaxpr), axis_data, tuple(dims))
    return _rebind(args, params, batched), out_dims


def _without_idle_types(jaxpr):
    """A jaxpr in which no result is given a type of Auto axes, which says nothing. JAX gives one to what it
    transposes while a mesh is in context, and then has no rule to batch it, if it is a grouped convolution.
    """

    def is_idle(sharding) -> bool:
        return sharding is not None and AxisType.Explicit not in sharding.mesh.axis_types

    def change(eqn):
        idle = is_idle(eqn.params.get("out_sharding"))
        return eqn.replace(params={**eqn.params, "out_sharding": None}) if idle else eqn

    return map_equations(jaxpr, lambda eqns: list(map(change, eqns)))


def _partial_eval(trace, *tracers, jaxpr, **params):
    """Splits the program in two: the first runs now, on what is known, and makes the residuals; an input that
    the second needs is passed on as it is.
    """
    unknown = tuple(not t.is_known() for t in tracers)
    split = residuals.split(jaxpr, unknown, params["mesh"])
    known = [t.pval.get_known() for t in tracers if t.is_known()]
    outs = _rebind(known, params, split.known)
    count = len(outs) - split.saved
    fresh = iter(outs[count:])
    entering = [next(fresh) if source is None else known[source] for source in split.sources]
    later = []
    if any(split.unknown_outs):
        inputs = [*map(trace.new_instantiated_const, entering), *_where(unknown, tracers)]
        later = trace.default_process_primitive(shard_jit_p, inputs, {**params, "jaxpr": split.later})
    return _merge(split.unknown_outs, later, outs[:count])


def _dce(used_outputs, eqn):
    if not any(used_outputs) and not _jax.has_effects(eqn):
        return [False] * len(eqn.invars), None
    jaxpr, used = _pruned(eqn.params["jaxpr"], tuple(used_outputs))
    if jaxpr is None:
        return used, eqn
    return used, eqn.replace(
        invars=_where(used, eqn.invars),
        outvars=_where(used_outputs, eqn.outvars),
        params={**eqn.params, "jaxpr": jaxpr},
        effects=jaxpr.effects,
    )


@_jax.weakly_cached
def _pruned(jaxpr, used_outputs: tuple[bool, ...]):
    """The jaxpr without what those results do not need, None where they need all of it; and which inputs they
    need.
    """
    pruned, used = _jax.prune(jaxpr, used_outputs)
    if all(used) and all(used_outputs):  # what is dead inside is left out when the program is built, once
        return None, used
    pruned = renumbered(pruned, used)
    if all(used_outputs):
        program.note_whole(pruned, jaxpr, used)
    return pruned, used


def _where(mask, xs) -> list[Any]:
    return [x for keep, x in zip(mask, xs, strict=True) if keep]


def _merge(mask, where_true, where_false) -> list[Any]:
    trues, falses = iter(where_true), iter(where_false)
    return [next(trues) if m else next(falses) for m in mask]


shard_jit_p.is_high = lambda *avals, **params: False  # graphs expand what is of high level inside
shard_jit_p.def_impl(_impl)
shard_jit_p.def_effectful_abstract_eval(_abstract_eval)
mlir.register_lowering(shard_jit_p, _lower, cacheable=False)
ad.primitive_jvps[shard_jit_p] = _jvp
ad.primitive_transposes[shard_jit_p] = _transpose
batching.fancy_primitive_batchers[shard_jit_p] = _batch
pe.custom_partial_eval_rules[shard_jit_p] = _partial_eval
pe.partial_eval_jaxpr_custom_rules[shard_jit_p] = residuals.by_policy
_jax.register_dce(shard_jit_p, _dce)
