"""The requests of a run: answered by the ledger or paid for, and what stops them.

Whatever ends a run early (Ctrl-C, a cost limit, an endpoint that went away) stops new requests only: those in flight
are awaited and stored.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..retries import Stopped
from .candidates import Round
from .client import Answer, Client, EndpointError, RequestFailed, RequestRefused
from .costs import Account, estimate_tokens, stated_usage
from .engine import LocalClient
from .ledger import Ledger, request_key, served_digest
from .outputs import now
from .prompts import Templates
from .reading import answer_flaw
from .settings import TripletSettings
from .source import Problem

# An answer that says no is an answer; asking again for the same would only be paid for twice.
FINAL_FLAWS = {"refusal", "content_filter", "no_candidates"}
LONGEST_UNUSABLE_SERIES = 20  # answers in a row of one kind, each paid for, until the run ends
LONGEST_FAILURE_SERIES = 20  # failed requests in a row, each after its repetitions, until the endpoint counts as gone


@dataclass
class Asker:
    """Who asks, and how far it may go."""

    settings: TripletSettings
    templates: Templates
    clients: dict[str, Client | LocalClient]  # by kind of request
    ledger: Ledger
    account: Account
    stopped: str | None = None
    error: Exception | None = None
    requests: int = 0  # answered in this run
    _failures: int = 0
    _unusable: Counter = field(default_factory=Counter)  # in a row, by kind
    _pending: dict[str, asyncio.Task] = field(default_factory=dict)
    _settled: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self, reason: str, error: Exception | None = None) -> None:
        """Let nothing new be sent; the first reason stays."""
        if self.stopped is None:
            self.stopped, self.error = reason, error
            for client in self.clients.values():
                client.stopping.set()

    async def ask(
        self,
        kind: str,
        messages: list[dict[str, str]],
        number: int,
        problem: Problem,
        current: Round,
        read: Callable[[str], tuple[Any, Counter]],
    ) -> Any:
        """What `read` finds in an answer, or `None`; asked again where `malformed_retries` allows."""
        for attempt in range(self.settings.malformed_retries + 1):
            answer, fresh = await self._answer(kind, messages, number, attempt, problem.id)
            current.models[kind] = answer["served_model"]
            flaw = answer_flaw(answer["content"], answer["refusal"], answer["finish_reason"])
            found, flaws = (None, Counter([flaw])) if flaw else read(answer["content"])
            current.flaws.update({f"{kind}:{name}": count for name, count in flaws.items()})
            # Of solutions many may be of no use: a problem can be too hard.
            if fresh and not (self.settings.rules and kind == "critic"):
                self._brake(kind, bool(found) or "no_candidates" in flaws, ", ".join(flaws))
            if found:
                return found
            if FINAL_FLAWS & set(flaws):
                break
        return None

    def _brake(self, kind: str, usable: bool, flaws: str) -> None:
        """End a run that pays for answers of which none is of use."""
        self._unusable[kind] = 0 if usable else self._unusable[kind] + 1
        if self._unusable[kind] >= LONGEST_UNUSABLE_SERIES:
            reason = (
                f"The last {self._unusable[kind]} answers of the {kind} were unusable (the last one: {flaws}); look at "
                f"them in {self.ledger.path}, change `response_format`, `max_completion_tokens` or the model, and run "
                "again."
            )
            self.stop("error", EndpointError(reason))

    async def _answer(
        self, kind: str, messages: list[dict[str, str]], number: int, attempt: int, problem_id: str
    ) -> tuple[dict[str, Any], bool]:
        """An answer, and whether it was paid for in this run."""
        key = request_key(
            kind=kind,
            model=self.clients[kind].settings.model,
            messages=messages,
            schema=self.templates.domain.schema_digests[kind],
            templates=self.templates.digest(kind),
            round=number,
            attempt=attempt,
            sampling=self.settings.sampling(),
        )
        entry = self.ledger.get(key)
        if entry is not None:
            return entry["answer"], False
        if key not in self._pending:  # two rows with the same text share one request
            facts = {"kind": kind, "problem": problem_id, "round": number, "attempt": attempt}
            facts |= {"model": self.clients[kind].settings.model, "templates": self.templates.version}
            task = asyncio.create_task(self._request(key, kind, messages, facts))
            self._pending[key] = task
            task.add_done_callback(lambda _: self._pending.pop(key))
        return await self._pending[key], True

    async def _request(
        self, key: str, kind: str, messages: list[dict[str, str]], facts: dict[str, Any]
    ) -> dict[str, Any]:
        cost = await self._reserve(kind, messages)
        try:
            answer = await self._send(kind, messages)
            fields = dict(vars(answer))
            usage = stated_usage(fields.pop("usage"), messages, answer.content)
            client = self.clients[kind]
            mode = client.mode if self.settings.response_format == "auto" else None
            facts |= {"served": served_digest(client.settings), "mode": mode}
            entry = {"key": key, **facts, "time": now(), "usage": usage, "answer": fields}
            await self.ledger.append(entry)
            self.account.add(entry)
        finally:
            self.account.release(cost)  # only now: while the answer is being written it is spent, but not booked
            self._settled.set()
        self.requests += 1
        return fields

    async def _reserve(self, kind: str, messages: list[dict[str, str]]) -> float:
        """Wait until the cost limit leaves room for a request, and take it; what is in flight mostly costs less."""
        cost = 0.0
        if self.account.max_cost is not None:
            tokens = sum(estimate_tokens(message["content"]) for message in messages)
            cost = self.account.cost_bound(self.clients[kind].settings.model, kind, tokens)
        while not self.stopped and not self.account.allows(cost):
            if not self.account.in_flight:
                self.stop("max_cost")
                break
            self._settled.clear()
            await self._settled.wait()
        if self.stopped:
            raise Stopped
        self.ledger.check_room(self.account.in_flight + 1)
        self.account.reserve(cost)
        return cost

    async def _send(self, kind: str, messages: list[dict[str, str]]) -> Answer:
        try:
            answer = await self.clients[kind].complete(messages, kind, self.templates.domain.schemas[kind])
        except RequestFailed as failure:
            if isinstance(failure, RequestRefused) and self.clients[kind].accepted:
                raise  # others were taken, so it is this request that is not wanted
            self._failures += 1
            if self._failures >= LONGEST_FAILURE_SERIES:
                raise EndpointError(
                    f"The last {self._failures} requests failed (the last one: {failure}); see to the endpoint and run "
                    "again."
                ) from None
            raise
        self._failures = 0
        return answer
