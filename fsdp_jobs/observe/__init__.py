"""Show runs: report, dashboard, trackers, notifications."""
