"""Show and report runs: report, dashboard, trackers, notifications."""
