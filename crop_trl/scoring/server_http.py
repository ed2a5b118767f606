"""One teacher server: its address, requests to it, which model it serves, and since when it fails."""

import json
import os
import re
import time

import urllib3

from ..retries import Transient, retry_after
from ..text import Redactor, masked
from .reply import parse_json

API_KEY = "TEACHER_API_KEY"
OWNER = "crop-trl"  # who owns a model, by the list of `crop-trl serve-teacher`
_GLANCE = 5.0  # seconds within which a sound server accepts a connection, or says which model it serves


# What to do about a request that a server does not take, by words of its answer.
_REMEDIES = {
    "logprobs": "start it with --max-logprobs {top_k}, or lower `score_top_k`",
    "out of vocabulary": "serve a teacher with at least as many vocabulary entries as the student",
    "": "it must be a vLLM server with the OpenAI API, and the address must be its root",
}


def parse_address(url: str) -> urllib3.util.Url:
    """Take a base URL apart. Raises `ValueError` for what is no address of a server."""
    try:
        parsed = urllib3.util.parse_url(url.strip())
        if not url.startswith(("http://", "https://")) or not parsed.host:
            raise ValueError
        return parsed
    except (AttributeError, ValueError, urllib3.exceptions.LocationParseError):
        raise ValueError(
            f"`teacher_server_urls` must be addresses such as http://localhost:8000/v1, got {masked(url)!r}."
        ) from None


class Server:
    """One server: what it serves, since when it fails, until when it asked to be left alone."""

    def __init__(self, url: str, http: urllib3.PoolManager):
        parsed = parse_address(url)
        self._base = parsed._replace(auth=None, query=None, fragment=None).url.rstrip("/").removesuffix("/v1")
        self._http = http
        self._headers = {}
        if parsed.auth:
            self._headers.update(urllib3.make_headers(basic_auth=parsed.auth))
        if os.environ.get(API_KEY):
            self._headers["Authorization"] = f"Bearer {os.environ[API_KEY]}"
        self._redact = Redactor(*self._headers.get("Authorization", "").split(" ")[1:])
        self.model = self.root = ""
        self.max_length: int | None = None
        self.ours = False  # of `crop-trl serve-teacher`: takes many sequences in a request
        self.listed: dict = {}
        self.failing_since: float | None = None
        self.busy_until = 0.0
        self.reason = ""

    def __str__(self) -> str:  # without a user name and password
        return self._base

    def identify(self, wanted: str | None) -> None:
        """Find out which model it serves. Raises `ValueError` if it does not answer, or serves none called `wanted`."""
        try:
            served = self._models()
        except Transient as error:
            raise ValueError(
                f"`teacher_server_urls` {self} does not answer ({error}); start the server or correct the address."
            ) from None
        match = [m for m in served if wanted in (None, m["id"])] or [m for m in served if m.get("root") == wanted]
        if not match:
            names = ", ".join(m["id"] for m in served)
            raise ValueError(
                f"`teacher_server_urls` {self} serves {names}, not `teacher_model_name_or_path` {wanted}; start it "
                "with that model, or correct the name."
            )
        self.listed = match[0]
        self.model, self.root = self.listed["id"], self.listed.get("root") or self.listed["id"]
        self.ours = self.listed.get("owned_by") == OWNER
        longest = self.listed.get("max_model_len")
        self.max_length = longest if isinstance(longest, int) else None

    def check_back(self) -> None:
        """Ask whether it is there and serves the same: it may have been started anew. `ValueError` if another."""
        started = time.monotonic()
        try:
            served = {m["id"]: m.get("root") or m["id"] for m in self._models()}
        except Transient as error:
            self.failed(error, started)
            raise
        if served.get(self.model) != self.root:
            others = ", ".join(served.values())
            raise ValueError(f"Teacher server {self} came back with {others}, not {self.root}; start that.")

    def failed(self, error: Transient, started: float) -> None:
        """A request that was sent at `started` got no answer."""
        self.reason = str(error)
        self.busy_until = max(self.busy_until, time.monotonic() + (error.retry_after or 0.0))
        if self.failing_since is None:
            self.failing_since = started

    def _models(self) -> list[dict]:
        listed = self.request("/v1/models").get("data")
        models = [m for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
        models = [m for m in models if m.get("id") and isinstance(m["id"], str)]
        if not models:
            raise Transient("its list of models is empty")
        return models

    def request(self, path: str, body: dict | None = None, timeout: float = _GLANCE) -> dict:
        """The JSON object that answers a request. Raises `Transient`, or `ValueError` where asking again is no use."""
        data = None if body is None else json.dumps(body).encode()
        return parse_json(self.send(path, data, "application/json", timeout, (body or {}).get("prompt_logprobs")))

    def send(self, path: str, data: bytes | None, kind: str, timeout: float, top_k: int | None = None) -> bytes:
        """What answers a request, as it is. Raises as [`Server.request`]."""
        patience = urllib3.Timeout(connect=min(_GLANCE, timeout), read=timeout)
        options = {"timeout": patience, "retries": False, "preload_content": False}
        options["headers"] = {**self._headers, "Content-Type": kind}
        deadline = time.monotonic() + timeout
        failure = None
        try:
            answer = self._http.request("GET" if data is None else "POST", self._base + path, body=data, **options)
            content = _read(answer, deadline)
        except urllib3.exceptions.ReadTimeoutError:
            failure = Transient(f"no whole answer within {timeout:g} s")
        except urllib3.exceptions.HTTPError as error:
            failure = Transient(self._redact.message(_reason(error)))
        if failure is not None:
            raise failure  # out here, where what the server sent does not go along: it may repeat the key
        status = answer.status
        if status == 200:
            return content
        text = content.decode(errors="replace")
        told = re.search(r'"message":\s*"((?:[^"\\]|\\.)*)"', text)  # however a server or a gateway wraps it
        text = self._redact.message(told[1] if told else text)
        if status in (401, 403):
            raise ValueError(f"Teacher server {self} refuses the key in ${API_KEY} (HTTP {status}: {text}); set it.")
        if status in (408, 409, 425, 429) or status >= 500:
            raise Transient(f"HTTP {status}: {text}", retry_after=retry_after(answer.headers))
        remedy = next(remedy for words, remedy in _REMEDIES.items() if words in text)
        remedy = "change that, or start it with other limits" if self.ours else remedy.format(top_k=top_k)
        raise ValueError(f"Teacher server {self} refuses {path} (HTTP {status}: {text}); {remedy}.")


def _read(answer: urllib3.BaseHTTPResponse, deadline: float) -> bytes:
    """The body. A read timeout is for one piece of it, and pieces may come for ever; `deadline` is for all of them."""
    pieces = []
    while piece := answer.read1(2**20):
        pieces.append(piece)
        if time.monotonic() > deadline:
            answer.close()  # what is left of this answer must not be taken for the next one
            raise urllib3.exceptions.ReadTimeoutError(None, None, "cut off")
    answer.release_conn()
    return b"".join(pieces)


def _reason(error: BaseException) -> str:
    """The innermost cause, such as "Connection refused"."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
