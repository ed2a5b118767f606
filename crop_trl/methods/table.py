"""The selection methods, one row each, and the one way from teacher signals to what enters the loss.

The trainer computes the signals that a row names and nothing else, and never looks at a method's name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..prompts import NEGATIVE, split_signal
from . import scores
from .budget import select_top_b
from .context import Gather, SelectionContext, SelectionSettings, Signals, TokenFunction, TopKLogprobs


@dataclass(frozen=True)
class Method:
    """
    One row of the table of methods.

    Args:
        needs (`tuple[str, ...]`):
            Names of signals, `"teacher/KIND"` or `"student/KIND"`. A kind is a column `KIND_prompt` of the dataset,
            `original` (the column `prompt`), `empty` (the prompt without its problem) or `negative` (unrelated prompts;
            only the `sampled_logprobs`, averaged over them). The `target` is always among them.
        score (`Callable`, *optional*): `(signals, ctx) -> [B, T]`; the highest are kept. `None` keeps every token.
        weight (`Callable`, *optional*): `(signals, ctx) -> [B, T]`; multiplies the advantages.
        teacher_target (`Callable`, *optional*):
            `(signals, ctx) -> [B, T]`; replaces the teacher's log-probabilities of the sampled tokens in the loss, so
            that the top-K loss refuses the method.
        advantage (`Callable`, *optional*):
            `(signals, ctx) -> [B, T]`; replaces what the teacher adds to a token's advantage, `log T - log S_old`, and
            is multiplied by `lambda_opd` like that. The top-K loss refuses the method. The target is for logs then.
        keep (`Callable`, *optional*):
            `(signals, ctx) -> [B, T]` of booleans; the tokens that are kept, without a budget. With a `score` too,
            those that it ranks.
        target (`str`):
            The signal whose log-probabilities are the target in the loss, such as `"teacher/hint"` for a teacher that
            reads a prompt with a hint.
        settings (`dict`): The method's own settings with their defaults; the functions find them in
            `ctx.method_settings`, and `method_settings` in `CROPConfig` changes them.
        needs_rewards (`bool`): Whether it reads `ctx.rewards` or `ctx.advantages`, and so has no use without a reward.
        needs_advantages (`bool`): Whether it trains by `ctx.advantages` alone, so that a reward needs a weight too.
    """

    needs: tuple[str, ...] = ()
    score: TokenFunction | None = None
    weight: TokenFunction | None = None
    teacher_target: TokenFunction | None = None
    advantage: TokenFunction | None = None
    keep: TokenFunction | None = None
    target: str = "teacher/original"
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs_rewards: bool = False
    needs_advantages: bool = False

    def __post_init__(self):
        if self.target == "student/original" and self.advantage is None:
            raise ValueError("`target` 'student/original' would teach the student what it does; name another signal.")
        if self.teacher_target is not None and self.advantage is not None:
            raise ValueError("`teacher_target` and `advantage` replace the same term of the loss; give one of them.")
        object.__setattr__(self, "needs", tuple(dict.fromkeys((self.target, *self.needs))))
        for need in self.needs:
            split_signal(need)
        object.__setattr__(self, "needs_rewards", self.needs_rewards or self.needs_advantages)

    @property
    def has_distribution(self) -> bool:
        """Whether the target is a prediction of the teacher, and not a number for the sampled token alone."""
        own = self.teacher_target or self.advantage
        return own is None and split_signal(self.target)[1] != NEGATIVE

    @property
    def chooses(self) -> bool:
        """Whether some tokens are kept and others not."""
        return self.score is not None or self.keep is not None


@dataclass
class Selection:
    """
    What enters the loss.

    Args:
        mask (`torch.BoolTensor` of shape `[B, T]`): The tokens that are kept.
        scores (`torch.Tensor` of shape `[B, T]`, *optional*): What ranked them.
        weights (`torch.Tensor` of shape `[B, T]`, *optional*): Factors of the advantages.
        teacher_logprobs (`torch.Tensor` of shape `[B, T]`): Training target of the sampled tokens.
        teacher_advantages (`torch.Tensor` of shape `[B, T]`, *optional*):
            What the teacher adds to the advantages, where it is not `log T - log S_old`.
        measures (`dict[str, torch.Tensor]`): Named `[B, T]` quantities computed on the way.
    """

    mask: torch.Tensor
    scores: torch.Tensor | None
    weights: torch.Tensor | None
    teacher_logprobs: torch.Tensor
    measures: dict[str, torch.Tensor] = field(default_factory=dict)
    teacher_advantages: torch.Tensor | None = None


TEACHER_TRIPLET = ("teacher/original", "teacher/paraphrase", "teacher/counterfactual")
STUDENT_TRIPLET = ("student/original", "student/paraphrase", "student/counterfactual")

METHODS: dict[str, Method] = {
    # Every token.
    "opd": Method(),
    "iw-opd": Method(needs=("student/original",), weight=scores.importance_weight),
    "credit": Method(needs=("teacher/negative",), teacher_target=scores.contrastive_target),
    "vopd": Method(needs=("student/original",), advantage=scores.centred_gap),
    "poweropd": Method(needs=("student/original",), advantage=scores.power_gap, settings={"alpha": 5.0}),
    "top-d": Method(needs=("student/original",), advantage=scores.mixture_gap, settings={"alpha": 0.1}),
    "prune-opd": Method(
        needs=("student/original",),
        weight=scores.overlap_weight,
        settings={"overlap": 0.7, "drop": 0.01, "base": 0.5},
    ),
    # Some tokens, without a budget.
    "esr": Method(keep=scores.first_tokens, settings={"tokens": 100}),
    "fire-opd": Method(
        needs=("student/original",),
        keep=scores.likely_responses,
        weight=scores.confidence_weight,
        settings={"dropped": 0.2, "alpha": 1.0, "beta": 1.0},
    ),
    # Optimization need.
    "entropy": Method(needs=("student/original",), score=scores.entropy_score),
    "tip": Method(needs=("student/original",), score=scores.tip_score),
    "ta-opd": Method(needs=("student/original",), score=scores.ta_opd_score),
    "opsa": Method(
        target="student/original",
        score=scores.least_likely_score,
        advantage=scores.uncertainty_penalty,
        settings={"least": -0.5, "most": -1.0},
    ),
    # Task relevance.
    "crop": Method(needs=TEACHER_TRIPLET, score=scores.crop_score),
    "crop-max": Method(needs=TEACHER_TRIPLET, score=scores.crop_max_score),
    "crop-student": Method(needs=STUDENT_TRIPLET, score=scores.crop_student_score),
    "crop-soft": Method(needs=TEACHER_TRIPLET, weight=scores.crop_weight, settings={"floor": 0.5}),
    "crop-ent": Method(needs=(*TEACHER_TRIPLET, "student/original"), score=scores.crop_entropy_score),
    "credit-budgeted": Method(needs=("teacher/negative",), score=scores.contrast_score),
    # The teacher reads more than the student.
    "opsd": Method(target="teacher/privileged"),
    "pw-opsd": Method(
        target="teacher/privileged",
        weight=scores.late_weight,
        settings={"floor": 0.25, "middle": 0.3, "width": 0.1},
    ),
    "cal-opd": Method(
        needs=("teacher/original", "teacher/praised", "teacher/blamed", "student/original"),
        advantage=scores.calibrated_gap,
        settings={"lambda": 5.0},
    ),
    # Rewards.
    "opdvr": Method(needs=("student/original",), advantage=scores.verified_gap, needs_rewards=True),
    "rlsd": Method(
        needs=("student/original",),
        target="teacher/privileged",
        advantage=scores.privileged_credit,
        settings={"lambda": 0.5, "epsilon": 0.2, "decay_steps": 60},
        needs_advantages=True,
    ),
    "cepo": Method(
        needs=("teacher/wrong",),
        target="teacher/right",
        advantage=scores.contrastive_credit,
        settings={"lambda": 0.5, "epsilon": 0.5, "decay_steps": 25},
        needs_advantages=True,
    ),
    "rlcsd": Method(
        needs=("teacher/wrong",),
        target="teacher/right",
        advantage=scores.modulated_credit,
        weight=scores.modulated_weight,
        keep=scores.is_rewarded,
        settings={"lambda": 0.5, "tau": 1.3, "delta": 0.02, "eta": 0.5},
        needs_advantages=True,
    ),
    # Controls.
    "cf-opd": Method(needs=("teacher/counterfactual",), score=scores.semantic_divergence),
    "pc-opd": Method(needs=("teacher/paraphrase",), score=scores.negative_surface_divergence),
    "crop-bottom": Method(needs=TEACHER_TRIPLET, score=scores.reversed_crop_score),
    "random": Method(score=scores.random_score),
    "first": Method(score=scores.first_score),
    "last": Method(score=scores.last_score),
    "least-likely": Method(needs=("student/original",), score=scores.least_likely_score),
}


def register_method(name: str, method: Method) -> None:
    """
    Add a method to the table, so that `CROPConfig(method=name)` and `--method name` find it.

    Raises:
        `ValueError`: the name is taken, or `method` is not a [`Method`].
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"The name of a method must be a non-empty string, got {name!r}.")
    if name in METHODS or name == "base":
        raise ValueError(f"A method named {name!r} exists already; choose another name for yours.")
    if not isinstance(method, Method):
        raise ValueError(f"`register_method` takes a `Method`, got {type(method).__name__}.")
    METHODS[name] = method


def get_method(name: str) -> Method:
    """The row named `name`. Raises `ValueError`, listing the names there are, when it is unknown."""
    if name not in METHODS:
        raise ValueError(f"Unknown method {name!r}: choose one of {', '.join(sorted(METHODS))}.")
    return METHODS[name]


def own_settings(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A method's own settings, with what is given of them. Raises `ValueError` for a name that it does not have, and
    for what is no number where the default is one."""
    declared = get_method(name).settings
    unknown = [setting for setting in given if setting not in declared]
    if unknown:
        known = f"it has {', '.join(declared)}" if declared else "it has none"
        raise ValueError(f"Method {name!r} has no setting {unknown[0]!r} (`method_settings`); {known}.")
    for setting, value in given.items():
        if isinstance(declared[setting], int | float) and not isinstance(value, int | float):
            raise ValueError(f"`method_settings`: {setting!r} of method {name!r} must be a number, got {value!r}.")
    return {**declared, **given}


def settings_of(name: str, settings: SelectionSettings) -> SelectionSettings:
    """Settings without what `name` does not declare, for a method beside the one that they were made for."""
    own = {setting: v for setting, v in settings.method_settings.items() if setting in get_method(name).settings}
    return replace(settings, method_settings=own)


def _per_token(value: torch.Tensor | None, what: str, name: str, like: torch.Tensor) -> torch.Tensor | None:
    """Check that a method's function returned one number per token, and make it floating-point."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or value.shape != like.shape:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"The {what} of method {name!r} must be a tensor of shape {tuple(like.shape)}, got {got}.")
    return value if value.is_floating_point() else value.float()


def _check_ranked(score: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor, name: str, gather: Gather | None):
    """Raise `ValueError` where no token of any process has a finite score, unless it is the teacher that has none."""
    counts = torch.stack([mask.sum(), (mask & (torch.isfinite(score) | ~torch.isfinite(teacher))).sum()])
    candidates, ranked = (counts if gather is None else gather(counts)).view(-1, 2).sum(0).tolist()
    if candidates and not ranked:
        raise ValueError(f"Method {name!r} gives none of {candidates} tokens a finite score; mend its score function.")


def select(
    name: str,
    signals: Mapping[str, TopKLogprobs | Sequence[TopKLogprobs]],
    loss_mask: torch.Tensor,
    settings: SelectionSettings,
    step: int = 0,
    rows: torch.Tensor | None = None,
    gather: Gather | None = None,
    rewards: Mapping[str, torch.Tensor] | None = None,
    advantages: torch.Tensor | None = None,
) -> Selection:
    """
    From signals to what enters the loss; the trainer and every offline replay go through here.

    Args:
        name (`str`): Name of a method.
        signals ([`Signals`] or mapping):
            At least those that the method needs, aligned on the response; a list of them where a response was scored
            after several prompts of one kind.
        loss_mask (`torch.Tensor` of shape `[B, T]`): Non-zero where a token may be kept.
        settings (`SelectionSettings`): Budget and per-method settings.
        step (`int`, *optional*, defaults to `0`): Global step, for methods that draw.
        rows (`torch.Tensor` of shape `[B]`, *optional*):
            Index of each response in the global rollout batch; by default `0..B-1`.
        gather (`Callable`, *optional*): Concatenates valid values of all processes; `None` when this process is all.
        rewards (mapping of `torch.Tensor` of shape `[B]`, *optional*): By the name of their function, without weights.
        advantages (`torch.Tensor` of shape `[B]`, *optional*): What the rewards come to; by default zeros.

    Returns:
        [`Selection`]

    Raises:
        `ValueError`: unknown method or setting of it, signals or rewards that it needs are missing, or no token has a
            finite score.
    """
    method, signals = get_method(name), Signals(signals)
    missing = [need for need in method.needs if need not in signals]
    if missing:
        raise ValueError(f"Method {name!r} needs the signals {', '.join(missing)}, which were not computed.")
    if method.needs_rewards and not rewards:
        raise ValueError(f"Method {name!r} reads rewards, of which there are none; give the trainer a reward function.")
    if rows is None:
        rows = torch.arange(loss_mask.size(0))
    mask = loss_mask.bool()
    if advantages is None:
        advantages = torch.zeros(len(mask), device=mask.device)
    # Clones, so that a method that writes to what it is given changes nothing here.
    ctx = SelectionContext(
        mask.clone(),
        settings,
        step,
        rows,
        gather,
        method_settings=own_settings(name, settings.method_settings),
        rewards={reward: value.clone() for reward, value in (rewards or {}).items()},
        advantages=advantages.clone(),
    )
    plain_target = signals[method.target].sampled_logprobs.clone()

    def computed(what: str) -> torch.Tensor | None:
        function = getattr(method, what)
        return _per_token(function(signals, ctx), what, name, mask) if function else None

    keep, score = computed("keep"), computed("score")
    kept = mask if keep is None else mask & keep.bool()
    if score is not None:
        _check_ranked(score, plain_target, kept, name, gather)
        kept = select_top_b(score, kept, settings.retention_ratio, settings.min_tokens)
    ctx.kept = kept.clone()
    weights, target, teacher_advantages = map(computed, ("weight", "teacher_target", "advantage"))
    return Selection(
        mask=kept.clone(),
        scores=score,
        weights=weights,
        teacher_logprobs=plain_target if target is None else target,
        measures=ctx.measures,
        teacher_advantages=teacher_advantages,
    )
