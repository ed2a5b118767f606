"""Reading what a vLLM server answers to a request for prompt log-probabilities."""

import json
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter

import numpy as np

try:
    import orjson

    _loads = orjson.loads  # a third of the time per token
except ImportError:
    _loads = json.loads


# Probability of the top K together, with the rounding of sixteen bits.
_MOST_MASS = 1.05


class UnreadableReply(RuntimeError):
    """Not the JSON that was asked for, such as one that was cut off; asking again may help."""


class WrongReply(ValueError):
    """A complete answer to something other than what was asked; asking again does not help."""


def parse_json(body: bytes) -> dict:
    """A JSON object, or `UnreadableReply`."""
    try:
        reply = _loads(body)
    except ValueError as error:
        raise UnreadableReply(f"{len(body)} bytes that are not JSON ({error})") from None
    if not isinstance(reply, dict):
        raise UnreadableReply(f"JSON that is no object but a {type(reply).__name__}")
    return reply


def read_topk(reply: dict, sent: Sequence[int], first: int, top_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Turn the answer for one sequence into arrays.

    The server returns the K most likely tokens at each position, and the token that was sent as one more entry where it
    is not among them. That one gives the log-probability of the response token, and is not part of the top K.

    Args:
        reply (`dict`): The answer to `/v1/completions` with `prompt_logprobs` and `return_token_ids`.
        sent (sequence of `int`): Token ids of prompt and response, as they were sent.
        first (`int`): Where in `sent` the response of T tokens begins.
        top_k (`int`): K.

    Returns:
        `(token_ids [T, K] int32, logprobs [T, K] fp32, sampled_logprobs [T] fp32)`, most likely first.

    Raises:
        `UnreadableReply`: fields are missing altogether.
        `WrongReply`: the server scored other tokens, returned fewer than K entries somewhere, or numbers that are no
        log-probabilities.
    """
    try:
        choice = reply["choices"][0]
        returned, entries = choice.get("prompt_token_ids"), choice.get("prompt_logprobs")
        returned, entries = (None if field is None else list(field) for field in (returned, entries))
    except (KeyError, IndexError, TypeError, AttributeError):
        raise UnreadableReply(f"JSON without a completion ({str(reply)[:100]})") from None
    if returned is None or entries is None:
        missing = "prompt_token_ids" if returned is None else "prompt_logprobs"
        raise WrongReply(f"it returns no {missing}; use a server of vLLM 0.22 or newer")
    if returned != list(sent):
        both = enumerate(zip(returned, sent, strict=False))
        position = next((i for i, (theirs, ours) in both if theirs != ours), min(len(returned), len(sent)))
        raise WrongReply(
            f"it scored other tokens than were sent: at position {position} of prompt and response it has "
            f"{_at(returned, position)} for {_at(sent, position)}"
        )
    if len(entries) != len(sent):
        raise WrongReply(f"it returned log-probabilities for {len(entries)} of {len(sent)} tokens")
    try:
        return _to_arrays(entries[first:], np.asarray(sent[first:]), top_k)
    except WrongReply:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise UnreadableReply(f"log-probabilities of another form ({error})") from None


def _at(ids: Sequence[int], position: int):
    return ids[position] if position < len(ids) else "nothing"


def _to_arrays(entries: Sequence[dict], targets: np.ndarray, top_k: int):
    counts = np.fromiter(map(len, entries), np.int64, len(entries))
    total = int(counts.sum())
    ids = np.fromiter(map(int, chain.from_iterable(entries)), np.int32, total)
    values = list(chain.from_iterable(map(dict.values, entries)))
    logprobs = np.fromiter(map(itemgetter("logprob"), values), np.float32, total)
    ranks = np.fromiter(map(itemgetter("rank"), values), np.int64, total)
    rows = np.repeat(np.arange(len(entries)), counts)

    sampled = ids == targets[rows]
    found = np.bincount(rows[sampled], minlength=len(entries))
    if (found != 1).any():
        t = int((found != 1).argmax())
        raise WrongReply(f"it returned no log-probability for token {targets[t]} at response position {t}")

    # The sent token comes first in each dictionary. By rank it falls into place; as an extra entry it is not counted.
    top = np.bincount(rows[ranks <= top_k], minlength=len(entries))
    if (top != top_k).any():
        t = int((top != top_k).argmax())
        raise WrongReply(
            f"it returned {top[t]} of the {top_k} most likely tokens (`score_top_k`) at response position {t}"
        )
    order = np.lexsort((ranks, rows))
    starts = np.concatenate([[0], counts.cumsum()[:-1]]) if len(counts) else counts
    keep = order[starts[:, None] + np.arange(top_k)]
    kept = logprobs[keep]
    falling = np.isfinite(kept).all(-1) & (np.diff(kept, axis=-1) <= 0).all(-1)
    if not falling.all():
        t = int((~falling).argmax())
        raise WrongReply(f"its log-probabilities at response position {t} do not fall with their rank")
    # Logits fall with their rank as well. A not-a-number in the sent token's is not less than anything.
    mass = np.exp(np.minimum(kept, 1.0)).sum(-1)
    sound = (mass <= _MOST_MASS) & (logprobs[sampled] <= kept[:, 0]) & (ids[keep] >= 0).all(-1)
    if not sound.all():
        t = int((~sound).argmax())
        raise WrongReply(
            f"what it returned at response position {t} is no distribution over tokens (probability of the top {top_k} "
            f"together {mass[t]:.3g}, lowest id {ids[keep][t].min()}, log-probability of the token that was sent "
            f"{logprobs[sampled][t]:.3g}); serve log-probabilities as vLLM does by default"
        )
    return ids[keep], kept, logprobs[sampled]
