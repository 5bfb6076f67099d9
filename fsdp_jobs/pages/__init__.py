"""What the HTML pages of runs and of sweeps share: skeleton, style, charts of sweeps, and a plan as SVG."""
