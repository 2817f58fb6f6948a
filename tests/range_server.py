"""A web server that knows ranges, and counts what it sends; python -m http.server knows none."""

from __future__ import annotations

import contextlib
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Serve a store; yields its URL, and a list to which the length of each answer about a chunk file is added."""
    lengths: list[int] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            path = folder / self.path.lstrip("/")
            if not path.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            size = path.stat().st_size
            first, last = 0, size - 1
            wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
            if wanted:
                first = int(wanted[1]) if wanted[1] else size - int(wanted[2])
                last = min(int(wanted[2]), last) if wanted[1] and wanted[2] else last
            with path.open("rb") as file:
                file.seek(first)
                body = file.read(last + 1 - first)
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)
                if path.name.startswith("c."):
                    lengths.append(len(body))

        do_HEAD = do_GET  # noqa: N815 - http.server's name

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_address[1]}", lengths
        finally:
            httpd.shutdown()
            thread.join()
