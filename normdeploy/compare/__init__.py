"""Compare two evaluations of one function.

Each kind of reference has its own bound. The module that computes a bound also explains it:

    ================================  ======================================================================
    reference                         bound
    ================================  ======================================================================
    float64, of each element          `error_bounds.ErrorBounds`: random roundings of the reference, and eager's error
    float64, of a whole tensor        `ulp_spacing.allowed_beside_peer`: 4 times eager's error and 4 ulp
    the same model before a rewrite   `perturbation.explained_error`: perturbed runs of the model before
    the same graph regrouped          `perturbation.regrouping_error`: 6 √N u
    float64 and one norm or fold      `rewrite_errors`: roundings of the formula itself
    another runtime                   `runtime_agreement.find_disagreement`: √u of the largest value
    recorded samples                  `error_tally.ErrorTally` with the recorded bound
    ================================  ======================================================================

"Eager" is the PyTorch model, run in eager mode in its own type. `element_errors` measures the distance of two arrays,
and `verdict` is the result of a comparison.
"""
