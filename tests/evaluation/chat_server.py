"""A chat-completions endpoint on loopback that does what a test tells it to, in a thread of its own."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = "TASK_COMPLETE"
MODEL = "scripted"


@dataclass(frozen=True)
class Answer:
    """What one call gets: a reply, an error, or, with ``drop``, a connection that closes without an answer."""

    text: str = DONE
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    message: dict[str, Any] | None = None
    finish_reason: str = "stop"
    body: dict[str, Any] | None = None
    drop: bool = False


@dataclass(frozen=True)
class Call:
    """What was asked. ``turn`` counts the policy's earlier replies after the instruction, which is ``task``."""

    body: dict[str, Any]
    headers: dict[str, str]
    number: int

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.body["messages"]

    @property
    def task(self) -> str:
        start = max(i for i, m in enumerate(self.messages) if m["role"] == "user" and "directory named" in m["content"])
        return self.messages[start]["content"]

    @property
    def turn(self) -> int:
        start = self.messages.index({"role": "user", "content": self.task})
        return sum(message["role"] == "assistant" for message in self.messages[start:])

    @property
    def word(self) -> str:
        found = re.search(r"directory named (\w+)", self.task)
        assert found is not None
        return found[1]


class ChatServer:
    """The endpoint: ``answer`` may be changed at any time; ``calls`` is what came."""

    def __init__(self, answer: Callable[[Call], Answer]) -> None:
        self.answer = answer
        self.calls: list[Call] = []
        self.asked_for_models = 0
        self.in_flight = self.most_in_flight = 0
        self.models: Answer = Answer(body={"data": [{"id": MODEL}]})
        self.lock = threading.Lock()
        self.url = ""


@contextmanager
def chat_server(answer: Callable[[Call], Answer], *, port: int = 0) -> Iterator[ChatServer]:
    """Serve until the block ends."""
    state = ChatServer(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None: ...

        def do_GET(self) -> None:
            state.asked_for_models += 1
            self._send(state.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with state.lock:
                call = Call(body, {k.lower(): v for k, v in self.headers.items()}, len(state.calls))
                state.calls.append(call)
                state.in_flight += 1
                state.most_in_flight = max(state.most_in_flight, state.in_flight)
            try:
                self._send(state.answer(call))
            finally:
                with state.lock:
                    state.in_flight -= 1

        def _send(self, answer: Answer) -> None:
            if answer.drop:
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
                return
            data = json.dumps(answer.body if answer.body is not None else _completion(answer)).encode()
            self.send_response(answer.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 1024

        def handle_error(self, request: Any, client_address: Any) -> None: ...  # clients that are killed go away

    server = Server(("127.0.0.1", port), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


def _completion(answer: Answer) -> dict[str, Any]:
    if answer.status != 200:
        return {"error": {"message": answer.text, "type": "error", "code": None}}
    message = answer.message or {"role": "assistant", "content": answer.text}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": answer.finish_reason}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }


def bash(script: str) -> str:
    return f"```bash\n{script}\n```"


def solves(call: Call) -> Answer:
    """Makes the directory, then says that it is done."""
    return Answer(DONE if call.turn else bash(f"mkdir {call.word}"))


def gives_up(call: Call) -> Answer:
    """Says that it is done, and is wrong."""
    return Answer(DONE)
