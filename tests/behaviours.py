"""What jax.jit does, as programs that take the decorator: each gives the same with `shard_jit` in its place.

`BEHAVIOURS` run on Auto and on Explicit axes, `EXPLICIT` on these alone, under `jax.set_mesh`. A program is a function of `jit` and of `put`, which places an array on the mesh; it gives a pytree of
arrays and of what else is to be equal. `REFUSED` are errors of the same type, and a few words of them.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
KEYS = jax.random.split(jax.random.key(3), 8)


def types(tree) -> list[str]:
    """Of each array what `jax.typeof` shows."""
    return [str(jax.typeof(x)) for x in jax.tree.leaves(tree)]


def seen(jit, fun, *args, **options):
    """The results, and the types that the function saw of its arguments in the last trace."""
    found: list[list[str]] = []
    out = jit(lambda *args: (found.append(types(args)), fun(*args))[1], **options)(*args)
    return out, found[-1]


def traces(jit, calls, **options) -> int:
    """How often a function is traced by these calls."""
    count: list[int] = []
    f = jit(lambda *args, **kwargs: (count.append(1), args[0])[1], **options)
    for args, kwargs in calls:
        f(*args, **kwargs)
    return len(count)


class Model:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return self.scale * x


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.clip(ct * x, -0.5, 0.5),))


@jax.custom_jvp
def doubled(x):
    return 2.0 * x


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 3.0 * tangents[0]))


def donated(jit, put, **options):
    x = put(X, "x")
    out = jit(lambda x: x + 1, donate_argnums=0, **options)(x)
    return out, x.is_deleted()


def in_loop(jit, put):
    step = jit(lambda c, x: (c + x.sum(), c * x))
    return lax.scan(step, jnp.float32(0), X)


def while_loop(x):
    return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))


def method(jit, put):
    class Layer:
        scale = 3.0

        @functools.partial(jit, static_argnums=0)
        def apply(self, x):
            return self.scale * x

    return Layer().apply(put(X, "x"))


def callback(jit, put):
    shape = jax.ShapeDtypeStruct((8,), "float32")
    return jit(lambda x: jax.pure_callback(lambda x: np.asarray(x).sum(1), shape, x))(put(X))


def stages(jit, put):
    lowered = jit(lambda x, y: {"a": x + y}).lower(put(X, "x"), put(X, "x"))
    compiled = lowered.compile()
    out = compiled(put(X, "x"), put(X, "x"))
    return out, str(lowered.in_tree), str(compiled.out_tree), str(lowered.out_info["a"].dtype)


def traced(jit, put):
    found = jit(lambda x, s: x * s, static_argnums=1).trace(put(X, "x"), 3)
    return types(found.out_info), str(jax.tree.structure(found.out_info)), found.fun_name


def aot_of_shapes(jit, put):
    x = put(X, "x")
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return jit(jnp.sin).lower(shape).compile()(x)


def closing_over(place):
    def program(jit, put):
        held = put(X, *place)
        return jit(lambda x: jnp.sin(x) + held)(put(X, "x"))

    return program


TRANSFORMED: dict[str, Any] = {
    "jit": lambda f: jax.jit(lambda x: f(x)),
    "vmap": jax.vmap,
    "vmap of columns": lambda f: jax.vmap(f, in_axes=1, out_axes=1),
    "jit of vmap": lambda f: jax.jit(jax.vmap(f)),
    "checkpoint": jax.checkpoint,
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "scan": lambda f: lambda x: lax.scan(lambda c, i: (f(c), f(c) + i), x, np.arange(3, dtype=np.float32)),
    "make_jaxpr": lambda f: lambda x: list(map(str, jax.make_jaxpr(f)(x).out_avals)),
    "eval_shape": lambda f: lambda x: types(jax.eval_shape(f, x)),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](x),
}
"""Around the jitted function; these run under any mesh in context, and under none."""

BEHAVIOURS: dict[str, Any] = {
    "elementwise": lambda jit, put: jit(lambda x: jnp.tanh(x) * 2)(put(X, "x", "y")),
    "identity": lambda jit, put: jit(lambda x: x)(put(X, "x")),
    "one argument twice": lambda jit, put: jit(operator.add)(*[put(X, "x")] * 2),
    "a result twice": lambda jit, put: jit(lambda x: (x, x, x + 1))(put(X, "x")),
    "no arguments": lambda jit, put: jit(lambda: jnp.arange(4.0) * 2)(),
    "no results": lambda jit, put: (jit(lambda x: None)(put(X)), jit(lambda x: ())(put(X))),
    "constants": lambda jit, put: jit(lambda x: (3, 2.5, True, np.int8(4), x))(put(X, "x")),
    "nested containers": lambda jit, put: jit(lambda t: {"b": t["a"][1], "a": [t["a"][0], None]})(
        {"a": (put(X, "x"), put(X, None, "y"))}
    ),
    "keyword arguments": lambda jit, put: jit(lambda x, *, y, z=2: x * y + z)(put(X, "x"), y=put(X, "x")),
    "defaults": lambda jit, put: jit(lambda x, y=3.0: x * y)(put(X, "x")),
    "variadic": lambda jit, put: jit(lambda *xs, **ys: (sum(xs), ys["k"]))(put(X, "x"), put(X, "x"), k=1),
    "static by number": lambda jit, put: jit(lambda x, n: x**n, static_argnums=1)(put(X, "x"), 3),
    "static by name": lambda jit, put: jit(lambda x, n: x**n, static_argnames="n")(put(X, "x"), n=3),
    "a static function": lambda jit, put: jit(lambda f, x: f(x), static_argnums=0)(jnp.sin, put(X, "x")),
    "a callable object": lambda jit, put: jit(Model(3.0))(put(X, "x")),
    "a partial": lambda jit, put: jit(functools.partial(operator.sub, 1.0))(put(X, "x")),
    "a method": method,
    "unused": lambda jit, put: jit(lambda x, unused: x)(put(X, "x"), put(X, "y")),
    "keep_unused": lambda jit, put: jit(lambda x, unused: x, keep_unused=True)(put(X, "x"), put(X)),
    "inline": lambda jit, put: jit(lambda x: jit(jnp.sin, inline=True)(x) + 1)(put(X, "x")),
    "compiler options": lambda jit, put: jit(jnp.sin, compiler_options={"xla_embed_ir_in_executable": True})(
        put(X, "x")
    ),
    "donated": donated,
    "donated and kept": lambda jit, put: donated(jit, put, keep_unused=True),
    "integers": lambda jit, put: jit(lambda x: (x // 3, x % 3, x << 1, -x))(put(np.arange(8), "x")),
    "booleans": lambda jit, put: jit(lambda x: (x > 0, ~(x > 0)))(put(X, "x")),
    "bfloat16": lambda jit, put: jit(lambda x: x.astype("bfloat16") + 1)(put(X, "x")),
    "complex": lambda jit, put: jit(lambda x: lax.complex(x, x) * 2)(put(X, "x")),
    "weak types": lambda jit, put: jit(lambda x, s: (x * s, s + 1))(put(X, "x"), 2.0),
    "empty": lambda jit, put: jit(lambda x: x * 2)(put(np.zeros((8, 0), np.float32), "x")),
    "scalars": lambda jit, put: jit(lambda x: x + 1)(put(np.float32(2))),
    "keys": lambda jit, put: jit(lambda k: jax.random.bits(jax.random.fold_in(k[0], 1), (4,)))(put(KEYS)),
    "reductions": lambda jit, put: jit(lambda x: (x.sum(), x.max(1), x.argmin(0)))(put(X, "x")),
    "a contraction": lambda jit, put: jit(lambda x, y: x @ y)(put(X, "x"), put(X, None, "y")),
    "transposed": lambda jit, put: jit(lambda x: x.T)(put(X, "x", "y")),
    "broadcast": lambda jit, put: jit(lambda x: x[None] + 1)(put(X, "x")),
    "a dim indexed": lambda jit, put: jit(lambda x: (x[:, 2], x[:, ::2]))(put(X, "x")),
    "cond": lambda jit, put: jit(lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x))(put(X, "x")),
    "while": lambda jit, put: jit(while_loop)(put(X, "x")),
    "scan": lambda jit, put: jit(lambda x: lax.scan(lambda c, r: (c + 1, r * c), 1.0, x))(put(X, None, "y")),
    "inside a scan": in_loop,
    "jit inside": lambda jit, put: jit(lambda x: jax.jit(jnp.sin)(x) + 1)(put(X, "x")),
    "itself inside": lambda jit, put: jit(lambda x: jit(jnp.sin)(x) + 1)(put(X, "x")),
    "custom_vjp": lambda jit, put: jit(lambda x: (clipped(x), jax.vjp(clipped, x)[1](x)))(put(X, "x")),
    "custom_jvp": lambda jit, put: jit(lambda x: jax.jvp(doubled, (x,), (x,)))(put(X, "x")),
    "value_and_grad": lambda jit, put: jit(jax.value_and_grad(lambda x: (x**2).sum()))(put(X, "x")),
    "grad outside": lambda jit, put: jax.grad(jit(lambda x: (x**2).sum()))(put(X, "x")),
    "hessian": lambda jit, put: jit(jax.hessian(lambda x: (x**3).sum()))(put(X[0])),
    "vmap inside": lambda jit, put: jit(jax.vmap(lambda x, y: x * y))(put(X, "x"), put(X, "x")),
    "callback": callback,
    "closed over": closing_over(("x",)),
    "closed over, replicated": closing_over(()),
    "types inside": lambda jit, put: seen(jit, lambda x: jnp.sin(x), put(X, "x", "y")),
    "out_shardings": lambda jit, put: jit(jnp.sin, out_shardings=P("y"))(put(X, "x")),
    "a prefix of shardings": lambda jit, put: jit(
        lambda t: (t, t["a"]), in_shardings=({"a": P("x")},), out_shardings=(P("x"), None)
    )({"a": put(X, "x")}),
    "None for some": lambda jit, put: jit(lambda x, y: x + y, in_shardings=(P("x"), None))(
        put(X, "x"), put(X, "x")
    ),
    "numpy": lambda jit, put: jit(jnp.sin)(X),
    "numpy beside placed": lambda jit, put: jit(operator.add)(put(X, "x"), X),
    "stages": stages,
    "traced": traced,
    "lowered for shapes": aot_of_shapes,
    "eval_shape": lambda jit, put: types(jit(jnp.sin).eval_shape(put(X, "x"))),
    "traced once": lambda jit, put: traces(jit, [((put(X, "x"),), {})] * 3),
    "by type": lambda jit, put: traces(jit, [((put(x, "x"),), {}) for x in (X, X[:, :4], X)]),
    "by keyword": lambda jit, put: traces(
        jit, [((put(X),), {"a": 1, "b": 2}), ((put(X),), {"b": 2, "a": 1})]
    ),
    "by static value": lambda jit, put: traces(jit, [((put(X), n), {}) for n in (1, 2, 1)], static_argnums=1),
    "wrapped": lambda jit, put: (jit(in_loop).__name__, jit(in_loop).__wrapped__ is in_loop),
}

EXPLICIT: dict[str, Any] = {
    "reshard": lambda jit, put: jit(lambda x: reshard(x, P("y", "x")) * 2)(put(X, "x")),
    "out_sharding": lambda jit, put: jit(lambda x, y: jnp.einsum("ij,jk->ik", x, y, out_sharding=P("x")))(
        put(X, None, "y"), put(X, "y")
    ),
    "type of a product": lambda jit, put: seen(
        jit, lambda x, y: jnp.sin(x) @ y, put(X, "x"), put(X, None, "y")
    ),
    "type of what is closed over": lambda jit, put: jax.jit(closing_over(("x",)), static_argnums=(0, 1))(
        jit, put
    ),
}

REFUSED: dict[str, tuple[Any, str]] = {
    "a string": (lambda jit, put: jit(lambda x: x)("s"), "abstract array"),
    "a string back": (lambda jit, put: jit(lambda x: "s")(put(X)), "is not a valid JAX type"),
    "a list in a result": (lambda jit, put: jit(lambda x: {"a": object})(put(X)), "is not a valid JAX type"),
    "too few arguments": (lambda jit, put: jit(lambda x, y: x)(put(X)), "missing 1 required positional"),
    "another keyword": (lambda jit, put: jit(lambda x: x)(put(X), z=1), "unexpected keyword argument 'z'"),
    "the user's own": (lambda jit, put: jit(lambda x: {}["a"])(put(X)), "'a'"),
    "shapes": (lambda jit, put: jit(lambda x: x + x[:3])(put(X)), "got incompatible shapes"),
    "a condition": (lambda jit, put: jit(lambda x: x if x.sum() > 0 else -x)(put(X)), "boolean conversion"),
    "unhashable": (lambda jit, put: jit(lambda x, s: x, static_argnums=1)(put(X), [1]), "ashable"),
    "no such option": (
        lambda jit, put: jit(jnp.sin, compiler_options={"no_such": 1})(put(X)),
        "No such compile option",
    ),
    "abstracted_axes": (lambda jit, put: jit(jnp.sin, abstracted_axes={0: "n"}), "abstracted_axes"),
    "other devices": (
        lambda jit, put: jit(operator.add)(put(X), jax.device_put(X, jax.devices()[1])),
        "Received incompatible devices for jitted computation. Got argument",
    ),
    "results on other devices": (
        lambda jit, put: jit(jnp.sin, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[2]))(
            put(X)
        ),
        "Received incompatible devices for jitted computation.",
    ),
}
