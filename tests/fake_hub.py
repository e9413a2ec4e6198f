"""A Hub on this machine: serves folders as repositories, counts what is asked for."""

import base64
import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

OWN, PRIVATE, PUBLISHED = "somebody/own", "somebody/private", "lab/dspark_tiny_block5"
TOKEN = "hf_for_this_test_only"
WEIGHTS = "model.safetensors"


class FakeHub(ThreadingHTTPServer):
    """Serves folders as repositories, as far as the host's client asks."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folders: dict[tuple[str, str], Path] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.sent: Counter[str] = Counter()
        self.created: dict[str, bool] = {}
        # After how many bytes the connection breaks, once for each file.
        self.breaks: dict[str, int] = {}
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def add(self, repo, folder, revision="main"):
        self.folders[repo, revision] = folder
        self.folders[repo, commit_of(repo, revision)] = folder

    def stop(self):
        if self.thread.is_alive():
            self.shutdown()
            self.thread.join()
            self.server_close()


def commit_of(repo, revision):
    return (
        revision if len(revision) == 40 else hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()
    )


class Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def do_POST(self):
        """As much of an upload as the client needs: a repository, small files, one commit."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(("POST", self.path, dict(self.headers)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse("RepoNotFound", status=401)
        endpoint = f"http://127.0.0.1:{self.server.server_port}"
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(part for part in (asked.get("organization"), asked["name"]) if part)
            self.server.created[name] = asked.get("visibility") == "private"
            return self.reply({"url": f"{endpoint}/{name}", "name": name})
        if self.path == "/api/validate-yaml":
            return self.reply({"warnings": [], "errors": []})
        path = self.path.removeprefix("/api/models/").split("/main")[0]
        repo, _, action = path.rpartition("/")
        if action == "preupload":
            files = json.loads(body)["files"]
            modes = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            return self.reply({"files": [{"path": file["path"], **modes} for file in files]})
        folder = self.server.folders[repo, "main"]
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                content = base64.b64decode(entry["value"]["content"])
                (folder / entry["value"]["path"]).write_bytes(content)
        sha = commit_of(repo, "main")
        url = f"{endpoint}/{repo}/commit/{sha}"
        return self.reply({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})

    def reply(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

    def answer(self, with_body):
        self.server.requests.append((self.command, self.path, dict(self.headers)))
        repo, separator, rest = self.path.lstrip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        if not separator or not any(known == repo for known, _ in self.server.folders):
            return self.refuse("RepoNotFound")
        if repo == PRIVATE and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse("RepoNotFound", status=401)
        folder = self.server.folders.get((repo, revision))
        if folder is None:
            return self.refuse("RevisionNotFound")
        commit = {"X-Repo-Commit": commit_of(repo, revision)}
        if not (folder / name).is_file():
            return self.refuse("EntryNotFound", **commit)
        content = (folder / name).read_bytes()
        etag, status = hashlib.sha256(content).hexdigest(), 200
        requested = self.headers.get("Range")
        if requested:
            start, _, end = requested.removeprefix("bytes=").partition("-")
            content = content[int(start) : int(end) + 1 if end else None]
            status = 206
        self.send_response(status)
        for header, value in {
            **commit,
            "ETag": f'"{etag}"',
            "Content-Length": len(content),
        }.items():
            self.send_header(header, str(value))
        self.end_headers()
        if with_body:
            content = content[: self.server.breaks.pop(name, None)]
            self.server.sent[name] += len(content)
            self.wfile.write(content)

    def refuse(self, code, status=404, **headers):
        self.send_response(status)
        for header, value in {"X-Error-Code": code, "Content-Length": 0, **headers}.items():
            self.send_header(header, str(value))
        self.end_headers()
