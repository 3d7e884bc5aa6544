"""Whether two evaluations give the same numbers.

Each kind of reference has its own bound, with its reason where it is written:

================================  ======================================================================
reference                         bound
================================  ======================================================================
float64, of each element          `bounds.Bounds`: random roundings of the reference, and eager's error
float64, of a whole tensor        `spacing.of_peer`: 4 times eager's error and 4 ulp
the same model before a rewrite   `perturbation.explained`: perturbed runs of the model before
the same graph regrouped          `perturbation.of_regrouping`: 6 √N u
float64 and one norm or fold      `rewrites`: what the formula itself rounds
another runtime                   `answers.disagreement`: √u of the largest value
recorded samples                  `tally.Tally` with the bound that was recorded
================================  ======================================================================

`elements` measures how far two arrays are apart, `verdict` is the result.
"""
