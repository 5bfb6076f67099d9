"""Many jobs as one: their list, what is submitted of it, and the verbs that act on it."""
