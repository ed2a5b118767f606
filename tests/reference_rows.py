"""The rows of the table that have no value in the stored cases, once more: slow, from the equation of each alone.

    python tests/reference_rows.py

writes `golden/rows.json`, a small batch with what each row makes of it. Nothing here imports the package.
"""

import json
import math
from dataclasses import dataclass

import torch
from reference import GOLDEN, entropy, jsd, keep_top, kl, loss, masses, quantile, quantile_normalize


@dataclass
class Batch:
    """Scored responses in Python's own lists. A signal after several prompts has a list for each of them."""

    dists: dict[str, list[list[dict[int, float]]]]
    sampled: dict[str, list]
    mask: list[list[bool]]
    base: list[float]
    rewards: list[float]
    step: int
    ratio: float
    own: dict[str, float]

    def places(self) -> list[tuple[int, int]]:
        return [(i, t) for i, row in enumerate(self.mask) for t, valid in enumerate(row) if valid]

    def each(self, value) -> list[list]:
        """`[B][T]`: a value of row and position, 0 where there is no token."""
        return [[value(i, t) if valid else 0 for t, valid in enumerate(row)] for i, row in enumerate(self.mask)]

    def both(self) -> tuple[list, list]:
        return self.sampled["teacher/original"], self.sampled["student/original"]


def shared_kl(p: dict[int, float], q: dict[int, float]) -> float:
    shared = [token for token in p if token in q]
    ps, qs = ([masses(dist)[token] for token in shared] for dist in (p, q))
    return kl([*ps, 1 - math.fsum(ps)], [*qs, 1 - math.fsum(qs)])


def vopd(b: Batch) -> dict:
    teacher, student = b.both()
    p, q = b.dists["student/original"], b.dists["teacher/original"]
    return {"added": b.each(lambda i, t: teacher[i][t] - student[i][t] + shared_kl(p[i][t], q[i][t]))}


def poweropd(b: Batch) -> dict:
    (teacher, student), alpha = b.both(), b.own["alpha"]
    return {"added": b.each(lambda i, t: math.exp(alpha * teacher[i][t]) - math.exp(alpha * student[i][t]))}


def top_d(b: Batch) -> dict:
    (teacher, student), alpha = b.both(), b.own["alpha"]
    return {"added": b.each(lambda i, t: math.log(alpha * math.exp(teacher[i][t] - student[i][t]) + 1 - alpha))}


def cal_opd(b: Batch) -> dict:
    teacher, student = b.both()

    def added(i, t):
        praised, blamed = (b.sampled[f"teacher/{kind}"][i][t] - teacher[i][t] for kind in ("praised", "blamed"))
        gap = teacher[i][t] - student[i][t]
        up, down = max(0, praised, blamed), -min(0, praised, blamed)
        return max(0, gap - b.own["lambda"] * down) if gap > 0 else -max(0, -gap - b.own["lambda"] * up)

    return {"added": b.each(added)}


def opdvr(b: Batch) -> dict:
    teacher, student = b.both()

    def added(i, t):
        gap = teacher[i][t] - student[i][t]
        return max(0, gap) if b.rewards[i] > 0 else min(0, gap)

    return {"added": b.each(added)}


def opsa(b: Batch) -> dict:
    _, student = b.both()
    kept = [keep_top([-logprob for logprob in row], marks, b.ratio) for row, marks in zip(student, b.mask)]
    entropies = b.each(lambda i, t: entropy(b.dists["student/original"][i][t]))
    values = [entropies[i][t] for i, t in b.places() if kept[i][t]]
    low, high = min(values), max(values)

    def added(i, t):
        rank = (entropies[i][t] - low) / (high - low) if high - low > 1e-12 else 1
        return b.own["least"] + (b.own["most"] - b.own["least"]) * rank

    return {"kept": kept, "added": b.each(added)}


def esr(b: Batch) -> dict:
    kept = []
    for row in b.mask:
        left = b.own["tokens"]
        kept.append([])
        for valid in row:
            kept[-1].append(valid and left > 0)
            left -= valid
    return {"kept": kept}


def prune_opd(b: Batch) -> dict:
    weights = []
    for i, row in enumerate(b.mask):
        bad = 0
        weights.append([])
        for t, valid in enumerate(row):
            student, teacher = (b.dists[f"{who}/original"][i][t] for who in ("student", "teacher"))
            if valid and len(set(student) & set(teacher)) / len(student) < b.own["overlap"]:
                bad += 1
            weights[-1].append(min(1, max(0, 1 - b.own["drop"] * bad)) + b.own["base"] if valid else 0)
    return {"weights": weights}


def fire_opd(b: Batch) -> dict:
    teacher, means = b.both()[0], {}
    for i, row in enumerate(b.mask):
        values = [teacher[i][t] for t, valid in enumerate(row) if valid]
        if values:
            means[i] = math.fsum(values) / len(values)
    least = quantile(list(means.values()), b.own["dropped"])
    of_teacher = b.each(lambda i, t: entropy(b.dists["teacher/original"][i][t]))
    of_student = b.each(lambda i, t: entropy(b.dists["student/original"][i][t]))
    most_teacher, most_student = (max(values[i][t] for i, t in b.places()) for values in (of_teacher, of_student))

    def plain(i, t):
        sure, unsure = 1 - of_teacher[i][t] / most_teacher, of_student[i][t] / most_student
        return (1 + b.own["alpha"] * sure) * (1 + b.own["beta"] * unsure)

    mean = math.fsum(plain(i, t) for i, t in b.places()) / len(b.places())
    return {"kept": b.each(lambda i, t: means[i] >= least), "weights": b.each(lambda i, t: plain(i, t) / mean)}


def crop_soft(b: Batch) -> dict:
    o, p, c = (b.dists[f"teacher/{kind}"] for kind in ("original", "paraphrase", "counterfactual"))
    above = b.each(lambda i, t: max(0.0, jsd(o[i][t], c[i][t]) - jsd(o[i][t], p[i][t])))
    scaled, floor = quantile_normalize(above, b.mask), b.own["floor"]
    mean = math.fsum(scaled[i][t] for i, t in b.places()) / len(b.places())
    return {"weights": b.each(lambda i, t: floor + (1 - floor) * scaled[i][t] / mean)}


def opsd(b: Batch) -> dict:
    return {}


def pw_opsd(b: Batch) -> dict:
    def weight(i, t):
        n = 1 + max(place for place, valid in enumerate(b.mask[i]) if valid)
        along = (t + 1 - 0.5) / n
        rise = 1 / (1 + math.exp(-(along - b.own["middle"]) / b.own["width"]))
        return b.own["floor"] + (1 - b.own["floor"]) * rise

    return {"weights": b.each(weight)}


def right_over_wrong(b: Batch, i: int, t: int) -> float:
    wrong = [variant[i][t] for variant in b.sampled["teacher/wrong"] if variant[i] is not None]
    mean = math.fsum(math.exp(logprob) for logprob in wrong) / len(wrong)
    return b.sampled["teacher/right"][i][t] - math.log(mean)


def reweighted(b: Batch, evidence) -> dict:
    share = b.own["lambda"] * max(0, 1 - b.step / b.own["decay_steps"])

    def added(i, t):
        sign = (b.base[i] > 0) - (b.base[i] < 0)
        factor = min(1 + b.own["epsilon"], max(1 - b.own["epsilon"], math.exp(sign * evidence(i, t))))
        return b.base[i] * (1 - share + share * factor) - b.base[i]

    return {"added": b.each(added)}


def rlsd(b: Batch) -> dict:
    privileged, student = b.sampled["teacher/privileged"], b.sampled["student/original"]
    return reweighted(b, lambda i, t: privileged[i][t] - student[i][t])


def cepo(b: Batch) -> dict:
    return reweighted(b, lambda i, t: right_over_wrong(b, i, t))


def rlcsd(b: Batch) -> dict:
    def change(i, t):
        r = b.own["lambda"] * math.tanh(right_over_wrong(b, i, t) / b.own["tau"])
        return r if abs(r) > b.own["delta"] else 0

    kept = b.each(lambda i, t: b.base[i] != 0)
    used = [(i, t) for i, t in b.places() if kept[i][t]]
    modulated = [(i, t) for i, t in used if change(i, t) != 0]

    def added(i, t):
        new = b.base[i] + change(i, t)
        return (max(0, new) if b.base[i] > 0 else min(0, new)) - b.base[i] if kept[i][t] else 0

    # The mean of the others, and eta times the mean of these, as one sum over all that is used.
    def weight(i, t):
        if not kept[i][t]:
            return 0
        if change(i, t) != 0:
            return b.own["eta"] * len(used) / len(modulated)
        return len(used) / (len(used) - len(modulated))

    return {"kept": kept, "added": b.each(added), "weights": b.each(weight)}


# By name, with settings at which something happens in a small batch.
ROWS = {
    "vopd": (vopd, {}),
    "poweropd": (poweropd, {"alpha": 5.0}),
    "top-d": (top_d, {"alpha": 0.1}),
    "prune-opd": (prune_opd, {"overlap": 0.7, "drop": 0.2, "base": 0.5}),
    "esr": (esr, {"tokens": 3}),
    "fire-opd": (fire_opd, {"dropped": 0.2, "alpha": 1.0, "beta": 1.0}),
    "opsa": (opsa, {"least": -0.5, "most": -1.0}),
    "crop-soft": (crop_soft, {"floor": 0.5}),
    "opsd": (opsd, {}),
    "pw-opsd": (pw_opsd, {"floor": 0.25, "middle": 0.3, "width": 0.1}),
    "cal-opd": (cal_opd, {"lambda": 0.5}),
    "opdvr": (opdvr, {}),
    "rlsd": (rlsd, {"lambda": 0.5, "epsilon": 0.2, "decay_steps": 60}),
    "cepo": (cepo, {"lambda": 0.5, "epsilon": 0.5, "decay_steps": 25}),
    "rlcsd": (rlcsd, {"lambda": 0.5, "tau": 1.3, "delta": 0.02, "eta": 0.5}),
}


# --- A batch to look at -----------------------------------------------------------------------------------------------

LENGTHS = (8, 5, 8, 1, 7)
KINDS = ("original", "paraphrase", "counterfactual", "praised", "blamed", "privileged", "right", "wrong", "wrong")


def random_case(seed: int) -> dict:
    """Responses of several lengths, one with tokens of a tool; a reader's predictions are like those of the others."""
    generator = torch.Generator().manual_seed(seed)
    size, vocab, k = (len(LENGTHS), max(LENGTHS)), 12, 5

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.arange(size[1]) < torch.tensor(LENGTHS)[:, None]
    mask[2, 3:5] = False
    common, sampled = 2 * normal(*size, vocab), torch.randint(vocab, (*size, 1), generator=generator)
    signals = {}
    for name in [*(f"teacher/{kind}" for kind in KINDS), "student/original"]:
        logprobs = (common + normal(*size, vocab)).log_softmax(-1)
        top = logprobs.topk(k)
        signal = {"ids": top.indices, "logprobs": top.values, "sampled": logprobs.gather(-1, sampled).squeeze(-1)}
        signals.setdefault(name, []).append({key: value.tolist() for key, value in signal.items()})
    # One response has a single wrong answer.
    signals["teacher/wrong"][1]["absent"] = [1]
    old = torch.tensor(signals["student/original"][0]["sampled"], dtype=torch.float64)
    return {
        "mask": mask.tolist(),
        "base": [0.9, -0.6, 0.0, -0.2, 0.7],
        "rewards": [1.0, 0.0, 0.5, -1.0, 0.0],
        "step": 15,
        "ratio": 0.4,
        "signals": signals,
        "new": (old + 0.2 * normal(*size)).tolist(),
    }


def expected(name: str, case: dict) -> dict:
    """What a row makes of a case, and its loss."""
    row, own = ROWS[name]
    dists, sampled = {}, {}
    for signal, variants in case["signals"].items():
        first = variants[0]
        dists[signal] = [[dict(zip(*at)) for at in zip(*both)] for both in zip(first["ids"], first["logprobs"])]
        several = [
            [None if i in variant.get("absent", ()) else values for i, values in enumerate(variant["sampled"])]
            for variant in variants
        ]
        sampled[signal] = several if len(several) > 1 else several[0]
    plain = {key: case[key] for key in ("mask", "base", "rewards", "step", "ratio")}
    found = {"kept": case["mask"], "weights": None, "added": None, **row(Batch(dists, sampled, own=own, **plain))}
    target = "teacher/privileged" if name in ("opsd", "pw-opsd") else "teacher/original"
    old, new = sampled["student/original"], case["new"]
    value = loss(new, old, sampled[target], case["base"], found["kept"], weights=found["weights"], added=found["added"])
    return {**found, "loss": value}


if __name__ == "__main__":
    stored = random_case(0)
    stored["expected"] = {name: expected(name, stored) for name in ROWS}
    (GOLDEN / "rows.json").write_text(json.dumps(stored) + "\n")
