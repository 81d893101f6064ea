"""A web server that gives files only for a password or a signature, and says both in its error
messages.
"""

import base64
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PASSWORD, SIGNATURE, SECOND = "pa55/w0rd+Lane", "5igna7ureF1rst", "5igna7ureAgain"
"""What must stand in no file and no message."""
SECRETS = (PASSWORD, "pa55%2Fw0rd%2BLane", "pa55%2Fw0rd", "w0rd+Lane", SIGNATURE, SECOND,
           base64.b64encode(f"reader:{PASSWORD}".encode()).decode())  # fmt: skip
"""The same, in the spellings that they may have."""


class SecretServer(ThreadingHTTPServer):
    """Serves a folder: `/private/…` for the password, `/signed/…` for a signature, `/moved/…` by a
    redirect to these, `/open/…` for everybody; `?id=` chooses the file `/open/NAME.ID`.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.status: dict[str, int] = {}
        """Ending of a path → the status of its answers."""
        self.signatures = {SIGNATURE, SECOND}
        self.etags = True
        self.log: list[str] = []
        """Paths of requests, with their queries."""

    def private(self, name: str) -> str:
        return f"http://reader:pa55%2Fw0rd%2BLane@127.0.0.1:{self.server_port}/private/{name}"

    def signed(self, name: str, signature: str = SIGNATURE, more: str = "") -> str:
        query = (
            f"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Date=2026&{more}X-Amz-Signature={signature}"
        )
        return f"http://127.0.0.1:{self.server_port}/signed/{name}?{query}"

    def open(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/open/{name}"


class _Handler(BaseHTTPRequestHandler):
    server: SecretServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        self.server.log.append(self.path)
        kind, _, name = unquote(url.path).lstrip("/").partition("/")
        status = next(
            (code for ending, code in self.server.status.items() if name.endswith(ending)), 200
        )
        given = base64.b64decode(
            self.headers.get("Authorization", "").removeprefix("Basic ")
        ).decode()
        if kind == "private" and given != f"reader:{PASSWORD}":
            status = 401
        if kind == "signed" and query.get("X-Amz-Signature", [""])[0] not in self.server.signatures:
            status = 403
        if kind == "moved":
            return self._send(302, b"", {"Location": self.server.signed(name)})
        if "id" in query:
            name = f"{name}.{query['id'][0]}"
        path = self.server.folder / name
        if status == 200 and not path.is_file():
            status = 404
        if status != 200:
            return self._send(status, f"refused {self.path} to {given}".encode(), {})
        return self._file(path.read_bytes())

    do_HEAD = do_GET  # noqa: N815

    def _file(self, content: bytes) -> None:
        begin, end, status, headers = 0, len(content), 200, {"Accept-Ranges": "bytes"}
        if self.server.etags:
            headers["ETag"] = f'"{hash(content)}"'
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, end, status = int(asked[1]), min(int(asked[2] or end) + 1, end), 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        self._send(status, content[begin:end], headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status, f"refused {self.path}" if status >= 400 else None)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def secret_server(folder: Path, patch: Any) -> Iterator[SecretServer]:
    """A running server of a folder's files; `patch` is pytest's `MonkeyPatch`."""
    patch.setenv("NO_PROXY", "127.0.0.1")
    with SecretServer(folder) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def found_secrets(text: str | bytes) -> list[str]:
    """The secrets that stand in a text, whether or not its slashes are escaped."""
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return [secret for secret in SECRETS if secret in text or secret in text.replace("\\/", "/")]


def leaks(folder: Path) -> dict[str, list[str]]:
    """Files below a folder that hold a secret, in their content or their name."""
    found = {
        str(path): found_secrets(path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }
    return {name: some for name, some in found.items() if some or found_secrets(name)}


def printed(error: BaseException) -> str:
    """What a traceback shows of an error and of those behind it."""
    import traceback

    return "".join(traceback.format_exception(error)) + "".join(map(repr, _behind(error)))


def _behind(error: BaseException | None) -> list[BaseException]:
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return chain
