"""AtHost: the transform by which an argument rests in the host's memory, for weights of inference."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from shardax import _jax
from shardax.transforms import Argument, Context
from shardax.validation import require
from shardax.zero.offload import Offload, on_device, require_memory


@dataclass(frozen=True)
class AtHost:
    """A transform by which an argument rests in the host's memory, `pinned_host`. Loops over layers bring in
    each iteration the layer's own weights, and what else reads them brings them whole, just before.

    It is one program, on any mesh, and XLA overlaps its copies; `stream` is for files, and for a budget.

    Args:
      argument: the name of an argument of the function, such as "params".

    Raises ValueError where there is no array in an argument of that name, and where devices have no such
    memory.

    >>> import shardax as sx
    >>> def apply(params, x):
    ...     return jax.lax.scan(lambda h, w: (h @ w, None), x, params)[0]
    >>> mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> run = sx.shard_jit(apply, mesh=mesh, transforms=[sx.zero.AtHost("params")])
    >>> shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, "float32")
    >>> plan = run.plan(shape(12, 256, 256), shape(64, 256))
    >>> plan.in_shardings[0].memory_kind, plan.memory().host == 12 * 256 * 256 * 4
    ('pinned_host', True)
    """

    argument: str

    def __post_init__(self):
        require(isinstance(self.argument, str), "argument of AtHost", self.argument, "a name")

    def traced_types(self, arguments: Sequence[Argument]) -> Sequence[jax.ShapeDtypeStruct]:
        """The function is traced as one on the device, wherever the argument rests."""
        return [on_device(a.type) if self._is_hosted(a) else a.type for a in arguments]

    def __call__(self, jaxpr, context: Context):
        require_memory(context.mesh, f"argument {self.argument} is to rest at the host")
        hosted = {i for i, a in enumerate(context.arguments) if self._is_hosted(a)}
        if not hosted:
            names = ", ".join(dict.fromkeys(a.path.partition("/")[0] for a in context.arguments if a.path))
            raise ValueError(
                f"argument of AtHost is {self.argument!r}, and the function has no array in an argument of "
                f"that name: its arguments are {names}"
            )
        left = {r for r, result in enumerate(context.results) if result.succeeds in hosted}
        return Offload().program(_jax.dce(jaxpr), hosted, left)

    def _is_hosted(self, argument: Argument) -> bool:
        return argument.path.partition("/")[0] == self.argument and bool(argument.type.shape)
