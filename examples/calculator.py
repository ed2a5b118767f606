"""A student that calls a calculator, and a teacher that reads the conversation.

    python examples/calculator.py --method opd

The embedded student of `tiny_math` writes `9 * 12 = 108`. Here it stops at the sign, a tool writes ` 108`, and the
student goes on. The teacher reads these very tokens; those of the tool are not trained and take nothing of the budget.
"""

import argparse
from itertools import groupby

from transformers import AutoModelForCausalLM, AutoTokenizer

from crop_trl import CROPConfig, CROPTrainer
from crop_trl.evaluation.grading import accuracy_reward
from crop_trl.triplets import load_triplets

STUDENT, TEACHER = (f"examples/tiny_math/models/{name}" for name in ("student", "teacher"))
TRAIN, HELD_OUT = (f"examples/tiny_math/data/{name}.jsonl" for name in ("train", "heldout"))
TEMPLATE = "{problem}\nGive the answer in \\boxed{}."


def calculate(a: int, sign: str, b: int) -> str:
    """
    Work out one step.

    Args:
        a: The first number.
        sign: What to do, one of + - * /.
        b: The second number.

    Returns:
        The result.
    """
    return str({"+": a + b, "-": a - b, "*": a * b, "/": a // (b or 1)}[sign])


def teach_to_call(tokenizer, model) -> None:
    """
    Let a text that ends in `9 * 12 =` be a call. Chat models need nothing of this: theirs are known to their tokenizer.
    """
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("Ġ=")]
    # How a call is read from what the student wrote,
    call = {"name": "calculate", "arguments": {"a": "{a}", "sign": "{sign}", "b": "{b}"}}
    calls = {
        "open_pattern": r"(?P<a>\d+) (?P<sign>[-+*/]) (?P<b>\d+) =$",
        "repeats": True,
        "transform": {"type": "function", "function": call},
    }
    fields = {"content": {}, "tool_calls": calls}
    tokenizer.response_template = {"start_anchor": "<|assistant|>", "defaults": {"role": "assistant"}, "fields": fields}
    # and how a result is written behind it, after which it is the student's turn without another sign.
    tokenizer.chat_template = (
        "{%- for m in messages -%}"
        "{%- if m.role == 'tool' -%}{{ ' ' + m.content }}"
        "{%- else -%}{{ '<|' + m.role + '|>' + m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls else '' }}{{ '<|end|>' }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt and messages[-1].role != 'tool' -%}{{ '<|assistant|>' }}{%- endif -%}"
    )


def conversation(trainer, row) -> str:
    """One answer of the student, with what the tool wrote in brackets."""
    sampled = trainer.sample([row], num_generations=1)
    runs = groupby(zip(sampled.completion_ids[0], sampled.loss_mask[0].tolist()), key=lambda token: token[1])
    texts = [(own, sampled.tokenizer.decode([token for token, _ in run])) for own, run in runs]
    return "".join(text if own else f"[{text}]" for own, text in texts)


def main() -> None:
    """Train a few steps, and print the accuracy before and after."""
    parser = argparse.ArgumentParser(description="Train a student that calls a calculator.")
    parser.add_argument("--method", default="opd")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--held_out", type=int, default=128, help="problems to measure the accuracy on")
    given = parser.parse_args()
    student, teacher = (AutoModelForCausalLM.from_pretrained(path, dtype="float32") for path in (STUDENT, TEACHER))
    tokenizer = AutoTokenizer.from_pretrained(STUDENT)
    for model in (student, teacher):
        teach_to_call(tokenizer, model)
    train, held_out = (load_triplets(path, template=TEMPLATE)[0] for path in (TRAIN, HELD_OUT))
    args = CROPConfig(
        "runs/calculator",
        method=given.method,
        max_steps=given.steps,
        prompts_per_step=8,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=given.held_out,
        num_generations_eval=1,
        max_completion_length=152,
        learning_rate=3e-4,
        reward_weights=[0.0],  # accuracy is watched only
        logging_steps=2,
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
    )
    trainer = CROPTrainer(
        model=student,
        teacher=teacher,
        tools=[calculate],
        reward_funcs=accuracy_reward,
        args=args,
        train_dataset=train,
        eval_dataset=held_out.take(given.held_out),
        processing_class=tokenizer,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    print(conversation(trainer, held_out[0]))
    accuracy, calls = "eval_rewards/accuracy_reward/mean", "eval_tools/call_frequency"
    print(f"Right before {before[accuracy]:.1%}, after {after[accuracy]:.1%}; {after[calls]:.1f} calls an answer.")


if __name__ == "__main__":
    main()
