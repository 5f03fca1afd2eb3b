"""Text is written as under `jax.jit`: tokens, logits, the donated caches to the bit where they are int8, and
no more sent.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from benchmarks import decode
from examples import deepseek, inference, llama

pytestmark = [pytest.mark.promotes_ranks, pytest.mark.mixed_dtypes]

STEPS, CHUNK = 4, 4  # 12 tokens are read before
MODELS = {"llama": llama.MODEL, "deepseek": deepseek.MODEL}
MESHES = [
    ("llama", (2, 2, 2)),
    pytest.param("deepseek", (2, 2, 2), marks=pytest.mark.once),
    pytest.param("llama", (1, 2, 4), marks=pytest.mark.slow),
    pytest.param("deepseek", (1, 4, 2), marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def quick_compilation():
    """XLA's optimizations are not under test here."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def written(name, shape, jit, dtype):
    config = MODELS[name].config(inference.make_mesh(*shape), jit, dtype=dtype)
    return MODELS[name].generate(config, inference.PROMPTS, STEPS, CHUNK)


@pytest.mark.parametrize("name, shape", MESHES)
def test_writes_as_under_jit(name, shape):
    (tokens, logits, cache), (want_tokens, want_logits, want) = (
        written(name, shape, jit, "float32") for jit in (sx.shard_jit, jax.jit)
    )
    assert tokens.tolist() == want_tokens.tolist()
    assert len(set(tokens.ravel().tolist())) > STEPS
    np.testing.assert_allclose(logits, want_logits, atol=1e-5)
    assert jax.tree.structure(cache) == jax.tree.structure(want)
    for a, b in zip(*map(jax.tree.leaves, (cache, want)), strict=True):
        assert jax.typeof(a) == jax.typeof(b) and a.sharding == b.sharding
        tolerance = 1e-5 if jnp.issubdtype(a.dtype, jnp.floating) else 0
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)
    rows = [leaf for leaf in jax.tree.leaves(cache) if leaf.dtype == "int8"]
    filled = len(inference.PROMPTS[0]) + STEPS
    assert rows and all(np.any(x[:, filled - 1]) and not np.any(x[:, filled:]) for x in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_in_bfloat16(name):
    (tokens, logits, _), (want_tokens, want, _) = (
        written(name, (2, 2, 2), jit, "bfloat16") for jit in (sx.shard_jit, jax.jit)
    )
    assert tokens[:, 0].tolist() == want_tokens[:, 0].tolist()
    np.testing.assert_allclose(logits[:, 0], want[:, 0], atol=0.03 * np.abs(want).max())


@pytest.mark.parametrize("name, shape", MESHES)
def test_a_decode_step_sends_no_more_than_under_jit_and_writes_its_cache_in_place(name, shape):
    mesh = inference.make_mesh(*shape)
    ours, theirs = (decode.compiled(MODELS[name], mesh, jit) for jit in (sx.shard_jit, jax.jit))
    assert 0 < ours.sent <= theirs.sent
    assert ours.aliased == theirs.aliased > 0
