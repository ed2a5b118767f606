"""Train the embedded task with several methods and seeds, and print one table.

    python benchmarks/compare_methods.py --methods crop random opd crop-bottom --seeds 0 1 2 --output runs/compare

Runs are separate processes of `crop-trl train`, `--jobs` at a time with `--threads` threads each. A run whose
result is there already is not repeated. What follows `--` goes to every run.
"""

import argparse
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from crop_trl.training.results import FILE, RunResult

ROOT = Path(__file__).resolve().parents[1]


def run(method: str, seed: int, output: Path, threads: int, extra: list[str]) -> RunResult:
    """One training run, and its result."""
    folder = output / f"{method}-seed{seed}"
    result = folder / FILE
    if not result.exists():
        command = [sys.executable, "-m", "crop_trl.commands.train", "--config", "examples/configs/tiny_math.yaml"]
        command += ["--use_cpu", "true", "--method", method, "--seed", str(seed), "--output_dir", str(folder)]
        command += ["--heatmap", "false", "--disable_tqdm", "true", *extra]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{method}, seed {seed} failed:\n{done.stderr[-2000:]}")
        (folder / "log.txt").write_text(done.stdout)
    return RunResult.read(result)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["crop", "random", "opd", "crop-bottom"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("runs/compare"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args, extra = parser.parse_known_args()
    extra = [argument for argument in extra if argument != "--"]
    output = args.output.resolve()
    tasks = [(method, seed) for seed in args.seeds for method in args.methods]
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(run, method, seed, output, args.threads, extra) for method, seed in tasks]
        results = [future.result() for future in tqdm(futures)]
    print("| method | before | after, by seed | mean | standard deviation |")
    print("|---|---|---|---|---|")
    for method in args.methods:
        rows = [r for r in results if r.method == method]
        after = [r.accuracy_after for r in rows]
        spread = f"{statistics.stdev(after):.3f}" if len(after) > 1 else "-"
        before = statistics.mean(r.accuracy_before for r in rows)
        listed = " ".join(f"{value:.3f}" for value in after)
        print(f"| {method} | {before:.3f} | {listed} | {statistics.mean(after):.3f} | {spread} |")


if __name__ == "__main__":
    main()
