"""A Hugging Face Hub of datasets in memory, on this machine: as much of its API as its
own client asks for when it lists, reads and writes.
"""

import base64
import hashlib
import json
import re
from contextlib import contextmanager
from urllib.parse import unquote

import yaml

from makers.web_server import serving

COMMIT = "2" * 40


class Hub:
    """Repositories of datasets.

    Attributes:
        files: `owner/name` → path → content.
        private: Which of them were made private.
        commits: Message of each commit, in order.
        url: Where it is served.
    """

    def __init__(self, files):
        self.files = {name: dict(content) for name, content in files.items()}
        self.private, self.commits, self.url = set(), [], ""

    @contextmanager
    def served(self):
        """Serve it; the environment in which the client finds it, in a process of its own."""

        def answer(handler):
            path = unquote(handler.path.partition("?")[0])
            status, headers, body = self.answer(handler, path, handler.given)
            if not isinstance(body, bytes):
                body, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
            return status, headers, body

        with serving(answer) as self.url:
            yield {
                "HF_ENDPOINT": self.url,
                "HF_TOKEN": "hf_tests",
                "HF_HUB_OFFLINE": "0",
                "HF_HUB_DISABLE_TELEMETRY": "1",
                "NO_PROXY": "127.0.0.1",
            }

    def answer(self, handler, path, given):
        """Status, headers and body (bytes or JSON) of a request."""
        if path == "/api/repos/create":
            return self._create(json.loads(given))
        if path == "/api/validate-yaml":
            _, *front = json.loads(given)["content"].split("---\n")
            assert not front or isinstance(yaml.safe_load(front[0]), dict)
            return 200, {}, {"errors": [], "warnings": []}
        found = re.fullmatch(
            r"/(?P<api>api/)?datasets/(?P<repo>[^/]+/[^/]+)(?:/(?P<verb>[a-z-]+)"
            r"(?:/(?P<revision>refs/convert/\w+|[^/]+)(?:/(?P<path>.*))?)?)?",
            path,
        )
        if found is None or found["repo"] not in self.files:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        files = self.files[found["repo"]]
        if found["api"] is None:
            return self._resolve(handler, files, found["path"])
        return getattr(self, f"_{(found['verb'] or 'info').replace('-', '_')}")(
            files, found["repo"], found["path"] or "", handler, given
        )

    def _create(self, asked):
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name.startswith("closed/"):
            return 403, {}, {"error": "You don't have the rights to create a dataset here"}
        if name in self.files:
            return 409, {}, {"error": "You already created this dataset repo"}
        self.files[name] = {".gitattributes": b"*.arrow filter=lfs\n"}
        if asked.get("private") or asked.get("visibility") == "private":
            self.private.add(name)
        return 200, {}, {"url": f"{self.url}/datasets/{name}", "name": name, "id": name}

    def _info(self, files, repo, *_):
        siblings = [{"rfilename": name} for name in files]
        return 200, {}, {"id": repo, "sha": COMMIT, "siblings": siblings}

    _revision = _info

    def _tree(self, files, repo, folder, handler, given):
        inside = f"{folder}/" if folder else ""
        below = {name: files[name] for name in files if name.startswith(inside)}
        if folder and not below:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        is_deep = "recursive=true" in handler.path.lower()
        listed = [_entry(name, content) for name, content in below.items()]
        folders = {name.rpartition("/")[0] for name in below} - {folder, ""}
        listed += [{"type": "directory", "path": name, "oid": "1" * 40} for name in folders]
        return (
            200,
            {},
            [one for one in listed if is_deep or "/" not in one["path"].removeprefix(inside)],
        )

    def _paths_info(self, files, repo, folder, handler, given):
        asked = re.findall(r"paths=([^&]*)", unquote(given.decode().replace("+", " ")))
        asked = asked or json.loads(given)["paths"]
        found = [_entry(name, files[name]) for name in asked if name in files]
        found += [
            {"type": "directory", "path": name, "oid": "1" * 40}
            for name in asked
            if any(one.startswith(f"{name}/") for one in files)
        ]
        return 200, {}, found

    def _preupload(self, files, repo, folder, handler, given):
        names = [one["path"] for one in json.loads(given)["files"]]
        listed = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
        return 200, {}, {"files": listed}

    def _commit(self, files, repo, folder, handler, given):
        for line in map(json.loads, given.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        return 200, {}, {"commitUrl": f"{self.url}/datasets/{repo}/commit/2", "commitOid": COMMIT}

    def _resolve(self, handler, files, name):
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        content = files[name]
        headers = {
            "ETag": f'"{_oid(content)}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        asked = handler.headers.get("Range")
        if asked is None:
            return 200, headers, content
        begin, _, end = asked.removeprefix("bytes=").partition("-")
        data = content[int(begin) : int(end) + 1 if end else None]
        headers["Content-Range"] = f"bytes {begin}-{int(begin) + len(data) - 1}/{len(content)}"
        return 206, headers, data


def _oid(content):
    return hashlib.sha1(content).hexdigest()


def _entry(name, content):
    return {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
