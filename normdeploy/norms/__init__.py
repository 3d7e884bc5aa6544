"""Define the norm ops that normdeploy knows, in one table (`normdeploy.norms.norm_table`)."""
