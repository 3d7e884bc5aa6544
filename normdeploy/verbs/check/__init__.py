"""Check the norms of files against rules in CI, with results as text, JSON or SARIF."""
