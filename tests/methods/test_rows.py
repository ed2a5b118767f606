"""The rows that came after the paper's: stored values, a slow reference, and what must not make a difference."""

import json
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import CASES, GOLDEN, TOLERANCE, load_case
from reference_rows import ROWS, expected, random_case
from trl.experimental.iw_opd import IWOPDTrainer
from trl.experimental.sdft import loss_utils as sdft

from crop_trl.methods import METHODS, SelectionSettings, Signals, TopKLogprobs, select
from crop_trl.methods.divergence import target_divergence
from crop_trl.training.loss import sampled_opd_loss

every_row = pytest.mark.parametrize("name", ROWS)
both_precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
# As published; where the papers have several, docs/methods.md says which.
PUBLISHED = {
    "vopd": {},
    "poweropd": {"alpha": 5.0},
    "top-d": {"alpha": 0.1},
    "prune-opd": {"overlap": 0.7, "drop": 0.01, "base": 0.5},
    "esr": {"tokens": 100},
    "fire-opd": {"dropped": 0.2, "alpha": 1.0, "beta": 1.0},
    "opsa": {"least": -0.5, "most": -1.0},
    "crop-soft": {"floor": 0.5},
    "opsd": {},
    "pw-opsd": {"floor": 0.25, "middle": 0.3, "width": 0.1},
    "cal-opd": {"lambda": 5.0},
    "opdvr": {},
    "rlsd": {"lambda": 0.5, "epsilon": 0.2, "decay_steps": 60},
    "cepo": {"lambda": 0.5, "epsilon": 0.5, "decay_steps": 25},
    "rlcsd": {"lambda": 0.5, "tau": 1.3, "delta": 0.02, "eta": 0.5},
}
# Of these test_table.py says what they do.
BY_HAND = {"random", "crop-max", "first", "last", "least-likely"}


def signals_of(case: dict, dtype=torch.float64) -> Signals:
    """Those of a stored or drawn case, as a scorer returns them."""
    signals = {}
    for name, variants in case["signals"].items():
        signals[name] = []
        for variant in variants:
            values = [torch.tensor(variant[key], dtype=dtype) for key in ("logprobs", "sampled")]
            present = torch.ones_like(values[1], dtype=torch.bool)
            for tensor in (present, *values):
                tensor[variant.get("absent", [])] = 0
            signals[name].append(TopKLogprobs(torch.tensor(variant["ids"]), *values, mask=present))
    return Signals(signals)


def arguments(case: dict, dtype=torch.float64) -> dict:
    """What `select` takes of a case."""
    return {
        "signals": signals_of(case, dtype),
        "loss_mask": torch.tensor(case["mask"]),
        "rewards": {"right": torch.tensor(case["rewards"], dtype=dtype)},
        "advantages": torch.tensor(case["base"], dtype=dtype),
    }


def choose(name: str, given: dict, case: dict, **more):
    needed = {need: given["signals"].lists[need] for need in METHODS[name].needs}
    own = SelectionSettings(case["ratio"], method_settings=ROWS[name][1])
    return select(name, **{**given, "signals": needed}, settings=own, step=case["step"], **more)


def assert_expected(selection, loss: torch.Tensor, stored: dict, dtype: torch.dtype) -> None:
    assert selection.mask.tolist() == stored["kept"]
    for found, name in ((selection.weights, "weights"), (selection.teacher_advantages, "added")):
        assert (found is None) == (stored[name] is None)
        if found is not None:
            right = torch.tensor(stored[name], dtype=torch.float64)[selection.mask]
            torch.testing.assert_close(
                found[selection.mask].double(), right, rtol=TOLERANCE[found.dtype], atol=TOLERANCE[found.dtype]
            )
    # Places in a response are counted in single precision.
    tolerance = max(TOLERANCE[x.dtype] for x in (selection.weights, loss) if x is not None)
    assert loss.item() == pytest.approx(stored["loss"], rel=tolerance, abs=tolerance)


def loss_of(selection, given: dict, case: dict, dtype=torch.float64) -> torch.Tensor:
    return sampled_opd_loss(
        torch.tensor(case["new"], dtype=dtype),
        given["signals"]["student/original"].sampled_logprobs,
        selection.teacher_logprobs,
        given["advantages"],
        selection.mask,
        weights=selection.weights,
        teacher_advantages=selection.teacher_advantages,
    )


# --- Values -----------------------------------------------------------------------------------------------------------


def test_every_row_has_a_reference_and_its_published_settings():
    stored = set(load_case(CASES[0], torch.float64)[0]["expected"]["losses"])
    assert set(METHODS) == {*stored, *ROWS, *BY_HAND} and set(PUBLISHED) == set(ROWS)
    assert {name: dict(METHODS[name].settings) for name in ROWS} == PUBLISHED


@every_row
@both_precisions
def test_golden_rows(name, dtype):
    case = json.loads((GOLDEN / "rows.json").read_text())
    stored, given = case["expected"][name], arguments(case, dtype)
    reference = expected(name, case)
    assert reference["kept"] == stored["kept"] and reference["loss"] == pytest.approx(stored["loss"], rel=1e-12)
    selection = choose(name, given, case)
    assert_expected(selection, loss_of(selection, given, case, dtype), stored, dtype)


@every_row
@given(seed=st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_matches_reference(name, seed):
    case = random_case(seed)
    given = arguments(case)
    selection = choose(name, given, case)
    assert_expected(selection, loss_of(selection, given, case), expected(name, case), torch.float64)


# --- What must not make a difference ----------------------------------------------------------------------------------


def parts_of(given: dict, *rows: list[int]) -> list[dict]:
    """The same for some of the responses each."""
    return [
        {
            "signals": Signals({k: [v.rows(part) for v in vs] for k, vs in given["signals"].lists.items()}),
            "loss_mask": given["loss_mask"][part],
            "rewards": {k: v[part] for k, v in given["rewards"].items()},
            "advantages": given["advantages"][part],
        }
        for part in rows
    ]


def on_processes(calls: list) -> list:
    """Call functions of `gather` at the same time, as processes do that hold a part of the batch each."""
    barrier, handed_over = Barrier(len(calls), timeout=300), {}

    def run(rank: int):
        def gather(values: torch.Tensor) -> torch.Tensor:
            assert values.ndim == 1
            handed_over[rank] = values
            barrier.wait()
            everything = torch.cat([handed_over[other] for other in range(len(calls))])
            barrier.wait()
            return everything

        return calls[rank](gather)

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, range(len(calls))))


def assert_same(found: list, order: list[int], whole) -> None:
    """Selections of parts of a batch, one after the other, are the selection of all in that order."""
    masks = torch.cat([part.mask for part in found])
    assert torch.equal(masks, whole.mask[order])
    for name in ("weights", "teacher_advantages", "teacher_logprobs"):
        if getattr(whole, name) is not None:
            values = torch.cat([getattr(part, name) for part in found])[masks]
            torch.testing.assert_close(values, getattr(whole, name)[order][masks], rtol=1e-12, atol=1e-12)


@every_row
@pytest.mark.parametrize("rows", [[[4, 2, 0, 3, 1]], [[0, 1], [2, 3, 4]], [[3], [1, 2], [4, 0]], [[0, 1, 2, 3, 4], []]])
def test_neither_order_nor_processes_make_a_difference(name, rows):
    case = random_case(5)
    given = arguments(case)
    whole = choose(name, given, case)
    parts = parts_of(given, *rows)
    found = on_processes([lambda gather, part=part: choose(name, part, case, gather=gather) for part in parts])
    assert_same(found, sum(rows, []), whole)


@every_row
def test_padding_makes_no_difference(name):
    """A wider batch, with other numbers wherever there is no token."""
    case = random_case(6)
    given = arguments(case)
    whole = choose(name, given, case)
    generator = torch.Generator().manual_seed(7)

    def wide(values: torch.Tensor) -> torch.Tensor:
        more = torch.nn.functional.pad(values.movedim(1, -1), (0, 4)).movedim(-1, 1).clone()
        valid = torch.nn.functional.pad(given["loss_mask"], (0, 4))
        if more.dtype == torch.int64:
            more[~valid] = torch.randint(12, more[~valid].shape, generator=generator)
        elif more.dtype != torch.bool:
            more[~valid] = -torch.rand(more[~valid].shape, generator=generator, dtype=more.dtype)
        return more

    signals = {
        key: [TopKLogprobs(**{field: wide(value) for field, value in vars(part).items()}) for part in parts]
        for key, parts in given["signals"].lists.items()
    }
    found = choose(name, {**given, "signals": Signals(signals), "loss_mask": wide(given["loss_mask"])}, case)
    assert not found.mask[:, 8:].any()
    narrow = {
        key: None if getattr(found, key) is None else getattr(found, key)[:, :8]
        for key in ("mask", "weights", "teacher_advantages", "teacher_logprobs")
    }
    assert_same([replace(found, **narrow)], list(range(5)), whole)


@every_row
def test_a_batch_in_which_nothing_may_be_kept(name):
    case = random_case(8)
    given = arguments(case)
    given["loss_mask"] = torch.zeros_like(given["loss_mask"])
    assert not choose(name, given, case).mask.any()


# --- Single rows ------------------------------------------------------------------------------------------------------


def test_where_nothing_can_be_told_apart():
    """Equal entropies, no margin, no response with an advantage, nothing modulated: no NaN, and nothing is lost."""
    case = random_case(9)
    given = arguments(case)
    same = given["signals"]["teacher/original"]
    same.logprobs[:] = torch.tensor([0.2] * 5, dtype=torch.float64).log()
    signals = {name: [same for _ in parts] for name, parts in given["signals"].lists.items()}
    flat = {**given, "signals": Signals(signals)}
    assert (choose("opsa", flat, case).teacher_advantages == -1.0).all()
    assert (choose("crop-soft", flat, case).weights == 1.0).all()
    kept = choose("rlcsd", flat, case)
    assert kept.mask.any() and (kept.weights[kept.mask] == 1.0).all() and not kept.teacher_advantages.any()
    nobody = choose("rlcsd", {**flat, "advantages": torch.zeros(5)}, case)
    assert not nobody.mask.any()


def test_the_expected_advantage_of_vopd_is_zero_where_all_entries_are_known():
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 1, 1, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    mean = 0.0
    for token in range(6):
        signals = {
            f"{who}/original": TopKLogprobs(torch.arange(6).view(1, 1, 6), values, values[..., token])
            for who, values in (("teacher", teacher), ("student", student))
        }
        added = select("vopd", signals, torch.ones(1, 1), SelectionSettings()).teacher_advantages
        mean += student[0, 0, token].exp() * added.item()
    assert abs(mean) < 1e-12


def test_a_response_at_the_threshold_stays():
    """Of six the fifth below is one, since the threshold is the second lowest itself."""
    ids = torch.zeros(6, 2, 1, dtype=torch.long)
    signal = TopKLogprobs(ids, ids.double(), -torch.tensor([3.0, 1, 6, 2, 5, 4]).double()[:, None].expand(6, 2))
    signals = {"teacher/original": signal, "student/original": signal}
    kept = select("fire-opd", signals, torch.ones(6, 2), SelectionSettings()).mask
    assert kept.all(-1).tolist() == [True, True, False, True, True, True] and kept.sum() == 10


# --- TRL's own --------------------------------------------------------------------------------------------------------


def slopes(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, logits)[0]


@pytest.fixture
def whole():
    """Logits of student and teacher over nine entries, three responses, what was sampled."""
    generator = torch.Generator().manual_seed(3)
    student, teacher = 2 * torch.randn(2, 3, 6, 9, generator=generator, dtype=torch.float64)
    sampled = torch.randint(9, (3, 6), generator=generator)
    mask = torch.arange(6) < torch.tensor([[6], [3], [1]])
    new = student.clone().requires_grad_()
    logprobs = new.log_softmax(-1).gather(-1, sampled[..., None]).squeeze(-1)

    def signal(logits: torch.Tensor) -> TopKLogprobs:
        values = logits.log_softmax(-1)
        ids = torch.arange(9).expand(3, 6, 9)
        return TopKLogprobs(ids, values, values.gather(-1, sampled[..., None]).squeeze(-1))

    def loss(method: str, name: str) -> torch.Tensor:
        signals = {name: signal(teacher), "student/original": signal(student)}
        selection = select(method, signals, mask, SelectionSettings())
        old, none = signals["student/original"].sampled_logprobs, torch.zeros(3)
        return sampled_opd_loss(
            logprobs, old, selection.teacher_logprobs, none, selection.mask, weights=selection.weights
        )

    return SimpleNamespace(new=new, teacher=teacher, sampled=sampled, mask=mask, loss=loss)


def test_iw_opd_is_that_of_trl(whole):
    """Without ratio and clip there: the same gradient where the ratio is 1."""
    settings = {"temperature": 1.0, "iw_opd_gamma": 0.5, "iw_opd_epsilon": 1e-8}
    trainer = SimpleNamespace(**settings, model=SimpleNamespace(training=False), _metrics={"eval": defaultdict(list)})
    labels = whole.sampled.masked_fill(~whole.mask, -100)
    teacher = whole.teacher.log_softmax(-1).gather(-1, whole.sampled[..., None]).squeeze(-1)
    theirs = IWOPDTrainer._compute_iw_opd_loss(trainer, whole.new, whole.sampled, labels, teacher)
    ours = whole.loss("iw-opd", "teacher/original")
    torch.testing.assert_close(slopes(ours, whole.new), slopes(theirs, whole.new), rtol=1e-6, atol=1e-9)


def test_opsd_is_the_self_distillation_of_trl(whole):
    options = {"distillation_alpha": 1.0}
    theirs = sdft.compute_sampled_token_self_distillation_loss(whole.new, whole.teacher, whole.sampled, **options)
    ours = whole.loss("opsd", "teacher/privileged")
    theirs = theirs[whole.mask].mean()
    torch.testing.assert_close(slopes(ours, whole.new), slopes(theirs, whole.new), rtol=1e-9, atol=1e-12)
    # `topk` over all entries, whose rest is nothing.
    log_q, log_p = whole.new.log_softmax(-1), whole.teacher.log_softmax(-1)
    no_rest = torch.cat([log_q, torch.full((3, 6, 1), -1e30, dtype=torch.float64)], -1)
    for kind, alpha in (("forward", 0.0), ("jsd", 0.5), ("reverse", 1.0)):
        options["distillation_alpha"] = alpha
        theirs = sdft.compute_full_logit_self_distillation_loss(whole.new, whole.teacher, **options)
        torch.testing.assert_close(target_divergence(log_p, no_rest, kind), theirs, rtol=1e-6, atol=1e-9)


def test_settings_at_their_ends():
    """Without a trust region the mixture's gap is the gap; without a decay the share stays."""
    case = random_case(10)
    given = arguments(case)
    needed = {need: given["signals"].lists[need] for need in METHODS["top-d"].needs}
    own = SelectionSettings(1.0, method_settings={"alpha": 1.0})
    found = select("top-d", **{**given, "signals": needed}, settings=own, step=0).teacher_advantages
    teacher, student = (needed[f"{who}/original"][0].sampled_logprobs for who in ("teacher", "student"))
    torch.testing.assert_close(found[given["loss_mask"]], (teacher - student)[given["loss_mask"]])
    needed = {need: given["signals"].lists[need] for need in METHODS["rlsd"].needs}
    first, later = (
        select("rlsd", **{**given, "signals": needed}, settings=SelectionSettings(1.0, method_settings=own), step=step)
        for own, step in (({}, 0), ({"decay_steps": 0}, 1000))
    )
    assert torch.equal(first.teacher_advantages, later.teacher_advantages)
