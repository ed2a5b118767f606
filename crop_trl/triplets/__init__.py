"""Original-paraphrase-counterfactual triplets: their record, how they are made and checked, how they are read."""

from ..prompts import DEFAULT_PROMPT_TEMPLATE, unwrap_problem, wrap_problem
from .record import AdapterReport, build_dataset, load_records, load_triplets

__all__ = [
    "DEFAULT_PROMPT_TEMPLATE",
    "AdapterReport",
    "build_dataset",
    "load_records",
    "load_triplets",
    "unwrap_problem",
    "wrap_problem",
]
