"""What goes between a scorer and `crop-trl serve-teacher`: flat arrays, as the bytes of a safetensors file."""

from collections.abc import Sequence

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ..methods.context import TopKLogprobs

Ids = Sequence[Sequence[int]]


def _load(body: bytes, names: str) -> list[np.ndarray]:
    """The arrays of those names. Raises `ValueError` for anything else."""
    try:
        arrays = load(body)
    except SafetensorError as error:
        raise ValueError(f"{len(body)} bytes that are no arrays ({error})") from None
    if arrays.keys() != set(names.split()):
        raise ValueError(f"arrays {', '.join(sorted(arrays))} instead of {names.replace(' ', ', ')}")
    return [arrays[name] for name in names.split()]


def _lengths(sequences: Ids) -> np.ndarray:
    return np.fromiter(map(len, sequences), np.int32, len(sequences))


def pack_request(prompt_ids: Ids, completion_ids: Ids, top_k: int) -> bytes:
    """Sequences to be scored."""
    ids = np.concatenate([np.asarray(one, np.int32) for one in (*prompt_ids, *completion_ids)])
    lengths = np.stack([_lengths(prompt_ids), _lengths(completion_ids)])
    return save({"ids": ids, "lengths": lengths, "top_k": np.array([top_k], np.int32)})


def unpack_request(body: bytes) -> tuple[list[list[int]], list[list[int]], int]:
    """Prompts, completions and K. Raises `ValueError` for what is no request."""
    ids, lengths, top_k = _load(body, "ids lengths top_k")
    whole = all(array.dtype == np.int32 for array in (ids, lengths, top_k))
    if not whole or ids.ndim != 1 or lengths.ndim != 2 or len(lengths) != 2 or top_k.shape != (1,):
        raise ValueError("arrays of other shapes or types than a request has")
    if not lengths.size or lengths.min() < 1 or lengths.sum(dtype=np.int64) != len(ids) or ids.min() < 0 or top_k < 1:
        raise ValueError("lengths or ids that cannot be")
    parts = [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]
    return parts[: lengths.shape[1]], parts[lengths.shape[1] :], int(top_k[0])


def pack_reply(scored: TopKLogprobs, completion_ids: Ids, dtype: torch.dtype = torch.float32) -> bytes:
    """Scores, on the CPU, of the valid positions row by row, with the ids that they are of."""
    ids = np.concatenate([np.asarray(one, np.int32) for one in completion_ids])
    logprobs = {name: getattr(scored, name)[scored.mask].to(dtype).numpy() for name in ("logprobs", "sampled_logprobs")}
    return save({"ids": ids, "token_ids": scored.token_ids[scored.mask].int().numpy(), **logprobs})


def unpack_reply(body: bytes, completion_ids: Ids) -> list[np.ndarray]:
    """Ids, log-probabilities and those of the response tokens, of all positions. Raises `ValueError` for another's."""
    ids, *arrays = _load(body, "ids token_ids logprobs sampled_logprobs")
    sent = np.concatenate([np.asarray(one, np.int32) for one in completion_ids])
    if not np.array_equal(ids, sent) or any(len(array) != len(ids) for array in arrays):
        raise ValueError(f"scores of {len(ids)} other tokens than the {len(sent)} that were sent")
    return [array.astype(np.float32) if array.dtype == np.float16 else array for array in arrays]
