"""The operations of random programs: each writes one statement, or raises Impossible."""

import math
from collections.abc import Sequence
from dataclasses import replace

from tests.writer import MOST, Impossible, Value, Writer, broadcasts


def smooth(w: Writer):
    x = w.number("float32", "bfloat16")
    text, bound = w.rng.choice(
        [("jnp.tanh({0})", 1), ("jnp.sin({0})", 1), ("jax.nn.gelu({0})", x.bound), ("jnp.exp(-{0} * {0})", 1)]
        + [
            ("1 / (1 + {0} * {0})", 1),
            ("jnp.sqrt(1 + {0} * {0})", x.bound + 1),
            ("jax.nn.silu({0})", x.bound),
        ]
        + [("{0} / 3", x.bound), ("jax.nn.softplus({0})", x.bound + 1), ("jnp.log1p({0} * {0})", x.bound + 1)]
    )
    w.put(text.format(x), bound, False)


def polynomial(w: Writer):
    x = w.number()
    text, bound = w.rng.choice(
        [("-{0}", x.bound), ("{0} * {0}", x.bound**2), ("{0} + 1", x.bound + 1), ("2 * {0}", 2 * x.bound)]
    )
    w.put(text.format(x), bound, x.exact)


def kink(w: Writer):
    x = w.kinked()
    text = w.rng.choice(
        ["jax.nn.relu({0})", "jnp.abs({0})", "jnp.clip({0}, -1, 2)", "jnp.maximum({0}, 0)", "jnp.sign({0})"]
    )
    w.put(text.format(x), x.bound, x.exact)


def integer(w: Writer):
    x = w.number("int32", "uint32")
    choices = [
        "{0} // 2",
        "{0} % 5",
        "lax.div({0}, jnp.asarray(2, {0}.dtype))",
        "{0} >> 1",
        "{0} & 3",
        "{0} ^ 1",
    ]
    w.put(w.rng.choice(choices).format(x), x.bound)


def add(w: Writer):
    x = w.number()
    y = w.beside(x)
    w.put(f"{x} {w.rng.choice('+-')} {y}", x.bound + y.bound, x.exact and y.exact)


def multiply(w: Writer):
    x = w.number()
    y = w.beside(x)
    w.put(f"{x} * {y}", x.bound * y.bound, x.exact and y.exact)


def divide(w: Writer):
    x = w.number("float32")
    w.put(f"{x} / (1 + {w.beside(x)} ** 2)", x.bound, False)


def extremum(w: Writer):
    x = w.kinked()
    y = w.beside(x)
    if w.smooth and not y.exact:
        raise Impossible
    w.put(f"jnp.{w.rng.choice(['maximum', 'minimum'])}({x}, {y})", max(x.bound, y.bound), x.exact and y.exact)


def compare(w: Writer):
    x = w.number("float32", "int32", exact=True)
    w.put(w.rng.choice([f"{x} > 0", f"{x} == 1", f"{x} <= {x}.sum()"]))


def logic(w: Writer):
    x = w.pick(("bool",))
    texts = [
        f"~{x}",
        f"{x} & {w.beside(x)}",
        f"{x} ^ {w.beside(x)}",
        f"jnp.any({x}, axis={_some_dims(w, x)})",
    ]
    w.put(
        w.rng.choice(
            [*texts, f"jnp.all({x}, axis={_some_dims(w, x)})", f"jnp.cumsum({x}.astype('int32'), axis=-1)"]
        )
    )


def select(w: Writer):
    x = w.number()
    y, which = w.beside(x), w.pick(("bool",), where=lambda c: broadcasts(c.shape, x.shape))
    w.put(
        f"jnp.where({which}, {x}, {w.rng.choice([str(y), '0'])})", max(x.bound, y.bound), x.exact and y.exact
    )


def einsum(w: Writer):
    x, y = w.number("float32", "bfloat16", least_rank=1), w.number("float32", "bfloat16")
    if x.dtype != y.dtype:
        raise Impossible
    left = "abcdefghi"[: len(x.shape)]
    right = _letters(w, x, y, left)
    kept = [c for c in dict.fromkeys(left + right) if (c in left) != (c in right) or w.rng.random() < 0.4]
    w.rng.shuffle(kept)
    sizes = dict(zip(left + right, x.shape + y.shape, strict=True))
    summed = math.prod(n for c, n in sizes.items() if c not in kept)
    w.put(
        f"jnp.einsum('{left},{right}->{''.join(kept)}', {x}, {y})",
        x.bound * y.bound * summed,
        x.exact and y.exact,
    )


def _letters(w: Writer, x: Value, y: Value, left: str) -> str:
    right = ""
    for d, n in enumerate(y.shape):
        shared = [c for c, m in zip(left, x.shape, strict=True) if m == n and c not in right]
        right += w.rng.choice(shared) if shared and w.rng.random() < 0.8 else "opqrstuvw"[d]
    return right


def _some_dims(w: Writer, x: Value) -> tuple[int, ...]:
    return tuple(sorted(w.rng.sample(range(len(x.shape)), w.rng.randint(0, len(x.shape)))))


def total(w: Writer):
    x = w.number(least_rank=1)
    dims = _some_dims(w, x)
    count = math.prod(x.shape[d] for d in dims)
    w.put(f"jnp.sum({x}, axis={dims}, keepdims={w.rng.random() < 0.3})", x.bound * count, x.exact)


def mean(w: Writer):
    x = w.number("float32", "bfloat16", least_rank=1)
    w.put(
        f"jnp.{w.rng.choice(['mean', 'var'])}({x}, axis={w.dim(x)}, keepdims={w.rng.random() < 0.5})",
        x.bound**2,
        False,
    )


def normalize(w: Writer):
    x = w.number("float32", "bfloat16", least_rank=1, where=lambda x: 0 not in x.shape)
    w.put(f"jax.nn.{w.rng.choice(['softmax', 'log_softmax'])}({x}, axis={w.dim(x)})", 2 * x.bound + 8, False)


def greatest(w: Writer):
    x = w.kinked(least_rank=1)
    w.put(f"jnp.{w.rng.choice(['max', 'min'])}({x}, axis={_some_dims(w, x)})", x.bound, x.exact)


def place(w: Writer):
    x = w.number("float32", "int32", least_rank=1, exact=True)
    w.put(f"jnp.{w.rng.choice(['argmax', 'argmin', 'argsort'])}({x}, axis={w.dim(x)})", 1024)


def cumulate(w: Writer):
    x = w.number("float32", "int32", least_rank=1)
    d = w.dim(x)
    w.put(f"lax.cumsum({x}, {d}, reverse={w.rng.random() < 0.5})", x.bound * x.shape[d], x.exact)


def sort(w: Writer):
    x = w.kinked(least_rank=1)
    w.put(
        w.rng.choice(["jnp.sort({0}, axis={1})", "lax.cummax({0}, {1})"]).format(x, w.dim(x)),
        x.bound,
        x.exact,
    )


def top_k(w: Writer):
    x = w.number("float32", "int32", least_rank=1, exact=True)
    w.put(f"lax.top_k({x}, {w.rng.randint(1, 3)})[{w.rng.choice([0, 0, 1])}]", max(x.bound, 1024))


ANY = ("float32", "float32", "bfloat16", "int32", "bool", "uint32", "int8")


def transpose(w: Writer):
    x = w.pick(ANY, 2)
    w.same(x, f"jnp.transpose({x}, {tuple(w.rng.sample(range(len(x.shape)), len(x.shape)))})")


def reshape(w: Writer):
    """To other factors: dims are merged and taken apart."""
    x = w.pick(ANY, where=lambda x: math.prod(x.shape) > 1)
    primes = [p for n in x.shape for p in _primes(n)]
    shape: list[int] = []
    for p in primes:
        shape = [*shape[:-1], shape[-1] * p] if shape and w.rng.random() < 0.5 else [*shape, p]
    if w.rng.random() < 0.3:
        shape.insert(w.rng.randint(0, len(shape)), 1)
    if len(shape) > 4:
        raise Impossible
    w.same(x, f"jnp.reshape({x}, {tuple(shape)})")


def _primes(n: int) -> list[int]:
    p = next((p for p in range(2, n + 1) if n % p == 0), None)
    return [p, *_primes(n // p)] if p else []


def broadcast(w: Writer):
    x = w.pick(ANY)
    shape = (w.rng.choice(w.sizes), *(w.rng.choice(w.sizes) if n == 1 else n for n in x.shape))
    w.same(x, f"jnp.broadcast_to({x}, {shape})")


def expand(w: Writer):
    x = w.pick(ANY)
    w.same(x, f"jnp.expand_dims({x}, {w.rng.randint(0, len(x.shape))})")


def cut(w: Writer):
    x = w.pick(ANY, 1)
    parts = [w.rng.choice([":", "1:", ":-1", "::2", "0", "-1", ":1", "::-1", "1:3"]) for _ in x.shape]
    w.same(x, f"{x}[{', '.join(parts)}]")


def pad(w: Writer):
    x = w.pick(("float32", "int32"), 1)
    config = [
        w.rng.choice([(0, 0, 0), (1, 0, 0), (0, 2, 0), (-1, 1, 0), (1, 1, 1), (3, 4, 0)]) for _ in x.shape
    ]
    w.same(x, f"lax.pad({x}, jnp.asarray({w.rng.choice([0, 1])}, {x}.dtype), {config})")


def concatenate(w: Writer):
    x = w.pick(ANY, 1)
    d = w.dim(x)

    def fits(y):
        return (x.shape[:d], x.shape[d + 1 :]) == (y.shape[:d], y.shape[d + 1 :]) and len(x.shape) == len(
            y.shape
        )

    y = w.pick((x.dtype,), where=fits)
    w.put(f"jnp.concatenate([{x}, {y}], {d})", max(x.bound, y.bound), x.exact and y.exact)


def stack(w: Writer):
    x = w.pick(ANY)
    y = w.pick((x.dtype,), where=lambda y: x.shape == y.shape)
    w.put(
        f"jnp.stack([{x}, {y}], {w.rng.randint(0, len(x.shape))})", max(x.bound, y.bound), x.exact and y.exact
    )


def shift(w: Writer):
    x = w.pick(ANY, 1)
    w.same(
        x,
        w.rng.choice(["jnp.roll({0}, 1, {1})", "jnp.flip({0}, {1})", "jnp.tile({0}, 2)"]).format(x, w.dim(x)),
    )


def take(w: Writer):
    x, i = w.pick(ANY, 1, where=lambda x: 0 not in x.shape), w.places()
    d = w.dim(x)
    index, mode = w.rng.choice(
        [(f"{i} % {x.shape[d]}", "clip"), (str(i), "clip"), (str(i), "wrap"), (str(i), "fill")]
    )
    fill = ", fill_value=0" if mode == "fill" and x.dtype != "bool" else ""
    w.same(x, f"jnp.take({x}, {index}, axis={d}, mode={mode!r}{fill})")


def label(w: Writer):
    x = w.pick(ANY, 1)
    i = w.places(x.shape[:-1])
    w.same(x, f"jnp.take_along_axis({x}, jnp.expand_dims({i} % {x.shape[-1]}, -1), -1)")


def scatter(w: Writer):
    x, y = w.pick(("float32", "int32"), 1, where=lambda x: 0 not in x.shape), w.pick(("float32", "int32"))
    if x.dtype != y.dtype or (y.shape[len(y.shape) - len(x.shape) + 1 :] != x.shape[1:]):
        raise Impossible
    i = w.places(y.shape[: len(y.shape) - len(x.shape) + 1])
    bound = x.bound + y.bound * math.prod(i.shape)
    how = w.rng.choice(["add", "add", "max", "min"] if not w.smooth else ["add"])
    w.put(f"{x}.at[{i} % {x.shape[0]}].{how}({y})", bound, x.exact and y.exact)


def position(w: Writer):
    x, i = w.pick(ANY, 1), w.places(())
    d = w.dim(x)
    size = w.rng.choice([1, 1, max(1, x.shape[d] - 1), x.shape[d]])
    part = f"lax.dynamic_slice_in_dim({x}, {i}, {size}, {d})"
    new = f"lax.dynamic_update_slice_in_dim({x}, lax.slice_in_dim({x}, 0, {size}, axis={d}), {i}, {d})"
    w.same(x, w.rng.choice([part, new]))


def one_hot(w: Writer):
    w.put(f"jax.nn.one_hot({w.places()}, {w.rng.choice(w.sizes)}, dtype='float32')", 1)


def iota(w: Writer):
    shape = w.shape()
    dtype = w.rng.choice(["float32", "int32"])
    if shape:
        w.put(f"lax.broadcasted_iota('{dtype}', {shape}, {w.rng.randrange(len(shape))})", max(shape))
    else:
        w.put(f"jnp.asarray({w.rng.randint(-2, 5)}, '{dtype}')", 5)


def convert(w: Writer):
    x = w.pick(ANY)
    to = w.rng.choice(["float32", "bfloat16", "int32", "float32", "int8"])
    if x.is_float and to in ("int32", "int8") and not x.exact:
        raise Impossible
    small = (
        f"{x} % 7"
        if x.dtype in ("int32", "uint32", "int8") and to != "int32"
        else f"jnp.clip({x}, -7, 7)"
        if to == "int8" and x.is_float
        else x
    )
    w.put(f"({small}).astype('{to}')", max(x.bound, 7) if x.is_float else 7, x.exact)


def draw(w: Writer):
    key, shape = w.pick(("key",)), w.shape()
    kind = w.rng.choice(["bits", "normal", "uniform", "bernoulli", "split", "fold_in", "randint"])
    one = key if not key.shape else f"{key}[{', '.join('0' for _ in key.shape)}]"
    if kind == "split":
        return w.put(f"jax.random.split({one}, {w.rng.choice(w.sizes)})")
    if kind == "fold_in":
        return w.put(f"jax.random.fold_in({one}, 3)")
    more = f"shape={shape}" + (", minval=0, maxval=9" if kind == "randint" else "")
    w.put(f"jax.random.{kind}({one}, {more})", 9, kind not in ("normal", "uniform"))


def constrain(w: Writer):
    x = w.pick((*ANY, "key"))
    w.same(x, f"constrain({x}, {w.spec(len(x.shape))!r})".replace("PartitionSpec", "P"))


def split(w: Writer):
    x = w.pick(ANY, 1, where=lambda x: max(x.shape) > 1)
    d = w.dim(x)
    texts = [
        f"jnp.array_split({x}, {w.rng.randint(2, 3)}, {d})[{w.rng.randint(0, 1)}]",
        f"jnp.repeat({x}, 2, {d})",
    ]
    w.same(x, w.rng.choice([*texts, f"jnp.unstack({x}, axis={d})[0]"]))


def neighbours(w: Writer):
    x = w.number("float32", "int32", least_rank=1)
    d = w.dim(x)
    ends = [(1, 2) if e == d else (0, 0) for e in range(len(x.shape))]
    mode = w.rng.choice(["edge", "wrap", "reflect"])
    w.put(
        w.rng.choice([f"jnp.diff({x}, axis={d})", f"jnp.pad({x}, {ends}, mode={mode!r})"]),
        2 * x.bound,
        x.exact,
    )


def triangle(w: Writer):
    x = w.number(least_rank=2)
    w.same(x, f"jnp.{w.rng.choice(['tril', 'triu'])}({x}, {w.rng.randint(-1, 2)})")


def convolve(w: Writer):
    """Along one dim or two, with strides and dilations; what the kernel has in it is small."""
    x = w.number("float32", "bfloat16", least_rank=2, where=lambda x: 0 not in x.shape and len(x.shape) < 4)
    spatial = len(x.shape) - 1 if len(x.shape) < 3 or w.rng.random() < 0.5 else 1
    operand, channels = (f"{x}[..., None]", 1) if spatial == len(x.shape) - 1 else (str(x), x.shape[-1])
    kernel = [w.rng.choice([1, 2, 3]) for _ in range(spatial)]
    count = math.prod(kernel) * channels
    dims = ("NHC", "HIO", "NHC") if spatial == 1 else ("NHWC", "HWIO", "NHWC")
    padding = w.rng.choice(
        ["SAME", "VALID", [w.rng.choice([(0, 1), (2, 2), (1, -1)]) for _ in range(spatial)]]
    )
    more = "".join(
        f", {name}={[w.rng.choice([1, 1, 2]) for _ in range(spatial)]}"
        for name in ("lhs_dilation", "rhs_dilation")
    )
    more = more if padding != "SAME" else ""
    features = w.rng.choice([1, 2, 5])
    weights = (
        f"((jnp.arange({count * features}) % 3 - "
        f"1).reshape({(*kernel, channels, features)}).astype({x}.dtype))"
    )
    strides = [w.rng.choice([1, 1, 2]) for _ in range(spatial)]
    text = (
        f"lax.conv_general_dilated({operand}, {weights}, {strides}, {padding!r}, "
        f"dimension_numbers={dims}{more})"
    )
    w.put(text, x.bound * count, x.exact)


def pool(w: Writer):
    how, start = w.rng.choice([("add", 0), ("max", "-inf"), ("min", "inf")])
    x = (
        w.number("float32", least_rank=1)
        if how == "add"
        else w.kinked(least_rank=1, where=lambda x: x.dtype == "float32")
    )
    window = [w.rng.choice([1, 1, 2, 3]) for _ in x.shape]
    strides = [w.rng.choice([1, 1, 2]) for _ in x.shape]
    text = (
        f"lax.reduce_window({x}, float('{start}'), lax.{how}, {window}, {strides}, "
        f"{w.rng.choice(['SAME', 'VALID'])!r})"
    )
    w.put(
        f"jnp.clip({text}, -{MOST}, {MOST})" if how != "add" else text, x.bound * math.prod(window), x.exact
    )


def accumulate(w: Writer):
    """Along a dim: cumulative operations, and as `associative_scan` expands them."""
    x = w.kinked(least_rank=1)
    d = w.dim(x)
    texts = [f"lax.cummin({x}, {d})", f"lax.cummax({x}, {d}, reverse=True)"]
    texts += [f"lax.associative_scan(jnp.{how}, {x}, axis={d})" for how in ("maximum", "minimum")]
    w.same(x, w.rng.choice(texts))


def accumulate_smoothly(w: Writer):
    x = w.number("float32", least_rank=1, where=lambda x: 0 not in x.shape)
    d = w.dim(x)
    logsumexp = f"lax.cumlogsumexp(jnp.tanh({x}), {d})"
    text, bound = w.rng.choice([(logsumexp, 8), (f"lax.cumprod(jnp.tanh({x}), {d})", 1)])
    w.put(
        w.rng.choice([text, f"jax.nn.logsumexp(jnp.tanh({x}), axis={d}, keepdims=True)"]),
        max(bound, 8),
        False,
    )


def sort_together(w: Writer):
    x = w.number("float32", "int32", least_rank=1, exact=True)
    y = w.pick(ANY, where=lambda y: y.shape == x.shape)
    d = w.dim(x)
    w.put(f"lax.sort(({x}, {y}), dimension={d}, num_keys=1)[1]", y.bound, y.exact)


def find(w: Writer):
    """Places of things: what they give are integers."""
    x, y = w.number("float32", "int32", least_rank=1, exact=True), w.number("float32", "int32", exact=True)
    if x.dtype != y.dtype or len(x.shape) > 1:
        return w.put(f"jnp.nonzero({x} > 0, size={w.rng.randint(1, 5)}, fill_value=-1)[0]", 1024)
    return w.put(f"jnp.searchsorted(jnp.sort({x}), {y})", 1024)


def transform(w: Writer):
    x = w.number("float32", least_rank=1, where=lambda x: 0 not in x.shape)
    d = w.dim(x)
    w.put(f"jnp.fft.{w.rng.choice(['fft', 'ifft', 'rfft'])}({x}, axis={d}).real", x.bound * x.shape[d], False)


def bits(w: Writer):
    x = w.pick(("int32", "uint32"))
    w.put(
        w.rng.choice(
            [f"lax.population_count({x})", f"lax.clz({x})", f"lax.bitcast_convert_type({x}, 'uint16')"]
        ),
        64,
    )


def index(w: Writer):
    """Gathers at places in two dims, and updates there and at places that are known."""
    x = w.pick(("float32", "int32"), 2, where=lambda x: 0 not in x.shape)
    i, j = w.places(), w.places()
    at = f"{x}{{}}[{i} % {x.shape[0]}, {w.rng.choice([f'{j} % {x.shape[1]}', ':, None', f'1:{x.shape[1]}'])}]"
    if w.rng.random() < 0.5:
        return w.same(x, at.format(""))
    how = w.rng.choice(["add", "set"] if w.smooth else ["add", "max", "min", "set"])
    bound = x.bound + 2 * max(1, math.prod(i.shape) * math.prod(j.shape)) if how == "add" else max(x.bound, 2)
    return w.put(f"{at.format('.at')}.{how}({w.rng.choice([1, 2])})", bound, x.exact)


def update(w: Writer):
    x = w.number("float32", "int32", least_rank=1, where=lambda x: x.shape[0] > 2)
    start, stop = sorted(w.rng.sample(range(x.shape[0] + 1), 2))
    part = f"{start}:{stop}"
    w.put(
        f"{x}.at[{part}].{w.rng.choice(['add', 'set', 'multiply'])}({x}[{part}][::-1])",
        max(2 * x.bound, x.bound**2),
        x.exact,
    )


def mapped(w: Writer):
    """A function under vmap, or under lax.map."""
    x = w.number("float32", "int32", least_rank=1, where=lambda x: 0 < x.shape[0] < 14)
    y = w.pick(ANY)
    params = [replace(x, name=w.fresh("p"), shape=x.shape[1:], exact=not x.is_float)]
    params += [replace(y, name=w.fresh("p"), exact=not y.is_float)] if (both := w.rng.random() < 0.5) else []
    block = _nested(w, params)
    name, text = w.define(block, params, [str(block.values[-1])])
    call = (
        f"jax.vmap({name}, (0, None), {w.rng.choice([0, 0, -1]) if block.values[-1].shape else 0})({x}, {y})"
    )
    single = w.rng.choice([f"jax.vmap({name})({x})", f"lax.map({name}, {x})"])
    _finish(w, text, f"{call if both else single}[0]", 1)


def choose(w: Writer):
    """One of three branches."""
    x, which = w.number("float32", "int32"), w.places()
    branches = []
    for _ in range(3):
        params = [replace(x, name=w.fresh("p"), exact=x.exact and not x.is_float)]
        block = _nested(w, params)
        branches.append(w.define(block, params, [block.like(x)]))
    text = "".join(text for _, text in branches)
    names = ", ".join(name for name, _ in branches)
    _finish(w, text, f"lax.switch({which}.sum() % 3, [{names}], {x})[0]", 1)


def partly(w: Writer):
    """An annotation that leaves dims open."""
    x = w.pick(ANY, 1)
    spec = [w.rng.choice(["P.UNCONSTRAINED", "None", repr(w.rng.choice(w.axes))]) for _ in x.shape]
    if len(set(axes := [a for a in spec if a[0] == "'"])) < len(axes):
        raise Impossible
    w.same(x, f"constrain({x}, P({', '.join(spec)}))")


def call(w: Writer):
    x, y = w.pick(ANY), w.pick(ANY)
    params = [replace(v, name=w.fresh("p"), exact=v.exact and not v.is_float) for v in (x, y)]
    block = _nested(w, params)
    how = w.rng.choice(["jax.jit", "jax.checkpoint", "jax.jit"])
    results = [str(v) for v in block.values[-2:]]
    name, text = w.define(block, params, results)
    _finish(w, text, f"{how}({name})({x}, {y})", len(results))


def branch(w: Writer):
    x, y = w.number("float32", "int32"), w.pick(("float32", "int32"))
    which = w.pick(("int32", "bool"))
    branches = []
    for _ in range(2):
        params = [replace(v, name=w.fresh("p"), exact=v.exact and not v.is_float) for v in (x, y)]
        block = _nested(w, params)
        branches.append(w.define(block, params, [block.like(x), block.like(y)]))
    text = "".join(text for _, text in branches)
    _finish(w, text, f"lax.cond({which}.sum() > 1, {branches[0][0]}, {branches[1][0]}, {x}, {y})", 2)


def scan(w: Writer):
    carry, xs = w.number("float32", "int32"), w.pick(ANY, 1, where=lambda x: 0 < x.shape[0] < 14)
    c = replace(carry, name=w.fresh("c"), exact=not carry.is_float)
    x = replace(xs, name=w.fresh("x"), shape=xs.shape[1:], exact=not xs.is_float)
    block = _nested(w, [x, c])
    new = w.rng.choice([block.like(c), f"{c} + {block.like(c)}"])
    name, text = w.define(block, [c, x], [_damped(new, c), str(block.values[-1])])
    text = text.replace("return (", "return (")
    more = w.rng.choice(["", ", reverse=True", ", unroll=2"])
    _finish(w, text, f"lax.scan({name}, {carry}, {xs}{more})", 2)


def loop(w: Writer):
    start = w.number("float32", "int32")
    c = replace(start, name=w.fresh("c"), exact=not start.is_float)
    block = _nested(w, [c])
    name, text = w.define(block, [c], [_damped(f"{c} + {block.like(c)}", c)])
    names = [w.fresh()]
    count = (
        w.rng.choice(["2", "3"])
        if w.smooth
        else w.rng.choice(["2", f"jnp.abs({w.pick(('int32',))}).sum() % 4"])
    )
    w.write(
        f"{text}{names[0]} = lax.fori_loop(0, {count}, lambda i, c: {name}(c)[0], {start})",
        names,
        64.0,
        False,
    )


def search(w: Writer):
    """A while loop whose condition looks at the whole carry."""
    if w.smooth:
        raise Impossible
    start = w.number("int32", where=lambda x: 0 not in x.shape)
    w.put(f"lax.while_loop(lambda c: jnp.abs(c).max() > 5, lambda c: lax.div(c, 2) - c % 2 * 0, {start})", 5)


def _nested(w: Writer, params: Sequence[Value]) -> Writer:
    if w.depth > 1:
        raise Impossible
    return w.block(params, 4)


def _damped(text: str, like: Value) -> str:
    return text if not like.is_float else f"0.5 * ({text})"


def _finish(w: Writer, text: str, expression: str, count: int):
    names = [w.fresh() for _ in range(count)]
    w.write(f"{text}{', '.join(names)} = {expression}", names, 64.0, False)


OPERATIONS = [
    *[smooth, polynomial, kink, integer, add, add, multiply, divide, extremum, compare, logic, select],
    *[einsum] * 6,
    *[total, total, mean, normalize, greatest, place, cumulate, sort, top_k],
    *[transpose, reshape, reshape, broadcast, expand, cut, pad, concatenate, stack, shift],
    *[take, take, label, scatter, position, one_hot, iota, convert, draw, draw, constrain, constrain],
    *[
        split,
        neighbours,
        triangle,
        convolve,
        convolve,
        pool,
        accumulate,
        accumulate_smoothly,
        sort_together,
        find,
        transform,
    ],
    *[bits, index, index, update, partly],
    *[call, branch, scan, scan, loop, search, mapped, choose],
]
