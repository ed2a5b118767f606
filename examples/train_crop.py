"""Train a student with CROP on triplets: a page to copy and change.

    accelerate launch --config_file accelerate_configs/cpu.yaml examples/train_crop.py \
        --config examples/configs/tiny_math.yaml

`crop-trl train` does the same with the same files and options, and takes a selector of your own (`--selector`).
"""

from trl import ModelConfig, TrlParser, get_peft_config

from crop_trl import CROPTrainer
from crop_trl.commands.errors import told
from crop_trl.evaluation.grading import accuracy_reward
from crop_trl.prompts import save_how_asked
from crop_trl.runs import ScriptArguments, TrainConfig, check_run, finish_run
from crop_trl.triplets import load_triplets


def main() -> None:
    """Parse, load, train, save, say what came out."""
    with told():  # what is wrong with settings or data ends in one sentence
        # Settings: a YAML file (`--config`), the command line on top; `TrainConfig` is `CROPConfig` that knows `base`.
        script, args, model = TrlParser((ScriptArguments, TrainConfig, ModelConfig)).parse_args_and_config()
        check_run(script, args, model)

        # Data: JSONL records that hold a problem, a paraphrase of it and a counterfactual; each becomes a prompt. A
        # dataset of your own needs the columns `prompt`, `paraphrase_prompt` and `counterfactual_prompt`.
        wrapping = {
            "template": script.prompt_template,
            "conversational": script.conversational,
            "counterfactuals": script.num_counterfactuals,
            "paraphrases": script.num_paraphrases,
        }
        train_dataset, report = load_triplets(script.dataset_name, script.dataset_split, **wrapping)
        eval_dataset = None
        if script.eval_dataset_name:
            eval_dataset, _ = load_triplets(script.eval_dataset_name, script.eval_dataset_split, **wrapping)
        if args.process_index == 0:
            print(f"Training triplets: {report}.")

        # The student samples, the teacher (`teacher_model_name_or_path` or servers, in `args`) scores every token after
        # each of the three prompts, and only tokens that `method` keeps enter the loss. A reward is not needed; one
        # with weight 0 is watched only.
        trainer = CROPTrainer(
            model=model.model_name_or_path,
            reward_funcs=[accuracy_reward] if script.reward == "accuracy" else [],
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            peft_config=get_peft_config(model),
            run_settings={**script.describe(), **args.describe()},
        )
    if args.train:  # and not `--method base`
        if trainer.accelerator.is_main_process:
            # For evaluation, which puts problems to the student as they were put here.
            save_how_asked(args.output_dir, script.prompt_template, script.conversational, args.chat_template_kwargs)
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_state()

    # Accuracy before and after, `result.json`, and what the method keeps: a picture of one response, a page of several.
    finish_run(trainer, script.heatmap, view=script.view)


if __name__ == "__main__":
    main()
