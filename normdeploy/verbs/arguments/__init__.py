"""What the verbs are given and give back: arguments looked at before any work, models in whatever form, results that
stand for a file.
"""
