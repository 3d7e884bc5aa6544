"""Collect norms as other exporters write them, and compare the results of normdeploy and of other tools.

    python -m benchmarks.corpus write FOLDER              # export everything (minutes)
    python -m benchmarks.corpus run FOLDER                # this project
    python -m benchmarks.corpus run FOLDER --tools ...    # other tools, each in a separate process (--python: the
                                                          # interpreter that has them)
    python -m benchmarks.corpus table FOLDER              # results/corpus.json, results/corpus.md

``run`` stores its rows in FOLDER.
"""
