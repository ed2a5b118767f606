"""What was generated outlives kills, failures and full disks: real processes, really killed."""

import errno
import itertools
import signal
import subprocess
import threading
import time

import pytest

from crop_trl.evaluation.run import load_results
from crop_trl.evaluation.store import Generation, Store, pending_chunks
from crop_trl.files import alone_in

from .running import ENVIRONMENT, PROBLEMS, ROOT, STUDENT, answer, command, kill_after, run, server_arguments, sum_of
from .server import ChatServer


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


def test_a_second_run_is_refused_where_a_file_system_has_no_locks(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def missing(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    with pytest.warns(UserWarning, match="flock not supported"), alone_in(tmp_path / "lock", "the folder"):
        with pytest.raises(ValueError, match="is in use by another run"), alone_in(tmp_path / "lock", "the folder"):
            pass
    with alone_in(tmp_path / "lock", "the folder"):
        pass
