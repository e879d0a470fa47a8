"""Operators of torch's database that differ from torch, each with its reason.

tests/bridge/_tracing/ops/test_op_db.py checks that the table is complete and has no outdated entry.
"""

# Operators of which some arguments are refused -> these arguments.
IN_PART = {
    "nn.functional.embedding": "max_norm, which changes the weight",
    "nn.functional.embedding_bag": "max_norm, which changes the weight",
    "nn.functional.linear_cross_entropy.chunked": "a custom operator of torch's",
    "nn.functional.linear_cross_entropy.chunked_none": "a custom operator of torch's",
}
# Random operators, operators without defined values, and eigenvectors with a free sign: only shapes and dtypes are compared.
_DRAWN = """
bernoulli empty_like geometric linalg.eigh multinomial new_empty new_empty_strided nn.functional.alpha_dropout nn.functional.dropout
nn.functional.dropout2d nn.functional.dropout3d nn.functional.feature_alpha_dropout.with_train nn.functional.fractional_max_pool2d
nn.functional.fractional_max_pool3d nn.functional.multi_head_attention_forward nn.functional.rrelu normal normal.number_mean pca_lowrank
rand_like randint_like randn_like svd_lowrank
"""
DRAWN = _DRAWN.split()
# Operators whose output shape depends on values.
BY_VALUE = {"argwhere", "nonzero", "unique", "unique_consecutive"}
# kind of samples -> operators whose output shape depends on values that are traced in some or all samples.
BY_VALUE_OF = {"int64": {"bincount", "nn.functional.one_hot", "repeat_interleave", "tensor_split"}}
# reason why operators have no implementation -> their names.
REASONS = {
    "sparse tensors have no counterpart in jax": "to_sparse",
    "private to torch's own compiler or autograd": """
_chunk_cat _segment_reduce.lengths _segment_reduce.offsets _softmax_backward_data _unsafe_masked_index
_unsafe_masked_index_put_accumulate _upsample_bilinear2d_aa max_pool2d_with_indices_backward native_dropout_backward
slice torch.ops.aten._safe_softmax.default""",
    "not implemented": """
chalf geqrf hash_tensor histogramdd linalg.ldl_factor linalg.ldl_factor_ex linalg.ldl_solve
special.airy_ai special.bessel_j0 special.bessel_j1 special.bessel_y0 special.bessel_y1 special.chebyshev_polynomial_t
special.chebyshev_polynomial_u special.chebyshev_polynomial_v special.chebyshev_polynomial_w special.hermite_polynomial_h
special.hermite_polynomial_he special.laguerre_polynomial_l special.legendre_polynomial_p special.modified_bessel_k0
special.modified_bessel_k1 special.scaled_modified_bessel_k0 special.scaled_modified_bessel_k1
special.shifted_chebyshev_polynomial_t special.shifted_chebyshev_polynomial_u special.shifted_chebyshev_polynomial_v
special.shifted_chebyshev_polynomial_w special.spherical_bessel_j0""",
}
REFUSED = {name: reason for reason, names in REASONS.items() for name in names.split()}
# operator -> reason why its gradients are not compared.
_OTHERS = "samples with NaN, whose gradients are NaN at other elements"
VALUES = {
    "as_strided_scatter": "torch 2.13 has its gradient at the elements that are overwritten, none at those that are kept",
    **dict.fromkeys(["masked.amax", "masked.amin", "masked.norm", "masked.prod"], _OTHERS),
}
# Operators with complex results of real inputs.
_COMPLEX = """
cdouble cfloat complex fft.fft fft.fft2 fft.fftn fft.ifft fft.ifft2 fft.ifftn fft.ihfft fft.ihfft2 fft.ihfftn fft.rfft fft.rfft2
fft.rfftn linalg.eig linalg.eigvals polar stft view_as_complex
"""
COMPLEX_RESULTS = _COMPLEX.split()
_KINDS = "float32", "int64", "complex64", "bfloat16", "extremal", "complex results"


def _of(names, why):
    return dict.fromkeys(names.split(), why)


# kind of samples -> operator -> why it is refused.
REFUSED_OF: dict[str, dict[str, str]] = {kind: {} for kind in _KINDS}
REFUSED_OF["int64"] = _of("resize_ resize_as_", "a tensor of another shape in the same memory")

# kind of samples -> operator -> (the part that differs, "forward" or "gradient", and why).
KNOWN: dict[str, dict[str, tuple[str, str]]] = {kind: {} for kind in _KINDS}


def _known(kind, part, why, names):
    KNOWN[kind] |= dict.fromkeys(names.split(), (part, why))


_TIES = "the index among equal numbers is another"
_known("int64", "forward", _TIES, "kthvalue mode topk")
_known(
    "complex64",
    "gradient",
    "torch also takes the imaginary part of the gradient on the diagonal, where the root has none",
    "cholesky linalg.cholesky linalg.cholesky_ex",
)
_known("complex64", "gradient", "rounding: the sine of numbers of a million", "logsumexp")
_known("complex64", "gradient", "torch's is NaN", "renorm")
_known("bfloat16", "forward", _TIES, "argsort mode sort topk")
_known("bfloat16", "forward", "torch's own overflows", "matrix_exp")
_known(
    "bfloat16",
    "forward",
    "the statistics are float32, as torch's on a GPU",
    "_native_batch_norm_legit native_batch_norm native_group_norm native_layer_norm",
)
_known(
    "bfloat16",
    "gradient",
    "rounding: XLA sums in bfloat16 (JaxTrainStep in float32)",
    "baddbmm kron nn.functional.conv_transpose2d nn.functional.conv_transpose3d nn.functional.normalize "
    "nn.functional.scaled_dot_product_attention",
)
_GAMMAS = "polygamma.polygamma_n_0 special.polygamma.special_polygamma_n_0"
_MORE_GAMMAS = "polygamma.polygamma_n_1 polygamma.polygamma_n_2 polygamma.polygamma_n_3 polygamma.polygamma_n_4"
_known("bfloat16", "gradient", "rounding: large terms of opposite signs", f"{_GAMMAS} {_MORE_GAMMAS}")
_known("extremal", "forward", "C leaves open what an integer is made of a number too large for it", "byte char int long short")
_known(
    "extremal",
    "forward",
    "at infinities and outside of the domain other numbers are infinite or NaN",
    f"igamma igammac special.zeta {_MORE_GAMMAS}",
)
_known(
    "extremal",
    "gradient",
    "at infinities and poles other numbers are infinite or NaN",
    f"digamma hypot logaddexp logit special.i1 {_GAMMAS}",
)
_known("extremal", "gradient", "torch's formula is coarse for large numbers", "special.log_ndtr")
_known(
    "extremal",
    "gradient",
    "of NaN torch's own code for long tensors and for short ones differs",
    "nn.functional.celu nn.functional.elu nn.functional.hardshrink nn.functional.hardsigmoid nn.functional.hardtanh nn.functional.relu6 "
    "nn.functional.selu nn.functional.softshrink",
)
_known("extremal", "gradient", "torch's has the wrong sign for negative lengths", "polar")
