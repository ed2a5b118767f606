"""From the source to the rows that are trained: counted here by hand, the paper's figures beside them."""

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


def test_what_cannot_be_counted_is_said(output, config, tmp_path, capsys):
    main(["--output", str(output), "--counts", config(model_name_or_path="someone/not-here")])
    said = capsys.readouterr().out
    assert [row[0] for row in rows(said)] == ["21", "20", "14", "-", "-", "-"]
    assert "No tokenizer can be loaded from `model_name_or_path` 'someone/not-here'" in said
    with pytest.raises(SystemExit, match="`counts` has nothing to count; give `input`"):
        main(["--output", str(tmp_path / "none"), "--counts", config()])
