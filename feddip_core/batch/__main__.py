"""python -m feddip_core.batch"""

import sys

from .command import main

sys.exit(main())
