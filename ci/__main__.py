"""`python -m ci` is `miles-ci`."""

import sys

from ci.cli import main

sys.exit(main())
