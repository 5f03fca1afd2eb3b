"""Flax: shardings from the names that its modules give to dims, and shard_jit for functions of nnx objects.

Linen's variables are pytrees, so `shardax.shard_jit` takes them as they are. Boxes (`nn.Partitioned`,
`nn.LogicallyPartitioned`) may stand in trees of shardings, and `specs` turns them into PartitionSpecs.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from flax import nnx
from flax.core import meta
from jax.sharding import PartitionSpec

from shardax import _jax, api
from shardax.annotations.annotate import annotate
from shardax.annotations.boxes import Rules, box_spec
from shardax.jit.abstract_state import abstract_state as abstract_arguments
from shardax.jit.signature import positional_names
from shardax.validation import require, require_argument_names, require_argument_numbers, require_function


@_jax.boundary
def specs(tree: Any, rules: Rules | None = None) -> Any:
    """The shardings that the names in a pytree of Flax variables ask for: a PartitionSpec where there are
    names, else None.

    None leaves an array to completion, where `nn.get_partition_spec` would keep it whole. Arrays in the state
    of an optimizer get None, even where nnx copied the names of a parameter to them: their shardings follow
    from the parameters by completion.

    Args:
      tree: linen variables with boxes, an `nnx.State`, or pytrees of these, of arrays or of shapes
        (`jax.eval_shape`).
      rules: pairs of a name and a mesh axis. Without them, the rules of a box or Variable are taken, then
        those in context (`nn.logical_axis_rules`). Where there are no rules, the names of `nn.Partitioned`
        and of Variables are mesh axes.

    Raises ValueError where there are no rules for `nn.LogicallyPartitioned`.

    >>> box = meta.Partitioned(jax.ShapeDtypeStruct((8, 4), "float32"), names=("data", None))
    >>> specs({"kernel": box, "bias": jax.ShapeDtypeStruct((4,), "float32")})
    {'bias': None, 'kernel': P('data', None)}
    """
    pairs = isinstance(rules, Sequence) and all(isinstance(r, tuple | list) and len(r) == 2 for r in rules)
    words = "pairs of the name of a dim and mesh axes, such as [('embed', None), ('mlp', 'model')]"
    require(pairs or rules is None, "rules of shardax.flax.specs", rules, words)
    names_dims = lambda x: isinstance(x, meta.AxisMetadata | nnx.Variable)  # noqa: E731
    return jax.tree.map(functools.partial(_spec, rules=rules), tree, is_leaf=names_dims)


def _spec(x, rules: Rules | None):
    if not isinstance(x, nnx.Variable):
        return box_spec(x, rules) if isinstance(x, meta.Partitioned) else None
    if isinstance(x, nnx.OptState) or not x.get_metadata().get("out_sharding"):
        return x.replace(None)
    with_rules = x
    if rules is not None:
        with_rules = x.copy()
        with_rules.set_metadata(sharding_rules=rules)
    return x.replace(nnx.spmd.get_var_pspec(with_rules))


@_jax.boundary
def shard_jit(
    fun: Callable[..., Any] | None = None,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    **options: Any,
) -> Any:
    """`shardax.shard_jit` for functions of nnx objects. As by `nnx.jit`, what the function changes in them is
    written back.

    Modules, optimizers, `Rngs` and metrics may stand anywhere in the arguments and the results, shared or
    not. Where `in_shardings` says nothing about an argument (None), its Variables rest as their metadata says
    (see `specs`), and so for results. Other leaves of the shardings are a PartitionSpec for all of an object,
    or the `nnx.State` that `specs` makes.

    Args:
      fun: a function of pytrees of arrays and nnx objects. Without it, the decorator.
      **options: the others of `shardax.shard_jit`.

    >>> @shard_jit(mesh=jax.make_mesh((1,), ("x",)))
    ... def draw(rngs):
    ...     return jax.random.uniform(rngs())
    >>> rngs = nnx.Rngs(0)
    >>> bool(draw(rngs) != draw(rngs)), int(rngs.default.count[...])
    (True, 2)
    """
    if fun is None:
        return functools.partial(
            shard_jit,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            static_argnums=static_argnums,
            donate_argnums=donate_argnums,
            **options,
        )
    require_function(
        fun, "fun of shardax.flax.shard_jit", "a function: give shardings and the mesh by their names"
    )
    require_argument_numbers(static_argnums, "static_argnums of shardax.flax.shard_jit")
    require_argument_numbers(donate_argnums, "donate_argnums of shardax.flax.shard_jit")
    require_argument_names(options.get("static_argnames"), "static_argnames of shardax.flax.shard_jit")
    shardings = tuple(in_shardings) if isinstance(in_shardings, list) else in_shardings
    step = api.shard_jit(
        _of_states(
            fun,
            shardings,
            out_shardings,
            *_jax.infer_argnums_and_argnames(fun, static_argnums, options.get("static_argnames")),
        ),
        in_shardings=(None, *shardings) if isinstance(shardings, tuple) else shardings,
        out_shardings=(None, None, out_shardings),
        static_argnums=_shifted(static_argnums),
        donate_argnums=_shifted(donate_argnums),
        **options,
    )
    return NnxShardJit(fun, step)


@_jax.boundary
def abstract_state(step: Any, *args: Any, argnums: int | Sequence[int] = 0, **kwargs: Any) -> Any:
    """`shardax.abstract_state` for what `shardax.flax.shard_jit` returned: an object among the arguments
    gives its `nnx.State`.

    The objects may be abstract (`nnx.eval_shape`). What comes out is a value for `out_shardings=` of the
    function that makes the objects, and what orbax restores into.

    >>> mesh = jax.make_mesh((1,), ("x",))
    >>> step = shard_jit(lambda model, x: model(x), mesh=mesh, in_shardings=(None, PartitionSpec("x")))
    >>> model = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> abstract_state(step, model, jax.ShapeDtypeStruct((4, 2), "float32"))["kernel"].sharding.spec
    P(None, None)
    """
    if not isinstance(step, NnxShardJit):
        raise ValueError(
            f"abstract_state: step is {step!r}, which shardax.flax.shard_jit did not make: give it "
            "shard_jit(fun, ...)"
        )
    require_argument_numbers(argnums, "argnums of abstract_state", or_none=False)
    return step._of_states(
        functools.partial(abstract_arguments, step._step, argnums=_shifted(argnums)), args, kwargs
    )


class NnxShardJit:
    """What `shardax.flax.shard_jit` returns: called as the function is. `plan` and `lower` are those of
    `shard_jit`.
    """

    def __init__(self, fun: Callable[..., Any], step: Any):
        functools.update_wrapper(self, fun)
        self._step = step

    def __call__(self, *args, **kwargs):
        with nnx.update_context(_TAG):
            graphs, objects, results = self._on_states(self._step, args, kwargs)
            with nnx.merge_context(_TAG, False) as context:
                _, out = _merge(context, graphs, (objects, results))
        return out

    def __get__(self, instance, owner=None):
        return self if instance is None else functools.partial(self, instance)

    def plan(self, *args, **kwargs):
        """See `shardax.shard_jit(...).plan`; the objects may be abstract (`nnx.eval_shape`)."""
        return self._of_states(self._step.plan, args, kwargs)

    def lower(self, *args, **kwargs) -> jax.stages.Lowered:
        """See `shardax.shard_jit(...).lower`."""
        return self._of_states(self._step.lower, args, kwargs)

    def _of_states(self, method, args, kwargs):
        with nnx.update_context(_TAG):
            return self._on_states(method, args, kwargs)

    def _on_states(self, method, args, kwargs):
        with nnx.split_context(_TAG) as context:
            graphs, (states, kwstates) = _split(context, (args, kwargs))
        return method(graphs, *states, **kwstates)


_TAG = "shardax.flax.shard_jit"


def _of_states(
    fun: Callable[..., Any],
    in_shardings: Any,
    out_shardings: Any,
    static_argnums: Sequence[int],
    static_argnames: Sequence[str],
) -> Callable[..., Any]:
    """The pure function: states in the places of the objects, their graphs before all other arguments and
    results.
    """
    parameters = [name for name in positional_names(fun) if name not in static_argnames]

    def pure(graphs, *states, **kwstates):
        dynamic = [
            i for i in range(len(states)) if i not in static_argnums and i - len(states) not in static_argnums
        ]
        requested = _requests(in_shardings, len(dynamic))
        by_name = dict(zip(parameters[len(dynamic) :], requested[len(dynamic) :], strict=False))
        by_number = dict(zip(dynamic, requested, strict=False))
        states = tuple(x if by_number.get(i, True) else _annotated(x) for i, x in enumerate(states))
        kwstates = {name: x if by_name.get(name) else _annotated(x) for name, x in kwstates.items()}
        with nnx.merge_context(_TAG, True) as context:
            args, kwargs = _merge(context, graphs, (states, kwstates))
        out = fun(*args, **kwargs)
        with nnx.split_context(_TAG) as context:
            objects = jax.tree.map(lambda x: x if _is_object(x) else None, (args, kwargs), is_leaf=_is_leaf)
            graphs, (objects, results) = _split(context, (objects, out))
        return graphs, _annotated(objects), _annotated(results) if out_shardings is None else results

    functools.update_wrapper(pure, fun)
    pure.__signature__ = _with_graphs(fun)  # type: ignore[attr-defined]
    return pure


def _with_graphs(fun: Callable[..., Any]) -> inspect.Signature:
    """The signature of the pure function: names and numbers of arguments are inferred from it, and messages
    use them.
    """
    own = inspect.signature(fun)
    graphs = inspect.Parameter("graphs", inspect.Parameter.POSITIONAL_ONLY)
    first = [
        p.replace(kind=p.POSITIONAL_OR_KEYWORD) if p.kind is p.POSITIONAL_ONLY else p
        for p in own.parameters.values()
    ]
    return own.replace(parameters=[graphs, *first])


def _requests(in_shardings: Any, count: int) -> list[bool]:
    """Which arguments have a requested sharding: of the first `count`, and of more that in_shardings has."""
    if isinstance(in_shardings, tuple) and not isinstance(in_shardings, PartitionSpec):
        return [s is not None for s in in_shardings] + [False] * (count - len(in_shardings))
    return [in_shardings is not None] * count


def _annotated(tree):
    """The states in a tree, their arrays split as their metadata says."""
    return jax.tree.map(
        lambda x: annotate(x, specs(x)) if isinstance(x, nnx.State) else x, tree, is_leaf=_is_leaf
    )


def _split(context, tree) -> tuple[tuple[Any, ...], Any]:
    """The graph of each object in a tree, None for each other leaf; and the tree with the objects' states in
    their places.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_leaf)
    pairs = [context.split(x) if _is_object(x) else (None, x) for x in leaves]
    return tuple(graph for graph, _ in pairs), structure.unflatten([x for _, x in pairs])


def _merge(context, graphs: Iterable[Any], tree):
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_leaf)
    pairs = zip(graphs, leaves, strict=True)
    return structure.unflatten([x if graph is None else context.merge(graph, x) for graph, x in pairs])


def _is_object(x) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _is_leaf(x) -> bool:
    return _is_object(x) or isinstance(x, nnx.State)


def _shifted(numbers: Any) -> Any:
    """Numbers of positional arguments, after one more in front."""
    if isinstance(numbers, Iterable):
        return tuple(map(_shifted, numbers))
    return numbers if numbers is None or numbers < 0 else numbers + 1
