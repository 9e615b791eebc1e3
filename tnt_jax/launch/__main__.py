"""Runs the launcher as `python -m tnt_jax.launch`."""

import sys

from tnt_jax.launch.command import main

if __name__ == "__main__":
    sys.exit(main())
