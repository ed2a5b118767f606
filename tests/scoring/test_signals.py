"""Signals: which passes a method pays for, several prompts of a kind, unrelated prompts."""

import pytest
import torch
from tiny import make_model, make_rows, make_trainer, what_it_reads

from crop_trl.methods import METHODS, SelectionSettings, select
from crop_trl.prompts import draw_negatives, prompt_kinds, prompt_variants
from crop_trl.scoring.local import LocalScorer
from crop_trl.scoring.signals import collect_signals

# Sequences scored for each response: by the teacher, by the student.
PASSES = {
    "opd": (1, 0),
    "iw-opd": (1, 1),
    "credit": (2, 0),
    "credit-budgeted": (2, 0),
    "entropy": (1, 1),
    "tip": (1, 1),
    "ta-opd": (1, 1),
    "crop": (3, 0),
    "crop-max": (3, 0),
    "crop-bottom": (3, 0),
    "crop-student": (1, 3),
    "crop-ent": (3, 1),
    "cf-opd": (2, 0),
    "pc-opd": (2, 0),
    "random": (1, 0),
    "first": (1, 0),
    "last": (1, 0),
    "least-likely": (1, 1),
    "vopd": (1, 1),
    "poweropd": (1, 1),
    "top-d": (1, 1),
    "prune-opd": (1, 1),
    "esr": (1, 0),
    "fire-opd": (1, 1),
    "opsa": (0, 1),
    "crop-soft": (3, 0),
    "opsd": (1, 0),
    "pw-opsd": (1, 0),
    "cal-opd": (3, 1),
    "opdvr": (1, 1),
    "rlsd": (1, 1),
    "cepo": (2, 0),
    "rlcsd": (2, 0),
}


class Counting(LocalScorer):
    """Remembers how many sequences each call scored."""

    def score(self, prompt_ids, completion_ids, top_k=None):
        self.calls = [*getattr(self, "calls", []), len(prompt_ids)]
        return super().score(prompt_ids, completion_ids, top_k)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_method_pays_for_the_passes_it_names(tmp_path, method):
    trainer = make_trainer(tmp_path, method=method, preflight=False, **what_it_reads(method))
    for scorer in trainer.scorers.values():
        scorer.__class__ = Counting
    trainer.train()
    calls = tuple(sum(getattr(scorer, "calls", [])) / 8 for scorer in trainer.scorers.values())
    assert calls == PASSES[method]
    assert all(len(getattr(scorer, "calls", [])) <= 1 for scorer in trainer.scorers.values())


def test_rollout_time_log_probs_come_with_the_student_signals(tmp_path):
    """Where GRPO would score the student once more, the pass is shared."""
    trainer = make_trainer(tmp_path, method="tip", num_iterations=2, max_steps=2, preflight=False)
    trainer.scorers["student"].__class__ = Counting
    trainer.train()
    assert trainer.scorers["student"].calls == [8]


def several(rows, counterfactuals=(3, 1, 2)):
    """Rows with a varying number of counterfactuals in the plural column."""

    def add(row, index):
        texts = [f"what is the sum of {k} and {index}" for k in range(counterfactuals[index % len(counterfactuals)])]
        return {"counterfactual_prompts": [[{"role": "user", "content": text}] for text in texts]}

    return rows.map(add, with_indices=True)


def test_plural_columns_are_preferred_and_may_be_ragged():
    row = {"prompt": "a", "counterfactual_prompt": "b", "counterfactual_prompts": ["c", "d"], "paraphrase_prompts": []}
    assert prompt_variants(row, "counterfactual") == ["c", "d"]
    assert prompt_variants(row, "paraphrase") == []
    assert prompt_variants({"paraphrase_prompt": "p"}, "paraphrase") == ["p"]
    assert prompt_kinds(("teacher/negative", "teacher/paraphrase")) == ["original", "paraphrase"]


def random_ids(count, low, high, generator):
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [torch.randint(58, (n,), generator=generator).tolist() for n in lengths]


def test_several_counterfactuals_against_one_at_a_time():
    """Mean and maximum of the margins, each computed from a single counterfactual on its own."""
    g = torch.Generator().manual_seed(0)
    scorers = {"teacher": LocalScorer(make_model(0), 4, 0)}
    completions = random_ids(3, 4, 20, g)
    counts = (3, 1, 2)
    prompts = {
        "original": [random_ids(1, 3, 9, g) for _ in range(3)],
        "paraphrase": [random_ids(2, 3, 9, g) for _ in range(3)],
        "counterfactual": [random_ids(n, 3, 9, g) for n in counts],
    }
    needs = ("teacher/original", "teacher/paraphrase", "teacher/counterfactual")
    signals = collect_signals(needs, scorers, prompts, completions)
    assert [len(signals.variants(f"teacher/{kind}")) for kind in ("counterfactual", "paraphrase")] == [3, 2]
    for ask in (signals.__getitem__, signals.variants):
        with pytest.raises(ValueError, match="There is no signal 'teacher/hnit'; there are teacher/original, "):
            ask("teacher/hnit")
    assert signals.get("teacher/hnit") is None
    with pytest.raises(ValueError, match="after 3 prompts"):
        signals["teacher/counterfactual"]
    width = signals["teacher/original"].sampled_logprobs.size(1)
    mask = torch.arange(width) < torch.tensor([[len(c)] for c in completions])
    mean = select("crop", signals, mask, SelectionSettings()).scores
    largest = select("crop-max", signals, mask, SelectionSettings()).scores

    for row, count in enumerate(counts):
        margins = []
        for m in range(count):
            per_paraphrase = []
            for p in range(2):
                one = {
                    "original": [prompts["original"][row]],
                    "paraphrase": [[prompts["paraphrase"][row][p]]],
                    "counterfactual": [[prompts["counterfactual"][row][m]]],
                }
                single = collect_signals(needs, scorers, one, [completions[row]])
                ones = torch.ones(1, len(completions[row]), dtype=torch.bool)
                per_paraphrase.append(select("crop", single, ones, SelectionSettings()).scores[0])
            margins.append(torch.stack(per_paraphrase).mean(0))
        n = len(completions[row])
        torch.testing.assert_close(mean[row, :n], torch.stack(margins).mean(0), atol=1e-5, rtol=0)
        torch.testing.assert_close(largest[row, :n], torch.stack(margins).amax(0), atol=1e-5, rtol=0)


def test_with_one_counterfactual_the_maximum_is_crop(tmp_path):
    signals = {}
    g = torch.Generator().manual_seed(1)
    scorers = {"teacher": LocalScorer(make_model(0), 4, 0)}
    prompts = {kind: [random_ids(1, 3, 9, g) for _ in range(4)] for kind in prompt_kinds(METHODS["crop"].needs)}
    signals = collect_signals(METHODS["crop"].needs, scorers, prompts, random_ids(4, 10, 10, g))
    mask = torch.ones(4, 10, dtype=torch.bool)
    crop, largest = (select(name, signals, mask, SelectionSettings()) for name in ("crop", "crop-max"))
    assert torch.equal(crop.scores, largest.scores) and torch.equal(crop.mask, largest.mask)


@pytest.mark.parametrize("method", ["crop", "crop-max", "cf-opd", "crop-student"])
def test_training_with_several_counterfactuals(tmp_path, method):
    trainer = make_trainer(tmp_path, method=method, rows=several(make_rows(16)), preflight=False)
    for scorer in trainer.scorers.values():
        scorer.__class__ = Counting
    trainer.train()
    # Two prompts a step, four responses each, with 3 and 1 counterfactuals.
    paraphrased = method != "cf-opd"
    triplet = 4 * (3 + 1) + 8 * (1 + paraphrased)
    teacher, student = (sum(getattr(scorer, "calls", [])) for scorer in trainer.scorers.values())
    assert (teacher, student) == ((8, triplet) if method == "crop-student" else (triplet, 0))


def test_unrelated_prompts():
    batch = [[1], [1], [2], [2], [3], [3]]
    drawn = draw_negatives(batch, range(6), 2, seed=42, step=3)
    for row, negatives in enumerate(drawn):
        assert len(negatives) == 2 and batch[row] not in negatives and negatives[0] != negatives[1]
    # By place in the batch, not by call: a process that holds the last rows draws the same.
    assert draw_negatives(batch, range(4, 6), 2, seed=42, step=3) == drawn[4:]
    many = [[i] for i in range(40)]
    assert draw_negatives(many, range(40), 1, 42, 0) != draw_negatives(many, range(40), 1, 42, 1)
    with pytest.raises(ValueError, match="`credit_num_negatives` 3 needs as many other prompts"):
        draw_negatives(batch, range(6), 3, 42, 0)
    with pytest.raises(ValueError, match="`credit_num_negatives` 1"):
        draw_negatives([[1], [1]], range(2), 1, 42, 0)


def test_unrelated_prompts_are_averaged():
    g = torch.Generator().manual_seed(2)
    scorers = {"teacher": LocalScorer(make_model(0), 4, 0)}
    completions = random_ids(2, 5, 5, g)
    prompts = {kind: [random_ids(n, 3, 9, g) for _ in range(2)] for kind, n in (("original", 1), ("negative", 3))}
    signals = collect_signals(("teacher/original", "teacher/negative"), scorers, prompts, completions)
    each = [
        scorers["teacher"].score([prompts["negative"][row][c] for row in range(2)], completions).sampled_logprobs
        for c in range(3)
    ]
    torch.testing.assert_close(signals["teacher/negative"].sampled_logprobs, torch.stack(each).mean(0))


def test_entries_that_a_scorer_returns_beyond_k_are_left_out():
    g = torch.Generator().manual_seed(3)
    prompts = {"original": [random_ids(1, 3, 9, g) for _ in range(2)]}
    completions = random_ids(2, 5, 5, g)
    more, asked = (
        collect_signals(("teacher/original",), {"teacher": LocalScorer(make_model(0), k, 0)}, prompts, completions, 4)
        for k in (9, 4)
    )
    for name in ("token_ids", "logprobs", "sampled_logprobs"):
        assert torch.equal(*(getattr(signals["teacher/original"], name) for signals in (more, asked)))


def test_unknown_signal():
    for name in ("antonym", "/original", "teacher/", "teacher/a/b"):
        with pytest.raises(ValueError, match=f"Unknown signal '{name}': it is a reader, a slash and a kind of prompt"):
            prompt_kinds((name,))
