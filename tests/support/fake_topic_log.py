"""A decision log in a topic without Kafka: `TopicLog` with a broker that fits into a page, and a
scheduler that lets several drivers take turns at each request.
"""

import threading
from unittest.mock import patch

from kafka2pc.decision_logs.topic import log as topic
from kafka2pc.decision_logs.topic.bookmark import LogReader
from kafka2pc.decision_logs.topic.log import LogTransactions, TopicLog, log_id
from kafka2pc.decision_logs.topic.reader import HIGH_WATERMARK
from kafka2pc.decision_logs.topic.records import Keys
from kafka2pc.protocol.clock import Clock
from kafka2pc.protocol.errors import NotAuthorized, PrecommitFailed
from kafka2pc.protocol.messages import PreparedTxnState
from kafka2pc.protocol.participant import Outcome


class NoTime(Clock):
    """A create that is fenced tries again at once, and for ever."""

    def monotonic(self):
        return 0

    def sleep(self, seconds):
        pass


class FakeBroker:
    """The records of committed transactions in order (`log`), and for each transactional id its
    epoch and its open records. `revoked`: ids that may not be used.
    """

    clock = NoTime()

    def __init__(self):
        self.log, self.epoch, self.open, self.revoked = [], {}, {}, set()

    def init_producer_id(self, transactional_id, timeout_ms):
        if transactional_id in self.revoked:
            raise NotAuthorized(f"transactional_id {transactional_id}")
        self.epoch[transactional_id] = self.epoch.get(transactional_id, -1) + 1
        self.open.pop(transactional_id, None)
        return PreparedTxnState(1, self.epoch[transactional_id])

    def append(self, transactional_id, state, records):
        if self.epoch[transactional_id] != state.epoch:
            raise PrecommitFailed(f"{transactional_id}: fenced")
        self.open.setdefault(transactional_id, []).extend(records.items())

    def end(self, transactional_id, state):
        if self.epoch[transactional_id] != state.epoch:
            return Outcome.REFUSED
        self.log += self.open.pop(transactional_id)
        return Outcome.DONE


class FakeTail:
    """What a log has read."""

    def __init__(self, broker, name):
        self.broker, self.starts = broker, Keys(name).starts()
        self.found, self.at, self.epoch = {}, 0, 0

    def read(self):
        for offset, (key, value) in list(enumerate(self.broker.log))[self.at :]:
            if key.startswith(self.starts) and value is None:
                self.found.pop(key, None)
            elif key.startswith(self.starts):
                self.found.setdefault(key, {}).setdefault(value, offset)
        self.at = len(self.broker.log)


class FakeReader(LogReader):
    """Reads from the fake broker. `at`: as in `FakeTopicLog`."""

    def __init__(self, broker, name, at):
        super().__init__(lambda: broker, "d", name, "group", {}, tail=FakeTail(broker, name))
        self.at = at

    def read(self, end=HIGH_WATERMARK):
        if end == HIGH_WATERMARK:
            self.at("read")
        self.tail.read()


class FakeTransactions(LogTransactions):
    """Writes to the fake broker. `log`: the one that is asked for its `at` and its `lost`."""

    def __init__(self, log):
        super().__init__(log.broker, "d", log.name, log.prefix, {"max.message.bytes": "1000000"})
        object.__setattr__(self, "log", log)

    def fence(self, prefix):
        self.log.at("fence")
        with patch.object(topic, "init_producer_id", FakeBroker.init_producer_id):
            return super().fence(prefix)

    def append(self, prefix, state, records):
        self.log.at("append")
        self.cluster.append(log_id(prefix, self.name), state, records)

    def end(self, prefix, state):
        self.log.at("end")
        end = lambda: self.cluster.end(log_id(prefix, self.name), state)
        if not self.log.lost:
            return end()
        self.log.lost -= 1
        if not self.log.deaf:
            end()
        return Outcome.UNKNOWN


class FakeTopicLog(TopicLog):
    """`at(point)` is called before each request that matters to other drivers: fence, read, append,
    end. `lost`: how many answers to EndTxn get lost (after it was done, unless `deaf`).
    """

    def __init__(self, broker, name, prefix, at=lambda point: None):
        self.place, self.topic, self.name, self.prefix = "kafka:d", "d", name, prefix
        self.within_ms, self.broker, self.at = 30_000, broker, at
        self._reader, self.lost, self.deaf = FakeReader(broker, name, at), 0, False

    @property
    def clock(self):
        return self.broker.clock

    @property
    def transactions(self):
        return FakeTransactions(self)


class Turns:
    """Runs functions in threads, one at a time. Each calls `wait` where others may go on; then
    `choose(waiting)` names the one that goes on next.
    """

    def __init__(self, choose):
        self.choose, self.of, self.results = choose, {}, {}
        self.stopped = threading.Semaphore(0)

    def wait(self, who):
        self.stopped.release()
        self.of[who].acquire()

    def run(self, actors):
        """The result or the error of each actor, by name."""
        for who, act in actors.items():
            self.of[who] = threading.Semaphore(0)
            threading.Thread(target=self._act, args=(who, act), daemon=True).start()
        while len(self.results) < len(actors):
            waiting = [who for who in actors if who not in self.results]
            self.of[self.choose(waiting)].release()
            self.stopped.acquire()
        return self.results

    def _act(self, who, act):
        self.of[who].acquire()
        try:
            result = act()
        except Exception as e:
            result = e
        self.results[who] = result
        self.stopped.release()


def every_order(run, turns=30):
    """Call `run(choose)` with every order of the first `turns` turns in which drivers that wait can
    go on; after those, one after the other. Returns how many orders there were.
    """
    path, count = [], 0
    while path is not None:
        taken = []

        def choose(waiting, path=path, taken=taken):
            n = path[len(taken)] if len(taken) < len(path) else 0
            taken.append((n, len(waiting) if len(taken) < turns else 1))
            return waiting[n]

        run(choose)
        count += 1
        path = next_path(taken)
    return count


def next_path(taken):
    """The choices before the last one that has another choice, and that one."""
    for n in reversed(range(len(taken))):
        choice, choices = taken[n]
        if choice + 1 < choices:
            return [c for c, _ in taken[:n]] + [choice + 1]
    return None
