"""shard_jit as a primitive of JAX."""
