"""What the HTML pages of runs and of sweeps share: skeleton, style, and charts as SVG."""
