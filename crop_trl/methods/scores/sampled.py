"""What else than `log T - log S_old` may be added to the advantage of a sampled token."""

import torch

from ..context import SelectionContext, Signals
from ..divergence import shared_kl, topk_entropy


def _both(signals: Signals) -> tuple[torch.Tensor, torch.Tensor]:
    """`log T` and `log S_old` of the sampled tokens after the original prompt."""
    return signals["teacher/original"].sampled_logprobs, signals["student/original"].sampled_logprobs


def centred_gap(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """The gap with its expectation as a baseline: `log T - log S + KL(S || T)`.

    vOPD (arXiv 2605.07865), `src/opd_trainer.py` of holi-lab/vOPD. There the divergence is over the vocabulary, or over
    the student's 100 likeliest ids, renormalised; here over the ids that both returned and the rest as one."""
    teacher, student = _both(signals)
    baseline = shared_kl(signals["student/original"], signals["teacher/original"])
    ctx.measures["reverse_kl"] = baseline
    return teacher - student + baseline


def power_gap(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """The gap of powers of the probabilities, which is bounded: `T^alpha - S^alpha`.

    PowerOPD (arXiv 2606.17199), equations 3 and 4. The paper tries `alpha` from 0.1 to 500; the default is that of the
    authors' `run_poweropd.sh`. They leave out the token that stops, which counts here."""
    alpha = ctx.method_settings["alpha"]
    teacher, student = _both(signals)
    return (alpha * teacher).exp() - (alpha * student).exp()


def mixture_gap(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """The gap to a mixture of teacher and student: `log(alpha T / S + 1 - alpha)`, never below `log(1 - alpha)`.

    TOP-D, its paper's source in lying2020/agentic-rl-lab (`TrustRegionPD`), which has 0.1 and 0.2. Its reward alone:
    the paper also adds the mean of the later rewards, takes z-scores over a group, and uses a batch several times."""
    teacher, student = _both(signals)
    alpha = torch.full_like(teacher, ctx.method_settings["alpha"])
    return torch.logaddexp(teacher - student + alpha.log(), (-alpha).log1p())


def calibrated_gap(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """The gap less what mere praise or blame moves: `sign(g) max(0, |g| - lambda s)`, with s how far the teacher falls
    under one of the two prompts where g is above 0, else how far it rises.

    Cal-OPD (arXiv 2609.21619), `compute_calibrated_opd_advantage` of qiangqiang-he/OPD_Forge; `lambda` is that of the
    published run. The wording of praise and blame is ours; theirs cuts the loss at 10 too."""
    teacher, student = _both(signals)
    moved = [signals[f"teacher/{kind}"].sampled_logprobs - teacher for kind in ("praised", "blamed")]
    rise, fall = torch.maximum(*moved).clamp(min=0.0), -torch.minimum(*moved).clamp(max=0.0)
    gap = teacher - student
    dead_zone = ctx.method_settings["lambda"] * torch.where(gap > 0, fall, rise)
    ctx.measures["dead_zone"] = dead_zone
    return gap.sign() * (gap.abs() - dead_zone).clamp(min=0.0)


def verified_gap(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """The gap where it agrees with the reward: its positive part in right responses, its negative part in wrong ones.

    OPDVR (arXiv 2608.24696), README and scripts of LeapLabTHU/OPDVR; its implementation was not to be had. A response
    is right if the sum of its rewards is above 0."""
    teacher, student = _both(signals)
    gap = teacher - student
    right = torch.stack(list(ctx.rewards.values())).nansum(0) > 0
    return torch.where(right[:, None], gap.clamp(min=0.0), gap.clamp(max=0.0))


def uncertainty_penalty(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """From `least` for the surest of the kept tokens to `most` for the least sure, by the student's entropy.

    OPSA (arXiv 2608.31046), `opsa.py` of DripNowhy/On-Policy-Self-Adaptation. There the least likely tokens are chosen,
    and their entropies compared, over the batch of one process; here chosen within each response, by the budget, and
    compared over the batch of all processes. Entropies are of K entries and not of the vocabulary."""
    own, entropy = ctx.method_settings, topk_entropy(signals["student/original"])
    ctx.measures["student_entropy"] = entropy
    kept = ctx.pooled(entropy, ctx.kept)
    low, high = (kept.min(), kept.max()) if kept.numel() else (entropy.new_zeros(()), entropy.new_zeros(()))
    rank = (entropy - low) / (high - low) if high - low > 1e-12 else torch.ones_like(entropy)
    return own["least"] + (own["most"] - own["least"]) * rank
