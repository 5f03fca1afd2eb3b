"""Function: what the user gave shard_jit, and what follows from it for a call: which mesh, which leaves,
which errors.
"""

import functools
import re
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, reshard

from shardax import _jax, collector
from shardax.annotations.annotate import (
    DIFFERING_DEVICES,
    broadcast_specs,
    describe,
    flatten,
    for_one_device,
    is_spec,
)
from shardax.annotations.explicit import auto_mesh, explicit_sharding, memory_of
from shardax.jit.signature import argument_name, positional_names, shardings_by_name
from shardax.jit.transforming import traced_as, transformed
from shardax.ledger.lines import line_text
from shardax.meshes.crossing import Crossing, entering
from shardax.options import Options, Refused, in_effect
from shardax.sharding import from_spec, owing_of
from shardax.trace import Request, Traced, abstract_mesh, is_explicit
from shardax.transform import primitive
from shardax.transforms import Context, Retyping, Transform, Wrapping
from shardax.validation import require_sizes


@dataclass(frozen=True, eq=False)
class Function:
    """What the user gave: the arguments of `shard_jit`, names and numbers of arguments inferred from one
    another.
    """

    fun: Callable[..., Any]
    mesh: Mesh | AbstractMesh | None
    mesh_named_by: str
    in_shardings: Any
    out_shardings: Any
    static: tuple[tuple[int, ...], tuple[str, ...]]
    donated: tuple[tuple[int, ...], tuple[str, ...]]
    transforms: tuple[Transform, ...]
    options: Options
    of_jit: Mapping[str, Any] = field(default_factory=dict)  # arguments that `jax.jit` alone reads

    refused: weakref.WeakKeyDictionary[Any, str] = field(default_factory=weakref.WeakKeyDictionary)
    """By the global program: why JAX gave no Explicit types, and where; see `Traced`."""

    @property
    def name(self) -> str:
        return getattr(self.fun, "__name__", "a function")

    @property
    def place(self) -> str:
        """ "train_step at models/steps.py:34"; the name alone of what has no Python code."""
        name, line = self._defined
        return f"{name} at {line_text(line)}" if line else name

    @property
    def line(self) -> str:
        """ "/home/me/models/steps.py:34", "" of what has no Python code."""
        return self._defined[1]

    @property
    def _defined(self) -> tuple[str, str]:
        fun = self.fun
        while isinstance(fun, functools.partial) or hasattr(fun, "__wrapped__"):
            fun = fun.func if isinstance(fun, functools.partial) else fun.__wrapped__
        code = getattr(fun, "__code__", getattr(type(fun).__call__, "__code__", None))
        name = getattr(fun, "__name__", type(fun).__name__)
        return name, f"{code.co_filename}:{code.co_firstlineno}" if code else ""

    @functools.cached_property
    def wrapped(self) -> Callable[..., Any]:
        """The function as the transforms take it, the first of them next to it."""
        wrapping = (transform for transform in self.transforms if isinstance(transform, Wrapping))
        return functools.reduce(lambda fun, transform: transform.wrapped(fun), wrapping, self.fun)

    def jitted(self, arguments_mesh: Mesh | AbstractMesh | None, out_shardings: Any = None):
        """The jax.jit of it. `arguments_mesh` is the mesh of the arguments, where nothing else gives one."""

        @functools.wraps(self.fun)
        def run(*args, **kwargs):
            eager = jax.config.jax_disable_jit or _jax.is_eager((args, kwargs))  # type: ignore[attr-defined]  # debug_nans
            if eager and not self._retypes:
                return self.wrapped(*args, **kwargs)
            mesh = self.require_mesh(arguments_mesh)
            self._check_context(mesh)
            if eager and not self._retypes_arguments(mesh, args, kwargs):
                return self.wrapped(*args, **kwargs)
            return self._run(mesh, args, kwargs)

        return self._jit(run, {} if out_shardings is None else {"out_shardings": out_shardings})

    def jitted_for_one_device(self):
        """The jax.jit of it where there is no mesh."""

        @functools.wraps(self.fun)
        def run(*args, **kwargs):
            if jax.config.jax_disable_jit or _jax.is_eager((args, kwargs)):  # type: ignore[attr-defined]
                return self.fun(*args, **kwargs)
            static = self._static_nums(len(args))
            args = [x if i in static else self._for_one_device(x) for i, x in enumerate(args)]
            kwargs = {k: x if k in self.static[1] else self._for_one_device(x) for k, x in kwargs.items()}
            return self.fun(*args, **kwargs)

        named = {"in_shardings": self.in_shardings, "out_shardings": self.out_shardings}
        return self._jit(run, {k: s for k, s in named.items() if jax.tree.leaves(s)})

    def _for_one_device(self, tree):
        return jax.tree.map(lambda x: x if _jax.is_ref(x) else for_one_device(x, self.name), tree)

    def _jit(self, run: Callable[..., Any], named: Mapping[str, Any]):
        (static_argnums, static_argnames), (donate_argnums, donate_argnames) = self.static, self.donated
        return jax.jit(
            run,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            **named,
            **self.of_jit,
        )

    def for_one_device(self, args, kwargs) -> bool:
        """Whether it runs as under `jax.jit`: there is no mesh, no sharding that would need one, and no array
        on several devices. What is traced around it may turn out to run on several: see `for_one_device`.
        """
        shardings = jax.tree.leaves((self.in_shardings, self.out_shardings), is_leaf=is_spec)
        return (
            self.mesh_for(args, kwargs) is None
            and not self.transforms
            and all(map(_on_one_device, shardings))
            and not any(len(_devices(x)) > 1 for _, x in self.named_leaves(args, kwargs))
        )

    @property
    def _retypes(self) -> bool:
        """Whether the arguments may be of other types than the function takes."""
        return any(isinstance(transform, Retyping) for transform in self.transforms)

    def _retypes_arguments(self, mesh: Mesh | AbstractMesh, args, kwargs) -> bool:
        """Whether the transforms take these arguments, or give the results, in other types than the function
        does. Padded arrays are not meant: the function as they take it cuts them.
        """
        with jax.sharding.use_abstract_mesh(abstract_mesh(auto_mesh(mesh))):
            request = self._request(mesh, args, kwargs)
            traced, jaxpr = self._traced(request, self._static_values(args, kwargs))
        own = (x.type for x in (*traced.arguments, *traced.results))
        return any(
            (a.shape, a.dtype, memory_of(a)) != (b.shape, b.dtype, memory_of(b))
            for a, b in zip(own, (*jaxpr.in_avals, *jaxpr.out_avals), strict=True)
        )

    def known_mesh(self) -> Mesh | AbstractMesh | None:
        """The mesh that was given, else that of the context; None where that is abstract, and arguments may
        have its devices.
        """
        context = self.mesh or _jax.context_mesh()
        return context if self.mesh or isinstance(context, Mesh) else None

    def arguments_mesh(self, args, kwargs) -> Mesh | AbstractMesh | None:
        """The mesh of the arguments where none is known; with the axes of an abstract one in context."""
        return None if self.known_mesh() else _of_context(mesh_of((args, kwargs)))

    def require_mesh(self, arguments_mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh:
        """The mesh that is known, else that of the arguments. Raises ValueError where there is none."""
        mesh = self.known_mesh() or arguments_mesh or _jax.context_mesh()
        if mesh is None:
            raise ValueError(
                f"shard_jit({self.name}) has no mesh to run on: give it mesh=, call it under "
                "jax.set_mesh(mesh), or pass it arguments that are placed on a mesh (NamedSharding)"
            )
        return mesh

    def _check_context(self, mesh: Mesh | AbstractMesh) -> None:
        context_mesh = jax.sharding.get_abstract_mesh()
        if not context_mesh.empty and context_mesh.size != mesh.size:
            raise ValueError(
                f"{DIFFERING_DEVICES}. That is, shard_jit({self.name}) has the mesh ({describe(mesh)}) of "
                f"{mesh.size} devices, but is called where the mesh is ({describe(context_mesh)}), of "
                f"{context_mesh.size}: leave out its mesh, or call it outside"
            )
        manual = [
            a
            for a, t in zip(context_mesh.axis_names, context_mesh.axis_types, strict=True)
            if t is AxisType.Manual and a in mesh.shape
        ]
        if manual:
            raise ValueError(
                f"shard_jit({self.name}) is called inside a shard_map over {', '.join(manual)}, which its "
                f"mesh ({describe(mesh)}) has too: what it would split is split already; call it outside of "
                "the shard_map, or call the function itself"
            )

    def _run(self, mesh: Mesh | AbstractMesh, args, kwargs):
        """Under jax.jit: traces the function and binds its global jaxpr. Explicit types end here, and begin
        at the results.
        """
        nested = jax.sharding.get_abstract_mesh() == abstract_mesh(auto_mesh(mesh))
        with jax.sharding.use_abstract_mesh(abstract_mesh(auto_mesh(mesh))):
            request = self._request(mesh, args, kwargs)
            traced, jaxpr = self._traced(request, self._static_values(args, kwargs))
            for ref in filter(_jax.is_ref, traced.consts):
                what = f"a Ref of shape {ref.shape} that {self.name} closes over"
                if words := _elsewhere(what, ref, mesh):
                    raise ValueError(f"{DIFFERING_DEVICES}. That is, {words}")
            inputs = [*jax.tree.leaves((request.args, request.kwargs)), *traced.consts]
            values = [x[...] if i in traced.refs else x for i, x in enumerate(inputs)]
            # under an Explicit mesh a cotangent must get back even the empty type
            always = is_explicit(mesh) and not nested
            plain = [_jax.moved_off_meshes(x) if always or explicit_sharding(x) else x for x in values]
            plain = list(map(_in_memory, plain, jaxpr.in_avals))
            outs = primitive.bind(plain, jaxpr, mesh, self.options, of_context=self.mesh is None)
        if is_explicit(mesh) and not nested:
            rests = tuple(
                primitive.committed(jax.typeof(x), mesh) if explicit_sharding(x) else None for x in values
            )
            built = primitive.build(jaxpr, rests, mesh, self.options)
            outs = list(map(_typed, outs, built.left(mesh)))
        count = len(outs) - len(traced.refs)
        for i, value in zip(traced.refs, outs[count:], strict=True):
            inputs[i][...] = value
        return traced.out_tree.unflatten(outs[:count])

    def _traced(self, request: Request, static: Hashable) -> tuple[Traced, Any]:
        """The function, traced, and what the transforms made of its program. `jax.jit` asks anew where
        arguments of the same types are committed to a mesh of Auto axes, which the function does not see.
        """
        leaves, structure = jax.tree.flatten((request.args, request.kwargs))
        types = tuple(_type_seen(x, request.mesh) for x in leaves)
        cell = _cell(self, request.mesh, static, structure, request.donated, types)
        if not cell:
            with in_effect(self.options):
                traced, types = traced_as(request, self.transforms)
            context = Context(auto_mesh(request.mesh), traced.arguments, traced.results, self.options)
            with collector.paused():
                made = traced, transformed(traced, types, context, self.transforms)
            self.refused[made[1]] = traced.refused
            if traced.refs or not _jax.is_concrete(traced.consts):
                return made
            cell.append(made)
        return cell[0]

    def _static_values(self, args, kwargs) -> Hashable:
        named = [(k, kwargs[k]) for k in sorted(kwargs) if k in self.static[1]]
        return (*((i, args[i]) for i in sorted(self._static_nums(len(args)))), *named)

    def guarded(self, jitted):
        """What a call runs: the jitted function itself, unless something that Python does not see there must
        be checked.
        """
        if any(self.static):
            jitted = _otherwise(jitted, self.explain)
        if any(self.donated) and _jax.DONATED_AGAIN_CRASHES:
            jitted = _before(jitted, self._check_donated)
        return jitted

    def mesh_for(self, args, kwargs) -> Mesh | AbstractMesh | None:
        return self.known_mesh() or self.arguments_mesh(args, kwargs)

    def entering(self, args, kwargs) -> list[Crossing]:
        """The arguments that cross before the call: `jax.jit` takes devices in one order."""
        mesh = self.mesh_for(args, kwargs)
        if not isinstance(mesh, Mesh) or not _jax.is_eager((args, kwargs)):
            return []
        return [
            c for i, (_, x) in enumerate(self.named_leaves(args, kwargs)) if (c := crossing_of(i, x, mesh))
        ]

    def crossed(self, entering: Sequence[Crossing], args, kwargs, how: Callable[..., Any]) -> Any:
        """The arguments, after those of `entering` crossed; `how`, as a method of Crossing."""
        if not entering:
            return args, kwargs
        mesh, crossings = self.mesh_for(args, kwargs), {c.number: c for c in entering}
        leaves = (x for _, x in self.named_leaves(args, kwargs))
        new = (how(crossings[i], x, mesh) if i in crossings else x for i, x in enumerate(leaves))
        return self.with_leaves(new, args, kwargs)

    def with_leaves(self, leaves: Iterable[Any], args, kwargs) -> Any:
        """The arguments with other leaves for those that are not static."""
        new = iter(list(leaves))
        static_argnums, static_argnames = self._static_nums(len(args)), self.static[1]
        args = tuple(
            x if i in static_argnums else jax.tree.map(lambda _: next(new), x) for i, x in enumerate(args)
        )
        return args, {
            k: x if k in static_argnames else jax.tree.map(lambda _: next(new), x)
            for k, x in sorted(kwargs.items())
        }

    def placements(self, args, kwargs) -> list[Sequence[NamedSharding]]:
        """The shardings in which programs took arguments of these types before; more may be added."""
        leaves = [x for _, x in self.named_leaves(args, kwargs)]
        types = tuple((x.shape, x.dtype, x.weak_type) for x in map(jax.typeof, leaves))
        structure = jax.tree.structure(self.with_leaves(leaves, args, kwargs))
        return _cell(self, self.mesh_for(args, kwargs), self._static_values(args, kwargs), structure, types)

    def check_sizes(self, args, kwargs) -> None:
        for name, x in self.named_leaves(args, kwargs):
            require_sizes(getattr(x, "shape", ()), f"argument {name} of shard_jit({self.name})")

    def check_devices(self, args, kwargs) -> None:
        if isinstance(self.mesh, AbstractMesh) and _jax.is_eager((args, kwargs)):
            raise ValueError(
                "an AbstractMesh has no devices to run on: `.plan` and `.lower` work on it, a call needs a "
                "jax.sharding.Mesh"
            )

    def _check_donated(self, args, kwargs) -> None:
        leaves = jax.tree.leaves((args, kwargs))
        words = self._donated_twice(args, kwargs) if len(set(map(id, leaves))) < len(leaves) else None
        if words:
            raise ValueError(words)
        if any(map(_is_deleted, leaves)):
            name, x = next((name, x) for name, x in self.named_leaves(args, kwargs) if _is_deleted(x))
            raise RuntimeError(  # as later versions of JAX do
                f"Array has been deleted with shape={x.aval.str_short()}. It is argument {name}, and was "
                "donated to a call before: pass what that call returned, or do not donate it"
            )

    def _request(self, mesh: Mesh | AbstractMesh, args, kwargs) -> Request:
        static_argnums, static_argnames = self._static_nums(len(args)), self.static[1]
        dynamic = [i for i in range(len(args)) if i not in static_argnums]
        static_kwargs = {k: v for k, v in kwargs.items() if k in static_argnames}

        @functools.wraps(self.fun)
        def fun(*dynamic_args, **dynamic_kwargs):
            full = list(args)
            for i, x in zip(dynamic, dynamic_args, strict=True):
                full[i] = x
            return self.wrapped(*full, **dynamic_kwargs, **static_kwargs)

        dynamic_kwargs, argument_names = (
            {k: v for k, v in kwargs.items() if k not in static_argnames},
            self.dynamic_names(len(args)),
        )
        parameters = [name for name in positional_names(self.fun) if name not in static_argnames]
        in_shardings, kw_shardings = shardings_by_name(
            self.in_shardings, argument_names, parameters, dynamic_kwargs
        )
        return Request(
            fun=fun,
            args=tuple(args[i] for i in dynamic),
            kwargs=dynamic_kwargs,
            argument_names=argument_names,
            donated=self._donated_leaves(args, kwargs),
            mesh=mesh,
            in_shardings=in_shardings,
            kw_shardings=kw_shardings,
            out_shardings=self.out_shardings,
            named_by=self.mesh_named_by,
        )

    def dynamic_names(self, count: int) -> tuple[str, ...]:
        """What messages call the first `count` positional arguments, static ones left out."""
        static = self._static_nums(count)
        return tuple(argument_name(self.fun, i) for i in range(count) if i not in static)

    def _static_nums(self, count: int) -> set[int]:
        return {i % count for i in self.static[0] if -count <= i < count}

    def _donated_leaves(self, args, kwargs) -> frozenset[int]:
        """Which leaves of the dynamic (args, kwargs) are donated."""
        count = len(args)
        nums = {i % count for i in self.donated[0] if -count <= i < count}
        static = self._static_nums(count)
        marked_args = tuple(_marks(x, i in nums) for i, x in enumerate(args) if i not in static)
        marked_kwargs = {
            k: _marks(x, k in self.donated[1]) for k, x in kwargs.items() if k not in self.static[1]
        }
        return frozenset(
            i for i, donated in enumerate(jax.tree.leaves((marked_args, marked_kwargs))) if donated
        )

    def explain(self, error: Exception, args, kwargs) -> NoReturn:
        """Raises a ValueError that says more than what jax.jit raised about bad arguments, otherwise the
        error itself.
        """
        if isinstance(error, Refused):
            raise self.naming_arguments(error, args, kwargs) from None
        words = self._unhashable(args, kwargs)
        if words is None and "incompatible devices" in str(error) and "That is, " not in str(error):
            words = self._other_devices(error, args, kwargs)
        if words is None and "donate" in str(error):
            words = self._donated_twice(args, kwargs)
        if words is None:
            raise error
        raise ValueError(words) from None

    def naming_arguments(self, error: Refused, args, kwargs) -> Refused:
        """The error with the names of arguments for their numbers."""
        argument_names = [name for name, _ in self.named_leaves(args, kwargs)]
        return Refused(re.sub(r"(?<=argument )#(\d+)", lambda m: argument_names[int(m[1])], str(error)))

    def _unhashable(self, args, kwargs) -> str | None:
        static = [(argument_name(self.fun, i), args[i]) for i in sorted(self._static_nums(len(args)))]
        static += [(k, v) for k, v in kwargs.items() if k in self.static[1]]
        for name, value in static:
            try:
                hash(value)
            except TypeError:
                return (
                    f"static argument {name} is {value!r}, of type {type(value).__name__}, which cannot be "
                    "hashed: give a hashable one (a tuple, a frozen dataclass), or do not make it static"
                )

    def _other_devices(self, error: Exception, args, kwargs) -> str | None:
        """JAX's own words, and the way out."""
        mesh, named = self.mesh_for(args, kwargs), self.named_leaves(args, kwargs)
        words = (_elsewhere(f"argument {name} of shape {x.shape}", x, mesh) for name, x in named)
        said = str(error).removesuffix(" at ")  # a line that it does not know
        return next((f"{said}. That is, {advice}" for advice in words if advice), None)

    def named_results(self, results: Any, left: Sequence[NamedSharding]) -> list[NamedSharding | None]:
        """For each of the results, a tree of shapes, the sharding that out_shardings names, if it is left in
        it: JAX spells types in full, and these as they are given.
        """
        specs = broadcast_specs(self.out_shardings, results, "out_shardings")
        return list(map(_named, specs, jax.tree.leaves(results), left))

    def _donated_twice(self, args, kwargs) -> str | None:
        donated = self._donated_leaves(args, kwargs)
        named = self.named_leaves(args, kwargs)
        for i in sorted(donated):
            for j, (other, x) in enumerate(named):
                if j != i and x is named[i][1] and isinstance(x, jax.Array):
                    return (
                        f"argument {named[i][0]} of shape {x.shape} is donated, and the same array is "
                        f"passed as argument {other} too: pass a copy (jax.numpy.copy), or do not donate it"
                    )

    def named_leaves(self, args, kwargs) -> list[tuple[str, Any]]:
        static = self._static_nums(len(args))
        named = []
        for name, tree in [(argument_name(self.fun, i), x) for i, x in enumerate(args) if i not in static] + [
            (k, kwargs[k]) for k in sorted(kwargs) if k not in self.static[1]
        ]:
            paths, leaves, _ = flatten(tree)
            named += [(name + path, x) for path, x in zip(paths, leaves, strict=True)]
        return named


def mesh_of(tree) -> Mesh | AbstractMesh | None:
    """The mesh of the first NamedSharding in a tree of shardings or of arrays, or of the types of what is
    being traced.
    """
    shardings = list(map(_sharding_of, jax.tree.leaves(tree)))
    return next((s.mesh for s in shardings if isinstance(s, NamedSharding) and not s.mesh.empty), None)


def _sharding_of(x) -> Any:
    """The sharding that a leaf is, or has; of what is being traced, that of its type."""
    if not _jax.is_concrete(x):
        return getattr(jax.typeof(x), "sharding", None)
    return x if isinstance(x, NamedSharding) else getattr(x, "sharding", None)


def _of_context(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh | None:
    """A mesh of arguments where an abstract one is in context: that one, on their devices."""
    context = _jax.context_mesh()
    if not isinstance(context, AbstractMesh) or mesh is not None and mesh.size != context.size:
        return context or mesh
    if not isinstance(mesh, Mesh):
        return context
    devices = mesh.devices.reshape(context.axis_sizes)
    return Mesh(devices, context.axis_names, axis_types=context.axis_types)


def _named(spec, shape, left: NamedSharding) -> NamedSharding | None:
    named = left.update(spec=spec) if isinstance(spec, PartitionSpec) else spec
    same = isinstance(named, NamedSharding) and named.is_equivalent_to(left, len(shape.shape))
    return named if same else None


def _typed(x, sharding: NamedSharding):
    """A result in its sharding. `reshard` makes it a type, and takes Explicit axes only."""
    mesh, whole = sharding.mesh, from_spec(sharding.spec, len(sharding.spec))
    if not is_explicit(mesh):
        return x
    explicit = {a for a, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t is AxisType.Explicit}
    x = reshard(x, sharding.update(spec=whole.without({*mesh.axis_names} - explicit).spec))
    rest = whole.settled.without(explicit)
    return jax.lax.with_sharding_constraint(x, sharding.update(spec=rest.spec)) if rest.axes else x


def _in_memory(x, aval):
    """An argument in the memory in which the program takes it, where transforms have changed that."""
    memory = memory_of(aval)
    return x if memory_of(jax.typeof(x)) is memory else jax.device_put(x, memory)


@_jax.weakly_cached
def _cell(function: Function, *key: Hashable) -> list[Any]:
    """Where what was traced, or placed, is kept: of JAX's configuration of now, until `jax.clear_caches`."""
    return []


def _type_seen(x, mesh: Mesh | AbstractMesh) -> Hashable:
    """What tracing sees of an argument: on the mesh of the program a type of Auto axes is none."""
    aval = _jax.value_type(x)
    own = aval.sharding.mesh
    only = not aval.shape and not owing_of(aval.sharding.spec)  # a scalar has no other type
    seen = None if only or own.empty or own == abstract_mesh(auto_mesh(mesh)) else aval.sharding
    return aval.shape, aval.dtype, aval.weak_type, memory_of(aval), seen


def crossing_of(number: int, x, mesh: Mesh) -> Crossing | None:
    own = primitive.committed(x, mesh)
    return entering(number, jax.typeof(x), own, mesh) if own is not None and own.mesh.places else None


def _on_one_device(sharding) -> bool:
    """Whether a leaf of a tree of shardings means no mesh."""
    sharding = sharding.sharding if isinstance(sharding, Format) else sharding
    one = isinstance(sharding, jax.sharding.SingleDeviceSharding)
    return one or sharding is None or sharding is _jax.UNSPECIFIED


def _devices(x) -> Collection[Any]:
    sharding = getattr(x, "sharding", None)
    return sharding.device_set if isinstance(sharding, jax.sharding.Sharding) else ()


def _is_deleted(x) -> bool:
    return hasattr(x, "is_deleted") and _jax.is_concrete(x) and x.is_deleted()


def _before(call, check):
    @_jax.boundary
    def checked(*args, **kwargs):
        check(args, kwargs)
        return call(*args, **kwargs)

    return checked


def _otherwise(call, explain):
    """An argument that cannot be hashed fails before a miss."""

    @_jax.boundary
    def explained(*args, **kwargs):
        try:
            return call(*args, **kwargs)
        except ValueError as error:
            explain(error, args, kwargs)

    return explained


def _marks(tree, donated: bool):
    return jax.tree.map(lambda _: donated, tree)


def _elsewhere(what: str, x, mesh: Mesh | AbstractMesh | None) -> str | None:
    """Words where an array or a Ref is committed to other devices than the mesh's."""
    if not isinstance(mesh, Mesh) or not getattr(x, "committed", False):
        return None
    if x.sharding.device_set == set(mesh.devices.flat):
        return None
    ids = sorted(d.id for d in x.sharding.device_set)
    advice = "make it of an array that is placed there" if _jax.is_ref(x) else "move it there"
    way_out = f"{advice} with jax.device_put" + ", or pass it as a numpy array" * (not _jax.is_ref(x))
    return (
        f"{what} is committed to {x.sharding} on devices {ids}, but the mesh ({describe(mesh)}) has "
        f"the devices {sorted(d.id for d in mesh.devices.flat)}: {way_out}"
    )
