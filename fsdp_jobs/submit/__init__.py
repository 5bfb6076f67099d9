"""From a configuration to a submitted job, and its end. No torch."""
