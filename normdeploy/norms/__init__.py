"""Define norms as ops, in one table (`normdeploy.norms.norm_table`)."""
