"""Traces a function to the global jaxpr, in which the shardings that the user requested are recorded as
annotation equations.
"""

import functools
import inspect
import itertools
import re
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from keyword import iskeyword
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.extend.core import jaxpr_as_fun
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
    owing_of_leaf,
    own_mesh,
    require_explicit,
    require_sum,
)
from shardax.annotations.explicit import (
    auto_mesh,
    explicit_sharding,
    memory_of,
    shape_of,
    without_explicit_types,
)
from shardax.graph.state import state
from shardax.ledger.lines import line_text
from shardax.meshes import sites
from shardax.rewrites.constants import with_made_constants
from shardax.sharding import NOTHING_OWED, Owing, Sharding, at_rest
from shardax.transforms import Argument, Result


@dataclass(frozen=True)
class Request:
    """What is to be traced: a function of pytrees, its arguments, and what the user requested of their
    shardings.

    `args` and `kwargs` are the dynamic arguments, `argument_names` what messages call those in `args`,
    `donated` the donated flat arguments. `in_shardings` is a prefix of `args`, `out_shardings` of the
    results. `named_by` says in messages who named the mesh. `kw_shardings` are those of some of `kwargs`,
    which in_shardings covers. `types`: with which the function is traced, one for each flat argument, where
    these are not those of the arguments. The shardings are requested of the arguments, not of what is made of
    them.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    argument_names: tuple[str, ...]
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

    The inputs `refs` are Refs, flat arguments or closed over. It takes what they hold, and its last results
    are what they hold in the end. `slots` are those of the flat arguments and of the results. `refused`: why
    JAX gave no Explicit types, and where; "" if it did, or was not asked.
    """

    jaxpr: Any
    consts: Sequence[Any]
    out_tree: Any
    refs: tuple[int, ...]
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    slots: tuple[Sequence["Slot"], Sequence["Slot"]]
    refused: str = ""


CLOSED_REF = "a Ref that is closed over, which succeeds itself"


@dataclass(frozen=True)
class Slot:
    """A flat argument or result: how messages name it, its path, and what the user requested of its sharding
    and memory. `dims` are those of the call, and `aval` is the type in the function: of another rank, maybe.
    """

    name: str
    path: str
    source: str
    role: Role
    aval: Any
    dims: Dims | None
    mesh: Mesh | AbstractMesh | None = None
    owing: Owing = NOTHING_OWED
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
        annotated = list(map(_annotated, jax.tree.leaves(arguments), slots))
        refs = {i: jax.new_ref(annotated[i]) for i, slot in enumerate(slots) if slot.is_ref}
        args, kwargs = tree.unflatten(refs.get(i, x) for i, x in enumerate(annotated))
        out = request.fun(*args, **kwargs)
        results, outs, out_tree = _results(request, slots, out)
        succeeded = [*_successors(slots, results), *refs]
        results += [replace(slots[i], path="", dims=None) for i in refs]
        traced.append((results, out_tree, succeeded))
        return list(map(_annotated, [*outs, *(ref[...] for ref in refs.values())], results, succeeded))

    flat.__signature__ = _signature(slots)  # type: ignore[attr-defined]
    made, refused = _make_jaxpr(flat, leaves, slots, request.mesh)
    jaxpr, closed_refs = _jax.without_closed_refs(made)
    results, out_tree, succeeded = traced[-1]
    closed = tuple(range(len(slots), len(slots) + len(closed_refs)))
    if closed:
        jaxpr = _succeeding(jaxpr, closed, request.mesh)
        results += [_closed_slot(ref, request) for ref in closed_refs]
        succeeded += closed
    jaxpr, consts = _jax.hoist_consts(with_made_constants(sites.settled(jaxpr, request.mesh)))
    consts = [*closed_refs, *consts]
    refs = (*(i for i, slot in enumerate(slots) if slot.is_ref), *closed)
    arguments = _described_arguments(request, slots, jaxpr, succeeded, len(closed))
    described = tuple(map(_described_result, results, succeeded))
    return Traced(jaxpr, consts, out_tree, refs, arguments, described, (slots, results), refused)


def _succeeding(jaxpr, numbers: Sequence[int], mesh: Mesh | AbstractMesh):
    """The program whose last results, each what a Ref holds in the end, succeed the arguments `numbers`."""

    def run(*args):
        outs = jaxpr_as_fun(jaxpr)(*args)
        for result, i in enumerate(numbers, len(outs) - len(numbers)):
            dims = (None,) * outs[result].ndim
            outs[result] = bind_annotation(outs[result], dims, CLOSED_REF, "implied", i)
        return outs

    with jax.sharding.use_abstract_mesh(abstract_mesh(auto_mesh(mesh))):
        return jax.make_jaxpr(run)(*map(shape_of, jaxpr.in_avals))


def _closed_slot(ref, request: Request) -> Slot:
    name = f"a Ref that {request.fun.__name__} closes over"
    return Slot(name, "", CLOSED_REF, "argument", _jax.value_type(ref), None, is_ref=True)


def arguments_of(request: Request) -> tuple[Argument, ...]:
    """The arguments, before anything is traced: which of them are state is not known then."""
    slots, _, _ = _arguments(request)
    return tuple(map(_argument, _paths(request), slots))


def retyped(program, before, traced: Traced) -> Any:
    """A program that was made of `before`, which is that of `traced` or was made of it: what is requested of
    the arguments and results that have other types here is requested of these too. Where none has, it is the
    program itself, which may be built already.
    """

    def other(new, old) -> bool:
        return (new.shape, new.dtype) != (old.shape, old.dtype)

    if not any(map(other, program.in_avals, before.in_avals)) and not any(
        map(other, program.out_avals, before.out_avals)
    ):
        return program

    def succeeded(result: Result, type) -> int | None:
        i = result.succeeds
        return None if i is None or other(program.in_avals[i], type) else i

    def run(*args):
        of_call, rest = args[: len(arguments)], args[len(arguments) :]
        old = before.in_avals[: len(arguments)]
        annotated = [
            _annotated(x, slot) if other(x, aval) else x
            for x, slot, aval in zip(of_call, arguments, old, strict=True)
        ]
        outs = jaxpr_as_fun(program)(*annotated, *rest)
        types = program.out_avals  # what is a number has none of its own
        of_results = zip(outs, types, results, before.out_avals, traced.results, strict=True)
        return [
            _annotated(x, slot, succeeded(result, type)) if other(type, aval) else x
            for x, type, slot, aval, result in of_results
        ]

    arguments, results = traced.slots
    return jax.make_jaxpr(run)(*map(shape_of, program.in_avals))


def _described_arguments(
    request: Request, slots: Sequence[Slot], jaxpr, succeeded, closed_refs: int
) -> tuple[Argument, ...]:
    """Those of the call, then what the function closes over: Refs, and constants, which never come back."""
    types = [(aval.shape, aval.dtype) for aval in jaxpr.in_avals[: len(slots) + closed_refs]]
    back = {(aval.shape, aval.dtype) for aval in jaxpr.out_avals}
    comes_back = state(types, back, [i for i in succeeded if i is not None])
    arguments = list(map(_argument, _paths(request), slots))
    arguments += [Argument("", shape_of(aval)) for aval in jaxpr.in_avals[len(slots) :]]
    return tuple(replace(argument, is_state=i in comes_back) for i, argument in enumerate(arguments))


def _described_result(result: Slot, succeeded: int | None) -> Result:
    path = "/".join(re.findall(r"\w+", result.path))
    return Result(path, shape_of(result.aval), _requested(result), succeeded)


def _argument(path: str, slot: Slot) -> Argument:
    return Argument(path, shape_of(slot.aval), _requested(slot), slot.donated)


def _requested(slot: Slot) -> PartitionSpec | None:
    if slot.dims is None:
        return None
    entries = (PartitionSpec.UNCONSTRAINED if dim is None else dim or None for dim in slot.dims)
    owing = slot.owing
    if not owing:
        return PartitionSpec(*entries)
    return _jax.owing_spec(entries, owing.unreduced, owing.reduced, owing.reduction)


def _paths(request: Request) -> list[str]:
    """ "state/params/w" of each flat argument, as plans have it."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path((request.args, request.kwargs))[0]]
    arguments = [request.argument_names[p[1].idx] if p[0].idx == 0 else p[1].key for p in paths]
    full = [(jax.tree_util.DictKey(name), *p[2:]) for name, p in zip(arguments, paths, strict=True)]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path in full]


def abstract_mesh(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    return AxisType.Explicit in mesh.axis_types


def _arguments(request: Request) -> tuple[list[Slot], list[Any], Any]:
    paths, leaves, tree = flatten((request.args, request.kwargs))
    # What in_shardings does not cover is left to completion.
    named = {name: request.kw_shardings.get(name) for name in request.kwargs}
    positional = broadcast_specs(request.in_shardings, request.args, "in_shardings", request.argument_names)
    specs = positional + broadcast_specs(named, request.kwargs, "in_shardings")
    slots = []
    for index, (path, x, spec) in enumerate(zip(paths, leaves, specs, strict=True)):
        name, rest = _argument_name(path, request.argument_names)
        aval = _jax.value_type(x)
        dims = dims_of(spec, aval.shape, request.mesh, f"argument {name}")
        told = aval if request.types is None else request.types[index]
        memory = _memory(spec) if memory_of(told) is memory_of(aval) else None  # transforms say where it is
        aval = told
        owing = owing_of_leaf(spec, aval.dtype, f"argument {name}")
        typed = None if _jax.is_ref(x) else explicit_sharding(x)
        for one in (owing, typed.owing if typed else owing):
            require_sum(one, f"argument {name} is unreduced over {', '.join(one.unreduced)}")
        source = f"in_shardings{path[len('[0]') :]}"
        fields = dims, own_mesh(spec), owing, memory, index in request.donated, _jax.is_ref(x)
        slots.append(Slot(name, rest, source, "argument", aval, *fields))
    return slots, leaves, tree


def _check_type(fun: Callable[..., Any], x, path: str) -> None:
    """Raises TypeError where a result is no array, in `jax.jit`'s words."""
    try:
        jax.typeof(x)
    except TypeError:
        code = getattr(inspect.unwrap(fun), "__code__", None)
        place = f" at {code.co_filename}:{code.co_firstlineno}" if code else ""
        at = f" at output component {path}" if path else ""
        raise TypeError(
            f"function {getattr(fun, '__name__', fun)}{place} traced for jit returned a value of type "
            f"{type(x)}{at}, which is not a valid JAX type"
        ) from None


def _check_no_ref(x, what: str, way_out: str) -> None:
    if _jax.is_ref(x):
        raise ValueError(f"{what} a Ref of shape {x.shape}, which shard_jit does not write to: {way_out}")


def _argument_name(path: str, argument_names: Sequence[str]) -> tuple[str, str]:
    """ "[0][1]['w']" of the tree (args, kwargs) -> "state['w']" and the path inside the argument."""
    side, _, tail = path[1:].partition("]")
    key, _, rest = tail[1:].partition("]")
    return (argument_names[int(key)] if side == "0" else key.strip("'")) + rest, rest


def _results(request: Request, slots: Sequence[Slot], out) -> tuple[list[Slot], list[Any], Any]:
    paths, leaves, tree = flatten(out)
    specs = broadcast_specs(request.out_shardings, out, "out_shardings")
    typed = all(_divides(slot, request.mesh) for slot in slots)
    known = all(map(_is_typed, jax.tree.leaves((request.args, request.kwargs)), slots))
    results = []
    for path, x, spec in zip(paths, leaves, specs, strict=True):
        _check_type(request.fun, x, path)
        _check_no_ref(x, f"result{path} is", "return what it holds, ref[...]")
        dims = dims_of(spec, jax.numpy.shape(x), request.mesh, f"result{path}")
        source, aval, role = f"out_shardings{path}", jax.typeof(x), "result"
        owing = owing_of_leaf(spec, jax.numpy.result_type(x), f"result{path}")
        require_explicit(owing, own_mesh(spec) or request.mesh, f"result{path} is unreduced or reduced")
        if dims is None and typed and (requested := _type_of_result(x, known, request.mesh)):
            dims, owing = requested.dims, requested.owing
            require_sum(owing, f"result{path} is unreduced over {', '.join(owing.unreduced)}")
            source, role = f"the type of result{path}", "type"
        fields = dims, own_mesh(spec), owing, _memory(spec)
        results.append(Slot(f"result{path}", path, source, role, aval, *fields))
    return results, leaves, tree


def _divides(slot: Slot, mesh: Mesh | AbstractMesh) -> bool:
    """Whether the type of an argument can be what is requested of it: on this mesh, and dividing it."""
    if (dims := _dims(slot, len(slot.aval.shape))) is None:
        return True
    requested = Sharding(tuple(dim or () for dim in dims))
    return _is_on(requested, mesh) and at_rest(requested, slot.aval.shape, mesh.shape) == requested


def _is_on(sharding: Sharding, mesh: Mesh | AbstractMesh) -> bool:
    owing = sharding.owing
    return {*sharding.axes, *owing.unreduced, *owing.reduced} <= set(mesh.axis_names)


def _is_typed(x, slot: Slot) -> bool:
    """Whether an argument has a type, or in_shardings gives it one, or it is a scalar, which has but one;
    else the one that it is traced with says nothing."""
    return (
        not slot.aval.shape
        or explicit_sharding(x) is not None
        or slot.dims is not None
        and None not in slot.dims
    )


def _type_of_result(x, known: bool, mesh: Mesh | AbstractMesh) -> Sharding | None:
    """What the Explicit type of a result requests, on a mesh without Auto axes, which might split more: as
    JAX has it if the types of all arguments are `known`, else if it names an axis, for a function of arrays
    without types may have annotations in it.
    """
    sharding = explicit_sharding(x)
    own = jax.typeof(x).sharding.mesh
    if sharding is None or AxisType.Auto in own.axis_types or own.shape != mesh.shape:
        return None  # on another mesh, of what the function closes over
    return sharding if known or sharding.axes or sharding.owing else None


def _successors(slots: Sequence[Slot], results: Sequence[Slot]) -> list[int | None]:
    """For each result the donated argument that it succeeds: of its path and type, else the first free one of
    its type. Those go first whose sharding is not requested, as they take that of the argument.
    """
    free: dict[tuple, dict[int, Slot]] = {}
    for i, slot in enumerate(slots):
        if slot.donated:
            free.setdefault(_type_of(slot), {})[i] = slot
    succeeded: list[int | None] = [None] * len(results)
    for requested, same_path in itertools.product((False, True), (True, False)):
        for r, result in enumerate(results):
            alike = free.get(_type_of(result), {})
            candidates = (i for i, slot in alike.items() if not same_path or result.path.endswith(slot.path))
            open_ = succeeded[r] is None and (result.dims is not None) == requested
            if open_ and (first := next(candidates, None)) is not None:
                succeeded[r] = first
                del alike[first]
    return succeeded


def _type_of(slot: Slot) -> tuple[tuple[int, ...], Any]:
    return slot.aval.shape, slot.aval.dtype


def _annotated(x, slot: Slot, succeeded: int | None = None):
    """`x` as requested; where nothing is, and it succeeds an argument, as that one."""
    rank = len(jax.numpy.shape(x))
    if (dims := _dims(slot, rank)) is not None:
        x = bind_annotation(x, dims, slot.source, slot.role, mesh=slot.mesh, owing=slot.owing)
    elif succeeded is not None:
        source = f"{slot.name}, which succeeds an argument"
        x = bind_annotation(x, (None,) * rank, source, "implied", succeeded, slot.mesh)
    return x if slot.memory in (None, memory_of(jax.typeof(x))) else jax.device_put(x, slot.memory)


def _dims(slot: Slot, rank: int) -> Dims | None:
    """What is requested of a value in this slot: nothing, where it has another rank than in the call."""
    return slot.dims if slot.dims is not None and len(slot.dims) == rank else None


def _memory(spec) -> Any:
    """The memory that a sharding requests, None where it requests none."""
    spec = spec.sharding if isinstance(spec, Format) else spec
    kind = spec.memory_kind if isinstance(spec, NamedSharding) else None
    return None if kind is None else jax.memory.Space.Device if kind == "device" else jax.memory.Space.Host


def _make_jaxpr(
    flat: Callable[..., Any], leaves: Sequence[Any], slots: Sequence[Slot], mesh: Mesh | AbstractMesh
):
    """Under the types of an Explicit mesh, as `jax.jit` traces; what JAX refuses there, which is less than we
    can do, without types.

    A product whose result two operands would split alike, or a size that does not divide, has no type: the
    function is traced again in the Auto twin of the mesh, and completion decides. That context allows no
    Explicit array that the function closes over, which the empty one allows, as it allows islands over
    another mesh than the program's; and there `with mesh:` gives bare specs their mesh. On an Auto mesh the
    empty context is tried where a rule of JAX's has none. What the function raises for reasons of its own, it
    raises at once: it is run once, and no other context's error stands for it.
    """
    auto, empty = abstract_mesh(auto_mesh(mesh)), AbstractMesh((), ())
    attempts = [lambda: _traced(flat, leaves, slots, auto)]
    if is_explicit(mesh):
        typed = lambda: _traced_typed(flat, leaves, slots, abstract_mesh(mesh), auto)  # noqa: E731
        attempts = [typed, *attempts, lambda: _traced(flat, leaves, slots, empty)]
    errors: list[Exception] = []
    for attempt in attempts:
        try:
            return attempt(), _refusal(errors[0]) if errors and is_explicit(mesh) else ""
        except Exception as error:
            if not _jax.is_of_context(error):
                raise
            errors.append(error)
    if any(map(_jax.wants_own_mesh, errors)) or not is_explicit(mesh) and _jax.lacks_rule(errors[0]):
        try:
            with _jax.legacy_mesh(auto_mesh(mesh)) if isinstance(mesh, Mesh) else nullcontext():
                return _traced(flat, leaves, slots, empty), ""
        except Exception as error:
            if not _jax.is_of_context(error):
                raise
    raise errors[0]  # in the user's own context, so this is the one that `jax.jit` raises too


def _refusal(error: Exception) -> str:
    """JAX's first sentence, or the kind of its error where it has no words, and the user's line."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _jax.is_users_file(f.filename)]
    at = f" (at {line_text(f'{frames[-1].filename}:{frames[-1].lineno}')})" if frames else ""
    words = str(error) or type(error).__name__
    return re.split(r"(?<=[a-z`\])])\. |\n", words)[0].rstrip(".") + at


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
    arguments = list(dict.fromkeys(slot.argument for slot in slots))
    valid = [
        name if name.isidentifier() and not iskeyword(name) else f"argument_{i}"
        for i, name in enumerate(arguments)
    ]
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in valid])


def _type(x, slot: Slot, mesh: AbstractMesh) -> NamedSharding:
    """The type of an argument: as in_shardings requests, else the one that it has."""
    dims, shape = _dims(slot, len(slot.aval.shape)), slot.aval.shape
    requested = Sharding(tuple(dim or () for dim in dims), slot.owing) if dims is not None else None
    sharding = requested if requested and (dims or slot.owing) else explicit_sharding(x)
    if sharding is None or len(sharding.dims) != len(shape) or not _is_on(sharding, mesh):
        return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, at_rest(sharding, shape, mesh.shape).spec)  # types divide
