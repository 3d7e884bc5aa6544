"""Guard the norms of files in CI by rules; results as text, JSON or SARIF."""
