"""The program's mesh, decided once at its start: the common refinement of the meshes that annotations name.

Devices are numbered along the flat mesh of the program, and each axis of each mesh is written as digits of
that number:

    8 devices, number = 4 a + 2 b + c    (x=2, y=4):  x is a, y is b c      (x=4, y=2):  x is a b, y is c
    refined: (x=2, y.0=2, y.1=2)         (8,) "z":    z is a b c            transposed:  digits elsewhere

Each digit is one axis of the refined mesh, and each axis of the user's is a tuple of these, so no later step
meets a part of an axis. Meshes fit one another where all places at which digits begin divide one another. One
that does not fit (3·2 beside 2·3, or devices in an order that digits cannot describe) is a *boundary*: its
axes stand for digits of the same sizes, so values are cut into the blocks that it requests, but these are on
other devices than it names.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from shardax.annotations.explicit import explicit_mesh
from shardax.annotations.user_mesh import UserMesh
from shardax.cost.chips import NOMINAL, Chip
from shardax.cost.network import Network, network_of_mesh
from shardax.sharding import Axes, Owing, Sharding, at_rest

Digits = list[tuple[int, int]]  # (stride, size) of each, the major first


@dataclass(frozen=True, slots=True)
class Placement:
    """A sharding in the axes of a mesh that the user named."""

    mesh: UserMesh
    sharding: Sharding

    def on(self, program: Mesh | AbstractMesh) -> NamedSharding:
        """With the program's mesh or the user's other one, else one over the devices of the program's, of
        axes of one type: Explicit ones where it owes a reduction.
        """
        own = self.mesh.axes == tuple(program.shape.items()) and not self.mesh.places
        mesh = program if own else self.mesh.mesh or _built(self.mesh, program)
        return NamedSharding(explicit_mesh(mesh) if self.sharding.owing else mesh, self.sharding.spec)


@dataclass(frozen=True)
class Refinement:
    """The axes of the program's mesh, and each axis of each mesh that the user named as a tuple of them.

    `meshes`: the program's first. `cuts`: where digits begin, from 1 to the number of devices. `named`: the
    meshes on which a value may come to rest, those that the program names itself; others are of arguments
    that came in on them. `chip`: the one whose prices count, None: that of the mesh's devices.
    """

    meshes: tuple[UserMesh, ...]
    cuts: tuple[int, ...]
    named: frozenset[UserMesh] = frozenset()
    chip: Chip | None = NOMINAL

    @property
    def program(self) -> UserMesh:
        return self.meshes[0]

    @cached_property
    def sizes(self) -> Network:
        """The refined axes with their sizes, in mesh order, and what it costs to send along them."""
        sizes = {name: size for name, (_, size) in self._named.items()}
        return network_of_mesh(self.program.mesh, self.chip, sizes)

    @cached_property
    def axes(self) -> Mapping[UserMesh, Mapping[str, Axes]]:
        """For each mesh its axes, each as refined ones."""
        axes = {}
        for mesh in self.meshes:
            digits = _digits_of(mesh)
            if not digits or mesh in self.boundaries:
                digits = _dealt(mesh, self.cuts)
            axes[mesh] = {axis: self._covering(of_axis) for axis, of_axis in digits.items()}
        axes[self.program] |= {axis: (axis,) for axis, size in self.program.axes if size == 1}
        return axes

    @cached_property
    def boundaries(self) -> frozenset[UserMesh]:
        """The meshes whose blocks are on other devices than the meshes name."""
        return frozenset(mesh for mesh in self.meshes if not _fits(self.cuts, _digits_of(mesh)))

    @cached_property
    def is_trivial(self) -> bool:
        """Whether the refined mesh is the program's, and no other mesh is named."""
        return len(self.meshes) == 1 and tuple(self.sizes.items()) == self.program.axes

    def refined(self, dims: Sequence[Axes | None], mesh: UserMesh) -> tuple[Axes | None, ...]:
        """Dims in the axes of a mesh as those of the refined one."""
        axes = self.axes[mesh]
        return tuple(
            None if dim is None else tuple(sub for axis in dim for sub in axes[axis]) for dim in dims
        )

    def refined_owing(self, owing: Owing, mesh: UserMesh) -> Owing:
        """Likewise what a spec in the axes of a mesh says of reductions."""
        if not owing:
            return owing
        unreduced, reduced = self.refined((owing.unreduced, owing.reduced), mesh)
        return Owing(unreduced or (), reduced or (), owing.reduction)

    def folded(self, axes: Axes) -> Axes:
        """Refined axes as a person reads them: refined axes that together make an axis of the user's, in
        order, are that axis.
        """
        left, folded = axes, ()
        while left:
            taken, name = next(
                ((subs, name) for subs, name in self._wholes if left[: len(subs)] == subs),
                (left[:1], left[0]),
            )
            left, folded = left[len(taken) :], (*folded, name)
        return folded

    def shown(self, sharding: Sharding) -> Sharding:
        """A refined sharding as a person reads it."""
        if self.is_trivial:
            return sharding
        owing = sharding.owing
        folded = replace(owing, unreduced=self.folded(owing.unreduced), reduced=self.folded(owing.reduced))
        return Sharding(tuple(map(self.folded, sharding.dims)), folded)

    def owing_on(self, placement: Placement, owing: Owing) -> Placement:
        """A placement that owes what this says, in refined axes: those over which its mesh has them whole."""
        if not owing:
            return placement
        whole = {subs: axis for axis, subs in self.axes[placement.mesh].items()}

        def axes_of(refined: Axes) -> Axes:
            own = [axis for subs, axis in whole.items() if subs and set(subs) <= set(refined)]
            return tuple(sorted(axis for axis in own if axis not in placement.sharding.axes))

        of_mesh = Owing(axes_of(owing.unreduced), axes_of(owing.reduced), owing.reduction)
        return replace(placement, sharding=Sharding(placement.sharding.dims, of_mesh))

    def rest(
        self, sharding: Sharding, shape: tuple[int, ...], first: UserMesh | None = None, across: bool = False
    ) -> Placement:
        """How a value of a refined sharding rests between calls: on the first mesh that has a spec for it,
        and divides it so.

        A part of an axis has no spec: where no mesh has one, the whole axis goes to that dim, or nearest to
        it. `across`: it rests on `first` even where it has to be moved there.
        """
        if self.is_trivial:
            return Placement(self.program, at_rest(sharding, shape, self.sizes))
        if across and first is not None and not self.may_rest_on(first):
            return self._nearest(sharding, shape, first)
        order = dict.fromkeys((first or self.program, *self.meshes))
        placements = [self._nearest(sharding, shape, mesh) for mesh in order if self.may_rest_on(mesh)]
        return next((p for p in placements if self._equal(self.sharding(p), sharding)), placements[0])

    def may_rest_on(self, mesh: UserMesh) -> bool:
        """Whether values can rest on a mesh as they are, because its devices are in the program's order and
        its axes fit.
        """
        return mesh == self.program or mesh in self.named and not mesh.places and mesh not in self.boundaries

    def placement(self, sharding: Sharding, mesh: UserMesh | None = None) -> Placement:
        """A refined sharding in the axes of a mesh, by default the program's, that has a spec for it."""
        return self._nearest(sharding, None, mesh or self.program)

    def spelled(self, sharding: Sharding) -> Sharding | None:
        """A refined sharding in the axes of the program's mesh, None where there is no spec for it."""
        placement = self.placement(sharding)
        return placement.sharding if self._equal(self.sharding(placement), sharding) else None

    def sharding(self, placement: Placement) -> Sharding:
        """A placement in the refined axes."""
        dims, owing = placement.sharding.dims, placement.sharding.owing
        return Sharding(
            tuple(dim or () for dim in self.refined(dims, placement.mesh)),
            self.refined_owing(owing, placement.mesh),
        )

    def cut(self, parts: Iterable[tuple[str, int]]) -> "Refinement":
        """Further refined: an axis, by its name, into a major part of this size and a minor one. What does
        not fit is left.
        """
        cuts = set(self.cuts)
        for axis, major in parts:
            stride, size = self._named[axis]
            cuts |= {stride * size // major} if _nested(cuts | {stride * size // major}) else set()
        return replace(self, cuts=tuple(sorted(cuts)))

    def _nearest(self, sharding: Sharding, shape: tuple[int, ...] | None, mesh: UserMesh) -> Placement:
        owners = {sub: axis for axis, subs in self.axes[mesh].items() for sub in subs}
        dims, seen = [], set()
        for dim in sharding.dims:
            axes = tuple(dict.fromkeys(owners[sub] for sub in dim if sub in owners))
            dims.append(tuple(axis for axis in axes if axis not in seen))
            seen |= set(axes)
        nearest = Sharding(tuple(dims))
        return Placement(mesh, nearest if shape is None else at_rest(nearest, shape, mesh.sizes))

    def _equal(self, one: Sharding, other: Sharding) -> bool:
        """Whether two shardings are the same; axes of one device split nothing."""
        return all(
            [a for a in mine if self.sizes[a] > 1] == [a for a in theirs if self.sizes[a] > 1]
            for mine, theirs in zip(one.dims, other.dims, strict=True)
        )

    @cached_property
    def _named(self) -> dict[str, tuple[int, int]]:
        """The refined axes by name, each with its stride and size, in mesh order."""
        digits = [(low, high // low) for low, high in zip(self.cuts, self.cuts[1:], strict=False)][::-1]
        named, taken = {}, {axis for axis, _ in self.program.axes}
        for axis, ((stride, size),) in _flat_digits(self.program.axes).items():
            own = [d for d in digits if stride <= d[0] < stride * size] or [(stride, 1)]
            for i, digit in enumerate(own):
                name = axis if len(own) == 1 else self._name(digit, f"{axis}.{i}", taken)
                named[name] = digit
                taken.add(name)
        return named

    def _name(self, digit: tuple[int, int], plain: str, taken: set[str]) -> str:
        """That of the one axis of another mesh that is exactly this digit, else `plain`."""
        axes = [name for mesh in self.meshes for name in mesh.sizes]
        exact = (a for mesh in self.meshes[1:] for a, d in (_digits_of(mesh) or {}).items() if d == [digit])
        name = next((a for a in exact if axes.count(a) == 1), plain)
        while name in taken:
            name += "'"
        return name

    def _covering(self, digits: Digits) -> Axes:
        return tuple(
            name
            for stride, size in digits
            for name, (low, count) in self._named.items()
            if stride <= low < stride * size and count > 1
        )

    @cached_property
    def _wholes(self) -> list[tuple[Axes, str]]:
        """The pairs (refined axes, user's axis): those of the program's mesh, then of other meshes where
        their names are clear.
        """
        wholes = {subs: name for name, subs in self.axes[self.program].items() if len(subs) > 1}
        axes = [name for mesh in self.meshes for name in mesh.sizes]
        for mesh in self.meshes[1:]:
            for name, subs in self.axes[mesh].items():
                if len(subs) > 1 and axes.count(name) == 1:
                    wholes.setdefault(subs, name)
        return list(wholes.items())


def refinement(meshes: Iterable[UserMesh], of_arguments: Iterable[UserMesh] = ()) -> Refinement:
    """The common refinement of meshes over the same devices, the program's first; last those on which
    arguments came in.

    >>> both = refinement([UserMesh((("x", 2), ("y", 4))), UserMesh((("x", 4), ("y", 2)))])
    >>> dict(both.sizes)
    {'x': 2, 'y.0': 2, 'y.1': 2}
    >>> both.axes[both.meshes[1]]
    {'x': ('x', 'y.0'), 'y': ('y.1',)}
    >>> both.folded(("y.0", "y.1"))
    ('y',)
    """
    named = dict.fromkeys(meshes)
    meshes = tuple(named | dict.fromkeys(of_arguments))
    cuts = {1}
    for mesh in meshes:
        cuts |= _points(_digits_of(mesh) or {}) if _fits(cuts, _digits_of(mesh)) else set()
    for mesh in meshes:
        if not _fits(cuts, _digits_of(mesh)):
            cuts |= _points(_dealt(mesh, sorted(cuts)))
    return Refinement(meshes, tuple(sorted(cuts)), frozenset(named))


# Digits


def _digits_of(mesh: UserMesh) -> dict[str, Digits] | None:
    """The digits of each axis, None where digits cannot describe the order of the devices."""
    if mesh.places is None:
        return _flat_digits(mesh.axes)
    places = np.asarray(mesh.places).reshape([size for _, size in mesh.axes])
    lines = [places[(0,) * k + (slice(None),) + (0,) * (places.ndim - k - 1)] for k in range(places.ndim)]
    digits = {axis: _line_digits(line.tolist()) for (axis, _), line in zip(mesh.axes, lines, strict=True)}
    if places.flat[0] or None in digits.values() or not np.array_equal(sum(np.ix_(*lines)), places):  # type: ignore[arg-type]
        return None
    return digits  # type: ignore[return-value]


def _flat_digits(axes: Sequence[tuple[str, int]]) -> dict[str, Digits]:
    """One digit for each axis, the last counting single devices.

    >>> _flat_digits((("x", 2), ("y", 4)))
    {'x': [(4, 2)], 'y': [(1, 4)]}
    """
    return {axis: [(math.prod(n for _, n in axes[k + 1 :]), size)] for k, (axis, size) in enumerate(axes)}


def _line_digits(line: list[int]) -> Digits | None:
    """The digits of an axis whose positions are the devices of these numbers.

    >>> _line_digits([0, 1, 4, 5]), _line_digits([0, 2, 1])
    ([(4, 2), (1, 2)], None)
    """
    digits: Digits = []
    while len(line) > 1:
        count = next((i for i, number in enumerate(line) if number != i * line[1]), len(line))
        count = math.gcd(count, len(line))
        heads = line[::count]
        if count == 1 or any(n != heads[i // count] + line[i % count] for i, n in enumerate(line)):
            return None
        digits.insert(0, (line[1], count))
        line = heads
    return digits or [(1, 1)]


def _points(digits: Mapping[str, Digits]) -> set[int]:
    """Where digits begin, and end."""
    return {
        point
        for own in digits.values()
        for stride, size in own
        if size > 1
        for point in (stride, stride * size)
    }


def _nested(cuts: Iterable[int]) -> bool:
    """Whether each divides the next.

    >>> _nested({1, 2, 8}), _nested({1, 2, 3, 6})
    (True, False)
    """
    cuts = sorted(cuts)
    return all(high % low == 0 for low, high in zip(cuts, cuts[1:], strict=False))


def _fits(cuts: Iterable[int], digits: Mapping[str, Digits] | None) -> bool:
    return digits is not None and _nested({*cuts} | _points(digits))


def _dealt(mesh: UserMesh, cuts: Sequence[int]) -> dict[str, Digits]:
    """Digits of the sizes of a mesh's axes, wherever their places are. Those with a common divisor are cut
    where need be.

    >>> _dealt(UserMesh((("a", 3), ("b", 2))), (1, 3, 6))
    {'a': [(1, 3)], 'b': [(3, 2)]}
    """
    free = [(low, high // low) for low, high in zip(cuts, cuts[1:], strict=False)][::-1]
    dealt: dict[str, Digits] = {}
    for axis, size in mesh.axes:
        own, left = [], []
        for stride, count in free:
            part = math.gcd(size, count)
            size //= part
            own += [(stride * count // part, part)] * (part > 1)
            left += [(stride, count // part)] * (part < count)
        dealt[axis], free = own or [(1, 1)], left
    return dealt


def _built(mesh: UserMesh, program: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    types = (program.axis_types[0] if program.axis_types else AxisType.Auto,) * len(mesh.axes)
    axes, sizes = tuple(mesh.sizes), tuple(mesh.sizes.values())
    if isinstance(program, AbstractMesh):
        return AbstractMesh(sizes, axes, axis_types=types)
    places = range(program.size) if mesh.places is None else mesh.places
    return Mesh(program.devices.ravel()[list(places)].reshape(sizes), axes, axis_types=types)
