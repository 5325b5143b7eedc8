"""The tests' end of the job (job.py), and a story: one query with its files, topic, checkpoint and history, over several crashes and restarts."""
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer
from kafka_fixtures import records

from kafka2pc.control import Control
from kafka2pc.history import Crash, History, Seen, anomalies, arm, read_history
from kafka2pc.kafka import read_both

JOB = Path(__file__).with_name("job.py")
START_SECONDS = 120


class Failed(Exception):
    """The job answered with an error, or died."""


# -- the process --


class Job:
    """A job process, started when it is first asked, and again after it died. History and order to crash are the same files for all its lives."""

    def __init__(self, folder, **session):
        self.folder, self.session, self.process = Path(folder), session, None
        self.folder.mkdir(parents=True, exist_ok=True)
        self.history, self.crash, self.log = (self.folder / name for name in ("history", "crash", "log"))
        self.forget()

    def forget(self):
        """A new history. (What is read has a beginning: no earlier story is in it.)"""
        for file in (self.history, self.crash, self.done):
            file.unlink(missing_ok=True)
        self.history.touch()

    @property
    def done(self):
        return Path(f"{self.crash}.done")

    @property
    def alive(self):
        return self.process is not None and self.process.poll() is None and (not self.jvm or running(self.jvm))

    def start(self):
        self.stop()
        env = os.environ | {"KAFKA2PC_HISTORY": str(self.history), "KAFKA2PC_CRASH": str(self.crash), "PYSPARK_PYTHON": sys.executable}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([sys.executable, JOB], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env,
                                            cwd=self.folder, text=True, start_new_session=True)
        self.answers = queue.SimpleQueue()
        threading.Thread(target=self._listen, args=(self.process.stdout, self.answers), daemon=True).start()
        self.jvm = 0
        self.jvm = self._ask(START_SECONDS, do="session", **self.session)["jvm"]

    @staticmethod
    def _listen(stdout, answers):
        for line in stdout:
            answers.put(json.loads(line))
        answers.put(None)

    def ask(self, do, *, within=150, **what):
        """The answer to a command. Raises `Failed` with the error's text, or with the end of the log if the job died; `within` is in seconds."""
        if not self.alive:
            self.start()
        return self._ask(within, do=do, **what)

    def _ask(self, within, **command):
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            said = self.answers.get(timeout=within)
        except (BrokenPipeError, queue.Empty) as e:
            said = None if isinstance(e, BrokenPipeError) else {"error": f"no answer in {within} s"}
        if said is None or "error" in said:
            raise Failed(said["error"] if said else f"the job died; the end of its log:\n{self.said()}")
        return said

    def new_session(self, **session):
        """The same JVM with another master."""
        if self.alive:
            self.jvm = self._ask(START_SECONDS, do="session", **session)["jvm"]
        self.session = session
        return self

    def said(self, most=4000):
        return self.log.read_text(errors="replace")[-most:]

    def stop(self):
        """End everything that this job started: all processes of its session, whatever their process group."""
        if self.process is None:
            return
        for process in psutil.process_iter():
            if session_of(process.pid) == self.process.pid:
                process.kill()
        self.process.wait(30)
        self.process.stdin.close()
        self.process = None


def session_of(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def running(pid):
    """Is there such a process? (One that was killed, and that nobody has asked for yet, is a zombie.)"""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(true, what, seconds=30):
    """Wait until `true()`."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return found


# -- a reader that watches all the time --


class Watcher:
    """A read_committed reader that writes into the history which batches it sees, as it sees them."""

    def __init__(self, conf, topic, history, batch_of):
        self.conf, self.topic, self.history, self.batch_of, self.over = conf, topic, History(str(history)), batch_of, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self):
        conf = {"group.id": f"watcher-{uuid.uuid4()}", "isolation.level": "read_committed", "auto.offset.reset": "earliest",
                "enable.auto.commit": False, "log_level": 0}
        reader = Consumer(self.conf | conf)
        reader.subscribe([self.topic])
        while not self.over.is_set():
            found = {self.batch_of(m) for m in reader.consume(1000, 0.1) if m.error() is None}
            if found:
                self.history.append("ok", "read", batch_ids=sorted(found))
        reader.close()

    def stop(self):
        self.over.set()
        self.thread.join(30)


# -- a story --


class Story:
    """A query: `feed` it files of numbered rows, `run` it to the end, `check` what a reader finds. File n, batch n: `size` rows from n*size on."""

    def __init__(self, job, kafka, folder, *, partitions=3, size=40, topic_config=None):
        self.job, self.kafka, self.size, self.files = job, kafka, size, 0
        self.name = f"story-{uuid.uuid4().hex[:8]}"
        self.folder, self.source, self.checkpoint = folder / self.name, folder / self.name / "source", folder / self.name / "checkpoint"
        self.source.mkdir(parents=True)
        kafka.create_topic(self.name, partitions=partitions, config=topic_config)
        job.forget()
        self.watcher = None

    def watch(self):
        """From now on a reader looks for early reads. Only where the value is the row's number."""
        self.watcher = Watcher(self.kafka.client_conf, self.name, self.job.history, lambda m: int(m.value()) // self.size)
        return self

    def close(self):
        if self.watcher:
            self.watcher.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def feed(self, files=1, rows=None, keys=7):
        """Add files. `rows`: the rows of one file, as (row, key), instead of the next numbers."""
        for _ in range(files):
            first = self.files * self.size
            content = rows or [(row, f"k{row % keys}") for row in range(first, first + self.size)]
            fresh, path = self.source / f".{self.files}", self.source / f"{self.files:04}.csv"
            fresh.write_text("".join(f"{row},{key}\n" for row, key in content))
            os.utime(fresh, (1_700_000_000 + self.files,) * 2)  # Spark takes the oldest first
            fresh.rename(path)
            self.files += 1

    def options(self, **more):
        security = {f"kafka.{k}": v for k, v in self.kafka.client_conf.items()}
        ours = {"topic": self.name, "checkpointLocation": str(self.checkpoint), "transactionalIdPrefix": self.name}
        return {k: v for k, v in (security | ours | more).items() if v is not None}

    def run(self, *, partitions=2, options=None, **what):
        """Run the query over all files that it has not done yet. Raises `Failed`. An option of None is left out."""
        return self.job.ask("stream", source=str(self.source), options=self.options(**(options or {})), partitions=partitions, **what)

    def arm(self, point, *, batch_id=None, pid=0, wait=True):
        self.job.done.unlink(missing_ok=True)
        arm(self.job.crash, Crash(point=point, batch_id=batch_id, pid=pid, wait=wait))

    def events(self, *ops):
        """What happened so far, without what readers saw."""
        return [e for e in read_history(self.job.history) if e.op != "read" and (not ops or e.op in ops)]

    def told(self, most=25):
        """The last events, for a message."""
        return "\n".join(f"  {e.process} {e.kind:6} {e.op:9} {e.ids}" for e in self.events()[-most:])

    # what must hold at the end

    def open(self, states=("Ongoing",)):
        """Our transactions in these states, as the coordinator knows them."""
        with Control(self.kafka.client_conf) as control:
            return [t.transactional_id for t in control.list_transactions(self.name, states)]

    def seen(self, isolation="read_committed", topic=None):
        """All messages that a stranger finds, once what was ended is completed."""
        until(lambda: not self.open(("PrepareCommit", "PrepareAbort")), "what was ended is completed")
        return records(self.kafka, topic or self.name, isolation)

    def rows(self):
        return [Seen(row=int(m.value()), topic=m.topic(), partition=m.partition(), offset=m.offset(), key=m.key()) for m in self.seen()]

    def check(self):
        """Exactly once, and nothing of ours open. If a reader watches: nothing read before it was decided."""
        assert self.open() == [], f"open at the end:\n{self.told()}"
        if self.watcher:
            until(lambda: self.read() == set(range(self.files)), "the reader that watches has seen every batch")
        committed, uncommitted = read_both(self.kafka.client_conf, self.name, lambda r: int(r.value))
        committed = [replace(s, key=None) for s in committed]  # the rows of a key come from several tasks, in any order
        found = anomalies({row: row // self.size for row in range(self.files * self.size)}, committed, uncommitted, read_history(self.job.history))
        assert not found, "".join(f"{name}, {len(what)} times: {str(what)[:300]}\n" for name, what in found.items()) + self.told()

    def read(self):
        """The batches that the reader saw that watches all the time."""
        return {batch_id for e in read_history(self.job.history) if e.op == "read" for batch_id in e.ids["batch_ids"]}

    def check_untouched(self):
        """Nothing was written, nothing was even begun."""
        assert self.seen("read_uncommitted") == [] and self.open() == [] and self.events("begin") == [], self.told()


# -- fixtures --


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """Makes jobs, and ends them with everything that they started."""
    made = []

    def make(name, **session):
        made.append(Job(tmp_path_factory.mktemp(name) / "job", **session))
        return made[-1]

    yield make
    for job in made:
        job.stop()


@pytest.fixture(scope="session")
def job(jobs):
    """One driver and its JVM for all tests that need no other."""
    return jobs("shared")


@pytest.fixture
def story(job, kafka, tmp_path):
    told = Story(job, kafka, tmp_path)
    yield told
    told.close()
