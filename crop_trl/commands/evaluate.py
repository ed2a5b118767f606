r"""Evaluate a model as the paper does, grade a run again, or compare runs.

    crop-trl evaluate --model Qwen/Qwen3-1.7B-Base --setting A \
        --benchmark AIME24 AIME25 AMC23 MATH-500 --output runs/base
    crop-trl evaluate --model examples/tiny_math/models/student --sampler hf \
        --benchmark tiny-math=examples/tiny_math/data/heldout.jsonl --output runs/student
    crop-trl evaluate --regrade runs/base --clean audit/clean_ids.json
    crop-trl evaluate --compare base=runs/base crop=runs/crop --reference base

A run that was interrupted goes on when the same command is given again.
"""

import argparse
from collections import Counter
from pathlib import Path

from ..checks import check_numbers
from ..evaluation import benchmarks, run, tables
from ..evaluation.sampling import (
    SETTINGS,
    DecodingSettings,
    ServerSampler,
    TransformersSampler,
    VLLMSampler,
)
from ..files import check_local, json_object, write_json, write_text
from ..prompts import DEFAULT_PROMPT_TEMPLATE, saved_how_asked
from .errors import told
from .options import OptionParser

BATCH_SIZES = {"hf": 32, "vllm": 512, "server": 64}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OptionParser("evaluate", __doc__)
    what = parser.add_argument_group("what to do (one of)")
    what.add_argument("--model", help="folder, hub name, or the name that a server uses")
    what.add_argument("--regrade", metavar="DIR", help="grade the generations of a run again")
    what.add_argument("--compare", nargs="+", metavar="[NAME=]DIR", help="tables for several runs")
    parser.add_argument("--model_revision", metavar="NAME", help="branch, tag or commit of a model from the hub")
    parser.add_argument("--benchmark", nargs="+", default=[], help="NAME, NAME=FILE or a JSONL file")
    parser.add_argument("--output", metavar="DIR", help="folder of the run, or for --compare of the tables")
    parser.add_argument("--clean", metavar="FILE", help="clean_ids.json of an audit: adds NAME-Clean to the tables")
    parser.add_argument(
        "--average",
        choices=run.AVERAGES,
        help="whether Avg. counts clean subsets, such as MATH-500-Clean, or the benchmarks they were taken from; by "
        "default what the run has counted, and at first clean",
    )
    parser.add_argument("--reference", metavar="NAME", help="the run that --compare subtracts; by default the first")
    parser.add_argument("--label", help="name of the run in tables")
    parser.add_argument("--training_run", metavar="DIR", help="the trainer's output folder, for the diagnostics")

    drawing = parser.add_argument_group("sampling")
    drawing.add_argument("--setting", choices=sorted(SETTINGS), help="the paper's: A thinking, B not")
    drawing.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="the chat template's enable_thinking; by default the setting's, else that of the model's training, else "
        "the template's own",
    )
    drawing.add_argument(
        "--chat_template_kwargs", metavar="JSON", help="what the chat template takes, over what it took in training"
    )
    drawing.add_argument(
        "--conversational",
        action=argparse.BooleanOptionalAction,
        help="chat messages or plain text; by default as in the model's training, else messages",
    )
    drawing.add_argument("--temperature", type=float, default=DecodingSettings.temperature)
    drawing.add_argument("--top_p", type=float, default=DecodingSettings.top_p)
    drawing.add_argument("--max_tokens", type=int, default=DecodingSettings.max_tokens)
    drawing.add_argument("--samples", type=int, help="per problem, in place of the benchmark's number")
    drawing.add_argument("--base_seed", type=int, help="of the first sample, in place of the benchmark's")
    drawing.add_argument("--prompt_template", help="wrapper that holds {problem} once, the one of training")
    drawing.add_argument("--pass_k", type=int, nargs="+", default=[], help="further k, by the unbiased estimator")

    engine = parser.add_argument_group("engine")
    engine.add_argument("--sampler", choices=[*BATCH_SIZES], default="vllm")
    engine.add_argument("--server_url", help="of --sampler server, such as http://localhost:8000/v1")
    engine.add_argument("--batch_size", type=int, help="responses (hf) or requests (vllm, server) at a time")
    engine.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (hf)")
    engine.add_argument("--vllm_options", metavar="JSON", help='JSON, such as {"tensor_parallel_size": 2}')
    return parser.parse_args(argv)


def check_options(args: argparse.Namespace) -> None:
    """Raise `ValueError` for an option whose value is wrong or that the chosen sampler does not take."""
    check_numbers({"batch_size": args.batch_size}, 1, whole=True, optional=True)
    for option, sampler in (("dtype", "hf"), ("server_url", "server"), ("vllm_options", "vllm")):
        if getattr(args, option) is not None and args.sampler != sampler:
            raise ValueError(f"`--{option}` is for `--sampler {sampler}`, and it is {args.sampler}; leave it out.")
    if args.model_revision is not None and args.sampler == "server":
        raise ValueError("`--model_revision` is for a model that is loaded here; leave it out, the server has its own.")
    check_local(args.model, model_revision=args.model_revision)
    examples = {"vllm_options": '{"tensor_parallel_size": 2}', "chat_template_kwargs": '{"enable_thinking": false}'}
    for option, example in examples.items():
        setattr(args, option, json_object(f"--{option}", getattr(args, option), example))


def load_benchmarks(args: argparse.Namespace) -> list[benchmarks.Benchmark]:
    """The benchmarks that are named, and what an audit left of them."""
    loaded = [benchmarks.load_benchmark(spec, args.samples, args.base_seed) for spec in args.benchmark]
    return loaded + benchmarks.clean_subsets(args.clean, loaded)


def make_sampler(args: argparse.Namespace, plan: run.Plan):
    """What draws the responses."""
    if args.sampler == "hf":
        return TransformersSampler(args.model, plan.decoding, plan.batch_size, args.dtype, args.model_revision)
    if args.sampler == "vllm":
        return VLLMSampler(args.model, plan.decoding, plan.batch_size, args.vllm_options, args.model_revision)
    return ServerSampler(args.model, plan.decoding, args.server_url, plan.batch_size)


def plan_of(args: argparse.Namespace, loaded: list[benchmarks.Benchmark] | None = None) -> run.Plan:
    """What is to be done, on benchmarks that were loaded before if they are given."""
    if not args.output:
        raise ValueError("`--output` is not set; name the folder that generations and results go to.")
    if args.sampler == "server" and not args.server_url:
        raise ValueError("`--sampler server` needs `--server_url`, such as http://localhost:8000/v1.")
    trained = saved_how_asked(args.model, args.sampler != "server", args.model_revision)
    options = {**trained.get("chat_template_kwargs", {}), **SETTINGS.get(args.setting, {}), **args.chat_template_kwargs}
    if args.thinking is not None:
        options["enable_thinking"] = args.thinking
    conversational = trained.get("conversational", True) if args.conversational is None else args.conversational
    decoding = DecodingSettings(args.temperature, args.top_p, args.max_tokens, options, conversational)
    return run.Plan(
        Path(args.output),
        load_benchmarks(args) if loaded is None else loaded,
        args.model,
        args.sampler,
        decoding,
        args.prompt_template or trained.get("prompt_template") or DEFAULT_PROMPT_TEMPLATE,
        args.batch_size or BATCH_SIZES[args.sampler],
        asked_in_training=trained,
        model_revision=args.model_revision,
    )


def labels_of(args: argparse.Namespace) -> dict:
    """What a run is called, and what is known of its training, as far as it is given."""
    training = run.training_diagnostics(args.training_run) if args.training_run else None
    given = {"label": args.label, "setting": args.setting, "training": training}
    return {name: value for name, value in given.items() if value}


def evaluate(args: argparse.Namespace) -> None:
    """Draw what is missing, grade, report."""
    plan = plan_of(args)
    plan.labels |= {"label": plan.output.name, **labels_of(args)}
    plan.check()
    run.check_pass_k(args.pass_k, plan.benchmarks)
    run.generate(plan, lambda: make_sampler(args, plan))
    report(run.evaluate(plan, args.pass_k, args.average), plan.output)


def regrade(args: argparse.Namespace) -> None:
    """Grade the generations of a run again."""
    loaded = load_benchmarks(args) if args.benchmark else run.stored_benchmarks(args.regrade)
    loaded += [] if args.benchmark else benchmarks.clean_subsets(args.clean, loaded)
    report(run.regrade(args.regrade, loaded, args.pass_k, args.average, labels_of(args)), Path(args.regrade))


def report(results: dict, folder: Path) -> None:
    """Print and write the tables of a run."""
    text = tables.run_markdown(results)
    write_text(folder / "results.md", text)
    print(text)


def named_folder(item: str) -> tuple[str, str]:
    """Name and folder of NAME=DIR or DIR; folders of a study have equals signs of their own."""
    cuts = [("", item), *((item[:place], item[place + 1 :]) for place, sign in enumerate(item) if sign == "=")]
    return next((cut for cut in cuts if Path(cut[1]).is_dir()), cuts[:2][-1])


def compare(args: argparse.Namespace) -> None:
    """Tables of several runs side by side, those of several settings joined."""
    given = []
    for item in args.compare:
        name, folder = named_folder(item)
        results = run.load_results(folder)
        given.append((results.get("setting"), name or results.get("label") or Path(folder).name, results))
    numbers = Counter(setting for setting, *_ in given)
    joined = None not in numbers and min(numbers.values()) > 1  # or they are compared across settings
    settings: dict[str | None, dict[str, dict]] = {}
    for setting, name, results in given:
        runs = settings.setdefault(setting if joined else None, {})
        if name in runs:
            raise ValueError(f"`--compare` has two runs named {name!r}; name them, as in NAME=DIR.")
        runs[name] = results
    average = args.average or run.average_of(given[0][2])
    compared = {setting: tables.comparison(runs, args.reference, average) for setting, runs in settings.items()}
    text = tables.comparison_markdown(settings, compared, average)
    if args.output:
        folder = Path(args.output)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "comparison.md", text)
        # One setting, as most have, needs no name.
        write_json(folder / "comparison.json", compared if len(compared) > 1 else next(iter(compared.values())))
    print(text)


def main(argv: list[str] | None = None) -> None:
    """Do the one thing that is asked for."""
    known = {"model": evaluate, "regrade": regrade, "compare": compare}
    goes_on = "Interrupted; what is done is saved, the same command goes on from there."
    with told(ValueError, OSError, ImportError, RuntimeError, interrupted=goes_on):
        args = parse(argv)
        tasks = [task for name, task in known.items() if getattr(args, name)]
        if len(tasks) != 1:
            raise ValueError("Give exactly one of `--model`, `--regrade` and `--compare`.")
        check_options(args)
        tasks[0](args)


if __name__ == "__main__":
    main()
