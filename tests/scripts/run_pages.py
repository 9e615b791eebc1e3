"""Every process runs the blocks of pages of the documentation, in a folder of the job's."""

import os
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from pages import ROOT, run

os.chdir(sys.argv[1])
for name in sys.argv[2:]:
    module = ModuleType(f"page_{name}")
    sys.modules[module.__name__] = module
    run(ROOT / "docs" / f"{name}.md", vars(module))
    print(f"{name} has run", flush=True)
