"""Reading benchmarks: names, files, clean subsets, mistakes."""

import json
from pathlib import Path

import datasets
import pytest

from crop_trl.evaluation import benchmarks
from crop_trl.evaluation.benchmarks import MATH_500_OVERLAPS, clean_subsets, example_from_row, load_benchmark, without
from crop_trl.files import read_rows


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def math500(tmp_path):
    ids = [*sorted(MATH_500_OVERLAPS), "test/algebra/1.json", "test/algebra/2.json"]
    rows = [{"id": f"m{n}", "unique_id": id, "problem": f"p{n}", "answer": str(n)} for n, id in enumerate(ids)]
    return write(tmp_path / "math.jsonl", rows)


def test_seeds_and_samples_are_the_papers(tmp_path):
    file = write(tmp_path / "x.jsonl", [{"problem": "p", "answer": "1"}])
    for name in ("AIME24", "aime25", "AMC23"):
        assert load_benchmark(f"{name}={file}").seeds == list(range(1000, 1008))
    assert load_benchmark(f"MATH-500={file}").seeds == [5000, 5001, 5002, 5003]
    assert load_benchmark(str(file)).name == "x" and load_benchmark(f"mine={file}").seeds == list(range(1000, 1008))
    assert load_benchmark(f"mine={file}", samples=2, base_seed=7).seeds == [7, 8]


def test_clean_subset_leaves_out_the_eight_and_shares_generations(math500):
    whole, clean = load_benchmark(f"MATH-500={math500}"), load_benchmark(f"MATH-500-Clean={math500}")
    assert (whole.name, clean.name) == ("MATH-500", "MATH-500-Clean")
    assert [example.id for example in clean.examples] == ["m8", "m9"]
    assert whole.store == clean.store == "MATH-500" and whole.seeds == clean.seeds


def test_math_500_brings_its_clean_subset(math500, tmp_path):
    whole = load_benchmark(f"MATH-500={math500}")
    (clean,) = clean_subsets(None, [whole])
    assert (clean.name, [example.id for example in clean.examples]) == ("MATH-500-Clean", ["m8", "m9"])
    # Not where it is named as well, or comes from an audit, or cannot be told.
    assert clean_subsets(None, [whole, clean]) == [] and clean_subsets(None, [clean]) == []
    audit = tmp_path / "clean_ids.json"
    audit.write_text(json.dumps({"MATH-500": ["m1", "m9"]}))
    (clean,) = clean_subsets(str(audit), [whole])
    assert [example.id for example in clean.examples] == ["m1", "m9"]


def test_the_clean_subset_is_the_papers():
    """Its table "Verified MATH-500 overlaps": seven exact pairs, one of them with two records, and a near one."""
    rows = read_rows(Path(benchmarks.__file__).with_name("math_500_overlaps.csv"))
    assert [row["overlap"] for row in rows] == ["exact"] * 7 + ["near"]
    assert sum(len(row["training_ids"].split()) for row in rows) == 9 and len(MATH_500_OVERLAPS) == 8
    places = [id.split("/")[1] for id in MATH_500_OVERLAPS]
    assert sorted(places) == ["algebra", *["intermediate_algebra"] * 6, "precalculus"]
    numbers = sorted(int(id.split("/")[2].removesuffix(".json")) for id in MATH_500_OVERLAPS)
    assert numbers == [90, 285, 582, 991, 1282, 1411, 1849, 2146]


def test_rows_that_lack_what_the_clean_subset_needs(math500, tmp_path, capsys):
    part = write(tmp_path / "part.jsonl", read_rows(math500)[1:])
    bare = write(tmp_path / "bare.jsonl", [{"problem": "p", "answer": "1"}])
    for file, lacking in ((part, "lack 1 of them ('test/algebra/1282.json' first)"), (bare, "lack 8 of them")):
        with pytest.raises(ValueError) as caught:
            load_benchmark(f"MATH-500-Clean={file}")
        said = str(caught.value)
        assert lacking in said and "take all of 'HuggingFaceH4/MATH-500' from the hub" in said and "\n" not in said
        # Not asked for, it is left out with a word on what Avg. counts.
        assert clean_subsets(None, [load_benchmark(f"MATH-500={file}")]) == []
        assert capsys.readouterr().err == f"Avg. counts the whole of MATH-500: {said}\n"


def test_subset_by_either_id(math500):
    whole = load_benchmark(f"MATH-500={math500}")
    assert len(without(whole, ["m0", "test/algebra/1.json"]).examples) == 8


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"problem": "p", "answer": 27.0}, "27"),
        ({"problem": "p", "answer": 7}, "7"),
        ({"question": "p", "answer": " 7 "}, "7"),
        ({"original_problem": "p", "answer": "7"}, "7"),
        ({"problem": "p", "solution": r"So \boxed{204}."}, "204"),
        ({"problem": "p", "solution": "204"}, "204"),
    ],
)
def test_rows_of_public_copies(row, answer):
    example = example_from_row(row, 3, "file")
    assert (example.id, example.problem, example.answer) == ("3", "p", answer)


def test_hub_datasets_are_read_by_name(monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return [{"problem": "p", "answer": "1", "unique_id": "test/a/1.json"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in ("AIME24", "AIME25", "AMC23", "MATH-500"):
        load_benchmark(name)
    assert [name for name, _ in asked] == [
        benchmarks.NAMED[n].dataset for n in ("AIME24", "AIME25", "AMC23", "MATH-500")
    ]


def test_unreachable_hub_gets_a_remedy(monkeypatch):
    def fail(*arguments, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match="AIME24=FILE"):
        load_benchmark("AIME24")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "has no rows"),
        ([{"answer": "1"}], "row 1 has no `problem`"),
        ([{"problem": "p"}], "row 1 has no `answer`"),
        ([{"problem": "p", "answer": "1"}, {"problem": " ", "answer": "1"}], "row 2 has no `problem`"),
        ([{"problem": "p", "answer": "1", "id": "a"}] * 2, "has the id 'a' twice"),
        (
            [{"problem": "p", "answer": "1", "id": "1"}, {"problem": "q", "answer": "1", "id": 1}],
            "has the id '1' twice",
        ),
        ([{"problem": "p", "answer": "1", "id": {"a": 1}}], "has an `id` that is a dict"),
        ([{"problem": "p", "answer": float("nan")}], "row 1 has an `answer` that is 'nan'"),
        ([{"problem": "p", "answer": ["1", "2"]}], "row 1 has an `answer` that is"),
    ],
)
def test_wrong_files_are_explained(tmp_path, rows, words):
    with pytest.raises(ValueError, match=words):
        load_benchmark(str(write(tmp_path / "x.jsonl", rows)))


def test_rows_without_an_id_are_numbered(tmp_path):
    rows = [{"problem": "p \ud800", "answer": "1", "id": None}, {"problem": "q", "answer": "1"}]
    loaded = load_benchmark(str(write(tmp_path / "x.jsonl", rows)))
    assert [(example.id, example.problem) for example in loaded.examples] == [("0", "p ?"), ("1", "q")]


def test_unknown_names_are_explained(tmp_path):
    for spec in ("=file.jsonl", "AIME24="):
        with pytest.raises(ValueError, match="is not NAME=FILE"):
            load_benchmark(spec)
    with pytest.raises(ValueError, match="'AIME26' is unknown: choose AIME24, .*MATH-500-Clean"):
        load_benchmark("AIME26")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_benchmark(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="`samples` is 0"):
        load_benchmark("AIME24", samples=0)
