"""shard_jit: stands where jax.jit stood, and partitions the function's program over a mesh."""

import functools
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from shardax import _jax
from shardax.jit import unplaced
from shardax.jit.call import Call
from shardax.jit.function import Function, mesh_of
from shardax.jit.signature import check_arguments, check_no_device
from shardax.meshes.crossing import Crossing
from shardax.options import Options, Refused
from shardax.trace import is_explicit
from shardax.transforms import Transform, staging_first


@_jax.boundary
def shard_jit(
    fun: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    backend: str | None = None,
    inline: Any = False,
    compiler_options: dict[str, Any] | None = None,
    transforms: Sequence[Transform] = (),
    options: Options = Options(),  # noqa: B008  (frozen)
) -> Any:
    """`jax.jit(fun)`, partitioned over a mesh. Without `fun` it returns a decorator.

    Args:
      fun: a function of pytrees of arrays, written for one device.
      mesh: the devices that it runs on. Without it, the mesh of `in_shardings`, of the context
        (`jax.set_mesh`, `with mesh:`), or of the arguments. Where there is none and no sharding is named, the
        function runs on one device, as under `jax.jit`. An AbstractMesh can be planned and lowered for, but
        not run on.
      in_shardings: a tree that is a prefix of the tuple of positional arguments that are not static, whether
        a call gives them by position or by name. Keyword-only arguments are left to completion. A leaf is a
        PartitionSpec, another sharding of JAX's, or None, which means that of a committed argument, and else
        leaves it to completion.
      out_shardings: a tree that is a prefix of the results. None leaves a result to completion, or, where it
        succeeds a donated argument, gives it the sharding of that argument.
      static_argnums, static_argnames, donate_argnums, donate_argnames, keep_unused, inline, compiler_options:
        as for `jax.jit`.
      device, backend: refused; the mesh says which devices run.
      transforms: functions (global jaxpr, `Context`) -> global jaxpr, applied in order before the program is
        partitioned, `sx.zero.Zero` behind `sx.pipeline.Pipeline` in any case; see `Transform`.
      options: see `Options`.

    Raises ValueError for bad input, when the function is first called on arguments of these types.

    >>> from jax.sharding import PartitionSpec as P
    >>> double = shard_jit(lambda x: 2 * x, mesh=jax.make_mesh((1,), ("x",)), in_shardings=P("x"))
    >>> double(jax.numpy.ones(4))
    Array([2., 2., 2., 2.], dtype=float32)
    """
    if fun is None:
        return functools.partial(
            shard_jit,
            mesh=mesh,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            keep_unused=keep_unused,
            device=device,
            backend=backend,
            inline=inline,
            compiler_options=compiler_options,
            transforms=transforms,
            options=options,
        )
    by_number = {"static_argnums": static_argnums, "donate_argnums": donate_argnums}
    by_name = {"static_argnames": static_argnames, "donate_argnames": donate_argnames}
    check_arguments(fun, mesh, transforms, options, by_number, by_name)
    check_no_device({"device": device, "backend": backend})
    static = _jax.infer_argnums_and_argnames(fun, static_argnums, static_argnames)
    donated = _jax.infer_argnums_and_argnames(fun, donate_argnums, donate_argnames)
    named = {"mesh=": mesh, "in_shardings": mesh_of(in_shardings), "out_shardings": mesh_of(out_shardings)}
    by, named_mesh = next(
        ((f", named by {by} of shard_jit,", m) for by, m in named.items() if m is not None), ("", None)
    )
    of_jit = {"keep_unused": keep_unused, "inline": inline, "compiler_options": compiler_options}
    function = Function(
        fun,
        named_mesh,
        by,
        in_shardings,
        out_shardings,
        static,
        donated,
        staging_first(transforms),
        options,
        of_jit,
    )
    return ShardJit(function)


class ShardJit:
    """What `shard_jit` returns. It is called as the function is.

    `plan`, `lower`, `trace` and `eval_shape` take the arguments of a call, which may be
    `jax.ShapeDtypeStruct`s. `__wrapped__` is the function itself.
    """

    # `__call__` is a slot that holds jax.jit's own C++ function, so that a call has no frame of ours and no
    # lookup.
    __slots__ = ("__call__", "__dict__", "__weakref__")

    def __init__(self, function: Function):
        wrapper: Any = self
        functools.update_wrapper(wrapper, function.fun)
        self._function = function
        self._jits: dict[
            Any, Any
        ] = {}  # by the mesh that was found on the arguments; under None, where none had to be
        self.__call__ = function.guarded(_jax.with_cache_miss(self._on(None), self._miss))

    def __get__(self, instance, owner=None):
        call: Any = self
        return self if instance is None else types.MethodType(call, instance)

    def __repr__(self):
        return f"shard_jit({self._function.name})"

    @_jax.boundary
    def trace(self, /, *args, **kwargs) -> jax.stages.Traced:
        """The program before it is partitioned, as `jax.jit(fun).trace`.

        What is lowered from it, also by `jax.export`, names the shardings of all arguments and results, and
        takes no others.
        """
        self._function.check_sizes(args, kwargs)
        traced = self._stage(attrgetter("trace"), args, kwargs)
        if jax.config.jax_disable_jit or self._function.for_one_device(args, kwargs):  # type: ignore[attr-defined]
            return traced
        return _jax.PlacedTraced(traced, lambda: self._call(traced, args, kwargs).placed())

    @_jax.boundary
    def lower(self, /, *args, **kwargs) -> jax.stages.Lowered:
        """The partitioned program in StableHLO, as `jax.jit(fun).lower`. It and its `.compile()` add to
        `Plan.phases`.
        """
        self._function.check_sizes(args, kwargs)
        entering = self._function.entering(args, kwargs)
        args, kwargs = self._function.crossed(entering, args, kwargs, Crossing.abstractly)
        args, kwargs = self._placed(args, kwargs, unplaced.typed)
        lowered = self._stage(
            lambda jitted: self._told(jitted, args, kwargs, entering)[0].lower, args, kwargs
        )
        if jax.config.jax_disable_jit or self._function.for_one_device(args, kwargs):  # type: ignore[attr-defined]
            return lowered
        phases = self._call(self._stage(attrgetter("trace"), args, kwargs), args, kwargs).built().phases
        return _jax.TimedLowered(lowered, lambda seconds: phases.update(XLA=seconds))

    @_jax.boundary
    def eval_shape(self, /, *args, **kwargs):
        """The shapes and dtypes of the results."""
        args, kwargs = self._placed(args, kwargs, unplaced.typed)
        return self._stage(attrgetter("eval_shape"), args, kwargs)

    @_jax.boundary
    def plan(self, /, *args, **kwargs):
        """What the partitioned program does, why, and what it costs; needs no devices. See
        `shardax.explain.plan.Plan`.
        """
        self._function.require_mesh(self._function.arguments_mesh(args, kwargs))
        self._function.check_sizes(args, kwargs)
        start = time.perf_counter()
        args, kwargs = self._placed(args, kwargs, unplaced.typed)
        traced = self._stage(attrgetter("trace"), args, kwargs)
        phases = {"trace": time.perf_counter() - start}
        call = self._call(traced, args, kwargs, self._function.entering(args, kwargs))
        argument_names = self._function.dynamic_names(len(args))
        try:
            return call.plan(argument_names, phases, call.options)
        except Refused as error:
            refused = self._function.naming_arguments(error, args, kwargs)
            allowing = replace(call.options, strict=False, max_gather_bytes=None, allow=("*",))
            refused.plan = call.plan(argument_names, phases, allowing)
            raise refused from None

    def clear_cache(self) -> None:
        """Forgets the compiled programs."""
        for jitted in self._jits.values():
            jitted.clear_cache()

    @_jax.boundary
    def _miss(self, /, *args, **kwargs):
        """Handles a call for which nothing is compiled yet. All our work happens here; later calls are
        `jax.jit`'s alone.
        """
        self._function.check_devices(args, kwargs)
        entering = self._function.entering(args, kwargs)
        args, kwargs = self._function.crossed(entering, args, kwargs, Crossing.eagerly)
        args, kwargs = self._placed(args, kwargs, unplaced.placed)

        def calling(jitted):
            told, leaving = self._told(jitted, args, kwargs, entering)
            return lambda *args, **kwargs: (leaving, *_jax.cache_miss(told)(*args, **kwargs))

        leaving, outs, *to_cache = self._stage(calling, args, kwargs)
        if not entering and not leaving:
            return outs, *to_cache
        crossings, mesh = {c.number: c for c in leaving}, self._function.mesh_for(args, kwargs)
        leaves, tree = jax.tree.flatten(outs)
        crossed = (crossings[i].eagerly(x, mesh) if i in crossings else x for i, x in enumerate(leaves))
        return tree.unflatten(crossed), None, *to_cache[1:]  # every call comes here

    def _placed(self, args, kwargs, how: Callable[..., Any]):
        """The arguments, those that are not committed to devices placed where the program takes them: when
        they come back as results, what is compiled for them stands. `how`: `unplaced.placed` or `.typed`.
        """
        function = self._function
        leaves, mesh = [x for _, x in function.named_leaves(args, kwargs)], function.mesh_for(args, kwargs)
        if mesh is None or function.for_one_device(args, kwargs) or not unplaced.may_be_placed(leaves, mesh):
            return args, kwargs
        if not is_explicit(mesh) if how is unplaced.typed else isinstance(mesh, AbstractMesh):
            return args, kwargs  # the same program; no devices
        known = function.placements(args, kwargs)
        shardings = next((before for before in known if unplaced.agree(before, leaves)), None)
        if shardings is None:
            call = self._call(self._stage(attrgetter("trace"), args, kwargs), args, kwargs)
            try:
                known.append(shardings := call.arguments())
            except Refused:  # so will the program be that is made of them
                return args, kwargs
        return function.with_leaves(how(leaves, shardings), args, kwargs)

    def _stage(self, stage_of: Callable[[Any], Callable[..., Any]], args, kwargs):
        try:
            if self._function.for_one_device(args, kwargs):
                if "one device" not in self._jits:
                    self._jits["one device"] = self._function.jitted_for_one_device()
                return stage_of(self._jits["one device"])(*args, **kwargs)
            mesh = self._function.arguments_mesh(args, kwargs)
            return stage_of(self._on(mesh))(*args, **kwargs)
        except Exception as error:
            self._function.explain(error, args, kwargs)

    def _told(self, jitted, args, kwargs, entering: Sequence[Crossing] = ()) -> tuple[Any, list[Crossing]]:
        """The `jax.jit` function to call, and the results that have to cross to another mesh after the call.

        JAX would name one mesh for all results. Where the program has several, the function is told the
        sharding of each result; on Explicit axes of those that out_shardings names, in its own spelling.
        """
        eager = _jax.is_eager((args, kwargs)) and not jax.config.jax_disable_jit  # type: ignore[attr-defined]
        if not eager or self._function.for_one_device(args, kwargs):
            return jitted, []
        call = self._call(jitted.trace(*args, **kwargs), args, kwargs, entering)
        call.check_entering(call.options)
        typed = is_explicit(call.mesh) and jax.tree.leaves(self._function.out_shardings)
        if isinstance(call.mesh, AbstractMesh) or not call.other_meshes and not typed:
            return jitted, []
        built, shapes = call.built(), jitted.eval_shape(*args, **kwargs)
        structure, out_shardings = jax.tree.structure(shapes), built.left(call.mesh)
        if not call.other_meshes:
            out_shardings = tuple(self._function.named_results(shapes, out_shardings))
        key = (call.mesh, structure, out_shardings)
        if key not in self._jits:
            self._jits[key] = self._function.jitted(call.mesh, structure.unflatten(out_shardings))
        return self._jits[key], [c for c in built.leaving if c.outside]

    def _call(self, traced: jax.stages.Traced, args, kwargs, entering: Sequence[Crossing] = ()) -> Call:
        mesh = self._function.mesh_for(args, kwargs)
        assert mesh is not None
        return Call(
            self._function, traced, mesh, [x for _, x in self._function.named_leaves(args, kwargs)], entering
        )

    def _on(self, mesh: Mesh | AbstractMesh | None):
        if mesh not in self._jits:
            self._jits[mesh] = self._function.jitted(mesh)
        return self._jits[mesh]
