"""Kill a triplet run again and again, and count what that cost.

    python tests/scripts/killed_triplets.py --input PROBLEMS.jsonl --rows 2000 --kills 3

The real program asks a scripted server, a process of its own, over HTTP; the server gives good answers and every bad
one there is. Each kill is a SIGKILL; the run is then started again with the same command. What the server sent is
compared with what the ledger holds, and every record with the status that its problem's script must end in. At the end
the same rows are done once more with good answers alone and no delay, for the time that a record takes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from triplets.conftest import servers  # noqa: E402
from triplets.running import KEY, answers_in, served  # noqa: E402
from triplets.scripted_answers import expected_status  # noqa: E402

from crop_trl.triplets.domain import load_domain  # noqa: E402
from crop_trl.triplets.outputs import OutputDirectory  # noqa: E402
from crop_trl.triplets.settings import TripletSettings  # noqa: E402
from crop_trl.triplets.source import read_problems  # noqa: E402

RETRIES = ("--timeout", "5", "--max-retries", "4", "--max-backoff", "0.3")


def start(source: Path, rows: int, concurrency: int, url: str, output: Path) -> subprocess.Popen:
    """The program, as a user starts it."""
    command = [sys.executable, "-m", "crop_trl.commands.triplets", "--input", str(source)]
    command += ["--limit", str(rows), "--output", str(output), "--base-url", url, "--concurrency", str(concurrency)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    environment |= {"OPENAI_API_KEY": KEY, "PYTHONPATH": str(ROOT)}
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*command, *RETRIES], env=environment, **streams)


def finish(process: subprocess.Popen) -> tuple[float, float]:
    """Wait for its end; seconds of wall clock and of CPU."""
    started = time.perf_counter()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"error: the program ended with {process.returncode}")
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime


def main() -> None:
    """Parse, kill, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--latency", default="0.3", help="seconds that the server takes for an answer")
    args = parser.parse_args()

    folder = Path(tempfile.mkdtemp())
    log, output = folder / "log", OutputDirectory(folder / "out")
    settings = TripletSettings(input=[str(args.input)], limit=args.rows)
    problems = read_problems(settings, load_domain(settings.domain)).problems
    run = (args.input, args.rows, args.concurrency)
    known_then: list[tuple[int, set[str]]] = []
    with servers() as start_server:
        url = start_server("--log", str(log), "--latency", args.latency)
        for kill in range(args.kills):
            process = start(*run, url, output.path)
            # Two answers a record at the least.
            while len(served(log)) < 2 * args.rows * (kill + 1) / (args.kills + 1):
                assert process.poll() is None, "the program ended by itself"
                time.sleep(0.05)
            process.kill()
            process.wait()
            time.sleep(float(args.latency) + 0.2)
            known_then.append((len(served(log)), {e["answer"]["response_id"] for e in answers_in(output.ledger)}))
            sent, known = known_then[-1]
            print(f"kill {kill + 1}: {sent} answers sent, {len(known)} on disk", flush=True)
        finish(start(*run, url, output.path))
        with urllib.request.urlopen(url.removesuffix("/v1") + "/stats") as reply:
            in_flight = json.load(reply)["most_in_flight"]
        sent, ledger = served(log), [e["answer"]["response_id"] for e in answers_in(output.ledger)]
        request_of = {answer["id"]: answer["request"] for answer in sent}
        again = lost = 0
        for count, known in known_then:
            later = {answer["request"] for answer in sent[count:]}
            again += sum(request_of[answer] in later for answer in known)
            lost += len(known - set(ledger))
        records = {record["id"]: record["status"] for record in output.load_records()}
        right = {p.id: "excluded_input" if p.excluded else expected_status(p.text) for p in problems}
        finish(start(*run, url, output.path))
        result = {
            "rows": args.rows,
            "most_in_flight": in_flight,
            "answers_sent": len(sent),
            "distinct_requests": len(set(request_of.values())),
            "answers_in_ledger": len(ledger),
            "lost_in_flight": len(sent) - len(ledger),
            "answered_and_asked_again": again,
            "on_disk_and_lost": lost,
            "wrong_status": sum(records.get(i) != status for i, status in right.items()),
            "asked_by_a_rerun_of_the_finished_run": len(served(log)) - len(sent),
            "statuses": dict(Counter(records.values())),
        }
        url = start_server("--log", str(folder / "quick"), "--latency", "0", "--plan", "good")
        wall, cpu = finish(start(*run, url, folder / "quick-out"))
    result["records_per_second"] = round(args.rows / wall, 1)
    result["records_per_second_of_its_own_cpu_time"] = round(args.rows / cpu, 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
