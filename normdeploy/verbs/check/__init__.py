"""The guard for CI: rules that the norms of a file should keep, as text, JSON or SARIF."""
