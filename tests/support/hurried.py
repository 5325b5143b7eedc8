"""A clock by which every wait is over at once."""

import queue

from kafka2pc.protocol.clock import Clock


class Hurried(Clock):
    """It begins at `at_s`, and only a wait takes any time."""

    def __init__(self, at_s=0.0):
        self.at_s = at_s

    def now_ms(self):
        return self.at_s * 1000

    def monotonic(self):
        return self.at_s

    def sleep(self, seconds):
        self.at_s += seconds

    def mailbox(self):
        return Mailbox(self)


class Mailbox(queue.Queue):
    """What is not there yet never comes."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def get(self, block=True, timeout=None):
        if self.empty() and timeout is not None:
            self.clock.sleep(timeout)
            raise queue.Empty
        return super().get(block, timeout)
