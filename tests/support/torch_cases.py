"""Torch operations as data: a name, a function of tensors, and the shapes of its inputs.

tests/bridge/_tracing/ops/test_elementwise.py runs them. A shape stands for normal numbers, "pos" for positive ones, "int:n" for indices
below n, "bool" for flags, and "p" for probabilities.
"""

import torch
import torch.nn.functional as F

A, V, I3 = (3, 4), (4,), ("int:3", (5,))
IMAGE, KERNEL = (2, 4, 7, 6), (6, 4, 3, 2)
POS, PROB, FLAGS = ("pos", (3, 4)), ("p", (3, 4)), ("bool", (3, 4))
TARGETS = ("int:4", (3,))


def table(**cases):
    return [(name, function, inputs) for name, (function, *inputs) in cases.items()]


UNARY = [
    *(
        (name, lambda x, name=name: getattr(torch, name)(x), (A,))
        for name in [
            "exp",
            "expm1",
            "exp2",
            "sin",
            "cos",
            "tan",
            "sinh",
            "cosh",
            "tanh",
            "asinh",
            "atan",
            "sigmoid",
            "erf",
            "erfc",
            "abs",
            "neg",
            "sign",
            "floor",
            "ceil",
            "trunc",
            "square",
            "round",
        ]
    ),
    *(
        (name, lambda x, name=name: getattr(x, name)(), (POS,))
        for name in ["log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "lgamma", "digamma", "frac"]
    ),
    *((name, lambda x, name=name: getattr(torch, name)(x), (PROB,)) for name in ["asin", "acos", "atanh", "logit", "erfinv"]),
]

BINARY = table(
    add=(lambda x, y: torch.add(x, y, alpha=2) + 1 + (2 + x), A, V),
    sub=(lambda x, y: 3 - torch.sub(x, y, alpha=0.5) - x, A, V),
    mul=(lambda x, y: 2 * x * y * x.mul(y), A, V),
    div=(lambda x, y: x / y + 1 / y + torch.div(x, y), A, POS),
    div_rounded=(lambda x, y: torch.div(x, y, rounding_mode="floor") + torch.div(x, y, rounding_mode="trunc"), A, POS),
    floordiv=(lambda x, y: x.detach() // y.detach() + x % y + torch.fmod(x, y), A, POS),
    power=(lambda x, y: x**2 + x.pow(3) + y**0.5 + y**x + 2**x + x**2.0 + y**-1, A, POS),
    power_zero=(lambda x: (x * 0) ** 2 + (x * 0).pow(3.0), A),
    extremes=(lambda x, y: torch.maximum(x, y) + torch.minimum(x, y) + torch.max(x, y) + torch.min(x, y), A, A),
    atan2=(lambda x, y: torch.atan2(x, y) + torch.hypot(x, y) + torch.logaddexp(x, y), A, A),
    compare=(lambda x, y: (x < y).float() + (x >= 0) + (x == x) * 2 + (x != y) * 3 + x.le(y) + torch.gt(x, y), A, A),
    logic=(lambda x, y: ((x > 0) & (y > 0)).float() + ((x > 0) | ~(y > 0)) + ((x > 0) ^ (y > 0)) + torch.logical_and(x, y), A, A),
    clamp=(lambda x, y: x.clamp(-0.5, 0.5) + torch.clamp(x, min=y) + x.clamp_min(0) + x.clip(max=0.1), A, A),
    where=(lambda x, y: torch.where(x > 0, x, y) + x.where(x > 0, 0.5) + torch.where(y > 0, 1.0, x), A, A),
    masked_fill=(lambda x, m: x.masked_fill(m, -1.5) + x.masked_fill(~m, 2), A, FLAGS),
    lerp=(lambda x, y: torch.lerp(x, y, 0.3) + x.lerp(y, y) + torch.addcmul(x, x, y, value=2) + torch.addcdiv(x, y, y * y + 1), A, A),
    promotion=(lambda x, i: x[:3, 0] * i[:3] + i[:3] / 2 + (i[:3] * 2.5) + i[:3].float() + i[:3].sum(), A, I3),
    dtypes=(lambda x: x.to(torch.float16).float() + x.double().float() + x.long() + x.bool() + x.type(torch.int32), A),
)

REDUCTIONS = table(
    sum=(lambda x: x.sum() + x.sum(0).sum() + x.sum(dim=(0, 1), keepdim=True) + torch.sum(x, 1, keepdim=True), A),
    mean=(lambda x: x.mean() + x.mean(-1, keepdim=True) + torch.mean(x, dim=(0,)), A),
    var=(lambda x: x.var() + x.var(0) + x.std(1, keepdim=True) + x.var(dim=1, unbiased=False, keepdim=True) + x.var(False), A),
    correction=(lambda x: torch.var(x, dim=0, correction=0) + torch.std(x, correction=2) + torch.var_mean(x, 0)[1], A),
    prod=(lambda x: x.prod() + x.prod(0) + x.cumsum(1) + x.cumprod(0), A),
    max=(lambda x: x.max() + x.max(1, keepdim=True).values + x.min(dim=0)[0] + x.amax(0) + x.amin((0, 1)), A),
    places=(lambda x: x.argmax(1, keepdim=True) + x.argmin() + x.max(1).indices.unsqueeze(1) + 0.0, A),
    logsumexp=(lambda x: torch.logsumexp(x, 1, keepdim=True) + x.logsumexp((0, 1)), A),
    sort=(lambda x: x.sort(-1, descending=True).values + x.sort()[0] + x.topk(4, dim=1).values + torch.argsort(x, 0), A),
    norm=(lambda x: x.norm() + x.norm(dim=1, keepdim=True) + torch.linalg.norm(x, dim=0) + x.norm(1) + x.norm(3, 0), A),
    norm_inf=(lambda x: torch.linalg.vector_norm(x, float("inf")) + F.normalize(x, dim=1), A),
    norm_zero=(lambda x: (x * 0).norm() + x, A),
    flags=(lambda x: (x > 0).any() + (x > 0).all(1, keepdim=True) + torch.any(x > 5, dim=0) + x, A),
)

SHAPES = table(
    view=(lambda x: x.view(2, 6) + x.reshape((2, -1)) + x.view(-1).reshape(2, 6) + x.flatten().unflatten(0, (2, 6)), A),
    permute=(lambda x: x.permute(2, 0, 1) + x.transpose(0, 2).transpose(1, 2) + x.movedim(-1, 0) + x.mT.permute((1, 0, 2)), (2, 3, 4)),
    transposed=(lambda x: x.T + x.t() + x.transpose(-1, -2).contiguous(), A),
    squeeze=(lambda x: x.unsqueeze(1).squeeze(1) + x[None].squeeze() + x.unsqueeze(-1).squeeze(-1).squeeze(0), A),
    expand=(lambda x: x.expand(3, 4) + x.unsqueeze(0).expand(3, -1) + x.expand_as(torch.ones(3, 4)) + x.repeat(3, 1) + x.tile((3, 1)), V),
    split=(lambda x: sum(x.split(2, 1)) + sum(x.chunk(2, dim=-1)) + torch.split(x, [2, 2], 1)[1] + x.tensor_split(2, 1)[0], A),
    unbind=(lambda x: sum(x.unbind(0)) + sum(row for row in x) + x.select(0, 1) + x.narrow(0, 1, 2)[0], A),
    join=(lambda x, y: torch.cat([x, y], 0) + torch.stack((x, y)).flatten(0, 1) + torch.vstack([y, x]) + torch.concat([x, x]), A, A),
    index=(lambda x: x[1] + x[:, 1:].sum() + x[..., -1:][0] + x[None, 0][0] + x[1:, ::2].sum() + x[-1, 2], A),
    index_tensor=(lambda x, i: x[i, :] + x[i, i][:, None] + x[[0, 1, 2, 0, 1]], A, I3),
    index_select=(lambda x, i: x[i] + x.index_select(0, i) + x[i, 1:2], A, I3),
    index_mask=(lambda x: x * (x > 0) + torch.where(x > 0, x, 0.0)[0], A),
    gather=(lambda x, i: x.gather(0, i) + x.gather(1, i).sum() + torch.take_along_dim(x, i, 1), A, ("int:2", (3, 4))),
    gather_part=(lambda x, i: x.gather(1, i) + torch.gather(x, 0, i), A, ("int:2", (2, 3))),
    scatter=(lambda x, i: x.scatter(1, i, 2.0) + x.scatter_add(0, i, x * 2) + x.scatter(1, i[:, :1], x[:, :1]), A, ("int:2", (3, 4))),
    index_add=(lambda x, i, y: x.index_add(0, i, y) + x.index_put((i, i), y[:, 0], accumulate=True), A, I3, (5, 4)),
    flip=(lambda x: x.flip(0) + x.flip((0, 1)) + x.roll(1, 0) + torch.roll(x, (1, 2), (0, 1)), A),
    triangle=(lambda x: x.tril() + x.triu(1) + torch.diag(x[0, :3]).sum() + x.diagonal().sum() + torch.diag_embed(x[0]).sum(), A),
    grid=(lambda x, y: sum(torch.meshgrid(x, y, indexing="ij")) + sum(torch.broadcast_tensors(x[:, None], y)), V, (3,)),
    repeat_interleave=(lambda x: x.repeat_interleave(2, dim=0)[::2] + x.repeat_interleave(2, 1)[:, 1::2], A),
    one_hot=(lambda x, i: F.one_hot(i, 4).to(x.dtype) @ x.T + F.one_hot(i, num_classes=4).sum(), A, I3),
    unfold=(lambda x: x.unfold(1, 2, 1).sum(-1) + x[:, :3], A),
)

PRODUCTS = table(
    matmul=(lambda x, y: x @ y.T + torch.matmul(x, y.t()) + torch.mm(x, y.mT) + x.matmul(y.T), A, A),
    batched=(
        lambda x, y: torch.bmm(x, y) + torch.baddbmm(x @ y, x, y, beta=0.5, alpha=2) + torch.einsum("bij,bjk->bik", x, y),
        (2, 3, 4),
        (2, 4, 3),
    ),
    vectors=(lambda x, y: torch.outer(x, y).sum() + x.dot(y) + torch.inner(x, y) + torch.mv(torch.outer(x, y), y), V, V),
    addmm=(
        lambda x, y: (
            torch.addmm(x[0, :3], x, y.T, beta=0.3) + F.linear(x, y, x[0, :3]) + F.bilinear(x, x, y[:, None] * y[..., None])[:, :3]
        ),
        A,
        A,
    ),
    linalg=(
        lambda x: (
            torch.linalg.inv(x @ x.T + 4 * torch.eye(3)) + torch.linalg.det(x @ x.T) + torch.linalg.solve(x @ x.T + torch.eye(3), x @ x.T)
        ),
        A,
    ),
)

CONSTANT = torch.tensor([0.0, 1.0, 2.0, 3.0])
CREATION = table(
    filled=(
        lambda x: (
            x + torch.zeros(3, 4) + torch.ones((3, 4)) + torch.full((4,), 2.0) + torch.zeros_like(x) + x.new_ones(4) + torch.eye(3, 4)
        ),
        A,
    ),
    ranges=(
        lambda x: (
            x + torch.arange(4) + torch.arange(1.0, 3.0, 0.5) + torch.linspace(0, 1, 4) + torch.tensor([1, 2, 3, 4]) * torch.tensor(2.5)
        ),
        A,
    ),
    branch=(lambda x: x * 2 if torch.arange(3).sum() == 3 and int(torch.tensor(3)) == 3 and x.shape[0] == 3 else x, A),
    constant=(lambda x: x + CONSTANT + CONSTANT * x + torch.add(CONSTANT, x) + CONSTANT[:2].sum(), A),
    mask=(lambda x: x + torch.triu(torch.full((3, 4), float("-inf")), 1).masked_fill(torch.ones(3, 4).tril() == 0, 0.0), A),
)


def written(x):
    y = x * 1
    y += 1
    y.mul_(2).add_(x, alpha=0.5)
    y[0] = 5.0
    y[1:, 1] *= 3
    y[:, 2].add_(x[:, 0])
    y.view(-1)[3] = x[0, 0]
    y.T[1, 0] = 7
    return y


def seen_through_a_view(x):
    y = x * 1
    row, flat, copy = y[1], y.view(-1), y.T.reshape(-1)
    y.add_(1)
    row.mul_(2)
    flat[0] = 0.0
    copy.zero_()
    a, b = y[:, :2], y.narrow(1, 2, 2)
    a.copy_(b)
    y[y > 1.5] = 0.25
    return y + row[0] + flat.sum() + copy.sum()


def without_gradient(x):
    with torch.no_grad():
        fixed = x * 3
    return x * fixed + x.detach() * x


WRITES = table(
    in_place=(written, A),
    views=(seen_through_a_view, A),
    no_grad=(without_gradient, A),
    relu=(lambda x: F.relu(x * 1, inplace=True) + torch.relu_(x * 1) + F.leaky_relu_(x * 1) + (x * 1).clamp_(0, 1) + (x * 1).fill_(2), A),
)

ACTIVATIONS = [
    *(
        (name, lambda x, name=name: getattr(F, name)(3 * x), (A,))
        for name in [
            "relu",
            "relu6",
            "silu",
            "selu",
            "mish",
            "logsigmoid",
            "softsign",
            "tanhshrink",
            "hardswish",
            "hardsigmoid",
            "hardtanh",
            "leaky_relu",
            "elu",
            "celu",
            "gelu",
            "softplus",
            "hardshrink",
            "softshrink",
        ]
    ),
    *table(
        gelu_tanh=(lambda x: F.gelu(x, approximate="tanh") + F.elu(x, 0.5) + F.celu(x, 0.5) + F.hardtanh(x, -0.2, 0.4), A),
        softplus=(lambda x: F.softplus(x, beta=2, threshold=1) + F.threshold(x, 0.1, 20) + F.glu(torch.cat([x, x], 1)), A),
        prelu=(lambda x, w: F.prelu(x, w) + F.prelu(x, w[:1]), A, V),
        softmax=(
            lambda x: F.softmax(x, -1) + x.softmax(0) + torch.softmax(x, 1) + F.log_softmax(x, dim=0) + x.log_softmax(1) + F.softmin(x, 1),
            A,
        ),
    ),
]

LAYERS = table(
    layer_norm=(lambda x, w: F.layer_norm(x, (4,), w, w) + F.layer_norm(x, (3, 4)) + F.rms_norm(x, (4,), w), A, V),
    group_norm=(lambda x, w: F.group_norm(x, 2, w, w) + F.instance_norm(x), IMAGE, V),
    embedding=(lambda w, i: F.embedding(i, w) + F.embedding(i, w, padding_idx=1), A, I3),
    conv1d=(
        lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1, dilation=2) + F.conv1d(x, w, padding="same")[..., :4],
        (2, 4, 9),
        (6, 4, 3),
        (6,),
    ),
    conv2d=(lambda x, w: F.conv2d(x, w, stride=(2, 1), padding=(1, 0)) + F.conv2d(x[0], w, stride=(2, 1), padding=(1, 0)), IMAGE, KERNEL),
    conv_groups=(lambda x, w: F.conv2d(x, w[:, :2], groups=2, padding=2, dilation=(1, 2)), IMAGE, KERNEL),
    conv3d=(lambda x, w: F.conv3d(x, w, padding=1), (1, 2, 4, 4, 3), (3, 2, 2, 2, 2)),
    conv_transpose=(
        lambda x, w: (
            F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1)
            + F.conv_transpose2d(x, w, stride=(2, 2), padding=1, output_padding=(1, 1))
        ),
        IMAGE,
        (4, 6, 3, 3),
    ),
    conv_transpose_groups=(lambda x, w: F.conv_transpose2d(x, w, groups=2, dilation=2, stride=(3, 1)), IMAGE, (4, 3, 3, 2)),
    conv_transpose1d=(lambda x, w: F.conv_transpose1d(x, w, stride=2), (2, 4, 5), (4, 3, 3)),
    pad=(lambda x: F.pad(x, (1, 2), value=3.0).sum() + F.pad(x, (1, 1, 2, 0), mode="circular").sum() * x + F.pad(x, (-1, 1, 0, 0)), IMAGE),
    pad_modes=(lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect") + F.pad(x, (2, 1, 1, 2), mode="replicate"), IMAGE),
    max_pool=(lambda x: F.max_pool2d(x, 2) + F.max_pool2d(x, 3, stride=2, padding=1, ceil_mode=True)[:, :, :3, :3], IMAGE),
    max_pool_dilated=(
        lambda x: F.max_pool2d(x, (3, 2), 1, dilation=2) + F.max_pool2d(x, (3, 2), 1, dilation=2, return_indices=True)[0],
        IMAGE,
    ),
    max_pool_places=(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)[1] + x.sum() + F.max_pool1d(x[0], 2, 2).sum(), IMAGE),
    avg_pool=(
        lambda x: (
            F.avg_pool2d(x, 2)
            + F.avg_pool2d(x, 3, 2, 1, ceil_mode=True)[..., :3, :3]
            + F.avg_pool2d(x, 3, 3, 1, count_include_pad=False).sum()
        ),
        IMAGE,
    ),
    avg_pool1d=(lambda x: F.avg_pool1d(x, 3, 2, 1) + F.avg_pool1d(x, 3, 2, 1, ceil_mode=True)[..., :3], (2, 4, 6)),
    adaptive=(lambda x: F.adaptive_avg_pool2d(x, (3, 4)) + F.adaptive_avg_pool2d(x, 1) + F.adaptive_max_pool2d(x, (3, 4)), IMAGE),
    adaptive_none=(lambda x: F.adaptive_avg_pool2d(x, (None, 2)) + F.adaptive_avg_pool1d(x[0], 2), IMAGE),
    shuffle=(lambda x: F.pixel_shuffle(x, 2), IMAGE),
    similarity=(lambda x, y: F.cosine_similarity(x, y) + F.cosine_similarity(x, y, dim=-1, eps=0.5), A, A),
)

QKV = [(2, 2, 5, 4), (2, 2, 6, 4), (2, 2, 6, 4)]
sdpa = F.scaled_dot_product_attention
ATTENTION = [
    ("plain", sdpa, QKV),
    ("causal", lambda q, k, v: sdpa(q, k, v, is_causal=True, scale=0.3), QKV),
    ("bool mask", lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), [*QKV, ("bool", (5, 6))]),
    ("float mask", lambda q, k, v, m: sdpa(q, k, v, m), [*QKV, (2, 1, 5, 6)]),
    ("a query that sees nothing", lambda q, k, v, m: sdpa(q, k, v, m & (torch.arange(5) > 0)[:, None]), [*QKV, ("bool", (5, 6))]),
]

LOSSES = table(
    cross_entropy=(
        lambda x, t: F.cross_entropy(x, t) + F.cross_entropy(x, t, reduction="sum") + F.cross_entropy(x, t, reduction="none"),
        A,
        TARGETS,
    ),
    smoothed=(lambda x, t, w: F.cross_entropy(x, t, w.detach().abs(), label_smoothing=0.1), A, TARGETS, V),
    ignored=(
        lambda x, t, w: (
            F.cross_entropy(x, t, w.detach().abs(), ignore_index=1, label_smoothing=0.1) + F.cross_entropy(x, t, ignore_index=2)
        ),
        A,
        ("int:4", (3,)),
        V,
    ),
    probabilities=(
        lambda x, t, w: F.cross_entropy(x, t, w.detach().abs(), label_smoothing=0.1) + F.cross_entropy(x, t.softmax(1), reduction="none"),
        A,
        PROB,
        V,
    ),
    planes=(
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1) + F.nll_loss(x.log_softmax(1), t, reduction="none"),
        (2, 4, 3, 2),
        ("int:4", (2, 3, 2)),
    ),
    alone=(lambda x, t: F.cross_entropy(x, t) + F.cross_entropy(x, t, torch.arange(1.0, 5.0)), V, ("int:4", ())),
    nll=(lambda x, t, w: F.nll_loss(x, t, w.detach()) + F.nll_loss(x, t, ignore_index=0, reduction="sum"), A, TARGETS, V),
    bce_logits=(
        lambda x, p, w: (
            F.binary_cross_entropy_with_logits(x, p, pos_weight=w.detach())
            + F.binary_cross_entropy_with_logits(x, p, w.detach(), reduction="sum")
        ),
        A,
        PROB,
        ("pos", (4,)),
    ),
    bce=(lambda x, p: F.binary_cross_entropy(x.sigmoid(), p) + F.binary_cross_entropy(x.sigmoid(), p, reduction="none"), A, PROB),
    distances=(
        lambda x, y: F.mse_loss(x, y) + F.l1_loss(x, y, reduction="sum") + F.huber_loss(x, y, delta=0.5) + F.smooth_l1_loss(x, y, beta=0.5),
        A,
        A,
    ),
    kl=(lambda x, p: F.kl_div(x, p, reduction="batchmean") + F.kl_div(x, p.log(), reduction="none", log_target=True), A, PROB),
)

TABLES = {
    "unary": UNARY,
    "binary": BINARY,
    "reductions": REDUCTIONS,
    "shapes": SHAPES,
    "products": PRODUCTS,
    "creation": CREATION,
    "writes": WRITES,
    "activations": ACTIVATIONS,
    "layers": LAYERS,
    "attention": ATTENTION,
    "losses": LOSSES,
}
