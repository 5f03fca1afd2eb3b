"""Explicit types -> annotations: a program that was traced under a mesh of Explicit axes, as one for their
Auto twins.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax import lax
from jax.extend import source_info_util
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardax import _jax
from shardax.annotations.annotate import TYPE_OF_ANNOTATION, Dims, bind_annotation
from shardax.differentiated import is_transposed
from shardax.sharding import Axes, Owing, Sharding, entries_of, from_spec, owing_of


def auto_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The same mesh, its axes Auto.

    >>> auto_mesh(AbstractMesh((4,), ("x",), axis_types=(AxisType.Explicit,)))
    AbstractMesh('x': 4, axis_types=(Auto,))
    """
    return _of_type(mesh, AxisType.Auto)


def explicit_mesh(mesh: Mesh | AbstractMesh) -> Any:
    """The same mesh, its axes Explicit.

    >>> explicit_mesh(AbstractMesh((4,), ("x",)))
    AbstractMesh('x': 4, axis_types=(Explicit,))
    """
    return _of_type(mesh, AxisType.Explicit)


def _of_type(mesh: Mesh | AbstractMesh, axis_type: AxisType) -> Mesh | AbstractMesh:
    types = (axis_type,) * len(mesh.axis_names)
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
    """The memory of a value; of an abstract array, that of its sharding."""
    if (space := getattr(aval, "memory_space", None)) is not None:
        return space
    if isinstance(aval, jax.ShapeDtypeStruct):
        at_host = aval.sharding is not None and aval.sharding.memory_kind == "pinned_host"
        return jax.memory.Space.Host if at_host else jax.memory.Space.Device
    return jax.memory.Space.Device


SHARDING_PARAMS = (
    "out_sharding",
    "sharding",
)  # parameters by which primitives pass on the out_sharding= of JAX's functions


def without_explicit_types(jaxpr, backward: bool = False) -> Any:
    """A closed jaxpr without Explicit types. What the user requested with `reshard` and `out_sharding=`
    stays, as annotations; the types that follow from it do not. Call it where the Auto mesh is in context.

    backward: whether it is a body of the backward pass. There JAX itself gives `out_sharding` to what it
    transposes, the type of what that is the cotangent of: nobody requested that a sum be settled there.
    """
    opened, consts = _jax.hoist_consts(_jax.closed(jaxpr))
    is_array = [not _jax.is_ref(x) for x in consts]  # arrays may have types, and come back as constants
    arrays = [x for x, keep in zip(consts, is_array, strict=True) if keep]
    count = len(opened.in_avals) - len(consts)

    def run(*args):
        held = iter(args[count:])
        closed_over = [next(held) if keep else x for x, keep in zip(consts, is_array, strict=True)]
        return _evaluate(opened, (*args[:count], *closed_over), backward)

    types = [*opened.in_avals[:count], *map(jax.typeof, arrays)]
    return _jax.closing_over(jax.make_jaxpr(run)(*map(shape_of, types)), arrays)


@contextmanager
def as_at(eqn) -> Iterator[None]:
    """What is bound inside gets the line and the scopes of an equation, but is of the mesh in context."""
    stack, mesh = (
        source_info_util.current_name_stack() + eqn.source_info.name_stack,
        jax.sharding.get_abstract_mesh(),
    )
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
        eqn.ctx.manager,
        jax.sharding.use_abstract_mesh(mesh),
    ):
        yield


def _evaluate(closed, args: Sequence[Any], backward: bool) -> list[Any]:
    env = dict(zip((*closed.jaxpr.invars, *closed.jaxpr.constvars), (*args, *closed.consts), strict=True))

    def read(atom):
        return atom.val if _jax.is_literal(atom) else env[atom]

    for eqn in closed.jaxpr.eqns:
        with as_at(eqn):
            env.update(zip(eqn.outvars, _bind(eqn, list(map(read, eqn.invars)), backward), strict=True))
    return list(map(read, closed.jaxpr.outvars))


def _bind(eqn, args: list[Any], backward: bool) -> Sequence[Any]:
    name, params = eqn.primitive.name, eqn.params
    backward = backward or is_transposed(eqn.source_info.name_stack)
    if TYPE_OF_ANNOTATION in str(eqn.source_info.name_stack):
        return args
    if name == "mesh_cast" or name == "reshard" and params["dst_sharding"].mesh.empty:
        return args  # what a shard_jit inside does with its arguments
    if name == "reshard":
        return [_annotated(args[0], params["dst_sharding"], "reshard", eqn)]
    if name == "shard_map" and any(map(owing_of, (*params["in_specs"], *params["out_specs"]))):
        return _island(params, args, backward)
    kept = (
        {"jaxpr": params["jaxpr"]} if name == "shard_map" else _rules(eqn, backward)
    )  # in a shard_map all is local
    bind_params = eqn.primitive.get_bind_params(
        {
            key: kept[key] if key in kept else _param_without_types(key, value, backward)
            for key, value in params.items()
        }
    )
    results = eqn.primitive.bind(*args, **bind_params)
    requested = any(isinstance(params.get(key), NamedSharding) for key in SHARDING_PARAMS)
    if not requested or backward and _settles(eqn):
        return results if eqn.primitive.multiple_results else [results]
    (result,) = eqn.outvars  # under vmap the parameter may have more dims than it
    return [_annotated(results, result.aval.sharding, f"out_sharding of {name}", eqn)]


def _settles(eqn) -> bool:
    """Whether an axis splits what an equation takes, not what it gives: by type, a sum over it is taken."""
    taken, given = (
        {axis for v in side for axis in _axes_of(v.aval.sharding.spec)}
        for side in ([v for v in eqn.invars if not _jax.is_literal(v)], eqn.outvars)
    )
    return not taken <= given


def _axes_of(spec: PartitionSpec) -> Axes:
    sharding = from_spec(spec, len(spec))
    return (*(axis for axes in sharding.dims for axis in axes or ()), *owing_of(spec).unreduced)


def _island(params: dict[str, Any], args: list[Any], backward: bool) -> list[Any]:
    """A shard_map, some of whose specs are unreduced or reduced, which values on Auto axes cannot be: it
    takes and gives settled values, and makes of them what its body takes.
    """
    ins, outs = ([owing_of(spec) for spec in params[side]] for side in ("in_specs", "out_specs"))
    specs = {side: tuple(map(_settled, params[side])) for side in ("in_specs", "out_specs")}
    types = params["check_vma"]

    def run(*shards):
        taken = [_owing(x, owing, types) for x, owing in zip(shards, ins, strict=True)]
        given = _evaluate(_jax.closed(params["jaxpr"]), taken, backward)
        return tuple(_owed(x, owing, types) for x, owing in zip(given, outs, strict=True))

    manual = params["newly_manual_axes"]
    mesh = auto_mesh(params["mesh"])
    return list(jax.shard_map(run, mesh=mesh, axis_names=manual, check_vma=types, **specs)(*args))


def _settled(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*entries_of(spec))


def _owing(x, owing: Owing, types: bool):
    """A shard that owes what its spec says, of one that owes nothing: the first device has it, the others
    have zeros.
    """
    if owing.reduction != "sum":
        raise ValueError(
            f"a shard_map takes a value that is unreduced over {', '.join(owing.unreduced)}, "
            f"unreduced_kind={owing.reduction}, and inside shard_jit that may be a sum only: take the "
            f"{owing.reduction} before, with jax.sharding.reshard"
        )
    if owing.reduced and types:
        x = lax.pcast(x, owing.reduced, to="reduced")
    if not owing.unreduced:
        return x
    x = _on_first(x, owing.unreduced, types)
    return lax.pcast(x, owing.unreduced, to="unreduced") if types else x


def _owed(x, owing: Owing, types: bool):
    """A shard that owes nothing, of one that owes what its spec says."""
    if owing.reduced and types:  # the same on all devices, which no cast says
        x = lax.psum(_on_first(x, owing.reduced, types), owing.reduced)
    return lax.psum(x, owing.unreduced) if owing.unreduced else x


def _on_first(x, axes: Axes, types: bool):
    """The shard on the first device along these axes, zeros on the others."""
    x = lax.pcast(x, axes, to="varying") if types else x
    zeros = jax.numpy.zeros_like(x)
    for axis in axes:
        x = jax.numpy.where(lax.axis_index(axis) == 0, x, zeros)
    return x


def _annotated(x, sharding: NamedSharding, name: str, eqn):
    """A value with what a type requests of it."""
    dims, owing = dims_of_type(sharding, jax.numpy.ndim(x)), owing_of(sharding.spec)
    if dims is None:
        return x
    return bind_annotation(x, dims, f"{name} at {_jax.user_line(eqn.source_info)}", owing=owing)


def dims_of_type(sharding: NamedSharding, rank: int) -> Dims | None:
    """What a type requests. It names Explicit axes only: on a mesh that has Auto axes too, as within
    `auto_axes`, a dim without any is open, and a type that names none requests nothing.
    """
    requested = from_spec(sharding.spec, rank)
    dims: Dims = requested.dims
    if AxisType.Auto not in sharding.mesh.axis_types:
        return dims
    return tuple(dim or None for dim in dims) if any(dims) or requested.owing else None


def _rules(eqn, backward: bool) -> dict[str, Any]:
    """The rules of a custom derivative, which JAX traces when it differentiates."""
    change = _without_types_in_context(backward)
    if "fwd_jaxpr_thunk" in eqn.params:
        return _jax.lazy_vjp(eqn, change)
    if "jvp_jaxpr_fun" in eqn.params:
        return {"jvp_jaxpr_fun": _jax.lazy_derivative(eqn.params["jvp_jaxpr_fun"], eqn.ctx, change)}
    return {}


def _param_without_types(key: str, value, backward: bool):
    if key in SHARDING_PARAMS and isinstance(value, NamedSharding):
        return None
    if isinstance(value, Mesh | AbstractMesh):
        return auto_mesh(value)
    if hasattr(value, "eqns"):
        made = without_explicit_types(_jax.closed(value), backward)
        return made if hasattr(value, "consts") else made.jaxpr
    if isinstance(value, tuple) and any(hasattr(v, "eqns") for v in value):
        made = [_param_without_types("", v, backward) for v in value]
        return tuple(made) if type(value) is tuple else type(value)(*made)  # a linear solve has named ones
    return value


def _without_types_in_context(backward: bool):
    """`without_explicit_types`, later, in the context of now."""
    mesh = jax.sharding.get_abstract_mesh()

    def change(jaxpr):
        with jax.sharding.use_abstract_mesh(mesh):
            return without_explicit_types(jaxpr, backward)

    return change
