"""An evaluation run: generate what is missing, grade what is there, sum up."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..files import alone_in, read_object, write_json
from ..prompts import check_template, wrap_problem
from ..training.results import FILE, RunResult
from .benchmarks import CLEAN, Benchmark, Example, without
from .grading.verdict import extract_boxed, grade_many, require_algebra
from .metrics import average_interval, mean_at_k, pass_at_k, share_interval
from .sampling import DecodingSettings, Response, Sampler
from .store import Generation, Store, pending_chunks, stored_names


@dataclass
class Plan:
    """What a run is to do; checked in full before a model is loaded. `model` is a folder, a hub name or a name on a
    server, `template` the answer-format wrapper; `asked_in_training` is what [`~crop_trl.prompts.saved_how_asked`]
    knows of the model; `labels` go into the results."""

    output: Path
    benchmarks: list[Benchmark]
    model: str
    sampler: str
    decoding: DecodingSettings
    template: str
    batch_size: int | None = None
    labels: dict[str, Any] = field(default_factory=dict)
    asked_in_training: dict[str, Any] = field(default_factory=dict)
    model_revision: str | None = None

    def __post_init__(self):
        check_template(self.template)

    def check(self) -> None:
        """Raise `ValueError` or `ImportError` for what cannot work, and warn of prompts that are not training's."""
        if others := asked_otherwise(self.asked(), self.asked_in_training):
            print(
                f"{self.model!r} is asked otherwise than in training, answers may suffer: {'; '.join(others)}.",
                file=sys.stderr,
            )
        if self.sampler == "server" and not self.decoding.conversational:
            raise ValueError("A server takes chat messages alone; choose another sampler, or say `--conversational`.")
        names = [benchmark.name for benchmark in self.benchmarks]
        if not names:
            raise ValueError("`--benchmark` names nothing to evaluate on; give at least one.")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"`--benchmark` names {twice!r} twice; give it once.")
        golds = [example.answer for benchmark in self.benchmarks for example in benchmark.examples]
        if not all(gold.lstrip("+-").isdigit() for gold in golds):
            require_algebra()
        for benchmark in self.stores():
            self._refuse_other(benchmark.store, self.settings(benchmark))
        # Results name one model and one way to draw, so one folder holds no other.
        for name in stored_names(self.output):
            self._refuse_other(name, self.asked())

    def _refuse_other(self, name: str, wanted: dict[str, Any]) -> None:
        """Raise `ValueError` where generations of a benchmark were made with other settings."""
        store = Store(self.output, name)
        stored = store.settings() if store.read() else wanted
        for setting, value in wanted.items():
            if not self.is_same(setting, stored.get(setting), value):
                what = f"{name!r} with {setting} {stored.get(setting)!r}, not {value!r}"
                raise ValueError(f"{str(self.output)!r} holds {what}; use another folder.")

    def is_same(self, setting: str, stored: Any, value: Any) -> bool:
        """Whether two values mean one thing: the folder of a run may move with the evaluation that lies in it."""
        if setting == "model" and isinstance(stored, str) and Path(value).resolve() in self.output.resolve().parents:
            return Path(stored).resolve().name == Path(value).resolve().name
        return stored == value

    def stores(self) -> list[Benchmark]:
        """What is generated: each store once, with the most problems that any benchmark takes from it."""
        largest: dict[str, Benchmark] = {}
        for benchmark in self.benchmarks:
            known = largest.get(benchmark.store)
            if known is None or len(benchmark.examples) > len(known.examples):
                largest[benchmark.store] = benchmark
        return list(largest.values())

    def asked(self) -> dict[str, Any]:
        """What all benchmarks of a run have in common."""
        names = {
            "model": self.model,
            "model_revision": self.model_revision,
            "sampler": self.sampler,
            "prompt_template": self.template,
        }
        return {**names, **asdict(self.decoding)}

    def settings(self, benchmark: Benchmark) -> dict[str, Any]:
        """What makes two runs' generations interchangeable."""
        settings = {
            "benchmark": benchmark.store,
            "problems": benchmark.fingerprint,
            "base_seed": benchmark.base_seed,
            **self.asked(),
        }
        if self.sampler == "hf":  # its draws depend on what shares a batch
            settings["batch_size"] = self.batch_size
        return settings


def told_apart(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a plan's settings that tell evaluations apart, wherever the model lay and whatever shared a batch."""
    return {name: value for name, value in settings.items() if name not in ("benchmark", "model", "batch_size")}


def stored_settings(output: str | Path, name: str) -> dict[str, Any] | None:
    """What the generations were made with that a benchmark's results are of; `None` where they are gone."""
    stores = (Store(output, each) for each in (name, name.removesuffix(CLEAN)))
    return next((store.settings() for store in stores if store.settings_path.is_file()), None)


def asked_otherwise(asked: Mapping[str, Any], trained: Mapping[str, Any]) -> list[str]:
    """In what the prompts of an evaluation differ from those of the model's training, as far as these are known."""
    return [
        f"`{name}` is {asked.get(name)!r} and was {value!r}"
        for name, value in trained.items()
        if asked.get(name) != value
    ]


def check_pass_k(pass_k: Sequence[int], benchmarks: Sequence[Benchmark]) -> None:
    """Raise `ValueError` for a k that is below 1 or above a benchmark's number of samples."""
    for name, most in ((benchmark.name, benchmark.samples) for benchmark in benchmarks):
        for k in pass_k:
            if not 1 <= k <= most:
                what = f"`--pass_k` is {k}, and {name} has {most} samples per problem"
                raise ValueError(f"{what}: choose 1 to {most}, or draw more with `--samples`.")


def generate(plan: Plan, make_sampler: Callable[[], Sampler]) -> None:
    """Draw what is missing, each response onto disk; `make_sampler` loads the model, if any is."""
    sampler: Sampler | None = None
    # A second run into the same folder has to wait.
    with alone_in(plan.output / "generations" / "lock", f"`--output` {str(plan.output)!r}"):
        for benchmark in plan.stores():
            store = Store(plan.output, benchmark.store, plan.settings(benchmark))
            there = store.read()
            missing = _asked(benchmark).keys() - there.keys()
            if not missing:
                continue
            sampler = sampler or make_sampler()
            total = benchmark.samples * len(benchmark.examples)
            with tqdm(total=total, initial=total - len(missing), desc=benchmark.store, unit="response") as bar:
                for chunk in pending_chunks(benchmark, there, sampler.batch_size, sampler.independent):
                    asked = [(benchmark.examples[index], sample) for index, sample in chunk]
                    _draw(sampler, plan.template, benchmark, asked, missing, store, bar)
            store.close()


def _draw(sampler: Sampler, template: str, benchmark: Benchmark, asked: list, missing: set, store: Store, bar) -> None:
    seeds = [benchmark.seeds[sample] for _, sample in asked]

    def done(index: int, got: Response) -> None:
        example, sample = asked[index]
        # A batch that a crash cut in two is drawn again as a whole; what is on disk stays.
        if (example.id, sample) in missing:
            answer = example.answer
            store.append([Generation(example.id, sample, seeds[index], got.text, got.tokens, got.truncated, answer)])
            bar.update()

    sampler.sample([wrap_problem(example.problem, template) for example, _ in asked], seeds, done)


def _asked(benchmark: Benchmark) -> dict[tuple[str, int], Example]:
    return {(example.id, sample): example for example in benchmark.examples for sample in range(benchmark.samples)}


def score(
    benchmark: Benchmark, generations: dict[tuple[str, int], Generation], pass_k: Sequence[int] = ()
) -> dict[str, Any]:
    """Grade and sum up one benchmark, with the answers that it has now. Raises `ValueError` where responses lack."""
    asked = _asked(benchmark)
    if missing := asked.keys() - generations.keys():
        raise ValueError(f"Benchmark {benchmark.name!r} lacks {len(missing)} of {len(asked)} responses; run it again.")
    responses = [generations[key] for key in asked]
    verdicts = grade_many([response.text for response in responses], [example.answer for example in asked.values()])
    # Where grading failed there is no verdict: counted as wrong, and said.
    correct = np.array(verdicts, dtype=bool).reshape(len(benchmark.examples), benchmark.samples)
    mean, passed = mean_at_k(correct), pass_at_k(correct)
    lengths = [response.tokens for response in responses]
    return {
        "problems": len(benchmark.examples),
        "samples": benchmark.samples,
        "seeds": benchmark.seeds,
        "mean": float(mean.mean()),
        "mean_interval": share_interval(correct),
        "pass": float(passed.mean()),
        "pass_interval": share_interval(passed),
        "pass_at": {str(k): float(pass_at_k(correct, k).mean()) for k in pass_k},
        "correct": int(correct.sum()),
        "responses": len(responses),
        "ungraded": verdicts.count(None),
        "average_length": None if None in lengths else float(np.mean(lengths)),
        "format_failures": float(np.mean([extract_boxed(response.text) is None for response in responses])),
        "truncated": float(np.mean([response.truncated for response in responses])),
        "verdicts": {example.id: row for example, row in zip(benchmark.examples, correct.astype(int).tolist())},
    }


AVERAGES = ("clean", "whole")


def _described(asked: Mapping[str, Any]) -> dict[str, Any]:
    """How a run asked, as its results say it."""
    described = {name: asked.get(name) for name in ("model", "model_revision", "sampler", "prompt_template")}
    return {**described, "decoding": {name: asked[name] for name in asdict(DecodingSettings())}}


def averaged(names: Sequence[str], average: str = "clean") -> list[str]:
    """The benchmarks that enter Avg.: of one that has a clean subset the subset, or with `whole` all of it."""
    if average == "clean":
        return [name for name in names if name + CLEAN not in names]
    return [name for name in names if not (name.endswith(CLEAN) and name.removesuffix(CLEAN) in names)]


def average_of(results: Mapping[str, Any]) -> str:
    """What a run's Avg. counts, `clean` or `whole`."""
    names = results.get("averaged", ())
    return "whole" if any(name + CLEAN in results["benchmarks"] for name in names) else "clean"


def evaluate(plan: Plan, pass_k: Sequence[int] = (), average: str | None = None) -> dict[str, Any]:
    """Grade the generations of a run and write `results.json`, beside what the same model came to before."""
    described, stored = _described(plan.asked()), stored_results(plan.output)
    same = bool(stored) and all(plan.is_same(name, stored.get(name), value) for name, value in described.items())
    known = stored["benchmarks"] if same else {}
    results = {**described, "asked_in_training": plan.asked_in_training, **plan.labels}
    return _graded(results, known, plan.output, plan.benchmarks, pass_k, average or average_of(stored))


def _graded(results: dict[str, Any], known: dict, output: Path, benchmarks, pass_k, average: str) -> dict[str, Any]:
    """Score benchmarks, add Avg. over them and those `known`, and write `results.json`."""
    results["benchmarks"] = known
    for benchmark in benchmarks:
        known[benchmark.name] = score(benchmark, Store(output, benchmark.store).read(), pass_k)
    names = averaged(list(results["benchmarks"]), average)
    means = [results["benchmarks"][name]["mean"] for name in names]
    results["averaged"] = names
    results["average"] = float(np.mean(means))
    intervals = [results["benchmarks"][name]["mean_interval"] for name in names]
    results["average_interval"] = average_interval(means, intervals)
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "results.json", results)
    return results


def regrade(
    output: str | Path,
    benchmarks: Sequence[Benchmark],
    pass_k: Sequence[int] = (),
    average: str | None = None,
    labels: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """
    Grade a finished run again, without a model: after a change of answers, say, or for a clean subset. What else was
    measured stays, and so do labels that are not given.
    """
    folder = Path(output)
    names = stored_names(folder)
    check_pass_k(pass_k, benchmarks)
    if not names:
        raise FileNotFoundError(
            f"`--regrade` {str(output)!r} holds no generations; give the --output of a finished run."
        )
    for benchmark in benchmarks:
        if benchmark.store not in names:
            raise ValueError(f"{str(folder)!r} holds generations of {', '.join(names)}, none of {benchmark.store!r}.")
    stored = stored_results(folder)
    kept = {name: stored[name] for name in ("asked_in_training", "label", "setting", "training") if name in stored}
    results = {**_described(Store(folder, names[0]).settings()), **kept, **(labels or {})}
    return _graded(results, stored.get("benchmarks", {}), folder, benchmarks, pass_k, average or average_of(stored))


def stored_benchmarks(output: str | Path) -> list[Benchmark]:
    """The benchmarks that a run holds, clean subsets included, with its answers and without problems."""
    folder = Path(output)
    reported = stored_results(folder).get("benchmarks", {})
    found = []
    for name in stored_names(folder):
        store, examples = Store(folder, name), {}
        generations = store.read()
        for generation in generations.values():
            unique = generation.id if generation.id.startswith("test/") else None
            examples.setdefault(generation.id, Example(generation.id, "", generation.gold, unique))
        samples = max((sample for _, sample in generations), default=0) + 1
        whole = Benchmark(name, tuple(examples.values()), samples, store.settings()["base_seed"], name)
        if name in reported or name + CLEAN not in reported:
            found.append(whole)
        if name + CLEAN in reported:
            ids = {example.id for example in whole.examples}
            found.append(without(whole, ids - set(reported[name + CLEAN]["verdicts"])))
    return found


def stored_results(run: Path) -> dict[str, Any]:
    """The results of a run; empty where it has none yet."""
    return load_results(run) if (run / "results.json").is_file() else {}


def load_results(run: str | Path) -> dict[str, Any]:
    """The results of a run. Raises `FileNotFoundError` when it has none."""
    path = Path(run) / "results.json"
    if not path.is_file():
        raise FileNotFoundError(f"{str(run)!r} has no results.json; evaluate it first.")
    return read_object(path, "delete it and regrade the run")


def training_diagnostics(run: str | Path) -> dict[str, Any]:
    """What table "Generation diagnostics" takes from training: the budget, and the share of rollouts that hit the
    length limit at the last step; of a folder with a result also the method, its budget and the seed. What was not
    logged is `None`."""
    folder = Path(run)
    states = [*folder.glob("trainer_state.json"), *folder.glob("checkpoint-*/trainer_state.json")]
    if not states:
        raise FileNotFoundError(f"`--training_run` {str(run)!r} has no trainer_state.json; give a run's output_dir.")
    loaded = [read_object(path, "name another checkpoint with `--training_run`") for path in states]
    newest = max(loaded, key=lambda state: state.get("global_step", 0))

    def last(name: str) -> float | None:
        return next((entry[name] for entry in reversed(newest.get("log_history", [])) if name in entry), None)

    own = RunResult.read(folder / FILE) if (folder / FILE).is_file() else None
    described = {name: getattr(own, name) for name in ("method", "retention_ratio", "seed")} if own else {}
    return {
        **described,
        "step": newest.get("global_step"),
        "budget": last("selection/retention_ratio"),
        "truncated": last("completions/clipped_ratio"),
    }
