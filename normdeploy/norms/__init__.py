"""Norms as ops: what each op is, in one table (`normdeploy.norms.norm_table`)."""
