"""Files: weights on disk as arrays that are mapped into memory, read where and when they are used."""

import json
import math
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from shardax.validation import require

_DTYPES = {
    "BOOL": "bool",
    **{
        f"{kind}{bits}": f"{name}{bits}"
        for kind, name in (("I", "int"), ("U", "uint"))
        for bits in (8, 16, 32, 64)
    },
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


def open_safetensors(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file by their names, mapped into memory: nothing is read before it is used.

    The format (https://huggingface.co/docs/safetensors): eight bytes, the length n of the header, little
    endian; n bytes of JSON, by name the dtype, the shape and the place behind the header; the data. It is
    read here, and not by the package `safetensors`, since what that gives is not mapped: of 0.8, `get_tensor`
    of a `safe_open` copies the whole array into memory of the process, and `get_slice` gives no array.

    Raises ValueError for what is no such file, for dtypes that JAX has not, and where the bytes of an array
    are not those of its shape.

    >>> import struct, tempfile
    >>> header = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(struct.pack("<Q", len(header)) + header + np.float32([1, 2]).tobytes())
    ...     file.flush()
    ...     open_safetensors(file.name)["w"].tolist()
    [1.0, 2.0]
    """
    require(isinstance(path, str | os.PathLike), "path of open_safetensors", path, "the path of a file")
    with Path(path).open("rb") as file:
        length, size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
        try:
            header = json.loads(file.read(length)) if length <= size - 8 else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise ValueError(f"open_safetensors: {path} is no safetensors file: it has no header of JSON")
    header.pop("__metadata__", None)
    return {name: _mapped(path, name, entry, 8 + length) for name, entry in header.items()}


def _mapped(path: str | os.PathLike, name: str, entry: dict, start: int) -> np.ndarray:
    if entry["dtype"] not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ValueError(
            f"open_safetensors: {name} in {path} is of dtype {entry['dtype']}: known are {known}"
        )
    dtype, shape, (first, end) = (
        jnp.dtype(_DTYPES[entry["dtype"]]),
        tuple(entry["shape"]),
        entry["data_offsets"],
    )
    if end - first != math.prod(shape) * dtype.itemsize or first < 0 or start + end > os.path.getsize(path):
        raise ValueError(
            f"open_safetensors: {name} in {path} is {dtype}{list(shape)}, and has the bytes {first} to {end} "
            f"of {os.path.getsize(path) - start}: the file is damaged, or was not written to its end"
        )
    if end == first:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", start + first, shape)
