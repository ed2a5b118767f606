"""Two more prompts in each record, for methods that compare a reader of the right answer with one of wrong answers.

    python examples/right_and_wrong.py examples/tiny_math/data/train.jsonl answers.jsonl
    crop-trl train --config examples/configs/tiny_math.yaml --use_cpu true --dataset_name answers.jsonl \\
        --method rlcsd --teacher_source initial --reward accuracy --reward_weights 1

The wrong answers are those of the record's counterfactuals, which are right for another problem. With your own data
take answers that the student gave and that were graded wrong.
"""

import argparse
import json
from pathlib import Path


def with_answers(record: dict) -> dict:
    """A record with `right_problem` and `wrong_problems`, which become the columns `right_prompt`, `wrong_prompts`."""
    others = [record, *record.get("alternates", [])]
    wrong = {other["counterfactual_answer"] for other in others} - {record["answer"]}

    def told(answer: str) -> str:
        return f"{record['original_problem']} The answer is {answer}."

    return {**record, "right_problem": told(record["answer"]), "wrong_problems": [told(one) for one in sorted(wrong)]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Put right and wrong answers beside the problem of each record.")
    parser.add_argument("records", type=argparse.FileType())
    parser.add_argument("answered", type=Path)
    files = parser.parse_args()
    answered = [json.dumps(with_answers(json.loads(line))) + "\n" for line in files.records]
    files.answered.parent.mkdir(parents=True, exist_ok=True)
    files.answered.write_text("".join(answered))
