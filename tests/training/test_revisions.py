"""Models of the hub are taken at the revision that is asked for: weights, tokenizer and configuration."""

import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model
from tiny import make_model, make_rows, make_tokenizer

from crop_trl import CROPConfig, CROPTrainer
from crop_trl.training.data import check_same_tokenizer


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the hub as its client leaves it, with one model at `main` and at `v1`."""
    repository = tmp_path / "hub" / "models--someone--model"
    for revision, commit, seed in (("main", "a" * 40, 1), ("v1", "b" * 40, 2)):
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
        make_model(seed=seed).save_pretrained(repository / "snapshots" / commit)
        if revision == "v1":  # whatever reads the tokenizer of `main` fails
            make_tokenizer().save_pretrained(repository / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return "someone/model"


def make(hub, output, teacher_revision=None):
    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "score_top_k": 4}
    args = CROPConfig(
        str(output),
        max_completion_length=12,
        model_init_kwargs={"revision": "v1"},
        teacher_model_name_or_path=hub,
        teacher_revision=teacher_revision,
        **settings,
    )
    return CROPTrainer(model=hub, args=args, train_dataset=make_rows(8))


def test_student_and_teacher_are_taken_at_their_revision(hub, tmp_path):
    trainer = make(hub, tmp_path, "v1")
    want = make_model(seed=2).state_dict()
    for model in (trainer.model, trainer.scorers["teacher"].model):
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in want.items())
    assert trainer.run_settings["teacher_revision"] == "v1"
    with pytest.raises(ValueError, match="Student and teacher tokenizers differ"):
        make(hub, tmp_path)


def test_the_tokenizer_of_a_teacher_with_an_adapter_is_compared_too():
    student, model = make_tokenizer(), make_model()
    student.add_tokens(["more"])
    for teacher in (model, get_peft_model(model, LoraConfig(target_modules="all-linear"))):
        with pytest.raises(ValueError, match="tokenizers differ: 'more'"):
            check_same_tokenizer(student, teacher, make_tokenizer())


def test_a_teacher_on_a_server_has_its_revision_there(tmp_path):
    with pytest.raises(ValueError, match="`teacher_revision` 'v1' is for a teacher in this process"):
        CROPConfig(str(tmp_path), use_cpu=True, bf16=False, teacher_server_urls=["http://a"], teacher_revision="v1")
