"""Preloaded first by an agent's fork server: makes the server die with the agent.

multiprocessing alone keeps a fork server alive for as long as any process it made lives, so the ranks of a
killed agent would train on.
"""

import os

from fsdp_jobs.run.env import AGENT_PID_ENV
from fsdp_jobs.run.processes import die_with_parent

die_with_parent()
if os.getppid() == 1 and os.environ.get(AGENT_PID_ENV) != "1":
    os._exit(1)  # the agent died before the line above
