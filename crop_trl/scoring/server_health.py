"""Teacher servers one by one: requests to them, and which of them may be asked at the moment."""

import itertools
import json
import os
import random
import threading
import time
from collections.abc import Callable, Sequence

import urllib3

from ..text import masked
from .reply import UnreadableReply, parse_json

API_KEY = "TEACHER_API_KEY"
_GLANCE = 5.0  # seconds within which a sound server accepts a connection, or says which model it serves
_LONGEST_PAUSE = 5.0  # seconds between two questions to a server that is down
_PIECE = 2**20  # bytes of an answer that are read at once
_REMINDER = 60.0  # seconds between messages while training is paused


class TeacherServerError(RuntimeError):
    """No teacher server answered for as long as the settings allow; the message says which, and since when."""


class Failure(RuntimeError):
    """A request got no answer; a later one may."""

    def __init__(self, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.retry_after = retry_after


def parse_address(url: str) -> urllib3.util.Url:
    """
    Take a base URL apart.

    Raises:
        `ValueError`: it is no address of a server.
    """
    shown = masked(url)
    try:
        parsed = urllib3.util.parse_url(url.strip())
        if not url.startswith(("http://", "https://")) or not parsed.host:
            raise ValueError
        return parsed
    except (AttributeError, ValueError, urllib3.exceptions.LocationParseError):
        raise ValueError(
            f"`teacher_server_urls` must be addresses such as http://localhost:8000/v1, got {shown!r}."
        ) from None


class Server:
    """
    One server.

    Args:
        url (`str`): Base URL, with or without `/v1`; shown without a user name and password that it may hold.
        http (`urllib3.PoolManager`): Connections.

    Attributes:
        model, root (`str`): Name under which it serves the model, and what the model really is.
        max_length (`int` or `None`): Tokens it takes.
        failing_since (`float` or `None`): Monotonic time; `None` while it is sound.
        busy_until (`float`): Monotonic time before which it asked not to be asked again.

    Raises:
        `ValueError`: `url` is no address.
    """

    def __init__(self, url: str, http: urllib3.PoolManager):
        parsed = parse_address(url)
        self.base = parsed._replace(auth=None, query=None, fragment=None).url.rstrip("/").removesuffix("/v1")
        self.http = http
        self.headers = {"Content-Type": "application/json"}
        if parsed.auth:
            self.headers.update(urllib3.make_headers(basic_auth=parsed.auth))
        if os.environ.get(API_KEY):
            self.headers["Authorization"] = f"Bearer {os.environ[API_KEY]}"
        self.model: str | None = None
        self.root: str | None = None
        self.max_length: int | None = None
        self.failing_since: float | None = None
        self.busy_until = 0.0
        self.reason = ""
        self.next_try = 0.0
        self.pause = 0.0
        self.announced = False
        self.back_after: float | None = None

    def __str__(self) -> str:
        return self.base

    def identify(self, wanted: str | None) -> None:
        """
        Find out which model it serves.

        Args:
            wanted (`str`, *optional*): Name or path that it has to be; by default the first model it lists.

        Raises:
            `ValueError`: it does not answer, or serves another model.
        """
        try:
            served = self._models()
        except (Failure, UnreadableReply) as error:
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
        self.model, self.root = match[0]["id"], match[0].get("root") or match[0]["id"]
        longest = match[0].get("max_model_len")
        self.max_length = longest if isinstance(longest, int) else None

    def check_back(self) -> None:
        """Ask a server that failed whether it is there, and the same. Raises `Failure`, or `ValueError` if another."""
        served = {m["id"]: m.get("root") or m["id"] for m in self._models()}
        if served.get(self.model) != self.root:
            raise ValueError(
                f"Teacher server {self} came back with another model ({', '.join(served.values())} instead of "
                f"{self.root}); start it with that one and resume from the last checkpoint."
            )

    def _models(self) -> list[dict]:
        listed = parse_json(request(self, "GET", "/v1/models", None, _GLANCE)).get("data")
        models = (
            [m for m in listed if isinstance(m, dict) and m.get("id") and isinstance(m["id"], str)]
            if isinstance(listed, list)
            else []
        )
        if not models:
            raise UnreadableReply("its list of models is empty")
        return models


def request(
    server: Server,
    method: str,
    path: str,
    body: dict | None,
    timeout: float,
    explain: Callable[[Server, int, str], str] | None = None,
) -> bytes:
    """
    Send a request.

    Args:
        server ([`Server`]): To whom.
        method, path (`str`): What.
        body (`dict`, *optional*): Sent as JSON.
        timeout (`float`): Seconds to wait for the whole of an answer.
        explain (`Callable`, *optional*): Makes the message for a request that is refused, from status and text.

    Returns:
        `bytes`: The answer's body.

    Raises:
        `Failure`: no answer, or one that says to come back later.
        `ValueError`: it refuses the key or the request.
    """
    data = None if body is None else json.dumps(body).encode()
    patience = urllib3.Timeout(connect=min(_GLANCE, timeout), read=timeout)
    options = {"timeout": patience, "retries": False, "preload_content": False}
    deadline = time.monotonic() + timeout
    try:
        answer = server.http.request(method, server.base + path, body=data, headers=server.headers, **options)
        content = _read(answer, deadline)
    except urllib3.exceptions.ReadTimeoutError:
        raise Failure(f"no whole answer within {timeout:g} s") from None
    except urllib3.exceptions.HTTPError as error:
        raise Failure(_shown(server, _reason(error))) from None
    if answer.status == 200:
        return content
    text = _shown(server, _message(content))
    if answer.status in (401, 403):
        raise ValueError(
            f"Teacher server {server} refuses the key in ${API_KEY} (HTTP {answer.status}: {text}); export a valid one."
        )
    if answer.status in (408, 409, 425, 429) or answer.status >= 500:
        raise Failure(f"HTTP {answer.status}: {text}", _seconds(answer.headers.get("Retry-After")))
    if explain is not None:
        raise ValueError(explain(server, answer.status, text))
    raise ValueError(
        f"Teacher server {server} answers {path} with HTTP {answer.status} ({text}); it must be a vLLM server with the "
        "OpenAI API, and the address must be its root."
    )


def _read(answer: urllib3.BaseHTTPResponse, deadline: float) -> bytes:
    """The body. A read timeout is for one piece of it, and pieces may come for ever; `deadline` is for all of them."""
    pieces = []
    try:
        while piece := answer.read1(_PIECE):
            pieces.append(piece)
            if time.monotonic() > deadline:
                raise urllib3.exceptions.ReadTimeoutError(None, None, "cut off")
    except BaseException:
        answer.close()  # what is left of this answer must not be taken for the next one
        raise
    answer.release_conn()
    return b"".join(pieces)


def _reason(error: BaseException) -> str:
    """The innermost cause, such as "Connection refused"."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _message(body: bytes) -> str:
    """The text of an error, however a server or a gateway wraps it."""
    text = body.decode(errors="replace")
    try:
        reply = json.loads(text)
        error = reply.get("error", reply)
        text = error if isinstance(error, str) else error.get("message") or text
    except (ValueError, AttributeError):
        pass
    return str(text)


def _shown(server: Server, text: str) -> str:
    """A text that somebody else wrote in one line, without the key it may repeat."""
    for secret in server.headers.get("Authorization", "").split(" ")[1:]:
        text = text.replace(secret, "[key]")
    return " ".join(text.split())[:200]


def _seconds(retry_after: str | None) -> float | None:
    try:
        return min(60.0, max(0.0, float(retry_after)))
    except (TypeError, ValueError):  # absent, or a date
        return None


class Outage:
    """
    Which servers may be asked, and what there is to say about the others. Used by several threads.

    Args:
        servers (sequence of [`Server`]): All of them.
        timeout (`float`): Seconds that nothing may succeed.
        first (`int`): Where the round begins.
    """

    def __init__(self, servers: Sequence[Server], timeout: float, first: int = 0):
        self.servers = servers
        self.timeout = timeout
        self._round = itertools.count(first)
        self._lock = threading.Lock()
        self._reminded: float | None = None

    def look(self) -> None:
        """Ask every sound server whether it is still there and the same: it may have been started anew meanwhile."""
        for server in self.servers:
            if server.failing_since is None:
                self._is_back(server)

    def choose(self, failing_since: float | None, stop: threading.Event) -> Server | None:
        """
        The server to ask next, waiting for one if need be.

        Args:
            failing_since (`float`, *optional*): Since when the sequence to score has had no luck, monotonic.
            stop (`threading.Event`): Ends the waiting.

        Returns:
            [`Server`], or `None` after a stop.

        Raises:
            `TeacherServerError`: `timeout` seconds are over.
            `ValueError`: a server came back with another model.
        """
        while not stop.is_set():
            # First of all: a server that lists its models whenever it is asked would otherwise be asked for ever.
            self._check_time([] if failing_since is None else [failing_since])
            with self._lock:
                due = self._take_due()
                sound = [s for s in self.servers if s.failing_since is None and s.busy_until <= time.monotonic()]
            if due is not None and self._is_back(due):
                # One request of the real kind decides; a server may list models and be unable to run them.
                return due
            self._check_time(self._all_failing_since())
            if sound:
                return sound[next(self._round) % len(sound)]
            stop.wait(0.05)
        return None

    def _take_due(self) -> Server | None:
        """One failing server whose pause is over; only the calling thread gets it."""
        now = time.monotonic()
        for server in self.servers:
            if server.failing_since is not None and server.next_try <= now:
                server.next_try = float("inf")
                return server
        return None

    def _is_back(self, server: Server) -> bool:
        started = time.monotonic()
        try:
            server.check_back()
        except (Failure, UnreadableReply) as error:
            self.failed(server, error, started)
            return False
        return True

    def _all_failing_since(self) -> list[float]:
        with self._lock:
            since = [server.failing_since for server in self.servers]
        return [] if None in since else [max(since)]

    def _check_time(self, since: Sequence[float]) -> None:
        """Give up if a sequence has had no luck, or no server has answered, for too long."""
        if since and time.monotonic() - min(since) >= self.timeout:
            what = "; ".join(self._describe(server) for server in self.servers if server.reason)
            raise TeacherServerError(
                f"Gave up waiting for the teacher after {self.timeout:g} s (`teacher_server_timeout`): {what}. Start "
                "the server and resume from the last checkpoint."
            )

    def failed(self, server: Server, error: Exception, started: float) -> None:
        """
        A request that was sent at `started` got no answer.

        Args:
            server ([`Server`]): That was asked.
            error (`Exception`): What came instead of an answer.
            started (`float`): Monotonic time at which the request was sent.
        """
        retry_after = getattr(error, "retry_after", None) or 0.0
        with self._lock:
            server.reason = str(error)
            # Kept apart from whether it fails: another request's success ends that, and not this.
            server.busy_until = max(server.busy_until, time.monotonic() + retry_after)
            if server.failing_since is None:
                server.failing_since, server.pause = started, 0.25
            elif server.next_try < float("inf"):
                return  # sent before it was known to fail
            else:
                server.pause = min(_LONGEST_PAUSE, 2 * server.pause)
            pause = server.pause * random.uniform(0.5, 1.0)
            server.next_try = time.monotonic() + max(retry_after, pause)

    def succeeded(self, server: Server) -> None:
        """A request was answered."""
        with self._lock:
            if server.failing_since is not None and server.announced:
                server.back_after = time.monotonic() - server.failing_since
            server.failing_since = None
            server.announced = False

    def _describe(self, server: Server) -> str:
        if server.failing_since is None:
            return f"{server} failed lately ({server.reason})"
        clock = time.localtime(time.time() - (time.monotonic() - server.failing_since))
        return f"{server} fails since {time.strftime('%H:%M:%S', clock)} ({server.reason})"

    def news(self) -> list[str]:
        """What has happened since the last call, for the user; a failure that is over within a second is no news."""
        now = time.monotonic()
        messages = []
        with self._lock:
            for server in self.servers:
                if server.back_after is not None:
                    messages.append(
                        f"Teacher server {server} answers again after {server.back_after:.0f} s; training goes on."
                    )
                    server.back_after = None
            failing = [server for server in self.servers if server.failing_since is not None]
            new = [server for server in failing if not server.announced and now - server.failing_since >= 1.0]
            for server in new:
                server.announced = True
            if len(failing) < len(self.servers):
                self._reminded = None
                others = ", ".join(str(server) for server in self.servers if server not in failing)
                messages += [f"Teacher server {self._describe(s)}; its work goes to {others}." for s in new]
            elif all(s.announced for s in failing) and (self._reminded is None or now - self._reminded >= _REMINDER):
                self._reminded = now
                left = self.timeout - (now - max(server.failing_since for server in failing))
                messages.append(
                    f"Training is paused, no teacher server answers: {'; '.join(map(self._describe, failing))}. Start "
                    "it again at the same address and training goes on by itself; without it the run ends in "
                    f"{max(0.0, left):.0f} s (`teacher_server_timeout`)."
                )
        return messages
