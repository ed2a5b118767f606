"""Banks whose every number is known, and what a page of them holds, read back."""

import base64
import gzip
import json
import re
import shutil

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from crop_trl.analysis.bank import RolloutBank
from crop_trl.methods import Signals, TopKLogprobs

SIGNALS = [f"{who}/{kind}" for who in ("teacher", "student") for kind in ("original", "paraphrase", "counterfactual")]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")


def chromium():
    """A browser without a window, that logs what its pages complain of and ask for."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location, driver = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


def words_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Each entry is a word of its own."""
    vocab = {f"w{n}": n for n in range(size)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="w0")))


def made_up_bank(lengths, vocab, top_k=16, counterfactuals=2, flat=0.5, seed=0, rows=None) -> RolloutBank:
    """Random responses and predictions; the smaller `flat`, the surer they are."""
    generator = torch.Generator().manual_seed(seed)
    size = (len(lengths), max(lengths))
    mask = torch.arange(size[1]) < torch.tensor(lengths)[:, None]

    def scored():
        logits = torch.randn(*size, top_k, generator=generator).sort(-1, descending=True).values / flat
        logprobs = logits.log_softmax(-1)
        ids = torch.randint(vocab - top_k, (*size, 1), generator=generator) + torch.arange(top_k)
        drawn = torch.randint(top_k, (*size, 1), generator=generator)
        return TopKLogprobs(ids, logprobs, logprobs.gather(-1, drawn)[..., 0])

    signals = {name: [scored()] for name in (*SIGNALS, "teacher/negative")}
    for name in ("teacher/counterfactual", "student/counterfactual"):
        signals[name] += [scored() for _ in range(counterfactuals - 1)]
    ids = torch.randint(vocab, size, generator=generator) * mask
    said = {"original": "Tom has 3 apples.", "paraphrase": "3 apples are Tom's.", "counterfactual": "Tom has 4 apples."}
    rows = rows or [{"prompts": {kind: [text] for kind, text in said.items()}, "answer": "3"}] * len(lengths)
    return RolloutBank(ids, mask, Signals(signals), rows)


def unpacked(page: str) -> tuple[dict, dict[str, np.ndarray]]:
    """Facts and arrays of a page."""
    (packed,) = re.findall(r'<script type="text/plain" id="packed">([^<]*)</script>', page)
    raw = gzip.decompress(base64.b64decode(packed))
    length = int.from_bytes(raw[:4], "little")
    facts, at, arrays = json.loads(raw[4 : 4 + length]), 4 + length, {}
    for name, kind, count in facts["arrays"]:
        size = int(kind[1:])
        planes = np.frombuffer(raw, np.uint8, count * size, at).reshape(size, count)
        arrays[name] = np.ascontiguousarray(planes.T).view(f"<{kind}").ravel()
        at += count * size
    assert at == len(raw)
    return facts, arrays
