"""One short look at teacher, prompts and settings together, for what would not stop a run and keep the wrong tokens."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..prompts import check_rendering, generation_suffix, prompt_column, tokenize_variants
from . import Scorer
from .local import LocalScorer
from .signals import check_scored

# How far apart the scores of one sequence may be alone and in company, as the mean over its tokens (nats). The matrix
# products of another batch size add in another order, which rounding turns into differences of about a tenth of these.
TOLERANCES = {"float32": 2e-3, "float16": 0.05, "bfloat16": 0.2, "quantised": 0.5}
_RESPONSE_TOKENS = 64


def run_preflight(
    scorer: Scorer,
    row: Mapping[str, Any],
    kinds: Sequence[str],
    tokenize: Callable[[list], list[list[int]]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    top_k: int,
    num_tokens: int,
    student_ends: Iterable[int] | None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Check a teacher on one row, in two calls of `score`, warn when it ends a response otherwise than `student_ends`,
    and say what was found. Raises `ValueError` for prompts rendered unlike the original, fewer entries than K, scores
    that are not finite, or that depend on what else is in the batch."""
    prompts = {kind: tokenize_variants([row], kind, tokenize)[0] for kind in kinds}
    suffix = generation_suffix(tokenizer, row["prompt"], **(chat_template_kwargs or {}))
    for kind, several in prompts.items():
        for ids in several:
            check_rendering(prompt_column(kind), ids, suffix)
    teacher_ends = getattr(scorer, "ends", None)
    if student_ends is not None:
        _warn_of_ends(set(student_ends), teacher_ends, tokenizer)

    prompt = prompts["original"][0]
    others = [ids for kind in kinds for ids in prompts[kind]]
    response = others[-1][:_RESPONSE_TOKENS]
    last = num_tokens - 1  # any token of the vocabulary must be one that the teacher can score
    alone = scorer.score([prompt, prompt], [response, [last]])
    check_scored(alone, [response, [last]], "teacher")
    wanted = min(top_k, num_tokens)
    if alone.top_k < wanted:
        raise ValueError(
            f"`score_top_k` is {wanted}, but the teacher returns {alone.top_k} entries at each position; make it "
            "return as many."
        )
    sampled = alone.sampled_logprobs[0, : len(response)]
    if not (torch.isfinite(sampled).all() and torch.isfinite(alone.logprobs[0, : len(response)]).all()):
        raise ValueError("The teacher's log-probabilities are not finite; load it in bfloat16 (`teacher_init_kwargs`).")
    longer = [*response, *prompt][: 2 * _RESPONSE_TOKENS]
    company = scorer.score(
        [*others, prompt, prompt, prompt[-1:]], [*([longer] * len(others)), response, response[:1], response]
    )
    again = company.sampled_logprobs[len(others), : len(response)]
    drift, tolerance = (
        (sampled - again).abs().mean().item(),
        TOLERANCES.get(getattr(scorer, "precision", None), TOLERANCES["bfloat16"]),
    )
    if not drift <= tolerance:
        raise ValueError(
            f"The teacher's log-probabilities of a sequence depend on what is scored beside it: {drift:.2g} nats a "
            f"token apart, {tolerance:g} allowed; {getattr(scorer, 'remedy', 'mend the scorer')}."
        )
    if hasattr(scorer, "apart_from_own"):
        check_own_logits(scorer, prompt, response, "teacher")
    ends = "not known" if teacher_ends is None else ", ".join(map(str, sorted(teacher_ends)))
    return (
        f"teacher returns {alone.top_k} entries a position; a sequence alone and in company scores {drift:.1e} nats "
        f"apart ({tolerance:g} allowed); ids that end a response for it: {ends}"
    )


def check_own_logits(scorer: LocalScorer, prompt: Sequence[int], response: Sequence[int], who: str) -> None:
    """Raise `ValueError` unless a model in this process is scored as its own forward has it, on a short sequence."""
    prompt, response = prompt[-_RESPONSE_TOKENS:], response[: _RESPONSE_TOKENS // 4]
    apart, rounding = scorer.apart_from_own(prompt, response)
    if not apart <= TOLERANCES[scorer.precision] + rounding:
        model = type(getattr(scorer.model, "module", scorer.model)).__name__
        raise ValueError(
            f"The {who}'s log-probabilities are {apart:.2g} nats a token from what its own forward gives: {model} is "
            "built in a way that is not supported here; choose another model."
        )


def _warn_of_ends(student: set[int], teacher: set[int] | None, tokenizer) -> None:
    if teacher is None or student == teacher:
        return
    names = [", ".join(repr(tokenizer.decode([i])) for i in sorted(ends)) for ends in (student, teacher)]
    warnings.warn(
        f"The student ends a response with {names[0]} and the teacher with {names[1]}: the teacher may push the "
        "student away from ending its responses; set `stop_token_ids` to 'declared', by which all of them count as "
        "one, or give both the same `generation_config`.",
        stacklevel=4,
    )
