"""`python -m fsdp_jobs`."""

import sys

from fsdp_jobs.cli.main import main

sys.exit(main())
