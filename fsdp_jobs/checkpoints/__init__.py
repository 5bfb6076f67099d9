"""Checkpoints: committed whole, verified before they are trusted, loadable at any world size."""
