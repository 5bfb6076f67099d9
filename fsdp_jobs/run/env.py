"""Define every environment variable that connects the processes of a job. No torch."""

from __future__ import annotations

# Set by launchers for the coordinator and the agents.
SUBMISSION_ENV = "FSDP_JOBS_SUBMISSION"  # the id of the submission that they belong to
ATTEMPT_ENV = "FSDP_JOBS_ATTEMPT"
COORDINATOR_ENV = "FSDP_JOBS_COORDINATOR"  # host:port; the coordinator itself needs only the port
ADDRESS_ENV = "FSDP_JOBS_ADDRESS"  # of this node, for the other nodes; unset: its host name
HOST_ENV = "FSDP_JOBS_HOST"  # the machine of a node, if its host name differs (pods)

# Set by an agent for its ranks.
RUN_DIR_ENV = "FSDP_JOBS_RUN_DIR"
ROUND_ENV = "FSDP_JOBS_ROUND"
TERM_ENV = "FSDP_JOBS_TERM"  # the number of the round over all attempts of the run
LAYOUT_ENV = "FSDP_JOBS_LAYOUT"  # JSON of the plan's Layout
PROGRAM_ENV = "FSDP_JOBS_PROGRAM"  # JSON of what a rank executes
AGENT_PID_ENV = "FSDP_JOBS_AGENT_PID"
MEMORY_ENV = "FSDP_JOBS_MEMORY"  # the folder of this node's snapshots, if there are any
RANK_STATE_ENV = "FSDP_JOBS_RANK_STATE"  # the folder of this node's rank states
LOG_ENV = "FSDP_JOBS_LOG"  # this rank's log file
STACKS_ENV = "FSDP_JOBS_STACKS"  # the file that this rank writes its stacks to on STACKS_SIGNAL

# Set by users.
TRACEBACK_ENV = "FSDP_JOBS_TRACEBACK"  # set: bad input is shown with its traceback

# Set for a command of the group `notify`; the rest of its names are in observe/notify.py.
NOTIFY_PREFIX = "FSDP_JOBS_"
