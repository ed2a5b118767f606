"""The programs: `crop-trl NAME ...`, or `python -m crop_trl.commands.NAME ...`."""

import functools
import gc
import importlib.metadata

# Loaded modules stay: to look for garbage at every 700 objects of theirs takes as long as loading them.
gc.set_threshold(50_000, 20, 20)
# Accelerate reads the metadata of some packages from their files dozens of times in each step.
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
importlib.metadata.version = functools.cache(importlib.metadata.version)

COMMANDS = {
    "triplets": "make, check and review original-paraphrase-counterfactual triplets",
    "plan": "what a training run takes of each GPU, and whether it fits",
    "train": "train a student with CROP or another method, on one process or many",
    "serve-teacher": "a teacher behind HTTP, on cards or machines of its own",
    "study": "every run of a grid, side by side, again after a kill, and tables of them",
    "evaluate": "sample a model on benchmarks, grade its answers, compare runs",
    "audit": "compare training texts with benchmark problems",
    "replay": "sample one batch, score it every way there is, show what each method keeps",
    "view": "one page in which to see what every method would train, answer by answer",
    "selectors": "measure which methods find the tokens that depend on their problem, without training",
    "analyze": "draw what methods keep: kinds of tokens, entropy ranks, heat maps, budget curves",
}
