"""A student that teaches itself: it reads each problem with the answer beside it, and learns to say the same without.

    python examples/self_distillation.py examples/tiny_math/data/train.jsonl hints.jsonl
    crop-trl train --config examples/configs/tiny_math.yaml --dataset_name hints.jsonl \\
        --selector examples/self_distillation.py:self_distillation --teacher_source initial

Method and hints are this file; `--teacher_source` says which weights read the hint: those from before training
(`initial`), those in training (`student`), or an average of them (`average`). There is no second model with `student`
and `average`, and with `initial` and an adapter (`--use_peft true`).
"""

import argparse
import json

from crop_trl import Method

# Every token is kept, and its target is what the teacher says of it after the prompt with the hint.
self_distillation = Method(target="teacher/hint")


def with_hint(record: dict) -> dict:
    """A record with one prompt more, `hint_problem`, which becomes the dataset's column `hint_prompt`."""
    return {**record, "hint_problem": f"{record['original_problem']} The answer is {record['answer']}."}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Put the answer of each record beside its problem, as a hint.")
    parser.add_argument("records", type=argparse.FileType())
    parser.add_argument("hinted", type=argparse.FileType("w"))
    files = parser.parse_args()
    for line in files.records:
        print(json.dumps(with_hint(json.loads(line))), file=files.hinted)
