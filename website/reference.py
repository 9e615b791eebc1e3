"""The pages of the API reference: every public name, from the lists that the package itself reads.

mkdocstrings fills in signatures and docstrings; this file says which names there are, in which
order, and under which heading.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
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
    "train.loops": "Training loops",
    "distributed.optax_gradients": "Gradients",
    "distributed.runtime": "Ranks and processes",
    "distributed.goodput": "The job",
    "distributed.stall": "The job",
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
        entries = sections[_section(namespace, module, name)]
        entries.append(_entry(f"{module}.{name}", shown, level=3))
        if name == "Model":
            entries += [_entry(path, f"tnt.Model.{label}", level=4) for label, path in delegated()]
    body = [f"## {heading}\n\n" + "\n".join(sections[heading]) for heading in _ordered(sections)]
    module = ast.parse((ROOT / "tnt_jax" / _folder(namespace) / "__init__.py").read_text())
    return "\n".join([f"# {title}\n\n{ast.get_docstring(module)}\n", *body])


def delegated() -> Iterator[tuple[str, str]]:
    """Yields the members of `Model` that one of its parts implements, and where each is defined.

    `model.py` writes them `name = method_of("part", Part.method)`,
    `name = AttributeOf[type]("part", Part)` and `name = function`.
    """
    module = ast.parse((ROOT / "tnt_jax/keras_compat/model.py").read_text())
    imports = {name: source for source, name in _imported(module)}
    for statement in _class(module, "Model").body:
        match statement:
            case ast.Assign([ast.Name(label)], ast.Name(name) | ast.Call(_, [ast.Name(name)])):
                if name in imports:
                    yield label, f"{imports[name]}.{name}"
                continue
            case ast.Assign([ast.Name(label)], ast.Call(_, [_, ast.Attribute(ast.Name(kind), n)])):
                name = n
            case ast.Assign([ast.Name(label)], ast.Call(ast.Subscript(), [_, ast.Name(kind)])):
                name = label
            case _:
                continue
        if not label.startswith("_") and _is_documented(imports[kind], kind, name):
            yield label, f"{imports[kind]}.{kind}.{name}"


def _imported(module: ast.Module) -> Iterator[tuple[str, str]]:
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tnt_jax."):
            yield from ((node.module.removeprefix("tnt_jax."), name.name) for name in node.names)


def _class(module: ast.Module, name: str) -> ast.ClassDef:
    found = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name]
    return found[0]


def _is_documented(module: str, part: str, name: str) -> bool:
    """Returns whether a class has a method or property of this name: fields have no docstring."""
    tree = ast.parse((ROOT / "tnt_jax" / f"{module.replace('.', '/')}.py").read_text())
    functions = [n for n in _class(tree, part).body if isinstance(n, ast.FunctionDef)]
    return any(function.name == name for function in functions)


def _section(namespace: str, module: str, name: str) -> str:
    if namespace == "tnt_jax":
        fitting = [title for prefix, title in SECTIONS.items() if module.startswith(prefix)]
        return fitting[0] if fitting else "Other"
    if namespace in {"tnt_jax.models", "tnt_jax.data"}:
        return module.split(".")[1].replace("_", " ").capitalize()
    return "Classes" if name[0].isupper() else "Functions"


def _ordered(headings: Iterable[str]) -> list[str]:
    known = [title for title in dict.fromkeys([*SECTIONS.values(), "Other"]) if title in headings]
    return [*known, *(heading for heading in headings if heading not in known)]


def _entry(path: str, shown: str, *, level: int) -> str:
    label = shown.rpartition(".")[2]
    return (
        f"::: tnt_jax.{path}\n    options:\n      heading: {shown}\n      toc_label: {label}\n"
        f"      heading_level: {level}\n"
    )
