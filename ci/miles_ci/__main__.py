"""`python -m miles_ci` is `miles-ci`."""

import sys

from miles_ci.cli import main

sys.exit(main())
