"""How a teacher that has seen more changes the advantages that rewards give, token by token."""

import math

import torch

from ..context import SelectionContext, Signals
from .relevance import has_variant


def _reweighted(evidence: torch.Tensor, ctx: SelectionContext) -> torch.Tensor:
    """What makes `A_base ((1 - l) + l clip(exp(sign(A_base) evidence)))` of A_base; l falls from step to step."""
    own, base = ctx.method_settings, ctx.advantages[:, None]
    share = own["lambda"] * (max(0.0, 1.0 - ctx.step / own["decay_steps"]) if own["decay_steps"] else 1.0)
    factor = (base.sign() * evidence).exp().clamp(1.0 - own["epsilon"], 1.0 + own["epsilon"])
    return base * share * (factor - 1.0)


def privileged_credit(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """The reward's advantage, more of it for tokens that a reader of the solution finds likelier where it is positive,
    and less where it is negative.

    RLSD (arXiv 2604.03128), `_build_stgca_advantages` of iie-ycx/RLSD. `decay_steps` is that of its script. There the
    reader has the student's weights of at most 20 steps before; here those of `teacher_source`."""
    privileged, student = signals["teacher/privileged"], signals["student/original"]
    return _reweighted(privileged.sampled_logprobs - student.sampled_logprobs, ctx)


def _contrast(signals: Signals) -> torch.Tensor:
    """How much likelier a token is after the right answer than after wrong ones, whose probabilities are averaged."""
    wrong = signals.variants("teacher/wrong")
    values, present = torch.stack([part.sampled_logprobs for part in wrong]), torch.stack(list(map(has_variant, wrong)))
    mean = values.masked_fill(~present, -math.inf).logsumexp(0) - present.sum(0).to(values.dtype).log()
    return signals["teacher/right"].sampled_logprobs - mean


def contrastive_credit(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """The reward's advantage, more of it for tokens that the right answer makes likelier than a wrong one where it is
    positive, and less where it is negative.

    CEPO (arXiv 2605.19436), `apply_cepo_weighting` of ahmedheakl/CEPO; the settings are those of its README. There the
    wrong answer is that of a rejected response of the group; here the rows hold it, and several are averaged."""
    return _reweighted(_contrast(signals), ctx)


def _modulation(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """What RLCSD adds to A_base where it says anything: `lambda tanh(e / tau)`, else 0."""
    own = ctx.method_settings
    added = own["lambda"] * torch.tanh(_contrast(signals) / own["tau"])
    return torch.where(added.abs() > own["delta"], added, 0.0)


def modulated_credit(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """The reward's advantage, with `lambda tanh(e / tau)` added but never past zero; e says how much likelier the right
    answer makes a token than wrong ones.

    RLCSD (arXiv 2606.11709), section on the method, with the settings of the paper. There the answers are those of
    other responses of the group; here the rows hold them."""
    base = ctx.advantages[:, None]
    return base.sign() * (base.abs() + base.sign() * _modulation(signals, ctx)).clamp(min=0.0) - base


def modulated_weight(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """Weights that make two means of the one over all kept tokens: of those that are left as they are, and `eta` times
    of those to which something is added. As in RLCSD's code the means are over the batch."""
    added = _modulation(signals, ctx)
    is_modulated = ctx.pooled(added, ctx.kept) != 0
    share = float(is_modulated.double().mean()) if is_modulated.numel() else 0.0
    modulated, others = ctx.method_settings["eta"] / max(share, 1e-12), 1.0 / max(1.0 - share, 1e-12)
    return torch.where(added != 0, torch.full_like(added, modulated), torch.full_like(added, others))


def is_rewarded(signals: Signals, ctx: SelectionContext) -> torch.Tensor:
    """Tokens of responses that are better or worse than others to the same prompt."""
    return (ctx.advantages != 0)[:, None].expand_as(ctx.loss_mask)
