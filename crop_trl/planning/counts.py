"""From the source's problems to the rows that are trained: every count beside the paper's."""

from collections.abc import Mapping
from typing import Any

from ..checks import check_numbers
from ..files import read_jsonl
from ..prompts import ORIGINAL, REWORDINGS
from ..text import markdown_table
from ..training.data import RowCheck, tokenizer_of
from ..triplets.domain import load_domain
from ..triplets.outputs import OutputDirectory
from ..triplets.record import load_triplets, reason_to_drop
from ..triplets.report import read_report
from ..triplets.settings import TripletSettings
from ..triplets.source import duplicates_line, read_problems


def counts_markdown(settings: TripletSettings, run: Mapping[str, Any]) -> str:
    """Counts of an output directory, or of the input, as a table; `run`: settings of a run, defaults included."""
    check_numbers({name: run[name] for name in ("num_counterfactuals", "num_paraphrases")}, 1, whole=True)
    check_numbers({name: run[name] for name in ("max_prompt_length", "prompts_per_step")}, 1, whole=True, optional=True)
    check_numbers({"max_steps": run["max_steps"]}, -1, whole=True)
    if not isinstance(run["chat_template_kwargs"] or {}, Mapping):
        raise ValueError(f"`chat_template_kwargs` must be names with values, got {run['chat_template_kwargs']!r}.")
    limit, per_step, kinds = run["max_prompt_length"], run["prompts_per_step"], run["max_prompt_length_kinds"]
    tokens = "any number of tokens" if limit is None else f"at most {limit} tokens"
    which = f"{' and '.join(kinds)} prompts" if kinds else "prompts all"
    # Beside the paper's: of its text, the tables on triplets and the reproducibility details; the second is the first
    # without 643 exclusions.
    steps = {
        "source": ("Problems of the source", "17,398"),
        "readable": ("without control characters, half characters or no text", "16,755"),
        "validated": ("Validated triplets", "16,594"),
        "original": (f"whose original prompt has {tokens}", "16,588"),
        "all": (f"whose {which} have {tokens}", "16,588"),
        "steps": (f"in full steps of {per_step or 'an unknown size'}", "16,560 (115 steps)"),
    }
    output = OutputDirectory(settings.output)
    counts, notes = _of_the_source(settings, output)
    if output.triplets.exists():
        counts["validated"] = sum(reason_to_drop(record) is None for record in read_jsonl(output.triplets))
    elif not counts:
        raise ValueError("`counts` has nothing to count; give `input`, or an `output` that holds triplets.")
    else:
        notes.append(f"All after that takes the model that writes triplets: {settings.output!r} holds none yet.")
    if counts.get("validated"):
        try:
            counts |= _of_training(str(output.triplets), run)
        except ValueError as error:
            notes.append(f"Not counted from the prompts' lengths on: {error}")
        if per_step is None:
            notes.append("Steps are not counted: the settings of the run have no `prompts_per_step`.")
    rows = [(text, counts.get(step, "-"), paper) for step, (text, paper) in steps.items()]
    rows = [(text, f"{count:,}" if isinstance(count, int) else count, paper) for text, count, paper in rows]
    notes.append(
        "The paper does not say which prompts its limit looked at. Training here looks at all that a row has, so that "
        "every method has the same rows."
    )
    table = markdown_table(("Step", "Here", "Paper"), rows, right=True, padded=True)
    return "\n".join([table, *(f"{note}\n" for note in notes)])


def _of_the_source(settings: TripletSettings, output: OutputDirectory) -> tuple[dict[str, Any], list[str]]:
    """By the run that made the triplets, else by the input; nothing without either."""
    if output.run.exists():
        report = read_report(settings.output)
        left = f"{report['unfinished']:,} problems are not finished." if report["unfinished"] else ""
        readable = report["problems"] - report["outcomes"]["excluded_input"]
        notes = [duplicates_line(report["duplicates"]), *([left] if left else [])]
        return {"source": report["problems"], "readable": readable}, notes
    if settings.input:
        found = read_problems(settings, load_domain(settings.domain))
        readable = sum(problem.excluded is None for problem in found.problems)
        return {"source": len(found.problems), "readable": readable}, [duplicates_line(found.duplicates)]
    return {}, ["What these triplets were made of is not known: no run of this program lies beside them."]


def _of_training(file: str, run: Mapping[str, Any]) -> dict[str, Any]:
    dataset, _ = load_triplets(
        file,
        template=run["prompt_template"],
        conversational=run["conversational"],
        counterfactuals=run["num_counterfactuals"],
        paraphrases=run["num_paraphrases"],
    )
    revision = run["model_revision"]
    tokenizer = tokenizer_of(run["model_name_or_path"], None, "model_name_or_path", revision=revision)
    if tokenizer is None:
        raise ValueError("`model_name_or_path` is not set; give settings of a run that name the student.")
    counts, chat, limit = {}, run["chat_template_kwargs"] or {}, run["max_prompt_length"]
    for step, rows, limited in (
        ("original", dataset.select_columns("prompt"), None),
        ("all", dataset, run["max_prompt_length_kinds"]),
    ):
        kinds = [ORIGINAL, *(REWORDINGS if step == "all" else ())]
        counts[step] = sum(RowCheck(kinds, tokenizer, limit, limited, **chat)(rows[:]))
    if per_step := run["prompts_per_step"]:
        steps, most = counts["all"] // per_step, run["max_steps"]
        steps = min(steps, most) if most > 0 else steps
        counts["steps"] = f"{steps * per_step:,} ({steps:,} steps)"
    return counts
