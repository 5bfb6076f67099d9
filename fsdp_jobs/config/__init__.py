"""What a job is: its schema, its composition by Hydra, its validation."""
