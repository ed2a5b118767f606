"""Bench selectors without training: which methods find the tokens that depend on the conditions of their problem?

    python examples/tiny_math/problems.py --split heldout --n 256 --changes --output runs/changes.jsonl
    crop-trl selectors --config examples/configs/tiny_math.yaml --use_cpu true \
        --dataset_name runs/changes.jsonl --bench_dir runs/selectors

The student responds, teacher and student score the responses once, and every method is measured against labels made
from the worked solutions in the dataset (docs/selectors.md). The responses are kept in `bank.safetensors`; with a bank
that exists no model is loaded. `--selector FILE:NAME` adds a method of your own.
"""

from dataclasses import dataclass, field
from pathlib import Path

import pyarrow
import pyarrow.parquet
from trl import ModelConfig

from ..analysis.chart import save_json
from ..analysis.dependence import Reference
from ..analysis.selector_bench import bench, bench_table, groups, label_bank, save_bench_chart
from ..config import option
from ..files import replacing, write_text
from ..methods import get_method
from ..methods.budget import response_budget
from ..prompts import prompt_column, split_signal
from ..runs import ScriptArguments, TrainConfig
from ..triplets import load_records
from .errors import told
from .options import SettingsParser
from .replay import read_or_sample, student_tokenizer


@dataclass
class BenchArguments:
    """What to measure, and where to write it."""

    bench_dir: str = option("runs/selectors", "Folder to write.")
    bank: str | None = option(None, "Bank to read, or to write where there is none; by default in the folder.")
    bank_prompts: int = option(128, "Problems to sample from.")
    responses: int = option(2, "Responses to each of them.")
    counterfactuals: list[int] = field(
        default_factory=lambda: [1, 2, 4], metadata={"help": "Numbers of counterfactuals that methods are given."}
    )
    budgets: list[float] = field(
        default_factory=lambda: [0.05, 0.1, 0.4],
        metadata={"help": "Further budgets beside `retention_ratio`, the one that is printed."},
    )
    show_labels: int = option(0, "Labelled tokens to write in their context, for reading by hand.")


def save_labels(labelled, path: Path) -> None:
    """Every response with the pieces and labels of its tokens, as Parquet."""
    lengths = [len(pieces) for pieces in labelled.pieces]
    columns = {
        "problem": labelled.problems,
        "right": labelled.right,
        "pieces": labelled.pieces,
        "labels": [row[:n].tolist() for row, n in zip(labelled.labels, lengths)],
    }
    with replacing(path) as temporary:
        pyarrow.parquet.write_table(pyarrow.table(columns), temporary)


def counted(counts: dict) -> str:
    """What became of the tokens, in sentences."""
    lines = []
    for group, n in counts.items():
        labelled = n["positive"] + n["negative"]
        if not n["responses"]:
            lines.append(f"{group}: no response.")
            continue
        lines.append(
            f"{group}: {n['responses']} responses, {n['tokens']} tokens; {labelled} labelled "
            f"({labelled / n['tokens']:.0%}), of which {n['positive']} depend on a condition "
            f"({n['positive'] / max(1, labelled):.0%}); left out: {n['after_first_wrong_value']} from the first wrong "
            f"value on, in {n['responses_with_a_wrong_value']} responses, and {n['unaligned']} that could not be "
            "aligned."
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Parse, sample or read, label, measure, print."""
    with told():
        kinds = (BenchArguments, ScriptArguments, TrainConfig, ModelConfig)
        options, script, args, model = SettingsParser("selectors", kinds, __doc__).read(argv)
        if not script.dataset_name:
            raise ValueError("`--dataset_name` is not set; give records with `solution` and `changes`.")
        if min(options.counterfactuals, default=0) < 1:
            raise ValueError(f"`counterfactuals` must be numbers of at least 1, got {options.counterfactuals}.")
        settings, own = args.selection_settings, args.method if args.selector else None
        budgets = sorted({settings.retention_ratio, *options.budgets})
        for budget in budgets:
            response_budget(1, budget)
        of_hub = {"config": script.dataset_config, "revision": script.dataset_revision}
        records = load_records(script.dataset_name, script.dataset_split, **of_hub)
        for record in records[:1]:
            Reference.of(record)  # before a model is loaded
        folder = Path(options.bench_dir)
        folder.mkdir(parents=True, exist_ok=True)
        script.num_counterfactuals = max(options.counterfactuals)
        script.eval_dataset_name = None
        path = Path(options.bank) if options.bank else folder / "bank.safetensors"
        bank = read_or_sample(path, options.bank_prompts, script, args, model, options.responses)
        if own and own not in bank.runnable_methods():
            missing = [need for need in get_method(own).needs if need not in bank.signals]
            what = f"{missing[0]} (column `{prompt_column(split_signal(missing[0])[1])}`)" if missing else "the rewards"
            raise ValueError(f"{str(path)!r} lacks {what} that {own!r} needs; sample anew with another `--bank`.")
        named = bank.settings.get("model_name_or_path") or model.model_name_or_path
        tokenizer = student_tokenizer(named, args, model)
        labelled = label_bank(bank, records, tokenizer, script.prompt_template)
        counts = labelled.counts()
        most = bank.signals.most("counterfactual")
        numbers = [n for n in sorted(set(options.counterfactuals)) if n <= most] or [most]
        rows = bench(bank, labelled, numbers, budgets, settings)
        save_json({"settings": bank.settings, "labels": counts, "rows": rows}, folder / "selectors.json")
        save_labels(labelled, folder / "labels.parquet")
        tables = [
            f"{group.capitalize()} responses, budget {100 * settings.retention_ratio:g} %\n\n"
            f"{bench_table(rows, settings.retention_ratio, group)}"
            for group in groups(labelled.right)
            if counts[group]["responses"]
        ]
        teacher = f"Teacher: {bank.settings.get('teacher') or 'not known'}."
        report = "\n".join([teacher, counted(counts), "", *tables])
        write_text(folder / "selectors.md", report)
        if options.show_labels:
            write_text(folder / "labels.txt", labelled.in_context(options.show_labels))
        if script.can_draw:
            save_bench_chart(rows, settings.retention_ratio, folder / "selectors.png")
    print(report)
    if not script.can_draw:
        print("No picture: matplotlib is not installed (crop-trl[viz]); the same command with it draws from the bank.")
    print(f"Written to {folder}.")


if __name__ == "__main__":
    main()
