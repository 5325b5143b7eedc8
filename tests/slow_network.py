"""A network between clients and one broker that can hold a request back, as a real one may for minutes."""
import socket
import struct
import threading

INIT_PRODUCER_ID = 22


class SlowNetwork:
    """Passes everything between its own port of 127.0.0.1 and `target()`. `hold(api_key)` keeps the next request of that kind until `release()`.

    A held request is delivered then, even if its client has gone: what was sent may arrive.
    """

    def __init__(self, target):
        self.target, self.held, self._api_key, self._open = target, 0, None, threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()
        self._server.close()

    def hold(self, api_key):
        self.held, self._api_key = 0, api_key
        self._open.clear()

    def release(self):
        self._api_key = None
        self._open.set()

    def _serve(self):
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                broker = socket.create_connection(("127.0.0.1", self.target()))
            except OSError:
                client.close()
                continue
            threading.Thread(target=self._requests, args=(client, broker), daemon=True).start()
            threading.Thread(target=self._answers, args=(broker, client), daemon=True).start()

    def _requests(self, client, broker):
        stream = client.makefile("rb")
        try:
            while len(size := stream.read(4)) == 4:
                body = stream.read(struct.unpack(">i", size)[0])
                if struct.unpack(">h", body[:2])[0] == self._api_key:
                    self._api_key, self.held = None, self.held + 1
                    self._open.wait()
                broker.sendall(size + body)
            broker.shutdown(socket.SHUT_WR)
        except OSError:
            broker.close()

    def _answers(self, broker, client):
        try:
            while data := broker.recv(65536):
                client.sendall(data)
        except OSError:
            broker.close()
        client.close()
