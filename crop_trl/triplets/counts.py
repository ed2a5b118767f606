"""From the source's problems to the rows that are trained: every count beside the paper's."""

from collections.abc import Mapping
from typing import Any

from ..prompts import DEFAULT_PROMPT_TEMPLATE, ORIGINAL, REWORDINGS
from ..text import markdown_table
from .domain import load_domain
from .outputs import OutputDirectory
from .record import load_triplets
from .report import read_report
from .settings import TripletSettings
from .source import duplicates_line, read_problems

# Of the text, the tables on triplets and the reproducibility details; the second is the first without 643 exclusions.
PAPER = {
    "source": "17,398",
    "readable": "16,755",
    "validated": "16,594",
    "original": "16,588",
    "all": "16,588",
    "steps": "16,560 (115 steps)",
}


def counts_markdown(settings: TripletSettings, config: Mapping[str, Any]) -> str:
    """The counts of an output directory, or before there is one of the input; `config`: settings of a training run."""
    limit, per_step = config.get("max_prompt_length", 1024), config.get("prompts_per_step", 144)
    steps = {
        "source": "Problems of the source",
        "readable": "without control characters, half characters or no text",
        "validated": "Validated triplets",
        "original": f"whose original prompt has at most {limit} tokens",
        "all": f"all of whose prompts have at most {limit} tokens",
        "steps": f"in full steps of {per_step}",
    }
    counts, notes = _of_the_source(settings)
    if counts.get("validated"):
        try:
            counts |= _of_training(settings, config, limit, per_step)
        except ValueError as error:
            notes.append(f"Not counted from the prompts' lengths on: {error}")
    rows = [(text, counts.get(step, "-"), PAPER[step]) for step, text in steps.items()]
    rows = [(text, f"{count:,}" if isinstance(count, int) else count, paper) for text, count, paper in rows]
    notes.append(
        "The paper does not say which prompts its limit looked at. Training here looks at all that a row has, so that "
        "every method has the same rows."
    )
    table = markdown_table(("Step", "Here", "Paper"), rows, right=True, padded=True)
    return "\n".join([table, *(f"{note}\n" for note in notes)])


def _of_the_source(settings: TripletSettings) -> tuple[dict[str, Any], list[str]]:
    if OutputDirectory(settings.output).run.exists():
        report = read_report(settings.output)
        counts = {"source": report["problems"], "validated": report["validated"]}
        counts["readable"] = report["problems"] - report["outcomes"]["excluded_input"]
        left = f"{report['unfinished']:,} problems are not finished." if report["unfinished"] else ""
        return counts, [duplicates_line(report["duplicates"]), *([left] if left else [])]
    if not settings.input:
        raise ValueError("`counts` has nothing to count; give `input`, or an `output` that holds triplets.")
    found = read_problems(settings, load_domain(settings.domain))
    readable = sum(problem.excluded is None for problem in found.problems)
    later = f"Everything after that takes the model that writes triplets: {settings.output!r} holds none yet."
    return {"source": len(found.problems), "readable": readable}, [duplicates_line(found.duplicates), later]


def _of_training(settings: TripletSettings, config: Mapping[str, Any], limit: int | None, per_step: int) -> dict:
    from ..training.data import RowCheck, tokenizer_of  # takes seconds, which those who make triplets need not wait

    dataset, _ = load_triplets(
        str(OutputDirectory(settings.output).triplets),
        template=config.get("prompt_template", DEFAULT_PROMPT_TEMPLATE),
        conversational=config.get("conversational", True),
        counterfactuals=config.get("num_counterfactuals", 1),
        paraphrases=config.get("num_paraphrases", 1),
    )
    tokenizer = tokenizer_of(config.get("model_name_or_path"), None, "model_name_or_path")
    if tokenizer is None:
        raise ValueError("`model_name_or_path` is not set; give a training config that names the student.")
    counts = {}
    for step, rows in (("original", dataset.select_columns("prompt")), ("all", dataset)):
        kinds = [ORIGINAL, *(REWORDINGS if step == "all" else ())]
        check = RowCheck(kinds, tokenizer, limit, **(config.get("chat_template_kwargs") or {}))
        counts[step] = sum(check(rows[:]))
    steps, most = counts["all"] // per_step, config.get("max_steps", -1)
    steps = min(steps, most) if most > 0 else steps
    return {**counts, "steps": f"{steps * per_step:,} ({steps:,} steps)"}
