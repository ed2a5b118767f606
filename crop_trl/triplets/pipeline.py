"""From problems to triplets: who asks what when, and what is on disk at every moment.

Each worker takes one problem through its rounds, so `concurrency` workers are `concurrency` requests in flight.
Whatever ends a run early (Ctrl-C, a cost limit, an endpoint that went away) stops new requests only: those in flight
are awaited and stored, the files are written for what is finished, and a rerun goes on from there.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from .. import files
from ..retries import Stopped
from ..text import Redactor
from .candidates import Round, build_record, check_candidate, excluded_record
from .client import Answer, Client, EndpointError, RequestFailed, RequestRefused
from .costs import Account, Prices, estimate_tokens, given_prices, listed_prices, stated_usage
from .latex import commands
from .ledger import Known, Ledger, LedgerError, request_key, served_digest
from .outputs import OutputDirectory, find_replaced, merge_records, now
from .progress import Progress, on_interrupt, say
from .prompts import Templates, load_templates, round_feedback
from .reading import CriticAnswer, GeneratorAnswer, answer_flaw, read_candidates, read_evaluations, request_schema
from .settings import TripletSettings
from .source import KNOWN_WRAPPERS, Problem, ProblemSet, read_problems

SCHEMAS = {"generator": request_schema(GeneratorAnswer), "critic": request_schema(CriticAnswer)}
_SCHEMA_DIGESTS = {
    kind: hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest() for kind, schema in SCHEMAS.items()
}
# An answer that says no is an answer; asking again for the same would only be paid for twice.
FINAL_FLAWS = {"refusal", "content_filter", "no_candidates"}
LONGEST_UNUSABLE_SERIES = 20  # answers in a row of one kind, each paid for, until the run ends
LONGEST_FAILURE_SERIES = 20  # failed requests in a row, each after its repetitions, until the endpoint counts as gone


@dataclass
class RunResult:
    """What a run left behind."""

    records: list[dict[str, Any]]  # those that it finished, in the order of the input
    problems: int  # of the input, finished or not
    stopped: str | None = None  # why it ended before all were finished
    error: Exception | None = None  # where that was an error
    requests: int = 0  # that were answered in this run
    kept: int = 0  # records of earlier runs that stay as they are


def generate_triplets(settings: TripletSettings, progress: bool = True) -> RunResult:
    """
    Make triplets of all problems that `settings` name, or go on with a run that was interrupted.

    Works where an event loop runs already (a notebook) by using a thread.

    Args:
        settings ([`TripletSettings`]): What to read, whom to ask, where to write.
        progress (`bool`, *optional*, defaults to `True`): Show a progress bar.

    Returns:
        The [`RunResult`]; the output directory holds the records (`triplets.jsonl`, `incomplete.jsonl`).

    Raises:
        `ValueError`: a setting or an input that cannot work, or another run in the directory; nothing was sent.
        `LedgerError`: the records cannot be written.
    """

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_generate(settings, progress))
    with ThreadPoolExecutor(1, thread_name_prefix="triplets") as thread:
        return thread.submit(asyncio.run, _generate(settings, progress)).result()


async def _generate(settings: TripletSettings, progress: bool) -> RunResult:
    templates = load_templates(settings.templates)
    redact = Redactor(*settings.secrets())
    problem_set = read_problems(settings)
    for note in problem_set.notes:
        say(note)
    output = OutputDirectory(settings.output, redact.content)
    account = Account(settings.max_cost, settings.max_completion_tokens)
    known = Known()
    given = given_prices(vars(settings))
    if settings.max_cost is not None:
        _check_prices(settings, given, output)

    def book(entry: dict[str, Any]) -> None:
        known.add(entry)
        account.add(entry)

    with Ledger(output.ledger, on_entry=book) as ledger:
        if any(ledger.spoiled):
            dropped, skipped = ledger.spoiled
            say(f"{output.ledger}: dropped {dropped} bytes of a half-written line, skipped {skipped} unreadable lines.")
        asked = {own.model: own for own in map(settings.for_kind, SCHEMAS)}
        if known.askers and {(model, templates.version) for model in asked} - known.askers:
            earlier = "; ".join(f"{model}, templates {version}" for model, version in sorted(known.askers))
            say(
                f"{output.ledger} holds answers for {earlier}. They stay, but model {' and '.join(asked)} with "
                f"templates {templates.version} is asked anew where requests differ."
            )
        output.clear_leftovers()
        output.load_reviews()  # damaged, it would keep the records of this run from being written
        stored = output.stored_records()
        replaced = find_replaced(stored, problem_set)
        if replaced:
            say(f"{len(replaced):,} problems have another text than before ({replaced[0]!r} first) and are made anew.")
        output.save_settings(settings, templates, problem_set)
        for model, prices in given.items():
            if account.given.get(model) != prices:  # in the ledger they are known to later runs with another model too
                await ledger.append(entry := {"prices_of": model, "prices": asdict(prices)})
                account.add(entry)
        async with AsyncExitStack() as stack:
            clients: dict[str, Client] = {}
            for model, own in asked.items():
                client = Client(own, known.mode(own), served_digest(own) in known.served)
                clients[model] = await stack.enter_async_context(client)
            run = Run(settings, templates, clients, ledger, account, known)
            result = await run.process(problem_set, progress)
        try:
            _save(
                output,
                result,
                stored,
                problem_set,
                sum({id(c): c.retries for c in clients.values()}.values(), Counter()),
            )
        except OSError as error:
            # What stopped the run says more than what it brought about here (a full disk: both).
            kept = f"every answer is in {output.ledger}: make room and run again"
            raise result.error or LedgerError(
                f"{error.filename or output.path} cannot be written ({error.strerror}); "
                f"{kept if output.ledger.exists() else f'{output.ledger} is no longer there either'}."
            ) from error
    return result


def _check_prices(settings: TripletSettings, given: Mapping[str, Prices], output: OutputDirectory) -> None:
    """A limit needs prices: given now, in an earlier run, or those of the table."""
    for kind, prefix in (("generator", ""), ("critic", "critic_")):
        model = settings.for_kind(kind).model
        if model in given or listed_prices(model):
            continue
        if not any(entry.get("prices_of") == model for _, entry in files.read_entries(output.ledger)):
            raise ValueError(
                f"`max_cost` needs prices, and none are known for the {kind} {model!r}; give `{prefix}price_input` and "
                f"`{prefix}price_output`."
            )


def _save(
    output: OutputDirectory, result: RunResult, stored: list[dict[str, Any]], problem_set: ProblemSet, retries: Counter
) -> None:
    records, kept = merge_records(result.records, stored, problem_set)
    result.kept = kept.total()
    if kept:
        reasons = {
            "elsewhere": "not in this input",
            "unfinished": "not finished this time",
            "failed": "a request failed this time",
        }
        counts = ", ".join(f"{kept[reason]:,} {text}" for reason, text in reasons.items() if kept[reason])
        say(
            f"{output.path}: kept {result.kept:,} records of earlier runs ({counts}); for this run's alone, name "
            "another `output`."
        )
    output.save_records(records)
    there = {record["id"] for record in records}
    output.save_end(
        unfinished=sum(problem.id not in there for problem in problem_set.problems),
        kept=result.kept,
        stopped=result.stopped,
        error=str(result.error) if result.error else None,
        retries=dict(retries),
    )


@dataclass
class Run:
    """One pass over the problems: workers, requests, and what stops them."""

    settings: TripletSettings
    templates: Templates
    clients: dict[str, Client]  # by model
    ledger: Ledger
    account: Account
    known: Known
    stopped: str | None = None
    error: Exception | None = None
    _failures: int = 0
    _unusable: Counter = field(default_factory=Counter)  # in a row, by kind
    _requests: int = 0
    _lost: int = 0  # answers that did not reach the disk
    _pending: dict[str, asyncio.Task] = field(default_factory=dict)
    _settled: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self, reason: str, error: Exception | None = None) -> None:
        """Let nothing new be sent; the first reason stays."""
        if self.stopped is None:
            self.stopped, self.error = reason, error
            for client in self.clients.values():
                client.stopping.set()

    def _client(self, kind: str) -> Client:
        return self.clients[self.settings.for_kind(kind).model]

    async def process(self, problem_set: ProblemSet, progress: bool) -> RunResult:
        """Take every problem through its rounds."""
        problems = problem_set.problems
        records: list[dict[str, Any] | None] = [None] * len(problems)
        todo = iter(enumerate(problems))
        bar = Progress(len(problems), self.account, progress)

        async def work() -> None:
            for place, problem in todo:
                try:
                    records[place] = await self._record(problem)
                except Stopped:
                    continue  # not the end: what the ledger can answer is still finished and written
                except Exception as error:  # not raised here: it would cost the answers that others are waiting for
                    self.stop("error", error)
                    continue
                bar.finished(records[place]["status"])
                await asyncio.sleep(0)  # a replayed record awaits nothing: let signals and the others in

        def interrupt() -> None:
            say("Stopping: waiting for the requests in flight (interrupt again to leave them).")
            self.stop("interrupted")

        with bar, on_interrupt(interrupt):
            await asyncio.gather(*(work() for _ in range(min(self.settings.concurrency, len(problems)))))
        if self._lost:
            self.error = LedgerError(f"{self.error} Answers that came and could not be kept: {self._lost}.")
        finished = [record for record in records if record is not None]
        return RunResult(finished, len(problems), self.stopped, self.error, self._requests)

    async def _record(self, problem: Problem) -> dict[str, Any]:
        if problem.excluded:
            return excluded_record(problem)
        rounds: list[Round] = []
        feedback = ""
        for number in range(1, self.settings.rounds + 1):
            rounds.append(Round())
            try:
                await self._round(problem, number, feedback, rounds[-1])
            except RequestFailed as failure:
                # No further round: a rerun asks for what is missing here, and a later answer would not fit it.
                rounds[-1].failed = str(failure)
                break
            if any(candidate.passes(self.settings.threshold) for candidate in rounds[-1].candidates):
                break
            feedback = round_feedback(rounds[-1].flaws, rounds[-1].candidates)
        return build_record(problem, rounds, self.settings.threshold, self.templates.version)

    async def _round(self, problem: Problem, number: int, feedback: str, current: Round) -> None:
        settings = self.settings
        messages = self.templates.generator_messages(problem.text, settings.candidates, feedback)

        def read(content: str) -> tuple[list[dict[str, str]], Counter]:
            return read_candidates(content, settings.candidates)

        found = await self._ask("generator", messages, number, problem, current, read)
        written = found[0] if found else ()
        wrappers = [wrapper for wrapper in (settings.input_template, *KNOWN_WRAPPERS) if wrapper]
        known = commands([problem.text, *(text for fields in written for text in fields.values())])
        for place, fields in enumerate(written, start=1):
            candidate = check_candidate(problem.text, fields, number, place, wrappers, known)
            current.candidates.append(candidate)
            if candidate.incomplete:
                current.flaws[f"generator:{candidate.incomplete}"] += 1
        complete = [candidate for candidate in current.candidates if candidate.incomplete is None]
        if not complete:
            return
        current.critic_asked = True
        messages = self.templates.critic_messages(problem.text, [candidate.fields for candidate in complete])

        def judge(content: str) -> tuple[Any, Counter]:
            evaluations, selected, flaws = read_evaluations(content, len(complete))
            return (evaluations, selected) if evaluations else None, flaws

        judged = await self._ask("critic", messages, number, problem, current, judge)
        if judged:
            evaluations, selected = judged[0]
            for place, candidate in enumerate(complete, start=1):
                candidate.evaluation = evaluations.get(place)
            # As numbered among all candidates of the round, not among those that were sent.
            known = selected is not None and 1 <= selected <= len(complete)
            current.selected = complete[selected - 1].number if known else None

    async def _ask(
        self,
        kind: str,
        messages: list[dict[str, str]],
        number: int,
        problem: Problem,
        current: Round,
        read: Callable[[str], tuple[Any, Counter]],
    ) -> tuple[Any] | None:
        """Ask and read, again if the answer is unusable and `malformed_retries` allows; `None` when it stays so."""
        for attempt in range(self.settings.malformed_retries + 1):
            answer, fresh = await self._answer(kind, messages, number, attempt, problem.id)
            current.models[kind] = answer["served_model"]
            flaw = answer_flaw(answer["content"], answer["refusal"], answer["finish_reason"])
            found, flaws = (None, Counter([flaw])) if flaw else read(answer["content"])
            current.flaws.update({f"{kind}:{name}": count for name, count in flaws.items()})
            if fresh:
                self._brake(kind, bool(found) or "no_candidates" in flaws, ", ".join(flaws))
            if found:
                return (found,)
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
            model=self._client(kind).settings.model,
            messages=messages,
            schema=_SCHEMA_DIGESTS[kind],
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
            facts |= {"model": self._client(kind).settings.model, "templates": self.templates.version}
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
            fields = answer.to_entry()
            usage = stated_usage(fields.pop("usage"), messages, answer.content)
            entry = {"key": key, **facts, "time": now(), "usage": usage, "answer": fields}
            try:
                await self._store(kind, entry)
            except LedgerError:
                self._lost += 1
                raise
            self.account.add(entry)
        finally:
            self.account.release(cost)  # only now: while the answer is being written it is spent, but not booked
            self._settled.set()
        self._requests += 1
        return fields

    async def _reserve(self, kind: str, messages: list[dict[str, str]]) -> float:
        """Wait until the cost limit leaves room for a request, and take it; what is in flight mostly costs less."""
        cost = 0.0
        if self.account.max_cost is not None:
            tokens = sum(estimate_tokens(message["content"]) for message in messages)
            cost = self.account.cost_bound(self._client(kind).settings.model, kind, tokens)
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
            answer = await self._client(kind).complete(messages, kind, SCHEMAS[kind])
        except RequestFailed as failure:
            if isinstance(failure, RequestRefused) and self._client(kind).accepted:
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

    async def _store(self, kind: str, entry: dict[str, Any]) -> None:
        """Put an answer on disk; with the first one, that this endpoint takes such requests."""
        client = self._client(kind)
        served = served_digest(client.settings)
        if served in self.known.served:
            await self.ledger.append(entry)
            return
        mode = client.mode if self.settings.response_format == "auto" else None
        own = client.settings
        endpoint = {"endpoint": own.endpoint, "model": own.model, "mode": mode, "served": served}
        self.known.add(endpoint)
        await asyncio.gather(self.ledger.append(entry), self.ledger.append(endpoint))
