"""torch.distributions in traced code: densities and gradients match torch, samples have the right moments and gradients."""

import jax
import numpy as np
import pytest
import torch
import torch.distributions as D
from bad_inputs_modules import Applies
from oracles import jitted
from sampling import sampled
from traced_oracle import compare

import bridge
import torch_api

pytestmark = pytest.mark.long

DRAWS = 20000


def positive(x):
    return x.abs() + 0.5


WITH_MOMENTS = {
    "Normal": lambda x: D.Normal(x, positive(x)),
    "LogNormal": lambda x: D.LogNormal(x / 4, positive(x) / 4),
    "Gamma": lambda x: D.Gamma(positive(x), positive(x)),
    "Beta": lambda x: D.Beta(positive(x), positive(x) * 2),
    "Dirichlet": lambda x: D.Dirichlet(positive(x)),
    "StudentT": lambda x: D.StudentT(positive(x) + 9, x),
    "Chi2": lambda x: D.Chi2(positive(x)),
    "Poisson": lambda x: D.Poisson(positive(x)),
    "Binomial": lambda x: D.Binomial(10, torch.sigmoid(x)),
    "NegativeBinomial": lambda x: D.NegativeBinomial(5.0, torch.sigmoid(x)),
    "OneHotCategorical": lambda x: D.OneHotCategorical(logits=x),
    "OneHotCategoricalStraightThrough": lambda x: D.OneHotCategoricalStraightThrough(logits=x),
    "Multinomial": lambda x: D.Multinomial(5, logits=x),
    "Exponential": lambda x: D.Exponential(positive(x)),
    "Laplace": lambda x: D.Laplace(x, positive(x)),
    "Gumbel": lambda x: D.Gumbel(x, positive(x)),
    "MultivariateNormal": lambda x: D.MultivariateNormal(x, scale_tril=torch.diag_embed(positive(x))),
    "LowRankMultivariateNormal": lambda x: D.LowRankMultivariateNormal(x, x[..., None], positive(x)),
    "Bernoulli": lambda x: D.Bernoulli(logits=x),
    "Geometric": lambda x: D.Geometric(logits=x),
    "Uniform": lambda x: D.Uniform(x, x + 1),
    "HalfNormal": lambda x: D.HalfNormal(positive(x)),
    "Weibull": lambda x: D.Weibull(positive(x), positive(x) + 1),
    "Pareto": lambda x: D.Pareto(positive(x), positive(x) + 5),
    "Kumaraswamy": lambda x: D.Kumaraswamy(positive(x), positive(x)),
    "FisherSnedecor": lambda x: D.FisherSnedecor(positive(x) + 3, positive(x) + 30),
    "InverseGamma": lambda x: D.InverseGamma(positive(x) + 9, positive(x)),
    "ContinuousBernoulli": lambda x: D.ContinuousBernoulli(logits=x + 3),
    "Independent": lambda x: D.Independent(D.Normal(x, positive(x)), 1),
    "MixtureSameFamily": lambda x: D.MixtureSameFamily(D.Categorical(logits=x), D.Normal(x, positive(x))),
}
OTHERS = {
    "Categorical": lambda x: D.Categorical(logits=x),
    "Cauchy": lambda x: D.Cauchy(x, positive(x)),
    "HalfCauchy": lambda x: D.HalfCauchy(positive(x)),
    "RelaxedBernoulli": lambda x: D.RelaxedBernoulli(torch.tensor(0.5), logits=x),
    "RelaxedOneHotCategorical": lambda x: D.RelaxedOneHotCategorical(torch.tensor(0.5), logits=x),
    "TransformedDistribution": lambda x: D.TransformedDistribution(
        D.Normal(x, positive(x)), [D.transforms.TanhTransform(), D.transforms.AffineTransform(1.0, 2.0)]
    ),
    "LKJCholesky": lambda x: D.LKJCholesky(3, positive(x[0, 0])),
}


def point():
    return torch.linspace(-1.2, 1.1, 8).reshape(2, 4)


@pytest.mark.parametrize("name", sampled([*WITH_MOMENTS, *OTHERS]))
def test_densities_and_their_gradients_match_torch(name):
    make = (WITH_MOMENTS | OTHERS)[name]
    torch.manual_seed(0)
    drawn = make(point()).sample()
    compare(lambda x: make(x).log_prob(drawn), point(), tol=1e-3)


@pytest.mark.parametrize("name", sampled(WITH_MOMENTS))
def test_samples_have_the_mean_and_standard_deviation(name):
    make = WITH_MOMENTS[name]
    expected = make(point())
    pure = bridge.module_function(Applies(lambda x: make(x).sample((DRAWS,))))
    found = np.asarray(jitted(lambda x, key: pure({}, x, rng=key))(bridge.to_jax(point()), jax.random.key(1)))
    assert found.shape == (DRAWS, *expected.batch_shape, *expected.event_shape)
    error = expected.stddev / DRAWS**0.5
    assert (np.abs(found.mean(0) - expected.mean.numpy()) < 5 * error.numpy()).all()
    np.testing.assert_allclose(found.std(0), expected.stddev, rtol=0.12)


@pytest.mark.parametrize("name", sampled([name for name in WITH_MOMENTS if WITH_MOMENTS[name](point()).has_rsample]))
def test_mean_gradient_of_samples_is_the_gradient_of_the_mean(name):
    make = WITH_MOMENTS[name]
    x = point().requires_grad_()
    weights = torch.linspace(1, 2, make(x).mean.numel()).reshape(make(x).mean.shape)
    mean = torch.softmax(x, -1) if name.startswith("OneHot") else make(x).mean
    (expected,) = torch.autograd.grad((mean * weights).sum(), x)
    pure = bridge.module_function(Applies(lambda x: (make(x).rsample((DRAWS,)) * weights).sum() / DRAWS))
    found = jitted(jax.grad(lambda x, key: pure({}, x, rng=key)))(bridge.to_jax(point()), jax.random.key(2))
    np.testing.assert_allclose(found, expected, rtol=0.06, atol=0.06)


@pytest.mark.parametrize("name", sampled(OTHERS))
def test_distributions_without_moments_draw_within_their_support(name):
    make = OTHERS[name]
    pure = bridge.module_function(Applies(lambda x: make(x).sample((100,))))
    found = jitted(lambda x, key: pure({}, x, rng=key))(bridge.to_jax(point()), jax.random.key(3))
    assert make(point()).support.check(bridge.to_torch(found, copy=True)).all()


def test_each_call_of_a_random_function_draws_new_numbers():
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + torch.rand(3)

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.rand(3)

    pure = bridge.module_function(Applies(lambda x: (Noisy.apply(x), torch.rand(3), Noisy.apply(x))))
    zeros = jax.numpy.zeros(3)
    first, between, second = jitted(lambda x, key: pure({}, x, rng=key))(zeros, jax.random.key(0))
    assert len({*map(float, (*first, *between, *second))}) == 9
    again = jitted(lambda x, key: pure({}, x, rng=key))(zeros, jax.random.key(0))
    np.testing.assert_array_equal(first, again[0])
    slope = jitted(jax.grad(lambda x, key: pure({}, x, rng=key)[0].sum()))(zeros, jax.random.key(0))
    assert not np.allclose(slope, first)
    assert len({*map(float, slope)}) == 3


def drawn(function, *inputs):
    """Return the outputs of a traced function for one key, as float32."""
    pure = bridge.module_function(Applies(function))
    program = jitted(lambda key, *given: [x.astype("float32") for x in pure({}, *given, rng=key)])
    return program(jax.random.key(4), *bridge.to_jax(inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_draw_from_the_full_distribution(dtype):
    weights = torch.tensor([0.9] + [0.1 / 99] * 99, dtype=dtype)

    def draws(w):
        rare = torch.full((200_000,), 0.001, dtype=w.dtype)
        return (
            (torch.multinomial(w, 100_000, True) == 0).float().mean(),
            torch.multinomial(torch.ones(5000, 500, dtype=w.dtype), 1).float().mean(),
            torch.bernoulli(rare).float().mean(),
            torch.empty_like(rare).bernoulli_(rare).float().mean(),
            torch.randn(200_000, dtype=w.dtype).abs().max(),
            torch.randn_like(rare).abs().max(),
            torch.empty_like(rare).normal_().abs().max(),
            torch.normal(torch.zeros_like(rare), 1.0).abs().max(),
            torch.empty_like(rare).exponential_().max(),
            torch.nn.functional.gumbel_softmax(w.log().expand(80, -1)).isnan().any(),
        )

    first, index, *chances, a, b, c, d, longest, lost = map(float, drawn(draws, weights))
    assert abs(first - 0.9) < 0.01
    assert abs(index - 249.5) < 12
    assert all(0.0007 < chance < 0.0014 for chance in chances)
    assert min(a, b, c, d) > 4
    assert longest > 9
    assert not lost


def test_exponential_samples_are_never_zero():
    (least,) = drawn(lambda x: (torch.empty(30_000_000).exponential_().min() + 0 * x,), torch.zeros(()))
    assert least > 0


def test_beta_samples_are_never_zero_or_one():
    def densities(a):
        beta = D.Beta(a, a)
        z, flat = beta.rsample((100_000,)), D.Dirichlet(a.expand(20) / 15)
        return beta.log_prob(z).mean(), z.min(), z.max(), flat.log_prob(flat.sample((1000,))).isfinite().all()

    a = torch.tensor(0.3)
    value, least, most, finite = map(float, drawn(densities, a))
    expected = -float(D.Beta(a, a).entropy())
    assert 0 < least < most < 1
    assert finite
    assert value == pytest.approx(expected, rel=0.1)
    pure = bridge.module_function(Applies(lambda a: densities(a)[0]))
    slope = jitted(jax.grad(lambda a, key: pure({}, a, rng=key)))(0.3, jax.random.key(5))
    assert np.isfinite(slope)


def test_underflowing_gamma_samples_keep_their_gradient():
    pure = bridge.module_function(Applies(lambda a: D.Gamma(a.expand(200_000), 1.0).rsample().log().mean()))
    slope = jitted(jax.grad(lambda a, key: pure({}, a, rng=key)))(0.02, jax.random.key(6))
    torch.manual_seed(0)
    a = torch.tensor(0.02, requires_grad=True)
    (expected,) = torch.autograd.grad(D.Gamma(a.expand(200_000), 1.0).rsample().log().mean(), a)
    assert slope == pytest.approx(expected.item(), rel=0.05)


def test_poisson_samples_of_large_rates_have_the_right_moments():
    counts = drawn(lambda rate: (torch.poisson(rate),), torch.full((10_000,), 3e9))[0]
    assert abs(float(counts.mean()) / 3e9 - 1) < 1e-5
    assert float(np.asarray(counts, np.float64).std()) == pytest.approx(3e9**0.5, rel=0.05)


def test_torch_normal_has_no_gradient():
    pure = bridge.module_function(Applies(lambda mean, std: torch.normal(mean, std).sum()))
    slopes = jitted(jax.grad(lambda *given: pure({}, *given, rng=jax.random.key(7)), argnums=(0, 1)))(1.0, 2.0)
    assert [float(x) for x in slopes] == [0.0, 0.0]


def test_binomial_samples_keep_their_dtype_in_a_train_step():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    loss = lambda m, x: m(D.Binomial(5, torch.sigmoid(x)).sample()).square().mean()  # noqa: E731
    step = torch_api.JaxTrainStep(model, loss, torch_api.MaskedSGD(model.named_parameters(), lr=0.1))
    assert step(torch.randn(5, 4)).dtype == torch.float32


@pytest.mark.parametrize("name", ["covariance_matrix", "precision_matrix"])
def test_traced_matrices_skip_checks_of_values(name):
    def density(w):
        matrix = w @ w.mT + torch.eye(3)
        return D.MultivariateNormal(torch.zeros(3), **{name: matrix}).log_prob(torch.ones(3))

    compare(density, torch.linspace(-1, 1, 6).reshape(3, 2))


def test_sampler_that_reads_values_raises():
    with pytest.raises(jax.errors.ConcretizationTypeError, match="asks for values"):
        drawn(lambda x: (D.VonMises(x, 1.0).sample(),), torch.zeros(()))
