"""`python -m fsdp_jobs`."""

import sys

from fsdp_jobs.cli import main

sys.exit(main())
