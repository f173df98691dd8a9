"""Where a checkpoint looked for an answer: by its decoder's attention, or by what it misses when greyed."""
