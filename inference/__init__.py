"""What the entry points share: a checkpoint opened with its processor, and questions put to it."""
