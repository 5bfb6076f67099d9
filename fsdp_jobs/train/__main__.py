"""`python -m fsdp_jobs.train`: the program that ranks run when a job names none of its own."""

import sys

from fsdp_jobs.train.trainer import main

sys.exit(main())
