"""What the page holds: the numbers of a bank or a run, small, and nothing that a model wrote as code."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from analysis.test_heatmap import NASTY, byte_tokenizer
from tiny import make_rows, make_tokenizer, make_trainer
from viewer.pages import made_up_bank, unpacked, words_tokenizer

from crop_trl.analysis.bank import RolloutBank, collect_bank
from crop_trl.commands import view
from crop_trl.methods import Signals
from crop_trl.methods.divergence import topk_entropy, topk_jsd
from crop_trl.text import visible_text
from crop_trl.viewer.page import bank_page, exported_table, run_page


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bank")
    bank = collect_bank(make_trainer(folder), make_rows(4))
    make_tokenizer().save_pretrained(folder / "student")
    bank.settings = {
        "model_name_or_path": str(folder / "student"),
        "dataset_name": "gone.jsonl",
        "hub_token": "hf_secret",
    }
    bank.save(folder / "bank.safetensors")
    return RolloutBank.load(folder / "bank.safetensors"), folder / "bank.safetensors"


def test_gaps_are_to_the_target_of_the_method_that_a_page_begins_with(saved):
    bank, _ = saved
    told = Signals({**bank.signals.lists, "teacher/privileged": bank.signals.variants("teacher/counterfactual")})
    for method, target in ((None, "teacher/original"), ("opsd", "teacher/privileged")):
        facts, _ = unpacked(bank_page(replace(bank, signals=told), make_tokenizer(), method=method))
        assert facts["target"] == target and target in [reading["name"] for reading in facts["readings"]]


def test_a_page_holds_the_numbers_of_a_bank(saved):
    bank, _ = saved
    page = bank_page(bank, make_tokenizer())
    facts, arrays = unpacked(page)
    real = bank.loss_mask.numpy()
    assert [method["name"] for method in facts["methods"]] == bank.choosing_methods()
    for name in bank.choosing_methods():
        scores = bank.select(name).scores
        if scores is None:
            assert f"score {name}" not in arrays
        else:
            # Exactly: near-ties decide what is kept.
            np.testing.assert_array_equal(arrays[f"score {name}"], scores.numpy()[real])
            assert arrays[f"score {name}"].dtype == scores.numpy().dtype
    np.testing.assert_array_equal(arrays["entropy"], topk_entropy(bank.signals["student/original"]).numpy()[real])
    readings = [reading["name"] for reading in facts["readings"]]
    assert readings[:2] == ["teacher/original", "student/original"]
    assert set(readings) == set(bank.signals) - {"teacher/negative"}
    own, counts = arrays["own"].reshape(-1, len(readings)), arrays["entries"].reshape(-1, len(readings))
    places = [0, *counts.ravel().cumsum().tolist()]
    vocabulary = make_tokenizer()
    for column, name in enumerate(readings):
        signal = bank.signals[name]
        np.testing.assert_allclose(own[:, column] / -1000, signal.sampled_logprobs.numpy()[real], atol=6e-4)
        ids, logprobs = signal.token_ids.numpy()[real], signal.logprobs.numpy()[real]
        for token in (0, 7, len(ids) - 1):
            count, first = int(counts[token, column]), places[token * len(readings) + column]
            assert count == max(1, (logprobs[token] >= np.log(1e-2)).sum())
            shown = [facts["vocabulary"][i] for i in arrays["entry"][first : first + count]]
            assert [text.strip("␣") for text in shown] == vocabulary.convert_ids_to_tokens(ids[token, :count].tolist())
            shown = np.exp(np.log(1e-2) * (arrays["root"][first : first + count] / 255) ** 2)
            np.testing.assert_allclose(shown, np.exp(logprobs[token, :count]), atol=5e-3)
    (problem,) = {answer["problem"] for answer in facts["answers"][:4]}
    (view_,) = facts["problems"][problem]["views"]
    assert [kind for kind, _, _ in view_] == ["original", "paraphrase", "counterfactual"]
    for kind, _, pieces in view_:
        assert "".join(text for text, _ in pieces) == bank.texts[kind][0]
    assert facts["problems"][problem]["answer"] == bank.rows[0]["answer"]
    assert all(answer["right"] in (True, False) for answer in facts["answers"])
    assert "hf_secret" not in str(facts)


def test_every_prompt_of_a_row_is_there_and_what_differs_is_marked():
    prompts = {
        "original": ["Tom has 3 apples and buys 4."],
        "paraphrase": ["After buying 4 apples, Tom has 3 more."],
        "counterfactual": ["Tom has 3 apples and buys 5.", "After buying 9 apples, Tom has 3 more."],
        "hint": ["Tom has 3 apples and buys 4. Add them."],
    }
    bank = made_up_bank([5, 4], 50, rows=[{"prompts": prompts}, {"prompts": {"original": ["Another one."]}}])
    facts, _ = unpacked(bank_page(bank, words_tokenizer(50)))
    first, second = facts["problems"][0]["views"]
    marked = [
        {kind: [t for t, mark in pieces if mark == "changed"] for kind, _, pieces in blocks}
        for blocks in (first, second)
    ]
    assert marked[0] == {"original": ["4"], "paraphrase": [], "counterfactual": ["5"], "hint": []}
    # Worded after the paraphrase: there the condition is marked.
    assert marked[1] == {"original": [], "paraphrase": ["4"], "counterfactual": ["9"], "hint": []}
    assert [t for t, mark in first[3][2] if mark] == ["Add them."]
    assert [kind for kind, _, _ in facts["problems"][1]["views"][0]] == ["original"]
    assert [answer["right"] for answer in facts["answers"]] == [None, None]


@pytest.mark.parametrize("flat", [0.3, 100.0])
def test_sixty_four_answers_of_three_hundred_tokens_take_under_five_megabytes(flat):
    """Twelve predictions a token, sure ones and such that sixteen entries are alike, of a vocabulary of 50,000."""
    bank = made_up_bank([300] * 64, 50_000, counterfactuals=4, flat=flat)
    page = bank_page(bank, words_tokenizer(50_000))
    assert len(page) < 5_000_000, len(page)
    facts, arrays = unpacked(page)
    assert len(facts["readings"]) == 12 and arrays["entries"].max() >= 5


def test_of_a_larger_bank_methods_see_all_and_the_page_holds_the_first():
    bank = made_up_bank([9, 8, 7, 6], 60)
    whole, part = (unpacked(bank_page(bank, words_tokenizer(60), responses=n)) for n in (4, 2))
    assert [answer["length"] for answer in part[0]["answers"]] == [9, 8]
    for name in ("score tip", "score crop-ent"):
        np.testing.assert_array_equal(part[1][name], whole[1][name][:17])


def test_what_a_model_wrote_is_nowhere_in_the_page(tmp_path):
    evil = "</script><script>alert(2)</script><!-- \u202e\u2028 {{ 7 * 7 }} "
    prompts = {kind: [evil + kind] for kind in ("original", "paraphrase", "counterfactual")}
    tokenizer = byte_tokenizer()
    ids = tokenizer("".join(NASTY).encode("utf-8", "replace").decode() + evil)["input_ids"]
    bank = made_up_bank([len(ids)], 257, rows=[{"prompts": prompts, "answer": evil}])
    bank.completion_ids = torch.tensor([ids])
    bank.settings = {"dataset_name": evil}
    page = bank_page(bank, tokenizer, title=evil)
    assert page.count("<script") == page.count("</script>") == 2
    assert "alert(2)</script>" not in page and "49" not in re.search("<title>.*</title>", page)[0]
    assert not re.search(r"""(src|href)\s*=|url\(|https?:|@import""", page)
    facts, arrays = unpacked(page)
    texts = [text for blocks in facts["problems"][0]["views"] for _, _, pieces in blocks for text, _ in pieces]
    assert "".join(texts[: len(texts) // 3 + 1]).startswith(visible_text(evil)[:20])
    for text in (*texts, *facts["pieces"], *facts["vocabulary"]):
        assert not re.search("[\x00-\x09\x0b-\x1f\u202a-\u202e\u2028\ud800-\udfff]", text), repr(text)
    assert len(arrays["piece"]) == len(ids)


def test_measures_that_scores_hold_already_are_not_there_twice(saved):
    bank, _ = saved
    facts, arrays = unpacked(bank_page(bank, make_tokenizer()))
    surface, semantic = (f"how far {what} moves the prediction" for what in ("a paraphrase", "a changed condition"))
    assert f"{semantic} (crop)" not in facts["measures"]
    assert "how far the student is from the teacher (ta-opd)" not in facts["measures"]
    assert {f"{surface} (crop)", f"{semantic} (crop-student)"} < set(facts["measures"])
    moved = topk_jsd(bank.signals["teacher/original"], bank.signals["teacher/paraphrase"])[bank.loss_mask]
    np.testing.assert_allclose(arrays[f"measure {surface} (crop)"], moved.numpy(), rtol=5e-4)


def test_a_run_shows_its_steps_with_the_masks_that_it_stored(tmp_path):
    make_trainer(tmp_path, selection_export_steps=1, max_steps=4).train()
    # Of steps that are larger than a page, the first responses of the first and the last.
    assert exported_table(tmp_path, responses=6).steps.tolist() == [0, 0, 0, 3, 3, 3]
    table = exported_table(tmp_path, responses=24)
    assert np.unique(table.steps).tolist() == [0, 2, 3] or np.unique(table.steps).tolist() == [0, 1, 3]
    facts, arrays = unpacked(run_page(table, make_tokenizer()))
    assert facts["frozen"] and facts["budget"] == "20" and [m["name"] for m in facts["methods"]] == ["crop"]
    assert [answer["step"] for answer in facts["answers"]] == table.steps.tolist() and len(table.steps) == 24
    np.testing.assert_array_equal(arrays["kept crop"], table.kept["crop"])
    # Gold answers are in the export.
    assert all(problem["answer"] for problem in facts["problems"])
    assert {answer["right"] for answer in facts["answers"]} <= {True, False}


# --- The command ------------------------------------------------------------------------------------------------------


def test_a_bank_from_the_command_line(saved, tmp_path, capsys, monkeypatch):
    bank, path = saved
    monkeypatch.chdir(tmp_path)
    view.main([str(path), "-o", "pages/page.html", "--retention_ratio", "0.125", "--title", "Mine <b>"])
    said = capsys.readouterr().out
    assert re.fullmatch(r"Open pages/page.html in a browser \(0\.\d MB\)\.\n", said)
    page = (tmp_path / "pages/page.html").read_text()
    assert unpacked(page)[0]["budget"] == "12.5" and "<h1>Mine &lt;b&gt;</h1>" in page
    view.main([str(path)])
    assert path.with_name("view.html").exists()


def test_records_say_what_a_bank_does_not(saved, tmp_path, capsys):
    bank, _ = saved
    texts = dict.fromkeys(bank.texts["original"])
    lines = [f'{{"original_problem": "{text}", "answer": 5, "solution": "It is 5 ."}}\n' for text in texts]
    (tmp_path / "records.jsonl").write_text("".join(lines))
    rows = [{"prompts": row["prompts"]} for row in bank.rows]
    old = replace(bank, rows=rows, settings={**bank.settings, "dataset_name": str(tmp_path / "records.jsonl")})
    old.save(tmp_path / "old.safetensors")
    view.main([str(tmp_path / "old.safetensors"), "--prompt_template", "{problem}"])
    facts, _ = unpacked((tmp_path / "view.html").read_text())
    assert {problem["answer"] for problem in facts["problems"]} == {"5"}
    # The file that a bank names may be another one by now; the one that is asked for may not.
    (tmp_path / "records.jsonl").write_text(lines[0])
    view.main([str(tmp_path / "old.safetensors"), "--prompt_template", "{problem}"])
    assert "nothing is used: A response is to 'what is" in capsys.readouterr().out
    facts, _ = unpacked((tmp_path / "view.html").read_text())
    assert {problem["answer"] for problem in facts["problems"]} == {None}


def test_a_mistake_gets_one_sentence(saved, tmp_path):
    _, path = saved
    (tmp_path / "x.safetensors").write_bytes(b"no bank")
    (tmp_path / "one.jsonl").write_text('{"original_problem": "another", "answer": "1"}\n')
    wrong = []
    for arguments, sentence in (
        (["./none"], "'./none' does not exist; give a run's output_dir or a rollout bank."),
        ([str(tmp_path)], "holds no exported selection; train with `--selection_export_steps 1`"),
        ([str(tmp_path / "x.safetensors")], "cannot be read as a rollout bank"),
        ([str(path), "--responses", "0"], "`responses` must be a whole number of at least 1, got 0."),
        ([str(path), "--retention_ratio", "2"], "`retention_ratio` must lie in (0, 1], got 2.0"),
        ([str(path), "--tokenizer", "./none"], "No tokenizer can be loaded from './none'"),
        ([str(path), "--prompt_template", "x"], "`prompt_template` must contain {problem} exactly once"),
        ([str(path), "--dataset_name", str(tmp_path / "one.jsonl")], "which is no problem of the dataset"),
    ):
        with pytest.raises(SystemExit) as ended:
            view.main(arguments)
        message = str(ended.value)
        if not message.startswith("error: ") or sentence not in message or len(message.splitlines()) > 1:
            wrong.append(message)
    assert not wrong, "\n".join(wrong)
