"""Names every collective of a local program by the user's line: `all_gather:models/gpt2.py:41`, as HLO and
profiles show it.

This is a pass, and not done where collectives are made, because many rules make them, and none may be
forgotten.
"""

from typing import Any

from shardax import _jax
from shardax.ledger.collectives import KINDS
from shardax.ledger.lines import line_text


def named(jaxpr):
    """The same ClosedJaxpr, a scope `kind:file.py:line` around each collective; of those at the boundary,
    `kind:shard_jit`.
    """
    return _Namer().jaxpr(jaxpr, "")


class _Namer:
    def __init__(self):
        self.done: dict[
            tuple[int, str], tuple[Any, Any]
        ] = {}  # bodies that are shared stay so; the old one is kept alive

    def jaxpr(self, jaxpr, line: str):
        """`line` is that of the innermost equation around this body that has one."""
        key = (id(jaxpr), line)
        if key not in self.done:
            eqns = [self.eqn(eqn, line) for eqn in _jax.closed(jaxpr).jaxpr.eqns]
            self.done[key] = jaxpr, _jax.replaced_eqns(jaxpr, eqns)
        return self.done[key][1]

    def eqn(self, eqn, line: str):
        kind = KINDS.get(eqn.primitive.name.removesuffix("_start"))
        if kind is None and not _jax.has_bodies(eqn):
            return eqn
        eqn_line = _jax.user_line(eqn.source_info) or line
        if kind is None:
            return _jax.with_bodies(eqn, lambda body: self.jaxpr(body, eqn_line))
        scope = f"{kind}:{line_text(eqn_line) or 'shard_jit'}"
        source = eqn.source_info
        return eqn.replace(source_info=source.replace(name_stack=source.name_stack.extend(scope)))
