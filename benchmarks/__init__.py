"""Speed against the machine's limit and against other engines, at real shapes with random weights."""
