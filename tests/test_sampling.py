"""The sampler against transformers' own processors and warpers, and the distribution it draws from."""

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from generation.draws import adjusted_scores, make_seeds, sample, uniforms
from generation.options import GenerationOptions, SamplingParams
from generation.sampling import Row, choose

CASES = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_k": 1000},
    {"temperature": 0.5, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.5, "repetition_penalty": 1.7},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 0.6},
]


def transformers_scores(params: SamplingParams, ids, logits):
    steps = LogitsProcessorList()
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps(ids, logits)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_equal_transformers(case):
    torch.manual_seed(1)
    params = SamplingParams(**case)
    logits, ids = torch.randn(64, 200) * 4, torch.randint(0, 200, (64, 30))
    seen = torch.zeros(64, 200, dtype=torch.bool).scatter_(1, ids, True)
    got = adjusted_scores(logits, params, seen)
    expected = transformers_scores(params, ids, logits)
    assert torch.equal(got.isinf(), expected.isinf())
    torch.testing.assert_close(got.log_softmax(-1), expected.log_softmax(-1))  # ours may be shifted


@pytest.mark.parametrize("frequency, presence", [(0.7, 0), (0, 1.5), (-2, 2), (1.1, -0.3)])
def test_an_answers_own_tokens_count_as_openai_defines_it(frequency, presence):
    """Token by token: logit - times * frequency - (times > 0) * presence, without the prompt."""
    torch.manual_seed(2)
    logits = torch.randn(12, 3, 9)
    options = GenerationOptions(max_new_tokens=50, frequency_penalty=frequency, presence_penalty=presence)
    rows = [Row(options, torch.arange(9)) for _ in range(3)]
    for step in logits:
        chosen = choose(rows, step.clone())
        for row, scores, token in zip(rows, step, chosen.token[:, 0].tolist(), strict=True):
            times = [row.tokens.count(token_id) for token_id in range(9)]
            expected = [
                score - n * frequency - (n > 0) * presence for score, n in zip(scores.tolist(), times)
            ]
            assert expected[token] == pytest.approx(max(expected), abs=1e-5)
        chosen.read()
    assert any(row.tokens.count(token_id) > 1 for row in rows for token_id in row.tokens)


def test_greedy_is_the_exact_argmax_of_what_the_penalty_leaves():
    logits = torch.randn(7, 500)
    token = sample(logits, SamplingParams())
    assert token.dtype == torch.int64 and torch.equal(token, logits.argmax(-1, keepdim=True))
    seen = torch.tensor([[True, False, True]])
    penalty = SamplingParams(repetition_penalty=2.0)
    assert sample(torch.tensor([[2.0, 1.5, -1.0]]), penalty, seen=seen).item() == 1


@pytest.mark.parametrize(
    "case", [{"temperature": 1.0}, {"temperature": 0.6, "top_k": 6, "top_p": 0.9}], ids=str
)
def test_draws_follow_the_distribution(case):
    """Chi-squared over 20,000 draws, against the 99.99 % quantile for at most 11 degrees of freedom."""
    params, draws = SamplingParams(**case), 20_000
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3)) * 1.5
    wanted = transformers_scores(params, torch.zeros(1, 1, dtype=torch.int64), logits).softmax(-1)[0]
    tokens = sample(logits.expand(draws, -1), params, uniforms(torch.arange(draws), torch.tensor(4)))
    counts = torch.bincount(tokens[:, 0], minlength=12).float()
    kept = wanted > 0
    assert not counts[~kept].any(), "a token that was filtered out was drawn"
    expected = wanted[kept] * draws
    assert ((counts[kept] - expected) ** 2 / expected).sum().item() < 37.4


def test_a_seed_for_each_row_makes_rows_independent_of_the_batch():
    params, logits = SamplingParams(temperature=1.0), torch.randn(1, 300).repeat(6, 1)
    for drawn in map(torch.tensor, range(5)):
        batch = sample(logits, params, uniforms(torch.tensor(make_seeds(5, 3, 2)), drawn))[:, 0]
        alone = [sample(logits[:1], params, uniforms(torch.tensor([5 + j]), drawn)).item() for j in range(2)]
        assert batch.tolist() == alone * 3


def test_seeds():
    assert make_seeds(5, prompts=2, answers=3) == [5, 6, 7, 5, 6, 7]
    assert make_seeds(2**63 - 2, 1, 3) == [2**63 - 2, 0, 1]
    torch.manual_seed(0)
    first = make_seeds(None, 2, 1)
    torch.manual_seed(0)
    assert make_seeds(None, 2, 1) == first and first[0] != first[1]


def test_uniforms_are_fixed_forever():
    """An answer can be had again from its seed, on every device and with the next release."""
    got = uniforms(torch.tensor([0, 1, 2**62]), torch.tensor(0)).mul(2**24).long().tolist()
    assert got == [14819496, 12578688, 842170]
    each = uniforms(torch.tensor([7, 7, 9]), torch.tensor([3, 4, 3]))
    assert each[:1].equal(uniforms(torch.tensor([7]), torch.tensor(3))) and each.unique().numel() == 3


@pytest.mark.parametrize("along", ["seeds", "draws"])
def test_uniforms_are_uniform_and_neighbours_unrelated(along):
    numbers, zeros = torch.arange(40_000), torch.zeros(40_000, dtype=torch.int64)
    u = uniforms(numbers, zeros) if along == "seeds" else uniforms(zeros, numbers)
    assert u.min() >= 0 and u.max() < 1
    counts = torch.histc(u, 64, 0, 1)
    assert ((counts - 625) ** 2 / 625).sum() < 117  # 99.99 % of chi-squared with 63 degrees of freedom
    centred = (u - 0.5) * 12**0.5
    for apart in (1, 2, 7, 1024):
        assert (centred[apart:] * centred[:-apart]).mean().abs() < 4 / 40_000**0.5


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_the_ends_of_the_range_draw_allowed_tokens(uniform):
    logits = torch.randn(40, 3001, generator=torch.Generator().manual_seed(0)) * 6
    logits[:, ::3], logits[20:, -700:] = -torch.inf, -torch.inf
    params = SamplingParams(temperature=1.0, top_p=0.999)
    token = sample(logits, params, torch.full((40,), uniform))
    assert adjusted_scores(logits, params).gather(1, token).isfinite().all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "a"),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", -2.1),
        ("presence_penalty", 2.1),
        ("presence_penalty", float("nan")),
        ("seed", 2**63),
        ("seed", True),
    ],
)
def test_bad_params_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}: expected"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("temperature", [1e-6, 5e-324])
def test_a_tiny_temperature_is_greedy_and_not_nan(temperature):
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0)) * 30
    params = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1)
    assert not adjusted_scores(logits, params).isnan().any()
    got = sample(logits, params, torch.rand(5))
    assert torch.equal(got, logits.argmax(-1, keepdim=True))
