"""Measures on top-K distributions (the paper's equations "crop-residual-support" and "crop-jsd", and its baselines').

Each takes anything with `token_ids [B, T, K]` and `logprobs [B, T, K]` and returns `[B, T]`, in fp32 (float64 in,
float64 out). Values outside a signal's `mask` are meaningless and must be masked by the caller."""

import math

import torch


def _working(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs if logprobs.dtype == torch.float64 else logprobs.float()


def _mass_at(
    ids: torch.Tensor, other_ids: torch.Tensor, other_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.BoolTensor]:
    """Mass that the other side gives to each of `ids` (zero where it did not return the id), and whether it did."""
    sorted_ids, order = other_ids.contiguous().sort(dim=-1)
    sorted_probs = other_probs.gather(-1, order)
    # A binary search per id needs O(K log K) a position; comparing all pairs would allocate [B, T, K, K].
    slot = torch.searchsorted(sorted_ids, ids.contiguous()).clamp_(max=sorted_ids.size(-1) - 1)
    found = sorted_ids.gather(-1, slot) == ids
    # Membership is its own answer: a returned id whose probability underflows to zero is still in the support.
    return torch.where(found, sorted_probs.gather(-1, slot), torch.zeros_like(sorted_probs[..., :1])), found


def _js_terms(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Contribution of one category with masses `p` and `q` to the Jensen-Shannon divergence, in nats."""
    mean = 0.5 * (p + q)
    # 0 log 0 = 0, and a category that is empty on both sides must not divide by zero.
    safe = torch.where(mean > 0, mean, torch.ones_like(mean))
    return 0.5 * (torch.special.xlogy(p, p / safe) + torch.special.xlogy(q, q / safe))


def residual_mass(signal) -> torch.Tensor:
    """Probability outside the returned support, `1 - sum_k p_k`, clamped to [0, 1]. Shape `[B, T]`."""
    return (1.0 - _working(signal.logprobs).exp().sum(-1)).clamp(0.0, 1.0)


def topk_jsd(p, q) -> torch.Tensor:
    """
    Jensen-Shannon divergence on the union of two top-K supports plus one residual category.

    An id that one side did not return has mass 0 there; what each side has left over its own K entries forms the
    residual. Natural logarithm, so the value lies in [0, ln 2]. CROP paper, equations "crop-residual-support" and
    "crop-jsd".

    Args:
        p, q (`TopKLogprobs`): Distributions over the same vocabulary, aligned position by position. Their K may differ.

    Returns:
        `torch.Tensor` of shape `[B, T]`, in nats.
    """
    p_probs, q_probs = _working(p.logprobs).exp(), _working(q.logprobs).exp()
    q_on_p, _ = _mass_at(p.token_ids, q.token_ids, q_probs)
    _, counted = _mass_at(q.token_ids, p.token_ids, p_probs)
    shared_and_p = _js_terms(p_probs, q_on_p).sum(-1)
    # Ids on both supports were counted from p's side; from q's side only those that p lacks remain.
    only_q = _js_terms(torch.zeros_like(q_probs), q_probs).masked_fill(counted, 0.0).sum(-1)
    residual = _js_terms(residual_mass(p), residual_mass(q))
    return (shared_and_p + only_q + residual).clamp(0.0, math.log(2.0))


def topk_entropy(p) -> torch.Tensor:
    """Shannon entropy of the K probabilities renormalised, over log K: `[B, T]` in [0, 1], and 0 for K = 1."""
    logprobs = _working(p.logprobs)
    k = logprobs.size(-1)
    if k == 1:
        return torch.zeros_like(logprobs[..., 0])
    probs = torch.softmax(logprobs, dim=-1)
    return (torch.special.entr(probs).sum(-1) / math.log(k)).clamp(0.0, 1.0)


def topk_forward_kl(teacher, student, floor: float = 1e-8) -> torch.Tensor:
    """KL(teacher || student) on the union support, in nats.

    Both sides' masses are floored at `floor` and renormalised over the union, so ids that only one side returned keep
    the divergence finite (a decision that the paper leaves open). Shape `[B, T]`."""
    teacher_probs, student_probs = _working(teacher.logprobs).exp(), _working(student.logprobs).exp()
    student_on_teacher, _ = _mass_at(teacher.token_ids, student.token_ids, student_probs)
    _, on_both = _mass_at(student.token_ids, teacher.token_ids, teacher_probs)
    # The union, laid out as the teacher's K entries followed by the entries that only the student returned.
    t = torch.cat([teacher_probs, torch.zeros_like(student_probs)], dim=-1).clamp(min=floor)
    s = torch.cat([student_on_teacher, student_probs], dim=-1).clamp(min=floor)
    in_union = torch.cat([torch.ones_like(teacher_probs, dtype=torch.bool), ~on_both], dim=-1)
    t, s = t * in_union, s * in_union
    t = t / t.sum(-1, keepdim=True)
    s = s / s.sum(-1, keepdim=True)
    ratio = torch.where(in_union, t / torch.where(in_union, s, torch.ones_like(s)), torch.ones_like(t))
    return torch.special.xlogy(t, ratio).sum(-1)


def topk_overlap_mass(teacher, student) -> torch.Tensor:
    """Teacher probability on the ids that teacher and student both returned, not renormalised. Shape `[B, T]`."""
    teacher_probs = _working(teacher.logprobs).exp()
    _, shared = _mass_at(teacher.token_ids, student.token_ids, _working(student.logprobs))
    return (teacher_probs * shared).sum(-1)


def topk_overlap(p, q) -> torch.Tensor:
    """Share of the K ids of `p` that `q` returned too. Shape `[B, T]`."""
    _, shared = _mass_at(p.token_ids, q.token_ids, _working(q.logprobs))
    return shared.to(_working(p.logprobs).dtype).mean(-1)


def shared_kl(p, q) -> torch.Tensor:
    """KL(p || q) on the ids that both returned and one category for all others: `[B, T]`, in nats."""
    p_all, q_all = _working(p.logprobs).exp(), _working(q.logprobs).exp()
    q_probs, p_shared = _mass_at(p.token_ids, q.token_ids, q_all)
    _, q_shared = _mass_at(q.token_ids, p.token_ids, p_all)
    rounding = torch.finfo(q_all.dtype)

    def rest(probs, shared):
        # A sure model leaves less to others than the rounding of 1 minus a sum; what it returned is known exactly.
        alone, unseen = (probs * ~shared).sum(-1), 1.0 - probs.sum(-1)
        return alone + torch.where((unseen > 32 * rounding.eps) | (alone == 0), unseen.clamp(min=rounding.eps), 0.0)

    def term(p, q):
        return torch.special.xlogy(p, p / q.clamp(min=rounding.tiny))

    return term(p_all * p_shared, q_probs).sum(-1) + term(rest(p_all, p_shared), rest(q_all, q_shared))


def _forward(p, log_p, q, log_q):
    return p * (log_p - log_q)


def _reverse(p, log_p, q, log_q):
    return q * (log_q - log_p)


def _jensen_shannon(p, log_p, q, log_q):
    log_mean = torch.logaddexp(log_p, log_q) - math.log(2.0)
    return 0.5 * (_forward(p, log_p, q, log_mean) + _reverse(p, log_mean, q, log_q))


# From masses of the teacher (p) and the student (q) of a category to its share of the divergence, in nats.
TARGET_DIVERGENCES = {"forward": _forward, "reverse": _reverse, "jsd": _jensen_shannon}


def target_divergence(teacher_logprobs: torch.Tensor, student_logprobs: torch.Tensor, kind: str) -> torch.Tensor:
    """Divergence between teacher and student on the teacher's K entries and one more category for all others, `[...]`
    in nats, with gradient to the student: `forward` is KL(teacher || student), `reverse` KL(student || teacher), `jsd`
    their Jensen-Shannon divergence.

    `student_logprobs` `[..., K + 1]` are of the teacher's entries and, last, of all others. Those that the student's
    head does not have are huge negative numbers there: the teacher's mass on them joins the others. The teacher's rest
    is 1 minus its K probabilities, and no less than that is rounded by where its logarithm is taken."""
    log_p, log_q = _working(teacher_logprobs), _working(student_logprobs)
    absent = log_q < -1e29
    p = log_p.exp().masked_fill(absent[..., :-1], 0.0)
    rest = (1.0 - p.sum(-1, keepdim=True)).clamp(0.0, 1.0)
    log_p = torch.cat([log_p, rest.clamp(min=torch.finfo(rest.dtype).eps).log()], dim=-1)
    p = torch.cat([p, rest], dim=-1).masked_fill(absent, 0.0)
    return TARGET_DIVERGENCES[kind](p, log_p, log_q.exp(), log_q).sum(-1)
