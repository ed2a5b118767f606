"""The mathematics once more, slow and obvious: Python floats, dictionaries, one position at a time.

A distribution is a dictionary from token id to log-probability, the entries that were returned. Nothing here imports
the package, so that a mistake there cannot be repeated here.

Also what several test modules share: the stored cases in `golden/` and the small stand-in for a scored response.
"""

import json
import math
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import torch

GOLDEN = Path(__file__).parent / "golden"
CASES = ("case_small", "case_k4_ratio05")
# The bound each precision is held to.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


# --- One position -----------------------------------------------------------------------------------------------------


def masses(dist: dict[int, float]) -> dict[int, float]:
    return {token: math.exp(logprob) for token, logprob in dist.items()}


def left_over(dist: dict[int, float]) -> float:
    return min(1.0, max(0.0, 1.0 - math.fsum(masses(dist).values())))


def kl(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q) if a > 0)


def jsd(p: dict[int, float], q: dict[int, float]) -> float:
    support = sorted(set(p) | set(q))
    ps = [masses(p).get(token, 0.0) for token in support] + [left_over(p)]
    qs = [masses(q).get(token, 0.0) for token in support] + [left_over(q)]
    mean = [(a + b) / 2 for a, b in zip(ps, qs)]
    return (kl(ps, mean) + kl(qs, mean)) / 2


def entropy(p: dict[int, float]) -> float:
    if len(p) == 1:
        return 0.0
    top = max(p.values())
    relative = [math.exp(logprob - top) for logprob in p.values()]
    shares = [value / math.fsum(relative) for value in relative]
    return -math.fsum(share * math.log(share) for share in shares if share > 0) / math.log(len(p))


def forward_kl(teacher: dict[int, float], student: dict[int, float], floor: float = 1e-8) -> float:
    support = sorted(set(teacher) | set(student))
    t = [max(floor, masses(teacher).get(token, 0.0)) for token in support]
    s = [max(floor, masses(student).get(token, 0.0)) for token in support]
    return kl([a / math.fsum(t) for a in t], [b / math.fsum(s) for b in s])


def overlap_mass(teacher: dict[int, float], student: dict[int, float]) -> float:
    return math.fsum(mass for token, mass in masses(teacher).items() if token in student)


def target_divergence(teacher: dict[int, float], student_logits: list[float], kind: str) -> float:
    """From the student's whole logits; entries beyond them are of the teacher alone."""
    top = max(student_logits)
    total = top + math.log(math.fsum(math.exp(z - top) for z in student_logits))
    q = [math.exp(z - total) for z in student_logits]
    shared = {token: mass for token, mass in masses(teacher).items() if token < len(q)}
    others = math.fsum(mass for token, mass in enumerate(q) if token not in shared)
    ps = [*shared.values(), max(0.0, 1.0 - math.fsum(shared.values()))]
    qs = [*(q[token] for token in shared), others]
    if kind == "jsd":
        mean = [(a + b) / 2 for a, b in zip(ps, qs)]
        return (kl(ps, mean) + kl(qs, mean)) / 2
    return kl(ps, qs) if kind == "forward" else kl(qs, ps)


# --- One response, or one batch ---------------------------------------------------------------------------------------


def budget(n: int, ratio: float, min_tokens: int = 1) -> int:
    return min(n, max(1, min_tokens, math.floor(Decimal(str(ratio)) * n)))


def keep_top(scores: list[float], mask: list[bool], ratio: float, min_tokens: int = 1) -> list[bool]:
    valid = [t for t, score in enumerate(scores) if mask[t] and math.isfinite(score)]
    if not valid:
        return [bool(m) for m in mask]
    ranked = sorted(valid, key=lambda t: (-scores[t], t))
    kept = set(ranked[: budget(len(valid), ratio, min_tokens)])
    return [t in kept for t in range(len(scores))]


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = math.ceil(position)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def quantile_normalize(x: list[list[float]], mask: list[list[bool]]) -> list[list[float]]:
    valid = [v for row, marks in zip(x, mask) for v, m in zip(row, marks) if m]
    low, high = quantile(valid, 0.05), quantile(valid, 0.95)
    return [
        [min(1.0, max(0.0, (v - low) / (high - low + 1e-8))) if m else 0.0 for v, m in zip(row, marks)]
        for row, marks in zip(x, mask)
    ]


def loss(new, old, teacher, base, mask, weights=None, lambda_opd=1.0, low=0.2, high=0.28, num_items=None, added=None):
    total, count = 0.0, 0
    for i, row in enumerate(mask):
        for t, selected in enumerate(row):
            if not selected:
                continue
            own = teacher[i][t] - old[i][t] if added is None else added[i][t]
            advantage = base[i] + lambda_opd * own
            if weights is not None:
                advantage *= weights[i][t]
            ratio = math.exp(new[i][t] - old[i][t])
            total += max(-ratio * advantage, -min(max(ratio, 1 - low), 1 + high) * advantage)
            count += 1
    return total / max(1, count if num_items is None else num_items)


# --- Shared by the test modules ---------------------------------------------------------------------------------------


@dataclass
class TopK:
    """What the measures read of a scored response."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    sampled_logprobs: torch.Tensor | None = None
    mask: torch.Tensor | None = None


def as_dicts(signal: TopK) -> list[list[dict[int, float]]]:
    """`[B][T]` dictionaries from token id to log-probability."""
    return [
        [dict(zip(ids, logprobs)) for ids, logprobs in zip(id_row, logprob_row)]
        for id_row, logprob_row in zip(signal.token_ids.tolist(), signal.logprobs.tolist())
    ]


def over_positions(measure, *signals: TopK) -> torch.Tensor:
    """A measure of this module at every position, as a float64 `[B, T]` tensor."""
    rows = zip(*(as_dicts(signal) for signal in signals))
    return torch.tensor([[measure(*at) for at in zip(*row)] for row in rows], dtype=torch.float64)


def random_topk(generator: torch.Generator, shape: tuple[int, int], vocab: int, k: int, dtype=torch.float64) -> TopK:
    """The `k` likeliest of `vocab` tokens, from flat to peaked; every tenth is all but impossible, or quite."""
    sharpness = 6 * torch.rand(*shape, 1, generator=generator, dtype=torch.float64)
    logits = sharpness * torch.randn(*shape, vocab, generator=generator, dtype=torch.float64)
    fate = torch.rand(*shape, vocab, generator=generator)
    logits[fate < 0.05] -= 200.0
    logits[fate > 0.95] = -math.inf
    logits[..., 0] = logits[..., 0].clamp(min=-5.0)
    top = logits.log_softmax(-1).topk(min(k, vocab), dim=-1)
    return TopK(top.indices, top.values.to(dtype))


def load_case(name: str, dtype: torch.dtype) -> tuple[dict, dict[str, TopK], torch.Tensor]:
    """A stored case: its raw content, its signals by the names that methods use, and its loss mask."""
    case = json.loads((GOLDEN / f"{name}.json").read_text())
    sampled = {
        "teacher/original": torch.tensor(case["logprobs"]["teacher"], dtype=dtype),
        "student/original": torch.tensor(case["logprobs"]["old"], dtype=dtype),
    }
    signals = {
        f"{scorer}/{prompt}": TopK(
            torch.tensor(entry["ids"]),
            torch.tensor(entry["logprobs"], dtype=dtype),
            sampled.get(f"{scorer}/{prompt}"),
        )
        for scorer in ("teacher", "student")
        for prompt, entry in case[scorer].items()
    }
    signals["teacher/negative"] = TopK(
        torch.zeros(0), torch.zeros(0), torch.tensor(case["logprobs"]["teacher_negative"], dtype=dtype)
    )
    return case, signals, torch.tensor(case["loss_mask"])


def assert_close(actual: torch.Tensor, expected, dtype: torch.dtype) -> None:
    """Within the bound of `dtype`, absolutely, and in that precision."""
    assert actual.dtype == dtype
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=0.0, atol=TOLERANCE[dtype])
