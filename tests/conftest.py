"""Eight virtual CPU devices; strict promotions, of dtypes and of ranks, in every test; JAX's own checks and the
tracer-leak check for tests that ask for it; long tests left out; and the quick tests, which have no devices at all.

JAX's checks (`jax_enable_checks`) of what is traced take up to a third of the time, so they are on where `make test-latest`
sets JAX_ENABLE_CHECKS, and in tests marked `checks`. Processes that tests start run without, as those of users do.
"""

import contextlib
import gc
import os
import pathlib
import sys
import warnings

# LLVM may leave its slow passes out here: a fifth of the processor time. Conformance, fuzz and the main job have them.
# XLA ends the process when a device waits 40 s for another at a collective; eight devices on two busy cores, in a machine
# that may itself be paused, need more.
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_terminate_timeout_seconds=300",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402  (reads the flags above)
import jax.monitoring  # noqa: E402
import pytest  # noqa: E402

from tests import measured  # noqa: E402

SHARDAX = os.path.join(os.path.dirname(os.path.dirname(__file__)), "shardax", "")
OUTSIDE = os.path.dirname(jax.__file__), warnings.__file__, __file__
NO_DEVICES = "no_devices_in_quick_tests"
COMPILED = "/jax/core/compile/backend_compile_duration"
MAPPINGS = 30_000


# What each test runs under, doctests too; a mark changes a setting.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@contextlib.contextmanager
def ranks_promoted_by_users():
    """Programs may promote ranks, shardax's own lowerings may not: JAX warns, and who asked it decides."""

    def show(message, *_, **__):
        frame = sys._getframe()
        while (place := frame.f_code.co_filename).startswith(OUTSIDE):
            frame = frame.f_back
        assert not place.startswith(SHARDAX), f"{place}:{frame.f_lineno} {frame.f_code.co_name}: {message}"

    with jax.numpy_rank_promotion("warn"), warnings.catch_warnings():
        warnings.filterwarnings("always", "Following NumPy automatic rank promotion")
        warnings.showwarning = show
        yield


SETTINGS = {
    "checks": lambda: jax.enable_checks(True),
    "mixed_dtypes": lambda: jax.numpy_dtype_promotion("standard"),
    "promotes_ranks": ranks_promoted_by_users,
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Around a whole test, with the fixtures of its module that it is the first to ask for."""
    with contextlib.ExitStack() as stack:
        for mark, setting in SETTINGS.items():
            if item.get_closest_marker(mark):
                stack.enter_context(setting())
        result = yield
    if item.get_closest_marker("slow") and mappings() > MAPPINGS:
        jax.clear_caches()
        gc.collect()
    return result


def mappings() -> int:
    """Of memory, in this process: each compiled program has some. Linux allows 65,530, and XLA crashes where it gets no
    more, as after some hundreds of train steps."""
    maps = pathlib.Path("/proc/self/maps")
    return len(maps.read_bytes().splitlines()) if maps.exists() else 0


@pytest.fixture(autouse=True)
def leak_check(request):
    """Only where marked `leaks`: the check turns JAX's tracing caches off, which most tests stand on."""
    if request.node.get_closest_marker("leaks") is None:
        yield
        return
    with jax.checking_leaks():
        yield


# Quick tests: `pytest --quick`


NOT_IN_MAKE_TEST = "slow", "processes", "tpu", "browser"


def is_quick(item) -> bool:
    return bool(item.get_closest_marker("quick")) and not any(
        map(item.get_closest_marker, ("not_quick", *NOT_IN_MAKE_TEST))
    )


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="only the quick tests, without any device")
    parser.addoption("--measure", action="store_true", help="write how long tests take to tests/seconds.txt")


def pytest_configure(config):
    """JAX is told of a platform that is not there: what asks for a device, be it an import, fails."""
    if config.getoption("quick"):
        jax.config.update("jax_platforms", NO_DEVICES)
    if config.getoption("measure") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(measured.Recorder())


def pytest_ignore_collect(collection_path, config):
    """Files without quick tests are not even imported, because many make a mesh at once."""
    if config.getoption("quick") and collection_path.suffix == ".py":
        return "mark.quick" not in collection_path.read_text() or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Long tests are marked before pytest chooses by marks."""
    timed = [item for item in items if not any(map(item.get_closest_marker, NOT_IN_MAKE_TEST))]
    found = measured.marks([item.nodeid for item in timed], measured.read())
    for item in timed:
        if item.nodeid in found:
            item.add_marker(found[item.nodeid])
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
