"""Look inside a rollout bank or a run: one page in which to see what every method would train, answer by answer.

    crop-trl view runs/bank.safetensors -o page.html
    crop-trl view runs/tiny_math -o page.html

A source is a rollout bank (of `crop-trl replay`), to which every method is applied that it has signals for, or the
output folder of a run that was trained with `--selection_export_steps 1`, whose stored masks are shown. The page is one
file without a server or network: send it, or open it in any browser. With `--dataset_name` it says more of answers that
the source does not know to be right or wrong, and, of records with `changes`, which tokens depend on a condition
(docs/selectors.md).
"""

import argparse
from pathlib import Path

from ..analysis.bank import RolloutBank
from ..analysis.selector_bench import record_of_each
from ..analysis.tokens import load_tokenizer
from ..checks import check_number
from ..methods import SelectionSettings
from ..methods.budget import response_budget
from ..methods.selector_file import register_selector
from ..prompts import DEFAULT_PROMPT_TEMPLATE, check_template, saved_how_asked
from ..training.export import FOLDER
from ..triplets import load_records
from ..viewer.page import RESPONSES, bank_page, exported_table, run_page, save_page
from .errors import told
from .options import OptionParser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OptionParser("view", __doc__)
    parser.add_argument("source", help="rollout bank, or output folder of a run")
    parser.add_argument("-o", "--output", help="page to write; by default `view.html` beside the bank or in the folder")
    parser.add_argument("--selector", metavar="FILE:NAME", help="a method of your own to apply to a bank as well")
    parser.add_argument("--retention_ratio", type=float, default=0.2, help="budget that a bank's page begins with")
    parser.add_argument("--responses", type=int, default=RESPONSES, help="how many the page holds at most")
    parser.add_argument("--dataset_name", help="file or hub dataset of records; by default the one that a bank names")
    parser.add_argument("--dataset_split", default="train", help="split of a hub dataset")
    parser.add_argument("--prompt_template", help="wrapper round the problems; by default the one beside the student")
    parser.add_argument("--tokenizer", help="folder or hub name; by default that of the run or of the bank's student")
    parser.add_argument("--title", help="heading of the page")
    return parser.parse_args(argv)


def write_view(args: argparse.Namespace) -> Path:
    """Read, gather, write; returns the page's path. Raises `ValueError` for what is wrong."""
    source = Path(args.source)
    if not source.exists():
        raise ValueError(f"{args.source!r} does not exist; give a run's output_dir or a rollout bank.")
    check_number("responses", args.responses, 1, whole=True)
    response_budget(1, args.retention_ratio)
    own = register_selector(args.selector)[0] if args.selector else None
    bank = table = None
    if source.is_dir():
        source = source.parent if source.name == FOLDER else source
        table = exported_table(source, args.responses)
    else:
        bank = RolloutBank.load(source)
    settings = bank.settings if table is None else table.settings
    tokenizer = load_tokenizer(args.tokenizer, str(source), settings)
    student = settings.get("model_name_or_path") or source
    wrapper = saved_how_asked(student, hub=False).get("prompt_template", DEFAULT_PROMPT_TEMPLATE)
    template = check_template(args.prompt_template or wrapper)
    prompts = [row["prompts"]["original"][0] for row in (bank or table).rows]
    options = {"records": find_records(args, settings.get("dataset_name"), prompts, template), "template": template}
    options |= {"title": args.title} if args.title else {}
    if bank is None:
        page = run_page(table, tokenizer, **options)
    else:
        budget = SelectionSettings(retention_ratio=args.retention_ratio)
        page = bank_page(
            bank, tokenizer, budget, responses=args.responses, method=own or settings.get("method"), **options
        )
    output = Path(args.output) if args.output else (source.parent if table is None else source) / "view.html"
    save_page(page, output)
    return output


def find_records(args: argparse.Namespace, named: str | None, prompts: list[str], template: str) -> list | None:
    """Records of the problems: those asked for, or those of the file that a bank names, if it is still that file."""
    if args.dataset_name:
        return load_records(args.dataset_name, args.dataset_split)
    if not named or not Path(named).is_file():
        return None
    try:
        records = load_records(named)
        record_of_each(prompts, records, template)
    except ValueError as error:
        return print(f"Of {named}, which the bank names, nothing is used: {error}")
    return records


def main(argv: list[str] | None = None) -> None:
    """Parse, write, say where."""
    with told():
        output = write_view(parse(argv))
    print(f"Open {output} in a browser ({output.stat().st_size / 1e6:.1f} MB).")


if __name__ == "__main__":
    main()
