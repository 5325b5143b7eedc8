"""An HTTP proxy before the server of an object store. It counts requests, and on request it loses
answers, gives an answer of its own, or is silent.
"""

import http.client
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kafka2pc.proof.child_process import until

CONDITIONS = {"if-none-match", "if-match"}
HOP = {"connection", "keep-alive", "transfer-encoding", "expect"}


@dataclass(frozen=True)
class Request:
    """One HTTP request: `path` with its query, `agent` the client's own name of itself, `body` its
    bytes.
    """

    method: str
    path: str
    agent: str
    body: bytes = b""

    @property
    def writes(self):
        return self.method in ("PUT", "POST")


@dataclass(frozen=True)
class Answer:
    """What the proxy answers in place of the server."""

    status: int
    body: bytes = b""
    headers: tuple = ()
    wait_s: float = 0


class Proxy:
    """Listens on a free port of 127.0.0.1 and forwards to `port`. `seen`: the requests so far, in
    the order of their arrival.

    `fault`: a function of a `Request`, which returns None (forward it), "before" (close the
    connection, forward nothing), "after" (forward it, then close the connection without an answer),
    or an `Answer`. `unconditional`: forward no condition, as stores do that know none.
    """

    def __init__(self, port):
        self.target, self.seen, self.fault, self.unconditional = (
            port,
            [],
            lambda request: None,
            False,
        )
        self.silence = None  # or an event, which ends it
        self.server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self.port = self.server.server_address[1]
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    @contextmanager
    def faults(self, fault):
        """`fault` is asked about every request inside the `with`."""
        before, self.fault = self.fault, fault
        try:
            yield
        finally:
            self.fault = before

    @contextmanager
    def loses(self, when, *, first_only=True, of=lambda request: request.writes):
        """Inside the `with`, the answer to the first request that `of` selects (or to each of them)
        is lost, "before" or "after" it was done.
        """
        lock, lost = threading.Lock(), []

        def fault(request):
            with lock:
                if not of(request) or (first_only and lost):
                    return None
                lost.append(request)
                return when

        with self.faults(fault):
            yield lost

    @contextmanager
    def silent(self):
        """Inside the `with`, requests are accepted and not answered, not even a question whether
        their content is wanted. At its end their connections are closed; nothing is forwarded.
        """
        self.silence = threading.Event()
        try:
            yield
        finally:
            self.silence.set()
            self.silence = None

    @contextmanager
    def without_conditions(self):
        """Inside the `with`, every create overwrites."""
        self.unconditional = True
        try:
            yield
        finally:
            self.unconditional = False

    @contextmanager
    def counted(self, least=0, within_s=30):
        """The list of the requests that arrive inside the `with`, complete at its end. A client may
        give a request up before the proxy has read it: the end waits for the `least` of them.
        """
        start, found = len(self.seen), []
        yield found
        until(lambda: len(self.seen) >= start + least, f"{least} requests arrive", within_s)
        found += self.seen[start:]


class _Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128

    def handle_error(self, request, client_address):
        """A client that was killed reads no answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle_expect_100(self):
        return not self._is_silent() and super().handle_expect_100()

    def _is_silent(self):
        """Waits for the end of the silence, if there is one."""
        silence = self.proxy.silence
        if silence is None:
            return False
        agent = self.headers.get("User-Agent", "")
        self.proxy.seen.append(Request(self.command, self.path, agent))
        silence.wait(60)
        self.close_connection = True
        return True

    def _serve(self):
        if self._is_silent():
            return None
        body = self._body()
        request = Request(self.command, self.path, self.headers.get("User-Agent", ""), body)
        self.proxy.seen.append(request)
        fault = self.proxy.fault(request)
        if fault == "before":
            return self._hang_up()
        if isinstance(fault, Answer):
            time.sleep(fault.wait_s)
            return self._answer(fault.status, fault.headers, fault.body)
        answer = self._forward(request)
        return self._hang_up() if fault == "after" else self._answer(*answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _serve

    def _body(self):
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():  # trailers
            pass
        return b"".join(parts)

    def _forward(self, request):
        server = http.client.HTTPConnection("127.0.0.1", self.proxy.target, timeout=60)
        try:
            dropped, path = HOP | {"content-length"}, request.path
            if self.proxy.unconditional:
                dropped, path = dropped | CONDITIONS, re.sub("[?&]ifGenerationMatch=0", "", path)
            server.putrequest(request.method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in dropped:
                    server.putheader(name, value)
            if request.body or "Content-Length" in self.headers or request.writes:
                server.putheader("Content-Length", str(len(request.body)))
            server.endheaders(request.body or None)
            answer = server.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            server.close()

    def _answer(self, status, headers, body):
        self.send_response_only(status)
        named = {name.lower() for name, _ in headers}
        for name, value in headers:
            if name.lower() not in HOP and (
                name.lower() != "content-length" or self.command == "HEAD"
            ):
                self.send_header(name, value)
        if self.command != "HEAD" or "content-length" not in named:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _hang_up(self):
        self.close_connection = True

    def log_message(self, *_):
        pass
