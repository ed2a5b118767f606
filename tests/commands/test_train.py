"""`crop-trl train` on the embedded task: a short run, and what a user gets to read for a mistake."""

import json
import resource
import sys
from pathlib import Path

import pytest
from viewer.pages import unpacked

from crop_trl.commands import train
from crop_trl.prompts import saved_how_asked

ROOT = Path(__file__).parents[2]
TINY = ["--config", "examples/configs/tiny_math.yaml", "--use_cpu", "true", "--disable_tqdm", "true"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def few_rows(tmp_path, name: str, count: int) -> str:
    lines = (ROOT / "examples/tiny_math/data" / name).read_text().splitlines()[:count]
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    return str(tmp_path / name)


def run(tmp_path, *extra: str) -> dict:
    small = ["--eval_dataset_name", few_rows(tmp_path, "heldout.jsonl", 8), "--per_device_eval_batch_size", "32"]
    small += ["--prompts_per_step", "4", "--per_device_train_batch_size", "8", "--max_steps", "2"]
    small += ["--max_completion_length", "40"]
    train.main([*TINY, *small, "--output_dir", str(tmp_path / "out"), *extra])
    return json.loads((tmp_path / "out" / "result.json").read_text())


def test_two_steps_end_with_numbers_and_a_picture(tmp_path, capsys):
    """With room for whole answers."""
    result = run(tmp_path, "--max_completion_length", "152")
    assert result["method"] == "crop" and result["steps"] == 2
    assert 0 <= result["accuracy_before"] <= 1 and 0 <= result["accuracy_after"] <= 1
    assert (tmp_path / "out" / "heatmap.png").stat().st_size > 20_000
    facts, arrays = unpacked((tmp_path / "out" / "view.html").read_text())
    assert facts["method"] == "crop" and {"tip", "random", "esr"} < {method["name"] for method in facts["methods"]}
    # Four answers to each of eight held-out problems; some are wrong, and it is known where.
    assert len(facts["answers"]) == 32 and max(len(problem["views"]) for problem in facts["problems"]) == 4
    assert {answer["right"] for answer in facts["answers"]} == {True, False}
    assert any(answer["wrong"] is not None for answer in facts["answers"])
    assert (tmp_path / "out" / "model.safetensors").exists()
    template = "{problem}\nGive the answer in \\boxed{}."
    asked = {"prompt_template": template, "conversational": True, "chat_template_kwargs": {}}
    assert saved_how_asked(tmp_path / "out") == asked
    card = (tmp_path / "out" / "README.md").read_text()
    for told in ("Dataset name | examples/tiny_math/data/train.jsonl", "Eval dataset name | heldout.jsonl"):
        assert told in card
    assert "Prompt template | {problem} Give" in card and "Num counterfactuals | 4" in card
    printed = capsys.readouterr().out
    assert "Accuracy on 8 held-out problems, 4 sampled answers each" in printed
    assert "Look inside 32 answers, token by token, under every method: open " in printed
    assert "640 of 640 records kept" in printed


def test_base_evaluates_and_trains_nothing_and_is_called_so_in_every_log(tmp_path):
    pytest.importorskip("tensorboard")
    result = run(tmp_path, "--method", "base", "--report_to", "tensorboard")
    assert result["method"] == "base" and result["steps"] == 0 and result["accuracy_after"] is None
    assert not (tmp_path / "out" / "model.safetensors").exists()
    (events,) = (tmp_path / "out" / "runs").glob("*/events*")
    assert b'"method": "base"' in events.read_bytes() and b"eval/rewards/accuracy_reward/mean" in events.read_bytes()


def test_an_output_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="error: .*Not a directory: '.*file/out'"):
        train.main([*TINY, "--output_dir", str(tmp_path / "file" / "out")])


def test_a_disk_that_is_full_when_the_model_is_saved(tmp_path):
    """The error status is that of a text handed to `sys.exit`, 1."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(SystemExit, match="error: Process 0 could not save the model to .* GiB free .*too large"):
            run(tmp_path, "--max_steps", "1", "--heatmap", "false", "--reward", "none")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_opd_takes_prompts_without_triplets(tmp_path, capsys):
    rows = [json.loads(line) for line in (ROOT / "examples/tiny_math/data/train.jsonl").read_text().splitlines()[:9]]
    plain = [{"problem": row["original_problem"], "answer": row["answer"]} for row in rows]
    data = write(tmp_path, "plain.jsonl", *plain, {"prompt": "What is 1 + 1?"}, {"answer": "no prompt"})
    result = run(tmp_path, "--method", "opd", "--dataset_name", data, "--eval_dataset_name", data)
    assert result["method"] == "opd" and result["steps"] == 2 and result["accuracy_after"] is not None
    printed = capsys.readouterr().out
    assert "10 of 11 records kept (left out: 1 without prompt or problem)" in printed
    assert "No heat map is drawn: it shows a triplet" in printed


def test_several_counterfactuals_and_lora(tmp_path):
    extra = ["--num_counterfactuals", "2", "--method", "crop-max", "--use_peft", "true", "--lora_r", "4"]
    assert run(tmp_path, *extra, "--lora_target_modules", "q_proj", "--heatmap", "false")["steps"] == 2


def write(tmp_path, name: str, *records) -> str:
    (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(tmp_path / name)


def other_tokenizer(tmp_path) -> str:
    from tiny import make_model, make_tokenizer

    make_model().save_pretrained(tmp_path / "other")
    make_tokenizer().save_pretrained(tmp_path / "other")
    return str(tmp_path / "other")


REJECTED = {"original_problem": "a", "paraphrase_problem": "b", "counterfactual_problem": "c", "triplet_complete": True}
MISTAKES = {
    "unknown method": (["--method", "crpo"], "Unknown method 'crpo': choose one of base, cal-opd, cepo"),
    "ratio": (["--retention_ratio", "1.2"], "`retention_ratio` must lie in (0, 1], got 1.2"),
    "K": (["--score_top_k", "0"], "`score_top_k` must be a whole number of at least 1, got 0"),
    "KL": (["--beta", "0.1"], "`beta=0.1` does not work here, there is no KL term"),
    "loss type": (["--loss_type", "grpo"], "`loss_type='grpo'` does not work here"),
    "importance sampling": (
        ["--vllm_importance_sampling_correction", "true"],
        "`vllm_importance_sampling_correction=True` does not work here, it would drop whole responses",
    ),
    "prompts per step": (
        ["--prompts_per_step", "3"],
        "`prompts_per_step` 3 x `num_generations` 4 = 12 responses do not divide into 1 processes x "
        "`per_device_train_batch_size` 64",
    ),
    "template": (["--prompt_template", "Solve it."], "`prompt_template` must contain {problem} exactly once"),
    "reward": (["--reward", "acc"], "`reward` 'acc' is not known: choose one of accuracy, none"),
    "no such data": (["--dataset_name", "./none.jsonl"], "`dataset_name` './none.jsonl' does not exist"),
    "no such student": (
        ["--model_name_or_path", "./nowhere"],
        "No tokenizer can be loaded from `model` './nowhere'; give a folder with a saved model and tokenizer",
    ),
    "no such teacher": (
        ["--teacher_model_name_or_path", "./nowhere"],
        "No tokenizer can be loaded from `teacher_model_name_or_path` './nowhere'; give a folder with a saved model "
        "and tokenizer, the name of one on a hub that can be reached, or the tokenizer to `CROPTrainer` as "
        "`teacher_processing_class` (",
    ),
    "short prompts": (["--max_prompt_length", "5"], "No row is left of 640: 640 with a prompt longer than"),
    "more prompts than there are": (
        ["--prompts_per_step", "2048"],
        "640 prompts are fewer than one step takes (2048)",
    ),
    "negative weight": (["--iw_max_weight", "-3"], "`iw_max_weight` must be a number of at least 1, got -3.0"),
    "lengths that fall": (
        ["--completion_length_schedule", '{"10": 90, "20": 80}'],
        "`completion_length_schedule` must name steps and limits that rise up to `max_completion_length`",
    ),
    "teacher settings": (["--teacher_init_kwargs", "[1]"], "`teacher_init_kwargs` is no JSON object"),
    "type under its old name": (
        ["--teacher_init_kwargs", '{"torch_dtype": "bfloat16"}'],
        "`torch_dtype` in `teacher_init_kwargs` is not read beside `dtype`",
    ),
    "the student's type under its old name": (
        ["--model_init_kwargs", '{"torch_dtype": "bfloat16"}'],
        "`torch_dtype` in `model_init_kwargs` is not read beside `dtype`",
    ),
    "no unrelated prompt": (
        ["--method", "credit", "--credit_num_negatives", "16"],
        "`credit_num_negatives` 16 needs as many other prompts in a batch of rollouts, which holds 16",
    ),
    "quantised student": (["--load_in_4bit", "true"], "`load_in_4bit` is for the student, which stays whole"),
    "adapter without use_peft": (
        ["--lora_r", "8"],
        "`lora_r` is for an adapter, and without `use_peft` all weights would be trained; add `--use_peft true`",
    ),
    "no liger": (
        ["--use_liger_kernel", "true"],
        "needs the package liger_kernel, which is not installed",
    ),
    "mistyped": (["--retention_ration", "0.1"], "`--retention_ration` is no option of `crop-trl train`; did you mean"),
    "method and selector": (["--method", "opd", "--selector", "a.py:b"], "and `selector` 'a.py:b' exclude each other"),
    "two folders": (["--runs_dir", "runs"], "`runs_dir` and `output_dir` exclude each other; give one."),
    "no selector": (["--selector", "a.py:b"], "`selector` 'a.py:b': there is no file 'a.py'"),
    "no such checkpoint": (["--resume_from_checkpoint", "./none"], "`resume_from_checkpoint` './none' is no folder"),
    "nothing to resume": (["--resume_from_checkpoint", "true"], "`resume_from_checkpoint` finds no checkpoint in"),
    "server": (
        ["--teacher_server_urls", "http://localhost:1"],
        "`teacher_server_urls` http://localhost:1 does not answer",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_sentence(tmp_path, monkeypatch, mistake):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    arguments, sentence = MISTAKES[mistake]
    with pytest.raises(SystemExit) as stopped:
        train.main([*TINY, "--output_dir", str(tmp_path / "out"), *arguments])
    message = str(stopped.value)
    assert message.startswith("error: ")
    assert sentence in message, message
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_an_argument_that_loading_a_teacher_does_not_know(tmp_path):
    with pytest.raises(SystemExit, match="error: The teacher cannot be loaded .*'nonsense'.*; take out"):
        train.main([*TINY, "--output_dir", str(tmp_path), "--teacher_init_kwargs", '{"nonsense": 1}'])


def test_mistakes_in_files_get_one_sentence(tmp_path):
    rejected = write(tmp_path, "rejected.jsonl", {**REJECTED, "usable_for_training": True}, REJECTED)
    (tmp_path / "broken.jsonl").write_text('{"id": 1}\n{"id": \n')
    for arguments, sentence in (
        (["--dataset_name", rejected], "1 without validation_passed; 1 without usable_for_training"),
        (["--dataset_name", str(tmp_path / "broken.jsonl")], "broken.jsonl, line 2 is not JSON"),
        (["--teacher_model_name_or_path", other_tokenizer(tmp_path)], "tokenizers differ: '<|pad|>' is 0"),
    ):
        with pytest.raises(SystemExit) as stopped:
            train.main([*TINY, "--output_dir", str(tmp_path / "out"), *arguments])
        assert sentence in str(stopped.value)
