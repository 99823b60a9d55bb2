"""What each source position adds to each target position, beyond the attention weight.

In one layer and one document, source j contributes to the update of target i exactly the vector

    c_ij = m · n_i( Σ_h A_h,ij v_hj W_O^h )          n_i(y) = w ⊙ (y [− mean y]) / s_i, or y where there is no post-norm

with A the attention pattern, v the value (bias included) that query head h reads, W_O^h its slice of the output projection,
m the residual multiplier, and w, s_i the weight and the divisor of a post-attention norm. Σ_j c_ij is the attention output a_i up to the
output bias. Three kernels [T,N,N] are made of it, averaged over documents:

    energy      E[ ‖c_ij‖² / ‖x_j‖² ]                how much a relative change of x_j changes the update of i, squared
    projection  E[ max(0, ⟨c_ij, a_i⟩ / ‖a_i‖²) ]    the share of the update that points where the update points
    value_norm  E[ ‖c_ij‖ ]                          Kobayashi et al., arXiv 2004.10102, section 3, with all heads together

The last two are normalised row by row, as a rollout needs them; `energy` is not a distribution (see
`posattn.rollout.energy`). With the values' Gram matrix per source, G_j[h,k] = ⟨v_hj W_O^h, v_kj W_O^k⟩,

    ‖Σ_h A_h,ij v_hj W_O^h‖² = Σ_hk A_h,ij A_k,ij G_j[h,k]

so that no vector c_ij is ever built: N H D numbers and one [N,H] by [H,H] product a source, half of which the causal mask saves.
`heads="independent"` keeps only h = k, which costs one pass over the pattern.
"""
