"""Eight virtual CPU devices, strict dtype promotion, JAX's own checks in the files of programs of many kinds,
the tracer-leak check for tests that ask for it, and the quick tests, which have no devices at all.

`jax_enable_checks` costs about five percent: 30.6 user seconds for 29.2 (test_rules_indexing), 16.2 for 15.3
(test_loops). Rank promotion is allowed: most programs here add biases, as those of users do. What the lowerings
themselves promote, test_debug_configurations forbids.
"""

import os

# LLVM may leave its slow passes out here: a fifth of the processor time. Conformance, fuzz and the main job have them.
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402  (reads the flags above)
import jax.monitoring  # noqa: E402
import pytest  # noqa: E402

NO_DEVICES = "no_devices_in_quick_tests"
COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(autouse=True)
def strict_dtypes(request):
    """A test that mixes dtypes on purpose, or runs a library that does, is marked `mixed_dtypes`."""
    mixed = request.node.get_closest_marker("mixed_dtypes") is not None
    with jax.numpy_dtype_promotion("standard" if mixed else "strict"):
        yield


# files of programs of many kinds, run under `jax_enable_checks`
CHECKED = {
    "test_api",
    "test_associative",
    "test_crossing",
    "test_custom_partitioning",
    "test_drop_in",
    "test_islands",
    "test_loops",
    "test_meshes_crossing",
    "test_meshes_sites",
    "test_partition_as",
    "test_registry",
    "test_rules",
    "test_rules_indexing",
    "test_rules_shape",
    "test_rules_sizes",
    "test_rules_windows",
    "test_searches",
    "test_train_steps",
    "test_transform",
    "test_transformations",
    "test_transforms",
}


@pytest.fixture(autouse=True)
def jax_checks(request):
    """Each jaxpr that JAX makes is checked: what it and we make of others has to be well typed."""
    if request.path.stem not in CHECKED:
        yield
        return
    with jax.enable_checks(True):
        yield


@pytest.fixture(autouse=True)
def leak_check(request):
    """Only where marked `leaks`: the check turns JAX's tracing caches off, which most tests stand on."""
    if request.node.get_closest_marker("leaks") is None:
        yield
        return
    with jax.checking_leaks():
        yield


# Quick tests: `pytest --quick`


OTHERS = "not_quick", "slow", "processes", "tpu"


def is_quick(item) -> bool:
    return bool(item.get_closest_marker("quick")) and not any(map(item.get_closest_marker, OTHERS))


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="only the quick tests, without any device")


def pytest_configure(config):
    """JAX is told of a platform that is not there: what asks for a device, be it an import, fails."""
    if config.getoption("quick"):
        jax.config.update("jax_platforms", NO_DEVICES)


def pytest_ignore_collect(collection_path, config):
    """Files without quick tests are not even imported, because many make a mesh at once."""
    if config.getoption("quick") and collection_path.suffix == ".py":
        return "mark.quick" not in collection_path.read_text() or None
    return None


def pytest_collection_modifyitems(config, items):
    if config.getoption("quick"):
        left = [item for item in items if not is_quick(item)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if is_quick(item)]


@pytest.fixture(autouse=True)
def neither_devices_nor_compilation(request):
    """A quick test that compiles, or looks for devices, fails among the other tests too, where there are
    some.
    """
    if not is_quick(request.node):
        yield
        return

    def refuse(event: str, seconds: float, **_):
        if event == COMPILED:
            raise AssertionError("a quick test compiled: use NumPy and shapes, or mark it `not_quick`")

    def none(*_, **__):
        raise RuntimeError("a quick test asked for devices: use an AbstractMesh, or mark it `not_quick`")

    monkeypatch = request.getfixturevalue("monkeypatch")
    for name in ("devices", "local_devices", "device_count", "make_mesh"):
        monkeypatch.setattr(jax, name, none)
    jax.monitoring.register_event_duration_secs_listener(refuse)
    yield
    jax.monitoring.unregister_event_duration_listener(refuse)
