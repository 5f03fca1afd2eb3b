"""The local program as Python that a person would write: what `Plan.source` returns.

    def on_shards(up, down, x):
        # mlp.py:12: h = jax.nn.relu(x @ params["up"])
        h = x @ up  # f32[2,16]
        ...

Executed, it defines `program(mesh)`, which takes the leaves of the arguments and returns those of the
results. Values are named after the variable that the user's line assigns, else after what computes them; what
is used once on its own line stands there.
"""

import builtins
import keyword
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from shardax import _jax
from shardax.explain.facts import Facts
from shardax.explain.spelling import (
    SPELLINGS,
    Call,
    Text,
    dtype_text,
    expression,
    literal,
    object_text,
    packed,
)
from shardax.ledger.collectives import KINDS, array_text, reason_of
from shardax.ledger.lines import assigned, code, line_text
from shardax.sharding import entries_of, owing_of, owing_words

WIDTH = 110
INLINE = 60  # characters: what is longer gets a name of its own
CONSTANT = 32  # elements: what is larger is no text, but an object of the namespace


@dataclass(frozen=True)
class Source:
    """The text, and the objects that it names but does not make: large constants, primitives without a public
    name.
    """

    text: str
    objects: dict[str, Any]


def source(plan: Facts) -> Source:
    """The source of a plan's local program."""
    (eqn,) = (e for e in plan.local_jaxpr.jaxpr.eqns if e.primitive.name == "shard_map")
    namespace = _Namespace()
    parameters = [namespace.new(name) for name in _parameters(plan)]
    outer = dict(zip(plan.local_jaxpr.jaxpr.invars, parameters, strict=True))
    for var, const in zip(plan.local_jaxpr.jaxpr.constvars, plan.local_jaxpr.consts, strict=True):
        outer[var] = namespace.constant(const)
    inner = _jax.closed(eqn.params["jaxpr"])
    arguments = [Text(outer[v], i.aval) for v, i in zip(eqn.invars, inner.jaxpr.invars, strict=True)]
    body = _Body(
        namespace,
        lines=[f"{x} = {x}.astype({dtype_text(x.aval.dtype)})" for x in arguments if x.aval.weak_type],
    )
    pairs = zip(body.run(inner, arguments), plan.global_jaxpr.out_avals, strict=True)
    # inside, all types are strong: bare numbers stand beside arrays only
    results = [Text(f"weak({result})", result.aval) if aval.weak_type else result for result, aval in pairs]
    in_specs = {
        outer[v]: spec
        for v, spec in zip(eqn.invars, eqn.params["in_specs"], strict=True)
        if outer[v] in parameters
    }
    text = _module(plan, in_specs, eqn.params["out_specs"], body.lines, results, namespace)
    return Source(text, namespace.objects | _closed(plan, parameters))


_WEAK = [
    "def weak(x):",
    '    """`x`, its type as weak as that of a Python number."""',
    "    return lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)",
    "",
    "",
]


def _closed(plan: Facts, parameters: Sequence[str]) -> dict[str, Any]:
    """What the function closed over: the last inputs of the program."""
    count = len(plan.closed_over)
    return dict(zip(parameters[len(parameters) - count :], plan.closed_over, strict=True))


def _module(
    plan: Facts, in_specs, out_specs, lines: Sequence[str], results: Sequence[Text], namespace: "_Namespace"
) -> str:
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    returned = f"return ({', '.join(map(str, results))}{',' if len(results) == 1 else ''})"
    body = [*lines, *_broken(returned)]
    used = set(re.findall(r"\w+", " ".join(body)))
    constants = [f"{name} = {text}" for text, name in namespace.constants.items() if name in used]
    return "\n".join(
        [
            f'"""What each of {plan.mesh.size} devices runs, on a mesh of {mesh}."""',
            "",
            "import jax",
            "import jax.numpy as jnp",
            "from jax import lax",
            *["from jax.extend.random import threefry2x32_p"]
            * any("threefry2x32_p" in line for line in lines),
            "from jax.sharding import PartitionSpec as P",
            "",
            *constants,
            *[""] * (1 + bool(constants)),
            *_WEAK * any(aval.weak_type for aval in plan.global_jaxpr.out_avals),
            *_broken(f"def on_shards({', '.join(in_specs)}):"),
            *_indented(body),
            "",
            "",
            "def program(mesh):",
            f'    """`on_shards` on a mesh of {mesh}: '
            'leaves of the arguments in, leaves of the results out."""',
            *_indented(_program(plan, in_specs, out_specs)),
            "",
        ]
    )


def _program(plan: Facts, in_specs, out_specs) -> list[str]:
    """The call of shard_map; what the function closed over follows the arguments."""
    closed = list(in_specs)[len(in_specs) - len(plan.closed_over) :]
    call = "jax.shard_map(on_shards, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)"
    return [
        *(f"# not here: {c.reason}" for c in plan.crossed("argument")),
        *_refined(plan),
        "in_specs = (",
        *[f"    {_spec(spec)},  # {name}" for name, spec in in_specs.items()],
        ")",
        *_broken(f"out_specs = ({', '.join(map(_spec, out_specs))}{',' if len(out_specs) == 1 else ''})"),
        *(
            [f"sharded = {call}", f"return lambda *leaves: sharded(*leaves, {', '.join(closed)})"]
            if closed
            else [f"return {call}"]
        ),
        *(f"# not here: {c.reason}" for c in plan.crossed("result")),
    ]


def _refined(plan: Facts) -> list[str]:
    """The mesh with the axes that the program names: the user's, refined."""
    if plan.refinement is None or plan.refinement.is_trivial:
        return []
    axes, sizes = tuple(plan.refinement.sizes), tuple(plan.refinement.sizes.values())
    return [f"mesh = jax.sharding.Mesh(mesh.devices.reshape{sizes}, {axes})"]


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]


def _spec(spec) -> str:
    entries = list(entries_of(spec))
    while entries and entries[-1] is None:
        entries.pop()
    plain = str(object_text(jax.P(*entries)))
    words = owing_words(owing_of(spec))
    owing = ", ".join(words).replace("'", '"')
    return f"{plain.removesuffix(')')}{', ' if entries and words else ''}{owing})"


def _parameters(plan: Facts) -> Iterator[str]:
    """A name for each input: the last key of its path, more keys where that is no name or not alone."""
    paths = [re.findall(r"\w+", place.named) for place in plan.arguments()]
    lasts = Counter(path[-1] for path in paths)
    for path in paths:
        alone = path[-1].isidentifier() and lasts[path[-1]] == 1
        yield path[-1] if alone else "_".join(path)
    for _ in plan.closed_over:
        yield "closed_over"


class _Namespace:
    """Hands out names, none twice in a module, so that nested functions may use those of the functions around
    them.
    """

    def __init__(self):
        self.taken = {
            *keyword.kwlist,
            *dir(builtins),
            "jax",
            "jnp",
            "lax",
            "P",
            "on_shards",
            "program",
            "mesh",
            "weak",
        }
        self.constants: dict[str, str] = {}  # name by text
        self.objects: dict[str, Any] = {}
        self.known: dict[int, str] = {}

    def new(self, base: str) -> str:
        base = re.sub(r"\W", "_", base)
        base = base if base.isidentifier() else f"_{base}"
        name, count = base, 0
        while name in self.taken:
            count += 1
            name = f"{base}_{count}"
        self.taken.add(name)
        return name

    def object(self, x, base: str) -> str:
        """The text of a parameter, or the name of an object of the namespace."""
        return object_text(x) or self._kept(x, base)

    def constant(self, x) -> str:
        """The name of an array: small ones are made by the module."""
        small = isinstance(x, jax.Array | np.ndarray) and not jax.numpy.issubdtype(
            x.dtype, jax.dtypes.extended
        )
        dtype = object_text(np.dtype(x.dtype)) if small else None
        if dtype is None or np.size(x) > CONSTANT or not np.all(np.isfinite(np.asarray(x, np.complex128))):
            return self._kept(x, "constant")
        text = f"jnp.array({np.asarray(x).tolist()}, {dtype})"
        if text not in self.constants:
            self.constants[text] = self.new("constant")
        return self.constants[text]

    def _kept(self, x, base: str) -> str:
        if id(x) not in self.known:
            self.known[id(x)] = self.new(base)
            self.objects[self.known[id(x)]] = x
        return self.known[id(x)]


@dataclass
class _Body:
    """The lines of one function. `env` holds the expression of each variable, those of the functions around
    it included.
    """

    namespace: _Namespace
    env: dict[Any, Text] = field(default_factory=dict)
    line: str = ""
    lines: list[str] = field(default_factory=list)

    def run(self, closed, arguments: Sequence[Text]) -> list[Text]:
        """Writes the equations of a closed jaxpr; returns the expressions of its results."""
        jaxpr = closed.jaxpr
        self.env.update(zip(jaxpr.invars, arguments, strict=True))
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
            self.env[var] = Text(self.namespace.constant(const), var.aval)
        eqns, users = _live(jaxpr)
        for eqn in eqns:
            self.equation(eqn, users)
        return list(map(self.read, jaxpr.outvars))

    def read(self, atom) -> Text:
        if not _jax.is_literal(atom):
            return self.env[atom]
        if np.shape(atom.val):
            return Text(self.namespace.constant(atom.val), atom.aval)
        return literal(atom.val, atom.aval)

    def equation(self, eqn, users) -> None:
        name, operands = eqn.primitive.name, list(map(self.read, eqn.invars))
        if name in _STRUCTURED:
            self.place(eqn)
            return _STRUCTURED[name](self, eqn, operands)
        if name in _CALLS:
            (inner, *_) = jaxprs_in_params(eqn.params)
            results = _Body(self.namespace, self.env, self.line, self.lines).run(_jax.closed(inner), operands)
            self.env.update(zip(eqn.outvars, results, strict=True))
            return
        if _is_same(eqn, operands):
            self.env[eqn.outvars[0]] = operands[0]
            return
        text = expression(
            Call(eqn.primitive, eqn.params, operands, [v.aval for v in eqn.outvars], self.namespace.object)
        )
        if _stands_alone(eqn, text, users):
            self.place(eqn)
            self.assign(eqn, text)
        else:
            self.env[eqn.outvars[0]] = text

    def place(self, eqn) -> None:
        """A comment with the user's line, where it changes."""
        line = _jax.user_line(eqn.source_info)
        if line and line != self.line:
            self.line = line
            text = code(line)
            self.lines += [
                *([""] if self.lines else []),
                f"# {line_text(line)}{': ' if text else ''}{text}"[:WIDTH],
            ]

    def assign(self, eqn, text: Text) -> None:
        name = eqn.primitive.name
        targets = self.define(eqn.outvars, assigned(self.line) or _BASES.get(name) or name)
        left = f"({targets[0]},)" if text.several and len(targets) == 1 else ", ".join(targets)
        kind, types = KINDS.get(name), ", ".join(array_text(v.aval) for v in eqn.outvars[:1])
        reason = reason_of(kind, eqn.source_info.name_stack) if kind else ""
        self.statement(f"{left} = {text}" if targets else str(text), types, reason)

    def statement(self, text: str, types: str = "", reason: str = "") -> None:
        """What it makes and why stand beside it; where there is no room, why it sends above."""
        *first, last = _broken(text)
        remark = f"{types}: {reason}" if reason else types
        if len(last) + len(remark) > WIDTH:
            self.lines += [f"# {reason}"] * bool(reason)
            remark = ""
        self.lines += [*first, f"{last}  # {remark}" if remark else last]

    def define(self, variables: Iterable[Any], base: str) -> list[str]:
        """Names for variables, which they are from now on."""
        identifiers = []
        for var in variables:
            identifiers.append("_" if type(var).__name__ == "DropVar" else self.namespace.new(base))
            self.env[var] = Text(identifiers[-1], var.aval)
        return identifiers

    def function(
        self, base: str, closed, outside: Sequence[Text], groups: Sequence[Sequence[Text]], returned
    ) -> str:
        """Writes a nested function. A body's first inputs are values from `outside`, the others its
        parameters, one to a group.

        `groups` holds what it is first called with, after which its parameters are named.
        """
        name = self.namespace.new(base)
        inner = _Body(self.namespace, self.env, self.line)
        rest = iter(closed.jaxpr.invars[len(outside) :])
        parameters = [[inner.define([next(rest)], _base_of(x))[0] for x in group] for group in groups]
        heads = [
            g[0] if len(g) == 1 else self.namespace.new(h) if g else "_"
            for g, h in zip(parameters, _HEADS, strict=False)
        ]
        for head, group in zip(heads, parameters, strict=True):
            inner.lines += [f"{', '.join(group)} = {head}"] if len(group) > 1 else []
        results = inner.run(closed, [*outside, *(self.env[v] for v in closed.jaxpr.invars[len(outside) :])])
        self.lines += [f"def {name}({', '.join(heads)}):", *_indented(inner.lines)]
        self.lines += [f"    return {returned(results)}", ""]
        return name


def _scan(body: _Body, eqn, operands: Sequence[Text]) -> None:
    consts, carries = _jax.scan_counts(eqn.params)
    init, xs = operands[consts : consts + carries], operands[consts + carries :]
    step = body.function(
        "step",
        _jax.closed(eqn.params["jaxpr"]),
        operands[:consts],
        [init, xs],
        lambda out: f"{packed(out[:carries])}, {packed(out[carries:])}",
    )
    carry = [body.define([v], _base_of(x))[0] for v, x in zip(eqn.outvars[:carries], init, strict=True)]
    stacked = body.define(eqn.outvars[carries:], "stacked")
    options = [f"length={eqn.params['length']}"] + ["reverse=True"] * bool(eqn.params["reverse"])
    options += [f"unroll={eqn.params['unroll']}"] * (eqn.params["unroll"] != 1)
    inputs = f"{packed(init)}, {packed(xs) if xs else 'None'}"
    body.statement(f"{_left(carry)}, {_left(stacked)} = lax.scan({step}, {inputs}, {', '.join(options)})")


def _while(body: _Body, eqn, operands: Sequence[Text]) -> None:
    cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    start = cond_consts + body_consts
    init, closed = operands[start:], [_jax.closed(eqn.params[name]) for name in ("cond_jaxpr", "body_jaxpr")]
    condition = body.function("condition", closed[0], operands[:cond_consts], [init], lambda out: str(out[0]))
    step = body.function("step", closed[1], operands[cond_consts:start], [init], packed)
    carry = [body.define([v], _base_of(x))[0] for v, x in zip(eqn.outvars, init, strict=True)]
    body.statement(f"{_left(carry)} = lax.while_loop({condition}, {step}, {packed(init)})")


def _cond(body: _Body, eqn, operands: Sequence[Text]) -> None:
    index, *inputs = operands
    branches = [
        body.function(f"branch_{i}", _jax.closed(b), inputs, [], packed)
        for i, b in enumerate(eqn.params["branches"])
    ]
    results = body.define(eqn.outvars, "chosen")
    body.statement(f"{_left(results)} = lax.switch({index}, [{', '.join(branches)}])")


def _left(targets: Sequence[str]) -> str:
    return "_" if not targets else targets[0] if len(targets) == 1 else f"({', '.join(targets)})"


def _base_of(text: Text) -> str:
    """What a loop calls a value that is so expressed outside."""
    return re.sub(r"_\d+$", "", text.text) if text.text.isidentifier() else "carry"


def _live(jaxpr) -> tuple[list[Any], dict[Any, list[Any]]]:
    """The equations that some result needs, or that send or have effects; and the users of each variable."""
    users: dict[Any, list[Any]] = {v: [None, None] for v in jaxpr.outvars if not _jax.is_literal(v)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or eqn.primitive.name in KINDS or any(v in users for v in eqn.outvars):
            live.append(eqn)
            for v in eqn.invars:
                if not _jax.is_literal(v):
                    users.setdefault(v, []).append(eqn)
    return live[::-1], users


def _is_same(eqn, operands: Sequence[Text]) -> bool:
    """Whether the result equals the first operand: so do annotations, and what only changes whether a type is
    weak.
    """
    match eqn.primitive.name:
        case "name" | "pvary" | "reshard" | "stop_gradient":
            return True
        case "convert_element_type" | "slice":
            out = eqn.outvars[0].aval
            return (operands[0].aval.dtype, operands[0].aval.shape) == (out.dtype, out.shape)
    return False


def _stands_alone(eqn, text: Text, users) -> bool:
    """Whether an equation becomes a statement of its own. It does not if it is cheap, and is either a number
    or used once, by the same line.
    """
    if len(eqn.outvars) != 1 or eqn.effects or text.several or eqn.primitive.name not in _INLINE:
        return True
    if text.scalar is not None:
        return False
    users = users.get(eqn.outvars[0], ())
    if (
        len(users) != 1
        or users[0] is None
        or users[0].primitive.name not in SPELLINGS
        or len(text.text) > INLINE
    ):
        return True
    return _jax.user_line(users[0].source_info) != _jax.user_line(eqn.source_info)


def _broken(text: str) -> list[str]:
    """A statement that is too long, the arguments of its last call a line each."""
    if len(text) <= WIDTH or not text.endswith((")", "),", "):")):
        return [text]
    end, bare = text.rfind(")"), _without_strings(text)
    depth, start = 0, end
    for start in range(end, -1, -1):
        depth += (bare[start] == ")") - (bare[start] == "(")
        if depth == 0:
            break
    arguments = list(_arguments(text[start + 1 : end]))
    called = re.search(r"[\w)\]]$", text[:start])
    comma = "," if called or len(arguments) > 1 else ""  # one thing in parentheses is no tuple
    lines = [line for argument in filter(None, arguments) for line in _broken(f"{argument}{comma}")]
    return [text[: start + 1], *_indented(lines), text[end:]]


def _arguments(text: str) -> Iterator[str]:
    """What top-level commas part."""
    depth, begin = 0, 0
    for i, c in enumerate(_without_strings(text)):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            yield text[begin:i].strip()
            begin = i + 1
    yield text[begin:].strip()


def _without_strings(text: str) -> str:
    """A text of the same length, in which strings are blanked out.

    >>> _without_strings('f("ab,c->(", x)')
    'f(_________, x)'
    """
    return re.sub(r'"(?:[^"\\]|\\.)*"', lambda m: "_" * len(m[0]), text)


_HEADS = ("carry", "xs")
_STRUCTURED = {"cond": _cond, "scan": _scan, "while": _while}
_CALLS = {
    "checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr",
    "jit", "pjit", "remat2",
}  # fmt: skip
_BASES = {
    "add": "plus", "add_any": "plus", "all_gather": "gathered", "all_to_all": "exchanged", "argmax": "index",
    "axis_index": "device", "bitcast_convert_type": "bits", "broadcast_in_dim": "spread",
    "convert_element_type": "cast", "conv_general_dilated": "conv", "dot_general": "product", "eq": "mask",
    "ge": "mask", "gt": "mask", "integer_pow": "power", "iota": "index", "le": "mask", "lt": "mask",
    "max": "most", "min": "least", "mul": "scaled", "ne": "mask", "ppermute": "received", "psum": "summed",
    "reduce_max": "most", "reduce_min": "least", "reduce_scatter": "scattered", "reduce_sum": "total",
    "select_n": "chosen", "slice": "part", "sort": "ordered", "sub": "minus", "transpose": "turned",
}  # fmt: skip
_INLINE = {
    "add", "add_any", "and", "broadcast_in_dim", "convert_element_type", "cos", "div", "eq", "exp", "ge",
    "gt", "integer_pow", "iota", "le", "log", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow",
    "reshape", "rsqrt", "select_n", "sin", "slice", "sqrt", "square", "squeeze", "stack", "sub", "tanh",
    "transpose", "xor",
}  # fmt: skip
