"""Runs as users start them against a real server, regrading, comparison."""

import json
import re
import shutil
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from huggingface_hub import constants

from crop_trl.commands import evaluate
from crop_trl.evaluation.benchmarks import MATH_500_OVERLAPS
from crop_trl.evaluation.run import load_results, score, stored_benchmarks, training_diagnostics
from crop_trl.evaluation.store import Generation, Store
from crop_trl.prompts import TEMPLATE_FILE, save_how_asked

from .running import PROBLEMS, STUDENT, answer, run, server_arguments, sum_of
from .server import ChatServer


def test_server_run_regrade_and_compare(benchmark, tmp_path):
    server = ChatServer(answer)
    first, second = tmp_path / "first", tmp_path / "method=crop,seed=42"  # as a study names its folders
    done = run(*server_arguments(server, benchmark, first), "--setting", "A", "--pass_k", "1")
    assert done.returncode == 0, done.stderr
    # What was asked is the paper's setting A, with the shared wrapper and one seed per sample.
    assert len(server.requests) == 2 * PROBLEMS
    request = server.requests[0]
    assert (request["temperature"], request["top_p"], request["max_tokens"]) == (0.7, 0.95, 31_744)
    assert request["chat_template_kwargs"] == {"enable_thinking": True}
    assert request["messages"][0]["content"].startswith("What is") and "\\boxed{}" in request["messages"][0]["content"]
    assert {request["seed"] for request in server.requests} == {10, 11}

    results = load_results(first)
    row = results["benchmarks"]["sums"]
    # The even seed is right except on q1 (no box) and q2 (cut off).
    assert row["correct"] == PROBLEMS - 2 and row["mean"] == pytest.approx((PROBLEMS - 2) / (2 * PROBLEMS))
    assert row["pass"] == pytest.approx((PROBLEMS - 2) / PROBLEMS) and row["pass_at"]["1"] == pytest.approx(row["mean"])
    assert row["format_failures"] == pytest.approx(4 / 24) and row["truncated"] == pytest.approx(2 / 24)
    assert row["average_length"] == 7 and row["mean_interval"][0] < row["mean"] < row["mean_interval"][1]
    assert "key-of-the-test" not in "".join(path.read_text() for path in first.rglob("*") if path.is_file())

    # The same command asks for nothing more; a clean subset needs no generation either.
    server.close()
    clean = tmp_path / "clean_ids.json"
    clean.write_text(json.dumps({"sums": [f"q{n}" for n in range(3, PROBLEMS)]}))
    done = run("--regrade", first, "--clean", clean)
    assert done.returncode == 0, done.stderr
    results = load_results(first)
    assert results["benchmarks"]["sums-Clean"]["mean"] == 0.5 and results["averaged"] == ["sums-Clean"]
    assert results["average"] == 0.5 and results["benchmarks"]["sums"] == {**row, "pass_at": {}}
    # Grading once more keeps what was reported: the subset in Avg., the label, the setting.
    done = run("--regrade", first)
    assert done.returncode == 0 and load_results(first) == results, done.stderr
    assert (results["label"], results["setting"]) == ("first", "A")

    better = ChatServer(lambda request: f"\\boxed{{{sum_of(request)}}}")
    done = run(*server_arguments(better, benchmark, second), "--no-thinking")
    assert done.returncode == 0, done.stderr
    done = run("--compare", f"before={first}", f"after={second}", "--output", tmp_path / "both")
    assert done.returncode == 0, done.stderr
    for given, name in ((second, second.name), (f"ratio=0.2={second}", "ratio=0.2")):
        assert f"| {name} | **100.00** |" in run("--compare", first, given).stdout
    assert "| after | **100.00** | **100.00** | **100.00** |" in done.stdout
    table = json.loads((tmp_path / "both" / "comparison.json").read_text())
    assert table["reference"] == "before" and table["runs"]["after"]["difference"]["p_value"] < 0.01
    # A further benchmark stands beside the first.
    done = run(*server_arguments(better, benchmark, second), "--no-thinking", "--benchmark", f"more={benchmark}")
    better.close()
    assert done.returncode == 0 and len(better.requests) == 4 * PROBLEMS, done.stderr
    results = load_results(second)
    assert (
        list(results["benchmarks"]) == results["averaged"] == ["sums", "more"] and "Means of sums, more." in done.stdout
    )


def test_one_evaluation_gives_math_500_whole_and_clean(tmp_path):
    ids = [*sorted(MATH_500_OVERLAPS), "test/algebra/1.json", "test/algebra/2.json"]
    rows = [{"unique_id": id, "problem": f"What is {n} + 0?", "answer": str(n)} for n, id in enumerate(ids)]
    file, folder = tmp_path / "math.jsonl", tmp_path / "run"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = ChatServer(lambda request: f"\\boxed{{{min(sum_of(request), 8)}}}")  # wrong on the last
    done = run("--model", "toy", "--sampler", "server", "--server_url", server.url, "--benchmark", f"MATH-500={file}",
               "--output", folder)  # fmt: skip
    server.close()
    assert done.returncode == 0, done.stderr
    assert len(server.requests) == 4 * len(rows)
    results = load_results(folder)
    assert {name: row["mean"] for name, row in results["benchmarks"].items()} == {
        "MATH-500": 0.9,
        "MATH-500-Clean": 0.5,
    }
    assert results["average"] == 0.5 and "Means of MATH-500-Clean." in done.stdout
    # The other Avg. needs no model; grading once more keeps it, and so do tables of several runs.
    for arguments in (["--average", "whole"], []):
        done = run("--regrade", folder, *arguments)
        assert load_results(folder)["average"] == 0.9 and "Means of MATH-500." in done.stdout, done.stderr
    for arguments, said in (([], "MATH-500 (10 problems)"), (["--average", "clean"], "MATH-500-Clean (2 problems)")):
        done = run("--compare", f"a={folder}", f"b={folder}", *arguments)
        assert f"Means of {said}; the largest" in done.stdout and "not drawn alike" not in done.stdout, done.stderr
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"id": "x", "problem": "What is 1 + 1?", "answer": "2"}) + "\n")
    again = ChatServer(lambda request: "\\boxed{2}")
    asks = ["--model", "toy", "--sampler", "server", "--server_url", again.url, "--output", folder]
    # Neither does one more benchmark change what Avg. counts, nor grading one again what is known of others.
    done = run(*asks, "--benchmark", f"one={file}")
    again.close()
    assert load_results(folder)["averaged"] == ["MATH-500", "one"], done.stderr
    file.write_text(json.dumps({"id": "x", "problem": "What is 1 + 1?", "answer": "3"}) + "\n")
    done = run("--regrade", folder, "--benchmark", f"one={file}", "--label", "mended")
    results = load_results(folder)
    assert {name: row["mean"] for name, row in results["benchmarks"].items()} == {
        "MATH-500": 0.9,
        "MATH-500-Clean": 0.5,
        "one": 0.0,
    }, done.stderr
    assert results["label"] == "mended" and results["averaged"] == ["MATH-500", "one"]


def test_a_model_is_asked_as_it_was_trained(benchmark, tmp_path):
    run_folder, options = tmp_path / "trained", {"enable_thinking": False, "effort": "low"}
    save_how_asked(run_folder, "{problem} In a \\boxed{}, please.", chat_template_kwargs=options)
    model = run_folder / "checkpoint-7"
    model.mkdir()
    server = ChatServer(answer, model=str(model))
    arguments = [*server_arguments(server, benchmark, tmp_path / "out"), "--model", model]
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert server.requests[0]["messages"][0]["content"].endswith("? In a \\boxed{}, please.")
    assert server.requests[0]["chat_template_kwargs"] == options
    how = "chat messages, thinking off, effort low, prompts `{problem} In a \\boxed{}, please.`, as in training."
    assert how in done.stdout and "otherwise" not in done.stderr
    assert how in run("--regrade", tmp_path / "out").stdout
    # What is told goes first, the setting's thinking mode too; the rest stays.
    told = ["--prompt_template", "{problem} Box it.", "--setting", "A", "--chat_template_kwargs", '{"depth": 2}']
    told += ["--temperature", 0.5]
    done = run(*arguments, *told, "--output", tmp_path / "other")
    assert server.requests[-1]["messages"][0]["content"].endswith("? Box it.")
    assert server.requests[-1]["chat_template_kwargs"] == {**options, "enable_thinking": True, "depth": 2}
    said = "`prompt_template` is '{problem} Box it.' and was '{problem} In a"
    assert "is asked otherwise than in training, answers may suffer" in done.stderr and said in done.stderr
    assert "`, otherwise than in training (`prompt_template` is" in done.stdout
    assert run(*arguments, "--no-thinking").returncode == 0
    done = run(*arguments, "--thinking")
    assert done.returncode == 1 and "with chat_template_kwargs" in done.stderr
    server.close()
    done = run("--compare", f"a={tmp_path / 'out'}", f"b={tmp_path / 'other'}")
    assert "were not drawn alike: a with temperature 0.7, thinking off, prompts `{problem} In a" in done.stdout
    assert "please.`; b with temperature 0.5, thinking on, depth 2, prompts `{problem} Box it.`.\n" in done.stdout
    save_how_asked(run_folder, "{problem}", conversational=False)
    done = run(*arguments, "--output", tmp_path / "plain")
    assert done.returncode == 1 and "A server takes chat messages alone" in done.stderr
    for broken in ("[]", "{}", '{"prompt_template": "{problem}", "chat_template_kwargs": 1}'):
        (run_folder / TEMPLATE_FILE).write_text(broken)
        done = run(*arguments)
        assert done.returncode == 1 and "mend it, or delete it" in done.stderr and "Traceback" not in done.stderr


def test_a_model_of_the_hub_is_taken_at_its_revision_and_that_is_stored(benchmark, tmp_path, monkeypatch):
    """In a cache as the hub's client leaves it; of `main` nothing can be loaded."""
    repository = tmp_path / "hub" / "models--someone--model"
    (repository / "refs").mkdir(parents=True)
    for revision, commit in (("main", "a" * 40), ("v1", "b" * 40)):
        (repository / "refs" / revision).write_text(commit)
    (repository / "snapshots" / ("a" * 40)).mkdir(parents=True)
    shutil.copytree(STUDENT, repository / "snapshots" / ("b" * 40))
    save_how_asked(repository / "snapshots" / ("b" * 40), "{problem} Box it.")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    arguments = ["--model", "someone/model", "--sampler", "hf", "--samples", 1, "--max_tokens", 4]
    arguments += ["--benchmark", benchmark, "--output", tmp_path / "out"]
    assert "`--model` 'someone/model' cannot be loaded" in run(*arguments).stderr
    pinned = [*arguments, "--model_revision", "v1"]
    for done in (run(*pinned), run(*pinned), run("--regrade", tmp_path / "out")):
        assert "`someone/model` at revision `v1`, hf sampler" in done.stdout, done.stderr
        assert "prompts `{problem} Box it.`" in done.stdout
    assert "holds 'sums' with model_revision 'v1', not None; use another folder." in run(*arguments).stderr
    given = []
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda **options: given.append(options) or Mock()))
    run(*pinned, "--sampler", "vllm", "--output", tmp_path / "vllm")
    assert given == [{"model": "someone/model", "revision": "v1", "tokenizer_revision": "v1"}]


def test_an_evaluation_in_a_models_own_folder_moves_with_it(benchmark, tmp_path, monkeypatch):
    model, moved = tmp_path / "a" / "model", tmp_path / "b" / "model"
    shutil.copytree(STUDENT, model)
    options = ["--sampler", "hf", "--samples", 1, "--max_tokens", 4, "--output"]
    assert run("--model", model, "--benchmark", benchmark, *options, model / "evaluation").returncode == 0
    model.parent.rename(moved.parent)
    (moved / "checkpoint-1").mkdir()
    monkeypatch.chdir(moved)
    for name in (".", "../../b/model"):
        done = run("--model", name, "--benchmark", f"{name[-1]}={benchmark}", *options, f"{name}/evaluation")
        assert done.returncode == 0, done.stderr
    # What was measured before the move stays.
    assert list(load_results(moved / "evaluation")["benchmarks"]) == ["sums", ".", "l"]
    # Another model in the folder is another.
    done = run("--model", "checkpoint-1", "--benchmark", f"more={benchmark}", *options, "evaluation")
    assert "with model '" in done.stderr and "use another folder" in done.stderr


@pytest.mark.parametrize("conversational", [True, False])
def test_a_student_of_plain_text_is_asked_in_plain_text(benchmark, tmp_path, conversational):
    model = tmp_path / "model"
    shutil.copytree(STUDENT, model)
    save_how_asked(model, "{problem}", conversational)
    arguments = ["--model", model, "--sampler", "hf", "--samples", 1, "--max_tokens", 4, "--benchmark", benchmark]
    done = run(*arguments, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    form = "chat messages, the template's thinking mode" if conversational else "plain text"
    assert f"{form}, prompts `{{problem}}`, as in training." in done.stdout
    done = run(*arguments, "--conversational", "--output", tmp_path / "messages")
    answers = [Store(tmp_path / name, "sums").read() for name in ("out", "messages")]
    assert (answers[0] == answers[1]) == conversational


def test_subset_that_was_evaluated_alone_keeps_its_name(tmp_path):
    rows = [Generation(f"q{n}", 0, 1, "\\boxed{1}", None, False, "1") for n in range(3)]
    name = "my sums"  # whose file is called otherwise
    Store(tmp_path, name, {"benchmark": name, "base_seed": 1, "prompt_template": "{problem}"}).append(rows)
    reported = {f"{name}-Clean": {"verdicts": {"q0": [1], "q2": [1]}}}
    (tmp_path / "results.json").write_text(json.dumps({"benchmarks": reported}))
    (subset,) = stored_benchmarks(tmp_path)
    assert subset.name == "my sums-Clean" and [example.id for example in subset.examples] == ["q0", "q2"]
    # A length that nobody told is unknown, not 0.
    assert score(subset, Store(tmp_path, name).read())["average_length"] is None


RUN = "--model m --benchmark sums=SUMS --output OUT "
# Arguments, and what is said; capital names are files and folders.
MISTAKES = {
    "": "exactly one of `--model`, `--regrade` and `--compare`",
    "--model m --benchmark sums=SUMS": "`--output` is not set",
    "--model m --benchmark nothing --output OUT": "'nothing' is unknown",
    "--model m --output OUT": "`--benchmark` names nothing",
    RUN + "--sampler server": "`--server_url`",
    RUN + "--prompt_template x": "`prompt_template`",
    RUN + "--training_run OUT": "trainer_state.json",
    RUN + "--temperature nan": "`temperature` is nan",
    RUN + "--top_p 0": "`top_p` is 0.0",
    RUN + "--top_p nan": "`top_p` is nan",
    RUN + "--max_tokens 0": "`max_tokens` is 0",
    RUN + "--samples 0": "`samples` is 0",
    RUN + "--batch_size -3": "`batch_size` must be a whole number of at least 1, got -3",
    RUN + "--batch_size 0": "`batch_size` must be a whole number of at least 1, got 0",
    RUN + "--pass_k 2 9": "`--pass_k` is 9, and sums has 8 samples",
    RUN + "--pass_k 0": "`--pass_k` is 0",
    RUN + "--sampler hf --dtype float99": "invalid choice: 'float99'",
    RUN + "--dtype float32": "`--dtype` is for `--sampler hf`, and it is vllm",
    RUN + "--vllm_options [1": "`--vllm_options`",
    RUN + "--vllm_options [1]": "`--vllm_options`",
    RUN + "--model_revision v1 --sampler server": "`--model_revision` is for a model that is loaded here; leave it out",
    "--model ONE --benchmark sums=SUMS --output OUT --model_revision v1": "`model_revision` 'v1' is for the hub, and '",
    RUN + "--clean no.json": "`--clean` 'no.json'",
    RUN + "--clean CUT": "is not whole JSON",
    RUN + "--clean LIST": "holds a JSON list, not an",
    "--compare CUTRUN": "is not whole JSON",
    "--compare alone=ONE": "`--compare` has one run, 'alone'; give at least two",
    "--compare nowhere": "has no results.json",
    "--regrade nowhere": "holds no generations",
}


def test_mistakes_get_one_sentence(tmp_path):
    files = {
        "CUT": '{"sums": ["1", ',
        "LIST": '["1"]',
        "SUMS": '{"problem": "p", "answer": "1"}\n',
        "CUTRUN/results.json": '{"benchmarks": {',
        "ONE/results.json": '{"benchmarks": {}}',
    }
    for folder in ("CUTRUN", "ONE"):
        (tmp_path / folder).mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    wrong = []
    for arguments, words in MISTAKES.items():
        given = re.sub(r"\b[A-Z]{3,}\b", lambda name: str(tmp_path / name.group()), arguments)
        with pytest.raises(SystemExit) as stopped:
            evaluate.main(given.split(" ") if given else [])
        said = str(stopped.value)
        if words not in said or "\n" in said or (tmp_path / "OUT").exists():  # nothing is started
            wrong.append(f"{arguments!r}: {said}")
    assert not wrong, "\n".join(wrong)


def test_server_that_is_not_there_or_serves_another_model(benchmark, tmp_path):
    server = ChatServer(answer, model="another")
    done = run(*server_arguments(server, benchmark, tmp_path / "out"))
    assert done.returncode == 1 and "serves another, not `--model` 'toy'" in done.stderr
    server.close()
    done = run(*server_arguments(server, benchmark, tmp_path / "out"))
    assert done.returncode == 1 and "does not answer" in done.stderr
    # A run that drew nothing binds the folder to nothing.
    server = ChatServer(answer)
    done = run(*server_arguments(server, benchmark, tmp_path / "out"), "--temperature", "0.2")
    assert done.returncode == 0, done.stderr
    # Nor may another benchmark's generations in one folder come from other settings.
    done = run(*server_arguments(server, benchmark, tmp_path / "out"), "--benchmark", f"more={benchmark}")
    server.close()
    assert done.returncode == 1 and "'sums' with temperature 0.2, not 0.7" in done.stderr


def test_training_diagnostics_come_from_the_last_step(tmp_path):
    for step, share in ((10, 0.5), (20, 0.25)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        log = [
            {"step": step - 1, "completions/clipped_ratio": 0.9},
            {"step": step, "completions/clipped_ratio": share, "selection/retention_ratio": 0.2},
            {"step": step, "train_runtime": 3.0},
        ]
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": log}))
    assert training_diagnostics(tmp_path) == {"step": 20, "budget": 0.2, "truncated": 0.25}
