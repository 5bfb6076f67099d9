"""Define, compose, resolve and validate the configuration of a job."""
