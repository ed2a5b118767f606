"""Runs scripts of this folder one after another in one launch, whose start takes longer than their work.

`several.py FIRST.py --its options + SECOND.py --its options`.
"""

import gc
import runpy
import sys
from itertools import groupby
from pathlib import Path

import crop_trl.commands  # which looks for garbage less often and reads metadata of packages once
import crop_trl.runs  # noqa: F401

if __name__ == "__main__":
    for between, words in groupby(sys.argv[1:], lambda word: word == "+"):
        if not between:
            gc.freeze()
            sys.argv = list(words)
            runpy.run_path(str(Path(__file__).parent / sys.argv[0]), run_name="__main__")
