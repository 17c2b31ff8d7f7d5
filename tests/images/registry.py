"""A registry on loopback that speaks the v2 API over real HTTP, and images small enough to make in a test."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


def files_of_bash() -> dict[str, bytes]:
    """bash and the libraries it needs, from this machine."""
    bash = shutil.which("bash") or "/bin/bash"
    linked = subprocess.run(["ldd", bash], capture_output=True, text=True, check=True).stdout
    libraries = re.findall(r"(/\S+)", linked)
    return {"/bin/bash": Path(bash).read_bytes(), **{name: Path(name).read_bytes() for name in libraries}}


class TinyRegistry:
    """Images by name, and how many requests for a manifest are answered by 429 before one is answered."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.limited = 0
        self.stalls = False
        self.asked: Counter[str] = Counter()
        self.open = threading.Event()
        self.port = 0

    def add(self, name: str, files: Mapping[str, bytes], *, architecture: str = "amd64", workdir: str = "") -> str:
        """Serve an image under ``name:1``; returns its reference."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for path, data in files.items():
                entry = tarfile.TarInfo(path.lstrip("/"))
                entry.size, entry.mode = len(data), 0o755
                tar.addfile(entry, io.BytesIO(data))
        layer = gzip.compress(packed.getvalue(), 1, mtime=0)
        config = json.dumps(
            {
                "architecture": architecture,
                "os": "linux",
                "config": {"Env": ["PATH=/bin", "FROM_IMAGE=yes"], "WorkingDir": workdir, "User": "7:7"},
                "rootfs": {"type": "layers", "diff_ids": [_digest(packed.getvalue())]},
            }
        ).encode()
        for blob in (layer, config):
            self.blobs[_digest(blob)] = blob
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": _descriptor("application/vnd.docker.container.image.v1+json", config),
            "layers": [_descriptor("application/vnd.docker.image.rootfs.diff.tar.gzip", layer)],
        }
        self.manifests[name] = json.dumps(manifest).encode()
        return f"127.0.0.1:{self.port}/{name}:1"

    def digest_of(self, name: str) -> str:
        return _digest(self.manifests[name])

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """(status, content type, body)."""
        if path.rstrip("/") == "/v2":
            return 200, "application/json", b"{}"
        match = re.fullmatch(r"/v2/(.+)/(manifests|blobs)/([^/]+)", path)
        if match is None:
            return 404, "application/json", b"{}"
        name, kind, key = match.groups()
        self.asked[name if kind == "manifests" else "blobs"] += 1
        if kind == "blobs":
            return 200, "application/octet-stream", self.blobs[key]
        if self.stalls:
            self.open.wait(60)
        if self.limited > 0:
            self.limited -= 1
            error = {"code": "TOOMANYREQUESTS", "message": "You have reached your pull rate limit."}
            return 429, "application/json", json.dumps({"errors": [error]}).encode()
        if name not in self.manifests:
            error = {"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}
            return 404, "application/json", json.dumps({"errors": [error]}).encode()
        return 200, MANIFEST, self.manifests[name]


@contextmanager
def serving() -> Iterator[TinyRegistry]:
    """A registry that answers until the block ends."""
    registry = TinyRegistry()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, kind, body = registry.answer(self.path)
            self.send_response(status)
            self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Docker-Content-Digest", _digest(body))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    registry.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield registry
    finally:
        registry.open.set()
        server.shutdown()
        server.server_close()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _descriptor(kind: str, data: bytes) -> dict[str, object]:
    return {"mediaType": kind, "size": len(data), "digest": _digest(data)}
