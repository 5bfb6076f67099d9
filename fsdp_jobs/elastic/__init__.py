"""Living through failures: a coordinator a job, a torch elastic agent a node, a board between agent and ranks."""
