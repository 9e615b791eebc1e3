"""Runs the tests on the oldest and the newest Python and JAX that are supported.

Run `nox`, or `nox -s "tests(oldest)"` for one of them.
"""

import nox

# The lower bounds of pyproject.toml.
OLDEST = [
    "jax==0.10.0",
    "jaxlib==0.10.0",
    "flax==0.12.2",
    "optax==0.2.8",
    "orbax-checkpoint==0.12.0",
    "keras==3.12.0",
]
NEWEST = ["jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "keras"]

nox.options.sessions = ["tests"]


@nox.session(venv_backend="venv")
@nox.parametrize("python, jax", [("3.11", "oldest"), ("3.13", "newest")], ids=["oldest", "newest"])
def tests(session: nox.Session, jax: str) -> None:
    """Runs pytest, with further arguments behind `--`, on one end of the supported versions."""
    versions = OLDEST if jax == "oldest" else ["--upgrade", *NEWEST]
    # One call, so that pip finds versions that go together or says that there are none.
    session.install("--no-compile", "-e", ".[test]", *versions)
    session.run("python", ".ci/versions.py")
    session.run("pytest", *session.posargs)
