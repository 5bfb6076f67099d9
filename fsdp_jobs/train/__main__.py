"""`python -m fsdp_jobs.train`: what a rank runs when a job names no program of its own."""

import sys

from fsdp_jobs.train.trainer import main

sys.exit(main())
