"""Eight virtual CPU devices, strict dtype promotion, and the tracer-leak check for tests that ask for it."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402  (reads the flags above)
import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def strict_dtypes(request):
    """A test that mixes dtypes on purpose, or runs a library that does, is marked `mixed_dtypes`."""
    mixed = request.node.get_closest_marker("mixed_dtypes") is not None
    with jax.numpy_dtype_promotion("standard" if mixed else "strict"):
        yield


@pytest.fixture(autouse=True)
def leak_check(request):
    """Only where marked `leaks`: the check turns JAX's tracing caches off, which most tests stand on."""
    if request.node.get_closest_marker("leaks") is None:
        yield
        return
    with jax.checking_leaks():
        yield
