"""A run as one HTML file that needs no network, and as pictures for slides."""
