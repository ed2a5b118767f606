"""From a batch of rollouts to the signals that methods ask for.

A signal is named `scorer/prompt`: which model reads the response, and after which prompt. The response's token ids are
the same for all; only the prompt before them changes.
"""

from collections.abc import Mapping, Sequence

from .scoring import Scorer, TopKLogprobs

# Which dataset column holds each kind of prompt.
PROMPT_COLUMNS = {
    "original": "prompt",
    "paraphrase": "paraphrase_prompt",
    "counterfactual": "counterfactual_prompt",
}


def _split(need: str) -> tuple[str, str]:
    scorer, _, kind = need.partition("/")
    if kind not in PROMPT_COLUMNS:
        raise ValueError(f"Unknown signal {need!r}: the prompt is one of {', '.join(PROMPT_COLUMNS)}.")
    return scorer, kind


def prompt_kinds(needs: Sequence[str]) -> list[str]:
    """Kinds of prompt that some signals are scored after, `"original"` first, each once."""
    return list(dict.fromkeys(["original", *(_split(need)[1] for need in needs)]))


def prompt_columns(needs: Sequence[str]) -> list[str]:
    """Dataset columns that hold those prompts."""
    return [PROMPT_COLUMNS[kind] for kind in prompt_kinds(needs)]


def collect_signals(
    needs: Sequence[str],
    scorers: Mapping[str, Scorer],
    prompt_ids: Mapping[str, Sequence[Sequence[int]]],
    completion_ids: Sequence[Sequence[int]],
) -> dict[str, TopKLogprobs]:
    """
    Score the responses after every prompt that is asked for.

    All prompts of one scorer go to it as a single list, so that it can batch them by length together.

    Args:
        needs (sequence of `str`):
            Names of signals.
        scorers (mapping from `str` to [`Scorer`]):
            By the part of a name before the slash.
        prompt_ids (mapping from `str` to B lists of token ids):
            By kind of prompt.
        completion_ids (B lists of token ids):
            The responses.

    Returns:
        `dict[str, TopKLogprobs]`: one entry for each need, `[B, T, K]`, aligned on the response.
    """
    batch = len(completion_ids)
    by_scorer: dict[str, list[str]] = {}
    for need in dict.fromkeys(needs):
        scorer, kind = _split(need)
        by_scorer.setdefault(scorer, []).append(kind)
    signals = {}
    for scorer, kinds in by_scorer.items():
        prompts = [ids for kind in kinds for ids in prompt_ids[kind]]
        scored = scorers[scorer].score(prompts, list(completion_ids) * len(kinds))
        for position, kind in enumerate(kinds):
            signals[f"{scorer}/{kind}"] = scored.rows(slice(position * batch, (position + 1) * batch))
    return signals
