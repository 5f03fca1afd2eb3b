"""Explicit types -> annotations: a program that was traced under a mesh of Explicit axes, as one for their
Auto twins.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import source_info_util
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardax import _jax
from shardax.annotations.annotate import TYPE_OF_ANNOTATION, Dims, bind_annotation
from shardax.sharding import Sharding, from_spec


def auto_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The same mesh, its axes Auto.

    >>> auto_mesh(AbstractMesh((4,), ("x",), axis_types=(AxisType.Explicit,)))
    AbstractMesh('x': 4, axis_types=(Auto,))
    """
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if tuple(mesh.axis_types) == types:
        return mesh
    if isinstance(mesh, AbstractMesh):
        return mesh.update(axis_types=types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def explicit_sharding(x) -> Sharding | None:
    """The sharding in the type of a value on an Explicit mesh."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return from_spec(sharding.spec, len(sharding.spec))


def shape_of(aval, sharding: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
    """The shape, dtype and memory of a value without its sharding, or with another."""
    mesh = jax.sharding.get_abstract_mesh()
    if sharding is None and memory_of(aval) is jax.memory.Space.Host and not mesh.empty:
        sharding = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False)
    )


def memory_of(aval) -> Any:
    return getattr(aval, "memory_space", jax.memory.Space.Device)


SHARDING_PARAMS = (
    "out_sharding",
    "sharding",
)  # parameters by which primitives pass on the out_sharding= of JAX's functions


def without_explicit_types(jaxpr) -> Any:
    """A closed jaxpr without Explicit types. What the user requested with `reshard` and `out_sharding=`
    stays, as annotations; the types that follow from it do not. Call it where the Auto mesh is in context."""
    return jax.make_jaxpr(lambda *args: _evaluate(_jax.closed(jaxpr), args))(*map(shape_of, jaxpr.in_avals))


def _evaluate(closed, args: Sequence[Any]) -> list[Any]:
    env = dict(zip((*closed.jaxpr.invars, *closed.jaxpr.constvars), (*args, *closed.consts), strict=True))

    def read(atom):
        return atom.val if _jax.is_literal(atom) else env[atom]

    mesh = jax.sharding.get_abstract_mesh()
    for eqn in closed.jaxpr.eqns:
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
            eqn.ctx.manager,
            jax.sharding.use_abstract_mesh(mesh),
        ):
            env.update(zip(eqn.outvars, _bind(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, closed.jaxpr.outvars))


def _bind(eqn, args: list[Any]) -> Sequence[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name == "mesh_cast" or TYPE_OF_ANNOTATION in str(eqn.source_info.name_stack):
        return args
    if name == "reshard":
        return [_annotated(args[0], params["dst_sharding"], "reshard", eqn)]
    kept = {"jaxpr": params["jaxpr"]} if name == "shard_map" else _rules(eqn)  # in a shard_map all is local
    bind_params = eqn.primitive.get_bind_params(
        {key: kept[key] if key in kept else _param_without_types(key, value) for key, value in params.items()}
    )
    results = eqn.primitive.bind(*args, **bind_params)
    requested = next(
        (params[key] for key in SHARDING_PARAMS if isinstance(params.get(key), NamedSharding)), None
    )
    if requested is None:
        return results if eqn.primitive.multiple_results else [results]
    return [_annotated(results, requested, f"out_sharding of {name}", eqn)]


def _annotated(x, sharding: NamedSharding, name: str, eqn):
    """A value with what a type requests of it."""
    dims = dims_of_type(sharding, jax.numpy.ndim(x))
    return x if dims is None else bind_annotation(x, dims, f"{name} at {_jax.user_line(eqn.source_info)}")


def dims_of_type(sharding: NamedSharding, rank: int) -> Dims | None:
    """What a type requests. It names Explicit axes only: on a mesh that has Auto axes too, as within
    `auto_axes`, a dim without any is open, and a type that names none requests nothing.
    """
    dims: Dims = from_spec(sharding.spec, rank).dims
    if AxisType.Auto not in sharding.mesh.axis_types:
        return dims
    return tuple(dim or None for dim in dims) if any(dims) else None


def _rules(eqn) -> dict[str, Any]:
    """The rules of a custom derivative, which JAX traces when it differentiates."""
    if "fwd_jaxpr_thunk" in eqn.params:
        return _jax.lazy_vjp(eqn, _without_types_in_context())
    if "jvp_jaxpr_fun" in eqn.params:
        return {
            "jvp_jaxpr_fun": _jax.lazy_derivative(
                eqn.params["jvp_jaxpr_fun"], eqn.ctx, _without_types_in_context()
            )
        }
    return {}


def _param_without_types(key: str, value):
    if key in SHARDING_PARAMS and isinstance(value, NamedSharding):
        return None
    if isinstance(value, Mesh | AbstractMesh):
        return auto_mesh(value)
    if hasattr(value, "eqns"):
        made = without_explicit_types(_jax.closed(value))
        return made if hasattr(value, "consts") else made.jaxpr
    return (
        tuple(_param_without_types("", v) for v in value)
        if isinstance(value, tuple) and any(hasattr(v, "eqns") for v in value)
        else value
    )


def _without_types_in_context():
    """`without_explicit_types`, later, in the context of now."""
    mesh = jax.sharding.get_abstract_mesh()

    def change(jaxpr):
        with jax.sharding.use_abstract_mesh(mesh):
            return without_explicit_types(jaxpr)

    return change
