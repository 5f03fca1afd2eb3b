"""The product of JAX's transformations: which pairs compose with shard_jit, in three orders, against the
plain function.

`python -m tests.transformations` tries them all and writes the table in docs/transformations.md.
"""

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "transformations.md"
MESHES = {
    kind.name: jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    for kind in (AxisType.Auto, AxisType.Explicit)
}
X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
W = np.linspace(-1, 2, 4, dtype=np.float32).reshape(2, 2)

Function = Callable[[Any, Any], Any]  # of x and w, giving a pytree of arrays


def layer(x, w):
    return (x @ w) * x


def sharded(f: Function, mesh: jax.sharding.Mesh) -> Function:
    return sx.shard_jit(f, mesh=mesh, in_shardings=(P("x"), P(None, "y")))


def total(f: Function) -> Callable[[Any, Any], jax.Array]:
    """A number of all that `f` gives."""
    return lambda x, w: sum((leaf * leaf).sum() for leaf in jax.tree.leaves(f(x, w)))


def custom(f: Function) -> Function:
    """`f` with a derivative of its own, twice the true one."""
    g = jax.custom_vjp(f)
    g.defvjp(
        lambda x, w: (f(x, w), (x, w)),
        lambda saved, ct: jax.vjp(f, *saved)[1](jax.tree.map(lambda c: 2 * c, ct)),
    )
    return g


def scanned(f: Function) -> Function:
    def g(x, w):
        def trip(carry, scale):
            out = f(scale * x + carry, w)
            return total(lambda *_: out)(x, w) / 8, out

        return lax.scan(trip, jnp.float32(0), jnp.array([1, 0.5], jnp.float32))

    return g


TRANSFORMS: dict[str, Callable[..., Function]] = {
    "grad": lambda f: jax.grad(total(f), (0, 1)),
    "value_and_grad": lambda f: jax.value_and_grad(lambda x, w: (total(f)(x, w), f(x, w)), has_aux=True),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (x[::-1], w + 1)),
    "vjp": lambda f: lambda x, w: (lambda out, back: back(out))(*jax.vjp(f, x, w)),
    "linearize": lambda f: lambda x, w: jax.linearize(f, x, w)[1](x[::-1], w + 1),
    "hessian": lambda f: lambda x, w: jax.hessian(total(f), 1)(x, w),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), w),
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": scanned,
    "custom_vjp": custom,
    "shard_jit": lambda f, mesh: sx.shard_jit(f, mesh=mesh, in_shardings=(P(None, "x"), P("y"))),
}
ORDERS: dict[str, Callable[..., Function]] = {
    "inside": lambda outer, inner, sharded: outer(inner(sharded(layer))),
    "between": lambda outer, inner, sharded: outer(sharded(inner(layer))),
    "outside": lambda outer, inner, sharded: sharded(outer(inner(layer))),
}
REASONS = {
    (outer, "custom_vjp"): "JAX has no forward mode of a `custom_vjp`" for outer in ("jvp", "linearize")
}


def check(outer: str, inner: str, run=None, mesh: jax.sharding.Mesh = MESHES["Auto"]) -> None:
    """Whether a cell is as the table says, in all orders: equal to the plain function, or refused as the
    plain function is.
    """
    run = run or operation_by_operation
    transforms = [_on(mesh, name) for name in (outer, inner)]
    orders = [order(*transforms, functools.partial(sharded, mesh=mesh)) for order in ORDERS.values()]
    plain = functools.partial(run, transforms[0](transforms[1](layer)))
    if (outer, inner) in REASONS:
        for f in (plain, *(functools.partial(run, f) for f in orders)):
            with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
                f()
        return
    expected = plain()
    for f in orders:
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
        jax.tree.map(close, run(f), expected)


def _on(mesh: jax.sharding.Mesh, name: str) -> Callable[[Function], Function]:
    transform = TRANSFORMS[name]
    return functools.partial(transform, mesh=mesh) if name == "shard_jit" else transform


def operation_by_operation(f: Function) -> list[Any]:
    """The results of the program that the transformations make. Its operations are compiled alone, once for
    all cells.
    """
    jaxpr = jax.make_jaxpr(f)(X, W)
    with jax.disable_jit():
        return jaxpr_as_fun(jaxpr)(X, W)


def compiled(f: Function) -> list[Any]:
    """The results of the program partitioned and compiled as a whole."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.tree.leaves(jax.jit(f).lower(X, W).compile(options)(X, W))


def table() -> str:
    """The product as Markdown; a row is the outer transformation, a column the inner one."""
    notes = sorted(set(REASONS.values()))
    cell = lambda pair: f"[{notes.index(REASONS[pair]) + 1}]" if pair in REASONS else "yes"  # noqa: E731
    rows = [["", *TRANSFORMS], ["---"] * (1 + len(TRANSFORMS))]
    rows += [[f"**{outer}**", *(cell((outer, inner)) for inner in TRANSFORMS)] for outer in TRANSFORMS]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", *(f"[{i}] {note}, sharded or not.  " for i, note in enumerate(notes, 1))])


def page(text: str) -> str:
    """The text of the page with the table in its place."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


BEGIN, END = "<!-- made by python -m tests.transformations -->", "<!-- end -->"


def main() -> None:
    for outer in TRANSFORMS:
        for inner in TRANSFORMS:
            check(outer, inner)
            check(outer, inner, compiled, MESHES["Explicit"])
        print(f"{outer}: over each of {len(TRANSFORMS)}, as the table says")
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
