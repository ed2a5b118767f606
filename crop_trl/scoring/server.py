"""Scoring with a teacher on servers: many sequences a request with `crop-trl serve-teacher`, one a request with vLLM.
Each server has so many lanes. What fails goes back to the front for others to do; when no server answers, training
waits until `timeout` is over."""

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
import urllib3
from transformers import GenerationConfig

from ..methods.context import TopKLogprobs
from ..retries import Stopped, Transient, retrying
from ..text import say
from .reply import WrongReply, read_scores, read_topk
from .server_http import Server
from .wire import pack_request

_TOKENS_A_JOB = 65536  # where a server takes many sequences: it scores some while others travel
_TICK = 0.2  # seconds between looks at what there is to say
_LONGEST_PAUSE = 5.0  # seconds between two requests of a lane whose server is down
_NEWS_AFTER = 1.0  # seconds; a failure that is over sooner is no news
_REMINDER = 60.0  # seconds between messages while training is paused


class TeacherServerError(RuntimeError):
    """No teacher server answered for as long as the settings allow; the message says which, and since when."""


@dataclass
class ServerStats:
    """What scoring cost since the last reset: scored sequences, their tokens with prompts, requests sent again."""

    sequences: int = 0
    tokens: int = 0
    retries: int = 0

    def metrics(self) -> dict[str, float]:
        """What is worth logging."""
        return {name: float(count) for name, count in vars(self).items()}

    def reset(self) -> None:
        """Start counting anew."""
        self.__init__()


@dataclass
class _Job:
    """Sequences on their way, and since when they have no luck. `rows` are their places in the batch."""

    rows: list[int]
    prompts: list[list[int]]
    completions: list[list[int]]
    tokens: int = 0
    failures: int = 0
    failing_since: float | None = None


@dataclass
class _Round:
    """The jobs of one call of `score`, shared by its lanes. `todo` holds `(order, number, job)`; no job ends a lane."""

    todo: queue.PriorityQueue = field(default_factory=queue.PriorityQueue)
    done: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    stop: threading.Event = field(default_factory=threading.Event)


class ServerScorer:
    """Scores fixed responses with the same `model` on the servers at `urls` (base addresses, with or without `/v1`).

    A request without an answer for `answer_timeout` seconds counts as failed, and `timeout` seconds without any success
    end the run. The key is in `$TEACHER_API_KEY`. Raises `ValueError` for a server that is not there, or not the
    same."""

    remedy = "start the server with --no-enable-prefix-caching"

    def __init__(
        self,
        urls: Sequence[str],
        model: str | None = None,
        top_k: int = 16,
        timeout: float = 600.0,
        requests_per_server: int = 8,
        answer_timeout: float = 300.0,
        device="cpu",
        process_index: int = 0,
        num_processes: int = 1,
        report: Callable[[str], None] = say,
    ):
        self.top_k, self.timeout, self.device = top_k, timeout, device
        self.stats = ServerStats()
        self._answer_timeout = min(answer_timeout, timeout)
        prefix = f"[process {process_index}] " if num_processes > 1 else ""
        self._say = lambda message: report(prefix + message)
        self._told: dict[Server, float] = {}  # servers that were said to fail, and since when
        self._started = self._reminded = -math.inf  # the last round; the last message that training is paused
        http = urllib3.PoolManager(num_pools=len(urls), maxsize=requests_per_server)
        self.servers = [Server(url, http) for url in urls]
        for server in self.servers:
            server.identify(model)
            other = self.servers[0]
            if server.root != other.root:
                what = f"{other} serves {other.root} and {server} {server.root}"
                raise ValueError(f"`teacher_server_urls` must all serve the same model, but {what}; leave one out.")
        first = process_index % len(urls)
        self._lanes = [*self.servers[first:], *self.servers[:first]] * requests_per_server

    @property
    def ends(self) -> set[int] | None:
        """Ids that end a response for the teacher, where the server says so, or its folder is on this disk."""
        if self.servers[0].ours:
            return set(self.servers[0].listed["ends"]) or None
        try:  # no reason to wait for a hub
            ends = GenerationConfig.from_pretrained(self.servers[0].root, local_files_only=True).eos_token_id
        except (OSError, ValueError):
            return None
        return ends if ends is None else {ends} if isinstance(ends, int) else set(ends)

    @property
    def precision(self) -> str:
        """Type of the weights; vLLM does not say, and uses bf16."""
        return self.servers[0].listed.get("precision", "bfloat16")

    # ---------------------------------------------------------------- checks before training

    def check_length(self, tokens: int) -> None:
        """Raise `ValueError` when a server takes fewer than `tokens` tokens of prompt and response."""
        for server in self.servers:
            # vLLM always generates one token more.
            spare, more = (0, "") if server.ours else (1, " and one more")
            if server.max_length is not None and tokens + spare > server.max_length:
                remedy = "lower one of them" if server.ours else f"start it with --max-model-len {tokens + 1}"
                raise ValueError(
                    f"Teacher server {server} takes {server.max_length} tokens, too few for `max_prompt_length` + "
                    f"`max_completion_length` = {tokens}{more}; {remedy}."
                )

    def check_vocabulary(self, tokenizer) -> None:
        """Raise `ValueError`, naming a token, unless every id of `tokenizer` is the same text, but for spaces."""

        def differ(server: Server, ids: range) -> str | None:
            body = {"model": server.model, "tokens": list(ids)}
            theirs = server.request("/detokenize", body, self._answer_timeout).get("prompt")
            if not isinstance(theirs, str):
                raise ValueError(f"Teacher server {server} does not answer /detokenize as vLLM does; use vLLM.")
            ours = tokenizer.decode(body["tokens"], clean_up_tokenization_spaces=False)
            return theirs if "".join(ours.split()) != "".join(theirs.split()) else None

        for server in self.servers:
            try:
                ids = range(len(tokenizer))
                found = differ(server, ids)
                while found is not None and len(ids) > 1:
                    half = ids[: len(ids) // 2]
                    ids = half if differ(server, half) is not None else ids[len(half) :]
                    found = differ(server, ids)
            except Transient as error:
                raise ValueError(f"The vocabulary of teacher server {server} cannot be compared ({error}).") from None
            if found is not None:
                raise ValueError(
                    f"Student and teacher vocabularies differ: id {ids[0]} is {tokenizer.decode(list(ids))!r} for the "
                    f"student and {found.strip()!r} on the teacher server {server}; serve a teacher of the same family."
                )

    # ---------------------------------------------------------------- scoring

    def score(self, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]) -> TopKLogprobs:
        """See [`~crop_trl.scoring.local.LocalScorer.score`]. Raises `ValueError` for an answer to something else,
        naming row and position, and [`TeacherServerError`] when no server answered for `timeout` seconds."""
        if len(prompt_ids) != len(completion_ids):
            raise ValueError(f"Got {len(prompt_ids)} prompts for {len(completion_ids)} completions.")
        for row, prompt in enumerate(prompt_ids):
            if not len(prompt):
                raise ValueError(f"Prompt {row} has no tokens; give it at least one, such as the BOS token.")
        lengths = np.array([len(c) for c in completion_ids], dtype=np.int64)
        shape = (len(lengths), int(lengths.max(initial=0)))
        token_ids = np.zeros((*shape, self.top_k), np.int32)
        logprobs = np.zeros((*shape, self.top_k), np.float32)
        sampled_logprobs = np.zeros(shape, np.float32)
        for job, arrays in self._run(self._jobs(prompt_ids, completion_ids)):
            here = (np.repeat(job.rows, lengths[job.rows]), np.concatenate([np.arange(lengths[r]) for r in job.rows]))
            for whole, part in zip((token_ids, logprobs, sampled_logprobs), arrays, strict=True):
                whole[here] = part
            self.stats.sequences += len(job.rows)
            self.stats.tokens += job.tokens
            self.stats.retries += job.failures
        mask = np.arange(shape[1]) < lengths[:, None]
        return TopKLogprobs(*map(torch.from_numpy, (token_ids, logprobs, sampled_logprobs, mask))).to(self.device)

    def _jobs(self, prompt_ids, completion_ids) -> list[_Job]:
        """The longest sequences first, so that none is left alone at the end."""
        size = {row: len(prompt_ids[row]) + len(c) for row, c in enumerate(completion_ids) if len(c)}
        jobs, most = [], _TOKENS_A_JOB if all(server.ours for server in self.servers) else 0
        for row in sorted(size, key=lambda row: (-size[row], row)):
            if not jobs or jobs[-1].tokens + size[row] > most:
                jobs.append(_Job([], [], []))
            jobs[-1].tokens += size[row]
            jobs[-1].rows.append(row)
            jobs[-1].prompts.append([int(i) for i in prompt_ids[row]])
            jobs[-1].completions.append([int(i) for i in completion_ids[row]])
        return jobs

    def _run(self, jobs: list[_Job]):
        """Yield `(job, arrays)` in the order in which they come; threads do the waiting."""
        if not jobs:
            return
        for server in self.servers:
            if server.failing_since is None:
                with suppress(Transient):
                    server.check_back()
        self._started, this = time.monotonic(), _Round()
        for order, job in enumerate(jobs):
            this.todo.put((order, job.rows[0], job))
        for server in self._lanes:
            # Daemons: a server that hangs must not keep the program from ending.
            threading.Thread(target=self._lane, args=(server, this), daemon=True).start()
        left = len(jobs)
        try:
            while left:
                self._say_news()
                self._check_time(jobs)
                with suppress(queue.Empty):
                    job, result = this.done.get(timeout=_TICK)
                    if job is None:
                        raise result
                    left -= 1
                    yield job, result
        finally:
            this.stop.set()
            for number, _ in enumerate(self._lanes):
                this.todo.put((math.inf, number, None))
            self._say_news()

    def _lane(self, server: Server, this: _Round) -> None:
        """Send one sequence after the other to a server, with pauses while it fails, until the round ends."""
        serve = retrying(this.stop, longest=_LONGEST_PAUSE)
        with suppress(Stopped):
            try:
                while True:
                    serve(self._serve, server, this)
            except Exception as error:  # raised again by the thread that waits
                this.done.put((None, error))

    def _serve(self, server: Server, this: _Round) -> None:
        if (pause := server.busy_until - time.monotonic()) > 0:
            raise Transient(server.reason, retry_after=pause)
        if server.failing_since is not None:
            server.check_back()
        _, _, job = this.todo.get()
        if job is None or this.stop.is_set():
            raise Stopped
        started = time.monotonic()
        try:
            arrays = self._ask(server, job)
        except Transient as error:
            server.failed(error, started)
            job.failing_since = started if job.failing_since is None else job.failing_since
            job.failures += 1
            this.todo.put((-1, job.rows[0], job))
            raise
        server.failing_since = job.failing_since = None
        this.done.put((job, arrays))

    def _ask(self, server: Server, job: _Job):
        row = job.rows[0]
        try:
            if server.ours:
                body = pack_request(job.prompts, job.completions, self.top_k)
                reply = server.send("/score", body, "application/octet-stream", self._answer_timeout)
                arrays = read_scores(reply, job.completions, self.top_k)
            else:
                ids, first = [*job.prompts[0], *job.completions[0]], len(job.prompts[0])
                body = {"model": server.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0}
                body |= {"prompt_logprobs": self.top_k, "return_token_ids": True}
                arrays = read_topk(
                    server.request("/v1/completions", body, self._answer_timeout), ids, first, self.top_k
                )
        except WrongReply as error:
            raise ValueError(f"Teacher server {server} cannot score row {row}: {error}.") from None
        return arrays

    # ---------------------------------------------------------------- servers that fail

    def _failing(self) -> dict[Server, float]:
        """A copy, since lanes change it at any moment."""
        return {server: since for server in self.servers if (since := server.failing_since) is not None}

    def _waiting_since(self, failing: dict[Server, float]) -> float:
        return max(*failing.values(), self._started)

    def _check_time(self, jobs: list[_Job]) -> None:
        """Give up if a sequence has had no luck, or no server has answered, for too long."""
        now, failing = time.monotonic(), self._failing()
        since = [since for job in jobs if (since := job.failing_since) is not None]
        since += [self._waiting_since(failing)] if len(failing) == len(self.servers) else []
        if now - min(since, default=now) >= self.timeout:
            what = "; ".join(_describe(server, failing.get(server)) for server in self.servers if server.reason)
            raise TeacherServerError(
                f"Gave up waiting for the teacher after {self.timeout:g} s (`teacher_server_timeout`): {what}. Start "
                "the server and resume from the last checkpoint."
            )

    def _say_news(self) -> None:
        """Which server fails, and which is back."""
        now, failing = time.monotonic(), self._failing()
        for server in [server for server in self._told if server not in failing]:
            duration = now - self._told.pop(server)
            self._say(f"Teacher server {server} answers again after {duration:.0f} s; training goes on.")
        new = [server for server, since in failing.items() if server not in self._told and now - since >= _NEWS_AFTER]
        self._told |= {server: failing[server] for server in new}
        if others := [str(server) for server in self.servers if server not in failing]:
            self._reminded = -math.inf
            for server in new:
                self._say(f"Teacher server {_describe(server, failing[server])}; its work goes to {', '.join(others)}.")
        elif failing.keys() <= self._told.keys() and now - self._reminded >= _REMINDER:
            self._reminded = now
            left = max(0.0, self.timeout - (now - self._waiting_since(failing)))
            self._say(
                f"Training is paused, no teacher server answers: {'; '.join(_describe(*f) for f in failing.items())}. "
                "Start it again at the same address and training goes on by itself; without it the run ends in "
                f"{left:.0f} s (`teacher_server_timeout`)."
            )


def _describe(server: Server, since: float | None) -> str:
    if since is None:
        return f"{server} failed lately ({server.reason})"
    clock = time.localtime(time.time() - (time.monotonic() - since))
    return f"{server} fails since {time.strftime('%H:%M:%S', clock)} ({server.reason})"
