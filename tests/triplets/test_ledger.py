import asyncio
import json
import os
import subprocess
import sys

import pytest
from triplets.running import answers_in

from crop_trl.files import InUseError
from crop_trl.triplets.ledger import Ledger, LedgerError, request_key


def fill(path, count, start=0):
    async def work():
        with Ledger(path) as ledger:
            await asyncio.gather(
                *(ledger.append({"key": f"k{n}", "text": f"中\ud83d {n}"}) for n in range(start, count))
            )
            return [ledger.get(f"k{n}")["text"] for n in range(start, count)]

    return asyncio.run(work())


def test_what_was_appended_is_found_again(tmp_path):
    path = tmp_path / "deep" / "ledger.jsonl"
    assert fill(path, 100) == [f"中\ud83d {n}" for n in range(100)]
    seen = []
    with Ledger(path, on_entry=seen.append) as ledger:
        assert len(ledger) == 100 and ledger.get("k7")["text"].endswith(" 7")
        assert ledger.get("other") is None
    assert sum("key" in entry for entry in seen) == 100
    assert [entry["key"] for entry in answers_in(path)] == [f"k{n}" for n in range(100)]


def test_every_length_of_a_half_written_line_is_recovered(tmp_path):
    path = tmp_path / "ledger.jsonl"
    fill(path, 2)
    whole = path.read_bytes()
    ends = [place for place, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with Ledger(path) as ledger:
            # A line that lacks only its end is a whole answer and stays.
            assert len(ledger) == sum(length >= end for end in ends)
            assert (ledger.spoiled[0] > 0) == (length not in (0, *ends, *(end + 1 for end in ends)))
        if length % 8:
            continue
        fill(path, 2)
        with Ledger(path) as ledger:
            assert len(ledger) == 2 and ledger.spoiled == (0, 0)


def test_a_spoiled_line_in_the_middle_costs_only_itself(tmp_path):
    path = tmp_path / "ledger.jsonl"
    fill(path, 3)
    lines = path.read_bytes().split(b"\n")
    lines[1] = b"\0" * 20
    path.write_bytes(b"\n".join(lines))
    with Ledger(path) as ledger:
        assert len(ledger) == 2 and ledger.spoiled == (0, 1)
        assert ledger.get("k2")["text"].endswith(" 2")


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    path = tmp_path / "ledger.jsonl"
    code = (
        "import time; from crop_trl.triplets.ledger import Ledger; "
        f"held = Ledger({str(path)!r}); print('open', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=os.getcwd())
    try:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(InUseError, match="in use by another run"):
            Ledger(path)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    Ledger(path).close()


def test_a_full_disk_stops_without_spoiling_the_file(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"

    async def work():
        with Ledger(path) as ledger:
            await ledger.append({"key": "a"})
            real = os.write

            def full(file, data):
                if file == ledger._store._file:
                    real(file, bytes(data)[:5])
                    raise OSError(28, "No space left on device")
                return real(file, data)

            with monkeypatch.context() as patch:
                patch.setattr(os, "write", full)
                with pytest.raises(LedgerError, match="No space left"):
                    await ledger.append({"key": "b"})
            await ledger.append({"key": "c"})

    asyncio.run(work())
    assert [json.loads(line).get("key") for line in path.read_text().splitlines()] == ["a", "c"]


def test_an_append_is_on_disk_when_it_returns(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (real(file), synced.append(path.read_bytes()))[0])

    async def one(ledger, n):
        await ledger.append({"key": f"k{n}"})
        assert f'"k{n}"'.encode() in synced[-1]

    async def work():
        with Ledger(path) as ledger:
            await asyncio.gather(*(one(ledger, n) for n in range(20)))

    asyncio.run(work())


def test_keys_depend_on_everything_and_on_no_order():
    base = {"kind": "generator", "messages": [{"role": "user", "content": "a"}], "round": 1}
    assert request_key(**base) == request_key(**dict(reversed(base.items())))
    others = [{**base, "round": 2}, {**base, "kind": "critic"}, {**base, "messages": []}]
    assert len({request_key(**request) for request in (base, *others)}) == 4
