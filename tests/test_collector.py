"""The garbage collector rests inside, however often that is entered, and is left as it was found."""

import gc
import threading

import pytest

from shardax import collector

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def enabled():
    yield
    gc.enable()


def test_nested_and_left_by_an_error():
    with pytest.raises(KeyError), collector.paused():
        with collector.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_what_was_off_stays_off():
    gc.disable()
    with collector.paused():
        pass
    assert not gc.isenabled()


def test_the_last_of_several_threads_turns_it_on():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with collector.paused():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with collector.paused():
        thread.start()
        entered.wait()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_cycles_made_inside_are_collected_later():
    class Cycle:
        count = 0

        def __init__(self):
            self.itself = self

        def __del__(self):
            Cycle.count += 1

    with collector.paused():
        for _ in range(3):
            Cycle()
    gc.collect()
    assert Cycle.count == 3


def test_what_the_user_froze_stays_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collector.paused():
            pass
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()
