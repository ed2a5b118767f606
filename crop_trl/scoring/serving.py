"""A teacher behind HTTP, for trainers elsewhere: token ids in, top-K log-probabilities out, both as bytes.

Callers that come at the same time are scored together, laid out as one batch. One process and one model a card.
"""

import asyncio
import hmac
import os
import queue
import threading
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .local import LocalScorer
from .server_http import API_KEY, OWNER
from .wire import pack_reply, unpack_request


@dataclass
class _Asked:
    """One request: its sequences, and where the scores go."""

    prompts: list[list[int]]
    completions: list[list[int]]
    top_k: int
    scored: Future = field(default_factory=Future)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompts)) + sum(map(len, self.completions))


class _Refused(ValueError):
    """A request that cannot be served, with its HTTP status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class TeacherService:
    """What a scorer, used by one thread alone, answers to requests, those that wait together as one batch."""

    def __init__(
        self,
        scorer: LocalScorer,
        name: str,
        tokenizer,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        tokens_together: int = 131072,
    ):
        self.scorer, self.name, self.tokenizer = scorer, name, tokenizer
        self.max_length, self.dtype, self.tokens_together = max_length, dtype, tokens_together
        self._waiting: queue.Queue[_Asked | None] = queue.Queue()
        self._open = 0  # requests that were read and not answered yet

    def application(self) -> Starlette:
        """The web application; its requests are in `_waiting` until the thread that scores takes them."""
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/score", self._score, methods=["POST"]),
        ]

        @asynccontextmanager
        async def running(_):
            thread = threading.Thread(target=self._work, name="scoring")
            thread.start()
            yield  # what is in flight ends first
            self._waiting.put(None)
            await run_in_threadpool(thread.join)

        def refuse(_, error: Exception) -> Response:
            return JSONResponse({"message": str(error)}, getattr(error, "status", 500))

        return Starlette(routes=routes, lifespan=running, exception_handlers={_Refused: refuse, Exception: refuse})

    # ---------------------------------------------------------------- requests

    def _check_key(self, request: Request) -> None:
        key = os.environ.get(API_KEY)
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key and not hmac.compare_digest(given.encode(), key.encode()):
            raise _Refused(401, "wrong key")

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"requests": self._open})

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        served = {"id": self.name, "root": self.name, "owned_by": OWNER, "max_model_len": self.max_length}
        ends = sorted(self.scorer.ends or ())
        return JSONResponse({"data": [{**served, "precision": self.scorer.precision, "ends": ends}]})

    async def _detokenize(self, request: Request) -> Response:
        self._check_key(request)
        tokens = (await request.json()).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) and token >= 0 for token in tokens):
            raise _Refused(400, "`tokens` must be a list of token ids")
        text = await run_in_threadpool(self.tokenizer.decode, tokens, clean_up_tokenization_spaces=False)
        return JSONResponse({"prompt": text})

    async def _score(self, request: Request) -> Response:
        self._check_key(request)
        asked = await run_in_threadpool(self._read, await request.body())
        self._open += 1
        try:
            self._waiting.put(asked)
            scored = await asyncio.wrap_future(asked.scored)
            packed = await run_in_threadpool(pack_reply, scored, asked.completions, self.dtype)
        finally:
            self._open -= 1
        return Response(packed, media_type="application/octet-stream")

    def _read(self, body: bytes) -> _Asked:
        try:
            asked = _Asked(*unpack_request(body))
        except ValueError as error:
            raise _Refused(400, str(error)) from None
        longest = max(len(p) + len(c) for p, c in zip(asked.prompts, asked.completions))
        if longest > self.max_length:
            raise _Refused(400, f"a sequence of {longest} tokens, of which the model takes {self.max_length}")
        return asked

    # ---------------------------------------------------------------- scoring

    def _work(self) -> None:
        """Score what waits, all that came in the meantime together, until nothing is to come."""
        while (asked := self._waiting.get()) is not None:
            together = [asked]
            while asked is not None and sum(one.tokens for one in together) < self.tokens_together:
                try:
                    asked = self._waiting.get_nowait()
                except queue.Empty:
                    break
                if asked is None:
                    self._waiting.put(None)
                else:
                    together.append(asked)
            self._answer(together)

    def _answer(self, together: list[_Asked]) -> None:
        prompts = [prompt for one in together for prompt in one.prompts]
        completions = [completion for one in together for completion in one.completions]
        try:
            scored = self.scorer.score(prompts, completions, max(one.top_k for one in together)).to("cpu")
        except Exception as error:
            if len(together) == 1:
                wrong = isinstance(error, ValueError)
                together[0].scored.set_exception(_Refused(400, str(error)) if wrong else error)
            else:
                for one in together:  # nobody answers for another's request
                    self._answer([one])
            return
        start = 0
        for one in together:
            own = scored.rows(slice(start, start + len(one.prompts)))
            start += len(one.prompts)
            own.token_ids, own.logprobs = (x[..., : one.top_k] for x in (own.token_ids, own.logprobs))
            one.scored.set_result(own)
