"""The only file that knows JAX's internals or looks at its version.

Generations covered: 0.10 (Python 3.11), 0.11 and 0.12 (Python >= 3.12). It has 91 entries, here by what the
public API lacks:

Jaxprs as data. There is no public way to prune, split, batch or differentiate a jaxpr and get a jaxpr, to
change its equations, or to tell an open one from a closed one. Between 0.10 and 0.12 the types, and some
parameters, have changed:
    Literal, is_literal, closed, is_jaxpr, has_bodies, has_effects, with_eqns, replaced_eqns,
    under_local_mesh, with_constants_made, with_eqns_and_results, on_line_of, with_bodies, new_variable,
    axes_in_scope, dce, dce_open, prune, hoist_consts, closing_over, constant_values, scan_counts,
    expand_hi_primitive, is_ref, is_ref_aval, value_type, without_mesh, without_refs, without_closed_refs,
    ordered_effects, jvp_jaxpr, batch_jaxpr, partial_eval_jaxpr, weakly_cached, lazy_derivative, lazy_vjp,
    checkpoint_rule, register_dce, Recording, stages_each, recorded, staged_again, changes_context,
    in_context_of, eqn_under_local_mesh, on_host, key_impl.
PartitionSpecs that owe a reduction, whose kind 0.11 has brought:
    owing_spec, reduction_of.
Primitives that public functions bind and nothing public names:
    sharding_constraint_p, UNSPECIFIED.
Source lines and errors as JAX shows them: which frame is the user's, which are hidden, what a tree lacks:
    EMPTY_NAME_STACK, scope_names, without_scopes, marked, innermost_mark, user_line, is_users_file,
    current_line, with_user_frame, lines_of_their_own, hide_frames, boundary, prefix_error,
    infer_argnums_and_argnames.
The surroundings of a call: the mesh in context (the public reader gives only an abstract one), whether
anything is being traced, the store that processes share:
    context_mesh, without_mapped_axes, wants_own_mesh, is_of_context, lacks_rule, legacy_mesh,
    moved_off_meshes, lowering_on, is_eager, is_concrete, device_count, gspmd_sharding,
    spec_on, key_value_store.
Dispatch: the shardings of committed arguments, which only the lowering sees; `jax.jit`'s own C++ call, with
our Python where its cache has nothing; the seconds of one compilation; shardings given to what is traced
already:
    Committed, committed_dims, with_cache_miss, cache_miss, TimedLowered, PlacedTraced.
The rule of a custom_partitioning, which may be a callable of the user's that wants MLIR types:
    sharding_rule.
JAX's own lists of primitives, of what they are lowered and batched by and of their test cases, one defect:
    primitive_names, functions_of, has_batching_rule, primitive_cases, DONATED_AGAIN_CRASHES.
"""

import inspect
import math
import operator
import os
import re
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple

import jax
from jax._src import (
    ad_util,
    api_util,
    core,
    distributed,
    effects,
    linear_util,
    pjit,
    source_info_util,
    traceback_util,
    tree_util,
    util,
)
from jax._src import mesh as mesh_lib
from jax._src import named_sharding as named_sharding_lib
from jax._src import sharding_impls as sharding_lib
from jax._src.compute_on import extend_compute_type
from jax._src.custom_partitioning_sharding_rule import SdyShardingRule, str_to_sdy_sharding_rule
from jax._src.interpreters import ad, batching, mlir
from jax._src.interpreters import (
    partial_eval as pe,
)  # dce_jaxpr keeps effects and prunes inside scan, while and remat
from jax._src.state import AbstractRef, discharge
from jaxlib import xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

Literal = core.Literal
sharding_constraint_p = pjit.sharding_constraint_p  # what with_sharding_constraint binds
UNSPECIFIED = named_sharding_lib.UNSPECIFIED  # what a jit equation has where no sharding was given
EMPTY_NAME_STACK = source_info_util.NameStack()


def scope_names(name_stack) -> list[str]:
    """The names of the scopes and transformations of a name stack, outermost first, as they were given."""
    return [part.name for part in name_stack.stack if not isinstance(part, _Mark)]


def without_scopes(name_stack, which: Callable[[str], bool]) -> Any:
    """The name stack without the scopes and transformations whose names are such."""
    kept = [part for part in name_stack.stack if isinstance(part, _Mark) or not which(part.name)]
    return type(name_stack)(tuple(kept))


class _Mark(NamedTuple):
    """A part of a name stack that holds something and has no name: no jaxpr, HLO or profile shows it."""

    held: Any

    def wrap(self, stack: list[str]) -> None:
        pass


def marked(name_stack, held, scopes=EMPTY_NAME_STACK) -> Any:
    """The name stack, with something that the equations made under it hold, and more scopes inside."""
    return type(name_stack)((*name_stack.stack, _Mark(held), *scopes.stack))


def innermost_mark(name_stack) -> Any:
    """What the innermost mark of a name stack holds, None where there is none."""
    return next((part.held for part in reversed(name_stack.stack) if isinstance(part, _Mark)), None)


def is_literal(atom) -> bool:
    return isinstance(atom, Literal)


def closed(jaxpr) -> Any:
    """A jaxpr with its constants; open jaxprs (remat2's, shard_map's) have none. One type in 0.12, two
    before.
    """
    return jaxpr if hasattr(jaxpr, "consts") else core.ClosedJaxpr(jaxpr, ())


def expand_hi_primitive(eqn) -> Any:
    """The jaxpr of 0.12's call_hi_primitive (searchsorted, nonzero, custom_root): its expansion, traced."""
    prim = eqn.params["_prim"] if "_prim" in eqn.params else eqn.params["prim"]
    return jax.make_jaxpr(lambda *flat: prim.expand(*jax.tree.unflatten(prim.in_tree, flat)))(
        *(v.aval for v in eqn.invars)
    )


def dce(jaxpr) -> Any:
    """Drops what no result needs, inside loops too; keeps inputs and effects."""
    open_jaxpr, _ = pe.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), instantiate=True)
    return jaxpr if open_jaxpr is jaxpr.jaxpr else _closed_over(open_jaxpr, jaxpr.consts)


def dce_open(jaxpr) -> Any:
    """The same of a jaxpr that may be open, as bodies are."""
    return (
        dce(jaxpr)
        if hasattr(jaxpr, "consts")
        else pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]
    )


def axes_in_scope(sizes) -> Any:
    """A context in which jaxprs name these mesh axes, as the body of a shard_map does where it stands: JAX
    traces one by itself, and checks it under `jax_enable_checks`, only where they are known. No public way.
    """
    return core.extend_axis_env_nd(tuple(sizes.items()))


def without_mapped_axes() -> Any:
    """A context in which a shard_map is over all axes of its mesh, also where a vmap around maps a dim that
    is split over an Explicit one. No public way.
    """
    return core.remove_explicit_mesh_axis_names(core.get_axis_env().explicit_mesh_axis_names)


def on_host(eqn) -> Any:
    """The equation, computed by the host (as under `compute_on`; 0.12 has no public context for it)."""
    with eqn.ctx.manager, extend_compute_type("device_host"):
        return eqn.replace(ctx=core.JaxprEqnContext())


def scan_counts(params) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan equation: parameters in 0.10, a tree of them in
    0.12.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = map(len, params["ft_in"].unpack())
    return consts, carry


def user_line(source_info) -> str:
    """The place "file.py:12" in the user's own code that made an equation, "" where it is not known.

    JAX's user frames include those of installed libraries (Flax, optax): the first outside them is the
    user's, if there is one.
    """
    frame = _frame(source_info.traceback, own=True) or _frame(source_info.traceback, own=False)
    return f"{frame.file_name}:{frame.start_line}" if frame else ""


@lru_cache(maxsize=4096)
def _frame(traceback, own: bool) -> Any:
    """The innermost frame outside JAX; of the user's own code, if `own`."""
    frames = source_info_util.user_frames(traceback)
    return next((f for f in frames if not own or is_users_file(f.file_name)), None)


def is_users_file(name: str) -> bool:
    """Whether it belongs to no installed library."""
    return not name.startswith(_LIBRARIES)


_INSTALLED = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")
_JAX = os.path.dirname(jax.__file__)
_LIBRARIES = (*_INSTALLED, sysconfig.get_path("stdlib"), os.path.dirname(__file__))


def current_line() -> str:
    """The same of the call that is being made now."""
    return user_line(source_info_util.current())


def with_user_frame(eqn, callers) -> Any:
    """The source info of an equation, or of the innermost of its callers that has a frame of the user's own,
    where its own has none: JAX traces jits, as of jax.nn and of libraries, without the frames around them.
    """
    if _frame(eqn.source_info.traceback, own=True):
        return eqn.source_info
    infos = [e.source_info for e in (eqn, *callers)]
    found = (info for own in (True, False) for info in infos if _frame(info.traceback, own))
    return next(found, eqn.source_info)


@contextmanager
def lines_of_their_own():
    """Inside, what is traced has the lines of the code that is run, not that of an equation which is just
    lowered or emitted. The public `user_context` takes a line, but cannot take one away."""
    context = source_info_util._source_info_context
    before, context.context = context.context, source_info_util.new_source_info()
    try:
        yield
    finally:
        context.context = before


def without_mesh(aval) -> Any:
    """A type that names no mesh, which values on any mesh have. The public type of a shape takes the mesh in
    context.
    """
    empty = jax.sharding.NamedSharding(
        mesh_lib.empty_abstract_mesh, jax.sharding.PartitionSpec(*[None] * aval.ndim)
    )
    return aval.update(sharding=empty)


def moved_off_meshes(x) -> Any:
    """A value, its type `without_mesh`; its cotangent gets back the type that it has. The public `reshard`
    takes no such sharding.
    """
    return pjit.reshard_p.bind(x, dst_sharding=without_mesh(core.typeof(x)).sharding, concrete_mesh=None)


def is_eager(tree) -> bool:
    """Whether primitives on these values run at once: nothing is being traced. No public reader."""
    return core.trace_ctx.is_top_level() and is_concrete(tree)


def is_concrete(tree) -> bool:
    """Whether all leaves are values, not tracers."""
    return not any(isinstance(x, core.Tracer) for x in jax.tree.leaves(tree))


def context_mesh() -> Any:
    """The mesh in context, concrete where there is one: of use_abstract_mesh, jax.set_mesh, a legacy `with
    mesh:`, or None.

    Under jit the public reader gives the abstract one alone.
    """
    abstract, concrete = jax.sharding.get_abstract_mesh(), mesh_lib.get_concrete_mesh()
    if not abstract.empty:
        return concrete if concrete.shape == abstract.shape else abstract
    legacy = mesh_lib.thread_resources.env.physical_mesh
    return None if legacy.empty else legacy


def wants_own_mesh(error: Exception) -> bool:
    """Whether a shard_map refused its mesh for the one in context. JAX's error has no type of its own."""
    return "mesh passed to shard_map" in str(error)


def is_of_context(error: Exception) -> bool:
    """Whether JAX might not raise this in another mesh context, or where values have other types or none. Few
    of its errors have a type of their own; the others are known by their words, or by having none. Other
    libraries may compare the types of values; what they raise is known by where it is raised. While JAX puts
    words to an error of a type, it may fail itself.
    """
    text = str(error)
    if any(isinstance(e, _TYPE_ERRORS) for e in _with_handled(error)) or _OF_CONTEXT.search(text):
        return True
    if _is_of_library(error) or lacks_rule(error):
        return True
    return _OF_TYPES.search(text) is not None and "do not match" not in text  # shapes or dtypes, that is


def _with_handled(error: BaseException | None):
    """An error, and those that were being handled when it was raised."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def lacks_rule(error: Exception) -> bool:
    """Whether a rule of JAX's gave up without a word, as that does which batches a grouped convolution where
    what is transposed has a type, though one of Auto axes."""
    return isinstance(error, NotImplementedError) and not str(error) and _raised_in(error).startswith(_JAX)


def _is_of_library(error: Exception) -> bool:
    """Whether the code that raised this was installed, and is not JAX's."""
    file = _raised_in(error)
    return file.startswith(_INSTALLED) and not file.startswith(_JAX)


def _raised_in(error: Exception) -> str:
    """The file."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_code.co_filename if frames else ""


_TYPE_ERRORS = core.ShardingTypeError, named_sharding_lib.DuplicateSpecError
_OF_CONTEXT = re.compile(
    "context mesh|mesh context|mesh in context|non-empty mesh|of type `?(Auto|Explicit)|Auto axes"
    "|in_specs passed to shard_map|does not evenly divide|should be replicated"
    "|sharding (rule|inference|propagation)"
    "|be (un)?sharded|sharded (axes|on)|via `out_sharding`"
    r"|\bunreduced\b|(be|containing) reduced\b",
    re.IGNORECASE,
)
_OF_TYPES = re.compile(r"type.*\w\[[^\]]*@", re.DOTALL)


def lowering_on(mesh) -> Any:
    """A context in which a shard_map over an abstract mesh is lowered for `mesh`: JAX takes the one of
    jax.set_mesh, whatever its axes."""
    concrete = mesh if isinstance(mesh, jax.sharding.Mesh) else mesh_lib.empty_concrete_mesh
    return sharding_lib._internal_use_concrete_mesh(concrete)


def device_count(ctx) -> int:
    """Of a lowering of a jit: on how many devices it will run."""
    around = ctx.module_context.axis_context
    return around.num_devices if isinstance(around, sharding_lib.ShardingContext) else 1


def gspmd_sharding(devices, like, rank: int) -> Any:
    """A sharding of GSPMD's, as `jax.jit` gives where it is told no mesh."""
    return sharding_lib.GSPMDSharding(tuple(devices), like._to_xla_hlo_sharding(rank))


def spec_on(sharding, mesh, rank: int) -> Any:
    """The PartitionSpec of a sharding that has no mesh (on one device, or GSPMD's), None where it has none on
    this mesh.
    """
    tiles = sharding._to_xla_hlo_sharding(rank)
    if isinstance(mesh, jax.sharding.Mesh) and tuple(mesh.devices.flat) != tuple(sharding._device_assignment):
        return None
    try:
        spec = sharding_lib.parse_flatten_op_sharding(tiles, mesh)[0]
    except (AssertionError, ValueError):
        return None
    same = jax.sharding.NamedSharding(mesh, spec)._to_xla_hlo_sharding(rank) == tiles
    return spec if same or tiles.is_replicated() else None


_KINDS = getattr(jax.sharding, "UnreducedKind", None)


def owing_spec(entries, unreduced, reduced, reduction: str) -> Any:
    """A PartitionSpec that is unreduced, or reduced, over axes; `reduction` is "sum", "max" or "min"."""
    kind = {"unreduced_kind": _KINDS[reduction]} if _KINDS and unreduced else {}  # type: ignore[index]
    return jax.sharding.PartitionSpec(
        *entries, unreduced=frozenset(unreduced), reduced=frozenset(reduced), **kind
    )


def reduction_of(spec) -> str:
    """Which reduction is owed of what a PartitionSpec is given to: "sum" where it says nothing."""
    kind = getattr(spec, "unreduced_kind", None)
    return "sum" if kind is None else kind.name


@contextmanager
def legacy_mesh(mesh):
    """`with mesh:`, for which JAX warns: bare specs find it, and shard_maps may have meshes of their own all
    the same.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        mesh.__enter__()
    try:
        yield
    finally:
        mesh.__exit__(None, None, None)


def prefix_error(prefix, full, name: str, is_leaf) -> str:
    """Where and why `prefix` is no prefix of the tree `full`. JAX forgets `is_leaf` below the top."""
    errors = tree_util.prefix_errors(jax.tree.map(lambda _: 0, prefix, is_leaf=is_leaf), full)
    return "".join(str(error(name)) for error in errors[:1])


def hoist_consts(jaxpr) -> tuple[Any, list[Any]]:
    """A jaxpr that takes its constants as last arguments, and the constants."""
    if not jaxpr.consts:
        return jaxpr, []
    opened = closed(pe.convert_constvars_jaxpr(jaxpr.jaxpr))
    return pe.move_binders_to_back(opened, [True] * len(jaxpr.consts)), list(jaxpr.consts)


def closing_over(jaxpr, consts) -> Any:
    """A closed jaxpr, its last arguments constants with these values."""
    if not consts:
        return jaxpr
    invars, constvars = jaxpr.jaxpr.invars, jaxpr.jaxpr.constvars
    split = len(invars) - len(consts)
    debug_info = jaxpr.jaxpr.debug_info.with_unknown_names()
    new = {"invars": invars[:split], "constvars": [*constvars, *invars[split:]], "debug_info": debug_info}
    return _closed_over(jaxpr.jaxpr, [*jaxpr.consts, *consts], **new)


def constant_values(jaxpr, atoms) -> tuple[Any, ...]:
    """The values of literals and constants of a closed jaxpr; also where they were `moved_off_meshes`; of a
    Ref what it holds, where it is read.
    """
    consts = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    read = {eqn.outvars[0]: eqn.invars[0] for eqn in jaxpr.eqns if len(eqn.invars) == 1 == len(eqn.outvars)}

    def value(atom):
        while not is_literal(atom) and atom not in consts:
            atom = read[atom]
        found = atom.val if is_literal(atom) else consts[atom]
        return found[...] if is_ref(found) else found

    return tuple(map(value, atoms))


def infer_argnums_and_argnames(fun, argnums, argnames) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names of arguments, each inferred from the other as jax.jit does."""
    try:
        signature = inspect.signature(fun)
    except (ValueError, TypeError):
        signature = inspect.signature(lambda *args, **kwargs: None)
    return api_util.infer_argnums_and_argnames(signature, argnums, argnames)


weakly_cached = util.weakref_lru_cache  # a cache that lives as long as its first argument; functools has none
jvp_jaxpr = ad.jvp_jaxpr  # public from 0.12; memoized
batch_jaxpr = batching.batch_jaxpr2  # says which results are batched, which jax.vmap does not


def has_batching_rule(primitive) -> bool:
    """Whether jax.vmap knows what the primitive is of a stack."""
    return primitive in batching.fancy_primitive_batchers


partial_eval_jaxpr = (
    pe.partial_eval_jaxpr_nounits_fwd
)  # the split of a jaxpr into what is known and what is not


def checkpoint_rule(name: str) -> Any:
    """How policies of jax.checkpoint see inside a primitive whose parameter `name` is a jaxpr."""
    return partial(pe.closed_call_partial_eval_custom_rule, name, lambda *args: args[-2:])


def lazy_derivative(thunk, ctx, change) -> Any:
    """The rule of a custom_jvp or custom_vjp equation, which JAX traces when it differentiates: in the
    equation's own context, and with `change` applied to its jaxpr."""

    def traced(*zeros):
        with ctx.manager:
            jaxpr, consts, *rest = thunk.call_wrapped(*zeros)
        changed = change(_closed_over(jaxpr, consts))
        return changed.jaxpr, changed.consts, *rest

    return linear_util.wrap_init(traced, debug_info=thunk.debug_info)


def _closed_over(jaxpr, consts, **changes) -> Any:
    """An open jaxpr with its constants, and with other changes."""
    if hasattr(core, "ClosedJaxpr"):
        return core.ClosedJaxpr(jaxpr.replace(**changes), consts)
    return jaxpr.replace(**changes, consts=consts)


def lazy_vjp(eqn, change) -> dict[str, Any]:
    """Both rules of a custom_vjp equation likewise, as parameters. What the backward rule is given has the
    types that the forward rule gave it in the equation's own context, and they are known when that has been
    traced."""
    forward, backward = eqn.params["fwd_jaxpr_thunk"], eqn.params["bwd"]
    made: list[Any] = []

    def noted(jaxpr):
        made[:] = [v.aval for v in jaxpr.jaxpr.outvars]
        return change(jaxpr)

    def avals() -> list[Any]:
        _, tree, taken = eqn.params["out_trees"]()
        assert len(taken) == tree.num_leaves
        outs = iter(made)
        residuals = [next(outs) if i is None else eqn.invars[i].aval for i in taken]
        return residuals + [aval.to_ct_aval() for aval in eqn.params["call_jaxpr"].out_avals]

    def traced(*args):
        with eqn.ctx.manager:
            jaxpr, tree, moving = _backward_jaxpr(backward, args, avals())
        changed = change(jaxpr)
        cotangents = tree.unflatten(
            core.eval_jaxpr(changed.jaxpr, changed.consts, *(args[i] for i in moving))
        )
        is_zero = lambda x: type(x) is ad_util.Zero  # noqa: E731
        return jax.tree.map(
            lambda x: ad_util.Zero(core.ShapedArray(x.aval.shape, x.aval.dtype)) if is_zero(x) else x,
            cotangents,
            is_leaf=is_zero,
        )

    return {
        "fwd_jaxpr_thunk": lazy_derivative(forward, eqn.ctx, noted),
        "bwd": linear_util.wrap_init(traced, debug_info=backward.debug_info),
    }


def _backward_jaxpr(backward, args, avals) -> tuple[Any, Any, list[int]]:
    """Of those arguments that are no zeros, which are given by their numbers; and the structure of its
    results, in which zeros have no leaves."""
    moving = [
        i
        for i, x in enumerate(args)
        if not isinstance(x, ad_util.SymbolicZero) and x.dtype != jax.dtypes.float0
    ]
    full = [
        ad_util.SymbolicZero(a) if isinstance(x, ad_util.SymbolicZero) else x
        for x, a in zip(args, avals, strict=True)
    ]
    trees: list[Any] = []

    def run(*xs):
        by_number = dict(zip(moving, xs, strict=True))
        leaves, tree = jax.tree.flatten(
            backward.call_wrapped(*(by_number.get(i, x) for i, x in enumerate(full)))
        )
        trees.append(tree)
        return leaves

    wrapped = linear_util.wrap_init(run, debug_info=backward.debug_info.with_unknown_names())
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(wrapped, [avals[i] for i in moving])
    return _closed_over(jaxpr, consts), trees[-1], moving


def register_dce(primitive, rule) -> None:
    """`rule(used_outputs, eqn)` gives (used inputs, equation or None); 0.12 also passes which inputs are
    live.
    """
    pe.dce_rules[primitive] = lambda used, *rest: rule(used, rest[-1])


def has_effects(eqn) -> bool:
    return pe.has_effects(eqn)


class _Staged(NamedTuple):
    """An equation without its variables. `operands`: for each the number of a value, arguments first, or the
    tracer of a constant. `scopes`: the names that were opened around it.
    """

    primitive: Any
    params: dict[str, Any]
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    effects: Any
    scopes: tuple[Any, ...]


class Recording(NamedTuple):
    """What a function staged on the trace at hand, and what it returned: numbers of values, or (None, other).
    `scopes`: a name stack of all that it opened. `noted`: those of them whose names hold something.
    """

    eqns: tuple[_Staged, ...]
    returned: tuple[tuple[int | None, Any], ...]
    scopes: Any
    noted: tuple[Any, ...]


def stages_each(args) -> bool:
    """Whether equations on these arguments are staged on the trace at hand: each is a variable of it."""
    trace = core.trace_ctx.trace
    return isinstance(trace, pe.DynamicJaxprTrace) and len(_variables(trace, args)) == len(args)


def _variables(trace, args) -> list[Any]:
    """Those of the arguments that are variables of a trace."""
    constants = trace.frame.constvar_to_val
    return [
        x
        for x in args
        if isinstance(x, pe.DynamicJaxprTracer)
        and x._trace is trace
        and isinstance(x.val, core.Var)
        and x.val not in constants
    ]


def recorded(run, args) -> tuple[list[Any], Recording | None]:
    """The results of a call, and what it staged for these variables of the trace at hand, to be staged again
    for others of the same types. None where it may be another for others: where its equations have bodies,
    lines or contexts of their own, effects other than to be sent over an axis, or read other variables.
    """
    trace, info, ctx = core.trace_ctx.trace, source_info_util.current(), core.JaxprEqnContext()
    first, depth = len(trace.frame.tracing_eqns), len(info.name_stack.stack)
    results = list(run())
    number, everywhere = dict[Any, int](), set[Any]()
    for i, x in enumerate(args):
        number.setdefault(x.val, i)
    count, staged = len(args), []
    for eqn in trace.frame.tracing_eqns[first:]:
        eqn = eqn if isinstance(eqn, pe.TracingEqn) else eqn()
        if eqn is None:  # nothing reads it
            continue
        if eqn.ctx is not ctx or not _is_plain(eqn, info):
            return results, None
        if not all(x.val in number or x.val in everywhere for x in _variables(trace, eqn.in_tracers)):
            return results, None
        operands = tuple(x if is_literal(x.val) else number.get(x.val, x) for x in eqn.in_tracers)
        if _is_place(eqn) and not any(type(x) is int for x in operands):
            everywhere.update(eqn.outvars)
            continue
        types, scopes = tuple(v.aval for v in eqn.outvars), eqn.source_info.name_stack.stack[depth:]
        staged.append(_Staged(eqn.primitive, eqn.params, operands, types, eqn.effects, scopes))
        number.update(zip(eqn.outvars, range(count, count + len(types)), strict=True))
        count += len(types)
    numbers = [number.get(x.val) if stages_each([x]) else None for x in results]
    returned = tuple((n, x if n is None else None) for n, x in zip(numbers, results, strict=True))
    scopes = tuple({id(scope): scope for eqn in staged for scope in eqn.scopes}.values())
    noted = tuple(scope for scope in scopes if type(scope.name) is not str)
    return results, Recording(tuple(staged), returned, source_info_util.NameStack(scopes), noted)


def _is_place(eqn) -> bool:
    """Whether an equation makes numbers only, such as where a device is, and sends nothing for that."""
    is_local = not eqn.effects or eqn.primitive is jax.lax.axis_index_p
    return is_local and all(not getattr(v.aval, "size", 2) > 1 for v in eqn.outvars)


def _is_plain(eqn, info) -> bool:
    """Whether an equation is on the line and under the names at hand, pure, and has no bodies."""
    stack, outer = eqn.source_info.name_stack.stack, info.name_stack.stack
    return (
        eqn.source_info.traceback is info.traceback
        and stack[: len(outer)] == outer
        and not any(isinstance(scope, _Mark) for scope in stack[len(outer) :])
        and all(isinstance(effect, core.NamedAxisEffect) for effect in eqn.effects)
        and not has_bodies(eqn)
    )


def staged_again(recording: Recording, args) -> list[Any]:
    """The results of what a recording staged, on other variables of the same trace: on the line, under the
    names and in the context at hand. What names hold is held anew: equations with one note are of one call.
    """
    trace, info, ctx = core.trace_ctx.trace, source_info_util.current(), core.JaxprEqnContext()
    values, own = list(args), {id(scope): type(scope)(copy(scope.name)) for scope in recording.noted}
    for primitive, params, operands, types, sends, scopes in recording.eqns:
        inside = info
        if scopes:
            inner = [own.get(id(scope), scope) for scope in scopes]
            stack = source_info_util.NameStack((*info.name_stack.stack, *inner))
            inside = info.replace(name_stack=stack)
        tracers = [values[x] if type(x) is int else x for x in operands]
        eqn, results = trace.make_eqn(tracers, types, primitive, params, sends, inside, ctx)
        trace.frame.add_eqn(eqn)
        values += results
    return [other if number is None else values[number] for number, other in recording.returned]


def prune(jaxpr, used_outputs, kept: Any = None) -> tuple[Any, list[bool]]:
    """The jaxpr of some of a jaxpr's results, and which inputs they need. `kept`: for each input whether it
    stays in any case.
    """
    pruned, used = pe.dce_jaxpr(jaxpr.jaxpr, used_outputs, False if kept is None else [*kept])
    return _closed_over(pruned, jaxpr.consts), used


def with_eqns(jaxpr, eqns) -> Any:
    """The same jaxpr with other equations."""
    return _closed_over(jaxpr.jaxpr.replace(eqns=eqns), jaxpr.consts)


def with_constants_made(jaxpr, made) -> Any:
    """The same closed jaxpr, where closed jaxprs of one equation and no arguments make the constants of some
    variables.
    """
    kept = [
        (var, const)
        for var, const in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)
        if var not in made
    ]
    eqns = [eqn.replace(outvars=[var]) for var, one in made.items() for (eqn,) in [one.jaxpr.eqns]]
    new = {"constvars": [var for var, _ in kept], "eqns": [*eqns, *jaxpr.jaxpr.eqns]}
    return _closed_over(jaxpr.jaxpr, [const for _, const in kept], **new)


def on_line_of(eqn, jaxpr) -> Any:
    """The same jaxpr, its equations and those of its bodies on the user's line of another one."""
    traceback = eqn.source_info.traceback

    def moved(e):
        e = e.replace(source_info=e.source_info.replace(traceback=traceback))
        return with_bodies(e, lambda body: on_line_of(eqn, body))

    return replaced_eqns(jaxpr, list(map(moved, jaxpr.eqns)))


def changes_context(eqn) -> bool:
    """Whether an equation was traced in another context than the one at hand, but for the mesh."""
    local_mesh = jax.sharding.get_abstract_mesh()
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(local_mesh):
        inside = core.JaxprEqnContext()
    return inside is not core.JaxprEqnContext()


def in_context_of(eqn) -> Any:
    """A context as it is where an equation is lowered: its own, in which the axes of a shard_map around it
    have names.
    """
    stack = ExitStack()
    stack.enter_context(eqn.ctx.manager)
    mesh = jax.sharding.get_abstract_mesh()
    stack.enter_context(axes_in_scope({name: mesh.shape[name] for name in mesh.manual_axes}))
    return stack


_JAXPRS = (core.Jaxpr, getattr(core, "ClosedJaxpr", core.Jaxpr))
_HOLDERS = (*_JAXPRS, tuple)


def is_jaxpr(x) -> bool:
    return isinstance(x, _JAXPRS)


def has_bodies(eqn) -> bool:
    return any([_holds_jaxprs(p) for p in eqn.params.values() if isinstance(p, _HOLDERS)])


def _holds_jaxprs(param) -> bool:
    """A tuple of tuples holds none: thousands of pairs of a ppermute are not looked through."""
    if isinstance(param, tuple):
        return not isinstance(next(iter(param), ()), tuple) and any(isinstance(x, _JAXPRS) for x in param)
    return isinstance(param, _JAXPRS)


def replaced_eqns(jaxpr, eqns) -> Any:
    """The same jaxpr, closed or open, with other equations; the jaxpr itself where none is another."""
    open_jaxpr = jaxpr.jaxpr if hasattr(jaxpr, "consts") else jaxpr
    if len(eqns) == len(open_jaxpr.eqns) and all(map(operator.is_, eqns, open_jaxpr.eqns)):
        return jaxpr
    return with_eqns(jaxpr, eqns) if open_jaxpr is not jaxpr else jaxpr.replace(eqns=eqns)


def with_eqns_and_results(jaxpr, eqns, outvars) -> Any:
    """The same jaxpr, closed or open, with other equations and results."""
    new = (jaxpr.jaxpr if hasattr(jaxpr, "consts") else jaxpr).replace(eqns=eqns, outvars=outvars)
    return _closed_over(new, jaxpr.consts) if hasattr(jaxpr, "consts") else new


new_variable = core.Var


def with_bodies(eqn, change) -> Any:
    """An equation, each jaxpr in its parameters as `change` returns it; the equation itself where none is
    another.
    """
    if not has_bodies(eqn):
        return eqn
    new = {name: _changed(param, change) for name, param in eqn.params.items() if _holds_jaxprs(param)}
    return (
        eqn.replace(params={**eqn.params, **new})
        if any(eqn.params[name] is not x for name, x in new.items())
        else eqn
    )


def _changed(param, change):
    if isinstance(param, tuple):
        new = [change(x) if is_jaxpr(x) else x for x in param]
        new = tuple(new) if type(param) is tuple else type(param)(*new)  # a linear solve has named ones
        return new if any(a is not b for a, b in zip(new, param, strict=True)) else param
    return change(param)


def under_local_mesh(param) -> Any:
    """A parameter that is a jaxpr, its equations as if traced under the mesh in context; any other as it is.

    A kernel that is traced outside of a shard_map remembers the mesh there, and cannot be evaluated inside.
    """
    return replaced_eqns(param, list(map(eqn_under_local_mesh, param.eqns))) if is_jaxpr(param) else param


def eqn_under_local_mesh(eqn):
    """An equation as if traced under the mesh in context. The body of a shard_map is of its own mesh."""
    local_mesh = jax.sharding.get_abstract_mesh()
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(local_mesh):
        ctx = core.JaxprEqnContext()
    if eqn.primitive.name == "shard_map":
        return eqn.replace(ctx=ctx)
    return eqn.replace(ctx=ctx, params={name: under_local_mesh(p) for name, p in eqn.params.items()})


class Committed(NamedTuple):
    """The axes of a mesh, the places of its devices among the program's (None: in their order), the axes of
    each dim, and those over which the value is unreduced, with the kind of the reduction.
    """

    axes: tuple[tuple[str, int], ...]
    places: tuple[int, ...] | None
    dims: tuple[tuple[str, ...], ...]
    unreduced: tuple[str, ...] = ()
    reduction: str = "sum"


def committed_dims(operand, device_count: int) -> Committed | None:
    """Where a lowered value is an argument of the program, committed to a mesh of all devices: how.

    jax.jit lowers anew for each sharding of its committed arguments, and MLIR alone holds it: as Shardy's
    attribute, or, with `jax_use_shardy_partitioner` off, as GSPMD's, which knows of no axes.
    """
    if not isinstance(operand, ir.BlockArgument):
        constrained = operand.owner
        if getattr(constrained, "name", None) != "sdy.sharding_constraint":
            return None
        committed = committed_dims(constrained.operands[0], device_count)  # 0.12 says it of what is unreduced
        again = sdy.TensorShardingAttr(constrained.attributes["sharding"])
        unreduced = sorted(sdy.AxisRefAttr(axis).name for axis in again.unreduced_axes)
        return committed if committed and [*committed.unreduced] == unreduced != [] else None
    function = operand.owner.owner
    if function.operation.name != "func.func" or "arg_attrs" not in function.operation.attributes:
        return None
    attributes = function.operation.attributes["arg_attrs"][operand.arg_number]  # type: ignore[index]
    if "sdy.sharding" in attributes:
        return _sdy_dims(attributes["sdy.sharding"], device_count)
    return _tiled_dims(attributes["mhlo.sharding"], device_count) if "mhlo.sharding" in attributes else None


def _sdy_dims(attribute, device_count: int) -> Committed | None:
    """None where the mesh is another number of devices, or dims have not whole axes of it."""
    sharding = sdy.TensorShardingAttr(attribute)
    if not sdy.MeshAttr.isinstance(sharding.mesh_or_ref):
        return None  # while jax.jit lowers arguments, meshes are no symbols of the module yet
    mesh = sdy.MeshAttr(sharding.mesh_or_ref)
    axes = tuple((axis.name, axis.size) for axis in map(sdy.MeshAxisAttr, mesh.axes))
    dims = [
        [sdy.AxisRefAttr(a) for a in sdy.DimensionShardingAttr(d).axes] for d in sharding.dimension_shardings
    ]
    if (
        any(axis.sub_axis_info is not None for dim in dims for axis in dim)
        or math.prod(n for _, n in axes) != device_count
    ):
        return None
    unreduced = tuple(sorted(sdy.AxisRefAttr(axis).name for axis in sharding.unreduced_axes))
    split = tuple(tuple(axis.name for axis in dim) for dim in dims)
    return Committed(axes, None, split, unreduced, _reduction_in(attribute) if unreduced else "sum")


def _reduction_in(attribute) -> str:
    """The kind of the reduction that Shardy's attribute says is owed; its text alone has it everywhere."""
    found = re.search(r"unreduced=(max|min)|reduction_?op\s*=?\s*#?\w*<?(max|min)", str(attribute))
    return next(filter(None, found.groups())) if found else "sum"


def _tiled_dims(attribute, device_count: int) -> Committed | None:
    """A tile assignment as a mesh of its own, with an axis for each dim. "{replicated}" has none, and no
    dims.
    """
    text = ir.StringAttr(attribute).value_bytes
    if text.startswith(b"{"):
        sharding = xla_client.HloSharding.from_string(text.decode())
    else:  # JAX writes those of many devices as protocol buffers
        message = xla_client.OpSharding()
        message.ParseFromString(text)
        sharding = xla_client.HloSharding.from_proto(message)
    if sharding.is_replicated():
        return Committed((("all", device_count),), None, ())
    if not sharding.is_tiled() or sharding.subgroup_types() or sharding.num_devices() != device_count:
        return None
    tiles, places = sharding.tile_assignment_dimensions(), tuple(sharding.tile_assignment_devices())
    axes = tuple((f"dim{i}", size) for i, size in enumerate(tiles))
    dims = tuple((name,) if size > 1 else () for name, size in axes)
    return Committed(
        axes,
        None if places == tuple(range(device_count)) else places,
        dims[:-1] if sharding.replicate_on_last_tile_dim() else dims,
    )


def with_cache_miss(jitted, miss) -> Any:
    """A jax.jit function whose C++ calls `miss` where its cache has nothing for a call, and nothing of ours
    where it has.
    """
    cls: Any = type(jitted)
    twin = cls.__new__(cls)
    twin.__setstate__({**jitted.__getstate__(), "cache_miss": miss})
    twin.__dict__.update(jitted.__dict__)
    return twin


def cache_miss(jitted) -> Any:
    """What the C++ of a jax.jit function calls where its cache has nothing: gives results, and what is to be
    cached.
    """
    return jitted.__getstate__()["cache_miss"]


class TimedLowered(jax.stages.Lowered):
    """A Lowered that tells `done` the seconds that compiling it took. JAX's own has no such hook for one
    program.
    """

    __slots__ = ("done",)

    def __init__(self, lowered: jax.stages.Lowered, done):
        for name in jax.stages.Lowered.__slots__:
            setattr(self, name, getattr(lowered, name))
        self.done = done

    def compile(self, *args, **kwargs):
        start = time.perf_counter()
        compiled = super().compile(*args, **kwargs)
        self.done(time.perf_counter() - start)
        return compiled


class PlacedTraced(jax.stages.Traced):
    """A Traced that is lowered with the shardings of all arguments and of all results that `shardings()`
    gives, flat lists.

    JAX's own has no other way to them than tracing the function again.
    """

    __slots__ = ("shardings",)

    def __init__(self, traced: jax.stages.Traced, shardings):
        for name in jax.stages.Traced.__slots__:
            setattr(self, name, getattr(traced, name))
        self.shardings = shardings

    def lower(self, **kwargs):
        arguments, results = self.shardings()
        constants = len(self._params["in_shardings"]) - len(arguments)
        in_shardings = (*self._params["in_shardings"][:constants], *arguments)
        self._params = {**self._params, "in_shardings": in_shardings, "out_shardings": tuple(results)}
        self._lojax = None
        return super().lower(**kwargs)


def sharding_rule(params, mesh, operands, results) -> Any:
    """The SdyShardingRule of a custom_partitioning of these avals, None where it has none."""
    rule = params["sharding_rule"]
    if not callable(rule):
        return rule
    with mlir.make_ir_context(), ir.Location.unknown():
        types = (
            [ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(a.dtype)) for a in side]
            for side in (operands, results)
        )
        rule = rule(*params["static_args"], mesh, *types)
    rule, factor_sizes = rule if isinstance(rule, (list, tuple)) and len(rule) == 2 else (rule, {})
    if not isinstance(rule, str | SdyShardingRule):
        raise ValueError(
            f"the sharding_rule of a custom_partitioning gave {rule!r}: give a SdyShardingRule or a string"
        )
    return str_to_sdy_sharding_rule(rule, **factor_sizes) if isinstance(rule, str) else rule


def key_value_store() -> Any:
    """What the processes of `jax.distributed` can all read and write, None where there is one process. No
    public reader.
    """
    return distributed.global_state.client


def primitive_cases() -> list[Any]:
    """JAX's own test cases of primitives, those that it can run on CPUs. Importing them reads JAX's flags."""
    from jax._src.internal_test_util import test_harnesses

    return [case for case in test_harnesses.all_harnesses if case.filter("cpu")]


def primitive_names() -> set[str]:
    """The names of all primitives that this JAX can lower, on any platform."""
    tables = [mlir._lowerings, *mlir._platform_specific_lowerings.values()]
    return {primitive.name for table in tables for primitive in table}


def functions_of(primitive) -> list[tuple[str, Any]]:
    """The functions that a primitive may be a program of, each with words for it: the one of which the public
    `mlir.lower_fun` made its lowering, and its own `impl`. JAX keeps the first in a table, in a closure.
    """
    rule: Any = getattr(mlir._lowerings.get(primitive), "rule", None)
    functions = []
    if getattr(rule, "__code__", None) is _LOWERED:
        functions.append(("lowering", inspect.getclosurevars(rule).nonlocals["fun"]))
    if "impl" in vars(primitive):
        functions.append(("implementation", primitive.impl))
    return functions


_LOWERED: Any = mlir.lower_fun(lambda: ()).__code__  # type: ignore[attr-defined]


def key_impl(dtype) -> Any:
    """The implementation of random keys of this dtype. The public reader takes keys alone."""
    return dtype._impl


def is_ref(x) -> bool:
    return isinstance(core.typeof(x), AbstractRef)


def is_ref_aval(var) -> bool:
    return isinstance(var.aval, AbstractRef)


def value_type(x) -> Any:
    """The type of a value; of a Ref that of what it holds."""
    aval = core.typeof(x)
    return aval.inner_aval if isinstance(aval, AbstractRef) else aval


def without_refs(jaxpr) -> Any:
    """The jaxpr with what is written into mutable arrays of its own as plain values."""
    if not any(isinstance(v.aval, AbstractRef) for eqn in jaxpr.eqns for v in eqn.outvars):
        return jaxpr
    return discharge.discharge_state(jaxpr)


def without_closed_refs(jaxpr) -> tuple[Any, list[Any]]:
    """The jaxpr, and the mutable arrays that it closed over: of these it takes what they hold as its last
    arguments, and gives as last results what they hold in the end.
    """
    is_closed = [is_ref(x) for x in jaxpr.consts]
    if not any(is_closed):
        return jaxpr, []
    refs = [x for x, is_closed_ref in zip(jaxpr.consts, is_closed, strict=True) if is_closed_ref]
    opened, consts = hoist_consts(jaxpr)
    plain = discharge.discharge_state(opened)

    def run(*args):
        of_call, held = args[: len(args) - len(refs)], iter(args[len(args) - len(refs) :])
        return core.jaxpr_as_fun(plain)(
            *of_call,
            *(next(held) if closed_ref else x for x, closed_ref in zip(consts, is_closed, strict=True)),
        )

    return jax.make_jaxpr(run)(*jaxpr.in_avals, *map(value_type, refs)), refs


def ordered_effects(jaxpr) -> list[Any]:
    """The equations whose side effects must happen in program order."""
    return [eqn for eqn in jaxpr.eqns if any(map(effects.ordered_effects.contains, eqn.effects))]


def hide_frames(error: BaseException) -> None:
    """Drops JAX's and our own frames from an error's traceback, or marks them as hidden, unless the user
    wants to see them: `jax_traceback_filtering` says which.
    """
    mode = traceback_util._filtering_mode()
    if mode == "tracebackhide":
        traceback_util._add_tracebackhide_to_hidden_frames(error.__traceback__)
    elif mode != "off" and error.__traceback__ is not None:
        error.with_traceback(traceback_util.filter_traceback(error.__traceback__))


def boundary(fun):
    """A public function: errors that leave it show no frames of JAX's and none of ours."""

    @wraps(fun)
    def call(*args, **kwargs):
        try:
            return fun(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    return call


DONATED_AGAIN_CRASHES = jax.__version_info__ < (
    0,
    11,
)  # what was donated, given again: a segmentation fault; later an error
traceback_util.register_exclusion(os.path.dirname(__file__))  # our frames are hidden as JAX's are
source_info_util.register_exclusion(os.path.dirname(__file__))  # and are no user's lines
