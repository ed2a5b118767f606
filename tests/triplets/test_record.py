"""Triplet records and how they become the trainer's columns."""

import csv
import inspect
import io
import json
import re
import warnings

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crop_trl.files import FileFormatError, read_jsonl
from crop_trl.prompts import DEFAULT_PROMPT_TEMPLATE, check_template, unwrap_problem, wrap_problem
from crop_trl.runs import ScriptArguments, TrainConfig
from crop_trl.triplets.domain import load_domain
from crop_trl.triplets.record import (
    FLAGS,
    PROBLEM_FIELDS,
    build_dataset,
    load_records,
    load_triplets,
    reason_to_drop,
)
from crop_trl.triplets.settings import TripletSettings
from crop_trl.triplets.source import DAPO_TEMPLATE, read_problems

COLUMNS = ("prompt", "paraphrase_prompt", "counterfactual_prompt")


def record(**changes) -> dict:
    return {
        "id": "p1",
        "original_problem": "A shop sells 3 pens. How many in 2 days?",
        "paraphrase_problem": "Every day 3 pens are sold. How many in 2 days?",
        "counterfactual_problem": "A shop sells 5 pens. How many in 2 days?",
        "answer": 6,
        "condition_type": "number",
        "triplet_complete": True,
        "usable_for_training": True,
        "validation_passed": True,
        **changes,
    }


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return path


# --- Wrapper ----------------------------------------------------------------------------------------------------------


def test_default_wrapper_asks_for_a_box():
    wrapped = wrap_problem("1 + 1 = ?")
    assert wrapped.startswith("1 + 1 = ?\n")
    assert "\\boxed{}" in wrapped
    assert check_template(DEFAULT_PROMPT_TEMPLATE) == DEFAULT_PROMPT_TEMPLATE


@given(st.text(), st.text(), st.text())
@settings(max_examples=60)
def test_wrapper_round_trip(before, problem, after):
    template = f"{before}{{problem}}{after}"
    if template.count("{problem}") != 1:
        with pytest.raises(ValueError, match="exactly once"):
            check_template(template)
        return
    assert wrap_problem(problem, template) == before + problem + after
    # White space at the margins apart, and what the problem itself has of the wrapper goes as well.
    unwrapped = unwrap_problem(wrap_problem(problem, template), template)
    assert unwrapped.strip(" \t\n") == unwrap_problem(problem, template).strip(" \t\n")
    assert unwrap_problem(unwrapped, template) == unwrapped


@pytest.mark.parametrize("template", [DEFAULT_PROMPT_TEMPLATE, DAPO_TEMPLATE, "Q:\n{problem}\nA:\n"])
def test_white_space_around_a_wrapper_does_not_hide_it(template):
    wrapped = wrap_problem("1 + 1 = ?", template)
    for text in (f"{wrapped}\n", f" \n{wrapped}\t ", wrapped.strip(), wrap_problem(f"{wrapped}\n", template)):
        assert unwrap_problem(text, template) == "1 + 1 = ?"
    assert unwrap_problem(" 1 + 1 = ?\n", template) == " 1 + 1 = ?\n"
    assert unwrap_problem(f"{wrapped}\x0c", template) == f"{wrapped}\x0c"


@pytest.mark.parametrize("problem", ["Let {a} and \\frac{1}{2}", "{problem}", "{", "{0} {}", "%s $x \\1 \\g<0>", ""])
def test_braces_are_left_alone(problem):
    assert unwrap_problem(wrap_problem(problem)) == problem
    assert wrap_problem(problem, "Solve {problem} in {braces}") == f"Solve {problem} in {{braces}}"


def test_unwrap_leaves_other_texts():
    assert unwrap_problem("no wrapper here") == "no wrapper here"
    assert unwrap_problem("anything", "{problem}") == "anything"
    # The two halves of the wrapper may not share characters.
    assert unwrap_problem("Solve:", "Solve:{problem}:") == "Solve:"
    # Half a wrapper is none.
    assert unwrap_problem("Q: x", "Q: {problem} A:") == "Q: x"
    assert unwrap_problem("x A:", "Q: {problem} A:") == "x A:"


@pytest.mark.parametrize("template", ["", "Solve it.", "{problem} and {problem}", "{ problem }"])
def test_template_errors(template):
    for check in (check_template, lambda t: build_dataset([record()], t)):
        with pytest.raises(ValueError, match="`prompt_template` must contain {problem} exactly once"):
            check(template)


# --- Which records ----------------------------------------------------------------------------------------------------


def test_a_good_record_stays():
    assert reason_to_drop(record()) is None


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("value", [False, None, "true", 1])
def test_flags_must_be_true(flag, value):
    assert reason_to_drop(record(**{flag: value})) == f"without {flag}"


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_must_be_there(flag):
    bad = record()
    del bad[flag]
    assert reason_to_drop(bad) == f"without {flag}"


@pytest.mark.parametrize("name", PROBLEM_FIELDS)
@pytest.mark.parametrize("value", [None, "", " \n", 5])
def test_problems_must_be_text(name, value):
    assert reason_to_drop(record(**{name: value})) == f"without {name}"


# --- Dataset ----------------------------------------------------------------------------------------------------------


def test_conversational_rows():
    dataset, report = build_dataset([record()], "Solve: {problem}!")
    row = dataset[0]
    for column, name in zip(COLUMNS, PROBLEM_FIELDS):
        assert row[column] == [{"role": "user", "content": f"Solve: {record()[name]}!"}]
    assert (row["answer"], row["id"]) == ("6", "p1")
    assert str(report) == "1 of 1 records kept"


def test_plain_rows():
    dataset, _ = build_dataset([record()], "{problem}", conversational=False)
    assert [dataset[0][column] for column in COLUMNS] == [record()[name] for name in PROBLEM_FIELDS]


def test_default_wrapper_goes_round_all_three():
    dataset, _ = build_dataset([record()], conversational=False)
    for column, name in zip(COLUMNS, PROBLEM_FIELDS):
        assert dataset[0][column] == wrap_problem(record()[name])


def test_answer_and_id_are_optional():
    bare = record()
    del bare["answer"], bare["id"]
    dataset, _ = build_dataset([bare, record(answer="x", id=7)])
    assert dataset["answer"][:] == [None, "x"]
    assert dataset["id"][:] == [None, "7"]


def test_report_says_who_left_and_why():
    records = [
        record(id="a"),
        record(validation_passed=False),
        record(triplet_complete=False, validation_passed=False),  # counts once, under its first reason
        record(validation_passed=False),
        record(paraphrase_problem=""),
        record(id="b"),
    ]
    dataset, report = build_dataset(iter(records))
    assert dataset["id"][:] == ["a", "b"]
    assert (report.total, report.kept, sum(report.dropped.values())) == (6, 2, 4)
    assert str(report) == (
        "2 of 6 records kept (left out: 2 without validation_passed; 1 without triplet_complete; "
        "1 without paraphrase_problem)"
    )


def test_a_triplet_of_one_text_is_warned_of():
    same = record(id="s", **dict.fromkeys(PROBLEM_FIELDS, "Add 1 and 2."), counterfactual_condition_description="x")
    same["paraphrase_problem"] = "Add 1  and 2.\n"
    with pytest.warns(UserWarning, match=r"2 of 3 triplets have the same text three times \(s first\)"):
        assert build_dataset([record(), same, same])[1].kept == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_dataset([record(), record(paraphrase_problem=record()["original_problem"])])


def test_nothing_left_says_why():
    with pytest.raises(ValueError, match=r"No record is fit.*0 of 2.*2 without usable_for_training"):
        build_dataset([record(usable_for_training=False)] * 2)
    with pytest.raises(ValueError, match="0 of 0"):
        build_dataset([])


# --- Files ------------------------------------------------------------------------------------------------------------


def test_jsonl_round_trip(tmp_path):
    # Separators that are line breaks to some readers are text inside JSON.
    records = [record(id="é\u2028\u0085"), record(id="b")]
    path = write_jsonl(tmp_path / "t.jsonl", records)
    path.write_text(path.read_text(encoding="utf-8") + "\n  \n", encoding="utf-8")
    assert read_jsonl(path) == records
    assert load_records(str(path)) == records
    dataset, report = load_triplets(str(path), template="{problem}?", conversational=False)
    assert dataset["prompt"][0] == records[0]["original_problem"] + "?"
    assert report.kept == 2


def test_half_a_character_is_left_out():
    records = [
        record(),
        record(original_problem="What is 1 \ud83d + 1?"),
        record(paraphrase_problem="1 \U0001f600 + 1?"),
    ]
    dataset, report = build_dataset(records)
    assert len(dataset) == 2 and "1 with half a character" in str(report)


@pytest.mark.parametrize("line, said", [('{"id": 1', "is not JSON"), ("[1, 2]", "holds a list"), ("3", "holds a int")])
def test_bad_line_is_named(tmp_path, line, said):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(record()) + "\n\n" + line + "\n")
    with pytest.raises(FileFormatError, match=rf"t\.jsonl, line 3 {said}"):
        read_jsonl(path)


def as_csv(rows):
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def test_a_table_of_any_kind_is_read(tmp_path):
    rows = [record(id="007", answer="1.50"), record(id="8", answer=None, paraphrase_problem='Say "two",\nthen 3\u00e9')]
    (tmp_path / "t.json").write_text("\ufeff" + json.dumps(rows, indent=1), encoding="utf-8")
    (tmp_path / "t.csv").write_text(as_csv(rows), encoding="utf-8-sig", newline="")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    write_jsonl(tmp_path / "t.jsonl", rows)
    for name in ("t.json", "t.csv", "t.parquet", "t.jsonl"):
        assert load_records(str(tmp_path / name)) == rows, name
        dataset, report = load_triplets(str(tmp_path / name))
        assert (report.kept, dataset["id"][:], dataset["answer"][:]) == (2, ["007", "8"], ["1.50", None]), name
    (tmp_path / "flags.csv").write_text(as_csv([record(validation_passed="FALSE"), record(usable_for_training="true")]))
    assert load_triplets(str(tmp_path / "flags.csv"))[1].kept == 1


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.json", '[{"id": 1}, 3]', "element 2 is a int, not a JSON object"),
        ("t.json", '[{"id": 1}', "begins like a JSON array and is none"),
        ("t.csv", "a,b\n1,2\n1,2,3\n", "line 3 has more cells"),
        ("t.csv", 'a,b\n1,"2\n', "is not CSV"),
        ("t.parquet", '{"id": 1}\n', "is no Parquet file"),
    ],
)
def test_what_is_no_table_is_said(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(FileFormatError, match=said):
        load_records(str(tmp_path / name))


@pytest.mark.parametrize(
    "source", ["nowhere.jsonl", "nowhere.csv", "nowhere.parquet", "./nowhere", "data/nowhere.json"]
)
def test_missing_file(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"{source}.*does not exist"):
        load_records(source)


def test_what_is_wrong_with_data_names_their_own_settings(tmp_path):
    """The tests have no hub."""
    file = str(write_jsonl(tmp_path / "a.jsonl", [record()]))
    args = TrainConfig("unused", use_cpu=True, bf16=False)
    for changed, sentence in (
        ({"eval_dataset_name": "a/b"}, "`eval_dataset_name` 'a/b' is no file here, and no dataset of that name can be"),
        ({"eval_dataset_name": "./b"}, "`eval_dataset_name` './b' does not exist"),
        ({"dataset_revision": "v1"}, f"`dataset_revision` 'v1' is for the hub, and {file!r} lies here; leave it out."),
        ({"eval_dataset_name": file, "eval_dataset_config": "all"}, "`eval_dataset_config` 'all' is for the hub"),
    ):
        with pytest.raises((ValueError, OSError), match=re.escape(sentence)):
            ScriptArguments(**{"dataset_name": file, **changed}).load(args)
    with pytest.raises(ValueError, match="`input_revision` 'v1' is for the hub"):
        problems = TripletSettings(input=[file], input_revision="v1")
        read_problems(problems, load_domain(problems.domain))


def test_a_hub_dataset_is_asked_for_by_configuration_split_and_revision(monkeypatch):
    asked, signature = [], inspect.signature(datasets.load_dataset)

    def load_dataset(*args, **kwargs):
        asked.append(dict(signature.bind(*args, **kwargs).arguments))
        if kwargs["revision"] == "none":
            raise ValueError(
                "Config name is missing.\nPlease pick one among the available configs: ['all', 'en']\nMore"
            )
        return [record()]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    load_triplets("someone/triplets", "test", config="all", revision="v1")
    script = ScriptArguments(
        "someone/triplets", dataset_config="en", dataset_revision="v2",
        eval_dataset_name="someone/held-out", eval_dataset_config="cn", eval_dataset_revision="v3",
    )  # fmt: skip
    script.load(TrainConfig("unused", use_cpu=True, bf16=False))
    problem = {"input": ["someone/problems"], "input_config": "all", "input_revision": "v4"}
    problem = TripletSettings(**problem, problem_column="original_problem")
    read_problems(problem, load_domain(problem.domain))
    fields = ("path", "name", "split", "revision")
    assert [tuple(call.get(name) for name in fields) for call in asked] == [
        ("someone/triplets", "all", "test", "v1"),
        ("someone/triplets", "en", "train", "v2"),
        ("someone/held-out", "cn", "test", "v3"),
        ("someone/problems", "all", "train", "v4"),
    ]
    described = script.describe()
    assert (described["dataset_revision"], described["eval_dataset_config"]) == ("v2", "cn")
    # What the hub has instead is said.
    with pytest.raises(ValueError, match=r"Config name is missing. Please pick one among .*\['all', 'en'\]\)\.$"):
        load_triplets("someone/triplets", revision="none")
