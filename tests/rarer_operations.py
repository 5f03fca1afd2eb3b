"""The rarer operations of random programs: linear algebra, complex numbers, indices per row, derivatives,
wide carries.
"""

import math
from dataclasses import replace

from tests.writer import Impossible, Value, Writer


def special(w: Writer):
    x = w.number("float32")
    texts = [
        "lax.erf({0})",
        "jnp.arctan2({0}, 2 + jnp.abs({0}))",
        "jnp.expm1(-{0} * {0})",
        "jnp.logaddexp({0}, 0.5)",
    ]
    texts += [
        "lax.reduce_precision(jnp.tanh({0}), 8, 7)",
        "jnp.exp2(jnp.tanh({0}))",
        "lax.stop_gradient({0}) / 4",
    ]
    if w.smooth:
        texts.remove("lax.reduce_precision(jnp.tanh({0}), 8, 7)")
    w.put(w.rng.choice(texts).format(x), x.bound + 4, False)


def dot_of_integers(w: Writer):
    x = w.pick(("int32",), 1)
    y = w.pick(("int32",), 1, where=lambda y: y.shape[0] == x.shape[-1])
    w.put(f"jnp.tensordot({x} % 5, {y} % 5, 1)", 1024)


def product(w: Writer):
    x = w.number("float32", least_rank=1, where=lambda x: max(x.shape) < 25)
    w.put(f"jnp.prod(jnp.tanh({x}) / 2 + 0.6, axis={w.dim(x)})", 1.1 ** max(x.shape), False)


def general_reduction(w: Writer):
    x = w.pick(("int32",), 1)
    kind, start = w.rng.choice(
        [("bitwise_and", -1), ("bitwise_or", 0), ("bitwise_xor", 0), ("max", -9), ("add", 2)]
    )
    w.put(
        f"lax.reduce({x}, jnp.asarray({start}, 'int32'), lax.{kind}, ({w.dim(x)},))",
        max(x.bound, 2) * max(1, *x.shape),
    )


def diagonal(w: Writer):
    x = w.number(least_rank=2)
    i, j = w.rng.sample(range(len(x.shape)), 2)
    text = w.rng.choice(
        [f"jnp.diagonal({x}, {w.rng.randint(-1, 2)}, {i}, {j})", f"jnp.trace({x}, 0, {i}, {j})"]
    )
    w.put(text, x.bound * max(x.shape), x.exact)


def complexly(w: Writer):
    """Products and sums of complex numbers, and FFTs of them; what is kept of them is real."""
    x = w.number("float32", least_rank=1, where=lambda x: 0 not in x.shape)
    y = w.beside(x)
    d = w.dim(x)
    z = f"lax.complex(*jnp.broadcast_arrays({x}, {y}))"
    texts = [
        f"({z} * lax.complex({x}, {x})).imag",
        f"jnp.conj({z}).sum({d}).imag",
        f"(1 / (4 + {z} * {z}.conj())).real",
    ]
    texts += [f"jnp.fft.fft2(lax.complex({x}, -{x})).imag" if len(x.shape) > 1 else f"jnp.fft.ifft({z}).real"]
    texts += [f"jnp.fft.irfft({z}, n={w.rng.randint(1, 9)}, axis={d})"]
    w.put(w.rng.choice(texts), x.bound * (x.bound + y.bound) * math.prod(x.shape), False)


def _square(w: Writer) -> tuple[Value, str]:
    """A value and an expression of well-conditioned matrices that are made of it."""
    x = w.number(
        "float32", least_rank=2, where=lambda x: 0 not in x.shape and x.shape[-1] < 14 and x.shape[-2] < 25
    )
    n = x.shape[-1]
    return (
        x,
        f"({2 * n} * jnp.eye({n}) + jnp.einsum('...ij,...ik->...jk', jnp.tanh({x}), jnp.sin({x})) / "
        f"{x.shape[-2]})",
    )


def factorize(w: Writer):
    x, a = _square(w)
    n = x.shape[-1]
    text = w.rng.choice(
        [
            f"jnp.linalg.cholesky({a} + jnp.swapaxes({a}, -1, -2))",
            f"jnp.linalg.inv({a})",
            f"jnp.linalg.det({a} / {2 * n})",
        ]
        + [
            f"jnp.linalg.solve({a}, jnp.swapaxes({x}, -1, -2))",
            f"jnp.abs(jnp.linalg.qr({a})[1])",
            f"jnp.linalg.slogdet({a})[1]",
        ]
        + [f"jnp.abs(jnp.linalg.qr({a})[1])"]
        + [
            f"lax.linalg.triangular_solve({a}, {x}, lower=True)",
            f"jnp.linalg.eigvalsh({a} + jnp.swapaxes({a}, -1, -2))",
        ]
    )
    if w.smooth and ("eigvalsh" in text or "qr" in text):
        raise Impossible
    w.put(text, 4 * n + x.bound, False)


def per_row(w: Writer):
    """Gathers and scatters whose places differ from row to row: with batching dims."""
    x = w.pick(("float32", "int32"), 2, where=lambda x: 0 not in x.shape)
    i = w.places((x.shape[0], w.rng.choice([1, 2])))
    n = x.shape[1]
    if w.rng.random() < 0.4:
        return w.same(x, f"jax.vmap(lambda x, i: x[i % {n}])({x}, {i})")
    how = w.rng.choice(["add"] if w.smooth else ["add", "max", "min"])
    update = (
        f"jax.vmap(lambda x, i, u: x.at[i % {n}].{how}(u))({x}, {i}, jnp.repeat({x}[:, :1], {i.shape[1]}, 1))"
    )
    return w.put(update, 3 * x.bound, x.exact)


def window(w: Writer):
    """A window at positions in all dims that are known only when the program runs, read or written."""
    x, i = w.pick(("float32", "int32", "bool", "int8"), 1, where=lambda x: 0 not in x.shape), w.places(())
    sizes = [w.rng.choice([1, 1, n, max(1, n // 2)]) for n in x.shape]
    starts = ", ".join(w.rng.choice(["0", str(i), f"-{i}", f"{i} + {d}"]) for d in range(len(x.shape)))
    part = f"lax.dynamic_slice({x}, ({starts},), {sizes})"
    other = ", ".join(
        f"{max(0, n - s - 1)}:{max(0, n - s - 1) + s}" for n, s in zip(x.shape, sizes, strict=True)
    )
    w.same(x, w.rng.choice([part, f"lax.dynamic_update_slice({x}, {x}[{other}], ({starts},))"]))


def roll_by(w: Writer):
    x, i = w.pick(("float32", "int32", "bfloat16"), 1, where=lambda x: 0 not in x.shape), w.places(())
    w.same(x, f"jnp.roll({x}, {i} % {max(x.shape)}, {w.dim(x)})")


def segments(w: Writer):
    x = w.number("float32", "int32", least_rank=1)
    i = w.places(x.shape[:1])
    w.put(
        f"jax.ops.segment_sum({x}, {i} % 5, num_segments={w.rng.randint(1, 6)})",
        x.bound * max(1, x.shape[0]),
        x.exact,
    )


def sample(w: Writer):
    one = f"jax.random.key({w.rng.randint(0, 9)})"
    x = w.number("float32", "int32", least_rank=1, exact=True, where=lambda x: 0 not in x.shape)
    texts = [
        f"jax.random.permutation({one}, {x}, {w.dim(x)})",
        f"jax.random.permutation({one}, {x}, independent=True)",
    ]
    texts += [f"jax.random.choice({one}, {x}, (3,), axis={w.dim(x)})"]
    w.same(x, w.rng.choice(texts))


def learned_convolution(w: Writer):
    """With a kernel that is a value, whole or in groups."""
    x = w.number("float32", least_rank=2, where=lambda x: 0 not in x.shape and len(x.shape) < 4)
    k = w.number("float32", where=lambda k: k.shape and 0 not in k.shape and math.prod(k.shape) < 65)
    groups = x.shape[-1] if len(x.shape) == 3 else 1
    operand = str(x) if len(x.shape) == 3 else f"{x}[..., None]"
    kernel = f"{k}.reshape(-1)[:{min(3, math.prod(k.shape))}, None, None]" + (
        f".repeat({groups}, 2)" if groups > 1 else ""
    )
    more = w.rng.choice(["", ", lhs_dilation=[2]", ", rhs_dilation=[2]"])
    padding = [(w.rng.randint(0, 3), w.rng.randint(0, 3))]
    dims = ("NHC", "HIO", "NHC")
    text = (
        f"lax.conv_general_dilated({operand}, {kernel}, [{w.rng.choice([1, 2])}], {padding}, "
        f"dimension_numbers={dims}"
    )
    w.put(f"{text}, feature_group_count={groups}{more})", 3 * x.bound * k.bound, x.exact and k.exact)


def dilated_window(w: Writer):
    x = w.number("float32", "int32", least_rank=1)
    window = [w.rng.choice([1, 2, 3]) for _ in x.shape]
    dilations = [[w.rng.choice([1, 1, 2]) for _ in x.shape] for _ in range(2)]
    padding = [(w.rng.randint(0, 2), w.rng.randint(0, 2)) for _ in x.shape]
    more = f"{[1] * len(window)}, {padding}, {dilations[0]}, {dilations[1]}"
    zero = "0.0" if x.is_float else "0"
    w.put(f"lax.reduce_window({x}, {zero}, lax.add, {window}, {more})", x.bound * math.prod(window), x.exact)


def pairs(w: Writer):
    """A linear recurrence, as associative_scan expands it over pairs."""
    x = w.number("float32", least_rank=1, where=lambda x: 0 not in x.shape)
    d = w.dim(x)
    step = "lambda p, q: (p[0] * q[0], p[1] * q[0] + q[1])"
    w.put(f"lax.associative_scan({step}, (jnp.tanh({x}) / 2, jnp.sin({x})), axis={d})[1]", 2, False)


def attend(w: Writer):
    x = w.number(
        "float32", least_rank=2, where=lambda x: 0 not in x.shape and len(x.shape) == 2 and max(x.shape) < 32
    )
    scores = f"jnp.einsum('id,jd->ij', {x}, jnp.tanh({x}))"
    mask = w.rng.choice(["", f"jnp.where(jnp.tril(jnp.ones(({x.shape[0]},) * 2, bool)), "])
    scores = f"{mask}{scores}, -1e9)" if mask else scores
    w.put(f"jax.nn.softmax({scores}, axis=-1) @ {x}", x.bound, False)


def derived(w: Writer):
    """A function with a derivative of its own, and derivatives inside of the program."""
    x = w.number("float32")
    name = w.fresh("f")
    vjp = f"{name} = jax.custom_vjp(lambda x: jnp.tanh(x))\n"
    vjp += f"{name}.defvjp(lambda x: (jnp.tanh(x), x), lambda x, ct: (ct / (1 + x * x),))"
    jvp = (
        f"{name} = jax.custom_jvp(jnp.sin)\n{name}.defjvp(lambda x, t: (jnp.sin(x[0]), t[0] * jnp.cos(x[0])))"
    )
    loss = f"{name} = jax.grad(lambda x: jnp.sin(x).sum() + (jnp.tanh(x) ** 2).sum())"
    names = [w.fresh()]
    w.write(f"{w.rng.choice([vjp, jvp, loss])}\n{names[0]} = {name}({x})", names, 3.0, False)


def wide_scan(w: Writer):
    """A carry of two, a counter among them, and several results."""
    x = w.number("float32", least_rank=1, where=lambda x: 0 < x.shape[0] < 14)
    step = "lambda c, x: ((jnp.tanh(c[0] + x), c[1] + 1), (c[0] * x, c[1]))"
    text = (
        f"lax.scan({step}, (jnp.tanh({x}).sum(0), jnp.int32(0)), "
        f"{x}{w.rng.choice(['', ', reverse=True', ', unroll=3'])})"
    )
    names = [w.fresh() for _ in range(4)]
    w.write(f"{', '.join(names)} = jax.tree.leaves({text})", names, max(64.0, x.bound), False)


def rows_of_loop(w: Writer):
    """A loop that reads and writes rows at its counter."""
    x = w.number("float32", "int32", least_rank=1, where=lambda x: 1 < x.shape[0] < 14)
    row = w.rng.choice([f"{x}[i]", f"{x}[i] + y[i]", f"y[i - 1] - {x}[i]", f"{x}[{x.shape[0] - 1} - i]"])
    body = w.rng.choice(["set", "add"])
    w.put(
        f"lax.fori_loop(1, {x.shape[0]}, lambda i, y: y.at[i].{body}({row}), {x})",
        2048 if x.is_float else 9,
        False,
    )


def remembered(w: Writer):
    x = w.number("float32", least_rank=1)
    inner = replace(x, name=w.fresh("p"), exact=False)
    if w.depth > 1:
        raise Impossible
    block = w.block([inner], 4)
    name, text = w.define(block, [inner], [str(block.values[-1])])
    names = [w.fresh()]
    policy = w.rng.choice(["dots_saveable", "nothing_saveable", "everything_saveable"])
    call = f"jax.checkpoint({name}, policy=jax.checkpoint_policies.{policy})({x})[0]"
    w.write(f"{text}{names[0]} = {call}", names, 64.0, False)


RARER_OPERATIONS = [
    *[
        special,
        dot_of_integers,
        product,
        general_reduction,
        diagonal,
        complexly,
        factorize,
        per_row,
        window,
        window,
        roll_by,
    ],
    *[
        segments,
        sample,
        learned_convolution,
        dilated_window,
        pairs,
        attend,
        derived,
        wide_scan,
        rows_of_loop,
        remembered,
    ],
]
