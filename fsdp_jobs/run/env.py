"""Every environment variable through which the processes of a job know each other. No torch."""

from __future__ import annotations

# Set by launchers for the coordinator and the agents.
SUBMISSION_ENV = "FSDP_JOBS_SUBMISSION"  # the id of the submission that they belong to
ATTEMPT_ENV = "FSDP_JOBS_ATTEMPT"
COORDINATOR_ENV = "FSDP_JOBS_COORDINATOR"  # host:port
ADDRESS_ENV = "FSDP_JOBS_ADDRESS"  # of this node, for the others; its host name when unset
HOST_ENV = "FSDP_JOBS_HOST"  # the machine a node is on, where its host name is another (pods)

# Set by an agent for its ranks.
RUN_DIR_ENV = "FSDP_JOBS_RUN_DIR"
ROUND_ENV = "FSDP_JOBS_ROUND"
TERM_ENV = "FSDP_JOBS_TERM"  # the number of the round over all attempts of the run
LAYOUT_ENV = "FSDP_JOBS_LAYOUT"  # JSON of the plan's Layout
PROGRAM_ENV = "FSDP_JOBS_PROGRAM"  # JSON of what a rank executes
AGENT_PID_ENV = "FSDP_JOBS_AGENT_PID"
MEMORY_ENV = "FSDP_JOBS_MEMORY"  # the folder of this node's captures, if there are any
RANK_STATE_ENV = "FSDP_JOBS_RANK_STATE"  # the folder of this node's rank states
LOG_ENV = "FSDP_JOBS_LOG"  # this rank's log file
STACKS_ENV = "FSDP_JOBS_STACKS"  # the file for this rank's stacks, when it is signalled for them

# Set by users.
TRACEBACK_ENV = "FSDP_JOBS_TRACEBACK"  # set: bad input is shown with its traceback

# Set for a command of the group `notify`; the rest of its names are in observe/notify.py.
NOTIFY_PREFIX = "FSDP_JOBS_"
