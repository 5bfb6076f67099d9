"""Show runs and tell of them: report, dashboard, trackers, notifications."""
