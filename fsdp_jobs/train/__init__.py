"""The built-in program of ranks. Nothing here imports a launcher."""
