"""What a run would send and cost, before it sends anything."""

from ..files import read_entries
from .client import describe_request
from .costs import TOKEN_FIELDS, Account, estimate_tokens, given_prices
from .outputs import OutputDirectory
from .prompts import load_templates
from .reading import CandidateFields
from .rules import dry_run_by_rule
from .settings import TripletSettings
from .source import duplicates_line, read_problems

# Without answers in the ledger to learn from: descriptions and JSON around two problems, and a critic's reasons.
CANDIDATE_TOKENS, EVALUATION_TOKENS = 150, 350
REPAIR_SHARE = 0.05  # of the problems go into a further round; the paper saw 3.6 %


def dry_run(settings: TripletSettings) -> str:
    """Two filled requests (the critic's without real candidates), and an estimate for the whole input; needs no key."""
    templates = load_templates(settings.templates, settings.domain, settings.rules)
    problem_set = read_problems(settings, templates.domain)
    problems = [problem for problem in problem_set.problems if not problem.excluded]
    excluded = len(problem_set.problems) - len(problems)
    lines = list(problem_set.notes)
    if not problems:
        return "\n".join([*lines, f"All {excluded} problems are excluded by the input screening; nothing to send."])
    if settings.rules:
        return "\n".join([*lines, dry_run_by_rule(settings, templates, problems)])
    example = problems[0]
    candidate = {name: f"({name} as the generator writes it)" for name in CandidateFields.model_fields}
    requests = {
        "generator": templates.generator_messages(example.text, settings.candidates),
        "critic": templates.critic_messages(example.text, [candidate] * settings.candidates),
    }
    for kind, messages in requests.items():
        request = describe_request(messages, kind, templates.domain.schemas[kind])
        lines += [f"===== {kind} request for {example.id} =====", request, ""]

    answered = Account().add_all(read_entries(OutputDirectory(settings.output).ledger))
    answered.given |= given_prices(vars(settings))
    models = {kind: settings.for_kind(kind).model for kind in requests}
    booked = {kind: answered.booked[model, kind] for kind, model in models.items()}
    frame = {kind: estimate_tokens("".join(m["content"] for m in requests[kind])) for kind in requests}
    texts = {problem.text for problem in problems}  # a repeated text is asked once
    repeats = 1 + REPAIR_SHARE * (settings.rounds > 1)
    if all(counts["answers"] for counts in booked.values()):
        tokens = {
            kind: {name: counts[name] / counts["answers"] * len(texts) for name in TOKEN_FIELDS}
            for kind, counts in booked.items()
        }
        known = sum(counts["answers"] for counts in booked.values())
        basis = f"the {known:,} answers in the ledger, which will not be asked again"
    else:
        length = sum(map(estimate_tokens, texts))
        written = settings.candidates * (2 * length + len(texts) * CANDIDATE_TOKENS)
        read = {kind: (frame[kind] - estimate_tokens(example.text)) * len(texts) + length for kind in requests}
        judged = settings.candidates * len(texts) * EVALUATION_TOKENS
        tokens = {
            "generator": {"input": read["generator"], "cached_input": 0, "output": written},
            "critic": {"input": read["critic"] + written, "cached_input": 0, "output": judged},
        }
        basis = "lengths of the problems"
    total = {name: repeats * sum(counts[name] for counts in tokens.values()) for name in TOKEN_FIELDS}
    prices = {kind: answered.prices(model) for kind, model in models.items()}
    cost = "unknown (give price_input and price_output)"
    if all(prices.values()):
        cost = f"${repeats * sum(prices[kind].cost(tokens[kind]) for kind in requests):,.2f}"
    return "\n".join(
        [
            *lines,
            "===== estimate =====",
            f"{len(problems):,} problems to ask, {excluded:,} excluded by the input screening; "
            f"{duplicates_line(problem_set.duplicates)}",
            f"All of them together: {total['input'] / 1e6:.2f} M input and {total['output'] / 1e6:.2f} M output "
            f"tokens, cost {cost}; from {basis}. Thinking tokens of a reasoning model come on top unless the ledger "
            "shows them.",
            f"Endpoint {settings.endpoint}, model {' and '.join(dict.fromkeys(models.values()))}, templates "
            f"{templates.version}.",
        ]
    )
