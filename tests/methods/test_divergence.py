"""Measures on top-K distributions: stored values, a slow reference, and what must hold for any input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import (
    CASES,
    TOLERANCE,
    TopK,
    assert_close,
    entropy,
    forward_kl,
    jsd,
    load_case,
    over_positions,
    overlap_mass,
    random_topk,
    target_divergence,
)
from trl.experimental.gkd import GKDTrainer

from crop_trl.methods import divergence
from crop_trl.methods.divergence import (
    residual_mass,
    shared_kl,
    topk_entropy,
    topk_forward_kl,
    topk_jsd,
    topk_overlap_mass,
)

PAIRWISE = {topk_jsd: jsd, topk_forward_kl: forward_kl, topk_overlap_mass: overlap_mass}
both_precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
pairwise = pytest.mark.parametrize("measure", PAIRWISE, ids=lambda f: f.__name__)


def position(probs: dict[int, float], dtype=torch.float64) -> TopK:
    """A signal with a single position."""
    logprobs = [math.log(p) if p > 0 else -math.inf for p in probs.values()]
    return TopK(torch.tensor([[list(probs)]]), torch.tensor([[logprobs]], dtype=dtype))


@st.composite
def topk(draw, vocab: int, dtype=torch.float64) -> TopK:
    """One position: the K likeliest of a small vocabulary, with ties, underflow and impossible tokens."""
    logit = st.one_of(st.integers(-3, 3).map(float), st.floats(-20, 20), st.sampled_from([-200.0, -math.inf]))
    logits = draw(st.lists(logit, min_size=vocab, max_size=vocab))
    logits[draw(st.integers(0, vocab - 1))] = 1.0
    k = draw(st.integers(1, vocab))
    top = torch.tensor(logits, dtype=torch.float64).log_softmax(-1).topk(k)
    return TopK(top.indices[None, None], top.values[None, None].to(dtype))


@st.composite
def topk_pair(draw, dtype=torch.float64) -> tuple[TopK, TopK]:
    vocab = draw(st.integers(1, 8))
    return draw(topk(vocab, dtype)), draw(topk(vocab, dtype))


# --- Stored values ----------------------------------------------------------------------------------------------------


@both_precisions
@pytest.mark.parametrize("name", CASES)
def test_golden_values(name, dtype):
    case, signals, _ = load_case(name, dtype)
    expected = case["expected"]
    original = signals["teacher/original"]
    semantic = topk_jsd(original, signals["teacher/counterfactual"])
    surface = topk_jsd(original, signals["teacher/paraphrase"])
    assert_close(semantic, expected["jsd_semantic"], dtype)
    assert_close(surface, expected["jsd_surface"], dtype)
    assert_close(topk_entropy(signals["student/original"]), expected["entropy"], dtype)
    assert_close(topk_forward_kl(original, signals["student/original"]), expected["forward_kl"], dtype)
    assert_close(topk_overlap_mass(original, signals["student/original"]), expected["overlap_mass"], dtype)
    margin = topk_jsd(signals["student/original"], signals["student/counterfactual"]) - topk_jsd(
        signals["student/original"], signals["student/paraphrase"]
    )
    assert_close(margin, expected["scores"]["crop-student"], dtype)


# --- Slow reference ---------------------------------------------------------------------------------------------------


@both_precisions
@pytest.mark.parametrize("k_p, k_q, vocab", [(16, 16, 40), (5, 9, 11), (1, 7, 20), (8, 1, 8), (1, 1, 3), (30, 64, 12)])
def test_matches_reference(k_p, k_q, vocab, dtype):
    generator = torch.Generator().manual_seed(1000 * k_p + k_q)
    p = random_topk(generator, (4, 25), vocab, k_p, dtype)
    q = random_topk(generator, (4, 25), vocab, k_q, dtype)
    for measure, slow in PAIRWISE.items():
        assert_close(measure(p, q), over_positions(slow, p, q), dtype)
    assert_close(topk_entropy(p), over_positions(entropy, p), dtype)


@given(topk_pair())
@settings(max_examples=150)
def test_matches_reference_on_odd_distributions(pair):
    p, q = pair
    for measure, slow in PAIRWISE.items():
        assert_close(measure(p, q), over_positions(slow, p, q), torch.float64)
    assert_close(topk_entropy(p), over_positions(entropy, p), torch.float64)


@given(topk_pair(torch.float32))
@settings(max_examples=150)
def test_matches_reference_on_odd_distributions_in_single_precision(pair):
    p, q = pair
    for measure, slow in PAIRWISE.items():
        assert_close(measure(p, q), over_positions(slow, p, q), torch.float32)
    assert_close(topk_entropy(p), over_positions(entropy, p), torch.float32)


# --- Divergence -------------------------------------------------------------------------------------------------------


def test_jsd_by_hand():
    # Ids 1 and 2 on one side, 2 and 3 on the other; a tenth is left over on one side, none on the other.
    p, q = position({1: 0.5, 2: 0.4}), position({2: 0.4, 3: 0.6})
    expected = 0.5 * math.log(2) * (0.5 + 0.1 + 0.6)
    assert topk_jsd(p, q).item() == pytest.approx(expected, abs=1e-12)


@given(topk_pair(torch.float32))
@settings(max_examples=100)
def test_jsd_is_symmetric_and_bounded(pair):
    p, q = pair
    forward, backward = topk_jsd(p, q), topk_jsd(q, p)
    assert forward.item() == pytest.approx(backward.item(), abs=1e-6)
    # Compared as tensors: the bound is ln 2 as the precision at hand writes it.
    assert bool((forward >= 0.0) & (forward <= math.log(2.0)))


@given(topk(6, torch.float32), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_jsd_of_identical_is_zero(p, random):
    assert topk_jsd(p, p).item() == 0.0
    order = list(range(p.token_ids.size(-1)))
    random.shuffle(order)
    shuffled = TopK(p.token_ids[..., order], p.logprobs[..., order])
    assert topk_jsd(p, shuffled).item() == pytest.approx(0.0, abs=1e-7)


@both_precisions
def test_rounding_does_not_leave_the_bounds(dtype):
    generator = torch.Generator().manual_seed(2)
    p = random_topk(generator, (50, 200), 24, 16, dtype)
    # All but identical, and nothing in common: without care, sums of rounded terms end below 0 and above ln 2.
    nearly = TopK(p.token_ids, p.logprobs * (1 + 1e-6 * torch.randn(p.logprobs.shape, generator=generator)).to(dtype))
    whole = TopK(p.token_ids, p.logprobs.log_softmax(-1))
    elsewhere = TopK(whole.token_ids + 24, whole.logprobs)
    for value in (topk_jsd(p, nearly), topk_jsd(whole, elsewhere)):
        assert (value >= 0.0).all() and (value <= math.log(2.0)).all()


def test_disjoint_certainties_are_ln2_apart():
    value = topk_jsd(position({3: 1.0}, torch.float32), position({5: 1.0}, torch.float32))
    assert value.item() == pytest.approx(math.log(2.0), abs=1e-7)


def test_residuals_are_one_category():
    # The same entry, and half the mass unseen on each side: what is unseen is compared as a whole.
    assert topk_jsd(position({1: 0.5}), position({1: 0.5})).item() == 0.0
    # Half seen on one side and unseen on the other: an id is not matched with the other side's residual.
    value = topk_jsd(position({1: 0.5}), position({1: 0.5, 2: 0.5}))
    assert value.item() == pytest.approx(0.5 * math.log(2), abs=1e-12)


def test_tail_of_one_token_is_exact():
    # All but one token returned, the same one missing on both sides: the residual is that token, nothing is lost.
    generator = torch.Generator().manual_seed(3)
    full_p, full_q = (torch.randn(2, 9, 6, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in "pq")
    ids = torch.arange(6).expand(2, 9, 6)
    complete = topk_jsd(TopK(ids, full_p), TopK(ids, full_q))
    all_but_one = topk_jsd(TopK(ids[..., :5], full_p[..., :5]), TopK(ids[..., :5], full_q[..., :5]))
    torch.testing.assert_close(all_but_one, complete, rtol=0, atol=1e-12)


def test_k_beyond_the_vocabulary_is_the_plain_divergence():
    generator = torch.Generator().manual_seed(4)
    p, q = (torch.randn(3, 5, 7, generator=generator, dtype=torch.float64).softmax(-1) for _ in "pq")
    mean = (p + q) / 2
    plain = 0.5 * ((p * (p / mean).log()).sum(-1) + (q * (q / mean).log()).sum(-1))
    # A request for more entries than there are returns them all, likeliest first.
    signals = [TopK(x.topk(7).indices, x.topk(7).values.log()) for x in (p, q)]
    torch.testing.assert_close(topk_jsd(*signals), plain, rtol=0, atol=1e-12)


def test_vocabulary_of_one_token():
    p = position({0: 1.0}, torch.float32)
    assert topk_jsd(p, p).item() == 0.0
    assert topk_entropy(p).item() == 0.0
    assert topk_forward_kl(p, p).item() == 0.0
    assert topk_overlap_mass(p, p).item() == 1.0


def test_underflowing_id_is_in_the_support():
    # exp(-200) is zero in single precision, yet the id was returned: overlap and the union count it.
    p = TopK(torch.tensor([[[1, 2]]]), torch.tensor([[[0.0, -200.0]]]))
    q = TopK(torch.tensor([[[2, 3]]]), torch.tensor([[[-0.1, -2.4]]]))
    assert topk_overlap_mass(q, p).item() == pytest.approx(math.exp(-0.1), abs=1e-6)
    assert topk_overlap_mass(p, q).item() == 0.0
    assert topk_forward_kl(p, q).item() == pytest.approx(over_positions(forward_kl, p, q).item(), abs=1e-5)
    # An impossible token counts likewise.
    impossible = TopK(p.token_ids, torch.tensor([[[0.0, -math.inf]]]))
    assert topk_overlap_mass(q, impossible).item() == pytest.approx(math.exp(-0.1), abs=1e-6)
    assert topk_jsd(impossible, q).item() == pytest.approx(topk_jsd(p, q).item(), abs=1e-7)


def test_sum_above_one_leaves_no_residual():
    third = math.log(1 / 3) + 1e-6
    p = TopK(torch.tensor([[[0, 1, 2]]]), torch.full((1, 1, 3), third))
    assert p.logprobs.exp().sum().item() > 1.0
    assert residual_mass(p).item() == 0.0
    assert topk_jsd(p, position({0: 0.5, 1: 0.5}, torch.float32)).isfinite().all()


def test_residual_mass():
    assert residual_mass(position({4: 0.5, 9: 0.3})).item() == pytest.approx(0.2, abs=1e-12)


# --- The other measures -----------------------------------------------------------------------------------------------


@given(topk(7, torch.float32))
@settings(max_examples=100)
def test_entropy_is_a_share(p):
    assert 0.0 <= topk_entropy(p).item() <= 1.0
    if p.token_ids.size(-1) == 1:
        assert topk_entropy(p).item() == 0.0


def test_entropy_ends():
    assert topk_entropy(position({0: 0.01, 1: 0.01, 2: 0.01})).item() == pytest.approx(1.0, abs=1e-12)
    assert topk_entropy(position({0: 1.0, 1: 0.0})).item() == 0.0
    # Renormalised where every returned mass underflows.
    tiny = TopK(torch.tensor([[[0, 1]]]), torch.tensor([[[-200.0, -200.0]]]))
    assert topk_entropy(tiny).item() == pytest.approx(1.0, abs=1e-6)


@given(topk_pair(torch.float32))
@settings(max_examples=100)
def test_forward_kl_and_overlap_are_bounded(pair):
    teacher, student = pair
    assert topk_forward_kl(teacher, student).item() >= -1e-6
    assert abs(topk_forward_kl(teacher, teacher).item()) <= 1e-6
    assert -1e-6 <= topk_overlap_mass(teacher, student).item() <= 1.0 + 1e-6


def test_forward_kl_by_hand():
    # Ids 1 and 2 at the teacher, 1 alone at the student: id 2 gets the floor there.
    teacher, student = position({1: 0.6, 2: 0.3}), position({1: 0.9})
    t, s = [0.6 / 0.9, 0.3 / 0.9], [0.9 / (0.9 + 1e-8), 1e-8 / (0.9 + 1e-8)]
    expected = sum(a * math.log(a / b) for a, b in zip(t, s))
    assert topk_forward_kl(teacher, student).item() == pytest.approx(expected, abs=1e-12)
    assert topk_forward_kl(student, teacher).item() != pytest.approx(expected, abs=1e-2)


def test_overlap_is_the_teachers_mass():
    teacher, student = position({1: 0.6, 2: 0.3}), position({2: 0.8, 5: 0.1})
    assert topk_overlap_mass(teacher, student).item() == pytest.approx(0.3, abs=1e-12)
    assert topk_overlap_mass(student, teacher).item() == pytest.approx(0.8, abs=1e-12)


# --- Any layout of the input ------------------------------------------------------------------------------------------


@pairwise
@given(pair=topk_pair(), random=st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_order_of_the_entries_is_irrelevant(measure, pair, random):
    shuffled = []
    for signal in pair:
        order = list(range(signal.token_ids.size(-1)))
        random.shuffle(order)
        shuffled.append(TopK(signal.token_ids[..., order], signal.logprobs[..., order]))
    tolerance = TOLERANCE[torch.float64]
    torch.testing.assert_close(measure(*shuffled), measure(*pair), rtol=0, atol=tolerance)
    torch.testing.assert_close(topk_entropy(shuffled[0]), topk_entropy(pair[0]), rtol=0, atol=tolerance)


@pairwise
@pytest.mark.parametrize("p_ids, q_ids", [(torch.int32, torch.int32), (torch.int32, torch.int64)])
def test_narrow_token_ids(measure, p_ids, q_ids):
    generator = torch.Generator().manual_seed(5)
    p, q = random_topk(generator, (2, 6), 12, 5), random_topk(generator, (2, 6), 12, 5)
    expected = measure(p, q)
    narrow = measure(TopK(p.token_ids.to(p_ids), p.logprobs), TopK(q.token_ids.to(q_ids), q.logprobs))
    torch.testing.assert_close(narrow, expected, rtol=0, atol=0)


@pairwise
def test_strided_input(measure):
    generator = torch.Generator().manual_seed(6)
    p, q = random_topk(generator, (3, 8), 12, 5), random_topk(generator, (3, 8), 12, 4)
    strided = [
        TopK(x.token_ids.mT.contiguous().mT, x.logprobs.transpose(0, 1).contiguous().transpose(0, 1)) for x in (p, q)
    ]
    torch.testing.assert_close(measure(*strided), measure(p, q), rtol=0, atol=0)


@pairwise
def test_half_precision_is_widened(measure):
    p = position({1: 0.6, 2: 0.3})
    half = TopK(p.token_ids, p.logprobs.bfloat16())
    assert measure(half, half).dtype == torch.float32
    assert topk_entropy(half).dtype == torch.float32


@pairwise
def test_positions_are_independent(measure):
    generator = torch.Generator().manual_seed(7)
    p, q = random_topk(generator, (3, 7), 12, 5), random_topk(generator, (3, 7), 12, 5)
    whole = measure(p, q)
    p.logprobs[1, 3] = math.nan
    disturbed = measure(p, q)
    assert disturbed[1, 3].isnan()
    others = torch.ones(3, 7, dtype=torch.bool)
    others[1, 3] = False
    torch.testing.assert_close(disturbed[others], whole[others], rtol=0, atol=0)
    assert whole.shape == (3, 7)


@pairwise
def test_positions_padded_with_zeros_are_finite(measure):
    # Where a signal is not valid it holds zeros: one id, K times over, each certain.
    padded = TopK(torch.zeros(1, 3, 4, dtype=torch.int64), torch.zeros(1, 3, 4))
    other = random_topk(torch.Generator().manual_seed(8), (1, 3), 12, 4, torch.float32)
    for p, q in [(padded, padded), (padded, other), (other, padded)]:
        assert measure(p, q).isfinite().all()
    assert topk_entropy(padded).isfinite().all()


@pairwise
def test_empty_response(measure):
    empty = TopK(torch.zeros(2, 0, 4, dtype=torch.int64), torch.zeros(2, 0, 4))
    assert measure(empty, empty).shape == (2, 0)


# --- As a loss --------------------------------------------------------------------------------------------------------

kinds = pytest.mark.parametrize("kind", list(divergence.TARGET_DIVERGENCES))


def of_entries(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of `ids` and of all other entries, from whole logits; what is beyond them is absent."""
    logprobs = torch.nn.functional.pad(logits.log_softmax(-1), (0, 1), value=-1e30)
    ids = ids.clamp(max=logits.size(-1))
    rest = logprobs.scatter(-1, ids, -1e30).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, ids), rest], dim=-1)


@kinds
@pytest.mark.parametrize("vocab", [30, 12])
def test_target_divergence_and_its_gradient_match_the_reference(kind, vocab):
    """Also where the teacher's head has more rows than the student's: there are 30 and the student has 12 of them."""
    generator = torch.Generator().manual_seed(3)
    top = torch.randn(20, 30, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1).topk(5)
    logits = 2 * torch.randn(20, vocab, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    value = divergence.target_divergence(top.values, of_entries(logits, top.indices), kind)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert (top.indices >= vocab).any() == (vocab < 30)
    for n, student in enumerate(logits.tolist()):
        teacher = dict(zip(top.indices[n].tolist(), top.values[n].tolist()))
        assert value[n].item() == pytest.approx(target_divergence(teacher, student, kind), abs=1e-12)
        for j in range(vocab):
            moved = [[*student[:j], student[j] + step, *student[j + 1 :]] for step in (1e-6, -1e-6)]
            high, low = (target_divergence(teacher, each, kind) for each in moved)
            assert gradient[n, j].item() == pytest.approx((high - low) / 2e-6, abs=1e-8)


@kinds
def test_over_the_whole_vocabulary_it_is_the_divergence_of_gkd(kind):
    generator = torch.Generator().manual_seed(4)
    student, teacher = (torch.randn(1, 7, 20, generator=generator, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    top = teacher.log_softmax(-1).topk(20)
    ours = divergence.target_divergence(top.values, of_entries(student, top.indices), kind).mean()
    beta = {"forward": 0.0, "reverse": 1.0, "jsd": 0.5}[kind]
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, torch.zeros(1, 7, dtype=torch.long), beta=beta)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    gradients = (torch.autograd.grad(value, student)[0] for value in (ours, theirs))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


@kinds
@pytest.mark.parametrize("margin", [30.0, 200.0])
def test_a_sure_student_is_moved_all_the_same(kind, margin):
    """What it gives to all but one entry is below rounding, and above it for the teacher; no NaN, no gradient of 0."""
    teacher = torch.tensor([[0.5, 0.2], [1.0, 0.0], [1.0, 1e-30]]).clamp(min=1e-38).log()
    logits = torch.zeros(3, 50)
    logits[:, 1] = margin
    logits.requires_grad_()
    value = divergence.target_divergence(teacher, of_entries(logits, torch.tensor([[0, 1]] * 3)), kind)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert value.isfinite().all() and (value > 0.1).all() and gradient.isfinite().all()
    if kind == "forward":
        torch.testing.assert_close(gradient[0, :2], torch.tensor([-0.5, 0.8]))


def test_what_a_sure_teacher_leaves_to_others_is_not_rounded_away():
    """In fp32, 1 minus a sum has no digit left of a rest of 3e-7."""
    torch.manual_seed(0)
    logits = torch.randn(2, 40, 200, dtype=torch.float64) * 4
    logits[1, :, 0] += 30  # the teacher; its first other entries are some e-7 likely
    whole = (logits.float() - logits.float().logsumexp(-1, keepdim=True)).double()
    student, teacher = (TopK(ids, values.float()) for values, ids in (each.topk(16) for each in whole))
    exact = logits.log_softmax(-1)
    both = torch.stack([torch.zeros(40, 200).scatter_(1, signal.token_ids, 1.0) for signal in (student, teacher)])
    shared = both.all(0)
    p, q = (torch.cat([lp.exp() * shared, (lp.exp() * ~shared).sum(-1, keepdim=True)], -1) for lp in exact)
    expected = torch.special.xlogy(p, p / torch.where(q > 0, q, 1.0)).sum(-1)
    # What neither returned of a tail this thin stays unknown.
    torch.testing.assert_close(shared_kl(student, teacher).double(), expected, atol=0.2, rtol=0.002)
