"""Write norms as ops of installed packages (`normdeploy.norms.third_party`)."""

from __future__ import annotations

from ..graphs.graph import Graph
from ..graphs.region import Refusal
from ..norms.third_party import ThirdPartyNorm, all_third_party_norms
from ..recognition.norm_facts import Norm
from .norm_writer import NormForm, OpWriter


def write_third_party_norm(graph: Graph, norm: Norm) -> NormForm | None:
    """Write the norm as an op of a package.

    Returns:
        the form of the first package that accepts the norm; None if none does.

    Raises:
        ExtensionError: a package can't be loaded, or its form raises or returns neither a form nor a refusal.
    """
    for guest in all_third_party_norms():
        made = _ask_package(graph, norm, guest)
        if made is not None:
            return made
    return None


def _ask_package(graph: Graph, norm: Norm, guest: ThirdPartyNorm) -> NormForm | None:
    """Run a package's form function; return None if it refuses the norm."""
    row = guest.row
    extension = guest.extension
    what = f"has a form for {row.name} that failed at {norm.y.name!r}"
    made = extension.run(what, guest.norm.form, norm, OpWriter(graph, norm, row))
    if isinstance(made, Refusal):
        return None
    if not isinstance(made, NormForm):
        raise extension.make_error(
            f"has a form for {row.name} that returned a {type(made).__name__} at {norm.y.name!r}; return "
            "writer.done() or writer.refuse(reason)"
        )
    if not any((n.domain, n.op) == (row.domains[0], row.op) for n in made.nodes):
        raise extension.make_error(f"has a form for {row.name} that did not write that op at {norm.y.name!r}")
    return made
