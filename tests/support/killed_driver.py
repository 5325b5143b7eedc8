"""A driver that is killed at an event of its history."""

from contextlib import nullcontext


class Killed(BaseException):
    """The process is gone: no `except Exception` sees it."""


class Watch:
    """Kills the process at its event number `after` (None: never), counted from the first event
    `begin` on. `events`: those from there on.
    """

    def __init__(self, begin, after=None):
        self.begin, self.after, self.events = begin, after, []

    def turn(self, op):
        return nullcontext()

    def on_event(self, event):
        if len(self.events) == self.after:
            return  # it is dead
        if self.events or (event.kind, event.op) == self.begin:
            self.events.append(f"{event.kind} {event.op}")
            if len(self.events) == self.after:
                raise Killed
