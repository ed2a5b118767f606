"""From the source to the rows that are trained: counted here by hand, the paper's figures beside them."""

from pathlib import Path

import pytest
import yaml
from tiny import make_tokenizer

from crop_trl.commands.triplets import main


def rows(text: str) -> list[list[str]]:
    cells = [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in text.splitlines() if line[:1] == "|"]
    return cells[2:]


@pytest.fixture
def config(tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "student")
    content = {"model_name_or_path": str(tmp_path / "student"), "prompts_per_step": 4, "prompt_template": "{problem}"}

    def write(**changes) -> str:
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(content | changes))
        return str(file)

    return write


def test_a_finished_directory_is_counted_to_the_last_step(output, config, capsys):
    # 21 problems, one with a form feed. Of the 14 that passed 11 have 14 tokens (11 words and three of the template)
    # and a paraphrase of 17, the three that were repaired 8 and 10.
    for limit, alone, whole, steps in ((17, "14", "14", "12 (3 steps)"), (14, "14", "3", "0 (0 steps)")):
        main(["--output", str(output), "--counts", config(max_prompt_length=limit)])
        assert rows(capsys.readouterr().out) == [
            ["21", "17,398"],
            ["20", "16,755"],
            ["14", "16,594"],
            [alone, "16,588"],
            [whole, "16,588"],
            [steps, "16,560 (115 steps)"],
        ]
    main(["--output", str(output), "--counts", config(max_steps=2)])
    assert rows(capsys.readouterr().out)[-1][0] == "8 (2 steps)"


def test_before_there_are_triplets_the_source_is_counted(config, tmp_path, capsys):
    source = tmp_path / "problems.jsonl"
    source.write_text('{"problem": "Add 1 and 2."}\n{"problem": "Add 1  and 2."}\n{"problem": "\\f rac"}\n')
    arguments = ["--input", str(source), "--output", str(tmp_path / "out"), "--counts", config()]
    main(arguments)
    said = capsys.readouterr().out
    assert [row[0] for row in rows(said)] == ["3", "2", "-", "-", "-", "-"]
    assert "holds none yet" in said and "1 rows repeat" in said and not (tmp_path / "out").exists()
    main([*arguments, "--deduplicate"])
    assert [row[0] for row in rows(capsys.readouterr().out)][:2] == ["2", "1"]


def test_triplets_are_counted_whoever_made_them(output, config, tmp_path, capsys):
    for file in set(Path(output).iterdir()) - {Path(output) / "triplets.jsonl"}:
        file.unlink()
    main(["--output", output, "--counts", config()])
    said = capsys.readouterr().out
    assert [row[0] for row in rows(said)] == ["-", "-", "14", "14", "14", "12 (3 steps)"]
    assert "no run of this program lies beside them" in said
    source = tmp_path / "problems.jsonl"
    source.write_text('{"problem": "Add 1 and 2."}\n{"problem": "\\f rac"}\n')
    main(["--input", str(source), "--output", output, "--counts", config()])
    assert [row[0] for row in rows(capsys.readouterr().out)][:3] == ["2", "1", "14"]


def test_the_settings_of_the_run_are_followed(output, config, capsys):
    counted = {
        # Paraphrases of the 11 have 17 tokens, their other prompts 14; the three others' 10 and 8.
        ("14", "14", "12 (3 steps)"): {"max_prompt_length": 14, "max_prompt_length_kinds": ["original"]},
        ("14", "3", "0 (0 steps)"): {"max_prompt_length": 14, "max_prompt_length_kinds": ["original", "paraphrase"]},
        ("14", "14", "-"): {"max_prompt_length": None, "prompts_per_step": None},
    }
    for expected, changes in counted.items():
        main(["--output", output, "--counts", config(**changes)])
        said = capsys.readouterr().out
        assert tuple(row[0] for row in rows(said)[3:]) == expected
    assert "has any number of tokens" in said and "have no `prompts_per_step`" in said


def test_settings_that_no_run_could_have_are_named_in_a_sentence(output, config):
    wrong = []
    for name, value, words in (
        ("prompts_per_step", 0, "`prompts_per_step` must be a whole number of at least 1, got 0."),
        ("prompts_per_step", "four", "invalid int value: 'four'"),
        ("max_prompt_length", [8], "`max_prompt_length` must be a whole number"),
        ("num_counterfactuals", None, "`num_counterfactuals` must be a whole number"),
        ("max_steps", 1.5, "`max_steps` must be a whole number"),
        ("chat_template_kwargs", "thinking", "`chat_template_kwargs` must be names with values, got 'thinking'."),
        ("prompts_a_step", 4, "is no setting"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["--output", output, "--counts", config(**{name: value})])
        if words not in str(ended.value.code) or "\n" in str(ended.value.code):
            wrong.append((name, value, ended.value.code))
    assert not wrong


def test_what_cannot_be_counted_is_said(output, config, tmp_path, capsys):
    main(["--output", str(output), "--counts", config(model_name_or_path="someone/not-here")])
    said = capsys.readouterr().out
    assert [row[0] for row in rows(said)] == ["21", "20", "14", "-", "-", "-"]
    assert "No tokenizer can be loaded from `model_name_or_path` 'someone/not-here'" in said
    with pytest.raises(SystemExit, match="`counts` has nothing to count; give `input`"):
        main(["--output", str(tmp_path / "none"), "--counts", config()])
