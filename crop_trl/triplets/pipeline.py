"""From problems to triplets: who asks what when, and what is on disk at every moment.

Each worker takes one problem through its rounds, so `concurrency` workers are `concurrency` requests in flight.
Whatever ends a run early (Ctrl-C, a cost limit, an endpoint that went away) stops new requests only: those in flight
are awaited and stored, the files are written for what is finished, and a rerun goes on from there.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from .. import files
from ..retries import Stopped
from ..text import Redactor, say
from .asking import Asker
from .candidates import Round, build_record, check_candidate, excluded_record
from .client import Client, RequestFailed
from .costs import Account, Prices, given_prices, listed_prices
from .engine import CLIENTS, LocalClient
from .latex import commands
from .ledger import Known, Ledger, LedgerError, served_digest
from .outputs import OutputDirectory, find_replaced, merge_records
from .progress import on_interrupt, progress_bar
from .prompts import load_templates, round_feedback
from .reading import read_candidates, read_evaluations
from .rules import round_by_rule
from .settings import TripletSettings
from .source import KNOWN_WRAPPERS, Problem, ProblemSet, read_problems


@dataclass
class TripletRun:
    """What a run left behind."""

    records: list[dict[str, Any]]  # those that it finished, in the order of the input
    problems: int  # of the input, finished or not
    stopped: str | None = None  # why it ended before all were finished
    error: Exception | None = None  # where that was an error
    requests: int = 0  # that were answered in this run
    kept: int = 0  # records of earlier runs that stay as they are


def generate_triplets(settings: TripletSettings, progress: bool = True) -> TripletRun:
    """Make triplets of all problems that `settings` name, or go on with a run that was interrupted. The output
    directory holds the records. Raises `ValueError` where nothing was sent, `LedgerError` where records cannot be
    written."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_generate(settings, progress))
    with ThreadPoolExecutor(1, thread_name_prefix="triplets") as thread:  # a notebook has a loop of its own
        return thread.submit(asyncio.run, _generate(settings, progress)).result()


async def _generate(settings: TripletSettings, progress: bool) -> TripletRun:
    templates = load_templates(settings.templates, settings.domain, settings.rules)
    redact = Redactor(*settings.secrets())
    problem_set = read_problems(settings, templates.domain)
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
        asked = {kind: settings.for_kind(kind) for kind in templates.domain.schemas}
        models = {own.model: own for own in asked.values()}
        if known.askers and {(model, templates.version) for model in models} - known.askers:
            earlier = "; ".join(f"{model}, templates {version}" for model, version in sorted(known.askers))
            say(
                f"{output.ledger} holds answers for {earlier}. They stay, but model {' and '.join(models)} with "
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
            clients: dict[str, Client | LocalClient] = {}
            for model, own in models.items():
                served = served_digest(own)
                known_mode, accepted = known.served.get(served), served in known.served
                client = CLIENTS[own.engine](own) if own.engine else Client(own, known_mode, accepted)
                clients[model] = await stack.enter_async_context(client)
            by_kind = {kind: clients[own.model] for kind, own in asked.items()}
            asker = Asker(settings, templates, by_kind, ledger, account)
            result = await _process(asker, problem_set, progress)
        try:
            _save(output, result, stored, problem_set, sum((c.retries for c in clients.values()), Counter()))
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
        if not any(entry.get("prices_of") == model for entry in files.read_entries(output.ledger)):
            raise ValueError(
                f"`max_cost` needs prices, and none are known for the {kind} {model!r}; give `{prefix}price_input` and "
                f"`{prefix}price_output`."
            )


def _save(
    output: OutputDirectory, result: TripletRun, stored: list[dict[str, Any]], problem_set: ProblemSet, retries: Counter
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


async def _process(asker: Asker, problem_set: ProblemSet, progress: bool) -> TripletRun:
    """Take every problem through its rounds."""
    problems = problem_set.problems
    records: list[dict[str, Any] | None] = [None] * len(problems)
    todo = iter(enumerate(problems))

    async def work() -> None:
        for place, problem in todo:
            try:
                records[place] = await _record(asker, problem)
            except Stopped:
                continue  # not the end: what the ledger can answer is still finished and written
            except Exception as error:  # not raised here: it would cost the answers that others are waiting for
                asker.stop("error", error)
                continue
            finished(records[place]["status"])
            await asyncio.sleep(0)  # a replayed record awaits nothing: let signals and the others in

    def interrupt() -> None:
        say("Stopping: waiting for the requests in flight (interrupt again to leave them).")
        asker.stop("interrupted")

    with progress_bar(len(problems), asker.account, progress) as finished, on_interrupt(interrupt):
        await asyncio.gather(*(work() for _ in range(min(asker.settings.concurrency, len(problems)))))
    made = [record for record in records if record is not None]
    return TripletRun(made, len(problems), asker.stopped, asker.error, asker.requests)


async def _record(asker: Asker, problem: Problem) -> dict[str, Any]:
    if problem.excluded:
        return excluded_record(problem)
    rounds: list[Round] = []
    feedback = ""
    for number in range(1, asker.settings.rounds + 1):
        rounds.append(Round())
        try:
            await _round(asker, problem, number, feedback, rounds[-1])
        except RequestFailed as failure:
            # No further round: a rerun asks for what is missing here, and a later answer would not fit it.
            rounds[-1].failed = str(failure)
            break
        if asker.settings.rules or any(
            candidate.passes(asker.settings.threshold) for candidate in rounds[-1].candidates
        ):
            break
        feedback = round_feedback(rounds[-1].flaws, rounds[-1].candidates)
    return build_record(problem, rounds, asker.settings.threshold, asker.templates.version)


async def _round(asker: Asker, problem: Problem, number: int, feedback: str, current: Round) -> None:
    settings, domain = asker.settings, asker.templates.domain
    if settings.rules:
        return await round_by_rule(asker, problem, current)
    messages = asker.templates.generator_messages(problem.text, settings.candidates, feedback)
    read = partial(read_candidates, limit=settings.candidates)
    written = await asker.ask("generator", messages, number, problem, current, read) or ()
    wrappers = [wrapper for wrapper in (settings.input_template, *KNOWN_WRAPPERS) if wrapper]
    known = commands([problem.text, *(text for fields in written for text in fields.values())])
    for place, fields in enumerate(written, start=1):
        candidate = check_candidate(problem.text, fields, number, place, wrappers, known, domain)
        current.candidates.append(candidate)
        if candidate.incomplete:
            current.flaws[f"generator:{candidate.incomplete}"] += 1
    complete = [candidate for candidate in current.candidates if candidate.incomplete is None]
    if not complete:
        return
    current.critic_asked = True
    messages = asker.templates.critic_messages(problem.text, [candidate.fields for candidate in complete])

    def judge(content: str) -> tuple[Any, Counter]:
        evaluations, selected, flaws = read_evaluations(content, len(complete), domain.evaluation)
        return (evaluations, selected) if evaluations else None, flaws

    judged = await asker.ask("critic", messages, number, problem, current, judge)
    if judged:
        evaluations, selected = judged
        for place, candidate in enumerate(complete, start=1):
            candidate.evaluation = evaluations.get(place)
        # As numbered among all candidates of the round, not among those that were sent.
        if selected is not None and 1 <= selected <= len(complete):
            current.selected = complete[selected - 1].number
