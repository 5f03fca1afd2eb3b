"""The devices that the main job runs on: accelerators where there are any, else virtual CPU devices; and its
processes.
"""

import math
import os
from collections.abc import Mapping

import jax
from jax.sharding import AxisType, Mesh

from models.options import Options, stop

VIRTUAL = 8
FLAG = "--xla_force_host_platform_device_count"
SILENCE = 10  # seconds without a sign of life, after which a process counts as dead and the others end


def connect(options: Options) -> None:
    """Joins the other processes of the job, if there are any. Before JAX first needs a device."""
    if options.cluster:
        jax.distributed.initialize()
    elif options.processes > 1:
        jax.distributed.initialize(
            options.coordinator,
            options.processes,
            options.process,
            heartbeat_timeout_seconds=SILENCE,
            shutdown_timeout_seconds=SILENCE,
        )


def make_mesh(shape: Mapping[str, int] | None, processes: int = 1) -> Mesh:
    flags = os.environ.get("XLA_FLAGS", "")
    if FLAG not in flags:  # JAX makes virtual CPU devices when it first needs one, and prefers accelerators
        count = max(VIRTUAL, math.prod((shape or {}).values())) // processes
        os.environ["XLA_FLAGS"] = f"{flags} {FLAG}={count}"
    devices = jax.devices()
    shape = shape or default_shape(len(devices))
    needed = math.prod(shape.values())
    if needed > len(devices):
        stop(f"--mesh {mesh_text(shape)} needs {needed} devices, and there are {len(devices)}")
    if needed < len(devices) and jax.process_count() > 1:
        stop(
            f"--mesh {mesh_text(shape)} leaves out {len(devices) - needed} of {len(devices)} devices: "
            "several processes use all"
        )
    auto = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(tuple(shape.values()), tuple(shape), auto, devices=devices[:needed])


def fully_sharded(mesh: Mesh) -> Mesh:
    """The mesh on which annotations split parameters over the axis of the batch, as stage 3 of ZeRO does: its
    axis data is fsdp. One that has fsdp stays as it is.
    """
    names = tuple("fsdp" if axis == "data" else axis for axis in mesh.axis_names)
    return mesh if "fsdp" in mesh.axis_names else Mesh(mesh.devices, names, axis_types=mesh.axis_types)


def default_shape(count: int) -> dict[str, int]:
    """All devices, two of them to a model where they come in pairs.

    >>> default_shape(8), default_shape(1)
    ({'data': 4, 'model': 2}, {'data': 1, 'model': 1})
    """
    model = 2 if count % 2 == 0 else 1
    return {"data": count // model, "model": model}


def mesh_text(shape: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in shape.items())
