"""Scoring while the engine still writes: teachers on other cards read each response as soon as it is finished."""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..checks import told_of
from ..config import CROPConfig
from ..methods import TopKLogprobs
from ..prompts import ORIGINAL, TokenIds, split_signal
from ..scoring import Scorer
from ..scoring.placement import MODEL
from ..scoring.signals import check_scored, place, who_reads


class AheadScorer:
    """Scores in a thread what is finished, and the rest when it is asked: like `scorer`, but in other batches."""

    def __init__(self, scorer: Scorer, name: str):
        self.scorer, self.name = scorer, name
        self._thread: threading.Thread | None = None
        self._scored: list[TopKLogprobs] = []
        self._places: dict[tuple, tuple[int, int]] = {}  # of prompt and response: which of those, and its row there

    def begin(self, prompts: Mapping[tuple, Iterable[tuple]]) -> None:
        """Take responses from now on; to each original prompt, those after which its responses are read."""
        self._prompts, self._finished, self._error = prompts, queue.SimpleQueue(), None
        # A daemon: a server that hangs must not keep the program from ending.
        self._thread = threading.Thread(target=self._work, args=(self._finished,), name="scoring ahead", daemon=True)
        self._thread.start()

    def finished(self, prompt: TokenIds, completion: TokenIds) -> None:
        """Take a response; those to unknown prompts are somebody else's."""
        self._finished.put([(read, tuple(completion)) for read in self._prompts.get(tuple(prompt), ())])

    def _work(self, finished: queue.SimpleQueue) -> None:
        """Score all that came in the meantime, until `None` comes."""
        try:
            several: list | None = []
            while several is not None:
                waiting = []
                while (several := finished.get()) is not None:
                    waiting += several
                    if finished.empty():
                        break
                self._score(waiting)
        except BaseException as error:  # raised again by the thread that waits
            self._error = error

    def _score(self, pairs: Sequence[tuple]) -> None:
        if not pairs:
            return
        prompts, completions = zip(*pairs)
        scored = self.scorer.score(prompts, completions)
        check_scored(scored, completions, self.name)
        self._places |= {pair: (len(self._scored), row) for row, pair in enumerate(pairs)}
        self._scored.append(scored)

    def score(self, prompt_ids: Sequence[TokenIds], completion_ids: Sequence[TokenIds]) -> TopKLogprobs:
        """See [`~crop_trl.scoring.local.LocalScorer.score`]."""
        if self._thread is not None:
            self._finished.put(None)
            self._thread.join()
            self._thread = None
            if self._error is not None:
                raise self._error
        pairs = list(zip(map(tuple, prompt_ids), map(tuple, completion_ids), strict=True))
        self._score([pair for pair in pairs if pair not in self._places])
        by_batch = defaultdict(list)
        for row, pair in enumerate(pairs):
            number, there = self._places[pair]
            by_batch[number].append((row, there))
        whole, longest = None, max(map(len, completion_ids))
        for number, both in by_batch.items():
            rows, there = map(list, zip(*both))
            part = self._scored[number].rows((there, slice(longest)))
            whole = place(whole, part, rows, len(pairs), longest)
        self._scored, self._places = [], {}
        return whole


class Ahead:
    """The teachers of a run, told by its engine what is finished."""

    def __init__(self, trainer):
        self.scorers = {name: AheadScorer(scorer, name) for name, scorer in trainer.teachers.items()}
        self._reading: list[AheadScorer] = []
        engine = trainer.vllm_generation
        if engine.mode == "server":
            engine.vllm_client.generate = one_by_one(engine.vllm_client, self.finished)
        else:
            watch(engine.llm.llm_engine, self.finished)

    def begin(self, needs: Sequence[str], prompts: Mapping[str, Sequence[Sequence[TokenIds]]], own: Sequence[str]):
        """A rollout begins, whose responses are going to be read as [`collect_signals`] is asked to."""
        asked = who_reads(needs, self.scorers, prompts, own)
        self._reading = [self.scorers[name] for name in asked if name in self.scorers and asked[name]]
        for scorer in self._reading:
            expected = defaultdict(dict)  # without the same prompt twice, for its several responses
            for need, m, rows in asked[scorer.name]:
                for row in rows:
                    read = tuple(prompts[split_signal(need)[1]][row][m])
                    expected[tuple(prompts[ORIGINAL][row][0])][read] = None
            scorer.begin(expected)

    def finished(self, prompt: TokenIds, completion: TokenIds) -> None:
        """A response is complete."""
        for scorer in self._reading:
            scorer.finished(prompt, completion)


def watch(engine, finished: Callable[[TokenIds, TokenIds], None]) -> None:
    """Let an engine in this process tell of each response that is finished."""
    step = engine.step

    def watched():
        outputs = step()
        for output in outputs:
            if output.finished:
                finished(output.prompt_token_ids, output.outputs[0].token_ids)
        return outputs

    engine.step = watched


def one_by_one(client, finished: Callable[[TokenIds, TokenIds], None]) -> Callable[..., dict[str, list]]:
    """`client.generate` with a request for each response, since the server answers none before it is complete."""
    generate = client.generate

    def each(prompts: Sequence[TokenIds], n: int = 1, generation_kwargs=None, **sampling) -> dict[str, list]:
        own = generation_kwargs or {}

        def ask(place: int) -> dict[str, list]:
            prompt = prompts[place // n]
            # As the server does for several responses in one request.
            seed = {"seed": own["seed"] + place % n} if own.get("seed") is not None else {}
            answer = generate(prompts=[prompt], n=1, generation_kwargs={**own, **seed}, **sampling)
            finished(prompt, answer["completion_ids"][0])
            return answer

        places = range(len(prompts) * n)
        client.session.get_adapter(client.base_url).init_poolmanager(1, len(places))
        with ThreadPoolExecutor(len(places)) as threads:
            answers = list(threads.map(ask, places))
        whole = {name: [row for answer in answers for row in answer[name]] for name in answers[0]}
        return {**whole, "prompt_ids": whole["prompt_ids"][::n]}

    return each


def check_ahead(args: CROPConfig, teachers: Mapping[str, tuple[Any, CROPConfig]], given: Mapping[str, Any]) -> None:
    """Raise `ValueError` for `score_ahead` where nothing is finished early, or no card is free to read it."""
    if not args.score_ahead:
        return
    if not args.use_vllm:
        raise ValueError("`score_ahead` needs `use_vllm`: other ways of sampling finish all responses at once.")
    if turns := next((name for name in ("tools", "environment_factory", "rollout_func") if given.get(name)), None):
        raise ValueError(f"`score_ahead` does not work with `{turns}`, which may go on after a turn; leave it off.")
    served = args.vllm_mode == "server"
    if served and args.world_size > 1:
        raise ValueError(
            f"`score_ahead` does not work with `vllm_mode` 'server' on {args.world_size} processes, of which the first "
            "samples for all; set it to 'colocate', or leave `score_ahead` off."
        )
    for name, (teacher, own) in teachers.items():
        resident = own.teacher_source == MODEL and own.teacher_placement == "resident"
        if not (own.teacher_server_urls or isinstance(teacher, Scorer) or served and resident):
            with told_of(name):
                raise ValueError(
                    "`score_ahead` needs a teacher that has a card to itself during the rollout: put it on a server "
                    "(`teacher_server_urls`, `crop-trl serve-teacher`), or leave `score_ahead` off."
                )
