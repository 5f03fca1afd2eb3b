"""Annotations: the sharding that the user requests of a value, as an equation of the global program."""

from collections.abc import Collection, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import jax
from jax.experimental.layout import Format, Layout
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardax import _jax
from shardax.sharding import (
    NOTHING_OWED,
    Axes,
    Owing,
    Sharding,
    entries_of,
    entry_axes,
    from_spec,
    owing_of,
    owing_words,
    shard_count,
)
from shardax.validation import require_array

Dims = tuple[Axes | None, ...]  # per dim the axes that split it, None where completion decides


@_jax.boundary
def annotate(x, spec):
    """`x` with its arrays split as `spec` says. Inside `shard_jit` this is an annotation; outside, it places
    the arrays. A spec that is unreduced over axes, P("x", unreduced={"y"}), has the value made so that its
    sum over y is still to be done; one that is reduced over them asks that of the gradient.

    Args:
      x: a pytree of arrays.
      spec: a PartitionSpec, a NamedSharding or None, or a tree of them that is a prefix of `x`.

    Raises ValueError where a spec does not fit its array or the mesh, and, outside `shard_jit`, where there
    is no mesh.

    >>> mesh = jax.make_mesh((1,), ("x",))
    >>> annotate(jax.numpy.zeros((8, 4)), NamedSharding(mesh, PartitionSpec("x"))).sharding.spec[0]
    'x'
    """
    place = _put if _jax.is_eager(x) else _record
    paths, leaves, tree = flatten(x)
    specs = broadcast_specs(spec, x, "spec")
    labels = [f"annotate's {path or 'value'}" for path in paths]
    for leaf, name in zip(leaves, labels, strict=True):
        require_array(leaf, name)
    return tree.unflatten(map(place, leaves, specs, labels))


def replicate(x):
    """`x`, of which every device holds all. See `annotate`.

    >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
    ...     replicate(jax.numpy.zeros((8, 4))).sharding.is_fully_replicated
    True
    """
    return annotate(x, PartitionSpec())


Role = Literal["inside", "state", "argument", "result", "type", "implied", "stack", "one device"]
"""Whether an annotation stands inside the function, stands there on what is stored of state (it spreads with
that, after the data), is that of an argument or of a result (in_shardings,
out_shardings), that of the Explicit type of a result, or is implied: by another type, by the specs of an
island or of a jit, by what the result succeeds. A "stack" is implied, too: what an island over some of the
axes takes or gives, whose sums may stay pending.
One with the role "one device" requests nothing: it is lowered for one device only (see `for_one_device`).
"""

annotate_p = Primitive("annotate")
"""annotate x: the value x, with `dims`, per dim the axes that split it, or None where it is open
(UNCONSTRAINED), its `role`, and `source`, the words in which messages name the annotation, such as
"in_shardings[0]['params']". The axes are those of `mesh`; None is the program's. `owing` says of which
reductions the value is to be pending, and of which its cotangent. Where `like` is not None,
the value is a result that succeeds the donated argument of that index among the program's inputs, and rests
as that does."""

SAVED = "what the forward part saved"
"""The `source` of annotations on residuals, between two programs; where both become part of one program, they
say nothing.
"""


def dims_of(spec, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, what: str) -> Dims | None:
    """The dims that a spec gives to an array, in the axes of its own mesh where it has one; None where it
    requests nothing.

    `what` names both in messages. ValueError where they do not fit, or the spec's mesh has other devices than
    `mesh`.

    >>> dims_of(PartitionSpec("x", PartitionSpec.UNCONSTRAINED), (8, 4, 2), AbstractMesh((4,), ("x",)), "a")
    (('x',), None, ())
    """
    spec = _plain(_unboxed(spec, shape, what), shape, mesh, what)
    if spec is None or spec is PartitionSpec.UNCONSTRAINED:
        return None
    if isinstance(spec, NamedSharding):
        check_devices(spec.mesh, spec.spec, mesh, f"{what} is given a NamedSharding")
        spec, mesh = spec.spec, spec.mesh
    if not isinstance(spec, PartitionSpec):
        raise _no_sharding(spec, what)
    dims = dims_of_entries(spec)
    _check_dims(dims, spec, shape, mesh, what)
    return dims + ((),) * (len(shape) - len(dims))


def dims_of_entries(spec: PartitionSpec) -> Dims:
    """The axes of each entry of a spec, None where it is open."""
    return tuple(
        None if entry is PartitionSpec.UNCONSTRAINED else entry_axes(entry) for entry in entries_of(spec)
    )


def owing_of_leaf(spec, dtype, what: str) -> Owing:
    """What a leaf of a tree of shardings says of reductions. ValueError where values of this dtype have none.

    >>> owing_of_leaf(PartitionSpec(unreduced={"x"}), "float32", "a").unreduced
    ('x',)
    """
    spec = spec.sharding if isinstance(spec, Format | jax.ShapeDtypeStruct) else spec
    spec = spec.spec if isinstance(spec, NamedSharding) else spec
    if not isinstance(spec, PartitionSpec):
        return NOTHING_OWED
    owing = owing_of(spec)
    if owing.unreduced and not jax.numpy.issubdtype(dtype, jax.numpy.number):
        raise ValueError(
            f"{what} of dtype {dtype} is given {_text(spec)}, and only numbers are summed: drop unreduced="
        )
    return owing


def _no_sharding(spec, what: str) -> ValueError:
    return ValueError(f"{what}: {spec!r} is no sharding; give a PartitionSpec, a NamedSharding or None")


def flatten(tree):
    """The paths, as a person would type them, the leaves, and the structure of a pytree."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path) for path, _ in pairs], [leaf for _, leaf in pairs], structure


def broadcast_specs(specs, tree, name: str, argument_names: Sequence[str] = ()) -> list[Any]:
    """For each leaf of `tree` the spec that the prefix tree `specs`, which messages call `name`, gives to
    it. `argument_names`: of the arguments, where `tree` is a tuple of these.
    """
    try:
        return jax.tree.structure(tree).flatten_up_to(jax.tree.broadcast(specs, tree, is_leaf=is_spec))
    except ValueError as error:
        _check_names(specs, tree, name, argument_names)
        whose = (
            "the tuple of positional arguments that are not static"
            if name == "in_shardings"
            else "the values that it is for"
        )
        raise ValueError(
            f"the tree {name} is no prefix of {whose}: give one sharding for a whole subtree, or the same "
            f"keys.\n{_jax.prefix_error(specs, tree, name, is_spec) or error}"
        ) from None


def _check_names(specs, tree, name: str, argument_names: Sequence[str]) -> None:
    """Raises ValueError where a plain tuple of names in `specs`, which do not fit, is meant as a spec."""

    def is_leaf(x) -> bool:
        return is_spec(x) or is_names(x)

    try:
        full = jax.tree.structure(tree).flatten_up_to(jax.tree.broadcast(specs, tree, is_leaf=is_leaf))
    except ValueError:
        return
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    found = next((pair for pair in zip(pairs, full, strict=True) if is_names(pair[1])), None)
    if found is not None:
        (path, x), names = found
        shape, place = jax.numpy.shape(x), jax.tree_util.keystr(path[1:] if argument_names else path)
        if not argument_names:
            raise ValueError(f"{name}{place}, for a value of shape {shape}, is {plain_names(names)}")
        argument = f"argument {argument_names[path[0].idx]}{place} of shape {shape}"
        raise ValueError(f"{argument} is given, in {name}, {plain_names(names)}")


def is_names(x) -> bool:
    """Whether it is a plain tuple or list of what a PartitionSpec may have, names of axes among it."""
    if type(x) not in (tuple, list) or not x:
        return False
    names = [e for entry in x for e in (entry if type(entry) in (tuple, list) else (entry,))]
    return all(e is None or isinstance(e, str) for e in names) and any(isinstance(e, str) for e in names)


def plain_names(names) -> str:
    """What messages say of a plain tuple of names."""
    spec = PartitionSpec(*(tuple(entry) if isinstance(entry, list) else entry for entry in names))
    return f"{names!r}, a plain {type(names).__name__}, which is no sharding: give {_text(spec)}"


def is_spec(x) -> bool:
    """Whether it is a leaf of a tree of shardings. A box counts by its names, unless what it holds are
    shardings: then it is a box in the tree, as what `jax.tree.map` makes of boxed parameters.
    """
    if _is_sharding(x) or isinstance(x, jax.ShapeDtypeStruct):
        return True
    return isinstance(x, Box) and not any(map(_is_sharding, jax.tree.leaves(x, is_leaf=_is_sharding)))


def _is_sharding(x) -> bool:
    return x is None or isinstance(x, PartitionSpec | jax.sharding.Sharding | Format)


@runtime_checkable
class Box(Protocol):
    """A value with names for its dims, as Flax's linen makes them (`nn.Partitioned`); its names count, not
    its value.
    """

    def unbox(self): ...

    def get_partition_spec(self) -> PartitionSpec: ...


def _unboxed(spec, shape: tuple[int, ...], what: str):
    """The spec in a box or an abstract array; any other spec as it is."""
    if not _is_sharding(spec) and isinstance(spec, Box):  # a protocol is slow to ask for
        from shardax.annotations.boxes import box_spec  # flax is an extra, and installed where its boxes are

        return box_spec(spec)  # type: ignore[arg-type]
    if isinstance(spec, jax.ShapeDtypeStruct):
        if spec.shape != shape:
            raise ValueError(
                f"{what} of shape {shape} is given the sharding of an abstract array of shape {spec.shape}: "
                "give its own"
            )
        return spec.sharding
    return spec


def _plain(spec, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, what: str):
    """`jax.jit`'s other leaves as ours: the sharding of a Format, the spec of a sharding without a mesh, None
    for what is unspecified.
    """
    if isinstance(spec, Format):
        own = isinstance(spec.layout, Layout) and tuple(spec.layout.major_to_minor) == tuple(
            range(len(shape))
        )
        if spec.layout not in (None, Layout.AUTO) and not own:
            raise ValueError(
                f"{what} of shape {shape} is given a Format with the layout {spec.layout}, and shard_jit "
                "leaves layouts to XLA: give the Format's sharding, and bring arrays into a layout with "
                "jax.device_put outside"
            )
        spec = spec.sharding
    if spec is _jax.UNSPECIFIED:
        return None
    if not isinstance(spec, jax.sharding.Sharding) or isinstance(spec, NamedSharding):
        return spec
    if isinstance(mesh, Mesh) and spec.device_set != set(mesh.devices.flat):
        own = sorted(d.id for d in spec.device_set)
        raise ValueError(
            f"{DIFFERING_DEVICES}. That is, {what} of shape {shape} is given {spec} on devices {own}, but "
            f"the mesh ({describe(mesh)}) is of devices {_ids(mesh)}: give a PartitionSpec, P() for all of "
            "it on every device"
        )
    named = _jax.spec_on(spec, mesh, len(shape))
    if named is None:
        raise ValueError(
            f"{what} of shape {shape} is given {spec}, which is not split over whole axes of the mesh "
            f"({describe(mesh)}) in the order of its devices: give a NamedSharding"
        )
    return named


def describe(mesh: Mesh | AbstractMesh) -> str:
    """ "x=4, y=2", for messages."""
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items())


def _check_dims(
    dims: Dims, spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, what: str
) -> None:
    what = f"{what} of shape {shape} is given {_text(spec)}"
    owing = owing_of(spec)
    axes = [axis for dim in dims for axis in dim or ()]
    if len(dims) > len(shape):
        raise ValueError(
            f"{what}, with {len(dims)} entries for {len(shape)} dims: drop the entries past the array's rank"
        )
    for axis in (*axes, *owing.unreduced, *owing.reduced):
        if axis not in mesh.shape:
            raise ValueError(
                f"{what}, but the mesh ({describe(mesh)}) has no axis {axis!r}: name one of its axes, or "
                "give a mesh with it"
            )
        if axes.count(axis) > 1:
            places = " and ".join(str(d) for d, dim in enumerate(dims) for a in dim or () if a == axis)
            raise ValueError(
                f"{what}, which uses axis {axis!r} twice, for dims {places}: an axis splits at most one dim, "
                "drop one of its uses"
            )


class OtherDevices(ValueError):
    """Raised where an annotation is on a mesh that has other devices than the program's."""

    def program_named(self, where: str) -> "OtherDevices":
        """The same error, with words that say who named the program's mesh."""
        self.args = (self.args[0].replace("the program's mesh is (", f"the program's mesh{where} is ("),)
        return self


DIFFERING_DEVICES = "Received incompatible devices for jitted computation"  # as `jax.jit` says it


def check_devices(
    own: Mesh | AbstractMesh, spec: PartitionSpec | None, mesh: Mesh | AbstractMesh, what: str
) -> None:
    """Raises OtherDevices where `own`, the mesh of a spec or, without one, of a shard_map, has not the
    program's devices.
    """
    known = _devices(own), _devices(mesh)
    if own.size == mesh.size and (None in known or set(known[0]) == set(known[1])):  # type: ignore[arg-type]
        return
    way_out = "leave out its mesh=" if spec is None else f"give its spec {_text(spec)} alone"
    raise OtherDevices(
        f"{DIFFERING_DEVICES}. That is, {what} on the mesh ({describe(own)}) of devices {_ids(own)}, but the "
        f"program's mesh is ({describe(mesh)}) of devices {_ids(mesh)}: {way_out}, or build it on the "
        "program's mesh"
    )


def _devices(mesh: Mesh | AbstractMesh) -> tuple[Any, ...] | None:
    return tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else None


def _ids(mesh: Mesh | AbstractMesh) -> str:
    devices = _devices(mesh)
    if devices is None:
        return "unknown (an AbstractMesh)"
    shown = ", ".join(str(d.id) for d in devices[:8])
    return f"[{shown}{', ...' if len(devices) > 8 else ''}]"


def _text(spec: PartitionSpec) -> str:
    """As a person types it; JAX's own text depends on its version."""
    entries = ["P.UNCONSTRAINED" if s is PartitionSpec.UNCONSTRAINED else repr(s) for s in entries_of(spec)]
    return f"P({', '.join([*entries, *owing_words(owing_of(spec))])})"


def _record(x, spec, what: str):
    mesh = _jax.context_mesh() or own_mesh(spec)
    if mesh is None:
        raise ValueError(_no_mesh(what))
    mesh = own_mesh(spec) or mesh  # whose devices are looked at where the program's are known
    what = f"{what} at {_jax.current_line() or 'an unknown line'}"
    dims = dims_of(spec, jax.numpy.shape(x), mesh, what)
    if dims is None:
        return x
    owing = owing_of_leaf(spec, jax.numpy.result_type(x), what)
    x = bind_annotation(x, dims, "annotate", "inside", mesh=own_mesh(spec), owing=owing)
    return x if owing else _typed(x, dims)


TYPE_OF_ANNOTATION = "type_of_annotation"  # the scope of what only types a value


def _typed(x, dims: Dims):
    """`x` with the type that the annotation gives it where all axes are Explicit: an open dim keeps its
    other axes, and one that its axes do not divide has none.
    """
    own = getattr(jax.typeof(x), "sharding", None)
    if own is None or any(kind is not AxisType.Explicit for kind in own.mesh.axis_types) or own.mesh.empty:
        return x
    sizes, closed = own.mesh.shape, {axis for dim in dims for axis in dim or ()}
    if not closed <= sizes.keys():
        return x
    spec = []
    for n, dim, before in zip(x.shape, dims, from_spec(own.spec, x.ndim).dims, strict=True):
        axes = tuple(a for a in before if a not in closed) if dim is None else dim
        spec.append(axes if n % shard_count(axes, sizes) == 0 else ())
    with jax.named_scope(TYPE_OF_ANNOTATION):
        return jax.sharding.reshard(x, NamedSharding(own.mesh, PartitionSpec(*spec)))


def _put(x, spec, what: str):
    if spec is None:
        return x
    if not is_spec(spec):
        raise _no_sharding(spec, what)
    mesh = own_mesh(spec) or _jax.context_mesh()
    if mesh is None or isinstance(mesh, AbstractMesh):
        raise ValueError(_no_mesh(what))
    dims = dims_of(spec, jax.numpy.shape(x), mesh, what)
    if owing := owing_of_leaf(spec, jax.numpy.result_type(x), what):
        require_explicit(owing, mesh, f"{what} is unreduced or reduced")
        x = jax.numpy.asarray(x)  # device_put makes no NumPy array owe a sum
    if isinstance(spec, NamedSharding):
        return jax.device_put(x, spec)
    closed = tuple(dim or () for dim in dims or ())
    return jax.device_put(x, NamedSharding(mesh, Sharding(closed, owing).spec))


def require_explicit(owing: Owing, mesh: Mesh | AbstractMesh, what: str) -> None:
    """Raises ValueError where an array between calls cannot owe this: the mesh has axes of other types than
    JAX wants for that, or it is no sum.
    """
    require_sum(owing, what)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for axis in (*owing.unreduced, *owing.reduced):
        if axis in types and types[axis] is not AxisType.Explicit:
            raise ValueError(
                f"{what}, but axis {axis!r} of the mesh ({describe(mesh)}) is {types[axis].name}, and a "
                "jax.Array is unreduced or reduced over Explicit axes only: make the mesh with "
                "axis_types=(AxisType.Explicit, ...), or request it of a value inside, with sx.annotate"
            )


def require_sum(owing: Owing, what: str) -> None:
    """Raises ValueError where an argument or result owes another reduction."""
    if owing.reduction != "sum":
        raise ValueError(
            f"{what}, unreduced_kind={owing.reduction}, and what comes into shard_jit or leaves it may owe "
            f"sums only: take the {owing.reduction} before, with jax.sharding.reshard, or inside"
        )


def _no_mesh(what: str) -> str:
    return f"{what}: there is no mesh to place it on; enter one with jax.set_mesh, or give a NamedSharding"


def own_mesh(spec) -> Mesh | AbstractMesh | None:
    """The mesh that a spec brings with it."""
    spec = spec.sharding if isinstance(spec, Format | jax.ShapeDtypeStruct) else spec
    return spec.mesh if isinstance(spec, NamedSharding) else None


def bind_annotation(
    x,
    dims: Dims,
    source: str,
    role: Role = "implied",
    like: int | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    owing: Owing = NOTHING_OWED,
):
    """The `annotate` equation itself, without any check."""
    return annotate_p.bind(x, dims=dims, source=source, role=role, like=like, mesh=mesh, owing=owing)


def renumbered(jaxpr, kept: Sequence[bool]):
    """A jaxpr that has lost the inputs that are not `kept`, its `like`s, which are numbers of inputs, adapted
    to that.
    """
    numbers = {old: new for new, old in enumerate(i for i, keep in enumerate(kept) if keep)}
    return _with_numbers(jaxpr, numbers)


def unlinked(jaxpr, numbers: Collection[int]):
    """A jaxpr, none of whose `like`s is one of these numbers of inputs."""
    return _with_numbers(jaxpr, {i: i for i in range(len(jaxpr.in_avals)) if i not in numbers})


def _with_numbers(jaxpr, numbers: dict[int, int]):
    return _jax.replaced_eqns(jaxpr, [_renumbered(eqn, numbers) for eqn in jaxpr.eqns])


def _renumbered(eqn, numbers: dict[int, int]):
    like = eqn.params["like"] if eqn.primitive is annotate_p else None
    if like is None or numbers.get(like) == like:
        return eqn
    return eqn.replace(params={**eqn.params, "like": numbers.get(like)})


def for_one_device(x, name: str):
    """An argument of the function `name`, which is traced where no mesh is known: were it run on several
    devices, XLA would partition it, and nobody would know.
    """
    return bind_annotation(x, (None,) * jax.numpy.ndim(x), name, "one device")


def _lower(ctx, x, *, role, source, **params):
    if role == "one device" and (count := _jax.device_count(ctx)) > 1:
        raise ValueError(
            f"shard_jit({source}) was traced where it found no mesh, so as jax.jit(fun) for one device, and "
            f"now it is to run on {count} devices: give it mesh=, or call what is around it under "
            "jax.set_mesh(mesh)"
        )
    return [x]


def _transpose(ct, x, *, owing, **params):
    return [_moved(ct, owing=owing.transposed, **params)]


def _jvp(primals, tangents, **params):
    (x,), (t,) = primals, tangents
    return annotate_p.bind(x, **params), _moved(t, **params)


def _moved(t, **params):
    return t if type(t) is ad.Zero else annotate_p.bind(t, **{**params, "like": None})


def _batch(axis_data, args, batch_dims, *, dims, source, mesh, **params):
    """The new dim is split over vmap's spmd_axis_name, an axis of the same mesh, and open without one."""
    (x,), (d,) = args, batch_dims
    params |= {"source": source, "mesh": mesh}
    if d is None:
        return annotate_p.bind(x, dims=dims, **params), d
    name = axis_data.spmd_name
    new = None if name is None else entry_axes(name)
    for axis in new or ():
        if mesh is not None and axis not in mesh.shape:
            raise ValueError(
                f"{source} is on the mesh ({describe(mesh)}), which has no axis {axis!r}, but vmap's "
                "spmd_axis_name splits the new dim over it: name an axis of that mesh, or annotate with "
                "the program's"
            )
        if axis in (*params["owing"].unreduced, *params["owing"].reduced):
            raise ValueError(
                f"{source} is unreduced or reduced over axis {axis!r}, and vmap's spmd_axis_name splits the "
                "new dim over it: drop one of the two"
            )
    return annotate_p.bind(x, dims=(*dims[:d], new, *dims[d:]), **params), d


def _again(saveable, unknown, instantiated, eqn):
    """The rule for policies of `jax.checkpoint`. What they save is the value, not its annotation, so the
    backward pass annotates again.
    """
    if unknown[0]:
        return None, eqn, [True], [True], []
    return (
        eqn,
        eqn,
        [False],
        [True],
        [v for v in eqn.invars if not instantiated[0] and not _jax.is_literal(v)],
    )


annotate_p.def_impl(lambda x, **params: x)
annotate_p.def_abstract_eval(lambda x, **params: x)
ad.primitive_jvps[annotate_p] = _jvp
ad.primitive_transposes[annotate_p] = _transpose
batching.fancy_primitive_batchers[annotate_p] = _batch
pe.partial_eval_jaxpr_custom_rules[annotate_p] = _again
mlir.register_lowering(annotate_p, _lower)
