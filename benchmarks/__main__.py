"""Writes the report of all benchmarks in one command; see `report.py`.

python -m benchmarks --output report
python -m benchmarks --quick
python -m benchmarks --choose-defaults
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

if "--choose-defaults" in sys.argv:
    from choose_defaults import main

    main([word for word in sys.argv[1:] if word != "--choose-defaults"])
else:
    from report import main

    sys.exit(main())
