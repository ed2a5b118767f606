"""Triplets by rule: a rule changes a number, a model rewords the problem, and solving tells whether both are right.

No critic reads the texts. The model (`critic_model`, if there is one) solves each several times, and what its solutions
say stands in the record in the critic's place and form, shares of solutions for confidences.
"""

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..evaluation.grading.verdict import after_thinking, extract_boxed, grade
from .asking import Asker
from .candidates import Round, check_candidate, missing_numbers
from .client import describe_request
from .latex import commands
from .numbers import Change, changes
from .prompts import Templates
from .settings import TripletSettings
from .source import Problem, folded, unclean_reason

_PARAPHRASE = re.compile(r"<paraphrase>(.*?)</paraphrase>", re.DOTALL)
Answers = Sequence[str | None]  # what the solutions of a text end in


async def round_by_rule(asker: Asker, problem: Problem, current: Round) -> None:
    """All requests for one problem."""
    text, templates = problem.text, asker.templates
    found = changes_of(text, asker.settings.candidates, templates)
    if not found:
        current.flaws["generator:no_number_to_change"] += 1
        return
    messages = templates.messages("generator", {"problem": text})
    paraphrase = await asker.ask("generator", messages, 1, problem, current, partial(read_paraphrase, text))
    if not paraphrase:
        return
    known = commands([text, paraphrase])
    current.candidates = [
        check_candidate(text, fields_of(paraphrase, change), 1, place, (), known, templates.domain)
        for place, change in enumerate(found, start=1)
    ]
    current.critic_asked = True
    original = [problem.answer] if problem.answer else await solve(asker, problem, current, text)
    reworded, answer = [], majority(original)
    if answer is not None:  # what cannot pass any more is not solved
        reworded = await solve(asker, problem, current, current.candidates[0].fields["paraphrase_problem"])
    for candidate in current.candidates:
        altered = []
        if agreement(reworded, answer) > 0.5 and not candidate.violations:
            altered = await solve(asker, problem, current, candidate.fields["counterfactual_problem"])
        candidate.evaluation = evaluation(original, reworded, altered)
    current.selected = min(current.candidates, key=lambda candidate: candidate.rank).number


def changes_of(text: str, count: int, templates: Templates) -> list[Change]:
    """The changes to try; none where a figure would contradict them."""
    figure = any(pattern.search(text) for pattern in templates.domain.verbatim.values())
    return [] if figure else changes(text, count)


async def solve(asker: Asker, problem: Problem, current: Round, text: str) -> list[str | None]:
    """Solve a text `samples` times, in requests that are told apart by their number."""

    def read(content: str) -> tuple[str | None, Counter]:
        answer = extract_boxed(content)
        return answer, Counter([] if answer else ["no_answer"])

    messages = asker.templates.messages("critic", {"problem": text})
    samples = range(1, asker.settings.samples + 1)
    return [await asker.ask("critic", messages, sample, problem, current, read) for sample in samples]


def agreement(answers: Answers, answer: str | None) -> float:
    """The share of answers that are this one, however they are written."""
    same = [grade(rf"\boxed{{{one}}}", answer) for one in answers if one and answer]
    return sum(same) / max(1, len(answers))


def majority(answers: Answers) -> str | None:
    """The answer that more than half of them are."""
    return next((answer for answer in answers if agreement(answers, answer) > 0.5), None)


def read_paraphrase(original: str, content: str) -> tuple[str | None, Counter]:
    """The paraphrase in an answer, or the flaw: none in its tags, the original again, or other numbers than it has."""
    text = (_PARAPHRASE.findall(after_thinking(content) or "") or [""])[-1].strip()
    if flaw := unclean_reason(text):
        return None, Counter(["no_paraphrase" if flaw == "empty" else flaw])
    if folded(text) == folded(original):
        return None, Counter(["repeats_original"])
    if missing_numbers(original, text) or missing_numbers(text, original):
        return None, Counter(["other_numbers"])
    return text, Counter()


def fields_of(paraphrase: str, change: Change) -> dict[str, str]:
    """A candidate as a generator would have written it."""
    return {
        "condition_type": "number",
        "original_condition_description": change.old,
        "paraphrased_condition_description": change.old,
        "counterfactual_condition_description": change.new,
        "paraphrase_problem": paraphrase,
        "counterfactual_problem": change.text,
        "counterfactual_description": f"{change.old} became {change.new} by rule; nothing else differs.",
    }


def evaluation(original: Answers, reworded: Answers, altered: Answers) -> dict[str, Any]:
    """What solutions say of a candidate, in the form of a critic's evaluation; `original` may be the known answer."""
    right, other = majority(original), majority(altered)
    kept, moved = agreement(reworded, right), agreement(altered, other)
    verdicts = [kept > 0.5, other is not None and agreement([right], other) == 0]
    said = ["accept" if verdict else "reject" for verdict in (*verdicts, all(verdicts))]
    return {
        "decision": said[2],
        "violations": [],
        "paraphrase_status": said[0],
        "paraphrase_confidence": kept,
        "paraphrase_reason": f"{right} in {kept:.0%} of {len(reworded)} solutions",
        "counterfactual_status": said[1],
        "counterfactual_confidence": moved,
        "counterfactual_reason": f"{other} in {moved:.0%} of {len(altered)} solutions; the original: {right}",
        "original_answer_type": _kind(right),
        "counterfactual_answer_type": _kind(other),
        "original_determinacy": "determinate" if right else "unknown",
        "counterfactual_determinacy": "determinate" if other else "unknown",
        "determinacy_evidence": "solutions agree" if right and other else "solutions do not agree",
        "confidence": min(agreement(original, right), kept, moved),
    }


def _kind(answer: str | None) -> str:
    if answer is None:
        return "unknown"
    return "single_integer" if re.fullmatch(r"-?\d+", re.sub(r"[\s$,]|\{,\}|\\[!,;]", "", answer)) else "expression"


def dry_run_by_rule(settings: TripletSettings, templates: Templates, problems: Sequence[Problem]) -> str:
    """What the rule finds in all problems, and two filled requests."""
    found = {problem.text: changes_of(problem.text, settings.candidates, templates) for problem in problems}
    text = next((text for text, several in found.items() if several), problems[0].text)
    parts = []
    for kind in ("generator", "critic"):
        parts += [f"===== {kind} request =====", describe_request(templates.messages(kind, {"problem": text})), ""]
    parts += ["===== counterfactuals =====", *(change.text + "\n" for change in found[text]), "===== estimate ====="]
    solved = {p.text: len(found[p.text]) + 1 + (not p.answer) for p in problems if found[p.text]}
    most = sum(1 + settings.samples * texts for texts in solved.values())
    return "\n".join(parts) + (
        f"\n{sum(map(bool, found.values())):,} of {len(found):,} problems have a number that the rule may change, "
        f"{sum(map(len, found.values())):,} counterfactuals in all. At most {most:,} requests: a paraphrase of each "
        f"problem, and {settings.samples} solutions of each text.\n"
        f"{settings.endpoint}, model {settings.model}, templates {templates.version}."
    )
