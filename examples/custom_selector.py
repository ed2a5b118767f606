"""Add a selection method of your own, without touching the package, and train with it.

    python examples/custom_selector.py --config examples/configs/tiny_math.yaml --use_cpu true --max_steps 10

The method here keeps the tokens that the teacher finds least likely: where student and teacher part ways most.
"""

import sys

from train_crop import main

from crop_trl import Method, register_method


def surprise(signals, ctx):
    """Score of a token, `[B, T]`: how unlikely the teacher finds it after the original prompt."""
    return -signals["teacher/original"].sampled_logprobs


register_method("teacher-surprise", Method(score=surprise))

if __name__ == "__main__":
    main([*sys.argv[1:], "--method", "teacher-surprise"])
