"""A clock by which every wait is over at once."""

from kafka2pc.protocol.clock import Clock


class Hurried(Clock):
    """It begins at `at_s`, and only a `sleep` takes any time."""

    def __init__(self, at_s=0.0):
        self.at_s = at_s

    def now_ms(self):
        return self.at_s * 1000

    def monotonic(self):
        return self.at_s

    def sleep(self, seconds):
        self.at_s += seconds
