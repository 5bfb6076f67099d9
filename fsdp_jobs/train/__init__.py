"""What runs in a rank. Nothing here imports a launcher."""
