"""Scoring behind decoding: responses that are finished are scored while others are still being written.

An experiment on one GPU: the engine decodes in the main thread, the teacher scores in another, on a CUDA stream of its
own. `step.py --ahead` measures what it brings.
"""

import queue
import threading
from contextlib import nullcontext

import torch

from crop_trl.scoring import TopKLogprobs


class AheadScorer:
    """
    Wraps a scorer. Rows that a rollout finishes early are scored in a thread; `score` waits, and scores what is left.

    Args:
        scorer ([`~crop_trl.scoring.local.LocalScorer`]): What scores.
    """

    def __init__(self, scorer):
        self.scorer = scorer
        self.enabled = False
        self.ahead = 0

    @property
    def stats(self):
        """Those of the scorer inside."""
        return self.scorer.stats

    def begin(self, prompt_ids: list[list[list[int]]]) -> None:
        """Start a rollout; for each row, the token ids of every prompt to score it after."""
        self._done: dict[tuple, tuple[TopKLogprobs, int]] = {}
        self._prompts, self._queue, self.ahead, self._error = prompt_ids, queue.SimpleQueue(), 0, None
        self._thread = threading.Thread(target=self._work, daemon=True) if self.enabled else None
        if self._thread is not None:
            self._thread.start()

    def finished(self, row: int, completion_ids: list[int]) -> None:
        """A response is complete."""
        if self._thread is not None:
            self._queue.put((row, list(completion_ids)))

    def _work(self) -> None:
        stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        waiting: list[tuple[list[int], list[int]]] = []
        open_ = True
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                while open_:
                    item = self._queue.get()
                    open_ = item is not None
                    if open_:
                        row, ids = item
                        waiting += [(prompt, ids) for prompt in self._prompts[row]]
                    # A full batch at a time; what is left at the end goes with the last responses.
                    if open_ and sum(len(p) + len(c) for p, c in waiting) >= self.scorer.tokens_per_batch:
                        self._score(waiting)
                        self.ahead += len(waiting)
                        waiting = []
                        if stream is not None:
                            stream.synchronize()
        except Exception as error:
            self._error = error

    def _score(self, pairs) -> None:
        scored = self.scorer.score([p for p, _ in pairs], [c for _, c in pairs])
        for i, (prompt, completion) in enumerate(pairs):
            self._done[tuple(prompt), tuple(completion)] = scored, i

    def score(self, prompt_ids, completion_ids) -> TopKLogprobs:
        """See [`~crop_trl.scoring.Scorer`]."""
        if getattr(self, "_thread", None) is None:
            return self.scorer.score(prompt_ids, completion_ids)
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        pairs = list(zip(prompt_ids, completion_ids, strict=True))
        missing = [pair for pair in pairs if (tuple(pair[0]), tuple(pair[1])) not in self._done]
        if missing:
            self._score(missing)
        width = max(len(ids) for ids in completion_ids)
        parts = [self._done[tuple(p), tuple(c)] for p, c in pairs]
        full = {}
        for name in ("token_ids", "logprobs", "sampled_logprobs", "mask"):
            first = getattr(parts[0][0], name)
            full[name] = first.new_zeros((len(parts), width, *first.shape[2:]))
            for row, (scored, i) in enumerate(parts):
                length = len(completion_ids[row])
                full[name][row, :length] = getattr(scored, name)[i, :length]
        return TopKLogprobs(**full)


def watch(llm, finished) -> None:
    """Call `finished(index of the prompt, completion_ids)` whenever a vLLM engine completes a response."""
    generate, step = llm.generate, llm.llm_engine.step
    first = 0

    def numbered(*args, **kwargs):
        nonlocal first
        first = llm.request_counter.counter
        return generate(*args, **kwargs)

    def watched():
        outputs = step()
        for output in outputs:
            if output.finished:
                finished(int(output.request_id) - first, list(output.outputs[0].token_ids))
        return outputs

    llm.generate, llm.llm_engine.step = numbered, watched
