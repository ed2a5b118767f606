"""The rollout bank: saved, read back, and in agreement with what the trainer itself selects."""

import pytest
import torch
from tiny import make_rows, make_tokenizer, make_trainer, what_it_reads

from crop_trl import methods
from crop_trl.analysis.bank import RolloutBank, caught_share, collect_bank, kept_overlap
from crop_trl.methods import METHODS, SelectionSettings


@pytest.fixture(scope="module")
def bank(tmp_path_factory):
    given = what_it_reads(*METHODS)
    bank = collect_bank(make_trainer(tmp_path_factory.mktemp("bank"), **given), given["rows"].select(range(4)))
    path = tmp_path_factory.mktemp("saved") / "bank.safetensors"
    bank.settings = {"seed": 0}
    bank.save(path)
    return bank, path


def test_every_method_is_replayed_alike_after_saving(bank):
    original, path = bank
    read = RolloutBank.load(path)
    assert read.runnable_methods() == list(METHODS)
    assert read.settings == {"seed": 0} and read.rows == original.rows
    assert list(read.texts)[:3] == ["original", "paraphrase", "counterfactual"]
    assert read.texts["original"][0] == make_rows(4)[0]["prompt"][0]["content"]
    for name in METHODS:
        a, b = original.select(name), read.select(name)
        assert torch.equal(a.mask, b.mask)
        torch.testing.assert_close(a.teacher_logprobs, b.teacher_logprobs)
        torch.testing.assert_close(a.teacher_advantages, b.teacher_advantages)
        torch.testing.assert_close(a.weights, b.weights, equal_nan=True)


def test_the_trainer_selects_what_a_replay_selects(tmp_path, monkeypatch):
    """Signals seen in training, saved as a bank: `select` gives the masks that entered the loss."""
    seen = {}
    real = methods.select

    def recording(name, signals, loss_mask, settings, **kwargs):
        seen["selection"] = real(name, signals, loss_mask, settings, **kwargs)
        seen["bank"] = RolloutBank(torch.zeros_like(loss_mask, dtype=torch.long), loss_mask, signals, [])
        return seen["selection"]

    monkeypatch.setattr(methods, "select", recording)
    for name in ("crop", "tip", "credit-budgeted", "random"):
        make_trainer(tmp_path, method=name).train()
        seen["bank"].save(tmp_path / "bank.safetensors")
        assert torch.equal(RolloutBank.load(tmp_path / "bank.safetensors").select(name).mask, seen["selection"].mask)


def test_overlap_and_catches(bank):
    read = RolloutBank.load(bank[1])
    names = ["crop", "crop-bottom", "opd"]
    overlap = kept_overlap(read, names)
    torch.testing.assert_close(overlap.diagonal(), torch.ones(3, dtype=torch.float64))
    assert torch.equal(overlap[:2, 2], torch.ones(2, dtype=torch.float64))
    assert caught_share(read, "opd") in (1.0, None)
    kept, large = read.select("crop").mask, read.loss_mask & (read.gap() > 0.5)
    assert caught_share(read, "crop", 0.5) == pytest.approx((kept & large).sum().item() / large.sum().item())
    assert caught_share(read, "crop", 1e9) is None
    student, told = (read.signals[name].sampled_logprobs for name in ("student/original", "teacher/privileged"))
    assert torch.equal(read.gap("opsd"), student - told) and not torch.equal(read.gap("opsd"), read.gap())
    large = read.loss_mask & (student - told > 0.5)
    share = (kept & large).sum().item() / large.sum().item()
    assert caught_share(read, "crop", 0.5, trained="opsd") == pytest.approx(share)


def test_settings_reach_the_selection(bank):
    read = RolloutBank.load(bank[1])
    small, large = (read.select("crop", SelectionSettings(retention_ratio=r)).mask.sum() for r in (0.1, 0.5))
    assert small < large


def test_a_file_that_is_no_bank(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, str(tmp_path / "x.safetensors"))
    with pytest.raises(ValueError, match="is not a rollout bank"):
        RolloutBank.load(tmp_path / "x.safetensors")


def test_a_broken_file(tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"not a bank")
    with pytest.raises(ValueError, match="cannot be read as a rollout bank"):
        RolloutBank.load(tmp_path / "broken.safetensors")


def test_one_prompt_leaves_out_what_needs_others(tmp_path):
    given = what_it_reads(*METHODS)
    bank = collect_bank(make_trainer(tmp_path, **given), given["rows"].select(range(1)))
    assert {"credit", "credit-budgeted"} == set(METHODS) - set(bank.runnable_methods())


def test_a_sample_is_scored_as_in_training_and_leaves_no_trace(tmp_path):
    trainer = make_trainer(tmp_path, method="crop")
    trainer.model.train()
    rows = make_rows(3)
    sampled = trainer.sample(rows, num_generations=2)
    assert [row["id"] for row in sampled.rows] == ["0", "0", "1", "1", "2", "2"]
    assert sampled.loss_mask.sum(1).tolist() == [len(ids) for ids in sampled.completion_ids]
    assert set(sampled.signals) == set(METHODS["crop"].needs)
    paraphrase = make_tokenizer().apply_chat_template(
        [row["paraphrase_prompt"] for row in sampled.rows], add_generation_prompt=True, return_dict=True
    )
    alone = trainer.scorers["teacher"].score(paraphrase["input_ids"], sampled.completion_ids)
    torch.testing.assert_close(sampled.signals["teacher/paraphrase"].logprobs, alone.logprobs)
    assert trainer.model.training and trainer.num_generations_eval == trainer.num_generations
    assert not trainer._metrics["train"] and not trainer._metrics["eval"]
    assert len(trainer.sample(rows, ["student/original"]).completion_ids) == 3 * trainer.num_generations
