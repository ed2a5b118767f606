"""CROP: task relevance through counterfactuals for selective on-policy distillation, on Hugging Face TRL."""

__version__ = "0.1.0"
