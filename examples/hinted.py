"""Self-distillation from a file: learn without the hint what the model itself says with it (docs/extending.md)."""

from crop_trl import Method
from crop_trl.methods.divergence import topk_jsd


def moved(signals, ctx):
    """How far the hint moves the prediction of a token."""
    return topk_jsd(signals["student/original"], signals["teacher/told"])


hinted = Method(needs=("student/original",), score=moved, target="teacher/told")
