"""Log-normaliser and top K of a tile of logits.

On a GPU, `torch.logsumexp` and `torch.topk` read the tile several times over. Here one kernel reads it once and writes,
for every chunk of 64 columns, its maximum and its sum of exponentials: the log-normaliser follows from those, and the K
largest logits can only lie in the K chunks with the largest maxima.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# Columns that share one maximum. Finding the best chunks costs V / 64, searching them 64 K.
_CHUNK = 64
# Chunks that one program of the kernel reads: 4,096 logits, enough loads in flight to keep the memory busy.
_CHUNKS_PER_PROGRAM = 64

if triton is not None:

    @triton.jit
    def _chunk_kernel(
        logits, maxima, sums, vocab, num_chunks, stride, CHUNKS: tl.constexpr, CHUNK: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
        column = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        values = tl.load(logits + row * stride + column, mask=column < vocab, other=float("-inf"))
        maximum = tl.max(values, axis=1)
        # A chunk may hold nothing but -inf, and -inf - -inf is not a number.
        shift = tl.where(maximum == float("-inf"), 0.0, maximum)
        total = tl.sum(tl.exp(values - shift[:, None]), axis=1)
        where = row * num_chunks + chunk
        tl.store(maxima + where, maximum, mask=chunk < num_chunks)
        tl.store(sums + where, total, mask=chunk < num_chunks)


def _chunk_stats(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, _CHUNK)
    maxima = torch.empty((rows, num_chunks), dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(maxima)
    grid = (rows, triton.cdiv(num_chunks, _CHUNKS_PER_PROGRAM))
    _chunk_kernel[grid](
        logits, maxima, sums, vocab, num_chunks, logits.stride(0), CHUNKS=_CHUNKS_PER_PROGRAM, CHUNK=_CHUNK
    )
    return maxima, sums


def _topk_in_chunks(logits: torch.Tensor, maxima: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    # In rising order of column, so that equal logits are met in the order that a search of the whole row meets them.
    best = maxima.topk(k, dim=-1).indices.sort(dim=-1).values
    columns = best[:, :, None] * _CHUNK + torch.arange(_CHUNK, device=logits.device)
    columns = columns.flatten(1)
    beyond = columns >= logits.size(1)
    candidates = logits.gather(1, columns.clamp_(max=logits.size(1) - 1)).masked_fill_(beyond, float("-inf"))
    values, slots = candidates.topk(k, dim=-1)
    return values, columns.gather(1, slots)


def tile_topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-normaliser `[N, 1]` of fp32 logits `[N, V]`, the K largest of each row `[N, K]`, falling, and their ids.

    Which of several equal logits come last into the K is not specified."""
    # Where the K chunks would be most of the row, there is nothing to gain.
    if triton is None or not logits.is_cuda or 2 * k * _CHUNK > logits.size(1) or logits.stride(1) != 1:
        values, indices = logits.topk(k, dim=-1)
        return torch.logsumexp(logits, dim=-1, keepdim=True), values, indices
    maxima, sums = _chunk_stats(logits)
    values, indices = _topk_in_chunks(logits, maxima, k)
    return torch.logsumexp(maxima + sums.log(), dim=-1, keepdim=True), values, indices
