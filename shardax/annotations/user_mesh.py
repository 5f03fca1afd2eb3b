"""A mesh as the user named it, beside that of the program."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardax.sharding import AxisSizes


@dataclass(frozen=True, slots=True)
class UserMesh:
    """A mesh as the user named it: its axes, and the places of its devices in the program's flat mesh (None:
    in its order).
    """

    axes: tuple[tuple[str, int], ...]
    places: tuple[int, ...] | None = None
    mesh: Any = field(default=None, compare=False)  # the object itself, where there is one

    @property
    def sizes(self) -> AxisSizes:
        return dict(self.axes)

    def __str__(self):
        shown = ", ".join(map(str, (self.places or ())[:8])) + ", ..." * (len(self.places or ()) > 8)
        order = "" if self.places is None else f" of devices in the order [{shown}]"
        return f"({', '.join(f'{a}={n}' for a, n in self.axes)}){order}"


@lru_cache
def user_mesh(mesh: Mesh | AbstractMesh, program: Mesh | AbstractMesh) -> UserMesh | None:
    """`mesh` relative to the program's; None where it has other devices."""
    if mesh.size != program.size:
        return None
    axes = tuple(mesh.shape.items())
    if not isinstance(mesh, Mesh) or not isinstance(program, Mesh):
        return UserMesh(axes, None, mesh if isinstance(mesh, Mesh) == isinstance(program, Mesh) else None)
    devices, own = tuple(mesh.devices.flat), tuple(program.devices.flat)
    if devices == own:
        return UserMesh(axes, None, mesh)
    numbers = {device: i for i, device in enumerate(own)}
    return UserMesh(axes, tuple(numbers[d] for d in devices), mesh) if set(devices) == set(own) else None
