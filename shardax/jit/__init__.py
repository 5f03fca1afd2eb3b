"""What stands where `jax.jit` stood."""
