"""Reading what a vLLM server answers to a request for prompt log-probabilities."""

import json
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter

import numpy as np

from ..retries import Transient
from .wire import unpack_reply

try:
    import orjson

    _loads = orjson.loads  # a third of the time per token
except ImportError:
    _loads = json.loads

_MOST_MASS = 1.05  # probability of the top K together, with the rounding of sixteen bits


class WrongReply(ValueError):
    """A complete answer to something other than what was asked; asking again does not help."""


def parse_json(body: bytes) -> dict:
    """A JSON object. Raises `Transient` for anything else, such as one that was cut off."""
    try:
        reply = _loads(body)
    except ValueError as error:
        raise Transient(f"{len(body)} bytes that are not JSON ({error})") from None
    if not isinstance(reply, dict):
        raise Transient(f"JSON that is no object but a {type(reply).__name__}")
    return reply


def read_topk(reply: dict, sent: Sequence[int], first: int, top_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids [T, K], their log-probabilities, most likely first, and those of the T tokens from `first` on."""
    try:
        choice = reply["choices"][0]
        fields = {name: choice.get(name) for name in ("prompt_token_ids", "prompt_logprobs")}
        returned, entries = (field if field is None else list(field) for field in fields.values())
    except (KeyError, IndexError, TypeError, AttributeError):
        raise Transient(f"JSON without a completion ({str(reply)[:100]})") from None
    for name, field in fields.items():
        if field is None:
            raise WrongReply(f"it returns no {name}; use a server of vLLM 0.22 or newer")
    if returned != list(sent):
        position = next((t for t, pair in enumerate(zip(returned, sent)) if pair[0] != pair[1]), -1)
        theirs, ours = (returned[position], sent[position]) if position >= 0 else (len(returned), len(sent))
        where = f"at position {position} of prompt and response" if position >= 0 else "in number"
        raise WrongReply(f"it scored other tokens than were sent: {where} it has {theirs} for {ours}")
    if len(entries) != len(sent):
        raise WrongReply(f"it returned log-probabilities for {len(entries)} of {len(sent)} tokens")
    try:
        return _to_arrays(entries[first:], np.asarray(sent[first:]), top_k)
    except WrongReply:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise Transient(f"log-probabilities of another form ({error})") from None


def read_scores(body: bytes, completions: Sequence[Sequence[int]], top_k: int) -> list[np.ndarray]:
    """The same of the answer of `crop-trl serve-teacher`, for all tokens of several responses. Raises as above."""
    try:
        found = unpack_reply(body, completions)
    except ValueError as error:
        raise Transient(str(error)) from None
    if found[0].shape[1] != top_k:
        raise WrongReply(f"it returned {found[0].shape[1]} of the {top_k} most likely tokens (`score_top_k`)")
    check_distributions(*found)
    return found


def _to_arrays(entries: Sequence[dict], targets: np.ndarray, top_k: int):
    counts = np.fromiter(map(len, entries), np.int64, len(entries))
    total = int(counts.sum())
    ids = np.fromiter(map(int, chain.from_iterable(entries)), np.int32, total)
    values = list(chain.from_iterable(map(dict.values, entries)))
    logprobs = np.fromiter(map(itemgetter("logprob"), values), np.float32, total)
    ranks = np.fromiter(map(itemgetter("rank"), values), np.int64, total)
    rows = np.repeat(np.arange(len(entries)), counts)

    sampled = ids == targets[rows]
    if (t := _where(np.bincount(rows[sampled], minlength=len(entries)) != 1)) is not None:
        raise WrongReply(f"it returned no log-probability for token {targets[t]} at response position {t}")
    # The sent token comes first in each dictionary. By rank it falls into place; as an extra entry it is not counted.
    top = np.bincount(rows[ranks <= top_k], minlength=len(entries))
    if (t := _where(top != top_k)) is not None:
        raise WrongReply(f"it returned {top[t]} of the {top_k} most likely tokens (`score_top_k`) at position {t}")
    order = np.lexsort((ranks, rows))
    keep = order[(np.cumsum(counts) - counts)[:, None] + np.arange(top_k)]
    kept, kept_ids, of_sampled = logprobs[keep], ids[keep], logprobs[sampled]
    check_distributions(kept_ids, kept, of_sampled)
    return kept_ids, kept, of_sampled


def check_distributions(ids: np.ndarray, logprobs: np.ndarray, sampled: np.ndarray) -> None:
    """Raise [`WrongReply`] unless `[T, K]` log-probabilities, and those of the tokens sent, may be of distributions."""
    if (t := _where(~np.isfinite(logprobs).all(-1) | (np.diff(logprobs, axis=-1) > 0).any(-1))) is not None:
        raise WrongReply(f"its log-probabilities at response position {t} do not fall with their rank")
    # Logits fall with their rank as well. A not-a-number in the sent token's is not less than anything.
    mass = np.exp(np.minimum(logprobs, 1.0)).sum(-1)
    if (t := _where((mass > _MOST_MASS) | ~(sampled <= logprobs[:, 0]) | (ids < 0).any(-1))) is not None:
        raise WrongReply(
            f"what it returned at response position {t} is no distribution over tokens (probability of the top "
            f"{logprobs.shape[1]} together {mass[t]:.3g}, lowest id {ids[t].min()}, log-probability of the token that "
            f"was sent {sampled[t]:.3g}); serve log-probabilities as vLLM does by default"
        )


def _where(wrong: np.ndarray) -> int | None:
    return int(wrong.argmax()) if wrong.any() else None
