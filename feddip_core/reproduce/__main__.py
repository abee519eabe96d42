"""python -m feddip_core.reproduce"""

import sys

from .command import main

sys.exit(main())
