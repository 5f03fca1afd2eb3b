"""How a person would write one equation: a table from primitives to expressions in jax.numpy and jax.lax.

An expression knows how tightly it binds, so that parentheses stand only where they are needed. A primitive
that is not in the table is written as `lax.<name>_p.bind(...)`; parameters that no text can make are objects
of the namespace.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import numpy as np
from jax import lax

LOOSE, PLUS, TIMES, POWER, ATOM = range(5)  # how tightly an expression binds


@dataclass(frozen=True)
class Text:
    """An expression. `aval` is the type of its value; `scalar` its text where the value is one number
    everywhere.

    `several`: it is a sequence of an equation's results, even if that has one.
    """

    text: str
    aval: Any
    level: int = ATOM
    scalar: str | None = None
    several: bool = False

    def __str__(self):
        return self.text

    def within(self, level: int) -> str:
        return self.text if self.level >= level else f"({self.text})"


@dataclass(frozen=True)
class Call:
    """An equation to be spelled: its operands as expressions, the types of its results, and how objects are
    spelled.
    """

    primitive: Any
    params: dict[str, Any]
    operands: Sequence[Text]
    outs: Sequence[Any]
    spell: Callable[[Any, str], str]

    @property
    def out(self) -> Any:
        return self.outs[0] if self.outs else None

    def spelled(self, *param_names: str) -> str:
        """These parameters, as keyword arguments."""
        return ", ".join(f"{name}={self.spell(self.params[name], name)}" for name in param_names)

    def call(self, function: str, *rest: str) -> Text:
        """A call of a function on the operands, then on `rest`."""
        return Text(f"{function}({', '.join([*map(str, self.operands), *filter(None, rest)])})", self.out)


Spelling = Callable[[Call], Text | None]


def expression(call: Call) -> Text:
    """The right side of the assignment that an equation becomes."""
    spelling = SPELLINGS.get(call.primitive.name)
    return (spelling and spelling(call)) or _bound(call)


def object_text(x) -> str | None:
    """Python that makes this parameter under the names that every source imports; None where there is none.

    >>> object_text((1, None, np.dtype("float32"), lax.GatherScatterMode.CLIP))
    '(1, None, jnp.float32, lax.GatherScatterMode.CLIP)'
    """
    match x:
        case Enum():
            return (
                f"lax.{type(x).__name__}.{x.name}"
                if getattr(lax, type(x).__name__, None) is type(x)
                else None
            )
        case str():
            return json.dumps(x)
        case None | bool() | int() | float() | complex() | np.generic():
            return number(np.asarray(x).item())
        case np.dtype():
            return dtype_text(x)
        case jax.sharding.PartitionSpec():
            return f"P({', '.join(map(str, map(object_text, x)))})"
        case list() | tuple():
            return _sequence(x)
    if isinstance(x, type) and issubclass(x, np.generic):
        return dtype_text(np.dtype(x))
    return None


def _sequence(xs) -> str | None:
    items = list(map(object_text, xs))
    if None in items:
        return None
    if hasattr(xs, "_fields"):
        if getattr(lax, type(xs).__name__, None) is not type(xs):
            return None
        fields = [
            f"{f}={item}"
            for f, item, x in zip(xs._fields, items, xs, strict=True)
            if xs._field_defaults.get(f) != x
        ]
        return f"lax.{type(xs).__name__}({', '.join(fields)})"
    inner = ", ".join(items)  # type: ignore[arg-type]
    return f"[{inner}]" if isinstance(xs, list) else f"({inner},)" if len(items) == 1 else f"({inner})"


def dtype_text(dtype) -> str | None:
    name = np.dtype(dtype).name if isinstance(dtype, (np.dtype, type)) else ""
    return f"jnp.{name}_" if name == "bool" else f"jnp.{name}" if name and hasattr(jax.numpy, name) else None


def number(x) -> str:
    """
    >>> number(-math.inf), number(0.5), number(True)
    ('-jnp.inf', '0.5', 'True')
    """
    return re.sub(r"\b(inf|nan)\b", r"jnp.\1", repr(x)) if isinstance(x, float) else repr(x)


def literal(x, aval) -> Text:
    """A number of this type. Its `scalar` is bare: beside an array it takes the array's type."""
    value = np.asarray(x).item()
    typed = f"{dtype_text(aval.dtype)}({number(value)})"
    too_large = isinstance(value, int) and not -(2**31) <= value < 2**31
    return Text(typed, aval, ATOM, typed if too_large else number(value))


def _beside(operands: Sequence[Text], shape: tuple[int, ...]) -> list[Text]:
    """The same operands, numbers bare where another operand gives the result its type and shape."""
    anchors = [i for i, o in enumerate(operands) if tuple(o.aval.shape) == shape]
    anchor = min(anchors, key=lambda i: operands[i].scalar is not None, default=None)
    return [
        o if o.scalar is None or i == anchor or anchor is None else _bare(o) for i, o in enumerate(operands)
    ]


def _bare(operand: Text) -> Text:
    assert operand.scalar is not None
    return Text(operand.scalar, operand.aval, TIMES if operand.scalar.startswith("-") else ATOM)


def _infix(symbol: str, level: int) -> Spelling:
    def spelling(call: Call) -> Text:
        left, right = _beside(call.operands, tuple(call.out.shape))
        if same := _neutral(symbol, left, right):
            return same
        return Text(f"{left.within(max(level, PLUS))} {symbol} {right.within(level + 1)}", call.out, level)

    return spelling


def _neutral(symbol: str, left: Text, right: Text) -> Text | None:
    """The other operand, where one operand changes nothing: positions are often counted from 0, by 1."""
    if symbol in "+*" and left.text == _NEUTRAL[symbol]:
        return right
    if symbol in "+-*" and right.text == _NEUTRAL[symbol]:
        return left
    return None


_NEUTRAL = {"+": "0", "-": "0", "*": "1"}


def _division(call: Call) -> Text | None:
    return (
        _infix("/", TIMES)(call)
        if np.issubdtype(call.out.dtype, np.inexact) or call.out.dtype == "bfloat16"
        else None
    )


def _ordered(symbol: str) -> Spelling:
    """A comparison, infix for numbers that Python's operators compare as lax does."""
    return lambda call: _infix(symbol, LOOSE)(call) if call.operands[0].aval.dtype.kind != "c" else None


def _prefix(symbol: str) -> Spelling:
    return lambda call: Text(f"{symbol}{call.operands[0].within(ATOM)}", call.out, TIMES)


def _function(name: str, *param_names: str) -> Spelling:
    """A function of the operands, these parameters as keyword arguments."""
    return lambda call: call.call(name, call.spelled(*param_names))


def _plain(name: str) -> Spelling:
    """An elementwise function. With a requested accuracy, the primitive is bound instead."""
    return lambda call: call.call(name) if call.params.get("accuracy") is None else None


def _extremum(name: str) -> Spelling:
    def spelling(call: Call) -> Text:
        left, right = _beside(call.operands, tuple(call.out.shape))
        return Text(f"{name}({left}, {right})", call.out)

    return spelling


def _where(call: Call) -> Text | None:
    which, *cases = call.operands
    if len(cases) != 2 or which.aval.dtype != np.bool_:
        return None
    no, yes = _beside(cases, tuple(call.out.shape))
    return Text(f"jnp.where({which}, {yes}, {no})", call.out)


def _reduction(name: str) -> Spelling:
    """jnp's reductions widen small types, and so are not lax's for them."""

    def spelling(call: Call) -> Text | None:
        if call.out.dtype.name not in ("float32", "float64"):
            return None
        axes = _ints(call.params["axes"])
        everything = len(axes) == len(call.operands[0].aval.shape)
        return call.call(f"jnp.{name}", "" if everything else f"axis={axes[0] if len(axes) == 1 else axes}")

    return spelling


def _dot(call: Call) -> Text:
    """`@` for the products that it means, einsum for the others."""
    left, right = call.operands
    (contracted, batch) = call.params["dimension_numbers"]
    ranks = len(left.aval.shape), len(right.aval.shape)
    extra = ", ".join(_product_options(call))
    if not any(batch) and ranks == (2, 2) and _pairs(contracted) == [(1, 0)]:
        if extra:
            return Text(f"jnp.dot({left}, {right}, {extra})", call.out)
        return Text(f"{left.within(TIMES)} @ {right.within(POWER)}", call.out, TIMES)
    text = ", ".join(filter(None, [f'"{_einsum(ranks, contracted, batch)}"', str(left), str(right), extra]))
    return Text(f"jnp.einsum({text})", call.out)


def _pairs(dims) -> list[tuple[int, int]]:
    return list(zip(*map(tuple, dims), strict=True))


def _product_options(call: Call) -> list[str]:
    """precision and preferred_element_type, where they are not what jnp takes by itself."""
    requested = call.params["preferred_element_type"]
    usual = requested is None or all(o.aval.dtype == call.out.dtype for o in call.operands)
    shown = [
        n
        for n, show in (
            ("precision", call.params["precision"] is not None),
            ("preferred_element_type", not usual),
        )
        if show
    ]
    return [call.spelled(n) for n in shown]


def _einsum(ranks: tuple[int, int], contracted, batch) -> str:
    """
    >>> _einsum((3, 3), ((2,), (1,)), ((0,), (0,)))
    'abc,acd->abd'
    """
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    left = [next(letters) for _ in range(ranks[0])]
    shared = {r: left[d] for dims in (contracted, batch) for d, r in _pairs(dims)}
    right = [shared.get(d) or next(letters) for d in range(ranks[1])]
    free = [x for i, x in enumerate(left) if i not in (*contracted[0], *batch[0])]
    free += [x for i, x in enumerate(right) if i not in shared]
    return f"{''.join(left)},{''.join(right)}->{''.join([left[d] for d in batch[0]] + free)}"


def _broadcast(call: Call) -> Text:
    operand, shape = call.operands[0], tuple(call.out.shape)
    dims, old = call.params["broadcast_dimensions"], tuple(operand.aval.shape)
    if operand.scalar is not None:
        text = f"jnp.full({shape}, {operand.scalar}, {dtype_text(call.out.dtype)})"
        return Text(text, call.out, ATOM, operand.scalar)
    if len(dims) == len(old) and tuple(shape[d] for d in dims) == old and math.prod(shape) == math.prod(old):
        added = tuple(d for d in range(len(shape)) if d not in dims)
        if added and all(shape[d] == 1 for d in added):
            return Text(f"jnp.expand_dims({operand}, {added[0] if len(added) == 1 else added})", call.out)
    if tuple(dims) == tuple(range(len(shape) - len(old), len(shape))):
        return Text(f"jnp.broadcast_to({operand}, {shape})", call.out)
    return Text(f"lax.broadcast_in_dim({operand}, {shape}, {_ints(dims)})", call.out)


def _ints(xs) -> tuple[int, ...]:
    """Parameters may be numpy's integers, which print otherwise."""
    return tuple(map(int, xs))


def _cast(call: Call) -> Text | None:
    dtype = dtype_text(call.out.dtype)
    if dtype is None or call.operands[0].aval.dtype.kind == "c":
        return None
    return Text(f"{call.operands[0].within(ATOM)}.astype({dtype})", call.out)


def _reshape(call: Call) -> Text | None:
    return None if call.params.get("dimensions") else call.call("jnp.reshape", str(tuple(call.out.shape)))


def _transpose(call: Call) -> Text:
    order = _ints(call.params["permutation"])
    if order == (1, 0):
        return Text(f"{call.operands[0].within(ATOM)}.T", call.out)
    return call.call("jnp.transpose", str(order))


def _slice(call: Call) -> Text:
    starts, limits = call.params["start_indices"], call.params["limit_indices"]
    if any(step != 1 for step in call.params["strides"] or ()):
        return call.call("lax.slice", call.spelled("start_indices", "limit_indices", "strides"))
    (operand,) = call.operands
    spans = [
        f"{start or ''}:{limit if limit != size else ''}"
        for start, limit, size in zip(starts, limits, operand.aval.shape, strict=True)
    ]
    while len(spans) > 1 and spans[-1] == ":":
        spans.pop()
    return Text(f"{operand.within(ATOM)}[{', '.join(spans)}]", call.out)


def _pad(call: Call) -> Text | None:
    operand, value = call.operands
    config = [tuple(map(int, c)) for c in call.params["padding_config"]]
    if value.scalar in ("0", "0.0", "False") and all(
        low >= 0 and high >= 0 and not inner for low, high, inner in config
    ):
        widths = [(low, high) for low, high, _ in config]
        return Text(f"jnp.pad({operand}, {widths[0] if len(widths) == 1 else tuple(widths)})", call.out)
    return Text(f"lax.pad({operand}, {value}, {config})", call.out)


def _iota(call: Call) -> Text:
    dtype, shape = dtype_text(call.out.dtype), tuple(call.out.shape)
    if len(shape) == 1:
        return Text(f"jnp.arange({shape[0]}, dtype={dtype})", call.out)
    return Text(f"lax.broadcasted_iota({dtype}, {shape}, {call.params['dimension']})", call.out)


def _sort(call: Call) -> Text:
    options = call.spelled("dimension", "is_stable", "num_keys")
    return Text(f"lax.sort({packed(call.operands)}, {options})", call.out)


def packed(operands: Sequence[Text]) -> str:
    """One operand as it is, several as a tuple: sort, the reducing collectives and loops take and give them
    so.
    """
    return str(operands[0]) if len(operands) == 1 else f"({', '.join(map(str, operands))})"


def _dynamic_slice(call: Call) -> Text:
    operand, *starts = call.operands
    text = (
        f"lax.dynamic_slice({operand}, [{', '.join(map(str, starts))}], {_ints(call.params['slice_sizes'])})"
    )
    return Text(text, call.out)


def _dynamic_update_slice(call: Call) -> Text:
    operand, update, *starts = call.operands
    return Text(f"lax.dynamic_update_slice({operand}, {update}, [{', '.join(map(str, starts))}])", call.out)


def _scatter(call: Call) -> Text:
    shown = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return call.call(f"lax.{call.primitive.name.replace('-', '_')}", call.spelled(*shown))


def _several(name: str, param: str) -> Spelling:
    """A collective of several operands, whose results are as many."""

    def spelling(call: Call) -> Text | None:
        if call.params.get("axis_index_groups") is not None:
            return None
        return Text(f"{name}({packed(call.operands)}, {_axes(call.params[param])})", call.out)

    return spelling


def _axes(axes) -> str:
    axes = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    return str(object_text(axes[0] if len(axes) == 1 else axes))


def _collective(name: str, **renamed: str) -> Spelling:
    """A collective of one operand over named axes; `renamed`: keyword argument -> parameter of the
    primitive.
    """

    def spelling(call: Call) -> Text | None:
        if call.params.get("axis_index_groups") is not None:
            return None
        options = [f"{keyword}={call.spell(call.params[param], param)}" for keyword, param in renamed.items()]
        return Text(
            f"{name}({', '.join([str(call.operands[0]), _axes(call.params['axis_name']), *options])})",
            call.out,
        )

    return spelling


def _one_key(spelling: Spelling) -> Spelling:
    """jax.random's functions take one key, the primitives arrays of them too."""
    return lambda call: None if call.operands[0].aval.shape else spelling(call)


def _random_bits(call: Call) -> Text:
    return call.call(
        "jax.random.bits", str(_ints(call.params["shape"])), f"jnp.uint{call.params['bit_width']}"
    )


def _bound(call: Call) -> Text:
    """The generic form. `lax` exports most primitives under their names."""
    name = f"{call.primitive.name.replace('-', '_')}_p"
    function = (
        f"lax.{name}" if getattr(lax, name, None) is call.primitive else call.spell(call.primitive, name)
    )
    text = call.call(f"{function}.bind", call.spelled(*call.params))
    return Text(text.text, call.out, several=call.primitive.multiple_results)


_NUMPY = {
    "abs": "abs", "ceil": "ceil", "conj": "conj", "cos": "cos", "exp": "exp", "expm1": "expm1",
    "floor": "floor", "imag": "imag", "is_finite": "isfinite", "log": "log", "log1p": "log1p", "real": "real",
    "sign": "sign", "sin": "sin", "sqrt": "sqrt", "square": "square", "tan": "tan", "tanh": "tanh",
}  # fmt: skip
_LAX = (
    "cbrt",
    "digamma",
    "erf",
    "erf_inv",
    "erfc",
    "exp2",
    "lgamma",
    "logistic",
    "nextafter",
    "pow",
    "rem",
    "rsqrt",
)
_SHIFTS = ("shift_left", "shift_right_arithmetic", "shift_right_logical")
_CUMULATIVE = ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")
_SCATTERS = ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul")
_LAX_REDUCTIONS = (
    "reduce_and",
    "reduce_max",
    "reduce_min",
    "reduce_or",
    "reduce_prod",
    "reduce_sum",
    "reduce_xor",
)


def _first(*spellings: Spelling) -> Spelling:
    return lambda call: next(filter(None, (spelling(call) for spelling in spellings)), None)


SPELLINGS: dict[str, Spelling] = {
    **{name: _plain(f"jnp.{function}") for name, function in _NUMPY.items()},
    **{name: _plain(f"lax.{name}") for name in (*_LAX, *_SHIFTS, "clamp", "population_count", "clz")},
    **{name: _function(f"lax.{name}", "axis", "reverse") for name in _CUMULATIVE},
    **{name: _scatter for name in _SCATTERS},
    **{name: _function(f"lax.{name}", "axes") for name in _LAX_REDUCTIONS},
    "add": _infix("+", PLUS),
    "add_any": _infix("+", PLUS),
    "all_gather": _collective("lax.all_gather", axis="all_gather_dimension", tiled="tiled"),
    "all_to_all": _collective(
        "lax.all_to_all", split_axis="split_axis", concat_axis="concat_axis", tiled="tiled"
    ),
    "and": _infix("&", LOOSE),
    "argmax": lambda call: call.call(
        "lax.argmax", f"axis={call.params['axes'][0]}", call.spelled("index_dtype")
    ),
    "argmin": lambda call: call.call(
        "lax.argmin", f"axis={call.params['axes'][0]}", call.spelled("index_dtype")
    ),
    "axis_index": lambda call: Text(f"lax.axis_index({_axes(call.params['axis_name'])})", call.out),
    "bitcast_convert_type": lambda call: call.call(
        "lax.bitcast_convert_type", str(dtype_text(call.out.dtype))
    ),
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda call: Text(
        f"jnp.concatenate([{', '.join(map(str, call.operands))}], axis={call.params['dimension']})", call.out
    ),
    "conv_general_dilated": lambda call: call.call(
        "lax.conv_general_dilated", call.spelled(*(p for p in call.params if call.params[p] is not None))
    ),
    "convert_element_type": _cast,
    "copy": _plain("jnp.copy"),
    "div": _first(_division, _plain("lax.div")),
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "eq": _infix("==", LOOSE),
    "gather": _function(
        "lax.gather",
        "dimension_numbers",
        "slice_sizes",
        "unique_indices",
        "indices_are_sorted",
        "mode",
        "fill_value",
    ),
    "ge": _ordered(">="),
    "gt": _ordered(">"),
    "integer_pow": lambda call: Text(f"{call.operands[0].within(ATOM)}**{call.params['y']}", call.out, POWER),
    "iota": _iota,
    "le": _ordered("<="),
    "lt": _ordered("<"),
    "max": _extremum("jnp.maximum"),
    "min": _extremum("jnp.minimum"),
    "mul": _infix("*", TIMES),
    "ne": _infix("!=", LOOSE),
    "neg": _prefix("-"),
    "not": _prefix("~"),
    "optimization_barrier": lambda call: Text(f"lax.optimization_barrier({packed(call.operands)})", call.out),
    "or": _infix("|", LOOSE),
    "pad": _pad,
    "pmax": _several("lax.pmax", "axes"),
    "pmin": _several("lax.pmin", "axes"),
    "ppermute": _collective("lax.ppermute", perm="perm"),
    "psum": _several("lax.psum", "axes"),
    "random_bits": _one_key(_random_bits),
    "random_fold_in": _one_key(_function("jax.random.fold_in")),
    "random_unwrap": _function("jax.random.key_data"),
    "reduce_max": _first(_reduction("max"), _function("lax.reduce_max", "axes")),
    "reduce_min": _first(_reduction("min"), _function("lax.reduce_min", "axes")),
    "reduce_precision": _function("lax.reduce_precision", "exponent_bits", "mantissa_bits"),
    "reduce_scatter": _collective("lax.psum_scatter", scatter_dimension="scatter_dimension", tiled="tiled"),
    "reduce_sum": _first(_reduction("sum"), _function("lax.reduce_sum", "axes")),
    "reshape": _reshape,
    "rev": _function("lax.rev", "dimensions"),
    "select_n": _first(_where, _function("lax.select_n")),
    "slice": _slice,
    "sort": _sort,
    "split": lambda call: Text(
        call.call("lax.split", call.spelled("sizes", "axis")).text, call.out, several=True
    ),
    "squeeze": lambda call: call.call(
        "jnp.squeeze", f"axis={call.spell(tuple(call.params['dimensions']), 'axis')}"
    ),
    "stack": lambda call: Text(
        f"jnp.stack([{', '.join(map(str, call.operands))}], axis={call.params['axis']})", call.out
    ),
    "sub": _infix("-", PLUS),
    "threefry2x32": lambda call: Text(call.call("threefry2x32_p.bind").text, call.out, several=True),
    "transpose": _transpose,
    "xor": _infix("^", LOOSE),
}
