"""The audit: canonical texts, what ranks near the top, the files, the verdicts."""

import csv
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from crop_trl.audit.compare import ProblemText, audit, read_benchmark, read_train, relate_answers, summarize, tokens_of
from crop_trl.audit.report import apply_verdicts, page, read_verdicts, write_report
from crop_trl.commands import audit as audit_command
from crop_trl.evaluation.benchmarks import NAMED, load_benchmark

BENCHMARK = [
    ("b0", r"A farmer plants $3x+2$ rows of beans, and each row holds $\dfrac{1}{2}y$ seeds. How many seeds?", "7"),
    ("b1", "Two dice with 8 sides are thrown. What is the probability that the larger number is exactly 5?", "9/64"),
    ("b2", r"Find all real roots of $t^5 - 4t^3 + 9 = 0$ that are smaller than $\sqrt{7}$ and count them.", "2"),
    ("b3", "A train leaves Lyon at noon with 90 km/h; one follows at 13:00 with 120 km/h. When do they meet?", "16"),
    ("b4", r"How many lattice points lie strictly inside the ellipse $4x^2 + 25y^2 = 100$?", "31"),
]
PLANTED = {
    "exact": ("b0", r"A farmer plants \(3x + 2\) rows of beans and each row holds $\frac12 y$ seeds.  How many seeds"),
    "re-encoded": (
        "b1",
        "Two dice with 8 sides are thrown. What is the probability that the larger number is exactly 5? The answer is "
        r"in the form \frac{m}{n}, where gcd(m, n) = 1. Please provide the value of m + n.",
    ),
    "reworded": (
        "b3",
        "At noon a train departs from Lyon at 90 km/h, and at 13:00 a second train follows it with a speed of "
        "120 km/h. At what time will they meet?",
    ),
    "condition": (
        "b2",
        r"Find all real roots of $t^5 + 4t^3 + 9 = 0$ that are smaller than $\sqrt{7}$ and count them.",
    ),
    "translated": ("b4", r"椭圆 $4x^2 + 25y^2 = 100$ 的内部有多少个格点？"),
}


def filler(count: int) -> list[ProblemText]:
    """Problems of the same flavour that have nothing to do with the benchmark."""
    texts = [
        "Find the number of positive integers n below {a} such that n^2 + {b} is divisible by {c}.",
        "What is the probability that a fair coin thrown {a} times shows heads exactly {b} times?",
        "A train of length {a} m passes a bridge of {b} m in {c} s. How fast is it in km/h?",
        r"Let $f(x) = {a}x^2 + {b}x - {c}$. Find all real roots of $f$ and give their sum.",
        "How many seeds does a farmer need for {a} rows with {b} plants each if {c} of them fail?",
    ]
    return [
        ProblemText(
            f"f{i}",
            texts[i % 5].replace("{a}", str(11 + i)).replace("{b}", str(3 + i % 17)).replace("{c}", str(7 + i % 23)),
            "1",
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def result():
    planted = [ProblemText(f"t-{kind}", text, "73") for kind, (_, text) in PLANTED.items()]
    problems = [ProblemText(*row) for row in BENCHMARK]
    return audit([*filler(400), *planted], {"toy": problems})


def test_planted_overlap_is_the_best_candidate_of_its_problem(result):
    best = {}
    for candidate in result.candidates:
        best.setdefault(candidate.problem.id, (candidate.train.id, candidate.exact))
    assert best == {id: (f"t-{kind}", kind == "exact") for kind, (id, _) in PLANTED.items()}


def test_planted_overlaps_lead_the_list(result):
    order = [candidate.train.id for candidate in result.candidates]
    assert order[0] == "t-exact"
    assert set(order[:5]) == {f"t-{kind}" for kind in PLANTED}
    similarities = [candidate.similarity for candidate in result.candidates]
    assert similarities == sorted(similarities, reverse=True) and similarities[0] == 1.0 > similarities[1]


ONE_TEXT = [
    (r"$\dfrac{1}{2}$", r"\(\frac12\)"),
    (r"$a \leq b$", "a ≤ b"),
    (r"$x^{2}\cdot 3$", r"$x^2 \times 3$"),
    (r"\left( 1{,}000 \right)", "(1000)"),
    ("$\x0crac{1}{3}$ and $\theta$ and 2\times 3", r"$\frac{1}{3}$ and $\theta$ and 2\times 3"),
    ("Find  x .\n\nThen stop", "find x; then stop."),
    (r"30^\circ", "30°"),
    (r"\text{Let } \mathbf{v} be", "Let v be"),
    (r"$1,2,\dots,n$", "$1, 2, \\ldots, n$"),
    (r"ＡＢ＝５", "AB = 5"),
]
TWO_TEXTS = [
    ("z^4+z^2+1", "z^4-z^2+1"), ("x+1", "x+2"), ("a<b", "a>b"), (r"a\le b", "a<b"), ("x^{21}", "x^2 1"), ("12", "1 2"),
    (r"\sin x", r"\cos x"), ("5!", "5"), ("1.5", "15"), (r"\frac{1}{2}", r"\frac{2}{1}"), ("3:4", "34"),
]  # fmt: skip


def test_one_text_has_many_spellings_and_numbers_and_operators_make_a_difference():
    assert [pair for pair in ONE_TEXT if tokens_of(pair[0]) != tokens_of(pair[1])] == []
    assert [pair for pair in TWO_TEXTS if tokens_of(pair[0]) == tokens_of(pair[1])] == []


def test_answers_are_related():
    assert relate_answers(r"\frac{9}{64}", "73") == "re-encoded"
    assert relate_answers(r"\dfrac{9}{64}", r"\frac{9}{64}") == relate_answers("45^\\circ", "45") == "equal"
    assert relate_answers("5", "6") == "different" and relate_answers(None, "6") == relate_answers("5", "") == ""


def test_triplets_that_did_not_pass_are_not_training_data(tmp_path, capsys):
    """The paper compares the 49,782 texts of its validated records, not those that need review."""
    passed = {"triplet_complete": True, "usable_for_training": True, "validation_passed": True}
    texts = {"original_problem": "a", "paraphrase_problem": "b", "counterfactual_problem": "c"}
    rows = [{"id": "r1", **texts, **passed}, {"id": "r2", **texts, **passed, "validation_passed": False}]
    (tmp_path / "triplets.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "triplets.csv").write_text("id,original_problem,validation_passed\nr1,a,True\nr2,b,False\n")
    for file, fields in (("triplets.jsonl", 3), ("triplets.csv", 1)):
        assert [text.id for text in read_train([tmp_path / file])] == ["r1"] * fields
        assert "1 of 2 records of" in capsys.readouterr().out
    (tmp_path / "incomplete.jsonl").write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(ValueError, match="has no record that training would take"):
        read_train([tmp_path / "incomplete.jsonl"])


def test_every_field_of_a_triplet_is_compared(tmp_path):
    file = tmp_path / "triplets.jsonl"
    record = {"id": "r1", "original_problem": "What is 2 plus 2?", "paraphrase_problem": "Add two and two.",
              "counterfactual_problem": BENCHMARK[4][1], "answer": "4"}  # fmt: skip
    file.write_text(json.dumps(record) + "\n")
    train = read_train([file])
    assert [problem.field for problem in train] == ["original_problem", "paraphrase_problem", "counterfactual_problem"]
    found = audit(train, {"toy": [ProblemText(*row) for row in BENCHMARK]})
    assert [(c.problem.id, c.train.id, c.train.field) for c in found.candidates if c.exact] == [
        ("b4", "r1", "counterfactual_problem")
    ]
    assert train[2].answer is None


def test_copies_of_a_training_text_are_all_reported_and_judged_together(tmp_path):
    train = [
        ProblemText("t1", "Compute the area of a disc of radius 9 cm now"),
        ProblemText("t2", "compute the area of a disc of radius 9 cm now."),
    ]
    problems = [
        ProblemText("p", "Compute the area of a disc of radius 9 cm", "1"),
        ProblemText("q", "Unrelated words entirely", "2"),
    ]
    found = audit([*filler(50), *train], {"toy": problems}, at_least=1)
    assert {c.train.id for c in found.candidates if c.problem.id == "p"} >= {"t1", "t2"}
    apply_verdicts(found, {("toy", "p", "t1", "problem"): "same", ("toy", "p", "gone", "problem"): "near"})
    assert found.unknown_verdicts == 1
    table = summarize(found)["toy"]
    assert (table["exact"], table["near"], table["clean_ids"]) == (0, 1, ["q"])


def write_inputs(folder: Path) -> tuple[Path, Path]:
    train, benchmark = folder / "train.jsonl", folder / "benchmark.jsonl"
    rows = [{"id": f"t-{kind}", "problem": text, "answer": "73"} for kind, (_, text) in PLANTED.items()]
    rows += [{"id": problem.id, "problem": problem.text, "answer": problem.answer} for problem in filler(60)]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    benchmark.write_text("".join(json.dumps(dict(zip(("id", "problem", "answer"), row))) + "\n" for row in BENCHMARK))
    return train, benchmark


def test_command_writes_candidates_then_applies_verdicts(tmp_path, capsys):
    train, benchmark = write_inputs(tmp_path)
    arguments = ["--train", str(train), "--benchmark", f"toy={benchmark}", "--output", str(tmp_path / "out")]
    audit_command.main(arguments)
    assert "No verdicts yet" in capsys.readouterr().out
    with open(tmp_path / "out" / "candidates.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:6] == ["benchmark", "benchmark_id", "train_id", "field", "similarity", "exact"]
    assert rows[0]["exact"] == "True" and float(rows[0]["similarity"]) == 1.0
    assert not (tmp_path / "out" / "clean_ids.json").exists()
    html = (tmp_path / "out" / "candidates.html").read_text()
    assert "<del>" in html and "<ins>" in html and "t-condition" in html and "http" not in html

    kinds = {"t-re-encoded": "same", "t-reworded": "same", "t-condition": "near"}
    for row in rows:
        row["verdict"] = kinds.get(row["train_id"], "different" if row["train_id"] != "t-exact" else "")
    verdicts = tmp_path / "verdicts.csv"
    with open(verdicts, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    audit_command.main([*arguments, "--verdicts", str(verdicts)])
    assert "| toy | 5 | 1 | 3 | 1 | 0 |" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "clean_ids.json").read_text()) == {"toy": ["b4"]}
    overlaps = (tmp_path / "out" / "overlaps.md").read_text()
    listed = [[cell.strip() for cell in line.split("|")[1:5]] for line in overlaps.strip().splitlines()[2:]]
    assert sorted(records for _, _, records, _ in listed) == ["t-condition", "t-exact", "t-re-encoded", "t-reworded"]
    assert [kind for *_, kind in listed] == ["exact", "near", "near", "near"]


def test_the_hubs_benchmarks_are_kept_for_evaluation(tmp_path, capsys, monkeypatch):
    for name in NAMED:  # folders stand for the hub's datasets
        folder = tmp_path / "hub" / name
        folder.mkdir(parents=True)
        rows = [{"unique_id": f"test/{id}.json", "question": text, "answer": answer} for id, text, answer in BENCHMARK]
        (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        monkeypatch.setitem(NAMED, name, replace(NAMED[name], dataset=str(folder)))
    train, _ = write_inputs(tmp_path)
    output = ["--output", str(tmp_path / "out")]
    audit_command.main(output)
    said = capsys.readouterr().out.splitlines()
    assert said == [f"{name}: {tmp_path}/out/benchmarks/{name}.jsonl" for name in NAMED]
    for name in NAMED:
        assert load_benchmark(name) == load_benchmark(f"{name}={tmp_path}/out/benchmarks/{name}.jsonl")
    with pytest.raises(SystemExit, match="--train is not set"):
        audit_command.main(["--benchmark", "toy=toy.jsonl", *output])
    # What is there is not asked for again.
    monkeypatch.setitem(NAMED, "AIME24", replace(NAMED["AIME24"], dataset="./nowhere"))
    audit_command.main([*output, "--train", str(train)])
    assert "| AIME24 | 5 | 1 |" in capsys.readouterr().out


def test_texts_cannot_break_out_of_the_page(tmp_path):
    evil = "<script>alert(1)</script> & 'x' \" < 3 <img src=x onerror=alert(2)>"
    found = audit([ProblemText("<b>t", evil)], {"<i>n": [ProblemText("p&", evil + " more", "<u>")]})
    write_report(found, tmp_path)
    html = (tmp_path / "candidates.html").read_text()
    for raw in ("<script>alert", "<img", "<b>t", "<i>n", "<u>"):
        assert raw not in html


def test_the_page_marks_what_only_one_text_has():
    found = audit([ProblemText("t", "a - b = 3", "5")], {"toy": [ProblemText("p", "a + b = 3", "4")]})
    html = page(found)
    assert "a <del>+</del> b = 3" in html and "a <ins>-</ins> b = 3" in html and "answers: different" in html
    assert 'data-key="[&#34;toy&#34;, &#34;p&#34;, &#34;t&#34;, &#34;problem&#34;]"' in html


MISTAKES = [
    (["--train", "nowhere.jsonl"], "--train 'nowhere.jsonl' does not exist"),
    (["--benchmark", "toy"], "NAME=FILE"),
    (["--verdicts", "nowhere.csv"], "--verdicts 'nowhere.csv' does not exist"),
    (["--min_similarity", "3"], "`min_similarity` is 3.0"),
    (["--min_similarity", "nan"], "`min_similarity` is nan"),
    (["--benchmark", "toy=other.jsonl"], "--benchmark names 'toy' twice"),
    (["--benchmark", "=other.jsonl"], "NAME=FILE"),
    (["--benchmark", "MATH500"], "nor one of AIME24, AIME25, AMC23, MATH-500"),
]


def test_mistakes_get_one_sentence(tmp_path):
    train, benchmark = write_inputs(tmp_path)
    given = ["--train", str(train), "--benchmark", f"toy={benchmark}", "--output", str(tmp_path / "out")]
    wrong = []
    for arguments, words in MISTAKES:
        # A later option of the same name takes the place of the earlier one.
        with pytest.raises(SystemExit) as stopped:
            audit_command.main([*given, *arguments])
        if words not in str(stopped.value) or "\n" in str(stopped.value) or (tmp_path / "out").exists():
            wrong.append((arguments, str(stopped.value)))
    assert not wrong


def test_odd_texts_survive_the_files(tmp_path):
    long = "word " * 60_000
    train = [ProblemText("t", long + "\ud800 \0 \u2028 end"), ProblemText("u", long + '"quoted", and\nbroken')]
    found = audit(train, {"toy": [ProblemText("p", long)]}, min_similarity=0)
    assert {c.train.id for c in found.candidates} == {"t", "u"}
    for candidate in found.candidates:
        candidate.verdict = "near"
    write_report(found, tmp_path, judged=True)
    # A cell longer than the csv module's default limit is read back.
    assert set(read_verdicts(tmp_path / "candidates.csv")) == {c.key for c in found.candidates}
    (tmp_path / "candidates.csv").write_bytes("benchmark,\xe9".encode("latin-1"))
    with pytest.raises(ValueError, match="candidates.csv is not UTF-8 text; save it so"):
        read_verdicts(tmp_path / "candidates.csv")


def test_verdicts_written_by_hand_are_not_overwritten(tmp_path):
    found = audit(filler(30), {"toy": [ProblemText(*row) for row in BENCHMARK]}, min_similarity=0)
    write_report(found, tmp_path)
    file = tmp_path / "candidates.csv"
    with open(file, newline="") as source:
        rows = list(csv.DictReader(source))
    rows[0]["verdict"], rows[1]["verdict"] = "same", "sane"  # the second is misspelt
    with open(file, "w", newline="") as target:
        writer = csv.DictWriter(target, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    before = file.read_bytes()
    with pytest.raises(ValueError, match="candidates.csv with 2 verdicts that this run would drop; give that file as"):
        write_report(found, tmp_path)
    assert file.read_bytes() == before
    found.candidates[0].verdict, found.candidates[1].verdict = "same", "near"
    write_report(found, tmp_path, judged=True)
    assert set(read_verdicts(file).values()) == {"same", "near"}
    # Without verdicts, clean_ids.json and the CSV would no longer belong together.
    with pytest.raises(ValueError, match="with 2 verdicts"):
        write_report(audit(filler(30), {"toy": [ProblemText(*row) for row in BENCHMARK]}, min_similarity=0), tmp_path)


def test_nesting_and_repetition_cost_no_time():
    texts = [r"\frac{" * 20_000 + "1" + "}" * 20_000, "{" * 200_000, r"\text{ " * 50_000, " " * 10**6 + "a"]
    # Quadratic time would run into the limit of every test.
    audit([ProblemText(str(i), text) for i, text in enumerate(texts)], {"toy": [ProblemText("p", "1," * 100_000)]})


def test_rows_of_one_id_can_be_told_apart(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps({"id": "1", "problem": f"From {name}"}) + "\n")
    train = read_train([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert [problem.id for problem in train] == ["1", "1 (b.jsonl:1)"]
    # Files of one name in several folders, whose rows share an id.
    assert len({problem.id for problem in read_train([tmp_path / "b.jsonl"] * 4)}) == 4


def test_wrong_files_are_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"asked": "?"}\n')
    with pytest.raises(ValueError, match="row 1 has neither `problem`"):
        read_train([file])
    with pytest.raises(ValueError, match="row 1 has no `problem`"):
        read_benchmark("toy", file)
    file.write_text('{"problem": "  "}\n')
    with pytest.raises(ValueError, match="row 1 has no `problem`"):
        read_benchmark("toy", file)
    file.write_text("")
    with pytest.raises(ValueError, match="has no rows"):
        read_benchmark("toy", file)
    table = tmp_path / "v.csv"
    table.write_text("benchmark,benchmark_id,train_id,field,verdict\na,b,c,d,same\na,b,c,d,near\n")
    with pytest.raises(ValueError, match="row 3: verdict 'near' for 'b' and 'c', which has 'same' above"):
        read_verdicts(table)
    file.write_text('{"problem": "p", "answer": {"x": 1}}\n')
    with pytest.raises(ValueError, match="row 1 has an `answer` that is"):
        read_train([file])
    with pytest.raises(ValueError, match="row 1 has an `answer` that is"):
        read_benchmark("toy", file)
    rows = tmp_path / "rows.csv"
    rows.write_text('id,problem,answer\n7,"a, b",\n')
    assert read_train([rows]) == [ProblemText("7", "a, b")] == read_benchmark("toy", rows)
    file.write_text('{"problem": "p", "id": null}\n{"problem": "q", "id": null}\n')
    assert [problem.id for problem in read_train([file])] == ["rows.jsonl:1", "rows.jsonl:2"]
    table.write_text("benchmark,benchmark_id,train_id,field,verdict\na,b,c,d,perhaps\n")
    with pytest.raises(ValueError, match="'perhaps' is none of same, near, different"):
        read_verdicts(table)


def test_a_text_takes_little_memory():
    """It took 25 KB of each; the limit leaves a million of them and a page of problems in 4 GB."""
    texts, problems = filler(4000), {"toy": [ProblemText(*row) for row in BENCHMARK]}
    audit(texts[:10], problems)
    tracemalloc.start()
    audit(texts, problems)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Two million bits of the vocabulary, and the slice at hand, are there whatever the number of texts.
    assert peak - 8e6 < 1500 * len(texts), peak


def test_the_best_text_of_a_problem_is_listed_where_it_stands_out():
    padding = filler(3)
    padded = " ".join([padding[0].text, padding[1].text, BENCHMARK[3][1].split(" one")[0], padding[2].text])
    problems = {"toy": [ProblemText(*row) for row in BENCHMARK]}
    found = audit([*filler(400), ProblemText("t-padded", padded)], problems, at_least=0).candidates
    assert [(c.problem.id, c.train.id) for c in found if c.similarity < 0.3] == [("b3", "t-padded")]
    assert found[-1].similarity > 0.15


def test_identical_scores_do_not_depend_on_the_order_of_files():
    train = filler(60)
    problems = {"toy": [ProblemText(*row) for row in BENCHMARK]}
    first, second = audit(train, problems), audit(train[::-1], problems)
    assert [(c.problem.id, c.similarity) for c in first.candidates] == [
        (c.problem.id, c.similarity) for c in second.candidates
    ]
    assert audit([], {"toy": [ProblemText(*row) for row in BENCHMARK]}).candidates == []
