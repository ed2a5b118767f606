"""The selection methods, one row each, and the one way from teacher signals to what enters the loss.

A method names the signals it needs and gives up to three functions of them: a `score` ranks positions (the top share
of each response is kept), a `weight` scales their advantages, a `teacher_target` replaces the teacher's log-probability
of the sampled token. A method without a score trains every token. The trainer computes the named signals and nothing
else, and never looks at a method's name.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from . import scores
from .selection import Gather, select_top_b


@dataclass(frozen=True)
class SelectionSettings:
    """
    What a user can set about selection.

    Args:
        retention_ratio (`float`): Nominal share of each response that is trained, in (0, 1].
        min_tokens (`int`): Fewest tokens kept in a response.
        seed (`int`): Seed of methods that draw.
        iw_max_weight (`float`): Largest weight of the importance-weighted method.
        credit_lambda (`float`, *optional*): Strength of the contrast; `None` takes the method's own.
    """

    retention_ratio: float = 0.2
    min_tokens: int = 1
    seed: int = 42
    iw_max_weight: float = 1.5
    credit_lambda: float | None = None


@dataclass
class SelectionContext:
    """
    What a method's functions see beside the signals.

    Args:
        loss_mask (`torch.BoolTensor` of shape `[B, T]`): Positions that may be trained.
        settings (`SelectionSettings`): The user's settings.
        step (`int`): Global optimizer step.
        rows (`torch.LongTensor` of shape `[B]`): Index of each response in the global rollout batch.
        gather (`Callable`, *optional*): Concatenates 1-D values of all processes; see `quantile_normalize`.
        measures (`dict[str, torch.Tensor]`): Filled by the functions with `[B, T]` quantities worth logging or
            plotting, under the name they should carry there.
    """

    loss_mask: torch.Tensor
    settings: SelectionSettings
    step: int
    rows: torch.Tensor
    gather: Gather | None = None
    measures: dict[str, torch.Tensor] = field(default_factory=dict)


Signals = dict[str, object]
TokenFunction = Callable[[Signals, SelectionContext], torch.Tensor]


@dataclass(frozen=True)
class Method:
    """
    One row of the table of methods.

    Args:
        needs (`tuple[str, ...]`):
            Names of signals beside `"teacher/original"`, which holds the training target and is always there:
            `"teacher/paraphrase"`, `"teacher/counterfactual"`, `"teacher/negative"` (after unrelated prompts; only its
            `sampled_logprobs`, averaged over them), and the first three prompts with `"student/"`.
        score (`Callable`, *optional*):
            `(signals, ctx) -> [B, T]`; the highest are kept. `None` keeps every token.
        weight (`Callable`, *optional*):
            `(signals, ctx) -> [B, T]`; multiplies the advantages.
        teacher_target (`Callable`, *optional*):
            `(signals, ctx) -> [B, T]`; replaces the teacher's log-probabilities in the loss.
    """

    needs: tuple[str, ...] = ()
    score: TokenFunction | None = None
    weight: TokenFunction | None = None
    teacher_target: TokenFunction | None = None

    def __post_init__(self):
        if "teacher/original" not in self.needs:
            object.__setattr__(self, "needs", ("teacher/original", *self.needs))


@dataclass
class Selection:
    """
    What enters the loss.

    Args:
        mask (`torch.BoolTensor` of shape `[B, T]`): The tokens that are trained.
        scores (`torch.Tensor` of shape `[B, T]`, *optional*): What ranked them.
        weights (`torch.Tensor` of shape `[B, T]`, *optional*): Factors of the advantages.
        teacher_logprobs (`torch.Tensor` of shape `[B, T]`): Training target of the sampled tokens.
        measures (`dict[str, torch.Tensor]`): Named `[B, T]` quantities computed on the way.
    """

    mask: torch.Tensor
    scores: torch.Tensor | None
    weights: torch.Tensor | None
    teacher_logprobs: torch.Tensor
    measures: dict[str, torch.Tensor] = field(default_factory=dict)


TEACHER_TRIPLET = ("teacher/original", "teacher/paraphrase", "teacher/counterfactual")
STUDENT_TRIPLET = ("student/original", "student/paraphrase", "student/counterfactual")

METHODS: dict[str, Method] = {
    # Every token.
    "opd": Method(),
    "iw-opd": Method(needs=("student/original",), weight=scores.importance_weight),
    "credit": Method(needs=("teacher/negative",), teacher_target=scores.contrastive_target),
    # Optimization need.
    "entropy": Method(needs=("student/original",), score=scores.entropy_score),
    "tip": Method(needs=("student/original",), score=scores.tip_score),
    "ta-opd": Method(needs=("student/original",), score=scores.ta_opd_score),
    # Task relevance.
    "crop": Method(needs=TEACHER_TRIPLET, score=scores.crop_score),
    "crop-max": Method(needs=TEACHER_TRIPLET, score=scores.crop_max_score),
    "crop-student": Method(needs=STUDENT_TRIPLET, score=scores.crop_student_score),
    "crop-ent": Method(needs=(*TEACHER_TRIPLET, "student/original"), score=scores.crop_entropy_score),
    "credit-budgeted": Method(
        needs=("teacher/negative",),
        score=scores.strong_contrastive_target,
        teacher_target=scores.strong_contrastive_target,
    ),
    # Controls.
    "cf-opd": Method(needs=("teacher/counterfactual",), score=scores.semantic_divergence),
    "pc-opd": Method(needs=("teacher/paraphrase",), score=scores.negative_surface_divergence),
    "crop-bottom": Method(needs=TEACHER_TRIPLET, score=scores.reversed_crop_score),
    "random": Method(score=scores.random_score),
}


def register_method(name: str, method: Method) -> None:
    """
    Add a method to the table, so that `CROPConfig(method=name)` and `--method name` find it.

    Raises:
        `ValueError`: the name is taken, or `method` is not a [`Method`].
    """
    if name in METHODS:
        raise ValueError(f"A method named {name!r} exists already; choose another name for yours.")
    if not isinstance(method, Method):
        raise ValueError(f"`register_method` takes a `Method`, got {type(method).__name__}.")
    METHODS[name] = method


def get_method(name: str) -> Method:
    """The row named `name`. Raises `ValueError`, listing the names there are, when it is unknown."""
    if name not in METHODS:
        raise ValueError(f"Unknown method {name!r}: choose one of {', '.join(sorted(METHODS))}.")
    return METHODS[name]


def select(
    name: str,
    signals: Signals,
    loss_mask: torch.Tensor,
    settings: SelectionSettings,
    step: int = 0,
    rows: torch.Tensor | None = None,
    gather: Gather | None = None,
) -> Selection:
    """
    From signals to what enters the loss; the trainer and every offline replay go through here.

    Args:
        name (`str`):
            Name of a method.
        signals (`dict[str, TopKLogprobs]`):
            At least those that the method needs, aligned on the response; a list of them where a response was scored
            after several prompts of one kind.
        loss_mask (`torch.Tensor` of shape `[B, T]`):
            Non-zero where a token may be trained.
        settings (`SelectionSettings`):
            Budget and per-method settings.
        step (`int`, *optional*, defaults to `0`):
            Global step, for methods that draw.
        rows (`torch.Tensor` of shape `[B]`, *optional*):
            Index of each response in the global rollout batch; by default `0..B-1`.
        gather (`Callable`, *optional*):
            Concatenates valid values of all processes; `None` when this process is all.

    Returns:
        [`Selection`]

    Raises:
        `ValueError`: unknown method, or a signal that it needs is missing.
    """
    method = get_method(name)
    missing = [need for need in method.needs if need not in signals]
    if missing:
        raise ValueError(f"Method {name!r} needs the signals {', '.join(missing)}, which were not computed.")
    if rows is None:
        rows = torch.arange(loss_mask.size(0))
    ctx = SelectionContext(loss_mask.bool(), settings, step, rows, gather)
    score = method.score(signals, ctx) if method.score else None
    weights = method.weight(signals, ctx) if method.weight else None
    target = method.teacher_target(signals, ctx) if method.teacher_target else None
    return Selection(
        mask=ctx.loss_mask.clone()
        if score is None
        else select_top_b(score, ctx.loss_mask, settings.retention_ratio, settings.min_tokens),
        scores=score,
        weights=weights,
        teacher_logprobs=signals["teacher/original"].sampled_logprobs if target is None else target,
        measures=ctx.measures,
    )


__all__ = [
    "METHODS",
    "Method",
    "Selection",
    "SelectionContext",
    "SelectionSettings",
    "get_method",
    "register_method",
    "select",
]
