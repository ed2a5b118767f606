"""What a trainer is given: taken as it is, or refused in a sentence."""

import pytest
import torch
from architectures import tiny_model
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny import flat_weights, make_model, make_rows, make_tokenizer, make_trainer
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

from crop_trl import CROPConfig, CROPTrainer
from crop_trl.scoring.local import LocalScorer


def overflowing_teacher():
    teacher = make_model(1, hidden=48)
    with torch.no_grad():
        teacher.model.norm.weight.fill_(float("inf"))
    return teacher


@pytest.mark.parametrize("method", ["opd", "crop"])
def test_a_teacher_that_is_not_finite_stops_before_the_update(tmp_path, method):
    trainer = make_trainer(tmp_path, method=method, teacher=overflowing_teacher(), preflight=False)
    before = flat_weights(trainer.model)
    with pytest.raises(
        ValueError, match="log-probability, weight or advantage that is not finite; load the teacher in bfloat16"
    ):
        trainer.train()
    assert torch.equal(before, flat_weights(trainer.model))


def test_engines_that_cast_weights_are_refused(tmp_path):
    for name in ("use_transformers_continuous_batching", "use_transformers_paged"):
        for precision in ({"bf16": True}, {"bf16": False, "fp16": True}):
            with pytest.raises(ValueError, match=f"`{name}` casts the trained weights to half precision"):
                CROPConfig(str(tmp_path), use_cpu=True, **precision, **{name: True})


def test_what_cannot_work_is_refused(tmp_path):
    student = make_model(0)
    with pytest.raises(ValueError, match="Student and teacher share weights"):
        make_trainer(tmp_path, student=student, teacher=student)
    with pytest.raises(ValueError, match="PromptTuningConfig is not supported"):
        make_trainer(tmp_path, peft_config=PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="40 vocabulary entries, fewer than the 58 tokens"):
        make_trainer(tmp_path, teacher=make_model(1, vocab=40))
    with pytest.warns(UserWarning, match="trainable weights are bfloat16"):
        make_trainer(tmp_path, student=make_model(0).to(torch.bfloat16))


def test_what_a_user_may_pass_works(tmp_path):
    """A head with fewer padding rows, a teacher with an adapter, the folder of an adapter, experts, no upper limits."""
    padded = make_model(0, vocab=100)
    with torch.no_grad():
        padded.lm_head.weight[58:] = 0
        padded.lm_head.weight[:, 0] = 9.0  # what only pads the head is never drawn
    adapter = LoraConfig(r=4, init_lora_weights=False, target_modules=["lm_head", "q_proj"])
    folder = tmp_path / "adapter"
    base = make_model(0)
    base.save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(loaded, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    experts = tiny_model("Qwen3MoeForCausalLM")
    experts.generation_config.eos_token_id = 1
    for given in (
        {"teacher": get_peft_model(make_model(1), adapter)},
        {"teacher": str(folder)},
        {"student": str(folder)},
        {"student": experts},
        {"epsilon_high": None, "delta": 2.0, "max_completion_length": 12},
        {"rows": make_rows(16).map(lambda row: {"images": [None]})},
    ):
        trainer = make_trainer(tmp_path / "run", **given)
        before = flat_weights(trainer.model)
        trainer.train()
        assert not torch.equal(before, flat_weights(trainer.model)), given


def test_arguments_in_grpos_order_and_others_are_told(tmp_path):
    rows, teacher = Dataset.from_list(make_rows(16)), make_model(1)
    settings = {"use_cpu": True, "bf16": False}
    grpo, crop = GRPOConfig(str(tmp_path), **settings), CROPConfig(str(tmp_path), **settings)
    for arguments, message in (
        ((make_model(0), lambda completions, **kwargs: [0.0], crop, rows), "by name"),
        ((make_model(0), teacher, None, grpo, rows), "must be a CROPConfig"),
        ((make_model(0).requires_grad_(False), teacher, None, crop), "no weights that require a gradient"),
    ):
        with pytest.raises(ValueError, match=message):
            CROPTrainer(*arguments)


class Wrong:
    """A scorer whose answers have one thing wrong."""

    def __init__(self, change):
        self.change = change
        self.inner = LocalScorer(make_model(1, hidden=48), 4, 0)

    def score(self, prompt_ids, completion_ids):
        return self.change(self.inner.score(prompt_ids, completion_ids))


def with_column(scored):
    scored.sampled_logprobs = scored.sampled_logprobs.unsqueeze(-1)
    return scored


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (with_column, r"sampled_logprobs \(24, 12, 1\) for 24 responses; they must be"),
        (lambda scored: scored.rows(slice(0, 1)), "for 24 responses"),
        (lambda scored: None, "returned a NoneType; it must return a TopKLogprobs"),
    ],
)
def test_a_scorer_that_breaks_its_promise(tmp_path, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_trainer(tmp_path, teacher=Wrong(change), preflight=False).train()


def test_rows_that_cannot_be_used_leave_and_are_counted(tmp_path, capsys):
    rows = make_rows(16, conversational=False).to_list()
    rows[0]["paraphrase_prompt"] = None
    rows[1]["counterfactual_prompt"] = " "
    for row in rows:
        row["system_prompt"] = ""  # which nobody reads
    trainer = make_trainer(tmp_path, rows=Dataset.from_list(rows), disable_tqdm=False)
    assert len(trainer.train_dataset) == 14
    printed = capsys.readouterr().out
    assert "1 without paraphrase_prompt" in printed and "1 with an empty counterfactual_prompt" in printed
    for row in rows:
        row["counterfactual_prompts"] = "what is 3 plus 4"
    with pytest.raises(ValueError, match="`counterfactual_prompts` must hold a list of prompts in each row"):
        make_trainer(tmp_path, rows=Dataset.from_list(rows))


def test_streaming_without_a_usable_row_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="No step was made"):
        make_trainer(tmp_path, rows=make_rows(16).to_iterable_dataset(), max_prompt_length=2).train()
    trainer = make_trainer(tmp_path, rows=make_rows(16).to_iterable_dataset(), max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
