"""The pages of the API reference: every public name, from the lists that the package itself reads.

mkdocstrings fills in signatures and docstrings; this file says which names there are, in which
order, and under which heading.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from repository import ROOT

# Namespace -> title of its page.
NAMESPACES = {
    "tnt_jax": "tnt_jax",
    "tnt_jax.callbacks": "Callbacks",
    "tnt_jax.data": "Data",
    "tnt_jax.losses": "Losses",
    "tnt_jax.metrics": "Metrics",
    "tnt_jax.models": "Models",
    "tnt_jax.optimizers": "Optimizers",
    "tnt_jax.parameter_server": "Parameter servers",
    "tnt_jax.schedules": "Schedules",
    "tnt_jax.search": "Search",
}
_FOLDERS = {"callbacks", "losses", "metrics", "optimizers", "schedules"}

# Where a name of `tnt_jax` is defined -> heading; the first that fits counts.
SECTIONS = {
    "keras_compat": "Models",
    "parameter_server": "Parameter servers",
    "train.local": "Local steps over slow links",
    "train.loops": "Training loops",
    "distributed.sums.optax_gradients": "Gradients",
    "distributed.joining.runtime": "Ranks and processes",
    "distributed.goodput": "The job",
    "distributed.liveness.phases": "The job",
    "seeding": "The job",
    "distributed": "Values of processes",
}


def pages() -> dict[str, str]:
    """Returns the Markdown of each page of the reference, by its path below the site's root."""
    return {
        f"api/{namespace.replace('.', '_')}.md": _page(namespace, title)
        for namespace, title in NAMESPACES.items()
    }


def public_names(namespace: str) -> dict[str, str]:
    """Returns the module in which each public name of a namespace is defined.

    Both are relative to the package; names of the namespaces themselves are left out.
    """
    folder = ROOT / "tnt_jax" / _folder(namespace)
    stub = folder / "__init__.pyi"
    names = _of_stub(stub) if stub.exists() else _of_lazy_loader(folder / "__init__.py")
    prefix = ".".join(folder.relative_to(ROOT / "tnt_jax").parts)
    return {name: ".".join(filter(None, [prefix, module])) for name, module in names.items()}


def _folder(namespace: str) -> str:
    name = namespace.partition(".")[2]
    return f"keras_compat/{name}" if name in _FOLDERS else name


def _of_stub(stub: Path) -> dict[str, str]:
    """Reads `from .module import name as name`."""
    imports = [
        node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    return {
        alias.name: node.module
        for node in imports
        for alias in node.names
        if node.module and f"tnt_jax.{alias.name}" not in NAMESPACES
    }


def _of_lazy_loader(file: Path) -> dict[str, str]:
    """Reads `lazy_loader.attach(__name__, submod_attrs={module: [name, ...]})`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "submod_attrs":
            modules = ast.literal_eval(node.value)
            return {name: module for module, names in modules.items() for name in names}
    raise ValueError(f"{file} has no lazy_loader.attach(..., submod_attrs=...).")


def _page(namespace: str, title: str) -> str:
    sections: dict[str, list[str]] = defaultdict(list)
    for name, module in public_names(namespace).items():
        shown = f"{namespace.replace('tnt_jax', 'tnt', 1)}.{name}"
        sections[_section(namespace, module, name)].append(_entry(f"{module}.{name}", shown))
    body = [f"## {heading}\n\n" + "\n".join(sections[heading]) for heading in _ordered(sections)]
    module = ast.parse((ROOT / "tnt_jax" / _folder(namespace) / "__init__.py").read_text())
    return "\n".join([f"# {title}\n\n{ast.get_docstring(module)}\n", *body])


def _section(namespace: str, module: str, name: str) -> str:
    if namespace == "tnt_jax":
        fitting = [title for prefix, title in SECTIONS.items() if module.startswith(prefix)]
        return fitting[0] if fitting else "Other"
    if namespace in {"tnt_jax.models", "tnt_jax.data"}:
        return module.rpartition(".")[2].replace("_", " ").capitalize()
    return "Classes" if name[0].isupper() else "Functions"


def _ordered(headings: Iterable[str]) -> list[str]:
    known = [title for title in dict.fromkeys([*SECTIONS.values(), "Other"]) if title in headings]
    return [*known, *(heading for heading in headings if heading not in known)]


def _entry(path: str, shown: str) -> str:
    label = shown.rpartition(".")[2]
    entry = f"::: tnt_jax.{path}\n    options:\n      heading: {shown}\n      toc_label: {label}\n"
    # Its methods stand in several classes.
    return entry + "      inherited_members: true\n" * (shown == "tnt.Model")
