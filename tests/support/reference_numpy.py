"""torch's update rules in float64 NumPy, written from the papers: rule(p, g, s, **options) -> p, where the dict `s` holds the state.

Docstrings say where torch differs from the paper. Powers of a beta near 1 are computed without cancellation.
"""

import numpy as np


def _count(s):
    s["t"] = s.get("t", 0) + 1
    return s["t"]


def _average(s, name, beta, x):
    s[name] = beta * s.get(name, np.zeros_like(x)) + (1 - beta) * x
    return s[name]


def _one_minus_power(beta, t):
    return -np.expm1(t * np.log(beta))


def rmsprop(p, g, s, lr=1e-2, alpha=0.99, eps=1e-8, weight_decay=0.0, momentum=0.0, centered=False):
    """Tieleman and Hinton, lecture 6.5; centered: Graves, arXiv:1308.0850, equations 38 to 41 (with eps inside the root)."""
    g = g + weight_decay * p
    v, m = _average(s, "v", alpha, g * g), _average(s, "m", alpha, g)
    s["b"] = momentum * s.get("b", 0.0) + g / (np.sqrt(v - m * m if centered else v) + eps)
    return p - lr * s["b"]


def adagrad(p, g, s, lr=1e-2, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10):
    """Duchi et al., JMLR 12, figure 1 with diagonal matrices; lr_decay is torch's."""
    g, t = g + weight_decay * p, _count(s)
    s["v"] = s.get("v", initial_accumulator_value) + g * g
    return p - lr / (1 + (t - 1) * lr_decay) * g / (np.sqrt(s["v"]) + eps)


def adadelta(p, g, s, lr=1.0, rho=0.9, eps=1e-6, weight_decay=0.0):
    """Zeiler, arXiv:1212.5701, algorithm 1; lr is torch's."""
    g = g + weight_decay * p
    v, old = _average(s, "v", rho, g * g), s.get("d", np.zeros_like(p))
    change = np.sqrt(old + eps) / np.sqrt(v + eps) * g
    _average(s, "d", rho, change * change)
    return p - lr * change


def adamax(p, g, s, lr=2e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
    """Kingma and Ba, arXiv:1412.6980, algorithm 2; torch adds eps to the size of the gradient."""
    g, t = g + weight_decay * p, _count(s)
    m = _average(s, "m", betas[0], g)
    s["u"] = np.maximum(betas[1] * s.get("u", np.zeros_like(p)), np.abs(g) + eps)
    return p - lr / _one_minus_power(betas[0], t) * m / s["u"]


def nadam(p, g, s, lr=2e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, momentum_decay=4e-3, decoupled_weight_decay=False):
    """Dozat 2016, algorithm 2 with the schedule of section 3.1; torch keeps the product of the momenta in float32."""
    t, decay = _count(s), weight_decay * p
    p, g = (p - lr * decay, g) if decoupled_weight_decay else (p, g + decay)
    mu, mu_next = (betas[0] * (1 - 0.5 * 0.96 ** (i * momentum_decay)) for i in (t, t + 1))
    s["mu"] = np.float32(s.get("mu", np.float32(1)) * np.float32(mu))
    m, v = _average(s, "m", betas[0], g), _average(s, "v", betas[1], g * g)
    m_bar = mu_next * m / (1 - float(s["mu"]) * mu_next) + (1 - mu) * g / (1 - float(s["mu"]))
    return p - lr * m_bar / (np.sqrt(v / _one_minus_power(betas[1], t)) + eps)


def radam(p, g, s, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled_weight_decay=False):
    """Liu et al., arXiv:1908.03265, algorithm 2; torch asks for rho > 5 (the paper 4) and adds eps to the root."""
    t, decay = _count(s), weight_decay * p
    p, g = (p - lr * decay, g) if decoupled_weight_decay else (p, g + decay)
    m, v = _average(s, "m", betas[0], g), _average(s, "v", betas[1], g * g)
    m_hat, corrected = m / _one_minus_power(betas[0], t), _one_minus_power(betas[1], t)
    longest = 2 / (1 - betas[1]) - 1
    rho = longest - 2 * t * betas[1] ** t / corrected
    if rho <= 5:
        return p - lr * m_hat
    r = np.sqrt((rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho))
    return p - lr * r * m_hat * np.sqrt(corrected) / (np.sqrt(v) + eps)


def rprop(p, g, s, lr=1e-2, etas=(0.5, 1.2), step_sizes=(1e-6, 50.0)):
    """Riedmiller and Braun 1993 without weight backtracking: iRprop- of Igel and Huesken 2000."""
    agree = np.sign(g * s.get("g", np.zeros_like(g)))
    s["size"] = np.clip(s.get("size", np.full_like(p, lr)) * np.select([agree > 0, agree < 0], [etas[1], etas[0]], 1.0), *step_sizes)
    s["g"] = np.where(agree < 0, 0.0, g)
    return p - np.sign(s["g"]) * s["size"]


def asgd(p, g, s, lr=1e-2, lambd=1e-4, alpha=0.75, t0=1e6, weight_decay=0.0):
    """Polyak and Juditsky 1992 in Bottou's form (Xu, arXiv:1107.2490); s["ax"] is the average. torch keeps eta in float32."""
    g, t = g + weight_decay * p, _count(s)
    eta, mu = float(s.get("eta", np.float32(lr))), float(s.get("mu", np.float32(1)))
    p = p * (1 - lambd * eta) - eta * g
    s["ax"] = p if mu == 1 else s["ax"] + mu * (p - s["ax"])
    s["eta"], s["mu"] = np.float32(lr / (1 + lambd * lr * t) ** alpha), np.float32(1 / max(1, t - t0))
    return p


def adafactor(p, g, s, lr=1e-2, beta2_decay=-0.8, eps=(None, 1e-3), d=1.0, weight_decay=0.0):
    """Shazeer and Stern, arXiv:1804.04235, algorithms 4 and 5; torch clamps by eps1 where the paper adds it."""
    t = _count(s)
    eps1 = np.finfo(p.dtype).eps if eps[0] is None else eps[0]
    rms = lambda x: np.sqrt(np.mean(x * x))  # noqa: E731
    rate, beta = max(eps[1], rms(p)) * min(lr, t**-0.5), 1 - t**beta2_decay
    if p.ndim > 1:
        row, column = _average(s, "r", beta, (g * g).mean(-1, keepdims=True)), _average(s, "c", beta, (g * g).mean(-2, keepdims=True))
        v = row * column / np.maximum(row.mean(-2, keepdims=True), eps1)
    else:
        v = _average(s, "v", beta, g * g)
    u = g / np.sqrt(np.maximum(v, eps1**2))
    return p * (1 - lr * weight_decay) - rate * u / max(1.0, rms(u) / d)


def newton_schulz(x, coefficients=(3.4445, -4.7750, 2.0315), steps=5, eps=1e-7):
    """Jordan et al., https://kellerjordan.github.io/posts/muon/."""
    a, b, c = coefficients
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T, coefficients, steps, eps).T
    x = x / max(np.linalg.norm(x), eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon(p, g, s, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn=None):
    """Jordan et al. with decoupled decay (Liu et al., arXiv:2502.16982); torch's momentum is an average."""
    m = _average(s, "m", momentum, g)
    rows, columns = p.shape
    ratios = {"match_rms_adamw": 0.2 * np.sqrt(max(rows, columns)), "spectral_unclamped": np.sqrt(rows / columns)}
    ratio = ratios.get(adjust_lr_fn, np.sqrt(max(1.0, rows / columns)))
    return p * (1 - lr * weight_decay) - lr * ratio * newton_schulz((1 - momentum) * g + momentum * m if nesterov else m)
