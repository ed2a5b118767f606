"""Runs as users start them: a real server, real processes that are killed, regrading, comparison."""

import contextlib
import errno
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from crop_trl.commands import evaluate
from crop_trl.evaluation.benchmarks import MATH_500_OVERLAPS
from crop_trl.evaluation.run import load_results, score, stored_benchmarks, training_diagnostics
from crop_trl.evaluation.store import Generation, Store, drawing_in, pending_chunks
from crop_trl.prompts import TEMPLATE_FILE, save_how_asked

from .server import ChatServer

ROOT = Path(__file__).parents[2]
STUDENT = ROOT / "examples" / "tiny_math" / "models" / "student"
PROBLEMS = 12


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "crop_trl.commands.evaluate", *map(str, arguments)]


# One thread: a model this small is only slowed down by more, all the more beside other work.
ENVIRONMENT = {**os.environ, "OPENAI_API_KEY": "key-of-the-test", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def run(*arguments: str) -> subprocess.CompletedProcess:
    """The command in this process; those that are killed or kept from writing have one of their own."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            evaluate.main(list(map(str, arguments)))
        except SystemExit as stopped:
            code = 1
            print(stopped.code, file=err)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def kill_after(lines: int, file: Path, *arguments: str) -> None:
    """Start a run and kill it for good once its file has so many lines."""
    process = subprocess.Popen(
        command(*arguments), cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not (file.is_file() and file.read_bytes().count(b"\n") >= lines):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture
def benchmark(tmp_path) -> Path:
    path = tmp_path / "sums.jsonl"
    rows = [{"id": f"q{n}", "problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(PROBLEMS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sum_of(request: dict) -> int:
    first, _, second = request["messages"][0]["content"].split("?")[0].removeprefix("What is ").split(" ")
    return int(first) + int(second)


def answer(request: dict):
    """Right for even seeds; q1 has no box, q2 runs into the limit, q3 thinks (in the server's own field)."""
    right = sum_of(request) + request["seed"] % 2
    if right // 2 == 1:
        return f"It is {right}."
    if right // 2 == 2:
        return {"finish_reason": "length", "message": {"role": "assistant", "content": "It is \\boxed{"}}
    if right // 2 == 3:
        message = {"role": "assistant", "content": f"\\boxed{{{right}}}", "reasoning_content": "maybe \\boxed{6}"}
        return {"message": message}
    return f"It is \\boxed{{{right}}}."


def server_arguments(server: ChatServer, benchmark: Path, output: Path) -> list:
    return ["--model", "toy", "--sampler", "server", "--server_url", server.url, "--benchmark", f"sums={benchmark}",
            "--samples", 2, "--base_seed", 10, "--output", output]  # fmt: skip


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
        assert f"Means of {said}; the largest" in done.stdout, done.stderr


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
    done = run(*arguments, *told, "--output", tmp_path / "other")
    assert server.requests[-1]["messages"][0]["content"].endswith("? Box it.")
    assert server.requests[-1]["chat_template_kwargs"] == {**options, "enable_thinking": True, "depth": 2}
    said = "`prompt_template` is '{problem} Box it.' and was '{problem} In a"
    assert "is asked otherwise than in training, answers may suffer" in done.stderr and said in done.stderr
    assert "`, otherwise than in training (`prompt_template` is" in done.stdout
    assert run(*arguments, "--no-thinking").returncode == 0
    done = run(*arguments, "--thinking")
    assert done.returncode == 1 and "generations made with chat_template_kwargs" in done.stderr
    server.close()
    done = run("--compare", f"a={tmp_path / 'out'}", f"b={tmp_path / 'other'}")
    assert "asked with different prompts: a chat messages, thinking off, effort low, prompts `" in done.stdout
    # A run of an earlier version is graded again as what it was.
    (settings,) = (tmp_path / "out" / "generations").glob("*.settings.json")
    earlier = json.loads(settings.read_text())
    del earlier["chat_template_kwargs"], earlier["conversational"]
    settings.write_text(json.dumps({**earlier, "thinking": True}))
    done = run("--regrade", tmp_path / "out")
    assert "chat messages, thinking on, prompts `" in done.stdout, done.stderr
    save_how_asked(run_folder, "{problem}", conversational=False)
    done = run(*arguments, "--output", tmp_path / "plain")
    assert done.returncode == 1 and "plain text is what the model is to be asked in" in done.stderr
    for broken in ("[]", "{}", '{"prompt_template": "{problem}", "chat_template_kwargs": 1}'):
        (run_folder / TEMPLATE_FILE).write_text(broken)
        done = run(*arguments)
        assert done.returncode == 1 and "mend it, or delete it" in done.stderr and "Traceback" not in done.stderr


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


def holding_after(count: int) -> tuple[ChatServer, threading.Event]:
    """A server that answers so many requests, and the others once it is told to go on."""
    go_on = threading.Event()
    asked = itertools.count(1)
    return ChatServer(lambda request: (next(asked) > count and go_on.wait(), answer(request))[1]), go_on


def test_killed_run_goes_on_with_what_is_missing(benchmark, tmp_path):
    server, go_on = holding_after(5)
    arguments = [*server_arguments(server, benchmark, tmp_path / "out"), "--batch_size", 2]
    file = tmp_path / "out" / "generations" / "sums.jsonl"
    kill_after(5, file, *arguments)
    go_on.set()
    before = Store(tmp_path / "out", "sums").read()
    assert len(before) == 5
    with open(file, "ab") as cut_off:
        # As crashes leave a file: a cut through a character, blocks that were never written.
        cut_off.write('{"id": "q11", "sample": 1, "text": "\u6570'.encode()[:-1] + b"\n" + bytes(100) + b'\n{"id": "q1')
    asked = len(server.requests)
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    again = [(request["messages"][0]["content"], request["seed"]) for request in server.requests[asked:]]
    assert len(again) == len(set(again)) == 2 * PROBLEMS - len(before)
    after = Store(tmp_path / "out", "sums").read()
    assert len(after) == 2 * PROBLEMS and all(after[key] == generation for key, generation in before.items())
    # Other settings must not be mixed in.
    done = run(*arguments, "--temperature", "0.2")
    server.close()
    assert done.returncode == 1 and "temperature 0.7, not 0.2" in done.stderr and len(done.stderr.splitlines()) == 1


def test_generations_are_kept_when_a_request_fails(benchmark, tmp_path):
    server = ChatServer(lambda request: 400 if sum_of(request) == 14 and request["seed"] == 11 else answer(request))
    arguments = [*server_arguments(server, benchmark, tmp_path / "out"), "--batch_size", 1]
    done = run(*arguments)
    assert done.returncode == 1 and "answered HTTP 400" in done.stderr and "Traceback" not in done.stderr
    kept = Store(tmp_path / "out", "sums").read()
    assert len(kept) == PROBLEMS + 7 and not (tmp_path / "out" / "results.json").exists()
    done = run("--regrade", tmp_path / "out")
    server.close()
    assert done.returncode == 1 and "lacks 5 of 24 responses" in done.stderr


def test_second_run_in_a_folder_is_refused(benchmark, tmp_path):
    server, go_on = holding_after(1)
    arguments = [*server_arguments(server, benchmark, tmp_path / "out"), "--batch_size", 1]
    file = tmp_path / "out" / "generations" / "sums.jsonl"
    process = subprocess.Popen(
        command(*arguments), cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while process.poll() is None and not file.is_file():
            time.sleep(0.01)
        second = run(*arguments)
        assert process.poll() is None
    finally:
        process.kill()  # for good: the lock must go with the process
        process.wait()
        go_on.set()
    assert second.returncode == 1 and len(second.stderr.splitlines()) == 1
    assert "is in use by another run; wait for it to end" in second.stderr
    asked = [(request["messages"][0]["content"], request["seed"]) for request in server.requests]
    assert len(asked) == len(set(asked))
    done = run(*arguments, "--batch_size", 24)
    server.close()
    assert done.returncode == 0, done.stderr


def test_interrupt_does_not_wait_for_requests(benchmark, tmp_path):
    go_on, others = threading.Event(), 2 * (PROBLEMS - 1)  # two samples of each
    server = ChatServer(lambda request: go_on.wait() if sum_of(request) == 2 else answer(request))
    process = subprocess.Popen(
        command(*server_arguments(server, benchmark, tmp_path / "out")),
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    file = tmp_path / "out" / "generations" / "sums.jsonl"
    while process.poll() is None and not (file.is_file() and file.read_bytes().count(b"\n") == others):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=240)  # the held requests are never answered
    assert process.returncode == 1
    go_on.set()
    assert said.splitlines()[-1] == "Interrupted; what is done is saved, the same command goes on from there."
    assert len(Store(tmp_path / "out", "sums").read()) == others
    server.close()


def test_full_disk_is_said_and_loses_nothing(benchmark, tmp_path):
    server = ChatServer(answer)
    arguments = server_arguments(server, benchmark, tmp_path / "out")
    limited = ["bash", "-c", 'ulimit -f 2; exec "$@"', "bash", *command(*arguments)]  # blocks of 1,024 bytes
    done = subprocess.run(limited, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("error: `--output` ")
    assert "cannot be written (File too large); make room" in done.stderr and "Traceback" not in done.stderr
    kept = Store(tmp_path / "out", "sums").read()
    assert 0 < len(kept) < 2 * PROBLEMS
    done = run(*arguments)
    server.close()
    assert done.returncode == 0, done.stderr
    after = Store(tmp_path / "out", "sums").read()
    assert len(after) == 2 * PROBLEMS and all(after[key] == generation for key, generation in kept.items())


def test_folder_that_cannot_be_written_is_said_before_a_request(benchmark, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "generations").write_text("")
    server = ChatServer(answer)
    done = run(*server_arguments(server, benchmark, tmp_path / "out"))
    server.close()
    assert done.returncode == 1 and "cannot be written" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not server.requests


def test_subset_that_was_evaluated_alone_keeps_its_name(tmp_path):
    rows = [Generation(f"q{n}", 0, 1, "\\boxed{1}", None, False, "1") for n in range(3)]
    Store(tmp_path, "sums", {"base_seed": 1, "prompt_template": "{problem}"}).append(rows)
    reported = {"sums-Clean": {"verdicts": {"q0": [1], "q2": [1]}}}
    (tmp_path / "results.json").write_text(json.dumps({"benchmarks": reported}))
    (subset,) = stored_benchmarks(tmp_path)
    assert subset.name == "sums-Clean" and [example.id for example in subset.examples] == ["q0", "q2"]
    # A length that nobody told is unknown, not 0.
    assert score(subset, Store(tmp_path, "sums").read())["average_length"] is None


RUN = "--model m --benchmark sums=SUMS --output OUT "
# Arguments, and what is said; capital names are files and folders.
MISTAKES = {
    "": "exactly one of `--model`, `--regrade` and `--compare`",
    "--model m --benchmark sums=SUMS": "`--output` is not set",
    "--model m --benchmark nothing --output OUT": "'nothing' is unknown",
    "--model m --output OUT": "`--benchmark` names nothing",
    "--model m --benchmark a/b=SUMS a_b=SUMS --output OUT": "`--benchmark` names a/b and a_b would share one file",
    "--model m --benchmark sums=SUMS --output FILE": "is a file: name a folder",
    RUN + "--sampler server": "`--server_url`",
    RUN + "--prompt_template x": "`prompt_template`",
    RUN + "--training_run OUT": "trainer_state.json",
    RUN + "--temperature nan": "`temperature` is nan",
    RUN + "--top_p 0": "`top_p` is 0.0",
    RUN + "--top_p nan": "`top_p` is nan",
    RUN + "--max_tokens 0": "`max_tokens` is 0",
    RUN + "--samples 0": "`samples` is 0",
    RUN + "--base_seed -1": "`base_seed` is -1",
    RUN + "--batch_size -3": "`--batch_size` is -3",
    RUN + "--batch_size 0": "`--batch_size` is 0",
    RUN + "--pass_k 2 9": "`--pass_k` is 9, and sums has 8 samples",
    RUN + "--pass_k 0": "`--pass_k` is 0",
    RUN + "--sampler hf --dtype float99": "`dtype` is 'float99': choose float32, bfloat16, float16",
    RUN + "--dtype float32": "`--dtype` is for `--sampler hf`, and the sampler is vllm",
    RUN + "--vllm_options [1": "`--vllm_options`",
    RUN + "--vllm_options [1]": "`--vllm_options`",
    RUN + "--clean no.json": "`--clean` 'no.json'",
    RUN + "--clean CUT": "is not whole JSON",
    RUN + "--clean LIST": "holds a JSON list, not an",
    RUN + "--clean FLAT": "no list of ids for 'sums'",
    RUN + "--label a|b": "`--label` 'a|b'",
    "--compare a\nb=OUT": "`--compare` 'a\\nb' is no name for a table",
    "--compare CUTRUN": "is not whole JSON",
    "--compare alone=ONE": "`--compare` has one run, 'alone'; give at least two",
    "--compare nowhere": "has no results.json",
    "--regrade nowhere": "holds no generations",
}


def test_mistakes_get_one_sentence(tmp_path):
    files = {
        "CUT": '{"sums": ["1", ',
        "LIST": '["1"]',
        "FLAT": '{"sums": "1"}',
        "FILE": "",
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
    assert done.returncode == 1 and "'sums' made with temperature 0.2, not 0.7" in done.stderr


@pytest.mark.slow
def test_killed_hugging_face_run_ends_like_an_uninterrupted_one(tmp_path):
    """Draws depend on the batch alone, so a batch that is repeated gives the same responses."""
    few = tmp_path / "few.jsonl"
    lines = (ROOT / "examples" / "tiny_math" / "data" / "heldout.jsonl").read_text().splitlines()
    few.write_text("\n".join(lines[:8]) + "\n")

    def arguments(output: str) -> list:
        sampling = ["--sampler", "hf", "--samples", 2, "--batch_size", 4, "--max_tokens", 96]
        return ["--model", STUDENT, "--benchmark", f"tiny-math={few}", *sampling, "--output", tmp_path / output]

    done = run(*arguments("whole"))
    assert done.returncode == 0, done.stderr
    file = tmp_path / "killed" / "generations" / "tiny-math.jsonl"
    kill_after(6, file, *arguments("killed"))
    killed = Store(tmp_path / "killed", "tiny-math").read()
    assert 6 <= len(killed) < 16
    done = run(*arguments("killed"))
    assert done.returncode == 0, done.stderr
    assert Store(tmp_path / "killed", "tiny-math").read() == Store(tmp_path / "whole", "tiny-math").read()
    whole, resumed = (load_results(tmp_path / name)["benchmarks"] for name in ("whole", "killed"))
    assert whole == resumed and whole["tiny-math"]["mean"] > 0


def test_chunks_do_not_depend_on_what_is_done():
    from crop_trl.evaluation.benchmarks import Benchmark, Example

    toy = Benchmark("t", tuple(Example(str(n), "p", "1") for n in range(5)), 2, 0, "t")
    everything = pending_chunks(toy, [], 2)
    assert [len(chunk) for chunk in everything] == [2, 2, 1, 2, 2, 1]
    done = [("0", 0), ("1", 0), ("2", 0), ("4", 1)]
    assert pending_chunks(toy, done, 2) == [everything[1], everything[2], everything[3], everything[4]]
    # An engine takes as much at once as it may, over samples too: a long response holds fewer others up.
    assert [len(chunk) for chunk in pending_chunks(toy, [], 4, independent=True)] == [4, 4, 2]
    assert pending_chunks(toy, done, 4, independent=True) == [[(3, 0), (4, 0), (0, 1), (1, 1)], [(2, 1), (3, 1)]]


def test_odd_characters_survive_the_store(tmp_path):
    store = Store(tmp_path, "a/b c")
    generation = Generation("q", 0, 1, "line\u2028end \x0c \\boxed{½} 数\n", 3, False, "1")
    store.append([generation])
    store.append([Generation("r", 0, 1, "lone \ud800 surrogate", 3, False, "1")])
    assert store.read()["q", 0] == generation and len(store.read()) == 2
    assert store.read()["r", 0].text == "lone \ud800 surrogate"


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


def test_a_second_run_is_refused_where_a_file_system_has_no_locks(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def missing(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    with pytest.warns(UserWarning, match="flock not supported"), drawing_in(tmp_path):
        with pytest.raises(ValueError, match="is in use by another run"), drawing_in(tmp_path):
            pass
    with drawing_in(tmp_path):
        pass
