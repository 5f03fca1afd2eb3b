"""Weights that stay at the host or on disk: results are the same, and few of them are on the device at once."""

import json
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from models.devices import make_mesh
from shardax.zero import AtHost, open_safetensors, stream

pytestmark = pytest.mark.promotes_ranks

LAYERS, MODEL = 5, 8
ROW = MODEL * MODEL * 4


def weights():
    rng = np.random.default_rng(0)
    stacked = np.float32(rng.normal(size=(LAYERS, MODEL, MODEL)) * 0.3)
    return {
        "w": stacked,
        "b": stacked[:, 0].astype(ml_dtypes.bfloat16),
        "embed": np.float32(rng.normal(size=(11, MODEL))),
        "shared": stacked[0],
    }


def scanned(p, tokens, cache):
    """Backwards over layers; a cache goes in and comes out by layers; some weights every layer reads."""

    def layer(carry, x):
        (h, n), (w, b, old) = carry, x
        h = jnp.tanh(h @ w @ p["shared"] + b.astype(jnp.float32) + old)
        return (h, n + 1), (h.mean(0), 2 * old)

    carry = p["embed"][tokens], jnp.int32(0)
    (h, n), (means, cache) = jax.lax.scan(layer, carry, (p["w"], p["b"], cache), reverse=True)
    return {"logits": h @ p["embed"].T, "n": n, "means": means, "cache": cache, "weight": p["shared"]}


def listed(p, tokens, cache):
    h = jax.nn.relu(p["embed"][tokens]) @ p["layers"][0]
    for i in range(LAYERS):
        h = jnp.tanh(h @ p["layers"][i] + cache[i])
    return h, tokens


def equal(found, wanted):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)
        assert x.dtype == y.dtype


@pytest.mark.parametrize("form", [scanned, listed])
@pytest.mark.parametrize("ahead, keep", [(10**6, 0), (0, 0), (3 * ROW, 2 * ROW)])
def test_results_and_budget(form, ahead, keep):
    params = weights()
    if form is listed:
        params = {"embed": params["embed"], "layers": list(params["w"])}
    args = np.arange(6) % 11, np.float32(np.ones((LAYERS, 1, MODEL)))
    wanted, total = jax.jit(form)(params, *args), sum(x.nbytes for x in jax.tree.leaves(params))
    run = stream(form, params, ahead, keep)
    for _ in range(2):
        equal(run(*args), wanted)
        assert run.most <= max(ahead, run.largest) + keep
    if ahead > total:
        assert run.loaded == total, "once, also what is read several times"
    if keep:
        full = stream(form, params, ahead)
        full(*args)
        assert run.loaded <= full.loaded - keep + 2 * ROW, "what is kept is not brought again"
    if not ahead:
        assert run.largest <= 2 * ROW + MODEL * 2


def test_equal_layers_are_one_program():
    params = {"embed": weights()["embed"], "layers": list(weights()["w"])}
    run = stream(listed, params, ahead=0)
    run(np.arange(6), np.float32(np.ones((LAYERS, 1, MODEL))))
    ((cut),) = run._cuts.values()
    assert len(cut.pieces) == LAYERS + 1


def file_of(tmp_path, arrays, names):
    header, start = {"__metadata__": {"format": "np"}}, 0
    for key, x in arrays.items():
        header[key] = {
            "dtype": names[x.dtype.name],
            "shape": x.shape,
            "data_offsets": [start, start + x.nbytes],
        }
        start += x.nbytes
    text = json.dumps(header).encode()
    path = tmp_path / "weights.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(x.tobytes() for x in arrays.values()))
    return path


def test_from_a_file(tmp_path):
    params = weights()
    path = file_of(tmp_path, params, {"float32": "F32", "bfloat16": "BF16"})
    mapped = open_safetensors(path)
    assert all(isinstance(x, np.memmap) for x in mapped.values()) and mapped["b"].dtype == params["b"].dtype
    args = np.arange(6), np.float32(np.ones((LAYERS, 1, MODEL)))
    equal(stream(scanned, mapped, 4 * ROW)(*args), jax.jit(scanned)(params, *args))


@pytest.mark.quick
def test_files_as_the_package_writes_them(tmp_path):
    package = pytest.importorskip("safetensors.numpy")
    params = weights() | {"none": np.zeros((0, 3), np.int8), "one": np.array(3, np.int64)}
    package.save_file(params, tmp_path / "x")
    mapped = open_safetensors(tmp_path / "x")
    assert mapped.keys() == params.keys()
    for name, x in params.items():
        np.testing.assert_array_equal(mapped[name], x)
        assert mapped[name].dtype == x.dtype


def test_at_host_on_a_mesh():
    mesh, params = make_mesh({"x": 4, "y": 2}), weights()
    place = NamedSharding(mesh, P(None, "x"), memory_kind="pinned_host")
    args = np.arange(6), np.float32(np.ones((LAYERS, 1, MODEL)))
    run = sx.shard_jit(scanned, mesh=mesh, transforms=[AtHost("p")], in_shardings=(None, P("y"), None))
    wanted = jax.jit(scanned)(params, *args)
    equal(run(params, *args), wanted)
    placed = params | {name: jax.device_put(params[name], place) for name in ("w", "shared")}
    equal(run(placed, *args), wanted)
    named = {name: place if name in ("w", "shared") else None for name in params}
    how = {"mesh": mesh, "in_shardings": (named, P("y"), None)}
    equal(sx.shard_jit(scanned, transforms=[AtHost("p")], **how)(placed, *args), wanted)
    plan = run.plan(params, *args)
    rests = sum(p.aval.size * p.aval.dtype.itemsize // p.shards for p in plan.arguments() if p.at_host)
    assert plan.memory().host == rests + 4 * len(args[0]) * (1 + MODEL)  # tokens, and rows of the table


@pytest.mark.quick
def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="params of stream is .*: give a pytree of NumPy arrays"):
        stream(listed, {"w": "weights.safetensors"})
    with pytest.raises(ValueError, match="params of stream"):
        stream(listed, {})
    with pytest.raises(ValueError, match="ahead of stream is -1, of type int: give a number of bytes"):
        stream(listed, weights(), ahead=-1)
    path = tmp_path / "no"
    path.write_bytes(b"not a safetensors file")
    with pytest.raises(ValueError, match="no is no safetensors file: it has no header of JSON"):
        open_safetensors(path)
    path = file_of(tmp_path, {"w": np.zeros(2, np.float32)}, {"float32": "F4"})
    with pytest.raises(ValueError, match="w in .* is of dtype F4: known are BOOL, I8"):
        open_safetensors(path)
    path = file_of(tmp_path, {"w": np.zeros(2, np.float32)}, {"float32": "F64"})
    with pytest.raises(ValueError, match=r"w in .* is float64\[2\], and has the bytes 0 to 8 of 8: the file"):
        open_safetensors(path)
    path = file_of(tmp_path, {"w": np.zeros(2, np.float32)}, {"float32": "F32"})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="has the bytes 0 to 8 of 4: the file is damaged"):
        open_safetensors(path)
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="argument of AtHost is 'params', and .* its arguments are x"):
        sx.shard_jit(lambda x: 2 * x, mesh=mesh, transforms=[AtHost("params")]).plan(
            jax.ShapeDtypeStruct((4,), "float32")
        )
