"""Parts: what an update reads of an array that rests whole at the host, its device's part along one dim.

    a = pad(w_host);  b = dynamic_slice(a);  w = bring(b)      of each block: bring(w_host), pad, slice

New parameters of stages 1 and 2 of ZeRO are made so. XLA would have the host pad and cut all of it, in
layouts of which it then copies no blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax import lax

from shardax import _jax
from shardax.passes.blocks import Part
from shardax.passes.moves import brings, variables


@dataclass(frozen=True, eq=False)
class Cut:
    """How a part is cut out of the array `source`: along `dim`, from `begin` on, after the dim is padded to
    `size` with `fill`, None where it is not. `eqns` do it.
    """

    source: Any
    dim: int
    begin: Any
    size: int
    fill: Any
    eqns: tuple[Any, ...]

    @property
    def reads(self) -> list[Any]:
        return variables([self.source, self.begin, *([] if self.fill is None else [self.fill])])

    def part(self, env: Mapping[Any, Any]) -> Part:
        """It as values."""

        def read(atom):
            return atom.val if _jax.is_literal(atom) else env[atom]

        return Part(self.dim, read(self.begin), self.size, None if self.fill is None else read(self.fill))


def cut_of(bring, makers: Mapping[Any, Any], readers: Mapping[Any, set[int]]) -> Cut | None:
    """Of what an equation brings the cut, if it is a part of an array along one dim that nothing else reads.

    makers, readers: by variables the equation that makes them, and the numbers of those that read them.
    """

    def only(v, reader, primitive) -> Any:
        maker = makers.get(v)
        is_only = maker is not None and maker.primitive is primitive and readers[v] == {id(reader)}
        return maker if is_only else None

    cut = only(bring.invars[0], bring, lax.dynamic_slice_p) if brings(bring) else None
    if cut is None or (dim := _cut_dim(cut)) is None:
        return None
    (source, *begins), size = cut.invars, cut.invars[0].aval.shape[dim]
    pad = only(source, cut, lax.pad_p)
    if pad is None:
        return Cut(source, dim, begins[dim], size, None, (cut,))
    if any(
        end and d != dim or begin or inside
        for d, (begin, end, inside) in enumerate(pad.params["padding_config"])
    ):
        return None
    return Cut(pad.invars[0], dim, begins[dim], size, pad.invars[1], (pad, cut))


def _cut_dim(eqn) -> int | None:
    """Along which dim a `dynamic_slice` cuts, if it is one."""
    sizes = zip(eqn.invars[0].aval.shape, eqn.params["slice_sizes"], strict=True)
    dims = [dim for dim, (whole, part) in enumerate(sizes) if whole != part]
    return dims[0] if len(dims) == 1 else None
