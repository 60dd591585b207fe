"""The operators that a file's program may call: PyTorch's operators that only compute, named one by one.

Every other operator is refused, a new one too.  Left out are operators that

- read or write files, or reach other processes and other devices (``from_file``, ``save``, the RPC ones);
- take a tensor apart or put one together unchecked (``_reshape_alias``, ``set_``, ``resize_``, ``*_unsafe``, those that
  make sparse and nested tensors), or give an address (``mkldnn::data_ptr``);
- trust indices in their arguments, or arguments that only PyTorch itself prepares (``segment_reduce``, ``lu_solve`` and
  others of LAPACK that take pivots, ``fractional_max_pool2d``, everything ``backward``, the kernels of one library);
- are PyTorch's own inner parts (``_stack``), but for those that exporting makes of ordinary models.

A file may still call an operator of the list with arguments that its kernel handles badly.  Nothing here looks at
arguments: PyTorch checks them, and memopt runs models in a confined process.

With an operator, its variant that works in place is allowed: ``relu_`` with ``relu``.  The only exception is
``as_strided_``, which could make a parameter refer to other memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_NAMES: Final[Mapping[str, str]] = {
    "aten": """
        Bool Complex ComplexImplicit Delete Float FloatImplicit Generator Int IntImplicit ScalarImplicit Size __and__
        __contains__ __derive_index __getitem__ __iand__ __ilshift__ __interpolate __ior__ __irshift__ __is__ __isnot__
        __ixor__ __lshift__ __not__ __or__ __range_length __round_to_zero_floordiv __rshift__ __upsample
        __upsample_bilinear __upsample_nearest __xor__ _adaptive_avg_pool2d _adaptive_avg_pool3d _assert_async
        _assert_scalar _assert_tensor_metadata _cdist_forward _choose_qparams_per_tensor _conj _conj_physical
        _convolution _convolution_mode _embedding_bag _embedding_bag_forward_only _euclidean_dist _fft_c2c _fft_c2r
        _fft_r2c _functional_assert_async _functional_assert_scalar _functional_sym_constrain_range
        _functional_sym_constrain_range_for_size _fused_rms_norm _get_tracing_state _infer_size _int_mm _is_all_true
        _is_any_true _linalg_check_errors _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd
        _list_to_tensor _local_scalar_dense _log_softmax _native_batch_norm_legit _native_batch_norm_legit_functional
        _native_batch_norm_legit_no_training _native_multi_head_attention _neg_view _nested_tensor_from_mask
        _nested_tensor_from_mask_left_aligned _no_grad_embedding_renorm_ _no_grad_fill_ _no_grad_normal_
        _no_grad_uniform_ _no_grad_zero_ _pack_padded_sequence _pack_sequence _pad_circular _pad_packed_sequence
        _pdist_forward _prelu_kernel _reshape_copy _safe_softmax _sample_dirichlet _scaled_dot_product_attention_math
        _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_for_cpu _set_item _shape_as_tensor _softmax _standard_gamma _tensor_to_list
        _to_copy _transformer_encoder_layer_fwd _trilinear _unique _unique2 _unsafe_index _unsafe_view _unwrap_optional
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm _weight_norm_interface abs absolute acos acosh
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
        adaptive_max_pool3d add addbmm addcdiv addcmul addmm addmv addr adjoint affine_grid_generator alias alias_copy
        all allclose alpha_dropout amax amin aminmax angle any append arange arccos arccosh arcsin arcsinh arctan
        arctan2 arctanh argmax argmin argsort argwhere as_strided as_strided_copy as_strided_scatter as_tensor asin
        asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d avg_pool1d avg_pool2d avg_pool3d baddbmm bartlett_window
        batch_norm bernoulli bilinear bin binary_cross_entropy binary_cross_entropy_with_logits bincount binomial
        bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor blackman_window block_diag
        bmm broadcast_shapes broadcast_tensors broadcast_to bucketize can_cast capitalize cartesian_prod cat cauchy
        cdist ceil celu center chain_matmul chalf channel_shuffle cholesky cholesky_inverse cholesky_solve chr chunk
        clamp clamp_max clamp_min clear clip clone col2im column_stack combinations complex concat concatenate conj
        conj_physical constant_pad_nd contiguous conv1d conv2d conv3d conv_depthwise3d conv_tbc conv_transpose1d
        conv_transpose2d conv_transpose3d convolution copy copysign corrcoef cos cosh cosine_embedding_loss
        cosine_similarity count count_nonzero cov cpu cross cross_entropy_loss ctc_loss cuda cummax cummin cumprod
        cumsum cumulative_trapezoid data deg2rad degrees dequantize det detach detach_copy device diag diag_embed
        diagflat diagonal diagonal_copy diagonal_scatter dict diff digamma dim dist div divide divmod dot dropout dsplit
        dstack einsum element_size elu embedding embedding_bag embedding_renorm empty empty_like empty_permuted
        empty_strided endswith eq equal erf erfc erfinv exp exp2 expand expand_as expand_copy expandtabs
        expm1 exponential extend eye fabs factorial fake_quantize_per_channel_affine
        fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine
        fake_quantize_per_tensor_affine_cachemask feature_alpha_dropout feature_dropout fft_fft fft_fft2 fft_fftfreq
        fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft
        fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn fill
        fill_diagonal_ find fix flatten flip fliplr flipud float_power floor floor_divide floordiv fmax fmin fmod format
        frac frexp frobenius_norm full full_like gamma gather gcd ge gelu geometric geqrf ger get get_device glu grad
        gradient greater greater_equal grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru gru_cell gt
        hamming_window hann_window hardshrink hardsigmoid hardswish hardtanh hash heaviside hex hinge_embedding_loss
        histc histogram histogramdd hsplit hstack huber_loss hypot i0 igamma igammac im2col imag index index_add
        index_copy index_fill index_put index_reduce index_select initial_seed inner insert instance_norm
        int_repr inverse is_autocast_cpu_enabled is_autocast_enabled is_coalesced is_complex is_conj is_contiguous
        is_floating_point is_grad_enabled is_inference is_leaf is_neg is_non_overlapping_and_dense is_nonzero is_pinned
        is_same_size is_scripting is_signed isalnum isalpha isclose isdecimal isdigit isfinite isidentifier isin isinf
        islower isnan isneginf isnumeric isposinf isprintable isreal isspace istft istitle isupper item items join
        kaiser_window keys kl_div kron kthvalue l1_loss layer_norm lcm ldexp le leaky_relu len lerp less less_equal
        lgamma lift lift_fresh lift_fresh_copy linalg__powsum linalg_cholesky linalg_cholesky_ex linalg_cond
        linalg_cross linalg_det linalg_diagonal linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
        linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex
        linalg_matmul linalg_matrix_exp linalg_matrix_norm linalg_matrix_power linalg_matrix_rank linalg_multi_dot
        linalg_norm linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd
        linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_vander linalg_vecdot linalg_vector_norm linear
        linspace list ljust log log10 log1p log2 log_normal log_sigmoid log_sigmoid_forward log_softmax logaddexp
        logaddexp2 logcumsumexp logdet logical_and logical_not logical_or logical_xor logit logspace logsumexp lower
        lstm lstm_cell lstrip lt mH mT manual_seed margin_ranking_loss masked_fill masked_scatter masked_select
        mathremainder matmul matrix_H matrix_exp matrix_power max max_pool1d max_pool1d_with_indices max_pool2d
        max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d max_unpool3d maximum mean median
        meshgrid min minimum mish mm mode modf moveaxis movedim mse_loss msort mul multi_margin_loss
        multilabel_margin_loss multilabel_margin_loss_forward multinomial multiply mv mvlgamma nan_to_num nanmean
        nanmedian nanquantile nansum narrow narrow_copy native_batch_norm native_channel_shuffle native_dropout
        native_group_norm native_layer_norm ne neg negative new_empty new_empty_strided new_full new_ones new_zeros
        nextafter nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward nll_loss_nd nonzero nonzero_numpy
        nonzero_static norm norm_except_dim normal normal_functional not_equal nuclear_norm numel numpy_T oct one_hot
        ones ones_like ord orgqr outer pad pad_sequence pairwise_distance partition pdist percentFormat permute
        permute_copy pinverse pixel_shuffle pixel_unshuffle poisson poisson_nll_loss polar polygamma pop popitem
        positive pow prelu prod promote_types put q_per_channel_axis q_per_channel_scales q_per_channel_zero_points
        q_scale q_zero_point qr qscheme quantile quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic
        quantized_batch_norm quantized_gru quantized_lstm quantized_max_pool1d quantized_max_pool2d quantized_max_pool3d
        rad2deg radians rand rand_like randint randint_like randn randn_like random randperm range ravel real reciprocal
        reflection_pad1d reflection_pad2d reflection_pad3d relu relu6 remainder remove renorm repeat repeat_interleave
        replace replication_pad1d replication_pad2d replication_pad3d requires_grad_ reshape reshape_as resolve_conj
        resolve_neg result_type reverse rfind rindex rjust rms_norm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell roll
        rot90 round row_stack rpartition rrelu rrelu_with_noise rrelu_with_noise_functional rsplit rsqrt rstrip rsub
        scalar_tensor scaled_dot_product_attention scatter scatter_add scatter_reduce searchsorted seed select
        select_copy select_scatter selu set_grad_enabled setdefault sgn sigmoid sign signbit silu sin sinc sinh size
        slice slice_copy slice_scatter slogdet         smooth_l1_loss soft_margin_loss softmax softplus
        softshrink sort sorted special_airy_ai
        special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
        special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_digamma
        special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2 special_expit special_expm1
        special_gammainc special_gammaincc special_gammaln special_hermite_polynomial_h special_hermite_polynomial_he
        special_i0 special_i0e special_i1 special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p
        special_log1p special_log_ndtr special_log_softmax special_logit special_logsumexp special_modified_bessel_i0
        special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_multigammaln
        special_ndtr special_ndtri special_polygamma special_psi special_round special_scaled_modified_bessel_k0
        special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
        special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_sinc special_softmax
        special_spherical_bessel_j0 special_xlog1py special_xlogy special_zeta split split_copy split_with_sizes
        split_with_sizes_copy splitlines sqrt square squeeze squeeze_copy stack startswith std std_mean stft
        storage_offset str stride strip sub subtract sum sum_to_size svd swapaxes swapcase swapdims sym_constrain_range
        sym_constrain_range_for_size sym_numel sym_size sym_storage_offset sym_stride t t_copy take take_along_dim tan
        tanh tensor tensor_split tensordot threshold tile title to to_padded_tensor topk trace transpose
        transpose_copy trapezoid trapz triangular_solve tril tril_indices triplet_margin_loss triu triu_indices
        true_divide trunc type_as unbind unbind_copy unflatten unfold unfold_copy uniform unique_consecutive unique_dim
        unique_dim_consecutive unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze unsqueeze_copy update upper
        upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
        upsample_nearest3d upsample_trilinear3d values vander var var_mean vdot view view_as view_as_complex
        view_as_complex_copy view_as_real view_as_real_copy view_copy vsplit vstack warn where xlogy zero zeros
        zeros_like zfill
        """,
    "quantized": """
        add add_relu add_scalar add_scalar_relu batch_norm batch_norm1d batch_norm1d_relu batch_norm2d batch_norm2d_relu
        batch_norm3d batch_norm3d_relu batch_norm_relu cat cat_relu celu clamp conv1d conv1d_dynamic conv1d_prepack
        conv1d_relu conv1d_unpack conv2d conv2d_add conv2d_add_relu conv2d_dynamic conv2d_prepack conv2d_relu
        conv2d_unpack conv3d conv3d_dynamic conv3d_prepack conv3d_relu conv3d_unpack conv_prepack conv_transpose1d
        conv_transpose1d_dynamic conv_transpose1d_prepack conv_transpose1d_unpack conv_transpose2d
        conv_transpose2d_dynamic conv_transpose2d_prepack conv_transpose2d_unpack conv_transpose3d
        conv_transpose3d_dynamic conv_transpose3d_prepack conv_transpose3d_unpack conv_unpack dropout elu embedding_4bit
        embedding_bag_4bit embedding_bag_4bit_prepack embedding_bag_4bit_unpack embedding_bag_byte
        embedding_bag_byte_prepack embedding_bag_byte_unpack embedding_bag_prepack embedding_bag_unpack embedding_byte
        group_norm hardswish instance_norm layer_norm leaky_relu linear linear_dynamic linear_dynamic_fp16
        linear_leaky_relu linear_prepack linear_prepack_fp16 linear_relu linear_relu_dynamic linear_relu_dynamic_fp16
        linear_tanh linear_unpack linear_unpack_fp16 make_quantized_cell_params_dynamic
        make_quantized_cell_params_fp16 matmul max_pool1d max_pool2d mul mul_relu mul_scalar mul_scalar_relu prelu
        quantized_gru_cell_dynamic quantized_lstm_cell_dynamic quantized_rnn_relu_cell_dynamic
        quantized_rnn_tanh_cell_dynamic relu6 sigmoid softmax threshold
        """,
    "_quantized": """
        add conv2d conv2d_prepack conv2d_relu conv3d conv3d_prepack conv3d_relu conv_transpose1d
        conv_transpose1d_prepack conv_transpose2d conv_transpose2d_prepack conv_transpose3d_prepack linear
        linear_dynamic linear_prepack linear_prepack_fp16
        """,
    "mkldnn_prepacked": "conv2d_prepack conv2d_run",
    "torchvision": "deform_conv2d nms",
}

_ALLOWED: Final = {namespace: frozenset(names.split()) for namespace, names in _NAMES.items()}

LIBRARIES: Final = frozenset(_ALLOWED)
"""Namespaces of the allowed operators."""


def is_allowed(operator: str) -> bool:
    """Return whether a program may call ``operator``, a name without overload such as ``aten::add_``."""
    library, _, name = operator.partition("::")
    names = _ALLOWED.get(library, frozenset())
    in_place = name.endswith("_") and not name.endswith("__") and name != "as_strided_"
    return name in names or (in_place and name[:-1] in names)
