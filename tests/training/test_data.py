"""Training prompts: which rows stay, and what is told of the others."""

import pytest
from tiny import make_rows, make_tokenizer, make_trainer

from crop_trl.prompts import normal_prompt, prompt_text
from crop_trl.training.data import RowCheck


def test_long_prompts_leave_and_are_counted(tmp_path, capsys):
    rows = make_rows(16)
    long = [{"role": "user", "content": " ".join(["plus"] * 40)}]
    rows = rows.map(lambda row, i: {"counterfactual_prompt": long} if i < 3 else {}, with_indices=True)
    # Methods are compared on the same rows: what pure distillation does not read counts all the same.
    for method in ("crop", "opd"):
        trainer = make_trainer(tmp_path, rows=rows, max_prompt_length=30, method=method)
        assert len(trainer.train_dataset) == 13
        assert "3 of 16 rows left out" in capsys.readouterr().out
    stream = rows.to_iterable_dataset()
    trainer = make_trainer(tmp_path, rows=stream, max_prompt_length=30)
    assert len(list(trainer.train_dataset)) == 13
    assert (
        capsys.readouterr().out.count("Rows with a prompt longer than max_prompt_length 30 tokens are left out.") == 1
    )


def test_tools_count_in_the_length_of_a_prompt(tmp_path, capsys):
    """The prompt that is sampled from is the one that was measured."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% if tools %}{{ 'plus ' * 20 }}{% endif %}" + tokenizer.chat_template
    chat = {"tokenizer": tokenizer, "max_prompt_length": 30}
    assert len(make_trainer(tmp_path, **chat).train_dataset) == 16
    capsys.readouterr()
    check = RowCheck(["original"], tokenizer, 30, tools=[{"type": "function"}])
    assert not any(check(make_rows(16)[:]))
    assert check.dropped == {"with a prompt longer than max_prompt_length 30 tokens": 16}


def test_prompts_that_differ_in_form_are_refused_or_made_alike(tmp_path):
    rows = make_rows(16)
    system = [{"role": "system", "content": "plus"}]
    with pytest.raises(ValueError, match="`paraphrase_prompt` has the turns user, but `prompt` .* system, user"):
        make_trainer(tmp_path, rows=rows.map(lambda row: {"prompt": system + row["prompt"]}))
    with pytest.raises(ValueError, match="holds content that is no text"):
        image = [{"role": "user", "content": [{"type": "image", "text": None}]}]
        make_trainer(tmp_path, rows=rows.map(lambda row: {"prompt": image}))
    with pytest.raises(ValueError, match="holds images, which are not supported"):
        make_trainer(tmp_path, rows=rows.map(lambda row: {"images": ["file.png"]}))
    with pytest.warns(UserWarning, match="`chat_template_kwargs` is not read"):
        make_trainer(tmp_path, rows=rows.map(lambda row: {"chat_template_kwargs": {"enable_thinking": False}}))
    # Content in parts is the same text, and plain text may begin with the token that a tokenizer puts there.
    (text,) = (message["content"] for message in rows[0]["prompt"])
    parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    assert normal_prompt(parts, make_tokenizer()) == rows[0]["prompt"]
    assert prompt_text(parts) == text
    assert prompt_text([{"role": "assistant", "content": None, "tool_calls": []}]) == ""


def test_prompts_that_are_all_the_same_are_told(tmp_path):
    rows = make_rows(16).map(lambda row: {"paraphrase_prompt": row["prompt"], "counterfactual_prompt": row["prompt"]})
    with pytest.warns(UserWarning, match="Every score of step 0 is 0") as told:
        make_trainer(tmp_path, rows=rows, max_steps=2).train()
    assert len([w for w in told if "Every score" in str(w.message)]) == 1


def test_held_out_rows_without_prompts_are_told_at_once(tmp_path):
    rows = make_rows(4)
    for dataset, message in (
        (rows.rename_column("prompt", "text"), "`eval_dataset` has the columns"),
        ({"good": rows, "bad": rows.select([])}, "`eval_dataset` 'bad' is empty or no dataset"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(tmp_path, eval_dataset=dataset)
