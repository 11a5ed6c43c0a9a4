"""Keys of a model's levers: what moves the conditioning of attention without its shape. Unset they change nothing."""

from typing import Any

from ml_collections.config_dict import placeholder


KEYS = ("spectral", "sigma_reparam", "mlp_sigma_reparam", "norm_scaling", "value_residual", "graying")  # in every pass


def levers(m: Any) -> None:
    """Gives a model section the keys. Each is refused in a family, and for an attention, that has no use for it."""
    m.spectral = placeholder(
        float
    )  # λ of the fixed λI that queries', keys' and values' matrices have added; 0 if unset
    m.qkv_init = placeholder(str)  # of these matrices at the start: "orthogonal", or "spectral": plus U·σ₁·Vᵀ
    m.levers_on = placeholder(str)  # which matrices `spectral` and `qkv_init` act on: "qk", "v", ...; "qkv" if unset
    m.sigma_reparam = placeholder(bool)  # True: attention's matrices are γ·W/σ₁(W), γ learned
    m.mlp_sigma_reparam = placeholder(bool)  # True: so are the MLP's
    m.norm_scaling = placeholder(bool)  # True: norms of layer l before attention and MLP are divided by √l
    m.value_residual = placeholder(float)  # share of the first layer's values in those of each; none if unset
    m.value_mix = placeholder(str)  # of `value_residual`: the shares stay as they are, "fixed", or are "learned"
    m.graying = placeholder(float)  # ε that the spectrum of the tokens before the blocks is raised to; 1 if unset
    m.graying_by = placeholder(str)  # spectrum of `graying`: singular values, "svd", or cosine coefficients, "dct"
