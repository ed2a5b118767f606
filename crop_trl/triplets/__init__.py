"""Original-paraphrase-counterfactual triplets: their record, how they are made and checked, how they are read."""

from .record import build_dataset, load_records, load_triplets

__all__ = ["build_dataset", "load_records", "load_triplets"]
