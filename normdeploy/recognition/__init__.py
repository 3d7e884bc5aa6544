"""Find the norms in a graph: structure proposes the ends of a norm, values decide which norm it is."""
