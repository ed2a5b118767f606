"""A selection method of your own, without touching the package: keep the tokens that the teacher finds least likely.

    crop-trl train --config examples/configs/tiny_math.yaml --use_cpu true --max_steps 10 \
        --selector examples/custom_selector.py:surprise

The file may lie anywhere. `crop-trl replay`, `analyze` and `selectors` take `--selector` too. A method that needs more
than the teacher after the original prompt is a `Method` with `needs`, see docs/extending.md.
"""


def surprise(signals, ctx):
    """How unlikely the teacher finds a token after the original prompt, where student and teacher part ways most."""
    return -signals["teacher/original"].sampled_logprobs
