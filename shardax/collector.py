"""Python's cyclic garbage collector, out of the way while programs are traced and planned.

Both make many objects that stay and few cycles. The collector would walk them over and over: a third of the
time of a plan for GPT-2. What was made meanwhile it takes for old afterwards, and walks when it next walks
all.
"""

import gc
import threading
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0
_was_enabled = False


@contextmanager
def paused():
    """Collects nothing inside. May be nested, and entered by several threads."""
    global _inside, _was_enabled
    with _lock:
        _inside += 1
        if _inside == 1:
            _was_enabled = gc.isenabled()
            gc.disable()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and _was_enabled:
                if not gc.get_freeze_count():  # what the user froze stays frozen
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()
