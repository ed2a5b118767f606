"""See what methods select: kinds of tokens, entropy ranks, heat maps, and accuracy over the budget.

    crop-trl analyze runs/bank.safetensors --methods crop random entropy tip ta-opd
    crop-trl analyze runs/tiny_math
    crop-trl analyze --results runs/compare

A source is a rollout bank (of `crop-trl replay`), to which methods are applied, or the output folder of a run that was
trained with `--selection_export_steps 1`. Several sources stand side by side; among kinds of tokens, methods of one
name are counted together. Every figure comes with a JSON file that holds its numbers; accuracies over the budget
come as Markdown tables too, the paper's among them.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from ..analysis.budget_curves import budget_curves, read_runs, save_budget_chart
from ..analysis.budget_tables import budget_markdown
from ..analysis.category_shares import category_shares, save_category_chart
from ..analysis.chart import require_matplotlib, save_json
from ..analysis.entropy_ranks import BINS, entropy_ranks, save_entropy_chart
from ..analysis.heatmap import save_png
from ..analysis.inspect import table_heatmap
from ..analysis.tokens import load_tokenizer, read_source
from ..checks import check_number
from ..files import write_text
from ..methods import SelectionSettings
from ..methods.selector_file import register_selector
from .errors import told
from .options import OptionParser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OptionParser("analyze", __doc__)
    parser.add_argument("source", nargs="*", help="rollout bank or output folder of a run")
    parser.add_argument("--methods", nargs="+", help="methods to apply to a bank; by default all that rank tokens")
    parser.add_argument("--selector", metavar="FILE:NAME", help="a method of your own to apply to a bank as well")
    parser.add_argument("--retention_ratio", type=float, default=0.2, help="budget of methods applied to a bank")
    parser.add_argument(
        "--tokenizer", help="folder or hub name; by default the one of the run or of the bank's student"
    )
    parser.add_argument("--bins", type=int, default=BINS, help="bins of the entropy ranks")
    parser.add_argument(
        "--results", nargs="+", default=[], help="results for budget curves; evaluations alone where a folder has any"
    )
    parser.add_argument("--method", default="crop", help="the method in question in the budget curves")
    parser.add_argument("--output", help="folder to write; by default `analysis` beside or in the first source")
    return parser.parse_args(argv)


def analyze(args: argparse.Namespace, output: Path) -> list[str]:
    """Everything about tokens; returns lines to print."""
    settings = SelectionSettings(retention_ratio=args.retention_ratio)
    if args.selector:
        own, _ = register_selector(args.selector)
        args.methods = None if args.methods is None else [*args.methods, own]
    tables = [read_source(source, args.methods, settings) for source in args.source]
    # Runs of several students may stand side by side, whose ids mean other words.
    tokenizers = [load_tokenizer(args.tokenizer, source, t.settings) for source, t in zip(args.source, tables)]
    shares = category_shares(tables, tokenizers, progress=True)
    save_json(shares.to_dict(), output / "categories.json")
    save_category_chart(shares, output / "categories.png")
    width = max(map(len, shares.methods))
    lines = ["Shares of the kept tokens (%):", f"{'':{width}}  {'  '.join(f'{c:>13}' for c in shares.categories)}"]
    for name, row in zip(shares.methods, shares.shares):
        lines.append(f"{name:{width}}  {'  '.join(f'{100 * share:13.1f}' for share in row)}")
    known = [table for table in tables if table.entropy is not None]
    if known:
        ranks = entropy_ranks(known, bins=args.bins)
        save_json(ranks.to_dict(), output / "entropy_ranks.json")
        save_entropy_chart(ranks, output / "entropy_ranks.png")
        lines += ["", f"Share of the kept tokens in the lowest-entropy {100 * ranks.tail:g} % (blind to entropy):"]
        for name, share, reference in zip(ranks.methods, ranks.tail_share, ranks.reference):
            lines.append(f"{name:{width}}  {100 * share:6.2f} %  ({100 * reference:.2f} %)")
    else:
        lines += ["", "No entropy ranks: these runs did not measure the student's entropy, a rollout bank has it."]
    for place, table in enumerate(tables):
        method = "crop" if "crop" in table.kept else next(iter(table.kept))
        if method not in table.scores:
            continue
        # Or a reader would take it for an average response.
        note = f"Picked out of {len(table.lengths)} responses because its scores peak high."
        heatmap = table_heatmap(table, tokenizers[place], method=method, note=note)
        save_png(heatmap, output / f"heatmap_{place + 1}_{method}.png")
    return lines


def main(argv: list[str] | None = None) -> None:
    """Parse, analyse, print."""
    with told():
        args = parse(argv)
        if not args.source and not args.results:
            raise ValueError("Give a rollout bank or a run's folder to analyse, or `--results` for budget curves.")
        first = Path((args.source or args.results)[0])
        output = Path(args.output) if args.output else (first if first.is_dir() else first.parent) / "analysis"
        check_number("bins", args.bins, 1, whole=True)
        require_matplotlib()
        output.mkdir(parents=True, exist_ok=True)
        lines = analyze(args, output) if args.source else []
        if args.results:
            runs = read_runs(args.results)
            curves = budget_curves(runs, args.method)
            save_json(asdict(curves), output / "budget_curves.json")
            save_budget_chart(curves, output / "budget_curves.png")
            lines.append(budget_markdown(runs, args.method))
            write_text(output / "budget_tables.md", lines[-1])
    print("\n".join(lines))
    print(f"\nFigures and numbers: {output}")


if __name__ == "__main__":
    main()
