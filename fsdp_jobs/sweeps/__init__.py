"""List, submit, show and compare the jobs of sweeps."""
