"""Whether two evaluations give the same numbers.

Each kind of reference has its own bound, with its reason where it is written:

================================  ======================================================================
reference                         bound
================================  ======================================================================
float64, of each element          `error_bounds.ErrorBounds`: random roundings of the reference, and eager's error
float64, of a whole tensor        `ulp_spacing.allowed_beside_peer`: 4 times eager's error and 4 ulp
the same model before a rewrite   `perturbation.explained_error`: perturbed runs of the model before
the same graph regrouped          `perturbation.regrouping_error`: 6 √N u
float64 and one norm or fold      `rewrite_errors`: what the formula itself rounds
another runtime                   `runtime_agreement.find_disagreement`: √u of the largest value
recorded samples                  `error_tally.ErrorTally` with the bound that was recorded
================================  ======================================================================

`element_errors` measures how far two arrays are apart, `verdict` is the result.
"""
