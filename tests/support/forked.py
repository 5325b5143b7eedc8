"""The child of a test that forks."""

import gc
import os
import signal
import traceback
from contextlib import contextmanager


@contextmanager
def ended_after(seconds):
    """Ends this process, a child of the test's, with 0 if the body ends well, otherwise with 1. If
    the body takes longer than `seconds`, a signal ends it. It never goes on with the tests.
    """
    gc.disable()  # what the parent left open is the parent's
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's own handler would raise
    signal.alarm(seconds)
    code = 1
    try:
        yield
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
