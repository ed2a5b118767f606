"""Scoring a fixed response with a teacher on OpenAI-compatible vLLM servers.

Token ids go out and come back, one request a sequence, several in flight on every server. A server that fails is left
alone for a while and asked again; meanwhile the others do its work. When none is left, training pauses until one comes
back or `timeout` is over. What is in flight is asked for again, so nothing is ever left unscored.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import urllib3
from tqdm import tqdm
from transformers import GenerationConfig

from ..methods.context import TopKLogprobs
from .reply import UnreadableReply, WrongReply, parse_json, read_topk
from .server_health import Failure, Outage, Server, TeacherServerError, request

_TICK = 0.2  # seconds between looks at what there is to say


@dataclass
class ServerStats:
    """
    What scoring cost since the last [`ServerStats.reset`].

    Args:
        sequences, tokens (`int`): Scored sequences, and their tokens with prompts.
        retries (`int`): Requests that failed and were sent again.
    """

    sequences: int = 0
    tokens: int = 0
    retries: int = 0

    def metrics(self) -> dict[str, float]:
        """What is worth logging."""
        return {name: float(getattr(self, name)) for name in ("sequences", "tokens", "retries")}

    def reset(self) -> None:
        """Start counting anew."""
        self.sequences = self.tokens = self.retries = 0


@dataclass
class _Job:
    """One sequence on its way: place in the batch, ids, where its response begins."""

    row: int
    ids: list[int]
    first: int
    failing_since: float | None = None
    failures: int = 0


@dataclass
class _Round:
    """The jobs of one call of `score`, shared by its threads."""

    todo: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    done: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    stop: threading.Event = field(default_factory=threading.Event)


class ServerScorer:
    """
    Scores fixed responses with a model on one or several vLLM servers.

    Args:
        urls (sequence of `str`):
            Base URLs, with or without `/v1`. All hold the same model.
        model (`str`, *optional*):
            Name or path under which they serve it; by default what the first one serves.
        top_k (`int`, *optional*, defaults to `16`):
            Vocabulary entries to return at each position; at most what the servers allow (`--max-logprobs`).
        timeout (`float`, *optional*, defaults to `600.0`):
            Seconds to wait for servers that fail, before giving up.
        requests_per_server (`int`, *optional*, defaults to `8`):
            Requests in flight on each.
        answer_timeout (`float`, *optional*, defaults to `300.0`):
            Seconds after which a request without an answer counts as failed; at most `timeout`.
        device (`torch.device` or `str`, *optional*, defaults to `"cpu"`):
            Where to put results.
        process_index (`int`, *optional*, defaults to `0`):
            Of this process: each starts its round at another server, and says who it is in messages.
        num_processes (`int`, *optional*, defaults to `1`):
            Of the run.
        report (`Callable`, *optional*):
            Takes messages about servers that fail and come back; by default they go to stderr.

    Raises:
        `ValueError`: a server that does not answer, refuses the key in `$TEACHER_API_KEY`, or serves another model.
    """

    precision = "bfloat16"  # no server says; it is what they use
    remedy = "start the server with --no-enable-prefix-caching"

    @property
    def ends(self) -> set[int] | None:
        """Ids that end a response for the teacher, where its folder is on this disk."""
        try:  # no reason to wait for a hub
            ends = GenerationConfig.from_pretrained(self.servers[0].root, local_files_only=True).eos_token_id
        except (OSError, ValueError):
            return None
        return ends if ends is None else {ends} if isinstance(ends, int) else set(ends)

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
        report: Callable[[str], None] | None = None,
    ):
        self.top_k = top_k
        self.timeout = timeout
        self.requests_per_server = requests_per_server
        self.device = device
        self.stats = ServerStats()
        self._answer_timeout = min(answer_timeout, timeout)
        self._prefix = f"[process {process_index}] " if num_processes > 1 else ""
        self._report = report or (lambda message: tqdm.write(message, file=sys.stderr))
        http = urllib3.PoolManager(num_pools=len(urls), maxsize=requests_per_server)
        self.servers = [Server(url, http) for url in urls]
        for server in self.servers:
            server.identify(model)
            other = self.servers[0]
            if server.root != other.root:
                raise ValueError(
                    f"`teacher_server_urls` must all serve the same model, but {other} serves {other.root} and "
                    f"{server} {server.root}; leave out one of them."
                )
        lengths = [server.max_length for server in self.servers if server.max_length]
        self.max_length = min(lengths, default=None)
        self._outage = Outage(self.servers, timeout, process_index)

    # ---------------------------------------------------------------- checks before training

    def check_length(self, tokens: int) -> None:
        """Raise `ValueError` when a server takes fewer than `tokens` tokens of prompt and response."""
        for server in self.servers:
            # It always generates one token more.
            if server.max_length is not None and tokens + 1 > server.max_length:
                raise ValueError(
                    f"Teacher server {server} takes {server.max_length} tokens, too few for `max_prompt_length` + "
                    f"`max_completion_length` = {tokens} and one more; start it with --max-model-len {tokens + 1}."
                )

    def check_vocabulary(self, tokenizer) -> None:
        """
        Raise `ValueError`, naming a token, unless every id of `tokenizer` stands for the same text on all servers.

        White space is left out of the comparison: how a text's spaces are tidied up is no part of a vocabulary.
        """

        def ours(ids: range) -> str:
            return "".join(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False).split())

        for server in self.servers:

            def theirs(ids: range, server=server) -> str:
                body = {"model": server.model, "tokens": list(ids)}
                text = parse_json(request(server, "POST", "/detokenize", body, self._answer_timeout)).get("prompt")
                if not isinstance(text, str):
                    raise ValueError(f"Teacher server {server} does not answer /detokenize as vLLM does; use vLLM.")
                return "".join(text.split())

            try:
                low, high = 0, len(tokenizer)
                if ours(range(low, high)) == theirs(range(low, high)):
                    continue
                while high - low > 1:
                    middle = (low + high) // 2
                    same = ours(range(low, middle)) == theirs(range(low, middle))
                    low, high = (middle, high) if same else (low, middle)
                found = theirs(range(low, high))
            except (Failure, UnreadableReply) as error:
                raise ValueError(f"The vocabulary of teacher server {server} cannot be compared ({error}).") from None
            raise ValueError(
                f"Student and teacher vocabularies differ: id {low} is {tokenizer.decode([low])!r} for the student and "
                f"{found!r} on the teacher server {server}; serve a teacher of the same family."
            )

    # ---------------------------------------------------------------- scoring

    def score(self, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]) -> TopKLogprobs:
        """
        Log-probabilities of the top K and of the response token, at every response position.

        Args:
            prompt_ids, completion_ids (B lists of token ids): Ids in, never text.

        Returns:
            [`TopKLogprobs`], see [`~crop_trl.scoring.local.LocalScorer.score`].

        Raises:
            `ValueError`: a server returns too few entries, or scored other tokens than were sent; the message names row
            and position. Or the lists differ in length, or a prompt has no tokens.
            `TeacherServerError`: no server answered for `timeout` seconds.
        """
        if len(prompt_ids) != len(completion_ids):
            raise ValueError(f"Got {len(prompt_ids)} prompts for {len(completion_ids)} completions.")
        jobs = []
        for row, (prompt, completion) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
            if not len(prompt):
                raise ValueError(f"Prompt {row} has no tokens; give it at least one, such as the BOS token.")
            if len(completion):
                jobs.append(_Job(row, [int(i) for i in (*prompt, *completion)], len(prompt)))
        lengths = np.array([len(c) for c in completion_ids], dtype=np.int64)
        shape = (len(lengths), int(lengths.max(initial=0)))
        token_ids = np.zeros((*shape, self.top_k), np.int32)
        logprobs = np.zeros((*shape, self.top_k), np.float32)
        sampled_logprobs = np.zeros(shape, np.float32)
        for job, (ids, top, sampled) in self._run(jobs):
            token_ids[job.row, : len(ids)] = ids
            logprobs[job.row, : len(ids)] = top
            sampled_logprobs[job.row, : len(ids)] = sampled
            self.stats.sequences += 1
            self.stats.tokens += len(job.ids)
            self.stats.retries += job.failures
        mask = np.arange(shape[1]) < lengths[:, None]
        return TopKLogprobs(*map(torch.from_numpy, (token_ids, logprobs, sampled_logprobs, mask))).to(self.device)

    def _run(self, jobs: list[_Job]):
        """Yield `(job, arrays)` in the order in which they come; threads do the waiting."""
        self._outage.look()
        this = _Round()
        # The longest first, so that none is left alone at the end.
        for job in sorted(jobs, key=lambda job: -len(job.ids)):
            this.todo.put(job)
        # Daemons: a server that hangs must not keep the program from ending.
        for _ in range(min(len(jobs), self.requests_per_server * len(self.servers))):
            threading.Thread(target=self._work, args=(this,), daemon=True).start()
        left = len(jobs)
        try:
            while left:
                try:
                    job, result = this.done.get(timeout=_TICK)
                except queue.Empty:
                    self._say_what_happened()
                    continue
                if isinstance(result, Exception):
                    raise result
                left -= 1
                yield job, result
        finally:
            this.stop.set()
            self._say_what_happened()

    def _say_what_happened(self) -> None:
        for message in self._outage.news():
            self._report(self._prefix + message)

    def _work(self, this: _Round) -> None:
        while not this.stop.is_set():
            try:
                job = this.todo.get_nowait()
            except queue.Empty:
                return
            try:
                result = self._score_job(job, this.stop)
            except Exception as error:  # raised again by the thread that waits for it
                result = error
            this.done.put((job, result))

    def _score_job(self, job: _Job, stop: threading.Event):
        body = {
            "model": None,
            "prompt": job.ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": self.top_k,
            "return_token_ids": True,
        }
        while True:
            server = self._outage.choose(job.failing_since, stop)
            if server is None:
                return None
            started = time.monotonic()
            try:
                body["model"] = server.model
                answer = request(server, "POST", "/v1/completions", body, self._answer_timeout, self._explain(job))
                arrays = read_topk(parse_json(answer), job.ids, job.first, self.top_k)
            except WrongReply as error:
                raise ValueError(f"Teacher server {server} cannot score row {job.row}: {error}.") from None
            except (Failure, UnreadableReply) as error:
                self._outage.failed(server, error, started)
                job.failing_since = started if job.failing_since is None else job.failing_since
                job.failures += 1
                stop.wait(min(5.0, 0.1 * 2**job.failures))
            else:
                self._outage.succeeded(server)
                return arrays

    def _explain(self, job: _Job) -> Callable[[Server, int, str], str]:
        """What the user can do about a request that a server refuses."""

        def explain(server: Server, status: int, text: str) -> str:
            said = f"(HTTP {status}: {text})"
            if "prompt_logprobs" in text or "prompt logprobs" in text:
                return (
                    f"`score_top_k` {self.top_k} is more than teacher server {server} returns {said}; start it with "
                    f"--max-logprobs {self.top_k}, or lower `score_top_k`."
                )
            if "out of vocabulary" in text:
                return (
                    f"Teacher server {server} does not know a token of row {job.row} {said}; serve a teacher with at "
                    "least as many vocabulary entries as the student."
                )
            return f"Teacher server {server} refuses row {job.row} with {len(job.ids)} tokens {said}."

        return explain


__all__ = ["ServerScorer", "ServerStats", "TeacherServerError"]
