"""python -m feddip_core.export"""

import sys

from .command import main

sys.exit(main())
