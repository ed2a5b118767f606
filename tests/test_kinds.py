"""Prompts of any kind, rewards, own settings: what a method of a user's own is given, in training and in a replay."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import make_rows, make_tokenizer, make_trainer, metric, what_it_reads
from viewer.pages import unpacked

from crop_trl import CROPConfig, Method, SelectionSettings, TopKLogprobs, register_method, select
from crop_trl.analysis.bank import RolloutBank, bank_of, collect_bank
from crop_trl.analysis.tokens import TokenTable
from crop_trl.commands import replay, train
from crop_trl.methods import METHODS
from crop_trl.methods.divergence import topk_jsd
from crop_trl.prompts import normal_prompt, prompt_variants, render_prompts, row_kinds
from crop_trl.runs import ScriptArguments, TrainConfig
from crop_trl.training.callbacks import RolloutCallback
from crop_trl.training.export import read_export
from crop_trl.triplets import build_dataset

ROOT = Path(__file__).parents[1]
TINY = ["--config", str(ROOT / "examples/configs/tiny_math.yaml"), "--use_cpu", "true", "--disable_tqdm", "true"]
TINY += ["--prompts_per_step", "4", "--per_device_train_batch_size", "8", "--max_steps", "2", "--reward", "none"]
TINY += ["--max_completion_length", "48"]


@pytest.fixture(autouse=True)
def table():
    """What a test adds to the table of methods goes again."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


class Recorder(RolloutCallback):
    def __init__(self):
        self.rollouts = []

    def on_rollout(self, args, state, control, rollout, **kwargs):
        self.rollouts.append(rollout)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# --- End to end -------------------------------------------------------------------------------------------------------

HINTED = """
from crop_trl import Method
from crop_trl.methods.divergence import topk_jsd


def moved(signals, ctx):
    "How far the hint moves the teacher."
    value = topk_jsd(signals["teacher/original"], signals["teacher/hint"])
    ctx.measures["moved"] = value
    return ctx.method_settings["sign"] * value


hinted = Method(needs=("teacher/original",), score=moved, target="teacher/hint", settings={"sign": 1.0})
"""


def test_a_method_after_a_hint_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "mine.py").write_text(HINTED)
    records = [json.loads(line) for line in (ROOT / "examples/tiny_math/data/train.jsonl").open()][:9]
    hints = [
        {"problem": r["original_problem"], "hint_problem": f"{r['original_problem']} It is {r['answer']}."}
        for r in records
    ]
    del hints[3]["hint_problem"]
    data = tmp_path / "hints.jsonl"
    data.write_text("".join(json.dumps(hint) + "\n" for hint in hints))
    mine = [*TINY, "--selector", f"{tmp_path / 'mine.py'}:hinted", "--output_dir", str(tmp_path / "out")]
    mine += ["--eval_dataset_name", str(data), "--method_settings", '{"sign": -1}']

    # Triplets have no such column: said before any model is loaded, since there is none.
    with pytest.raises(SystemExit) as stopped:
        train.main([*mine])
    assert str(stopped.value).startswith(
        "error: Method 'mine.py:hinted' needs the dataset columns prompt, hint_prompt, but hint_prompt is missing "
        "(there are: prompt, paraphrase_prompt, counterfactual_prompt, counterfactual_prompts, answer, id, solution); "
        "add it (to a record: "
        "hint_problem), or choose a method that works on prompts alone"
    )
    with pytest.raises(SystemExit, match=r"has no setting 'sing' \(`method_settings`\); it has sign\."):
        train.main([*mine, "--method_settings", '{"sing": 1}'])

    train.main([*mine, "--dataset_name", str(data)])
    printed = capsys.readouterr().out
    assert "1 of 9 rows left out: 1 without hint_prompt" in printed
    assert json.loads((tmp_path / "out/result.json").read_text())["passes"] == 2
    # The page begins with the method, and shows the prompt that it compares with.
    facts, _ = unpacked((tmp_path / "out/view.html").read_text())
    kinds = [kind for kind, *_ in facts["problems"][0]["views"][0]]
    assert facts["method"] == "mine.py:hinted" and kinds == ["original", "hint"]
    assert "teacher/hint" in [reading["name"] for reading in facts["readings"]]
    assert "Settings of the method | sign -1" in (tmp_path / "out/README.md").read_text()
    exported = TokenTable.from_run(tmp_path / "out")
    prompts = exported.rows[0]["prompts"]
    assert list(prompts) == ["original", "hint"] and prompts["hint"][0].count("It is") == 1
    assert set(exported.measures["mine.py:hinted"]) == {"moved"}

    # A replay needs no triplets either: it has what the rows allow.
    own = [*mine, "--dataset_name", str(data), "--bank", str(tmp_path / "bank.safetensors"), "--bank_prompts", "4"]
    replay.main(own)
    bank = RolloutBank.load(tmp_path / "bank.safetensors")
    assert "mine.py:hinted" in bank.runnable_methods() and "crop" not in bank.runnable_methods()
    forth, back = (bank.select("mine.py:hinted", SelectionSettings(method_settings={"sign": s})) for s in (1, -1))
    assert torch.equal(forth.scores, -back.scores)
    assert torch.equal(forth.teacher_logprobs, bank.signals["teacher/hint"].sampled_logprobs)
    # What other teachers would say is not in it.
    for other in (["--teacher_source", "student"], ["--teachers", '{"a": "x"}', "--teacher_model_name_or_path", ""]):
        with pytest.raises(SystemExit, match=r"error: `teachers?(_source)?` is .*, but .* was sampled with"):
            replay.main([*own, *other])
    # Settings of one method are none of another's that is looked at beside it.
    bank.select("tip", SelectionSettings(method_settings={"sign": 1}))


# --- Columns and records ----------------------------------------------------------------------------------------------


def test_columns_of_a_row_that_are_prompts():
    chat = {"prompt": user("a"), "hint_prompt": user("b"), "rule_prompts": [user("c"), user("d")], "answer": "e"}
    # A text beside a conversation, a number, what is drawn from the batch, what is empty: no prompts of the row.
    other = {"system_prompt": "f", "num_prompts": 3, "negative_prompt": user("g"), "old_prompts": [], "x_prompt": None}
    assert row_kinds({**chat, **other}) == ["original", "hint", "rule"]
    assert row_kinds({"system_prompt": "f", "prompt": "a"}) == ["original", "system"]
    assert [len(prompt_variants(chat, kind)) for kind in ("hint", "rule", "empty", "nothing")] == [1, 2, 1, 0]


def test_records_with_prompts_of_any_kind():
    records = [
        {
            "problem": "1 + 1",
            "hint_problem": "1 + 1, so 2",
            "rule_problems": ["a", "b"],
            "num_problems": 3,
            "answer": 2,
        },
        {"prompt": user("2 + 2"), "hint_prompt": "plain", "rule_prompts": [user("c"), ""], "old_problem": " "},
        {"prompt": "3 + 3"},
        {"hint_problem": "no prompt"},
    ]
    rows, report = build_dataset(records, "Solve {problem}!")
    assert str(report) == "3 of 4 records kept (left out: 1 without prompt or problem)"
    assert rows.column_names == ["prompt", "hint_prompt", "rule_prompts", "answer", "id"]
    assert rows["prompt"][:] == [user("Solve 1 + 1!"), user("2 + 2"), user("3 + 3")]
    assert rows["hint_prompt"][:] == [user("Solve 1 + 1, so 2!"), user("plain"), None]
    assert rows["rule_prompts"][:] == [[user("Solve a!"), user("Solve b!")], [user("c")], None]
    # A triplet may have more kinds than three; its own texts stay bare problems in one wrapper.
    triplet = {f"{kind}_problem": kind for kind in ("original", "paraphrase", "counterfactual", "hint")}
    triplet |= dict.fromkeys(("triplet_complete", "usable_for_training", "validation_passed"), True)
    rows, _ = build_dataset([{**triplet, "prompt": "as it was asked elsewhere"}], "{problem}?", conversational=False)
    assert [rows[0][c] for c in ("prompt", "paraphrase_prompt", "hint_prompt")] == ["original?", "paraphrase?", "hint?"]


def test_the_length_limit_looks_at_every_kind_unless_it_is_narrowed(tmp_path, capsys):
    long = user(" ".join(["plus"] * 40))
    rows = make_rows(16).map(lambda row, i: {"hint_prompt": long if i < 3 else row["prompt"]}, with_indices=True)
    for method in ("crop", "opd"):
        trainer = make_trainer(tmp_path, rows=rows, max_prompt_length=30, method=method)
        assert len(trainer.train_dataset) == 13
    narrow = {"max_prompt_length_kinds": ["original", "paraphrase"]}
    assert len(make_trainer(tmp_path, rows=rows, max_prompt_length=30, **narrow).train_dataset) == 16
    with pytest.raises(ValueError, match="`max_prompt_length_kinds` names 'hnit', and there is no "):
        make_trainer(tmp_path, rows=rows, max_prompt_length_kinds=["original", "hnit"])


# --- Signals ----------------------------------------------------------------------------------------------------------


def test_two_kinds_with_several_variants_each(tmp_path):
    """Ragged lists of two kinds beside the counterfactual; a replay of the saved bank keeps the same tokens."""

    def several(row, index):
        texts = [user(f"what is the sum of {k} and {index}") for k in range(4)]
        return {"number_prompts": texts[: 1 + index % 3], "unit_prompts": texts[: 1 + index % 2]}

    def largest_move(signals, ctx):
        original = signals["teacher/original"]
        moves = [
            torch.where(variant.mask.any(-1, keepdim=True), topk_jsd(original, variant), 0.0)
            for kind in ("number", "unit")
            for variant in signals.variants(f"teacher/{kind}")
        ]
        return torch.stack(moves).amax(0)

    register_method("largest-move", Method(needs=("teacher/number", "teacher/unit"), score=largest_move))
    recorder = Recorder()
    trainer = make_trainer(
        tmp_path,
        method="largest-move",
        rows=make_rows(16).map(several, with_indices=True),
        callbacks=[recorder],
        remove_unused_columns=True,
    )
    trainer.train()
    (rollout,) = recorder.rollouts
    # Two prompts a step, the first with one variant of each, the second with two.
    assert {name: len(parts) for name, parts in rollout.signals.lists.items()} == {
        "teacher/original": 1,
        "teacher/number": 2,
        "teacher/unit": 2,
    }
    assert rollout.signals.variants("teacher/unit")[1].mask.any(-1).tolist() == [False] * 4 + [True] * 4
    texts = render_prompts(make_tokenizer(), [row["number_prompts"][-1] for row in rollout.rows])
    alone = trainer.scorers["teacher"].score(texts[4:], rollout.completion_ids[4:]).sampled_logprobs
    scored = rollout.signals.variants("teacher/number")[1].sampled_logprobs[4:, : alone.size(1)]
    torch.testing.assert_close(scored, alone, atol=1e-5, rtol=0)
    bank_of(rollout).save(tmp_path / "bank.safetensors")
    read = RolloutBank.load(tmp_path / "bank.safetensors")
    assert torch.equal(read.select("largest-move").mask, rollout.selection.mask)
    assert set(read.texts) == {"original", "number", "unit"}


def test_what_some_row_lacks_is_left_out_of_a_bank(tmp_path):
    given = what_it_reads(*METHODS)
    register_method("hint", Method(needs=("teacher/hint",)))
    rows = given.pop("rows").select(range(4))
    rows = rows.map(lambda row, i: {"hint_prompt": row["prompt"] if i else None}, with_indices=True)
    bank = collect_bank(make_trainer(tmp_path, **given), rows)
    assert set(METHODS) - set(bank.runnable_methods()) == {"hint"}


def test_a_row_without_its_problem(tmp_path):
    tokenizer = make_tokenizer()
    system = {"role": "system", "content": "plus"}
    (made,) = prompt_variants({"prompt": [system, *user("1 plus 2")]}, "empty")
    assert made == [system, *user("")]
    # Text alone begins with BOS; a tokenizer without one ends texts with the token that begins the next.
    assert prompt_variants({"prompt": "1 plus 2"}, "empty") == [""]
    assert render_prompts(tokenizer, [""]) == [[tokenizer.eos_token_id]]
    tokenizer.bos_token = "<unk>"
    assert normal_prompt("", tokenizer) == "<unk>"

    register_method("gain", Method(needs=("teacher/empty", "student/empty"), target="teacher/empty"))
    for conversational in (True, False):
        trainer = make_trainer(tmp_path, method="gain", rows=make_rows(16, conversational=conversational))
        sampled = trainer.sample(make_rows(2, conversational=conversational), num_generations=1)
        assert set(sampled.signals) == {"teacher/empty", "student/empty"}
        (ids,) = render_prompts(make_tokenizer(), [user("") if conversational else ""])
        alone = trainer.scorers["teacher"].score([ids] * 2, sampled.completion_ids)
        torch.testing.assert_close(sampled.signals["teacher/empty"].logprobs, alone.logprobs, atol=1e-5, rtol=0)
        trainer.train()
        assert len(metric(trainer, "loss")) == 1


def test_the_loader_makes_the_empty_prompt_of_its_wrapper(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"problem": "1 + 1"}\n')
    register_method("gain", Method(needs=("teacher/empty",)))
    script = ScriptArguments(str(tmp_path / "data.jsonl"), prompt_template="Q: {problem}\n")
    for method, made in (("gain", {"empty_prompt": user("Q:")}), ("opd", {})):
        rows, _ = script.load(TrainConfig(str(tmp_path), method=method, use_cpu=True, bf16=False))
        assert rows[0] == {"prompt": user("Q: 1 + 1\n"), "answer": None, "id": None, **made}


def test_the_loader_makes_prompts_of_a_solution_or_an_answer(tmp_path):
    script = ScriptArguments(str(tmp_path / "data.jsonl"), prompt_template="Q: {problem}")

    def load(method, *records):
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return script.load(TrainConfig(str(tmp_path), method=method, use_cpu=True, bf16=False))[0]

    both = {"problem": "1 + 1", "answer": "2", "solution": "Two."}
    rows = load("opsd", both, {"prompt": "2 + 2", "answer": "4"}, {"problem": "3 + 3"})
    texts = [None if prompt is None else prompt[0]["content"] for prompt in rows["privileged_prompt"]]
    assert texts[0].startswith("Q: 1 + 1\n\nA worked solution:\nTwo.\n") and "\n4\n" in texts[1] and texts[2] is None
    assert rows["prompt"][0] == user("Q: 1 + 1")
    # One's own goes before, and without any answer the column is missing, as that of any other kind.
    assert load("opsd", {**both, "privileged_problem": "mine"})["privileged_prompt"][:] == [user("Q: mine")]
    half = load("opsd", {**both, "privileged_problem": "mine"}, both)["privileged_prompt"]
    assert half[0] == user("Q: mine") and half[1][0]["content"].endswith("own words.")
    assert load("opsd", {"problem": "1 + 1"}).column_names == load("opd", both).column_names[:3]
    rows = load("cal-opd", {"problem": "1 + 1"})
    assert "right" in rows[0]["praised_prompt"][0]["content"] and "wrong" in rows[0]["blamed_prompt"][0]["content"]
    script.conversational = False
    assert load("opsd", both)["privileged_prompt"][0].startswith("Q: 1 + 1\n\nA worked solution:\nTwo.\n")


def test_a_target_after_another_prompt():
    ids = torch.zeros(1, 2, 1, dtype=torch.long)
    by_name = {
        f"teacher/{k}": TopKLogprobs(ids, ids.float(), torch.full((1, 2), v))
        for k, v in (("hint", -1.0), ("original", -2.0))
    }
    method = Method(target="teacher/hint")
    assert method.needs == ("teacher/hint",)
    register_method("hint", method)
    ones = torch.ones(1, 2)
    assert select("hint", by_name, ones, SelectionSettings()).teacher_logprobs.tolist() == [[-1.0, -1.0]]
    assert select("opd", by_name, ones, SelectionSettings()).teacher_logprobs.tolist() == [[-2.0, -2.0]]
    with pytest.raises(ValueError, match="`target` 'student/original' would teach the student what it does"):
        Method(target="student/original")


# --- Rewards, settings, places ----------------------------------------------------------------------------------------


def length_of(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def first_id(completion_ids, **kwargs):
    return [None if ids[0] % 2 else float(ids[0]) for ids in completion_ids]


def test_rewards_that_a_method_sees_are_those_that_are_logged(tmp_path):
    seen = []

    def rewarded(signals, ctx):
        """Late tokens of good responses, early ones of the others."""
        seen.append(ctx)
        return ctx.advantages.sign()[:, None] * ctx.positions + ctx.rewards["length_of"][:, None] * 1e-3

    register_method("rewarded", Method(score=rewarded, needs_rewards=True))
    with pytest.raises(
        ValueError, match=r"Method 'rewarded' reads rewards; pass `reward_funcs` \(`--reward accuracy`\)"
    ):
        make_trainer(tmp_path, method="rewarded")
    recorder, rewards = Recorder(), {"reward_funcs": [length_of, first_id], "reward_weights": [0.5, 0.0]}
    trainer = make_trainer(tmp_path, method="rewarded", callbacks=[recorder], selection_export_steps=1, **rewards)
    trainer.train()
    (ctx,), (rollout,) = seen, recorder.rollouts
    assert ctx.lengths.tolist() == ctx.rewards["length_of"].tolist() == [len(ids) for ids in rollout.completion_ids]
    assert metric(trainer, "rewards/length_of/mean") == [pytest.approx(ctx.rewards["length_of"].mean().item())]
    assert metric(trainer, "rewards/first_id/mean") == [pytest.approx(ctx.rewards["first_id"].nanmean().item())]
    groups = (0.5 * ctx.rewards["length_of"]).view(2, 4)
    expected = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(ctx.advantages, expected.flatten(), atol=1e-4, rtol=0)
    assert ctx.advantages.abs().max() > 0.1

    # The export and a bank keep them, and a replay of the bank the same tokens.
    table = read_export(tmp_path)
    assert table.column("reward/length_of").to_pylist() == ctx.rewards["length_of"].tolist()
    assert torch.equal(torch.tensor(table.column("advantage").to_pylist()), ctx.advantages)
    assert list(TokenTable.from_run(tmp_path).measures["rewarded"]) == []
    path = tmp_path / "bank.safetensors"
    bank_of(rollout).save(path)
    read = RolloutBank.load(path)
    assert torch.equal(read.select("rewarded").mask, rollout.selection.mask)
    # A bank of before has none: methods that read them are left out, all others go on.
    with safe_open(str(path), framework="pt") as stored:
        old = {name: stored.get_tensor(name) for name in stored.keys() if name.startswith("teacher/") or "_" in name}
        old = {name: value for name, value in old.items() if not name.startswith("reward/")}
        save_file(old, str(path), metadata=stored.metadata())
    read = RolloutBank.load(path)
    assert "rewarded" not in read.runnable_methods() and "opd" in read.runnable_methods()
    with pytest.raises(ValueError, match="Method 'rewarded' reads rewards, of which there are none"):
        read.select("rewarded")


def test_a_sample_is_rewarded_and_leaves_no_trace_in_the_logs(tmp_path):
    trainer = make_trainer(tmp_path, method="opd", reward_funcs=[length_of], log_completions=True)
    sampled = trainer.sample(make_rows(3), num_generations=2)
    assert sampled.rewards["length_of"].tolist() == [len(ids) for ids in sampled.completion_ids]
    assert sampled.advantages.view(3, 2).sum(1).abs().max() < 1e-5
    assert not trainer._logs["prompt"] and not trainer.evaluated_rewards
    assert make_trainer(tmp_path, method="opd").sample(make_rows(1)).rewards == {}


def test_a_methods_own_settings(tmp_path):
    def power(signals, ctx):
        return torch.full(ctx.loss_mask.shape, ctx.method_settings["alpha"] ** ctx.method_settings["beta"])

    register_method("power", Method(weight=power, settings={"alpha": 0.5, "beta": 2}))

    def config(**settings):
        return CROPConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **settings)

    ids, mask = torch.zeros(1, 2, 1, dtype=torch.long), torch.ones(1, 2)
    signals = {"teacher/original": TopKLogprobs(ids, ids.float(), torch.zeros(1, 2))}
    for given, weight in ((None, 0.25), ({"alpha": 3.0}, 9.0), ('{"alpha": 3, "beta": 1}', 3.0)):
        own = config(method="power", method_settings=given).selection_settings
        assert select("power", signals, mask, own).weights.tolist() == [[weight, weight]]
    for settings, message in (
        ({"method": "power", "method_settings": {"gamma": 1}}, "'power' has no setting 'gamma' .*it has alpha, beta"),
        ({"method": "opd", "method_settings": {"alpha": 1}}, "'opd' has no setting 'alpha' .*it has none"),
        ({"method": "power", "method_settings": {"alpha": "1"}}, "'alpha' of method 'power' must be a number, got '1'"),
        ({"method": "power", "method_settings": "alpha=1"}, "`method_settings` is no JSON object"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**settings)
    # Held-out responses are looked at with `opd`, which has none.
    trainer = make_trainer(tmp_path, method="power", method_settings={"alpha": 3.0}, eval_dataset=make_rows(2))
    assert "eval_loss" in trainer.evaluate()
