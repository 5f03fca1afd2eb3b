"""Traces a function to the global jaxpr, in which the shardings that the user gave are recorded as annotation
equations.
"""

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from keyword import iskeyword
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardax import _jax, collector
from shardax.annotations.annotate import (
    Dims,
    OtherDevices,
    Role,
    bind_annotation,
    broadcast_specs,
    dims_of,
    flatten,
    own_mesh,
)
from shardax.annotations.explicit import (
    auto_mesh,
    explicit_sharding,
    memory_of,
    shape_of,
    without_explicit_types,
)
from shardax.graph.state import state
from shardax.meshes import sites
from shardax.rewrites.constants import with_made_constants
from shardax.sharding import Sharding
from shardax.transforms import Argument, Result


@dataclass(frozen=True)
class Request:
    """What is to be traced: a function of pytrees, its arguments, and what the user said about their
    shardings.

    `args` and `kwargs` are the dynamic arguments, `names` what messages call those in `args`, `donated` the
    donated flat arguments. `in_shardings` is a prefix of `args`, `out_shardings` of the results. `named_by`
    says in messages who named the mesh. `kw_shardings` are those of some of `kwargs`, which in_shardings
    covers. `types`: with which the function is traced, one for each flat argument, where these are not those
    of the arguments.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]
    donated: frozenset[int]
    mesh: Mesh | AbstractMesh
    in_shardings: Any = None
    out_shardings: Any = None
    named_by: str = ""
    kw_shardings: dict[str, Any] = field(default_factory=dict)
    types: Sequence[jax.ShapeDtypeStruct] | None = None


@dataclass(frozen=True)
class Traced:
    """`jaxpr` takes the flat arguments, then `consts`, what the function closed over; `out_tree` is its
    results' structure.

    The flat arguments `refs` are Refs. It takes what they hold, and its last results are what they hold in
    the end.
    """

    jaxpr: Any
    consts: Sequence[Any]
    out_tree: Any
    refs: tuple[int, ...] = ()
    arguments: tuple[Argument, ...] = ()
    results: tuple[Result, ...] = ()


@dataclass(frozen=True)
class Slot:
    """A flat argument or result: how messages name it, its path, and what the user said of its sharding and
    memory.
    """

    name: str
    path: str
    source: str
    role: Role
    aval: Any
    dims: Dims | None
    mesh: Mesh | AbstractMesh | None = None
    memory: Any = None  # a jax.memory.Space, or None
    donated: bool = False
    is_ref: bool = False

    @property
    def argument(self) -> str:
        """The name without the path."""
        return self.name.removesuffix(self.path)


def trace(request: Request) -> Traced:
    """The global jaxpr of a function.

    Raises ValueError where a sharding tree does not fit; what the function itself raises comes through as it
    is.
    """
    try:
        with collector.paused():
            return _trace(request)
    except OtherDevices as error:
        raise error.program_named(request.named_by) from None


def _trace(request: Request) -> Traced:
    slots, leaves, tree = _arguments(request)
    traced: list[tuple[list[Slot], Any, list[int | None]]] = []

    @functools.wraps(request.fun)  # so do JAX's messages name it
    def flat(*arguments):
        given = list(map(_annotated, jax.tree.leaves(arguments), slots))
        refs = {i: jax.new_ref(given[i]) for i, slot in enumerate(slots) if slot.is_ref}
        args, kwargs = tree.unflatten(refs.get(i, x) for i, x in enumerate(given))
        out = request.fun(*args, **kwargs)
        results, outs, out_tree = _results(request, slots, out)
        likes = _successors(slots, results)
        traced.append((results, out_tree, likes))
        written = [_annotated(ref[...], replace(slots[i], dims=None), i) for i, ref in refs.items()]
        return [
            _annotated(x, slot, like) for x, slot, like in zip(outs, results, likes, strict=True)
        ] + written

    flat.__signature__ = _signature(slots)  # type: ignore[attr-defined]
    jaxpr = sites.settled(_make_jaxpr(flat, leaves, slots, request.mesh), request.mesh)
    for x in jaxpr.consts:
        _check_no_ref(x, f"{request.fun.__name__} closes over", "pass it as an argument")
    refs = tuple(i for i, slot in enumerate(slots) if slot.is_ref)
    jaxpr, consts = _jax.hoist_consts(with_made_constants(jaxpr))
    results, out_tree, likes = traced[-1]
    arguments = _told_arguments(request, slots, jaxpr, likes)
    return Traced(jaxpr, consts, out_tree, refs, arguments, _told_results(slots, results, likes))


def arguments_of(request: Request) -> tuple[Argument, ...]:
    """The arguments, before anything is traced: which of them are state is not known then."""
    slots, _, _ = _arguments(request)
    return tuple(map(_argument, _paths(request), slots))


def _told_arguments(request: Request, slots: Sequence[Slot], jaxpr, likes) -> tuple[Argument, ...]:
    """Those of the call, then what the function closes over."""
    types = [(aval.shape, aval.dtype) for aval in jaxpr.in_avals]
    back = {(aval.shape, aval.dtype) for aval in jaxpr.out_avals}
    comes_back = state(types, back, [i for i in likes if i is not None])
    arguments = list(map(_argument, _paths(request), slots))
    arguments += [Argument("", shape_of(aval)) for aval in jaxpr.in_avals[len(slots) :]]
    return tuple(replace(argument, is_state=i in comes_back) for i, argument in enumerate(arguments))


def _told_results(slots: Sequence[Slot], results: Sequence[Slot], likes) -> tuple[Result, ...]:
    own = [
        Result("/".join(re.findall(r"\w+", result.path)), shape_of(result.aval), _requested(result), like)
        for result, like in zip(results, likes, strict=True)
    ]
    return (*own, *(Result("", shape_of(s.aval), None, i) for i, s in enumerate(slots) if s.is_ref))


def _argument(path: str, slot: Slot) -> Argument:
    return Argument(path, shape_of(slot.aval), _requested(slot), slot.donated)


def _requested(slot: Slot) -> PartitionSpec | None:
    if slot.dims is None:
        return None
    return PartitionSpec(*(PartitionSpec.UNCONSTRAINED if dim is None else dim or None for dim in slot.dims))


def _paths(request: Request) -> list[str]:
    """ "state/params/w" of each flat argument, as plans have it."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path((request.args, request.kwargs))[0]]
    names = [request.names[p[1].idx] if p[0].idx == 0 else p[1].key for p in paths]
    full = [(jax.tree_util.DictKey(name), *p[2:]) for name, p in zip(names, paths, strict=True)]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path in full]


def abstract_mesh(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    return AxisType.Explicit in mesh.axis_types


def _arguments(request: Request) -> tuple[list[Slot], list[Any], Any]:
    paths, leaves, tree = flatten((request.args, request.kwargs))
    specs = _argument_specs(request)
    slots = []
    for index, (path, x, spec) in enumerate(zip(paths, leaves, specs, strict=True)):
        name, rest = _argument_name(path, request.names)
        aval = _jax.value_type(x) if request.types is None else request.types[index]
        dims = dims_of(spec, aval.shape, request.mesh, f"argument {name}")
        source = f"in_shardings{path[len('[0]') :]}"
        kinds = index in request.donated, _jax.is_ref(x)
        slots.append(Slot(name, rest, source, "argument", aval, dims, own_mesh(spec), _memory(spec), *kinds))
    return slots, leaves, tree


def _check_no_ref(x, what: str, way_out: str) -> None:
    if _jax.is_ref(x):
        raise ValueError(f"{what} a Ref of shape {x.shape}, which shard_jit does not write to: {way_out}")


def _argument_specs(request: Request) -> list[Any]:
    """The sharding of each flat argument. What in_shardings does not cover is left to completion."""
    named = {name: request.kw_shardings.get(name) for name in request.kwargs}
    positional = broadcast_specs(request.in_shardings, request.args, "in_shardings")
    return positional + broadcast_specs(named, request.kwargs, "in_shardings")


def _argument_name(path: str, names: Sequence[str]) -> tuple[str, str]:
    """ "[0][1]['w']" of the tree (args, kwargs) -> "state['w']" and the path inside the argument."""
    side, key, rest = _split_path(path)
    return (names[int(key)] if side == "0" else key.strip("'")) + rest, rest


def _split_path(path: str) -> tuple[str, str, str]:
    side, _, tail = path[1:].partition("]")
    key, _, rest = tail[1:].partition("]")
    return side, key, rest


def _results(request: Request, slots: Sequence[Slot], out) -> tuple[list[Slot], list[Any], Any]:
    paths, leaves, tree = flatten(out)
    specs = broadcast_specs(request.out_shardings, out, "out_shardings")
    results = []
    for path, x, spec in zip(paths, leaves, specs, strict=True):
        _check_no_ref(x, f"result{path} is", "return what it holds, ref[...]")
        dims = dims_of(spec, jax.numpy.shape(x), request.mesh, f"result{path}")
        source, aval = f"out_shardings{path}", jax.typeof(x)
        results.append(
            Slot(f"result{path}", path, source, "result", aval, dims, own_mesh(spec), _memory(spec))
        )
    return results, leaves, tree


def _successors(slots: Sequence[Slot], results: Sequence[Slot]) -> list[int | None]:
    """For each result the donated argument that it succeeds: of its path and type, else the first free one of
    its type.
    """
    free: dict[tuple, dict[int, Slot]] = {}
    for i, slot in enumerate(slots):
        if slot.donated:
            free.setdefault(_type_of(slot), {})[i] = slot
    likes: list[int | None] = [None] * len(results)
    for same_path in (True, False):
        for r, result in enumerate(results):
            alike = free.get(_type_of(result), {})
            found = (i for i, slot in alike.items() if not same_path or result.path.endswith(slot.path))
            if likes[r] is None and result.dims is None and (first := next(found, None)) is not None:
                likes[r] = first
                del alike[first]
    return likes


def _type_of(slot: Slot) -> tuple[tuple[int, ...], Any]:
    return slot.aval.shape, slot.aval.dtype


def _annotated(x, slot: Slot, like: int | None = None):
    if slot.dims is not None or like is not None:
        dims = slot.dims or (None,) * len(slot.aval.shape)
        words = (
            (slot.source, slot.role) if slot.dims else (f"{slot.name}, which succeeds an argument", "implied")
        )
        x = bind_annotation(x, dims, *words, like, slot.mesh)
    return x if slot.memory in (None, memory_of(jax.typeof(x))) else jax.device_put(x, slot.memory)


def _memory(spec) -> Any:
    """The memory that a sharding asks for, None where it does not say."""
    kind = spec.memory_kind if isinstance(spec, NamedSharding) else None
    return None if kind is None else jax.memory.Space.Device if kind == "device" else jax.memory.Space.Host


def _make_jaxpr(
    flat: Callable[..., Any], leaves: Sequence[Any], slots: Sequence[Slot], mesh: Mesh | AbstractMesh
):
    """No one mesh context accepts all programs.

    Auto allows a bare PartitionSpec in with_sharding_constraint, but no Explicit array that the function
    closes over, which the empty context allows. `reshard`, `out_sharding=` and islands with an Explicit mesh
    want types, as under `jax.jit`. Islands over another mesh than the program's are allowed in the empty
    context, and where `with mesh:` gives bare specs their mesh.
    """
    auto, empty = abstract_mesh(auto_mesh(mesh)), AbstractMesh((), ())
    attempts = [lambda: _traced(flat, leaves, slots, auto)]
    if is_explicit(mesh):
        attempts += [
            lambda: _traced(flat, leaves, slots, empty),
            lambda: _traced_typed(flat, leaves, slots, abstract_mesh(mesh), auto),
        ]
    errors: list[Exception] = []
    for attempt in attempts:
        try:
            return attempt()
        except Exception as error:
            errors.append(error)
    if not any(map(_jax.wants_own_mesh, errors)):
        raise errors[-1]
    with _jax.legacy_mesh(auto_mesh(mesh)) if isinstance(mesh, Mesh) else nullcontext():
        return _traced(flat, leaves, slots, empty)


def _traced(flat: Callable[..., Any], leaves: Sequence[Any], slots: Sequence[Slot], context: AbstractMesh):
    with jax.sharding.use_abstract_mesh(context):
        return _jax.without_refs(
            jax.make_jaxpr(flat)(*_arranged([shape_of(slot.aval) for slot in slots], slots))
        )


def _traced_typed(flat, leaves: Sequence[Any], slots: Sequence[Slot], mesh: AbstractMesh, auto: AbstractMesh):
    shapes = [shape_of(s.aval, _type(x, s, mesh)) for x, s in zip(leaves, slots, strict=True)]
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(flat)(*_arranged(shapes, slots))
    with jax.sharding.use_abstract_mesh(auto):
        return _jax.without_refs(without_explicit_types(jaxpr))


class _Leaves(dict):
    """The leaves of one argument by their paths, in order, so that JAX's messages name the paths."""


jax.tree_util.register_pytree_with_keys(
    _Leaves, lambda xs: (tuple(xs.items()), tuple(xs)), lambda paths, xs: _Leaves(zip(paths, xs, strict=True))
)


def _arranged(shapes: Sequence[Any], slots: Sequence[Slot]) -> list[_Leaves]:
    """The shapes of each argument."""
    pairs = zip(slots, shapes, strict=True)
    groups = itertools.groupby(pairs, lambda pair: pair[0].argument)
    return [_Leaves((slot.path, shape) for slot, shape in group) for _, group in groups]


def _signature(slots: Sequence[Slot]) -> inspect.Signature:
    """The signature of a function of `_arranged` leaves, so that JAX's messages name the user's arguments."""
    names = list(dict.fromkeys(slot.argument for slot in slots))
    valid = [
        name if name.isidentifier() and not iskeyword(name) else f"argument_{i}"
        for i, name in enumerate(names)
    ]
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in valid])


def _type(x, slot: Slot, mesh: AbstractMesh) -> NamedSharding:
    """The type of an argument: as in_shardings says, else the one that it has."""
    given = Sharding(tuple(dim or () for dim in slot.dims)) if slot.dims else explicit_sharding(x)
    return NamedSharding(mesh, given.spec if given else PartitionSpec())
