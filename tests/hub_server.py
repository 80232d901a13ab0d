"""A local Hub in memory for the unmodified `huggingface_hub` client, LFS included.

Each commit is a whole snapshot. Faults are injected by method and path; every request is logged.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


DROP, HANG = 0, -1


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    refs: dict[str, str] = field(default_factory=dict)  # branch or tag -> commit
    commits: dict[str, dict[str, str]] = field(default_factory=dict)  # commit -> path -> object id
    readers: set[str] = field(default_factory=set)  # users with access to a gated repository

    def __post_init__(self):
        self.commit("main", {})

    def commit(self, branch: str, files: dict[str, str]) -> str:
        content = json.dumps([len(self.commits), self.refs.get(branch), files])
        oid = hashlib.sha1(content.encode()).hexdigest()
        self.commits[oid] = files
        self.refs[branch] = oid
        return oid

    def resolve(self, revision: str) -> str | None:
        return self.refs.get(revision, revision if revision in self.commits else None)


@dataclass
class Fault:
    """Replaces the right answer: a status, DROP (close the connection), or HANG (never answer)."""

    method: str
    path: re.Pattern
    status: int
    times: int
    body: bytes = b'{"error": "injected"}'


class Refusal(Exception):
    def __init__(self, status: int, code: str = "", message: str = ""):
        self.status, self.code, self.message = status, code, message


class HubServer(ThreadingHTTPServer):
    """`with HubServer() as hub:` serves at `hub.url`; `hub.users` maps tokens to (user, may write)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.lock = threading.RLock()
        self.stopped = threading.Event()
        self.reset()

    def reset(self):
        """Two users and no repositories."""
        self.users = {"hf_writer": ("writer", True), "hf_reader": ("reader", False)}
        self.repos: dict[tuple[str, str], Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.log: list[str] = []
        self.faults: list[Fault] = []
        self.hanging = threading.Event()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.stopped.set()
        self.shutdown()
        self.server_close()

    def fail(self, method: str, path: str, status: int, times: int = 1, body: bytes = b'{"error": "injected"}'):
        self.faults.append(Fault(method, re.compile(path), status, times, body))

    def repo(self, repo_id: str) -> Repo:
        return self.repos["model", repo_id]

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        repo = self.repo(repo_id)
        return {path: self.objects[oid] for path, oid in repo.commits[repo.resolve(revision)].items()}

    def store(self, content: bytes, lfs: bool) -> str:
        header = b"" if lfs else f"blob {len(content)}\0".encode()
        oid = (hashlib.sha256 if lfs else hashlib.sha1)(header + content).hexdigest()
        self.objects[oid] = content
        return oid


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        with self.server.lock:
            self.server.log.append(f"{self.command} {path}")
            fault = next(
                (f for f in self.server.faults if f.times and f.method == self.command and f.path.search(path)), None
            )
            if fault is not None:
                fault.times -= 1
                return self.misbehave(fault)
            try:
                self.route(path, body)
            except Refusal as refusal:
                headers = {"X-Error-Code": refusal.code} if refusal.code else {}
                if refusal.message:
                    headers["X-Error-Message"] = refusal.message
                self.reply(refusal.status, json.dumps({"error": refusal.message}).encode(), headers)

    def misbehave(self, fault: Fault):
        if fault.status > 0:
            return self.reply(fault.status, fault.body)
        self.close_connection = True
        if fault.status == HANG:
            self.server.hanging.set()
            self.server.lock.release()
            self.server.stopped.wait()
            self.server.lock.acquire()
        self.connection.close()

    def reply(self, status: int, body: bytes | dict | list = b"", headers: dict | None = None):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def route(self, path: str, body: bytes):
        for method, pattern, handler in ROUTES:
            if self.command in method.split("|") and (match := re.fullmatch(pattern, path)):
                return handler(self, *map(unquote, match.groups()), body=body)
        raise Refusal(404, message=f"no route {self.command} {path}")

    # Users and permissions

    def user(self) -> tuple[str | None, bool]:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not token:
            return None, False
        if token not in self.server.users:
            raise Refusal(401, message="Invalid credentials in Authorization header")
        return self.server.users[token]

    def readable(self, repo_id: str, kind: str = "model") -> Repo:
        user, _ = self.user()
        repo = self.server.repos.get((kind, repo_id))
        if repo is None or (repo.private and user != repo_id.split("/")[0]):
            raise Refusal(404 if user else 401, "RepoNotFound", "Repository not found")
        return repo

    def writable(self, repo_id: str) -> Repo:
        repo = self.readable(repo_id)
        user, may_write = self.user()
        if user is None:
            raise Refusal(401, message="Unauthorized")
        if user != repo_id.split("/")[0] or not may_write:
            raise Refusal(403, message="You don't have the rights to write to this repository")
        return repo

    def commit_of(self, repo: Repo, revision: str) -> str:
        commit = repo.resolve(revision)
        if commit is None:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    # Endpoints

    def whoami(self, body):
        user, _ = self.user()
        if user is None:
            raise Refusal(401, message="Unauthorized")
        self.reply(200, {"name": user, "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def create(self, body):
        user, may_write = self.user()
        request = json.loads(body)
        owner, kind = request["organization"] or user, request.get("type", "model")
        if user is None:
            raise Refusal(401, message="Unauthorized")
        if owner != user or not may_write:
            raise Refusal(403, message=f"You don't have the rights to create a {kind} under the namespace {owner}")
        repo_id = f"{owner}/{request['name']}"
        url = {"url": f"{self.server.url}/{repo_id}"}
        if any(known == repo_id for _, known in self.server.repos):
            return self.reply(409, {"error": "You already created this repo"} | url)
        self.server.repos[kind, repo_id] = Repo(private=request.get("visibility") == "private")
        self.reply(200, url)

    def validate_yaml(self, body):
        self.reply(200, {"errors": [], "warnings": []})

    def info(self, kind, repo_id, revision="main", body=b""):
        repo = self.readable(repo_id, kind)
        commit = self.commit_of(repo, revision)
        siblings = [{"rfilename": path} for path in repo.commits[commit]]
        state = {"private": repo.private, "gated": "manual" if repo.gated else False}
        self.reply(200, {"id": repo_id, "sha": commit, "siblings": siblings, "tags": []} | state)

    def tree(self, repo_id, revision, folder=None, body=b""):
        repo = self.readable(repo_id)
        files = repo.commits[self.commit_of(repo, revision)]
        if folder is not None:
            raise Refusal(404, "EntryNotFound", f"{folder} does not exist")
        entries = []
        for path, oid in files.items():
            entry = {"type": "file", "path": path, "oid": oid, "size": len(self.server.objects[oid])}
            entries.append(
                entry | ({"lfs": {"oid": oid, "size": entry["size"], "pointerSize": 134}} if len(oid) == 64 else {})
            )
        self.reply(200, entries)

    def preupload(self, repo_id, revision, body):
        repo = self.writable(repo_id)
        present = repo.commits[self.commit_of(repo, revision)]
        files = []
        for file in json.loads(body)["files"]:
            large = file["path"].endswith(".safetensors") or file["size"] > 10_000_000
            answer = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            files.append(answer | ({"oid": present[file["path"]]} if file["path"] in present else {}))
        self.reply(200, {"files": files})

    def lfs_batch(self, repo_id, body):
        self.writable(repo_id)
        objects = []
        for item in json.loads(body)["objects"]:
            url = f"{self.server.url}/lfs/{item['oid']}"
            actions = {"upload": {"href": url}, "verify": {"href": f"{url}/verify"}}
            stored = item["oid"] in self.server.objects
            objects.append({"oid": item["oid"], "size": item["size"]} | ({} if stored else {"actions": actions}))
        self.reply(200, {"transfer": "basic", "objects": objects})

    def lfs_put(self, oid, body):
        if self.headers.get("Authorization"):
            raise Refusal(400, message="a storage address takes no token")
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refusal(400, message="the body is not the object")
        self.server.store(body, lfs=True)
        self.reply(200)

    def lfs_verify(self, oid, body):
        stored = self.server.objects.get(oid)
        if stored is None or len(stored) != json.loads(body)["size"]:
            raise Refusal(404, message="object not stored")
        self.reply(200, {})

    def commit(self, repo_id, revision, body):
        repo = self.writable(repo_id)
        files = dict(repo.commits[self.commit_of(repo, revision)])
        lines = [json.loads(line) for line in body.splitlines()]
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = self.server.store(base64.b64decode(value["content"]), lfs=False)
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.server.objects:
                    raise Refusal(400, message=f"{value['path']} was not uploaded")
                files[value["path"]] = value["oid"]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        answer = {}
        if "create_pr=1" in self.path:
            revision = "refs/pr/1"
            answer["pullRequestUrl"] = f"{self.server.url}/{repo_id}/discussions/1"
        oid = repo.commit(revision, files)
        self.reply(200, answer | {"commitOid": oid, "commitUrl": f"{self.server.url}/{repo_id}/commit/{oid}"})

    def add_ref(self, repo_id, kind, name, body):
        repo, request = self.writable(repo_id), json.loads(body)
        commit = self.commit_of(repo, name if kind == "tag" else request.get("startingPoint", "main"))
        new = request["tag"] if kind == "tag" else name
        if new in repo.refs:
            raise Refusal(409, message=f"{kind} {new} exists")
        repo.refs[new] = commit
        self.reply(201, {})

    def resolve(self, repo_id, revision, path, body):
        repo = self.readable(repo_id)
        user, _ = self.user()
        if repo.gated and user not in repo.readers | {repo_id.split("/")[0]}:
            raise Refusal(403 if user else 401, "GatedRepo", "Access to this model is restricted")
        commit = self.commit_of(repo, revision)
        if path not in repo.commits[commit]:
            raise Refusal(404, "EntryNotFound", "Entry not found")
        oid = repo.commits[commit][path]
        content, headers = self.server.objects[oid], {"X-Repo-Commit": commit, "ETag": f'"{oid}"'}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            return self.reply(206, content[start : end + 1], headers)
        self.reply(200, content, headers)


NAME = r"([^/]+/[^/]+)"
ROUTES = [
    ("GET", r"/api/whoami-v2", Handler.whoami),
    ("POST", r"/api/repos/create", Handler.create),
    ("POST", r"/api/validate-yaml", Handler.validate_yaml),
    ("GET", rf"/api/(model|dataset|space)s/{NAME}", Handler.info),
    ("GET", rf"/api/(model|dataset|space)s/{NAME}/revision/([^/]+)", Handler.info),
    ("GET", rf"/api/models/{NAME}/tree/([^/]+)", Handler.tree),
    ("GET", rf"/api/models/{NAME}/tree/([^/]+)/(.+)", Handler.tree),
    ("POST", rf"/api/models/{NAME}/preupload/([^/]+)", Handler.preupload),
    ("POST", rf"/api/models/{NAME}/commit/([^/]+)", Handler.commit),
    ("POST", rf"/api/models/{NAME}/(tag|branch)/([^/]+)", Handler.add_ref),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT", r"/lfs/(\w+)", Handler.lfs_put),
    ("POST", r"/lfs/(\w+)/verify", Handler.lfs_verify),
    ("GET|HEAD", rf"/{NAME}/resolve/([^/]+)/(.+)", Handler.resolve),
]
