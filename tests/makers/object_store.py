"""An object store on this machine, with S3's protocol as far as datasets need it, that fails where
it is told to.

Threads on the loopback interface serve the files of a folder: a bucket is a folder in it. Requests
may take a stated time, and share a stated rate.
"""

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

CHUNK = 1 << 16
BURST_SECONDS = 0.02
"""Of the line's rate that a thread may make up for, which woke up late: a client with one request
would pay for it.
"""


@dataclass
class Fault:
    """What goes wrong in the next requests.

    Kinds: `500`, `503`; `reset`: the connection ends before an answer; `cut`: it ends in the middle
    of the body; `403`, for ever; `slow`: the answer waits until the fault is removed.
    """

    kind: str
    times: int
    ending: str = ""
    method: str = "GET"
    gate: threading.Event = field(default_factory=threading.Event)


class ObjectStore:
    """A running store.

    Args:
        folder: Its buckets.
        latency: Seconds that each request takes.
        bandwidth: Bytes per second of all answers together; None: no limit.
    """

    def __init__(self, folder: Path, latency: float = 0.0, bandwidth: float | None = None) -> None:
        self.folder, self.latency, self.bandwidth = folder, latency, bandwidth
        self.log: list[tuple[str, str, str | None]] = []
        """Method, path and range of each request."""
        self.bytes = 0
        self.received: list[tuple[str, int]] = []
        """Path and bytes of each upload, or piece of one, that was taken."""
        self.uploads: dict[str, dict[int, bytes]] = {}
        """Unfinished uploads in pieces."""
        self.faults: list[Fault] = []
        self.may_list = True
        """Whether clients have s3:ListBucket; without it, S3 says of missing objects that access is
        denied.
        """
        self.keys: dict[str, str] = {}
        """Access key that is refused → the error's code, such as ExpiredToken."""
        self._lock, self._free = threading.Lock(), 0.0
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def environment(self) -> dict[str, str]:
        """What makes it the S3 of a process."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }

    def fail(self, kind: str, times: int = 1, ending: str = "", method: str = "GET") -> Fault:
        """Let the next requests for paths with this ending fail."""
        fault = Fault(kind, times, ending, method)
        with self._lock:
            self.faults.append(fault)
        return fault

    def count(self, ending: str = "", method: str = "GET") -> int:
        with self._lock:
            return sum(one[0] == method and one[1].endswith(ending) for one in self.log)

    def forget(self) -> None:
        """Begin the log again."""
        with self._lock:
            self.log.clear()
            self.received.clear()
            self.bytes = 0

    def begin(self, method: str, path: str, span: str | None) -> Fault | None:
        with self._lock:
            self.log.append((method, path, span))
            found = next(
                (
                    f
                    for f in self.faults
                    if f.times and f.method == method and path.endswith(f.ending)
                ),
                None,
            )
            if found is not None and found.kind != "slow":
                found.times -= 1
        if self.latency:
            time.sleep(self.latency)
        return found

    def pace(self, size: int) -> None:
        with self._lock:
            self.bytes += size
            if self.bandwidth is None:
                return
            self._free = max(time.monotonic() - BURST_SECONDS, self._free) + size / self.bandwidth
            wait = self._free - time.monotonic()
        if wait > 0:
            time.sleep(wait)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is nothing to print."""


class _Handler(BaseHTTPRequestHandler):
    store: ObjectStore
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_PUT(self) -> None:
        body, path, query = self._body(), self._path(), self._query()
        fault = self.store.begin("PUT", path, None)
        if fault is not None and fault.kind == "slow":
            fault.gate.wait()
            fault = None
        if fault is not None:
            return self._refuse(fault)
        if self.headers.get("x-amz-copy-source"):
            return self._send(501)
        self.store.received.append((path, len(body)))
        if "uploadId" not in query:
            return self._send(200, extra=[("ETag", self._keep(path, body))])
        pieces = self.store.uploads.get(query["uploadId"][0])
        if pieces is None:
            return self._error(404, "NoSuchUpload")
        pieces[int(query["partNumber"][0])] = body
        return self._send(200, extra=[("ETag", f'"{hashlib.md5(body).hexdigest()}"')])

    def do_POST(self) -> None:
        """Begins and ends uploads in pieces."""
        body, path, query = self._body(), self._path(), self._query()
        if (fault := self.store.begin("POST", path, None)) is not None:
            return self._refuse(fault)
        xml = [("Content-Type", "application/xml")]
        if "uploads" in query:
            name = str(len(self.store.log))
            self.store.uploads[name] = {}
            answer = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"  # noqa: E501
            return self._send(200, answer.encode(), xml)
        pieces = self.store.uploads.pop(query["uploadId"][0], None)
        if pieces is None:
            return self._error(404, "NoSuchUpload")
        if body.count(b"<PartNumber>") != len(pieces):
            return self._error(400, "InvalidPart")
        etag = self._keep(path, b"".join(pieces[number] for number in sorted(pieces)))
        answer = f"<CompleteMultipartUploadResult><ETag>{escape(etag)}</ETag></CompleteMultipartUploadResult>"  # noqa: E501
        return self._send(200, answer.encode(), xml)

    def do_DELETE(self) -> None:
        path, query = self._path(), self._query()
        self.store.begin("DELETE", path, None)
        if "uploadId" in query:
            self.store.uploads.pop(query["uploadId"][0], None)
        else:
            (self.store.folder / path).unlink(missing_ok=True)
        self._send(204)

    def _key(self) -> str:
        """The access key that signed the request."""
        return self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        framed = self.headers.get("x-amz-content-sha256", "").startswith("STREAMING")
        return _unframed(body) if framed else body

    def _keep(self, path: str, body: bytes) -> str:
        """Write an object at once; returns its ETag."""
        file = self.store.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.{threading.get_ident()}.partial")
        partial.write_bytes(body)
        partial.replace(file)
        return _etag(file)

    def _query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query, keep_blank_values=True)

    def _path(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/")

    def _answer(self, with_body: bool) -> None:
        query, path = self._query(), self._path()
        fault = self.store.begin(self.command, path, self.headers.get("Range"))
        if fault is not None and fault.kind == "slow":
            fault.gate.wait()
            fault = None
        if fault is not None and fault.kind != "cut":
            return self._refuse(fault)
        if code := self.store.keys.get(self._key()):
            return self._error(403 if code == "InvalidAccessKeyId" else 400, code)
        if "list-type" in query:
            return (
                self._list(path, query) if self.store.may_list else self._error(403, "AccessDenied")
            )
        file = self.store.folder / path
        if not path or not file.is_file():
            return (
                self._error(404, "NoSuchKey")
                if self.store.may_list
                else self._error(403, "AccessDenied")
            )
        etag, size = _etag(file), file.stat().st_size
        if (wanted := self.headers.get("If-Match")) is not None and wanted != etag:
            return self._error(412, "PreconditionFailed")
        begin, end, code = 0, size, 200
        if span := self.headers.get("Range"):
            low, high = span.split("=")[1].split("-")
            begin, end, code = int(low), min(size, int(high) + 1) if high else size, 206
        self.send_response(code)
        headers = [
            ("ETag", etag),
            ("Accept-Ranges", "bytes"),
            ("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT"),
        ]
        if span:
            headers.append(("Content-Range", f"bytes {begin}-{end - 1}/{size}"))
        for name, value in [*headers, ("Content-Length", str(end - begin))]:
            self.send_header(name, value)
        self.end_headers()
        if not with_body:
            return None
        stop = begin + (end - begin) // 2 if fault is not None else end
        with open(file, "rb") as source:
            source.seek(begin)
            while begin < stop:
                data = source.read(min(CHUNK, stop - begin))
                self.store.pace(len(data))
                self.wfile.write(data)
                begin += len(data)
        if fault is not None:
            self._drop()
        return None

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        root, keys, folders = self.store.folder / bucket.strip("/"), [], set()
        for file in sorted(root.rglob("*")):
            key = str(file.relative_to(root))
            if not file.is_file() or not key.startswith(prefix) or file.name.endswith(".partial"):
                continue
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
                continue
            keys.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{file.stat().st_size}</Size><ETag>{escape(_etag(file))}</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            )
        commons = "".join(
            f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>"
            for one in sorted(folders)
        )
        body = (
            '<?xml version="1.0"?><ListBucketResult '
            'xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<IsTruncated>false</IsTruncated><KeyCount>{len(keys)}</KeyCount>{''.join(keys)}{commons}</ListBucketResult>"
        ).encode()
        self.store.pace(len(body))
        self._send(200, body, [("Content-Type", "application/xml")])

    def _refuse(self, fault: Fault) -> None:
        if fault.kind == "reset":
            return self._drop()
        codes = {"500": "InternalError", "503": "ServiceUnavailable", "403": "AccessDenied"}
        if fault.kind == "403":
            fault.times += 1
        return self._error(int(fault.kind), codes[fault.kind])

    def _drop(self) -> None:
        self.close_connection = True
        self.connection.shutdown(2)

    def _error(self, code: int, name: str) -> None:
        body = (
            f'<?xml version="1.0"?><Error><Code>{name}</Code><Message>{name}, says the '
            "test</Message></Error>"
        )
        self._send(code, body.encode(), [("Content-Type", "application/xml")])

    def _send(
        self, code: int, body: bytes = b"", extra: list[tuple[str, str]] | None = None
    ) -> None:
        self.send_response(code)
        for name, value in [*(extra or []), ("Content-Length", str(len(body)))]:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(file: Path) -> str:
    status = file.stat()
    return f'"{hashlib.md5(f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}".encode()).hexdigest()}"'  # noqa: E501


def _unframed(body: bytes) -> bytes:
    """The content of a body that botocore sends in chunks with signatures or checksums."""
    found, at = b"", 0
    while at < len(body):
        end = body.index(b"\r\n", at)
        size = int(body[at:end].split(b";")[0], 16)
        if not size:
            break
        found += body[end + 2 : end + 2 + size]
        at = end + 4 + size
    return found


@contextmanager
def s3_store(folder: Path, patch: Any, **options: Any) -> Iterator[ObjectStore]:
    """A store that is the S3 of this process, and of its children; `patch` is pytest's
    `MonkeyPatch`.
    """
    import s3fs

    store = ObjectStore(folder, **options)
    for name, value in store.environment.items():
        patch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        yield store
    finally:
        for fault in store.faults:
            fault.gate.set()
        s3fs.S3FileSystem.clear_instance_cache()
        store.close()
